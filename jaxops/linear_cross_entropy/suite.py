"""Cases of linear cross entropy in the suite of `jaxops tune`."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxops import aclnn
from jaxops._cases import BF16, F16, ids, normal
from jaxops.linear_cross_entropy.api import linear_cross_entropy
from jaxops.linear_cross_entropy.linear_log_probs import linear_log_probs
from lowering.campaign.suite import Case


def _cross_entropy_arguments(rows: int, hidden: int, classes: int, dtype: str) -> tuple[jax.Array, ...]:
    labels = ids(2, rows, classes).at[::7].set(-100).at[0].set(classes - 1)
    return normal(0, (rows, hidden), dtype), normal(1, (classes, hidden), dtype, 4 / math.sqrt(hidden)), labels


def _cross_entropy(
    strategy: str, x: jax.Array, weight: jax.Array, labels: jax.Array, chunk_rows: int | None = None
) -> Any:
    loss = functools.partial(linear_cross_entropy, labels=labels, strategy=strategy, chunk_rows=chunk_rows)
    return jax.value_and_grad(loss, (0, 1))(x, weight)


def _capped_cross_entropy(x: jax.Array, weight: jax.Array, labels: jax.Array) -> Any:
    bias = jnp.linspace(-1, 1, weight.shape[0], dtype=jnp.float32)

    def loss(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
        return linear_cross_entropy(
            x, weight, labels, bias=bias, softcap=20.0, label_smoothing=0.1, strategy="recompute"
        )

    return jax.value_and_grad(loss, (0, 1, 2))(x, weight, bias)


def _split_cross_entropy(x: jax.Array, weight: jax.Array, labels: jax.Array) -> Any:
    """Computes the loss as one of several devices does, whose part of the vocabulary begins at 100."""
    found = aclnn.fused_linear_online_max_sum(
        x, weight, jnp.maximum(labels, 0), vocab_start_index=100, vocab_end_index=100 + weight.shape[0]
    )
    return aclnn.fused_linear_cross_entropy_loss_grad(
        jnp.ones(labels.shape, jnp.float32),
        x,
        weight,
        found.target_mask,
        found.masked_target,
        logits_max=found.logits_max_local,
        sum_exp_logits=found.sum_exp_logits_local,
    )


# Rows, hidden size and classes: edges of a block of 256 rows, of a tile of 128 classes and of eight; whole runs of
# tiles.
_LOSSES = ((1, 64, 128, BF16), (255, 136, 1000, F16), (257, 192, 2050, BF16), (1024, 256, 50257, BF16))
# For kernels in loops: in chunks of 128 rows three whole ones count, and a part of a fourth; in chunks of 1024 classes
# there are four and a rest. 17 blocks of the hidden size are an odd number, and more than there are stages.
_CHUNKED_LOSSES = ((512, 1088, 4100, BF16),)
_CHUNK_ROWS, _CHUNK_CLASSES = 128, 1024
_LARGE_LOSSES = ((4096, 1024, 32768, BF16), (8192, 4096, 128256, BF16))


SUITE = (
    Case(
        "linear cross entropy",
        functools.partial(_cross_entropy, "recompute"),
        _cross_entropy_arguments,
        _LOSSES,
        _LARGE_LOSSES,
        ((3, 64, 100, BF16),),
    ),
    Case(
        "linear cross entropy, gradients in the forward pass",
        functools.partial(_cross_entropy, "grad_in_forward"),
        _cross_entropy_arguments,
        _LOSSES,
        _LARGE_LOSSES,
        ((3, 64, 100, BF16),),
    ),
    Case(
        "linear cross entropy in chunks",
        functools.partial(_cross_entropy, "recompute"),
        _cross_entropy_arguments,
        _CHUNKED_LOSSES,
        _LARGE_LOSSES[:1],
        (),
        is_timed=False,
        loops=("linear_cross_entropy_backward",),
        overrides={"chunk_columns": _CHUNK_CLASSES},
    ),
    Case(
        "linear cross entropy in chunks, gradients in the forward pass",
        functools.partial(_cross_entropy, "grad_in_forward", chunk_rows=_CHUNK_ROWS),
        _cross_entropy_arguments,
        _CHUNKED_LOSSES,
        _LARGE_LOSSES[:1],
        (),
        is_timed=False,
        loops=("linear_cross_entropy_sum_with_gradients",),
    ),
    Case(
        "linear cross entropy without gradients",
        functools.partial(linear_cross_entropy, strategy="grad_in_forward"),
        _cross_entropy_arguments,
        _LOSSES,
        _LARGE_LOSSES[:1],
        ((3, 64, 100, BF16),),
    ),
    Case(
        "log-probabilities at a temperature",
        functools.partial(linear_log_probs, temperature=0.7, return_entropy=True),
        _cross_entropy_arguments,
        _LOSSES,
        _LARGE_LOSSES[:1],
        ((3, 64, 100, BF16),),
    ),
    Case(
        "linear cross entropy, softcap, smoothing, bias",
        _capped_cross_entropy,
        _cross_entropy_arguments,
        _LOSSES,
        _LARGE_LOSSES[:1],
        (),
    ),
    Case(
        "linear cross entropy of a split vocabulary",
        _split_cross_entropy,
        _cross_entropy_arguments,
        _LOSSES[1:],
        _LARGE_LOSSES[:1],
        ((3, 64, 100, BF16),),
    ),
)
