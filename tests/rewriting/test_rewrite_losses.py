"""Which losses are rewritten, in which way, and why others are left alone."""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rewrite_checks
from patterns_planted import f32
from rewrite_checks import ARGS, assert_alike, loss

import lowering
from lowering.cost import inner_jaxprs

users_promotion = pytest.fixture(autouse=True)(rewrite_checks.users_promotion)
few_logits_count = pytest.fixture(rewrite_checks.few_logits_count)


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


def one_hot(labels: Any) -> Any:
    return jax.nn.one_hot(labels, ARGS[0].shape[1])


# Losses that are no cross entropy, and of what they are.
OTHERS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "perceptron": (
        lambda z, y: optax.losses.perceptron_loss(z, one_hot(y)),
        "the positive part of products with labels",
    ),
    "hinge": (
        lambda z, y: optax.losses.hinge_loss(z, 2 * one_hot(y) - 1),
        "the positive part of products with labels",
    ),
    "squared error": (lambda z, y: optax.squared_error(z, one_hot(y)), "squared differences from labels"),
    "margin": (
        lambda z, y: z.max(-1) - jnp.take_along_axis(z, y[:, None], 1)[:, 0],
        "maxima of rows and the numbers at labels",
    ),
    "picked": (lambda z, y: z[jnp.arange(len(z)), y], "the numbers at labels"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_losses_without_a_log_sum_exp_are_called_what_they_are(name: str) -> None:
    of_logits, what = OTHERS[name]
    report = lowering.rewrite(lambda w, x, y: of_logits(x @ w, y).mean()).report(*ARGS)
    expected = f"this takes no log sum exp: it is a loss of {what}, for which there is no operator"
    assert [one.reason for one in report.refused] == [expected]
    assert report.applied == ()


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (lambda z, y: (z.argmax(-1) == y).mean(), "argmax"),
        (lambda z, y: (jax.lax.top_k(z, 5)[1] == y[:, None]).any(-1).mean(), "top_k"),
        (lambda z, y: jax.lax.top_k(z, 5)[1], "top_k"),
        (lambda z, y: jnp.sort(z, -1)[:, -5:].mean(), "sort"),
        (lambda z, y: jnp.cumsum(z, -1).max(), "cumsum"),
    ],
)
def test_readers_of_whole_rows_are_named(read, name: str) -> None:
    types = f32(2048, 64), f32(64, 32000), jax.ShapeDtypeStruct((2048,), jnp.int32)
    report = lowering.rewrite(lambda x, w, y: read(x @ w, y)).report(*types)
    expected = f"this takes no log sum exp: {name} reads whole rows, for which there is no operator"
    assert ([one.reason for one in report.refused], report.applied) == ([expected], ())


def test_few_logits_in_each_step_of_a_loop_are_many_for_its_gradient() -> None:
    def scanned(w, x, labels):
        def step(total, each):
            return total + loss(w, *each), None

        return jax.lax.scan(step, 0.0, (x, labels))[0]

    types = f32(64, 3210), f32(16, 2774, 64), jax.ShapeDtypeStruct((16, 2774), jnp.int32)
    (one,) = lowering.rewrite(scanned).report(*types).refused
    assert one.reason.endswith(
        "keeps those of all steps: then checkpoint its body, or call jaxops.linear_cross_entropy"
    )


def test_several_heads_of_one_trunk_are_chunked_together(few_logits_count) -> None:
    few_logits_count(95)

    def of_two(w, x, labels):
        logits = jnp.einsum("bd,kdv->bkv", x, jnp.stack([w, jnp.sin(w)]))
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.stack([labels, labels[::-1]], -1)).mean()

    fast = lowering.rewrite(of_two)
    assert [one.pattern for one in fast.report(*ARGS).applied] == ["row_cone_sum"]
    assert_alike(*(jax.jit(jax.value_and_grad(fn, (0, 1)))(*ARGS) for fn in (fast, of_two)))


def with_predicted_labels(z: Any, y: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(z, jnp.argmax(z, -1))


def with_labels_where_sure(z: Any, y: Any) -> Any:
    sure = jnp.where(jax.nn.logsumexp(z, -1) > 3, y, 0)
    return optax.softmax_cross_entropy(z, jax.nn.one_hot(sure, z.shape[-1]))


def with_a_temperature_of_its_own(z: Any, y: Any) -> Any:
    z = z * jnp.log(jnp.sum(jnp.exp(z), -1, keepdims=True))
    return jnp.log(jnp.sum(jnp.exp(z), -1)) - jnp.take_along_axis(z, y[:, None], -1)[:, 0]


def with_its_own_targets(z: Any, y: Any) -> Any:
    targets = jnp.where(jax.nn.one_hot(y, z.shape[-1]) > 0, jnp.max(z, -1, keepdims=True), 0.1)
    return optax.softmax_cross_entropy(z, jax.lax.stop_gradient(targets)) - jnp.take_along_axis(z, y[:, None], -1)[:, 0]


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize(
    "of_logits",
    [with_predicted_labels, with_labels_where_sure, with_a_temperature_of_its_own, with_its_own_targets],
    ids=lambda fn: fn.__name__,
)
def test_logits_that_decide_about_labels_or_weights_are_read_whole(of_logits, few_logits_count) -> None:
    few_logits_count(95)
    args = ARGS[0], ARGS[1], jnp.arange(6) + 3

    def rows(w, x, y):
        return of_logits(x @ w, y)

    def total(fn: Callable[..., Any]) -> Callable[..., Any]:
        return jax.value_and_grad(lambda w: jnp.sum(jnp.sin(fn(w, *args[1:]))))

    fast = lowering.rewrite(rows)
    assert {one.pattern for one in fast.report(*args).applied} <= {"row_cone", "cross_entropy"}
    assert_alike(*(fn(*args) for fn in (fast, rows)), 1e-4)
    assert_alike(*(total(fn)(args[0]) for fn in (fast, rows)), 1e-4)


@pytest.mark.long
def test_rows_that_are_compared_with_all_rows_are_their_own_classes(few_logits_count) -> None:
    few_logits_count(35)

    def contrastive(x):
        return optax.softmax_cross_entropy_with_integer_labels(x @ x.T, jnp.arange(6)[::-1]).mean()

    fast = lowering.rewrite(contrastive)
    assert [one.pattern for one in fast.report(ARGS[1]).applied] == ["cross_entropy_sum"]
    assert_alike(*(jax.value_and_grad(fn)(ARGS[1]) for fn in (fast, contrastive)))


def of_pairs(x):
    is_own = jnp.eye(len(x), dtype=bool)
    return optax.softmax_cross_entropy_with_integer_labels(
        jnp.where(is_own, -1e9, x @ x.T), jnp.arange(len(x))[::-1]
    ).mean()


def of_groups(x):
    is_own, group = jnp.eye(len(x), dtype=bool), jnp.arange(len(x)) % 7
    log_probs = jax.nn.log_softmax(jnp.where(is_own, -1e9, x @ x.T))
    is_like = (group[:, None] == group) & ~is_own
    return -((log_probs * is_like).sum(-1) / is_like.sum(-1)).mean()


@pytest.mark.long
@pytest.mark.parametrize("fn", [of_pairs, of_groups])
def test_rows_may_be_compared_with_all_others(fn, few_logits_count) -> None:
    few_logits_count(300)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(48, 4)), jnp.float32)
    fast = lowering.rewrite(fn)
    assert [one.pattern for one in fast.report(x).applied] == ["row_cone_sum"]
    assert_alike(*(jax.value_and_grad(each)(x) for each in (fast, fn)))


def test_layers_that_are_no_loss_are_not_spoken_of() -> None:
    for layer in (jax.nn.relu, jnp.square, lambda z: z[0], lambda z: z[:, 3], lambda z: (z - 1) ** 2):
        report = lowering.rewrite(lambda w, x, y, layer=layer: layer(x @ w).mean()).report(*ARGS)
        assert str(report) == "nothing to rewrite"


@pytest.mark.parametrize("fn", REFUSED, ids=lambda fn: fn.__name__)
def test_what_is_left_alone_has_a_reason(fn, few_logits_count) -> None:
    few_logits_count(95)
    report = lowering.rewrite(fn).report(*ARGS)
    assert report.applied == ()
    assert any(REFUSED[fn] in one.reason for one in report.refused), report


def training_step(w, x, labels):
    """Reduces logits that its loss returns."""

    def of_weight(w):
        logits = x @ w
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits

    (value, logits), gradient = jax.value_and_grad(of_weight, has_aux=True)(w)
    metrics = {"loss": value, "accuracy": (logits.argmax(-1) == labels).mean(), "entropy": entropy(logits)}
    return w - 0.1 * gradient, metrics


def entropy(logits: Any) -> Any:
    log_p = jax.nn.log_softmax(logits)
    return -jnp.sum(jnp.exp(log_p) * log_p, -1).mean()


def test_a_whole_step_that_reduces_returned_logits_is_rewritten(few_logits_count) -> None:
    few_logits_count(95)
    refused = lowering.rewrite(returned).report(*ARGS).refused
    assert all(
        one.reason.endswith("rewrite the function that does so, such as the whole training step") for one in refused
    )
    fast = lowering.rewrite(training_step)
    assert [one.pattern for one in fast.report(*ARGS).applied] == ["row_cone"]
    assert_alike(jax.jit(fast)(*ARGS), training_step(*ARGS))


@pytest.mark.long
def test_a_maximum_that_is_differentiated_is_computed_with_the_users_equations(few_logits_count) -> None:
    few_logits_count(95)
    fast = lowering.rewrite(differentiated_maximum)
    assert [one.pattern for one in fast.report(*ARGS).applied] == ["row_cone_sum"]
    assert_alike(jax.grad(fast)(*ARGS), jax.grad(differentiated_maximum)(*ARGS))


@pytest.mark.parametrize("block_size", [2**20, 40], ids=["whole", "blocks"])
def test_the_gradient_of_a_loss_is_computed_in_chunks(block_size: int, few_logits_count, monkeypatch) -> None:
    few_logits_count(95)
    gradient_products = importlib.import_module("jaxops.linear_cross_entropy.gradient_products")
    monkeypatch.setattr(gradient_products, "SIZES", gradient_products.SIZES._replace(block=block_size, least=1))
    gradient = jax.value_and_grad(loss, (0, 1))
    fast = lowering.rewrite(gradient)
    assert [one.pattern for one in fast.report(*ARGS).applied] == ["row_cone"]
    # Blocks of columns, of either the classes or the features, where the platform is a CPU.
    assert "platform_index" in str(jax.make_jaxpr(fast)(*ARGS))
    assert_alike(jax.jit(fast)(*ARGS), gradient(*ARGS))


@pytest.mark.long
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
    assert [one.pattern for one in fast.report(params, *ARGS[1:]).applied] == ["cross_entropy_sum"]
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


def at_positions(log_probs: Any, labels: Any) -> Any:
    return log_probs[jnp.arange(labels.shape[0])[:, None], jnp.arange(labels.shape[1]), labels]


def weighted_by_confidence(log_probs: Any, labels: Any) -> Any:
    found = at_positions(log_probs, labels)
    return jax.lax.stop_gradient(jnp.exp(found)) * found


# How people take the logarithms of the labels' probabilities.
SPELLINGS: dict[str, Callable[[Any, Any], Any]] = {
    "along an axis": lambda log_probs, y: jnp.take_along_axis(log_probs, y[..., None], -1)[..., 0],
    "one-hot": lambda log_probs, y: jnp.sum(jax.nn.one_hot(y, log_probs.shape[-1]) * log_probs, -1),
    "positions": at_positions,
    "positions and weights": weighted_by_confidence,
    "vmap": lambda log_probs, y: jax.vmap(at_positions)(log_probs[:, None], y[:, None])[:, 0],
}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("spelling", "around"), [*((name, "nothing") for name in SPELLINGS), ("one-hot", "checkpoint")]
)
def test_no_array_of_logits_is_left_in_a_gradient_that_is_rewritten_as_a_whole(
    spelling, around, few_logits_count
) -> None:
    """A checkpoint computes them again, and both loops take the place of one."""
    few_logits_count(100)
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(6, 40)).astype(np.float32), rng.normal(size=(3, 8, 6)).astype(np.float32)
    labels = rng.integers(0, 40, (3, 8))

    def negative(w, x, labels):
        return -SPELLINGS[spelling](jax.nn.log_softmax(x @ w), labels).mean()

    gradient = jax.value_and_grad(jax.checkpoint(negative) if around == "checkpoint" else negative, (0, 1))
    fast = lowering.rewrite(gradient)
    expected = ["row_cone"] if around == "nothing" else ["cross_entropy_sum", "row_cone"]
    assert [one.pattern for one in fast.report(w, x, labels).applied] == expected
    assert max(largest_outside_of_loops(jax.make_jaxpr(fast)(w, x, labels).jaxpr)) < labels.size * 40
    with jax.enable_x64():
        exact = gradient(*(np.asarray(z, float) for z in (w, x)), labels)
    assert_alike(jax.jit(fast)(w, x, labels), exact)


@pytest.mark.long
def test_extremes_of_all_logits_beside_a_loss_are_taken_in_chunks(few_logits_count) -> None:
    """Their gradient is that of the logit which is it."""
    few_logits_count(100)
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(6, 40)).astype(np.float32), rng.normal(size=(24, 6)).astype(np.float32)
    labels = rng.integers(0, 40, 24)

    def loss(w, x, labels):
        z = x @ w
        found = {"largest": z.max(), "least": z.min(), "last class": z.argmax(-1).max()}
        return optax.softmax_cross_entropy_with_integer_labels(z, labels).mean() + 0.1 * jnp.abs(z).max(), found

    fast = jax.value_and_grad(lowering.rewrite(loss), (0, 1), has_aux=True)
    assert max(largest_outside_of_loops(jax.make_jaxpr(fast)(w, x, labels).jaxpr)) < labels.size * 40
    (_, found), gradients = jax.jit(fast)(w, x, labels)
    z = x @ w
    np.testing.assert_allclose(found["largest"], z.max(), rtol=1e-6)
    np.testing.assert_allclose(found["least"], z.min(), rtol=1e-6)
    assert found["last class"] == z.argmax(-1).max()
    with jax.enable_x64():
        _, exact = jax.value_and_grad(loss, (0, 1), has_aux=True)(*(np.asarray(a, float) for a in (w, x)), labels)
    assert_alike(gradients, exact)


def largest_outside_of_loops(jaxpr: Any) -> Iterator[int]:
    for equation in jaxpr.eqns:
        yield max((x.aval.size for x in equation.outvars), default=0)
        for body in inner_jaxprs(equation) if equation.primitive.name != "scan" else ():
            yield from largest_outside_of_loops(body)
