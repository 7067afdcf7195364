"""Losses with a derivative of the user's own, `jax.custom_vjp` or `jax.custom_jvp`, keep it when they are rewritten."""

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import rewrite_checks
from heads import cross_entropy_with_logits as rows
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rewrite_checks import assert_alike

import lowering

users_promotion = pytest.fixture(autouse=True)(rewrite_checks.users_promotion)
few_logits_count = pytest.fixture(rewrite_checks.few_logits_count)

CLASSES = 16
TABLE = jax.random.normal(jax.random.key(3), (CLASSES, 8))
X = jax.random.normal(jax.random.key(4), (8, 6, 8))
LABELS = jax.random.randint(jax.random.key(5), (8, 6), 0, CLASSES)
ARGS = TABLE, X, LABELS


def picked(logits: Any, labels: Any) -> Any:
    return jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]


@jax.custom_vjp
def tripled_mean(logits: Any, labels: Any) -> Any:
    """A number for all rows, with three times its gradient, so that another rule than the user's would be noticed."""
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked(logits, labels))


def tripled_backward(kept: Any, cotangent: Any) -> Any:
    logits, labels = kept
    return 3 * cotangent / labels.size * (jax.nn.softmax(logits) - jax.nn.one_hot(labels, CLASSES)), None


tripled_mean.defvjp(lambda logits, labels: (tripled_mean(logits, labels), (logits, labels)), tripled_backward)


@jax.custom_jvp
def doubled(logits: Any, labels: Any, factor: Any) -> Any:
    """Row losses whose rule doubles what comes from the logits; their value in a derivative is the rule's too."""
    return factor * (jax.nn.logsumexp(logits, axis=-1) - picked(logits, labels))


@doubled.defjvp
def doubled_tangents(operands: Any, tangents: Any) -> Any:
    logits, labels, factor = operands
    slope = jax.nn.softmax(logits) - jax.nn.one_hot(labels, CLASSES)
    by_logits = 2 * factor * jnp.sum(slope * tangents[0], -1)
    return doubled(*operands), by_logits + tangents[2] * doubled(logits, labels, jnp.ones(()))


def of_rows(table: Any, x: Any, labels: Any) -> Any:
    logits = jnp.einsum("bsd,vd->bsv", x, table)
    loss, z = rows(logits, jax.nn.one_hot(labels, CLASSES), 1e-2)
    weights = labels != 0
    return jnp.sum(loss * weights) / jnp.sum(weights), jnp.mean(z)


def total(table: Any, x: Any, labels: Any) -> Any:
    return of_rows(table, x, labels)[0]


def mean(table: Any, x: Any, labels: Any) -> Any:
    return tripled_mean(x @ table.T, labels)


def squares(table: Any, x: Any, labels: Any) -> Any:
    return jnp.sum(jnp.sin(doubled(x @ table.T, labels, jnp.float32(0.7))))


def of_next_tokens(table: Any, x: Any, labels: Any) -> Any:
    logits = jnp.einsum("bsd,vd->bsv", x, table)[:, :-1].reshape(-1, CLASSES)
    return jnp.mean(rows(logits, jax.nn.one_hot(labels[:, 1:].reshape(-1), CLASSES), 1e-2)[0])


LOSSES = {"rows": total, "mean": mean, "jvp": squares, "shifted": of_next_tokens}


@pytest.fixture
def few_rows(few_logits_count, monkeypatch) -> None:
    """Eight rows of the batch axis' 48 at a time."""
    few_logits_count(95)
    chunk_sizes = importlib.import_module("jaxops.linear_cross_entropy.chunk_sizes")
    monkeypatch.setattr(chunk_sizes, "rows_of_logits", lambda *_: 8)


def assert_rewritten(fast: Any, *args: Any) -> None:
    assert [one.pattern for one in fast.report(*args).applied] == ["row_cone_sum"]


@pytest.mark.sampled
@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradients_are_those_of_the_users_rule(name: str, few_rows) -> None:
    plain = LOSSES[name]
    fast = lowering.rewrite(plain)
    assert_rewritten(fast, *ARGS)
    assert_alike(fast(*ARGS), plain(*ARGS))
    gradients = [jax.jit(jax.value_and_grad(fn, (0, 1))) for fn in (fast, plain)]
    assert_alike(gradients[0](*ARGS), gradients[1](*ARGS))


def test_an_auxiliary_result_keeps_its_rule(few_rows) -> None:
    fast = lowering.rewrite(of_rows)
    assert_rewritten(fast, *ARGS)
    both = [jax.jit(jax.value_and_grad(fn, has_aux=True))(*ARGS) for fn in (fast, of_rows)]
    assert_alike(*both)


@pytest.mark.parametrize("name", ["rows", "mean"])
def test_second_derivatives_are_those_of_the_users_rule(name: str, few_rows) -> None:
    def curvature(fn: Callable[..., Any]) -> Any:
        return jax.jit(jax.grad(lambda table: jnp.sum(jnp.sin(jax.grad(fn)(table, X, LABELS)))))(TABLE)

    assert_alike(curvature(lowering.rewrite(LOSSES[name])), curvature(LOSSES[name]), 1e-4)


@pytest.mark.long
def test_forward_derivatives_of_a_jvp_are_those_of_the_users_rule(few_rows) -> None:
    def twice(fn: Callable[..., Any]) -> Any:
        def once(table: Any) -> Any:
            return jax.jvp(lambda table: fn(table, X, LABELS), (table,), (TABLE**2,))[1]

        return jax.jvp(once, (TABLE,), (jnp.cos(TABLE),))

    fast = lowering.rewrite(squares)
    assert_rewritten(fast, *ARGS)
    assert_alike(twice(fast), twice(squares), 1e-4)


@pytest.mark.sampled
@pytest.mark.parametrize("name", LOSSES)
def test_batches_of_them_are_those_of_the_users_rule(name: str, few_rows) -> None:
    def batched(fn: Callable[..., Any]) -> Any:
        return jax.jit(jax.vmap(lambda x: jax.value_and_grad(fn)(TABLE, x, LABELS)))(jnp.stack([X, 2 * X]))

    assert_alike(batched(lowering.rewrite(LOSSES[name])), batched(LOSSES[name]))


@pytest.mark.sampled
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", LOSSES)
def test_they_run_on_meshes(name: str, kind: AxisType, few_rows) -> None:
    plain = LOSSES[name]
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        table = jax.device_put(TABLE, NamedSharding(mesh, P()))
        x, labels = (jax.device_put(array, NamedSharding(mesh, P("data"))) for array in (X, LABELS))
        fast = lowering.rewrite(plain)
        assert_rewritten(fast, table, x, labels)
        found = jax.jit(jax.value_and_grad(fast, (0, 1)))(table, x, labels)
    assert_alike(found, jax.value_and_grad(plain, (0, 1))(*ARGS))


@pytest.mark.parametrize("name", ["rows", "jvp"])
def test_inside_of_shard_map_they_are_rewritten_and_around_it_left_alone(name: str, few_rows) -> None:
    plain = LOSSES[name]
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))

    def mapped(fn: Callable[..., Any]) -> Callable[..., Any]:
        def local(*args: Any) -> Any:
            return lax.pmean(fn(*args), "data")

        return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())

    expected = jax.jit(jax.value_and_grad(mapped(plain)))(*ARGS)
    inside = mapped(lowering.rewrite(plain))
    assert "scan" in str(jax.make_jaxpr(inside)(*ARGS))
    assert_alike(jax.jit(jax.value_and_grad(inside))(*ARGS), expected)
    around = lowering.rewrite(mapped(plain))
    report = around.report(*ARGS)
    assert report.applied == ()
    assert any("rewrite the function that is mapped" in one.reason for one in report.refused), report


@pytest.mark.long
@pytest.mark.parametrize("kind", ["divided by the norm of all rows", "added up along rows"])
def test_rules_that_mix_rows_take_another_pass_or_are_left_alone(kind: str, few_rows) -> None:
    @jax.custom_vjp
    def normalized(logits: Any, labels: Any) -> Any:
        return jax.nn.logsumexp(logits, axis=-1) - picked(logits, labels)

    def backward(kept: Any, cotangent: Any) -> Any:
        slope = (jax.nn.softmax(kept[0]) - jax.nn.one_hot(kept[1], CLASSES)) * cotangent[..., None]
        return (
            slope / jnp.linalg.norm(slope) if kind.startswith("divided") else jnp.cumsum(jnp.cumsum(slope, 0), 1)
        ), None

    normalized.defvjp(lambda logits, labels: (normalized(logits, labels), (logits, labels)), backward)

    def plain(table: Any, x: Any, labels: Any) -> Any:
        return jnp.mean(normalized(x @ table.T, labels))

    fast = lowering.rewrite(plain)
    report = fast.report(*ARGS)
    assert [one.pattern for one in report.applied] == ["row_cone"] * kind.startswith("divided")
    assert bool(report.applied) or "is not known to treat all rows alike" in report.refused[0].reason, report
    assert_alike(jax.grad(fast)(*ARGS), jax.grad(plain)(*ARGS))


@jax.custom_vjp
def with_clipped_gradient(array: Any) -> Any:
    """The same array, whose cotangent is clipped, so that gradients are not linear in that of the loss."""
    return array


with_clipped_gradient.defvjp(lambda array: (array, None), lambda _, cotangent: (jnp.clip(cotangent, -0.01, 0.01),))


@jax.custom_vjp
def with_balanced_rows(array: Any) -> Any:
    """The same array, whose cotangent has a share that does not come from the loss."""
    return array


with_balanced_rows.defvjp(lambda array: (array, array), lambda kept, cotangent: (cotangent + 0.01 * kept,))


@pytest.mark.sampled
@pytest.mark.parametrize("change", [with_clipped_gradient, with_balanced_rows], ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("at", ["logits", "rows"])
def test_gradients_that_are_not_linear_in_cotangents_are_not_scaled(at: str, change: Any, few_rows) -> None:
    def plain(table: Any, x: Any, labels: Any) -> Any:
        logits = x @ table.T
        logits = change(logits) if at == "logits" else logits
        loss = jax.nn.logsumexp(logits, axis=-1) - picked(logits, labels)
        return jnp.mean(change(loss) if at == "rows" else loss)

    fast = lowering.rewrite(plain)
    assert [one.pattern for one in fast.report(*ARGS).applied] == ["row_cone" if at == "logits" else "cross_entropy"]
    found = [jax.jit(jax.grad(lambda *args, fn=fn: 30 * fn(*args), (0, 1)))(*ARGS) for fn in (fast, plain)]
    assert_alike(*found)


@jax.custom_jvp
def capped(logits: Any) -> Any:
    """Capped logits by a rule that takes twice their derivative, and their value from the function itself."""
    return 5 * jnp.tanh(logits / 5)


@capped.defjvp
def capped_tangents(operands: Any, tangents: Any) -> Any:
    slope = 1 - jnp.square(jnp.tanh(operands[0] / 5))
    return capped(*operands), 2 * slope * tangents[0]


def test_a_rule_inside_of_a_rule_is_kept_in_second_derivatives(few_rows) -> None:
    @jax.custom_vjp
    def row_losses(logits: Any, labels: Any) -> Any:
        return jax.nn.logsumexp(logits, axis=-1) - picked(logits, labels)

    def backward(kept: Any, cotangent: Any) -> Any:
        return (jax.nn.softmax(kept[0]) - 2 * jax.nn.one_hot(kept[1], CLASSES)) * cotangent[..., None], None

    row_losses.defvjp(lambda logits, labels: (row_losses(logits, labels), (logits, labels)), backward)

    def plain(table: Any, x: Any, labels: Any) -> Any:
        return jnp.mean(row_losses(capped(x @ table.T), labels))

    def curvature(fn: Callable[..., Any]) -> Any:
        return jax.jit(jax.grad(lambda table: jnp.sum(jnp.sin(jax.grad(fn)(table, X, LABELS)))))(TABLE)

    fast = lowering.rewrite(plain)
    assert_rewritten(fast, *ARGS)
    assert_alike(curvature(fast), curvature(plain), 1e-4)


def test_the_logits_of_a_rule_exist_for_some_rows_only(few_rows) -> None:
    shapes = {x.aval.shape for x in _results(jax.make_jaxpr(jax.grad(lowering.rewrite(total)))(*ARGS).jaxpr)}
    assert (*LABELS.shape, CLASSES) not in shapes
    assert (*LABELS.shape, CLASSES) in {x.aval.shape for x in _results(jax.make_jaxpr(jax.grad(total))(*ARGS).jaxpr)}


def _results(jaxpr: Any) -> list[Any]:
    """All that is computed in a jaxpr and in the bodies of its equations."""
    found = []
    for equation in jaxpr.eqns:
        found += equation.outvars
        for param in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(param, "jaxpr", param)
            found += _results(inner) if hasattr(inner, "eqns") else []
    return found
