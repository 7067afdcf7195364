"""Faults that other libraries have shipped, restated in a few lines: `check_operator` would have caught each."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxops.testing import check_operator

IGNORED = -100
RNG = np.random.default_rng(11)
ROWS, WIDTH, CLASSES = 8, 4, 10
X = RNG.standard_normal((ROWS, WIDTH)).astype(np.float32)
W = RNG.standard_normal((CLASSES, WIDTH)).astype(np.float32)
LABELS = np.array([0, 3, IGNORED, 9, 1, 1, IGNORED, 7], np.int32)


class Fault(NamedTuple):
    """A restated fault.

    Attributes:
      fn: has it.
      operands: show it.
      caught_by: the promise that breaks.
      reference: what it should compute, where only its values are wrong.
      batched: the axes of rows.
    """

    fn: Callable[..., Any]
    operands: tuple[np.ndarray, ...]
    caught_by: str
    reference: Callable[..., Any] | None = None
    batched: tuple[int | None, ...] | None = None


def losses(logits: jax.Array, labels: jax.Array) -> jax.Array:
    live = labels != IGNORED
    picked = jnp.take_along_axis(logits, jnp.where(live, labels, 0)[:, None], 1)[:, 0]
    return jnp.where(live, jax.nn.logsumexp(logits, axis=1) - picked, 0.0)


def cross_entropy(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.sum(losses(x @ w.T, labels)) / jnp.sum(labels != IGNORED).astype(x.dtype)


def with_zero_columns(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    """Tokamax pads the vocabulary to whole chunks and never masks the padding."""
    return cross_entropy(x, jnp.pad(w, ((0, 6), (0, 0))), labels)


def mean_over_all_rows(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    """Tokamax divides by the number of rows, ignored ones too."""
    return jnp.mean(losses(x @ w.T, labels))


@jax.custom_vjp
def ignored_rows_have_a_gradient(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Tokamax: the loss of a label of -100 is 0, its gradient is not."""
    return losses(logits, labels)


ignored_rows_have_a_gradient.defvjp(
    lambda logits, labels: (losses(logits, labels), (logits, labels)),
    lambda saved, ct: (
        ct[:, None] * (jax.nn.softmax(saved[0]) - jax.nn.one_hot(saved[1], CLASSES, dtype=saved[0].dtype)),
        None,
    ),
)


def logits_in_their_dtype(x: jax.Array, w: jax.Array) -> jax.Array:
    """Marin's forward pass, and Tokamax's: logits are rounded to 16 bits before the exponential."""
    logits = x @ w.T
    if logits.dtype == jnp.bfloat16:
        logits = jax.lax.reduce_precision(logits, 8, 7)  # which XLA is free to leave out otherwise
    return jax.nn.softmax(logits.astype(jnp.promote_types(x.dtype, jnp.float32)))


def gradient_added_in_16_bits(table: jax.Array, ids: jax.Array) -> jax.Array:
    """flax's embedding: a sum of ones in bfloat16 stops at 256."""
    return jax.lax.scan(lambda carry, i: (carry, carry[i]), table, ids)[1]


def second_moment_in_16_bits(grad: jax.Array) -> jax.Array:
    """optax's Adam: in bfloat16 the second moment stops at half of what it should become."""
    return jax.lax.fori_loop(0, 2000, lambda _, nu: 0.999 * nu + 0.001 * grad * grad, jnp.zeros_like(grad))


@jax.custom_vjp
def tiled_with_gradients(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    """MaxText computes the gradient by the hidden states in the forward pass, and forgot their cotangent for a year."""
    return cross_entropy(x, w, labels)


def _tiled_forward(x: jax.Array, w: jax.Array, labels: jax.Array) -> tuple[jax.Array, Any]:
    loss, gradients = jax.value_and_grad(cross_entropy, (0, 1))(x, w, labels)
    return loss, gradients


tiled_with_gradients.defvjp(_tiled_forward, lambda saved, ct: (saved[0], ct * saved[1], None))


@jax.custom_vjp
def losses_of_rows(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Liger with reduction="none": the gradient took the cotangent of the first row for all."""
    return losses(logits, labels)


losses_of_rows.defvjp(
    lambda logits, labels: jax.vjp(lambda z: losses(z, labels), logits),
    lambda pullback, ct: (*pullback(jnp.full_like(ct, 1.0) * ct[0]), None),
)


@jax.custom_vjp
def with_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """CCE's path with a bias, whose gradient was wrong and untested."""
    return x + bias[None, :]


with_bias.defvjp(lambda x, bias: (x + bias[None, :], None), lambda _, ct: (ct, jnp.mean(ct, 0)))


def streamed(x: jax.Array, w: jax.Array) -> jax.Array:
    """Marin's fused loss: the loop's first total does not vary over devices as the others do."""

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        return total + jnp.exp(x @ w[i])

    return jax.lax.fori_loop(0, CLASSES, add, jnp.zeros(x.shape[0], x.dtype))


def in_chunks_of_classes(w: jax.Array, x: jax.Array) -> jax.Array:
    """Tokamax's chunked loss: a loop over chunks of a vocabulary that is split gathers all of the weight."""

    def chunk(carry: None, start: jax.Array) -> tuple[None, jax.Array]:
        return None, jax.lax.dynamic_slice_in_dim(w, start, 4) @ x

    return jax.lax.scan(chunk, None, jnp.arange(0, w.shape[0], 4))[1].reshape(w.shape[0])


def composite(x: jax.Array) -> jax.Array:
    """jax#40486: a composite cannot be exported for several platforms."""
    return jax.lax.composite(lambda x: x * x, name="peers.square")(x)


FAULTS = {
    "zero columns": Fault(with_zero_columns, (X, W, LABELS), "reference", cross_entropy),
    "mean over all rows": Fault(mean_over_all_rows, (X, W, LABELS), "reference", cross_entropy),
    "gradient of ignored rows": Fault(ignored_rows_have_a_gradient, (X @ W.T, LABELS), "derivative"),
    "16-bit logits": Fault(logits_in_their_dtype, (8 * X, 4 * W), "bfloat16_accuracy"),
    "16-bit embedding gradient": Fault(
        gradient_added_in_16_bits, (W, np.ones(2048, np.int32)), "bfloat16_accuracy", lambda t, i: t[i]
    ),
    "16-bit second moment": Fault(second_moment_in_16_bits, (np.ones(4, np.float32),), "bfloat16_accuracy"),
    "forgotten cotangent": Fault(tiled_with_gradients, (X, W, LABELS), "cotangent_scaling"),
    "first row's cotangent": Fault(losses_of_rows, (X @ W.T, LABELS), "derivative"),
    "bias": Fault(with_bias, (X, X[0]), "derivative"),
    "no forward mode": Fault(with_bias, (X, X[0]), "jvp"),
    "varying axes": Fault(streamed, (X, W), "shard_map", batched=(0, None)),
    "gathered weight": Fault(in_chunks_of_classes, (np.tile(W[:8], (2, 1)), X[0]), "auto_mesh", batched=(0, None)),
    "composite": Fault(composite, (X,), "export"),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", FAULTS)
def test_fault_of_a_peer_is_caught(name: str) -> None:
    if name == "composite" and jax.__version_info__ >= (0, 12):
        pytest.skip("JAX 0.12 has mended this one")
    fault = FAULTS[name]
    report = check_operator(
        fault.fn,
        fault.operands,
        batched=fault.batched,
        promises=["runs", "deterministic", fault.caught_by],
        reference=fault.reference,
    )
    assert [promise for promise, _ in report.broken] == [fault.caught_by], str(report)


def test_page_lists_the_faults() -> None:
    table = (Path(__file__).parents[2] / "docs" / "testing.md").read_text().split("| fault |")[1]
    caught_by = re.findall(r"\| `(\w+)` \|", table)
    expected = [fault.caught_by for name, fault in FAULTS.items() if name != "no forward mode"]
    assert sorted(caught_by) == sorted(expected)


def test_sound_loss_is_not_caught() -> None:
    promises = ["derivative", "cotangent_scaling", "bfloat16_accuracy"]
    report = check_operator(cross_entropy, (X, W, LABELS), promises=promises)
    assert report.kept == ("derivative", "cotangent_scaling", "bfloat16_accuracy"), str(report)
