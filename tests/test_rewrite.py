"""Users' functions are rewritten to the same values and gradients, or left alone with a reason."""

import importlib
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from patterns_clean import CLEAN
from patterns_planted import PLANTED, W, X, Y
from rewritten_models import LABELS, MODELS
from rewritten_models import X as INPUTS
from typer.testing import CliRunner

import lowering
from jaxops.__main__ import app


@pytest.fixture(autouse=True)
def _users_promotion() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def few_logits_count(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets arrays of more elements than a number count as logits that are worth a rewrite."""

    def least(size: int) -> None:
        row_chunks = importlib.import_module("jaxops.linear_cross_entropy.row_chunks")
        monkeypatch.setattr(row_chunks, "SMALL_LOGITS", size)
        monkeypatch.setattr(row_chunks, "default_chunk_rows", lambda *_: 0)

    return least


# What `jax.grad` has made of a loss is only rewritten where all of it can be computed in chunks.
ALREADY_DIFFERENTIATED = {
    "gradient_of_the_log_of_picked_probabilities": 0,
    "gradient_of_jit_and_checkpoint": 0,
    "gradient_of_scan": 0,
    "gradient_of_scanned_checkpoints": 0,
    "flax_linen_head_in_lifted_transforms": 0,
}
# A pooling and its gradient.
TWO = {name: 2 for name, (_, _, replacement, _) in PLANTED.items() if replacement == "jaxops.max_pool"}
# Dropout draws other bits, so it is rewritten only on demand.
DROPOUTS = {name: 0 for name, (_, _, replacement, _) in PLANTED.items() if replacement == "jaxops.dropout"}
COUNTS = dict.fromkeys(PLANTED, 1) | ALREADY_DIFFERENTIATED | TWO | DROPOUTS
# The forward pass of a pooling alone.
CLEAN_COUNTS = dict.fromkeys(CLEAN, 0) | {"pooling_without_a_gradient": 1}


@pytest.mark.sampled
@pytest.mark.parametrize("name", COUNTS)
def test_as_many_patterns_as_were_planted_are_rewritten(name: str, few_logits_count) -> None:
    few_logits_count(0)
    fn, args = PLANTED[name][:2]
    report = lowering.rewrite(fn).report(*args)
    assert len(report.applied) == COUNTS[name], report


@pytest.mark.sampled
@pytest.mark.parametrize("name", CLEAN_COUNTS)
def test_clean_functions_are_left_alone(name: str, few_logits_count) -> None:
    few_logits_count(0)
    fn, args = CLEAN[name]
    assert len(lowering.rewrite(fn).report(*args).applied) == CLEAN_COUNTS[name]


def arrays_like(tree: Any) -> Any:
    rng = np.random.default_rng(0)

    def array(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        is_integer = jnp.issubdtype(leaf.dtype, jnp.integer)
        return jnp.asarray(rng.integers(0, 4, leaf.shape) if is_integer else rng.normal(size=leaf.shape), leaf.dtype)

    return jax.tree.map(array, tree)


def assert_alike(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(one, float), np.asarray(other, float), rtol=tolerance, atol=tolerance)


@pytest.mark.sampled
@pytest.mark.parametrize("name", [name for name, count in COUNTS.items() if count])
def test_what_was_planted_is_rewritten_to_the_same(name: str, few_logits_count) -> None:
    few_logits_count(0)
    fn, args = PLANTED[name][0], arrays_like(PLANTED[name][1])
    # Plain JAX rounds logits to 16 bits, which the operators do not.
    tolerance = 1e-3 if name == "sixteen_bits" else 2e-5
    assert_alike(jax.jit(lowering.rewrite(fn))(*args), jax.jit(fn)(*args), tolerance)


@pytest.mark.sampled
@pytest.mark.parametrize("name", MODELS)
def test_models_of_other_people_are_rewritten(name: str, few_logits_count) -> None:
    few_logits_count(95)
    fn, params, rule = MODELS[name]
    assert [one.pattern for one in lowering.rewrite(fn).report(params, INPUTS, LABELS).applied] == [rule]


@pytest.mark.sampled
@pytest.mark.parametrize("name", MODELS)
def test_models_of_other_people_learn_the_same(name: str, few_logits_count) -> None:
    few_logits_count(95)
    fn, params, _ = MODELS[name]
    moving, static = eqx.partition(params, eqx.is_inexact_array)

    def gradients(fn: Callable[..., Any]) -> Any:
        def loss(moving: Any, x: Any) -> Any:
            results = fn(eqx.combine(moving, static), x, LABELS)
            return results if isinstance(results, tuple) else (results, None)

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(moving, INPUTS)

    assert_alike(gradients(lowering.rewrite(fn)), gradients(fn))


def loss(w: Any, x: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(x @ w, labels).mean()  # here


ARGS = arrays_like((W, X, Y))

TRANSFORMED: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "eager": lambda fn: fn,
    "grad": lambda fn: jax.grad(fn, (0, 1)),
    "jvp of grad": lambda fn: lambda w, x, y: jax.jvp(jax.grad(lambda w: fn(w, x, y)), (w,), (w,)),
    "jit of grad": lambda fn: jax.jit(jax.grad(fn, (0, 1))),
    "grad of jit": lambda fn: jax.grad(jax.jit(fn), (0, 1)),
    "grad of checkpoint": lambda fn: jax.grad(jax.checkpoint(fn), (0, 1)),
    "vmap": lambda fn: lambda w, x, y: jax.vmap(fn, (None, 0, 0))(w, jnp.stack([x, 2 * x]), jnp.stack([y, y])),
    "scan": lambda fn: lambda w, x, y: lax.scan(lambda c, _: (c + fn(w, x, y), None), 0.0, None, length=2)[0],
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", TRANSFORMED)
def test_rewritten_functions_can_be_transformed(name: str, few_logits_count) -> None:
    few_logits_count(95)
    transform = TRANSFORMED[name]
    assert_alike(transform(lowering.rewrite(loss))(*ARGS), transform(loss)(*ARGS))


def test_what_is_around_and_inside_of_transformations_is_kept(few_logits_count) -> None:
    few_logits_count(95)

    @jax.jit
    def inside(w, x, labels):
        part = jax.checkpoint(
            lambda w, rows: optax.softmax_cross_entropy_with_integer_labels(rows[0] @ w, rows[1]).sum()
        )
        total = lax.scan(lambda c, rows: (c + part(w, rows), None), 0.0, (x[None], labels[None]))[0]
        total = lax.cond(total > 0, lambda: 2 * total + loss(w, x, labels), lambda: total)
        return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] + loss(w, x, labels)), (0, total))[1]

    report = lowering.rewrite(inside).report(*ARGS)
    assert [(one.pattern, one.count) for one in report.applied] == [("cross_entropy", 1)] * 3
    assert_alike(lowering.rewrite(inside)(*ARGS), inside(*ARGS))


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
def test_rewritten_functions_run_on_meshes(kind, few_logits_count) -> None:
    few_logits_count(127)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    w, x, y = arrays_like((W, jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.int32)))
    expected = jax.value_and_grad(loss, (0, 1))(w, x, y)
    with jax.set_mesh(mesh):
        w = jax.device_put(w, NamedSharding(mesh, P()))
        x, y = (jax.device_put(array, NamedSharding(mesh, P("data"))) for array in (x, y))
        fast = lowering.rewrite(loss)
        assert len(fast.report(w, x, y).applied) == 1
        assert_alike(jax.jit(jax.value_and_grad(fast, (0, 1)))(w, x, y), expected)


def test_rewritten_functions_run_inside_of_shard_map(few_logits_count) -> None:
    few_logits_count(63)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    args = arrays_like((W, jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.int32)))
    fast = lowering.rewrite(loss)

    def outside(fn: Callable[..., Any]) -> Callable[..., Any]:
        def local(w, x, y):
            return lax.pmean(fn(w, x, y), "data")

        return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())

    assert_alike(jax.jit(jax.grad(outside(fast)))(*args), jax.jit(jax.grad(outside(loss)))(*args))


def test_pytrees_statics_and_keywords_stay_what_they_are(few_logits_count) -> None:
    few_logits_count(95)

    @lowering.rewrite
    def step(params: dict[str, Any], batch: tuple[Any, ...], *, mode: str, times: int) -> dict[str, Any]:
        """Says what it does."""
        assert isinstance(times, int)
        assert isinstance(batch[1], np.ndarray)
        value = loss(params["w"], batch[0], batch[1])
        return {"loss": value * times, "mode": mode, "nothing": None, "number": 3}

    results = step({"w": ARGS[0]}, (ARGS[1], np.asarray(ARGS[2])), mode="train", times=2)
    assert (results["mode"], results["nothing"], results["number"]) == ("train", None, 3)
    assert_alike(results["loss"], 2 * loss(*ARGS))
    assert (step.__name__, step.__doc__) == ("step", "Says what it does.")


def test_methods_are_bound(few_logits_count) -> None:
    few_logits_count(95)

    class Model(eqx.Module):
        weight: jax.Array

        @lowering.rewrite
        def loss(self, x, labels):
            return loss(self.weight, x, labels)

    assert_alike(Model(ARGS[0]).loss(*ARGS[1:]), loss(*ARGS))


def test_prints_keep_their_order_and_labels_wait_for_none(few_logits_count, capfd) -> None:
    few_logits_count(95)

    def printing(w, x, labels):
        jax.debug.print("before", ordered=True)
        logits = x @ w
        lse = jax.nn.logsumexp(logits, axis=-1)
        jax.debug.print("between {}", lse.shape[0], ordered=True)
        return (lse - jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]).mean()

    fast = lowering.rewrite(printing)
    assert len(fast.report(*ARGS).applied) == 1
    jax.block_until_ready(jax.jit(fast)(*ARGS))
    jax.effects_barrier()
    assert capfd.readouterr().out.split() == ["before", "between", "6"]


def test_a_function_with_nothing_to_rewrite_is_called_itself() -> None:
    args = arrays_like((W, X, Y))
    assert lowering.rewrite(loss)(*args) == loss(*args)
    report = lowering.rewrite(loss).report(*args)
    assert (report.applied, report.refused) == ((), ())
    assert str(report) == "nothing to rewrite"


class Classifier(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(8, 16, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(self.dropout(self.norm(x)))


def test_state_of_nnx_modules_changes_as_before(few_logits_count) -> None:
    few_logits_count(95)

    def module_loss(model: Classifier, x: Any, labels: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(model(x), labels).mean()

    def trained(fn: Callable[..., Any]) -> Any:
        model = Classifier(nnx.Rngs(0))
        values = [nnx.value_and_grad(fn)(model, *ARGS[1:]) for _ in range(2)]
        return [jax.tree.leaves(values), model.norm.mean[...], model.dropout.rngs.count[...]]

    fast = lowering.rewrite(module_loss)
    assert len(fast.report(Classifier(nnx.Rngs(0)), *ARGS[1:]).applied) == 1
    assert_alike(trained(fast), trained(module_loss))


def returned(w, x, labels):
    logits = x @ w  # here
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), jax.nn.softmax(logits)


def differentiated_maximum(w, x, labels):
    logits = x @ w  # here
    confidence = jnp.max(logits, axis=-1)
    return (optax.softmax_cross_entropy_with_integer_labels(logits, labels) + confidence).mean()


@jax.custom_vjp
def with_its_own_gradient(w, x, labels):
    return loss(w, x, labels)


with_its_own_gradient.defvjp(lambda *args: (loss(*args), args), lambda args, g: (args[0] * g, args[1] * g, None))


REFUSED = {
    returned: "are returned",
    with_its_own_gradient: "a derivative of its own",
}


@pytest.mark.parametrize("fn", REFUSED, ids=lambda fn: fn.__name__)
def test_what_is_left_alone_has_a_reason(fn, few_logits_count) -> None:
    few_logits_count(95)
    report = lowering.rewrite(fn).report(*ARGS)
    assert report.applied == ()
    assert any(REFUSED[fn] in one.reason for one in report.refused), report


def test_a_maximum_that_is_differentiated_is_computed_with_the_users_equations(few_logits_count) -> None:
    few_logits_count(95)
    fast = lowering.rewrite(differentiated_maximum)
    assert [one.pattern for one in fast.report(*ARGS).applied] == ["row_cone"]
    assert_alike(jax.grad(fast)(*ARGS), jax.grad(differentiated_maximum)(*ARGS))


def test_the_gradient_of_a_loss_is_computed_in_chunks(few_logits_count) -> None:
    few_logits_count(95)
    gradient = jax.value_and_grad(loss, (0, 1))
    fast = lowering.rewrite(gradient)
    assert [one.pattern for one in fast.report(*ARGS).applied] == ["row_cone"]
    assert_alike(jax.jit(fast)(*ARGS), gradient(*ARGS))


def test_a_head_inside_of_a_checkpoint_is_read_with_the_loss_behind_it(few_logits_count) -> None:
    few_logits_count(95)

    class Head(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(16)(jnp.tanh(nn.Dense(8)(x)))

    head = nn.jit(nn.remat(Head))()
    params = head.init(jax.random.key(0), ARGS[1])

    def of_head(params, x, labels):
        return optax.softmax_cross_entropy_with_integer_labels(head.apply(params, x), labels).mean()

    fast = lowering.rewrite(of_head)
    assert [one.pattern for one in fast.report(params, *ARGS[1:]).applied] == ["cross_entropy"]
    assert_alike(jax.grad(fast)(params, *ARGS[1:]), jax.grad(of_head)(params, *ARGS[1:]))


def test_labels_out_of_range_give_the_same(few_logits_count) -> None:
    few_logits_count(95)
    labels = jnp.array([0, 15, -1, -16, 16, -100])
    for pick in (
        lambda z, y: jnp.take_along_axis(z, y[:, None], 1)[:, 0],
        lambda z, y: z[jnp.arange(6), y],
        lambda z, y: jnp.sum(jax.nn.one_hot(y, 16) * z, -1),
    ):

        def rows(w, x, y, pick=pick):
            return -pick(jax.nn.log_softmax(x @ w), y)

        def kept(fn: Callable[..., Any]) -> Callable[..., Any]:
            return lambda w: jnp.nansum(jnp.where(labels < 0, 0.5, 1) * fn(w, ARGS[1], labels))

        fast = lowering.rewrite(rows)
        assert len(fast.report(*ARGS).applied) == 1
        np.testing.assert_allclose(fast(*ARGS[:2], labels), rows(*ARGS[:2], labels), rtol=1e-5, atol=1e-6)
        assert_alike(jax.grad(kept(fast))(ARGS[0]), jax.grad(kept(rows))(ARGS[0]))


def test_sixteen_bits_are_no_worse_than_before(few_logits_count) -> None:
    few_logits_count(4095)
    w, x = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(((32, 64), (64, 32))))
    labels = jnp.arange(64) % 64
    exact = np.asarray(
        jax.jit(jax.grad(loss))(w.astype(jnp.bfloat16).astype(float), x.astype(jnp.bfloat16).astype(float), labels)
    )
    errors = []
    for fn in (loss, lowering.rewrite(loss)):
        found = jax.jit(jax.grad(fn))(w.astype(jnp.bfloat16), x.astype(jnp.bfloat16), labels)
        errors.append(np.abs(np.asarray(found, float) - exact).max())
    assert errors[1] <= errors[0] * 1.1


def test_patterns_are_switched_by_name(few_logits_count) -> None:
    few_logits_count(95)
    assert lowering.rewrite(loss, off="cross_entropy").report(*ARGS).applied[0].pattern == "row_cone"
    assert lowering.rewrite(loss, only=("max_pool",)).report(*ARGS).applied == ()
    with pytest.raises(ValueError, match=r"lowering.rewrite: only must name patterns, of .*; got 'cross'"):
        lowering.rewrite(loss, only="cross")
    with pytest.raises(TypeError, match="fn must be a function"):
        lowering.rewrite(3)


def test_report_is_shown_and_written() -> None:
    shapes = jax.ShapeDtypeStruct((512, 32000), jnp.float32), jax.ShapeDtypeStruct((2048, 512), jnp.float32)
    report = lowering.rewrite(loss).report(*shapes, jax.ShapeDtypeStruct((2048,), jnp.int32))
    (one,) = report.applied
    assert one.source.startswith("test_rewrite.py:")
    assert one.source.endswith("(loss)")
    assert one.saved_bytes == 262_144_000 - 524 * 32000 * 4 * 5 // 4
    assert "cross_entropy" in str(report)
    assert json.loads(report.to_json())["applied"][0]["pattern"] == "cross_entropy"
    assert Path(__file__).name in str(report)


@pytest.mark.parametrize(
    ("window", "strides", "padding"),
    [((3, 3), (2, 2), "SAME"), ((2, 2), (2, 2), "VALID"), ((3, 2), (1, 2), ((1, 2), (1, 0)))],
    ids=["same", "valid", "pairs"],
)
def test_pooling_has_the_same_bits(window, strides, padding) -> None:
    x = jax.random.normal(jax.random.key(0), (2, 9, 8, 3))

    def pooled(x):
        return nn.max_pool(x, window, strides, padding)

    fast = lowering.rewrite(pooled)
    assert [one.pattern for one in fast.report(x).applied] == ["max_pool"]
    np.testing.assert_array_equal(fast(x), pooled(x))
    assert_alike(jax.grad(lambda x: jnp.sum(fast(x) ** 2))(x), jax.grad(lambda x: jnp.sum(pooled(x) ** 2))(x))


LOOKUPS = {
    "indexing": lambda table, ids: table[ids],
    "take": lambda table, ids: jnp.take(table, ids, axis=0),
    "clip": lambda table, ids: table.at[ids].get(mode="clip"),
    "one-hot": lambda table, ids: jax.nn.one_hot(ids, 16) @ table,
    "flax": lambda table, ids: nn.Embed(16, 4).apply({"params": {"embedding": table}}, ids),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups_give_the_same_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("jaxops.embedding.rewrites"), "LEAST_ELEMENTS", 0)
    table, ids = jax.random.normal(jax.random.key(0), (16, 4)), jnp.array([[0, 3, 15], [-1, 17, -20]])
    lookup = LOOKUPS[name]
    fast = lowering.rewrite(lookup)
    assert [one.pattern for one in fast.report(table, ids).applied] == ["embedding"]
    np.testing.assert_array_equal(fast(table, ids), lookup(table, ids))

    def gradient(fn: Callable[..., Any]) -> Any:
        return jax.grad(lambda table: jnp.nansum(jnp.sin(fn(table, ids))))(table)

    assert_alike(gradient(fast), gradient(lookup))


def test_dropout_is_rewritten_where_it_is_asked_for() -> None:
    def dropped(key, x):
        return nn.Dropout(0.25, deterministic=False).apply({}, x, rngs={"dropout": key})

    def of_other_numbers(key, x):
        return jnp.where(jax.random.uniform(key, x.shape, minval=0.5) < 0.9, x / 0.9, 0)

    key, x = jax.random.key(0), jnp.ones((100, 100))
    assert lowering.rewrite(dropped).report(key, x).applied == ()
    assert lowering.rewrite(of_other_numbers, only="dropout").report(key, x).applied == ()
    fast = lowering.rewrite(dropped, only="dropout")
    assert [one.pattern for one in fast.report(key, x).applied] == ["dropout"]
    y = np.asarray(jax.jit(fast)(key, x))
    np.testing.assert_allclose(np.unique(y), [0, 1 / 0.75], rtol=1e-6)
    assert abs((y != 0).mean() - 0.75) < 0.02


def test_command_rewrites_before_it_explains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "head.py").write_text("from typing import Any\nimport optax\n\n" + inspect.getsource(loss))
    monkeypatch.chdir(tmp_path)
    arguments = ("--arg", "f32[64,32000]", "--arg", "f32[1024,64]", "--arg", "i32[1024]")
    result = CliRunner().invoke(app, ["explain", "head.py:loss", "--rewrite", *arguments])
    assert "cross_entropy" in result.stdout
    assert "linear_cross_entropy" in result.stdout
    plain = CliRunner().invoke(app, ["explain", "head.py:loss", *arguments])
    assert "`lowering.rewrite` would do this (cross_entropy)" in plain.stdout
    record = json.loads(CliRunner().invoke(app, ["explain", "head.py:loss", "--rewrite", "--json", *arguments]).stdout)
    assert record["rewrite"]["applied"][0]["source"] == "head.py:5 (loss)"
    exported = CliRunner().invoke(app, ["export", "head.py:loss", "--rewrite", "--output", "head.bin", *arguments])
    assert "linear_cross_entropy" in exported.stdout
