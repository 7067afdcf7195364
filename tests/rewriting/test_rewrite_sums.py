"""Losses that are sums of cross entropies have their gradients computed with the logits; all others do not."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rewrite_checks
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lowering
from lowering.cost import inner_jaxprs

users_promotion = pytest.fixture(autouse=True)(rewrite_checks.users_promotion)
few_logits_count = pytest.fixture(rewrite_checks.few_logits_count)

ROWS, FEATURES, CLASSES = 6, 4, 7
MASKED = np.array([0, -100, 2, -100, 1, 5])


def cross_entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def picked(logits: Any, labels: Any) -> Any:
    return jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]


def masked(losses: Any, labels: Any) -> Any:
    return jnp.where(labels != -100, losses, 0).sum() / (labels != -100).sum()


def log_sum_exp_less_one_hot(logits: Any, labels: Any) -> Any:
    return jax.nn.logsumexp(logits, axis=-1) - jnp.einsum("bv,bv->b", jax.nn.one_hot(labels, CLASSES), logits)


def forbidden_label(z: Any, a: dict[str, Any]) -> Any:
    z = jnp.where(jnp.arange(CLASSES) < CLASSES - 2, z, -jnp.inf)
    return jnp.where(a["labels"] < CLASSES - 2, jax.nn.logsumexp(z, axis=-1) - picked(z, a["labels"]), 0).sum()


def focal_with_stopped_weights(z: Any, a: dict[str, Any]) -> Any:
    log_probs = picked(jax.nn.log_softmax(z), a["labels"])
    return -jnp.sum(lax.stop_gradient((1 - jnp.exp(log_probs)) ** 2) * log_probs)


def with_accuracy(z: Any, a: dict[str, Any]) -> Any:
    accuracy = jnp.mean(jnp.argmax(z, axis=-1) == a["labels"])
    return cross_entropy(z, a["labels"]).mean() + 0.0 * accuracy + lax.stop_gradient(accuracy)


def scanned(z: Any, a: dict[str, Any], wrap: Callable[..., Any] = lambda fn: fn) -> Any:
    part = wrap(lambda x, labels: cross_entropy(x @ a["weight"], labels).sum())
    rows = jnp.stack([a["x"], 2 * a["x"]]), jnp.stack([a["labels"], a["labels"]])
    return lax.scan(lambda total, each: (total + part(*each), None), 0.0, rows)[0]


# Losses of the logits z.
SUMS: dict[str, Callable[..., Any]] = {
    "labels that are none, masked": lambda z, a: masked(cross_entropy(z, a["masked"]), a["masked"]),
    "labels that are none": lambda z, a: cross_entropy(z, a["masked"]).mean(),
    "indexing by labels that are none, masked": lambda z, a: masked(
        jax.nn.logsumexp(z, axis=-1) - z[jnp.arange(ROWS), a["masked"]], a["masked"]
    ),
    "one-hot labels that are none": lambda z, a: jnp.mean(a["row"] * log_sum_exp_less_one_hot(z, a["masked"])),
    "labels of forbidden classes, masked": forbidden_label,
    "accuracy beside it": with_accuracy,
    "sums apart": lambda z, a: (
        (jax.nn.logsumexp(z, axis=-1) * a["row"]).sum() - (picked(z, a["labels"]) * a["row"]).sum()
    ),
    "weights that are learned": lambda z, a: jnp.sum(cross_entropy(z, a["labels"]) * a["x"][:, 0]) * a["weight"].sum(),
    "weights of classes": lambda z, a: (
        (cross_entropy(z, a["labels"]) * a["class"][a["labels"]]).sum() / a["class"][a["labels"]].sum()
    ),
    "the same logits twice": lambda z, a: cross_entropy(z, a["labels"]).mean() + cross_entropy(z, a["labels"]).sum(),
    "smoothed labels": lambda z, a: optax.softmax_cross_entropy(
        z, optax.smooth_labels(jax.nn.one_hot(a["labels"], CLASSES), 0.1)
    ).mean(),
    "any targets": lambda z, a: -jnp.sum(a["soft"] * jax.nn.log_softmax(z)),
    "labels and targets": lambda z, a: jnp.mean(
        cross_entropy(z, a["labels"]) - jnp.sum(a["soft"] * jax.nn.log_softmax(z), axis=-1)
    ),
    "squares": lambda z, a: jnp.mean(cross_entropy(z, a["labels"]) + a["row"] * jax.nn.logsumexp(z, axis=-1) ** 2),
    "temperatures of rows": lambda z, a: cross_entropy(z * a["row"][:, None], a["labels"]).sum(),
    "a mask behind a temperature": lambda z, a: cross_entropy(
        jnp.where(jnp.arange(CLASSES) < CLASSES - 1, z / 1.3, -1e9), a["labels"] % (CLASSES - 1)
    ).sum(),
    "a temperature behind a bias": lambda z, a: cross_entropy((z + a["class"]) / 1.3, a["labels"]).sum(),
    "sums that change with a rise": lambda z, a: jax.nn.logsumexp(z, axis=-1).sum() - 2 * picked(z, a["labels"]).sum(),
    "rises that cancel in other rows": lambda z, a: (
        2 * jax.nn.logsumexp(z, axis=-1)[:3].sum() - picked(z, a["labels"]).sum()
    ),
    "targets with any sum": lambda z, a: jnp.mean(jax.nn.logsumexp(z, axis=-1) - jnp.sum(a["soft"] * z, axis=-1)),
    "numbers of rows and classes, picked": lambda z, a: jnp.mean(
        jax.nn.logsumexp(z, axis=-1) - picked(z + a["soft"], a["labels"])
    ),
    "a function of the sum": lambda z, a: jnp.exp(-cross_entropy(z, a["labels"]).mean()),
    "scanned checkpoints": lambda z, a: scanned(z, a, jax.checkpoint),
}

OTHERS: dict[str, Callable[..., Any]] = {
    "a loss of each row beside it": lambda z, a: jnp.sum(jnp.sin(cross_entropy(z, a["labels"]))),
    "weights that read probabilities": focal_with_stopped_weights,
    "weights that read predictions": lambda z, a: jnp.sum(
        cross_entropy(z, a["labels"]) * (jnp.argmax(z, axis=-1) == a["labels"])
    ),
    "weights that read maxima": lambda z, a: jnp.sum(cross_entropy(z, a["labels"]) * lax.stop_gradient(z.max(-1))),
    "maxima without a derivative": lambda z, a: (cross_entropy(z, a["labels"]) + lax.stop_gradient(z.max(-1))).sum(),
    "losses without a derivative": lambda z, a: jnp.sum(
        cross_entropy(z, a["labels"]) - 0.5 * lax.stop_gradient(cross_entropy(z, a["labels"]))
    ),
    "squares of something else": lambda z, a: jnp.mean(
        cross_entropy(z, a["labels"]) + (jax.nn.logsumexp(z, axis=-1) + 1) ** 2
    ),
    "a temperature behind a softcap": lambda z, a: cross_entropy(5 * jnp.tanh(z / 5) / 1.3, a["labels"]).sum(),
    "scanned": scanned,
}


def arrays() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    floats = {"weight": (FEATURES, CLASSES), "x": (ROWS, FEATURES), "row": (ROWS,), "class": (CLASSES,)}
    found = {name: jnp.asarray(rng.normal(size=shape)) for name, shape in floats.items()}
    found["soft"] = jnp.asarray(rng.random((ROWS, CLASSES)))
    return found | {"labels": jnp.asarray(rng.integers(0, CLASSES, ROWS)), "masked": jnp.asarray(MASKED)}


def with_few_features() -> dict[str, Any]:
    """The same, with so few features that x is small beside the logits."""
    found = arrays()
    return found | {"weight": found["weight"][:2], "x": found["x"][:, :2]}


def function(loss: Callable[..., Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda arrays: loss(arrays["x"] @ arrays["weight"], arrays)


def assert_alike_in_float64(loss: Callable[..., Any], *, is_sum: bool) -> None:
    given = arrays()
    fast = lowering.rewrite(function(loss))
    patterns = {one.pattern for one in fast.report(given).applied}
    assert patterns == {"cross_entropy_sum"} if is_sum else "cross_entropy_sum" not in patterns
    gradients = [jax.value_and_grad(fn, allow_int=True) for fn in (function(loss), fast)]
    expected, found = (jax.tree.leaves(jax.jit(gradient)(given)) for gradient in gradients)
    for one, other in zip(expected, found, strict=True):
        if one.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-9)


@pytest.mark.sampled
@pytest.mark.parametrize("name", SUMS)
def test_sums_of_cross_entropies_are_computed_with_their_gradients(name: str, few_logits_count) -> None:
    few_logits_count(ROWS * CLASSES - 1)
    with jax.enable_x64():
        assert_alike_in_float64(SUMS[name], is_sum=True)


@pytest.mark.sampled
@pytest.mark.parametrize("name", OTHERS)
def test_other_losses_keep_their_statistics(name: str, few_logits_count) -> None:
    few_logits_count(ROWS * CLASSES - 1)
    with jax.enable_x64():
        assert_alike_in_float64(OTHERS[name], is_sum=False)


def test_a_sum_takes_three_products(few_logits_count) -> None:
    few_logits_count(ROWS * CLASSES - 1)
    fn = function(lambda z, a: masked(cross_entropy(z, a["labels"]), a["labels"]))
    three, four = (
        str(jax.make_jaxpr(jax.grad(lowering.rewrite(fn, off=off), allow_int=True))(arrays()))
        for off in ((), ("cross_entropy_sum", "row_cone_sum"))
    )
    assert "linear_cross_entropy_sum_with_gradients" in three
    assert "linear_cross_entropy_backward" not in three
    assert "linear_cross_entropy_backward" in four


def focal(z: Any, a: dict[str, Any]) -> Any:
    log_p = -cross_entropy(z, a["labels"])
    return -jnp.mean((1 - jnp.exp(log_p)) ** 2 * log_p)


def poly(z: Any, a: dict[str, Any]) -> Any:
    rows = cross_entropy(z, a["labels"])
    return jnp.sum((rows + 1 - jnp.exp(-rows)) * (a["labels"] > 1)) / jnp.sum(a["labels"] > 1)


def sigmoid_focal(z: Any, a: dict[str, Any]) -> Any:
    return optax.sigmoid_focal_loss(z, jax.nn.one_hot(a["labels"], CLASSES), alpha=0.25).sum(-1).mean()


def with_entropy(z: Any, a: dict[str, Any]) -> Any:
    p = jax.nn.softmax(z)
    return focal(z, a) - 0.1 * jnp.mean(jnp.sum(p * jnp.log(p), axis=-1) ** 2)


ROW_WISE = {"focal": focal, "poly": poly, "sigmoid focal": sigmoid_focal, "two terms": with_entropy}


def products(jaxpr: Any) -> int:
    """Counts the products of a program, those of loops once, and of branches that of one platform."""
    count = 0
    for equation in jaxpr.eqns:
        count += equation.primitive.name == "dot_general"
        inner = [*map(products, inner_jaxprs(equation))]
        count += max(inner, default=0) if equation.primitive.name == "cond" else sum(inner)
    return count


@pytest.mark.sampled
@pytest.mark.parametrize("name", ROW_WISE)
def test_any_loss_of_rows_takes_three_products_and_has_all_derivatives(name: str, few_logits_count) -> None:
    few_logits_count(ROWS * CLASSES - 1)
    with jax.enable_x64():
        given, plain = with_few_features(), function(ROW_WISE[name])
        fast = lowering.rewrite(plain)
        assert [one.pattern for one in fast.report(given).applied] == ["row_cone_sum"]

        def of_two(fn: Callable[..., Any]) -> Callable[..., Any]:
            return lambda weight, x: fn({**given, "weight": weight, "x": x})

        args = given["weight"], given["x"]
        gradient = jax.value_and_grad(of_two(fast), (0, 1))
        assert products(jax.make_jaxpr(gradient)(*args).jaxpr) == 3
        for derivative in (jax.value_and_grad, lambda fn: lambda *args: jax.jvp(jax.grad(fn, (0, 1)), args, args)):
            found, expected = (jax.jit(derivative(of_two(fn)))(*args) for fn in (fast, plain))
            for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


def test_chunks_of_rows_are_of_one_size_where_that_divides_the_rows(few_logits_count, monkeypatch) -> None:
    few_logits_count(10 * CLASSES - 1)
    chunk_sizes = importlib.import_module("jaxops.linear_cross_entropy.chunk_sizes")
    monkeypatch.setattr(chunk_sizes, "rows_of_logits", lambda *_: 4)
    rng = np.random.default_rng(0)
    weight, rows, labels = (
        rng.normal(size=(FEATURES, CLASSES)),
        rng.normal(size=(11, FEATURES)),
        np.arange(11) % CLASSES,
    )
    # Both products of the gradient are compiled once more for a rest.
    for size, count in ((10, 2), (11, 4)):
        x, y = jnp.asarray(rows[:size]), jnp.asarray(labels[:size])
        gradient = lowering.rewrite(jax.grad(lambda weight, x=x, y=y: cross_entropy(x @ weight, y).sum()))
        traced = jax.jit(gradient).trace(jnp.asarray(weight))
        assert "scan[" in str(traced.jaxpr)
        assert products(traced.jaxpr.jaxpr) == count
    exponentials = np.exp(rows @ weight)
    cotangent = exponentials / exponentials.sum(-1, keepdims=True) - np.eye(CLASSES)[labels]
    found = traced.lower().compile()(jnp.asarray(weight))
    np.testing.assert_allclose(found, rows.T @ cotangent, rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_a_sum_that_is_returned_beside_its_mean_takes_the_operator(few_logits_count) -> None:
    """Written twice, as in Flax's examples, it is still one sum."""
    few_logits_count(ROWS * CLASSES - 1)

    def with_sum(a: dict[str, Any]) -> Any:
        losses, counts = cross_entropy(a["x"] @ a["weight"], a["labels"]), jnp.abs(a["row"])
        return (losses * counts).sum() / counts.sum(), {"sum": (losses * counts).sum(), "count": counts.sum()}

    with jax.enable_x64():
        given, fast = arrays(), lowering.rewrite(with_sum)
        assert [one.pattern for one in fast.report(given).applied] == ["cross_entropy_sum"]
        found, expected = (jax.value_and_grad(fn, has_aux=True, allow_int=True)(given) for fn in (fast, with_sum))
        counts = np.abs(np.asarray(given["row"]))
        logits = np.asarray(given["x"]) @ np.asarray(given["weight"])
        losses = np.log(np.exp(logits).sum(-1)) - logits[np.arange(ROWS), np.asarray(given["labels"])]
        assert float(found[0][1]["sum"]) == pytest.approx((losses * counts).sum(), rel=1e-12)
        assert_gradients_alike(found[1], expected[1])


@pytest.mark.long
def test_terms_that_are_returned_beside_their_sum_have_derivatives(few_logits_count) -> None:
    """As trainers that log the z-loss write it: the gradient of the sum takes the operator, of a term its own way."""
    few_logits_count(ROWS * CLASSES - 1)

    def with_terms(a: dict[str, Any]) -> Any:
        logits = a["x"] @ a["weight"]
        loss = (cross_entropy(logits, a["labels"]) * a["row"]).sum()
        squares = 1e-2 * (jax.nn.logsumexp(logits, axis=-1) ** 2).mean()
        return loss + squares, {"loss": loss, "squares": squares, "perplexity": jnp.exp(loss)}

    with jax.enable_x64():
        given, fast = arrays(), lowering.rewrite(with_terms)
        assert [one.pattern for one in fast.report(given).applied] == ["cross_entropy_sum"]
        for name in ("loss", "squares", "perplexity"):
            found, expected = (
                jax.grad(lambda a, fn=fn, name=name: fn(a)[1][name], allow_int=True)(given) for fn in (fast, with_terms)
            )
            assert_gradients_alike(found, expected)
        found, expected = (jax.value_and_grad(fn, has_aux=True, allow_int=True)(given) for fn in (fast, with_terms))
        assert found[0][1].keys() == expected[0][1].keys()
        np.testing.assert_allclose(*([x[0][0], *jax.tree.leaves(x[0][1])] for x in (found, expected)), rtol=1e-12)
        assert_gradients_alike(found[1], expected[1])
        named = str(jax.make_jaxpr(lambda a: jax.value_and_grad(fast, has_aux=True, allow_int=True)(a))(given))
        assert "linear_cross_entropy_sum_with_gradients" in named


def assert_gradients_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in ("x", "weight", "row"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.long
def test_numbers_beside_the_last_one_are_differentiated_as_well(few_logits_count) -> None:
    few_logits_count(ROWS * CLASSES - 1)

    def several(a: dict[str, Any]) -> Any:
        z = a["x"] @ a["weight"]
        of_focal, of_poly = focal(z, a), poly(z, a)
        return of_focal + 0.3 * of_poly, {"focal": of_focal, "poly": of_poly, "hits": jnp.argmax(z, -1) == a["labels"]}

    with jax.enable_x64():
        given = with_few_features()
        fast = lowering.rewrite(several)
        assert [one.pattern for one in fast.report(given).applied] == ["row_cone_sum"]

        def total(a: dict[str, Any], weights: Any, fn: Any) -> Any:
            loss, aux = fn(a)
            return weights[0] * loss + weights[1] * aux["focal"] + weights[2] * aux["poly"], aux["hits"]

        totals = (functools.partial(total, fn=fn) for fn in (fast, several))
        gradients = [jax.jit(jax.value_and_grad(fn, has_aux=True, allow_int=True)) for fn in totals]
        for weights in ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.5, 0.2, 3.0)):
            found, expected = (gradient(given, weights) for gradient in gradients)
            for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                if one.dtype != jax.dtypes.float0:
                    np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("is_inside", [True, False], ids=["inside", "around"])
def test_gradients_are_added_up_over_devices_once(is_inside: bool, few_logits_count) -> None:
    few_logits_count(ROWS * CLASSES - 1)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))

    def local(weight: Any, x: Any, labels: Any) -> Any:
        return jax.lax.pmean(focal(x @ weight, {"labels": labels}), "data")

    with jax.enable_x64():
        given = with_few_features()
        args = given["weight"], given["x"], given["labels"]
        specs = P(), P("data"), P("data")
        body = lowering.rewrite(local) if is_inside else local
        mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P())
        fast = mapped if is_inside else lowering.rewrite(mapped)
        found = jax.jit(jax.value_and_grad(fast, (0, 1)))(*args)
        assert products(jax.make_jaxpr(jax.value_and_grad(fast, (0, 1)))(*args).jaxpr) == 3
        expected = jax.value_and_grad(lambda w, x: focal(x @ w, given), (0, 1))(*args[:2])
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


def test_a_row_without_a_weight_may_hold_no_number(few_logits_count) -> None:
    few_logits_count(ROWS * CLASSES - 1)
    given = arrays()
    fn = function(lambda z, a: masked(cross_entropy(z, a["masked"]), a["masked"]))
    expected = jax.jit(jax.value_and_grad(fn, allow_int=True))(given)
    given["x"] = given["x"].at[1].set(jnp.nan).at[3].set(jnp.inf)
    value, gradients = jax.jit(jax.value_and_grad(lowering.rewrite(fn), allow_int=True))(given)
    rewrite_checks.assert_alike((value, gradients["weight"]), (expected[0], expected[1]["weight"]))


@pytest.mark.parametrize("count", [0, 1])
def test_quotients_by_zero_may_be_left_out(count: int, few_logits_count) -> None:
    few_logits_count(ROWS * CLASSES - 1)

    def loss(z: Any, a: dict[str, Any]) -> Any:
        losses, lengths = cross_entropy(z, a["labels"]), count * jnp.arange(ROWS)
        total, counted = jnp.where(lengths > 0, losses / lengths, 0).sum(), (lengths > 0).sum()
        return jnp.where(counted > 0, total / counted, 0)

    fast = lowering.rewrite(function(loss))
    assert [one.pattern for one in fast.report(arrays()).applied] == ["cross_entropy_sum"]
    rewrite_checks.assert_alike(jax.jit(fast)(arrays()), function(loss)(arrays()))


@pytest.mark.long
def test_weights_of_rows_are_laid_out_like_rows_on_meshes(few_logits_count) -> None:
    few_logits_count(ROWS * CLASSES - 1)

    def loss(z: Any, a: dict[str, Any]) -> Any:
        z = z + a["class"]
        losses = a["row"] * cross_entropy(z, a["labels"]) + jax.nn.logsumexp(z, axis=-1) ** 2
        return masked(losses, a["masked"]) + lax.stop_gradient(jnp.mean(jnp.argmax(z, axis=-1)))

    given, fast = arrays(), lowering.rewrite(function(loss))
    expected = jax.jit(jax.value_and_grad(function(loss), allow_int=True))(given)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        specs = dict.fromkeys(given, P()) | dict.fromkeys(("x", "row", "labels", "masked"), P("data"))
        placed = {name: jax.device_put(array, NamedSharding(mesh, specs[name])) for name, array in given.items()}
        assert [one.pattern for one in fast.report(placed).applied] == ["cross_entropy_sum"]
        value, gradients = jax.jit(jax.value_and_grad(fast, allow_int=True))(placed)
    names = ("x", "weight", "row", "class")
    rewrite_checks.assert_alike([value, *map(gradients.get, names)], [expected[0], *map(expected[1].get, names)])
