"""The demo's train step over a mesh of ("data", "vocabulary"): rows of text are split, and so is the embedding table.

Every device embeds and scores with its own rows of the table, so the table, its gradient and its optimizer state are
never gathered. The other parameters are the same on all devices, and their gradients are summed over the data.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxops
from jaxops._demo import corpus, model, train
from jaxops._demo.model import Params
from jaxops._demo.run_folder import RunError

VOCABULARY_PARTS = 2


class Training(NamedTuple):
    """Settings that all processes of a run agree on."""

    settings: train.Settings
    shape: model.Shape
    dropout: float = 0.1


def mesh() -> Mesh:
    """Returns a mesh of all devices of all processes; pairs of them share one vocabulary."""
    parts = math.gcd(jax.device_count(), VOCABULARY_PARTS)
    return jax.make_mesh((jax.device_count() // parts, parts), ("data", "vocabulary"), axis_types=(AxisType.Auto,) * 2)


def require_divisible(training: Training, over: Mesh) -> None:
    """Refuses sizes that the devices cannot share equally."""
    sizes = {"batch": training.settings.batch, "vocabulary": training.shape.vocabulary}
    for (name, size), parts in zip(sizes.items(), over.shape.values(), strict=True):
        if size % parts:
            raise RunError(f"the {name} must be a multiple of the {parts} devices that share it; got {size}")


def parameter_specs(params: Params) -> Any:
    """Returns how the parameters are split: the table by rows, the others not at all."""
    return {name: P("vocabulary") if name == "table" else jax.tree.map(lambda _: P(), params[name]) for name in params}


def formulation(training: Training, key: jax.Array) -> train.Formulation:
    """Returns the train step in the library's operators, on one device's part of the table, with dropout by the key."""
    lookup = functools.partial(jaxops.embedding, vocab_axis="vocabulary")
    return train.operators(training.settings)._replace(
        embedding=lambda table, tokens: jaxops.dropout(key, lookup(table, tokens), training.dropout),
        cross_entropy=functools.partial(
            jaxops.linear_cross_entropy, vocab_axis="vocabulary", strategy="recompute", chunk_rows=train.CHUNK_ROWS
        ),
    )


def loss(training: Training, over: Mesh, specs: Any) -> Callable[[Params, jax.Array, jax.Array], jax.Array]:
    """Returns `loss(params, tokens, step)`, the mean loss of a batch that is split over the data axis."""

    def of_part(params: Params, tokens: jax.Array, step: jax.Array) -> jax.Array:
        # The key follows from the step, so a run that is resumed drops what it would have dropped.
        key = jax.random.fold_in(jax.random.key(training.settings.seed), step)
        key = jax.random.fold_in(key, jax.lax.axis_index("data"))
        part = train.mean_loss(formulation(training, key), training.shape)(params, tokens)
        return jax.lax.pmean(part, "data")

    return jax.shard_map(of_part, mesh=over, in_specs=(specs, P("data"), P()), out_specs=P())


def state_types(training: Training, over: Mesh) -> tuple[Params, Any]:
    """Returns the types of parameters and optimizer state, and where their parts lie."""
    optimizer = train.operators(training.settings)
    params, _, _ = train.step_arguments(optimizer, training.settings, training.shape)
    params = jax.tree.map(functools.partial(_placed, over), params, parameter_specs(params))
    opt_state = optimizer.init(params)
    # What counts steps belongs to no parameter, and is the same everywhere.
    return params, jax.tree.map(
        lambda leaf: leaf if isinstance(leaf.sharding, NamedSharding) else _placed(over, leaf, P()), opt_state
    )


def _placed(over: Mesh, leaf: Any, spec: P) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(over, spec))


def first_state(training: Training, over: Mesh) -> tuple[Params, Any]:
    """Returns parameters and optimizer state before the first step; each device makes its own part."""
    optimizer = train.operators(training.settings)

    def init(key: jax.Array) -> tuple[Params, Any]:
        params = model.init(key, training.shape)
        return params, optimizer.init(params)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, state_types(training, over))
    return jax.jit(init, out_shardings=shardings)(jax.random.key(training.settings.seed))


def compiled_step(training: Training, over: Mesh) -> Any:
    """Compiles `step(params, opt_state, tokens, number) -> (params, opt_state, loss)` for every device at once."""
    params, opt_state = state_types(training, over)
    tokens = jax.ShapeDtypeStruct((training.settings.batch, training.shape.context + 1), np.int32)
    number = jax.ShapeDtypeStruct((), np.int32)
    of_batch = loss(training, over, parameter_specs(params))
    step = train.step_of(of_batch, train.operators(training.settings).update)
    state = jax.tree.map(lambda leaf: leaf.sharding, (params, opt_state))
    everywhere = NamedSharding(over, P())
    jitted = jax.jit(
        step,
        in_shardings=(*state, NamedSharding(over, P("data")), everywhere),
        out_shardings=(*state, everywhere),
        donate_argnums=(0, 1),
    )
    return jitted.lower(params, opt_state, tokens, number).compile()


def batch(training: Training, over: Mesh, text: np.ndarray, number: int) -> tuple[jax.Array, jax.Array]:
    """Returns a step's windows and its number: they follow from the seed and the number, and from nothing before."""
    settings, length = training.settings, training.shape.context + 1
    draw = np.random.default_rng((settings.seed, number))
    rows = corpus.windows(text, draw.integers(0, len(text) - length, settings.batch), length)
    return _spread(over, P("data"), rows), _spread(over, P(), np.int32(number))


def _spread(over: Mesh, spec: P, value: Any) -> jax.Array:
    """Splits a value that every process holds over the devices."""
    value = np.asarray(value)
    return jax.make_array_from_callback(value.shape, NamedSharding(over, spec), lambda index: value[index])
