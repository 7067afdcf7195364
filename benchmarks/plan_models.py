"""Decoders as abstract shapes, with the rules by which a mesh splits them: what `benchmarks/plan.py` plans."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import jaxops

Tree = dict[str, Any]
ROWS = ("data", "fsdp")  # the axes that split a batch


class Decoder(NamedTuple):
    """The sizes of a model and of its step.

    Attributes:
      gated: whether the MLP has a gate, as Llama's, or squares what is positive, as the demo's.
      tied: whether one table embeds tokens and scores them.
      vocabulary_parallel: whether the table is split over its words alone, so that no chip gathers it; otherwise FSDP
        splits its features as well.
      remat: "full" keeps the input of each layer; "products" also what the matrix products give.
      offloaded: names in `_block` of what a layer offloads to host memory, in place of computing it again.
      features_split: whether the tensor axis also splits what passes from layer to layer, as MaxText's rules have it.
      parts: of the queries, in attention; a part, of at least 512, sees only the keys up to its last query.
      groups_in_turn: whether attention takes the heads of one key after those of another, so that as little is held at
        once as flash attention holds; where the tensor axis splits no heads.
      average: whether the optimizer is the demo's, which keeps a moving average of the weights.
      weight_dtype: of parameters and of what the optimizer keeps.
    """

    vocabulary: int
    width: int
    depth: int
    heads: int
    kv_heads: int
    head_size: int
    hidden: int
    context: int
    batch: int
    accumulation: int = 1
    gated: bool = True
    tied: bool = False
    vocabulary_parallel: bool = False
    remat: str = "full"
    features_split: bool = False
    parts: int = 4
    groups_in_turn: bool = False
    average: bool = False
    offloaded: tuple[str, ...] = ()
    weight_dtype: Any = jnp.float32

    @property
    def tokens(self) -> int:
        """How many tokens a step has."""
        return self.batch * self.context

    @property
    def parameters(self) -> int:
        """All of them."""
        return sum(leaf.size for leaf in jax.tree.leaves(weights(self)))


# The demo's model at 7 billion parameters: heads have an axis of their own, so that a mesh can split them.
DEMO_7B = Decoder(
    vocabulary=131072,
    width=4096,
    depth=32,
    heads=32,
    kv_heads=32,
    head_size=128,
    hidden=16384,
    context=1024,
    batch=256,
    gated=False,
    tied=True,
    vocabulary_parallel=True,
    average=True,
)


def weights(model: Decoder) -> Tree:
    """The types of the parameters; those of the layers are stacked."""

    def array(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, model.weight_dtype)

    depth, width, size = model.depth, model.width, model.head_size
    blocks = {
        "query": array(depth, width, model.heads, size),
        "key": array(depth, width, model.kv_heads, size),
        "value": array(depth, width, model.kv_heads, size),
        "out": array(depth, model.heads, size, width),
        "mlp_in": array(depth, width, model.hidden),
        "mlp_out": array(depth, model.hidden, width),
    }
    if model.gated:
        blocks["gate"] = array(depth, width, model.hidden)
    table = array(model.vocabulary, width)
    return {"table": table, **({} if model.tied else {"head": table}), "blocks": blocks}


def rules(model: Decoder) -> Tree:
    """How FSDP and tensor parallelism split each parameter."""
    table = P("tensor") if model.vocabulary_parallel else P("tensor", "fsdp")
    blocks = {
        **dict.fromkeys(("query", "key", "value"), P(None, "fsdp", "tensor")),
        "out": P(None, "tensor", None, "fsdp"),
        "mlp_in": P(None, "fsdp", "tensor"),
        "gate": P(None, "fsdp", "tensor"),
        "mlp_out": P(None, "tensor", "fsdp"),
    }
    tables = {"table": table, "head": table}
    types = weights(model)
    return {
        **{name: tables[name] for name in types if name in tables},
        "blocks": {n: blocks[n] for n in types["blocks"]},
    }


def step_of(model: Decoder) -> tuple[Callable[..., Any], tuple[Any, ...], Callable[..., Any]]:
    """The train step, the types of its arguments, and how a mesh splits them."""
    if model.average:
        optimizer = jaxops.ema_adam(3e-4, weight_decay=0.1, ema_decay=0.999)
        update = functools.partial(jaxops.fused_apply, optimizer)
    else:
        optimizer = optax.adamw(3e-4, weight_decay=0.1)
        update = functools.partial(_apply, optimizer)
    grads_of = jax.value_and_grad(functools.partial(_loss, model))

    def step(params: Tree, state: Any, tokens: jax.Array) -> tuple[Tree, Any, jax.Array]:
        if model.accumulation == 1:
            loss, grads = grads_of(params, tokens)
        else:

            def add(total: Any, part: jax.Array) -> tuple[Any, None]:
                return jax.tree.map(jnp.add, total, grads_of(params, part)), None

            parts = tokens.reshape(model.accumulation, -1, tokens.shape[1])
            parts = _split(parts, None, ROWS)
            zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
            (loss, grads), _ = jax.lax.scan(add, zero, parts)
        return *update(grads, state, params), loss

    params = weights(model)
    state = jax.eval_shape(optimizer.init, params)
    tokens = jax.ShapeDtypeStruct((model.batch, model.context + 1), jnp.int32)
    specs = rules(model)
    structure = jax.tree.structure(params)

    def like_params(tree: Any) -> bool:
        return jax.tree.structure(tree) == structure

    state_specs = jax.tree.map(lambda tree: specs if like_params(tree) else P(), state, is_leaf=like_params)
    return jax.jit(step, donate_argnums=(0, 1)), (params, state, tokens), lambda mesh: (specs, state_specs, P(ROWS))


def _apply(optimizer: Any, grads: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def _loss(model: Decoder, params: Tree, tokens: jax.Array) -> jax.Array:
    spec = ("tensor",)
    table, head = (
        _split(params[name].astype(jnp.bfloat16), *spec) for name in ("table", "table" if model.tied else "head")
    )
    x = _split(_rms_norm(jaxops.embedding(table, tokens[:, :-1])), ROWS)
    block = jax.checkpoint(functools.partial(_block, model), policy=_policy(model))
    x, _ = jax.lax.scan(block, x, params["blocks"])
    rows = model.tokens // model.accumulation
    chunks = functools.partial(jaxops.linear_cross_entropy, strategy="grad_in_forward", chunk_rows=max(1, rows // 16))
    return chunks(_split(_rms_norm(x), ROWS), head, tokens[:, 1:])


def _policy(model: Decoder) -> Any:
    """What a layer keeps for its gradient."""
    if model.offloaded:
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=list(model.offloaded),
            offload_src="device",
            offload_dst="pinned_host",
        )
    return {"full": None, "products": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}[model.remat]


def _block(model: Decoder, x: jax.Array, layer: Tree) -> tuple[jax.Array, None]:
    """One layer. FSDP's gathers stand here: each parameter in bfloat16, whole but for the tensor axis."""
    names = {"out": ("tensor",), "mlp_out": ("tensor",)}
    layer = {
        name: _split(weight.astype(jnp.bfloat16), *names.get(name, (None, "tensor"))) for name, weight in layer.items()
    }
    x = checkpoint_name(x, "layer_input")
    normal = _rms_norm(x)
    query, key, value = (
        checkpoint_name(_split(jnp.einsum("bsw,whd->bshd", normal, layer[name]), ROWS, None, "tensor"), name)
        for name in ("query", "key", "value")
    )
    mixed = (_attention_in_turn if model.groups_in_turn else _attention)(query, key, value, model.parts)
    out = checkpoint_name(_passed(model, jnp.einsum("bshd,hdw->bsw", mixed, layer["out"])), "out")
    x = _split(x + out, *_residual(model))
    normal = _rms_norm(x)
    hidden = _split(normal @ layer["mlp_in"], ROWS, None, "tensor")
    hidden = hidden * jax.nn.silu(normal @ layer["gate"]) if model.gated else jnp.square(jax.nn.relu(hidden))
    return _split(x + _passed(model, hidden @ layer["mlp_out"]), *_residual(model)), None


def _residual(model: Decoder) -> tuple[Any, ...]:
    """The axes that split what passes from layer to layer."""
    return (ROWS, None, "tensor") if model.features_split else (ROWS,)


def _passed(model: Decoder, x: jax.Array) -> jax.Array:
    """What a layer adds: split before it is kept for the gradient."""
    return _split(x, *_residual(model)) if model.features_split else x


def _attention(query: jax.Array, key: jax.Array, value: jax.Array, parts_count: int) -> jax.Array:
    """Causal attention, some queries at a time; a gradient computes the scores again, as flash attention does."""
    groups = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, groups, axis=2) for x in (key, value))

    @functools.partial(jax.checkpoint, static_argnums=3)
    def part(query: jax.Array, key: jax.Array, value: jax.Array, start: int) -> jax.Array:
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32) / query.shape[-1] ** 0.5
        seen = jnp.arange(key.shape[1]) <= start + jnp.arange(query.shape[1])[:, None]
        probs = jaxops.softmax(jnp.where(seen, scores, -1e30)).astype(query.dtype)
        return jnp.einsum("bhqk,bkhd->bqhd", probs, value)

    length = query.shape[1]
    size = min(length, max(512, length // parts_count))
    parts = [
        part(query[:, start : start + size], key[:, : start + size], value[:, : start + size], start)
        for start in range(0, length, size)
    ]
    return jnp.concatenate(parts, axis=1)


def _attention_in_turn(query: jax.Array, key: jax.Array, value: jax.Array, parts_count: int) -> jax.Array:
    """Attention of one group of heads after another."""
    groups = query.reshape(*query.shape[:2], key.shape[2], -1, query.shape[-1])

    @jax.checkpoint
    def group(operands: tuple[jax.Array, ...]) -> jax.Array:
        return _attention(*operands, parts_count)

    mixed = jax.lax.map(
        group, (jnp.moveaxis(groups, 2, 0), *(jnp.moveaxis(x, 2, 0)[..., None, :] for x in (key, value)))
    )
    return jnp.moveaxis(mixed, 0, 2).reshape(query.shape)


def _rms_norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


def _split(x: jax.Array, *spec: Any) -> jax.Array:
    """Says over which axes of the mesh the first axes of an array are split."""
    if jax.sharding.get_abstract_mesh().size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, P(*spec))
