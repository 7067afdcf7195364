"""Losses put together at random are rewritten, and have the same values and gradients in float64."""

import math
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from rewrite_checks import few_logits_in_float64

import lowering

ROWS, FEATURES, CLASSES = (2, 3), 4, 7
few_logits = few_logits_in_float64(math.prod(ROWS) * CLASSES - 1)


# What comes between the matrix product and the readers of logits.
CHANGES: dict[str, Callable[..., Any]] = {
    "bias": lambda z, a: z + a["bias"],
    "scale": lambda z, a: z * 0.7,
    "division": lambda z, a: z / 1.3,
    "temperature": lambda z, a: z / a["temperature"],
    "row temperature": lambda z, a: z * a["row"][..., None],
    "softcap": lambda z, a: 5.0 * jnp.tanh(z / 5.0),
    "mask": lambda z, a: jnp.where(jnp.arange(CLASSES) < CLASSES - 1, z, -1e9),
    "offset": lambda z, a: z + a["row"][..., None],
    "casts": lambda z, a: z.astype(jnp.float32).astype(jnp.float64),
    "name": lambda z, a: checkpoint_name(z, "logits"),
}


def picked(kind: str, array: Any, labels: Any) -> Any:
    one_hot = jax.nn.one_hot(labels, CLASSES, dtype=array.dtype)
    match kind:
        case "take_along_axis":
            return jnp.take_along_axis(array, labels[..., None], axis=-1)[..., 0]
        case "indexing":
            flat = array.reshape(-1, CLASSES)
            return flat[jnp.arange(flat.shape[0]), labels.reshape(-1)].reshape(labels.shape)
        case "one-hot":
            return jnp.sum(one_hot * array, axis=-1)
        case "einsum":
            return jnp.einsum("...v,...v->...", array, one_hot)
        case "where":
            return jnp.sum(jnp.where(labels[..., None] == jnp.arange(CLASSES), array, 0), axis=-1)
    pick = lambda row, label: row[label]  # noqa: E731
    for _ in labels.shape:
        pick = jax.vmap(pick)
    return pick(array, labels)


PICKS = ("take_along_axis", "indexing", "one-hot", "einsum", "where", "vmap")


def hand_written_lse(z: Any, stop: bool) -> Any:
    maximum = jnp.max(z, axis=-1, keepdims=True)
    maximum = lax.stop_gradient(maximum) if stop else maximum
    return jnp.log(jnp.sum(jnp.exp(z - maximum), axis=-1)) + maximum[..., 0]


# The loss of each row.
LOSSES: dict[str, Callable[..., Any]] = {
    "logsumexp": lambda z, pick, a: jax.nn.logsumexp(z, axis=-1) - pick(z),
    "log_softmax": lambda z, pick, a: -pick(jax.nn.log_softmax(z)),
    "log of softmax": lambda z, pick, a: -jnp.log(pick(jax.nn.softmax(z)) + 1e-9),
    "optax": lambda z, pick, a: optax.softmax_cross_entropy_with_integer_labels(z, a["labels"]),
    "by hand": lambda z, pick, a: hand_written_lse(z, True) - pick(z),
    "by hand, differentiated": lambda z, pick, a: hand_written_lse(z, False) - pick(z),
    "focal": lambda z, pick, a: (1 - pick(jax.nn.softmax(z))) ** 2 * -pick(jax.nn.log_softmax(z)),
}

# Those that are affine in the statistics of a row. Their gradients are computed together with the logits, unless
# something is added that is not affine.
AFFINE = {"logsumexp", "log_softmax", "optax", "by hand", "by hand, differentiated"}
AFFINE_TERMS = {"nothing", "z-loss", "smoothing", "soft labels", "accuracy"}
SCALED = {"scale", "division", "temperature", "row temperature"}

# What is added to the loss of each row.
TERMS: dict[str, Callable[..., Any]] = {
    "nothing": lambda z, a: 0.0,
    "z-loss": lambda z, a: 0.1 * jax.nn.logsumexp(z, axis=-1) ** 2,
    "smoothing": lambda z, a: -0.05 * jnp.mean(jax.nn.log_softmax(z), axis=-1),
    "entropy": lambda z, a: 0.1 * jnp.sum(jax.nn.softmax(z) * jax.nn.log_softmax(z), axis=-1),
    "soft labels": lambda z, a: optax.softmax_cross_entropy(z, a["soft"]),
    "accuracy": lambda z, a: 0.5 * (jnp.argmax(z, axis=-1) == a["labels"]),
}

REDUCTIONS: dict[str, Callable[..., Any]] = {
    "mean": lambda losses, a: losses.mean(),
    "sum": lambda losses, a: losses.sum(),
    "masked mean": lambda losses, a: (
        jnp.where(a["labels"] > 1, losses, 0).sum() / jnp.maximum((a["labels"] > 1).sum(), 1)
    ),
    "weighted": lambda losses, a: jnp.sum(losses * a["row"]) / a["row"].sum(),
    "product with weights": lambda losses, a: jnp.vdot(losses, a["row"]) / losses.size,
    "weights from a mask": lambda losses, a: jnp.mean(losses, where=a["labels"] != 2),
    "sums of parts": lambda losses, a: sum(part.sum() for part in jnp.split(losses, [1])) + 0.5 * losses[:1].sum(),
    "means of sequences": lambda losses, a: jnp.mean(jnp.sum(losses, axis=-1)),
    "root": lambda losses, a: jnp.sqrt(1 + losses.sum() ** 2),
}

losses = st.fixed_dictionaries(
    {
        "changes": st.lists(st.sampled_from(sorted(CHANGES)), max_size=3, unique=True),
        "loss": st.sampled_from(sorted(LOSSES)),
        "pick": st.sampled_from(PICKS),
        "term": st.sampled_from(sorted(TERMS)),
        "reduction": st.sampled_from(sorted(REDUCTIONS)),
        "is_flat": st.booleans(),
        "is_checkpointed": st.booleans(),
    }
)


def built(made_of: dict[str, Any]) -> Callable[..., Any]:
    def loss(weight: Any, x: Any, arrays: dict[str, Any]) -> Any:
        if made_of["is_flat"]:
            arrays = {**arrays, "labels": arrays["labels"].reshape(-1), "row": arrays["row"].reshape(-1)}
            arrays["soft"] = arrays["soft"].reshape(-1, CLASSES)
        z = x @ weight
        z = z.reshape(-1, CLASSES) if made_of["is_flat"] else z
        for name in made_of["changes"]:
            z = CHANGES[name](z, arrays)
        rows = LOSSES[made_of["loss"]](z, lambda array: picked(made_of["pick"], array, arrays["labels"]), arrays)
        rows = rows + TERMS[made_of["term"]](z, arrays)
        return REDUCTIONS[made_of["reduction"]](rows, arrays)

    return jax.checkpoint(loss) if made_of["is_checkpointed"] else loss


def expected_patterns(made_of: dict[str, Any]) -> set[str]:
    changes = set(made_of["changes"])
    if made_of["loss"] not in AFFINE or made_of["term"] not in AFFINE_TERMS:
        return {"row_cone_sum", "cross_entropy", "row_cone"}
    # A scale cannot always be the layer's.
    may_be_either = changes & SCALED and changes & {"softcap", "bias", "mask"}
    # The operator adds up squares of log sum exp, but not of log sum exp plus a number.
    may_be_either = may_be_either or ("offset" in changes and made_of["term"] == "z-loss")
    return {"cross_entropy_sum", "row_cone"} | ({"row_cone_sum", "cross_entropy"} if may_be_either else set())


def compare(made_of: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    weight, x = jnp.asarray(rng.normal(size=(FEATURES, CLASSES))), jnp.asarray(rng.normal(size=(*ROWS, FEATURES)))
    soft = rng.random((*ROWS, CLASSES))
    arrays = {
        "labels": jnp.asarray(rng.integers(0, CLASSES - 1, ROWS)),
        "bias": jnp.asarray(rng.normal(size=CLASSES)),
        "row": jnp.asarray(rng.random(ROWS) + 0.5),
        "temperature": jnp.asarray(1.7),
        "soft": jnp.asarray(soft / soft.sum(-1, keepdims=True)),
    }
    fn = built(made_of)
    fast = lowering.rewrite(fn)
    report = fast.report(weight, x, arrays)
    (pattern,) = (one.pattern for one in report.applied)
    assert pattern in expected_patterns(made_of), report
    expected, found = (jax.jit(jax.value_and_grad(f, (0, 1, 2), allow_int=True))(weight, x, arrays) for f in (fn, fast))
    is_float32 = "casts" in made_of["changes"]
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        if one.dtype != jax.dtypes.float0:
            tolerance = 1e-5 if is_float32 else 1e-9
            np.testing.assert_allclose(other, one, rtol=tolerance, atol=tolerance)


@hypothesis.settings(max_examples=3)
@hypothesis.given(losses)
def test_a_random_loss_is_rewritten_to_the_same(made_of) -> None:
    compare(made_of)


@pytest.mark.slow
@hypothesis.settings(max_examples=100)
@hypothesis.given(losses)
def test_a_hundred_random_losses_are_rewritten_to_the_same(made_of) -> None:
    compare(made_of)
