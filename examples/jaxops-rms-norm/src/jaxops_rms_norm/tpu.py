"""RMS normalization on TPU: a block of rows is read once and written once."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.kernel import Kernel

_DTYPES = ("float32", "bfloat16")
_ROWS = 16  # a multiple of the rows of a tile, which are 8 for float32 and 16 for bfloat16
# VMEM: a block of x and one of y in two buffers each, and two float32 values of that size, 24 bytes an element. That
# is 12 MiB of the 16 MiB that XLA grants, with the largest block.
_BLOCK_ELEMENTS = 2**19


def _kernel(x_ref: Any, weight_ref: Any, y_ref: Any, *, epsilon: float) -> None:
    x = x_ref[...].astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)
    y_ref[...] = (x * scale * weight_ref[...].astype(jnp.float32)).astype(y_ref.dtype)


def run(
    x: jax.Array, weight: jax.Array, *, epsilon: float, config: Mapping[str, int], interpret: Any = False
) -> tuple[jax.Array, ...]:
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    block = (min(config["block_rows"], rows.shape[0]), width)
    # Where the last block reaches beyond the rows, it computes what nobody reads.
    y = pl.pallas_call(
        functools.partial(_kernel, epsilon=epsilon),
        name="rms_norm",
        grid=(pl.cdiv(rows.shape[0], block[0]),),
        in_specs=[pl.BlockSpec(block, lambda i: (i, 0)), pl.BlockSpec((1, width), lambda i: (0, 0))],
        out_specs=pl.BlockSpec(block, lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct(rows.shape, x.dtype),
        # For each element a square, a sum and two products; for each row a root.
        cost_estimate=pl.CostEstimate(
            flops=4 * rows.size, transcendentals=rows.shape[0], bytes_accessed=2 * rows.size * rows.dtype.itemsize
        ),
        interpret=interpret,
    )(rows, weight[None])
    return (y.reshape(x.shape),)


def refuses(hardware: Any, x: Any, weight: Any, *, epsilon: float) -> str | None:
    """Says why the kernel cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    for name, operand in (("x", x), ("weight", weight)):
        if jnp.dtype(operand.dtype).name not in _DTYPES:
            return f"Mosaic TPU computes on {' and '.join(_DTYPES)}; {name} is {operand.dtype}"
    if 0 in x.shape:
        return f"there is nothing to normalize; x is {list(x.shape)}"
    if x.shape[-1] > _BLOCK_ELEMENTS // _ROWS:
        return f"{_ROWS} rows of {x.shape[-1]} elements do not fit into VMEM"
    return None


def configs(hardware: Any, x: Any, weight: Any, *, epsilon: float) -> Sequence[Mapping[str, int]]:
    """Returns block sizes worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    rows = [elements // x.shape[-1] // _ROWS * _ROWS for elements in (_BLOCK_ELEMENTS, _BLOCK_ELEMENTS // 4)]
    needed = math.ceil(math.prod(x.shape[:-1]) / _ROWS) * _ROWS
    return [{"block_rows": block} for block in dict.fromkeys(min(max(each, _ROWS), needed) for each in rows)]


# `measured_on` is empty: nobody has timed it on a TPU, so it runs where `jaxops.use("pallas")` asks for it.
KERNEL = Kernel(name="mosaic_tpu", platform="tpu", run=run, refuses=refuses, configs=configs)
