"""The cases of `evidence.py`: functions that use the operators, at a grid of sizes and at those that replays list."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tpu_schedules import (
    BF16,
    F32,
    I32,
    adam_step,
    normalized,
    pooled,
    shape,
    with_gradient,
    with_gradients_of_y,
)

import jaxops
from lowering.explain import OperatorUse, operator_uses
from lowering.register import kernels_of
from lowering.static_leaves import jaxpr_of
from lowering.targets import named
from pallas_kernels.hardware import Hardware
from pallas_kernels.kernel import Kernel
from pallas_kernels.tpu import embedding

Sizes = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Family:
    """Cases of one function that differ in their sizes.

    Attributes:
      operators: those whose kernels the cases are about.
      options: each makes cases of other kinds.
      call: a function of arrays, and its operands, from an option and sizes.
      grid: the sizes of each axis, in steps of four to eight.
      elements: the least and the most numbers in the largest operand.
      listed: options and sizes beside the grid: what docs/replays.md lists, and kinds that the grid lacks.
      scalars: what kernels' scalar operands hold, by kernel and position, from operands and sizes.
    """

    operators: tuple[str, ...]
    options: tuple[Any, ...]
    call: Callable[[Any, Sizes], tuple[Callable[..., Any], tuple[Any, ...]]]
    grid: tuple[tuple[int, ...], ...]
    elements: tuple[int, int]
    listed: tuple[tuple[Any, Sizes], ...]
    scalars: Callable[[Any, Sizes], Mapping[str, Mapping[int, Any]] | None] = lambda option, sizes: None

    def cases(self) -> Iterator[tuple[Any, Sizes]]:
        """Yields what is listed, and every option at every size of the grid."""
        yield from self.listed
        # The smallest first: a replay of the largest cross entropies takes many minutes.
        for sizes, option in itertools.product(sorted(itertools.product(*self.grid), key=math.prod), self.options):
            if self.is_inside(option, sizes):
                yield option, sizes

    def is_inside(self, option: Any, sizes: Sizes) -> bool:
        """Tells whether operands of these sizes are neither too small to matter nor too large for a chip."""
        _, operands = self.call(option, sizes)
        largest = max(math.prod(x.shape) for x in operands)
        return self.elements[0] <= largest <= self.elements[1]

    def drawn(self, draws: np.random.Generator, beyond: float = 1) -> tuple[Any, Sizes]:
        """Draws an option, and sizes by their logarithm, from the grid's smallest to its largest by a factor beyond."""
        while True:
            option = self.options[draws.integers(len(self.options))]
            ends = [(math.log(axis[0] / beyond), math.log(axis[-1] * beyond + 1)) for axis in self.grid]
            sizes = tuple(int(np.exp(draws.uniform(*each))) for each in ends)
            if self.is_inside(option, sizes):
                return option, sizes


def softmax(option: Any, sizes: Sizes) -> Any:
    dtype, algorithm = option
    x = shape(*sizes, dtype=dtype)
    return with_gradient(functools.partial(jaxops.softmax, algorithm=algorithm)), (x, x)


def side_of(pixels: int) -> int:
    """Returns rows and columns of an image of about so many pixels."""
    return max(1, round(math.sqrt(pixels)))


def images(layout: str, n: int, pixels: int, channels: int, dtype: Any) -> jax.ShapeDtypeStruct:
    side = side_of(pixels)
    return shape(*((n, side, side, channels) if layout == "NHWC" else (n, channels, side, side)), dtype=dtype)


def local_response_norm(option: Any, sizes: Sizes) -> Any:
    dtype, layout = option
    x = images(layout, *sizes, dtype)
    return with_gradient(functools.partial(jaxops.local_response_norm, n=5, layout=layout)), (x, x)


def divisive_norm(option: Any, sizes: Sizes) -> Any:
    dtype, layout, has_means = option
    x = images(layout, *sizes, dtype)

    def run(grad: jax.Array, *operands: jax.Array) -> Any:
        y, vjp = jax.vjp(functools.partial(jaxops.divisive_norm, n=5, layout=layout), *operands)
        return y, vjp(grad)

    return run, (x, x, *(x,) * has_means)


def grid_sample(option: Any, sizes: Sizes) -> Any:
    n, pixels, channels = sizes
    x = images("NCHW", n, pixels, channels, option)
    return jaxops.grid_sample, (x, shape(n, *x.shape[2:], 2))


def batch_norm(option: Any, sizes: Sizes) -> Any:
    dtype, layout = option
    x, channels = images(layout, *sizes, dtype), (shape(sizes[-1]),) * 4
    return with_gradients_of_y(functools.partial(normalized, layout=layout)), (x, x, *channels)


def max_pool(option: Any, sizes: Sizes) -> Any:
    dtype, layout, window = option
    x, pool = images(layout, *sizes, dtype), functools.partial(pooled, layout=layout, window=window)
    return with_gradient(pool), (x, jax.eval_shape(pool, x))


def max_pool_value(option: Any, sizes: Sizes) -> Any:
    dtype, layout, window = option
    return functools.partial(pooled, layout=layout, window=window), (images(layout, *sizes, dtype),)


def dropout(option: Any, sizes: Sizes) -> Any:
    rows, columns = sizes
    x = shape(rows, -(-columns // 32) * 32, dtype=option)

    def run(x: jax.Array, grad: jax.Array, key: jax.Array) -> Any:
        y, vjp = jax.vjp(lambda x: jaxops.dropout(key, x, 0.1), x)
        return y, vjp(grad)

    return run, (x, x, shape(2, dtype=jnp.uint32))


def embedding_gradient(option: Any, sizes: Sizes) -> Any:
    positions, width, classes = sizes

    def run(grad: jax.Array, indices: jax.Array) -> Any:
        table = jnp.zeros((classes, width), option)
        return jax.vjp(lambda table: jaxops.embedding(table, indices), table)[1](grad)

    return run, (shape(positions, width, dtype=option), shape(positions, dtype=I32))


def drawn_ids(sizes: Sizes) -> np.ndarray:
    """Returns ids of all positions, drawn evenly."""
    return np.random.default_rng(0).integers(0, sizes[2], sizes[0]).astype(np.int32)


def embedding_scalars(option: Any, sizes: Sizes) -> Any:
    (positions, width, classes), indices = sizes, drawn_ids(sizes)
    grad, hardware = shape(positions, width, dtype=option), named("tpu-v5e")
    offered = embedding.KERNEL.configs(hardware, grad, indices, num_weights=classes)
    if not offered:
        return None
    scalars = embedding.scalar_operands(jnp.asarray(indices), classes, width, option, offered[0])
    return {"embedding_dense_backward": dict(enumerate(map(np.asarray, scalars)))}


def ema_adam(option: Any, sizes: Sizes) -> Any:
    return adam_step, (*(shape(*sizes, dtype=option),) * 5, shape(dtype=I32))


# Options of log-probabilities.
SCORES: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "entropy": {"return_entropy": True},
    "softcap": {"softcap": 30.0},
}


def cross_entropy(option: Any, sizes: Sizes) -> Any:
    (dtype, score), (rows, features, classes) = option, sizes
    operands = shape(rows, features, dtype=dtype), shape(classes, features, dtype=dtype), shape(rows, dtype=I32)
    # The loss's value has the same operator, inside of its own rule for derivatives.
    return functools.partial(jaxops.linear_log_probs, **SCORES[score]), operands


def cross_entropy_gradients(option: Any, sizes: Sizes) -> Any:
    _, operands = cross_entropy((option, "plain"), sizes)
    return jax.value_and_grad(jaxops.linear_cross_entropy, (0, 1)), operands


FLOATS = (F32, BF16)
LAYOUTS = tuple(itertools.product(FLOATS, ("NHWC", "NCHW")))
LIVE = {"linear_cross_entropy": {0: 1}}
FAMILIES = {
    "softmax": Family(
        ("softmax", "softmax_backward"),
        tuple(itertools.product(FLOATS, ("accurate", "log"))),
        softmax,
        ((64, 512, 4096, 32768, 262144), (64, 200, 256, 1000, 1024, 4096, 16384, 50257, 65536, 262144)),
        (2**19, 2**28),
        (
            *(((F32, "accurate"), sizes) for sizes in ((16384, 4096), (4096, 32000))),
            ((BF16, "accurate"), (65536, 1024)),
            # Columns lie in sublanes, and pass in pieces.
            *(((F32, algorithm), (512, 13203)) for algorithm in ("accurate", "log")),
        ),
    ),
    "local_response_norm": Family(
        ("local_response_norm", "local_response_norm_backward"),
        LAYOUTS,
        local_response_norm,
        ((32, 256), (7 * 7, 14 * 14, 28 * 28, 56 * 56, 112 * 112), (32, 128, 512)),
        (2**21, 2**26),
        (
            ((F32, "NCHW"), (128, 55 * 55, 96)),
            ((F32, "NCHW"), (128, 27 * 27, 256)),
            ((BF16, "NCHW"), (64, 112 * 112, 64)),
        ),
    ),
    "divisive_norm": Family(
        ("divisive_norm", "divisive_norm_backward"),
        tuple((*layout, has_means) for layout in LAYOUTS for has_means in (False, True)),
        divisive_norm,
        ((16, 128), (14 * 14, 56 * 56), (64, 256)),
        (2**20, 2**26),
        (
            *(((F32, "NCHW", has_means), (128, 27 * 27, 96)) for has_means in (False, True)),
            *(((F32, "NHWC", has_means), (32, 56 * 56, 128)) for has_means in (False, True)),
            # Columns lie in sublanes. The fewer there are, the faster the kernel compiles.
            *(((F32, "NHWC", True), sizes) for sizes in ((52, 16 * 16, 169), (19, 22 * 22, 146))),
        ),
    ),
    # XLA's gradient takes as many turns as data say.
    "grid_sample": Family(
        ("grid_sample",),
        FLOATS,
        grid_sample,
        ((4, 32), (14 * 14, 56 * 56), (32, 256)),
        (2**16, 2**23),
        (),
    ),
    "batch_norm": Family(
        ("batch_norm", "batch_norm_backward"),
        LAYOUTS,
        batch_norm,
        ((32, 256), (7 * 7, 14 * 14, 28 * 28, 56 * 56, 112 * 112), (64, 256, 2048)),
        (2**20, 2**28),
        (
            *(((BF16, "NHWC"), sizes) for sizes in ((256, 112 * 112, 64), (256, 56 * 56, 64), (256, 28 * 28, 256))),
            ((BF16, "NHWC"), (256, 14 * 14, 1024)),
            ((F32, "NCHW"), (256, 56 * 56, 64)),
        ),
    ),
    "max_pool": Family(
        ("max_pool_backward",),
        tuple((*layout, window) for layout in LAYOUTS for window in (3, 2)),
        max_pool,
        ((32, 256), (28 * 28, 56 * 56, 112 * 112), (64, 256)),
        (2**21, 2**28),
        (
            ((BF16, "NHWC", 3), (256, 112 * 112, 64)),
            ((F32, "NCHW", 3), (256, 112 * 112, 64)),
            ((BF16, "NHWC", 2), (256, 56 * 56, 128)),
            ((F32, "NCHW", 2), (64, 56 * 56, 128)),
        ),
    ),
    "max_value": Family(
        ("max_pool",),
        tuple((*layout, window) for layout in LAYOUTS for window in (3, 2)),
        max_pool_value,
        ((32, 256), (28 * 28, 56 * 56, 112 * 112), (64, 256)),
        (2**21, 2**26),
        (),
    ),
    "dropout": Family(
        ("dropout", "dropout_backward"),
        FLOATS,
        dropout,
        ((256, 2048, 16384, 131072), (256, 1024, 4096, 16384)),
        (2**19, 2**27),
        (
            *((BF16, (16384, 4096)), (F32, (16384, 4096)), (BF16, (8192, 14336))),
            # Columns lie in sublanes.
            *itertools.product(FLOATS, ((8192, 96), (32768, 96), (131072, 96))),
            *itertools.product(FLOATS, ((2048, 352), (8192, 352), (32768, 352), (131072, 352))),
            *itertools.product(FLOATS, ((512, 1376), (2048, 1376), (8192, 1376), (32768, 1376))),
            *itertools.product(FLOATS, ((512, 5408), (2048, 5408), (8192, 5408))),
        ),
    ),
    "embedding": Family(
        ("embedding_dense_backward",),
        FLOATS,
        embedding_gradient,
        ((1024, 8192, 32768, 65536), (512, 4096), (8192, 65536)),
        (2**20, 2**26),
        ((F32, (8192, 1024, 32000)),),
        embedding_scalars,
    ),
    "ema_adam": Family(
        ("apply_fused_ema_adam",),
        FLOATS,
        ema_adam,
        ((1024, 8192, 65536), (1024, 4096)),
        (2**22, 2**27),
        ((F32, (65536, 1024)), (F32, (4096, 14336)), (BF16, (32000, 4096))),
    ),
    "cross_entropy": Family(
        ("linear_cross_entropy",),
        tuple((BF16, score) for score in SCORES),
        cross_entropy,
        ((1024, 8192), (512, 2048), (8192, 65536)),
        (2**22, 2**29),
        (
            *(((BF16, score), sizes) for sizes in ((4096, 1024, 32768), (8192, 4096, 131072)) for score in SCORES),
            ((BF16, "plain"), (8192, 2048, 50304)),
        ),
        lambda option, sizes: LIVE,
    ),
    "gradients": Family(
        ("linear_cross_entropy_sum_with_gradients",),
        (BF16,),
        cross_entropy_gradients,
        ((1024, 4096), (512, 1024), (8192, 32768)),
        (2**22, 2**29),
        ((BF16, (4096, 1024, 32768)),),
    ),
}
OPERATORS = frozenset(name for family in FAMILIES.values() for name in family.operators)


def uses(family: Family, option: Any, sizes: Sizes, hardware: Hardware) -> Iterator[tuple[OperatorUse, Kernel]]:
    """Yields where a case uses the family's operators, and the kernels that they have on the hardware."""
    fn, operands = family.call(option, sizes)
    for use in operator_uses(jaxpr_of(fn, operands), operands, hardware):
        if use.operator.name in family.operators:
            for kernel in kernels_of(use.operator):
                if kernel.platform == hardware.platform:
                    yield use, kernel
