"""Rewritten functions behave like those they are made of: under transformations, on meshes, with any arguments."""

import pickle
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rewrite_checks
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from patterns_planted import W, X, Y
from rewrite_checks import ARGS, arrays_like, assert_alike, loss

import lowering
from lowering.rewriting import ordering
from lowering.source_lines import Site

users_promotion = pytest.fixture(autouse=True)(rewrite_checks.users_promotion)
few_logits_count = pytest.fixture(rewrite_checks.few_logits_count)


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


def test_what_a_function_closes_over_is_differentiated(few_logits_count) -> None:
    few_logits_count(95)
    w, x, y = ARGS
    assert lowering.rewrite(lambda x: loss(w, x, y)).report(x).applied

    def gradient(rewrite: Callable[..., Any]) -> Any:
        return jax.grad(lambda w: rewrite(lambda x: loss(w, w.sum() * x, y))(x))(w)

    assert_alike(gradient(lowering.rewrite), gradient(lambda fn: fn))


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
    assert [(one.pattern, one.count) for one in report.applied] == [("cross_entropy_sum", 1)] * 3
    assert_alike(lowering.rewrite(inside)(*ARGS), inside(*ARGS))


def deep_loss(w: Any, x: Any, y: Any) -> Any:
    """A loss among many equations, some of them in functions of JAX that are called again and again."""
    for _ in range(4):
        x = jax.nn.gelu(jax.nn.silu(x) * 1.5) + jnp.flip(x, 0)
    return loss(w, x, y) + jnp.sum(jax.nn.gelu(w) * jax.nn.silu(w) - jnp.tanh(w) / jnp.cosh(w)) ** 2


@pytest.mark.long
def test_what_stays_as_it_is_becomes_calls(few_logits_count) -> None:
    few_logits_count(95)
    jaxpr = jax.make_jaxpr(lowering.rewrite(deep_loss))(*ARGS)
    (call,) = [equation.params["jaxpr"].jaxpr for equation in jaxpr.eqns if equation.params.get("name") == "unchanged"]
    plain = jax.make_jaxpr(deep_loss)(*ARGS)
    lines, all_lines = ({Site(x.source_info.traceback).line for x in each.eqns} for each in (call, plain.jaxpr))
    assert lines == all_lines
    assert len(lines) == 3
    for transform in (jax.jit, lambda fn: jax.jit(jax.value_and_grad(fn, (0, 1))), TRANSFORMED["scan"]):
        assert_alike(transform(lowering.rewrite(deep_loss))(*ARGS), transform(deep_loss)(*ARGS))


@pytest.mark.slow
def test_calls_are_not_compiled_where_arrays_are_computed_at_once(few_logits_count, monkeypatch) -> None:
    few_logits_count(95)
    monkeypatch.setattr(ordering, "_bind_call", None)
    for name in ("eager", "grad", "vmap"):
        assert_alike(TRANSFORMED[name](lowering.rewrite(deep_loss))(*ARGS), TRANSFORMED[name](deep_loss)(*ARGS))
    with jax.disable_jit():
        jaxpr = jax.make_jaxpr(lowering.rewrite(deep_loss))(*ARGS)
    assert_alike(jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *ARGS), [deep_loss(*ARGS)])


@pytest.mark.sampled
@pytest.mark.parametrize("of_labels", [P("data"), P()], ids=["labels split", "labels whole"])
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
def test_rewritten_functions_run_on_meshes(kind, of_labels, few_logits_count) -> None:
    few_logits_count(127)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    w, x, y = arrays_like((W, jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.int32)))
    expected = jax.value_and_grad(loss, (0, 1))(w, x, y)
    with jax.set_mesh(mesh):
        w = jax.device_put(w, NamedSharding(mesh, P()))
        x, y = (jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in ((x, P("data")), (y, of_labels)))
        fast = lowering.rewrite(loss)
        assert len(fast.report(w, x, y).applied) == 1
        assert_alike(jax.jit(jax.value_and_grad(fast, (0, 1)))(w, x, y), expected)


def test_functions_are_rewritten_inside_of_shard_map_and_around_it(few_logits_count) -> None:
    few_logits_count(63)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    args = arrays_like((W, jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.int32)))

    def outside(fn: Callable[..., Any]) -> Callable[..., Any]:
        def local(w, x, y):
            return lax.pmean(fn(w, x, y), "data")

        return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())

    around = lowering.rewrite(outside(loss))
    assert [one.pattern for one in around.report(*args).applied] == ["cross_entropy_sum"]
    expected = jax.jit(jax.grad(outside(loss)))(*args)
    for fast in (outside(lowering.rewrite(loss)), around):
        assert_alike(jax.jit(jax.grad(fast))(*args), expected)


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
    assert report.applied == ()
    assert [one.detail for one in report.refused] == ["96 logits float32[6,16]"]
    assert str(lowering.rewrite(jnp.sum).report(X)) == "nothing to rewrite"


class Classifier(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(8, 16, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(self.dropout(self.norm(x)))


@pytest.mark.long
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


def test_modules_of_nnx_that_change_must_be_arguments() -> None:
    norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"^lowering.rewrite: fn must take the modules of Flax NNX that it changes"):
        lowering.rewrite(lambda x: norm(x).sum())(jnp.ones((2, 4)))


named = lowering.rewrite(loss, off="max_pool")


@lowering.rewrite
def decorated(x):
    return jnp.sum(x)


@pytest.mark.parametrize(("fn", "args"), [(named, ARGS), (decorated, ARGS[:1])], ids=["named", "decorated"])
def test_rewritten_functions_can_be_pickled(fn, args, few_logits_count) -> None:
    restored = pickle.loads(pickle.dumps(fn))
    assert restored(*args) == fn(*args)
    assert restored.report(*args) == fn.report(*args)
