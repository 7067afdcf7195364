"""Default suite of `jaxops tune`: every kernel, at the shapes that models have."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxops import aclnn
from jaxops.affine_grid import affine_grid
from jaxops.batch_norm import batch_norm
from jaxops.divisive_norm import divisive_norm
from jaxops.dropout import dropout
from jaxops.embedding import embedding
from jaxops.grid_sample import grid_sample
from jaxops.linear_cross_entropy import linear_cross_entropy, linear_log_probs
from jaxops.local_response_norm import local_response_norm
from jaxops.pooling import max_pool
from jaxops.softmax import softmax
from lowering.campaign.suite import Case

F32, BF16, F16 = "float32", "bfloat16", "float16"


def _divisive_norm(*operands: jax.Array) -> Any:
    """Computes the result, and the gradients of x and of the means if there are any."""
    y, pull_back = jax.vjp(functools.partial(divisive_norm, layout="NHWC"), *operands)
    return y, *pull_back(jnp.cos(3 * y))


def _sampled(x: jax.Array) -> Any:
    """Computes images that are turned, and the gradients of the images and of the grid."""
    theta = jnp.broadcast_to(jnp.array([[0.9, 0.3, 0.1], [-0.3, 1.1, -0.2]], x.dtype), (x.shape[0], 2, 3))
    y, pull_back = jax.vjp(grid_sample, x, affine_grid(theta, x.shape))
    return y, *pull_back(jnp.cos(3 * y))


def _with_gradient(fn: Callable[..., jax.Array], *operands: jax.Array) -> Any:
    """Computes the result, and gradients from cotangents that do not cancel."""
    y, pull_back = jax.vjp(fn, *operands)
    return y, pull_back(jnp.cos(3 * y))


def _normal(seed: int, shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> jax.Array:
    return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)


def _ids(seed: int, count: int, classes: int) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (count,), 0, classes)


def _arrays(*sizes: Any) -> tuple[jax.Array]:
    """Draws one array; the last of the sizes is its dtype."""
    *shape, dtype = sizes
    return (_normal(0, tuple(shape), dtype, 2.0),)


def _batch_norm_arguments(*sizes: Any) -> tuple[jax.Array, ...]:
    (x,) = _arrays(*sizes)
    channels = x.shape[1]
    return x, 1 + 0.1 * _normal(1, (channels,), F32), _normal(2, (channels,), F32)


def _normalized(activation: str | None, has_residual: bool, x: jax.Array, scale: jax.Array, bias: jax.Array) -> Any:
    def normalized(x: jax.Array, scale: jax.Array, bias: jax.Array, *residual: jax.Array) -> jax.Array:
        return batch_norm(
            x, scale, bias, activation=activation, residual=residual[0] if residual else None, layout="NCHW"
        ).y

    return _with_gradient(normalized, x, scale, bias, *([jnp.flip(x, 0)] if has_residual else []))


def _dropped(key: jax.Array, x: jax.Array) -> Any:
    return _with_gradient(lambda x: dropout(key, x, 0.1), x)


def _looked_up(table: jax.Array, indices: jax.Array, dy: jax.Array) -> Any:
    return jax.vjp(lambda table: embedding(table, indices), table)[1](dy)


def _embedding_arguments(rows: int, width: int, positions: int, dtype: str) -> tuple[jax.Array, ...]:
    # A quarter of the positions hold one id, as frequent words do.
    indices = jnp.where(jnp.arange(positions) % 4 == 0, rows // 2, _ids(1, positions, rows))
    return _normal(0, (rows, width), dtype), indices, _normal(2, (positions, width), dtype)


def _adam_arguments(count: int, dtype: str) -> tuple[jax.Array, ...]:
    grad, var, m, s = (_normal(seed, (count,), dtype) for seed in range(4))
    return grad, var, m, jnp.square(m), s, jnp.asarray([3], jnp.int32)


def _adam(*operands: jax.Array) -> Any:
    return aclnn.apply_fused_ema_adam(
        *operands, lr=1e-3, ema_decay=0.99, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1
    )


def _cross_entropy_arguments(rows: int, hidden: int, classes: int, dtype: str) -> tuple[jax.Array, ...]:
    labels = _ids(2, rows, classes).at[::7].set(-100).at[0].set(classes - 1)
    return _normal(0, (rows, hidden), dtype), _normal(1, (classes, hidden), dtype, 4 / math.sqrt(hidden)), labels


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
_IMAGES = ((2, 3, 8, 16, F32), (3, 21, 17, 19, BF16), (8, 64, 28, 28, F32))
_LARGE_IMAGES = ((32, 64, 56, 56, BF16), (32, 256, 28, 28, F32))
_SMALL_IMAGES = ((2, 5, 9, 16, F32),)

SUITE = (
    Case(
        "softmax of rows",
        functools.partial(_with_gradient, softmax),
        _arrays,
        ((1, 128, F32), (33, 129, BF16), (64, 1000, F16), (8, 50257, F32)),
        ((16384, 4096, BF16), (8192, 32000, F32)),
        ((3, 130, F32),),
    ),
    Case(
        "softmax of channels",
        functools.partial(_with_gradient, functools.partial(softmax, axis=1, algorithm="log")),
        _arrays,
        _IMAGES,
        ((32, 21, 512, 512, F32), *_LARGE_IMAGES),
        _SMALL_IMAGES,
    ),
    *(
        Case(
            name,
            functools.partial(_normalized, activation, has_residual),
            _batch_norm_arguments,
            _IMAGES,
            _LARGE_IMAGES,
            _SMALL_IMAGES if has_residual else (),
        )
        for name, activation, has_residual in (
            ("batch norm", None, False),
            ("batch norm, relu", "relu", False),
            ("batch norm, residual, relu", "relu", True),
        )
    ),
    Case(
        "local response norm",
        functools.partial(_with_gradient, functools.partial(local_response_norm, layout="NCHW")),
        _arrays,
        _IMAGES,
        _LARGE_IMAGES,
        _SMALL_IMAGES,
    ),
    Case("divisive norm", _divisive_norm, _arrays, _IMAGES, _LARGE_IMAGES, _SMALL_IMAGES),
    Case(
        "divisive norm with means",
        lambda x: _divisive_norm(x, jnp.tanh(x)),
        _arrays,
        _IMAGES,
        _LARGE_IMAGES,
        (),
    ),
    Case("grid sample", _sampled, _arrays, _IMAGES, _LARGE_IMAGES, ((1, 3, 4, 6, F32),)),
    Case(
        "max pool",
        functools.partial(_with_gradient, functools.partial(max_pool, window=2, layout="NHWC")),
        _arrays,
        ((1, 4, 4, 128, F32), (3, 7, 6, 256, BF16), (8, 28, 28, 128, F32)),
        ((32, 112, 112, 128, BF16), (32, 112, 112, 128, F32)),
        ((2, 8, 8, 128, F32),),
    ),
    Case(
        "dropout",
        _dropped,
        lambda *sizes: (jax.random.key(0), *_arrays(*sizes)),
        # Kernels want rows of 4096 elements. That of TPUs takes others, too.
        ((33, 129, BF16), (64, 1000, F32), (3, 4096, BF16), (2, 4128, BF16), (2, 8192, F16)),
        ((16384, 4096, BF16), (16384, 4096, F32)),
        ((4, 4096, F32),),
    ),
    Case(
        "embedding gradient",
        _looked_up,
        _embedding_arguments,
        ((10, 128, 7, F32), (1000, 160, 777, BF16), (4000, 1024, 4099, F16)),
        ((50257, 768, 8192, F32), (128256, 4096, 16384, BF16)),
        ((40, 128, 37, F32),),
    ),
    Case(
        "EMA-Adam",
        _adam,
        _adam_arguments,
        ((129, F32), (1025, BF16), (1151, F16), (100_003, F32)),
        ((2**24, BF16), (2**26, F32)),
        ((1151, F32),),
    ),
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
