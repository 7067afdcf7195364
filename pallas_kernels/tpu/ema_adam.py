"""EMA-Adam on TPU: one pass over HBM, with parameters and optimizer state updated in place if they are donated.

Five arrays are read and four written, with some thirty flops per element, so only HBM traffic counts. Changing how an
array is tiled in HBM would cost as much again as the operator itself; the kernel's view of the arrays avoids that.

Aliases bind a custom call. If the caller donated nothing, XLA would copy the four operands first, and without aliases
the four results of a caller who did donate; either takes 1.9 times as long. So `in_place` follows the program. Only a
loop over steps in a program that donates nothing still copies.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.ema_adam_update import COEFFICIENTS, ema_adam_update
from pallas_kernels.kernel import Kernel, Kind, dtype_names
from pallas_kernels.tpu.stored_order import LANES, SUBLANES, round_up, stored_order
from pallas_kernels.tpu.streaming_cost import streaming_cost

_TILE = SUBLANES * LANES
_MAX_LOOSE_VECTOR = 2**20  # reshaping a longer vector, if not of whole tiles, costs more than the update
_DTYPES = ("float32", "bfloat16")
# VMEM: five inputs and four outputs, two buffers each, so 9 * 2 * block_bytes: 9.4 MB for the largest, within the
# 16 MiB that XLA grants. What a step costs beside its block, a tenth of HBM's time on v7x, asks for the largest.
_BLOCK_BYTES = (2**19, 2**18, 2**17)


def _kernel(coefficients_ref, grad_ref, var_ref, m_ref, v_ref, s_ref, *out_refs, mode, output):
    # Beyond the edge, ragged blocks hold undefined values. No element reads another, and the pipeline clips the stores.
    operands = (ref[...].astype(jnp.float32) for ref in (grad_ref, var_ref, m_ref, v_ref, s_ref))
    coefficients = [coefficients_ref[i] for i in range(len(COEFFICIENTS))]
    results = ema_adam_update(operands, coefficients, mode=mode, output=output)
    for out_ref, result in zip(out_refs, results, strict=True):
        out_ref[...] = result.astype(out_ref.dtype)


def _view_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Returns (untiled, rows, columns): collapsing the untiled major axes moves nothing."""
    if len(shape) >= 2:
        *untiled, rows, columns = (shape[axis] for axis in stored_order(shape))
        return math.prod(untiled), rows, columns
    size = math.prod(shape)
    # A vector of whole tiles is stored as rows of lanes already; any other has to be copied into a single row.
    return (1, 1, size) if size % _TILE else (1, size // LANES, LANES)


def _to_view(x: jax.Array) -> jax.Array:
    return (jnp.transpose(x, stored_order(x.shape)) if x.ndim >= 2 else x).reshape(_view_shape(x.shape))


def _from_view(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    if len(shape) < 2:
        return x.reshape(shape)
    order = stored_order(shape)
    return jnp.transpose(x.reshape([shape[axis] for axis in order]), [order.index(axis) for axis in range(len(shape))])


def _block_shape(view_shape: tuple[int, int, int], block_elements: int) -> tuple[int, int, int]:
    """Returns the largest block of about `block_elements` padded elements, grown from the minor axis outwards."""
    untiled, rows, columns = view_shape
    min_rows = min(round_up(rows, SUBLANES), 2 * SUBLANES)  # two tiles of rows fill a register of 16-bit values
    block_columns = min(columns, block_elements // min_rows // LANES * LANES)
    padded_columns = round_up(block_columns, LANES)
    block_rows = min(rows, block_elements // padded_columns // min_rows * min_rows)
    block_untiled = min(untiled, block_elements // (round_up(block_rows, SUBLANES) * padded_columns))
    return block_untiled, block_rows, block_columns


def run(grad, var, m, v, s, coefficients, *, mode, output, config, interpret=False, in_place=True):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    from jax.experimental.pallas import tpu as pltpu  # here, because only lowering for a TPU needs its 0.2 s

    if grad.size == 0:
        return var, m, v, s
    operands = tuple(map(_to_view, (grad, var, m, v, s)))
    view_shape = _view_shape(grad.shape)
    block_shape = _block_shape(view_shape, config["block_elements"])
    block_spec = pl.BlockSpec(block_shape, lambda *indices: indices)
    overwritten = overwrites(grad, var, m, v, s, coefficients, mode=mode, output=output) if in_place else ()
    # The coefficients come first; results are var or its update, m, v and s.
    aliases = {index + 1: max(0, index - 1) for index in overwritten}
    if interpret and any(extent % block for extent, block in zip(view_shape, block_shape, strict=True)):
        aliases = {}  # JAX's interpreter (0.10 to 0.12) would hand ragged aliased outputs back with their padding
    results = pl.pallas_call(
        functools.partial(_kernel, mode=mode, output=output),
        name="ema_adam",
        grid=tuple(map(pl.cdiv, view_shape, block_shape)),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), *[block_spec] * 5],
        out_specs=[block_spec] * 4,
        out_shape=[jax.typeof(operand) for operand in operands[1:]],
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3),
        # Some thirty operations for each element, and the root of the second moment.
        cost_estimate=streaming_cost((*operands, *operands[1:]), grad.size, flops=30, transcendentals=1),
        interpret=interpret,
    )(coefficients, *operands)
    return tuple(_from_view(result, grad.shape) for result in results)


def refuses(hardware, grad, var, m, v, s, coefficients, *, mode, output) -> str | None:
    """Says why the kernel cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    for name, operand in {"grad": grad, "var": var, "m": m, "v": v, "s": s}.items():
        if jnp.dtype(operand.dtype).name not in _DTYPES:
            return f"Mosaic TPU computes on {' and '.join(_DTYPES)}; {name} is {jnp.dtype(operand.dtype).name}"
    size = math.prod(grad.shape)
    if len(grad.shape) < 2 and size % _TILE and size > _MAX_LOOSE_VECTOR:
        return f"XLA would copy vectors of {size} elements to reshape them: not a multiple of {_TILE}"
    return None


def configs(hardware, grad, var, m, v, s, coefficients, *, mode, output):
    """Lists block sizes worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    widest = max(jnp.dtype(x.dtype).itemsize for x in (grad, var, m, v, s))
    return tuple({"block_elements": block_bytes // widest} for block_bytes in _BLOCK_BYTES)


def overwrites(grad, var, m, v, s, coefficients, *, mode, output):
    """Returns the operands that are updated in place; see `pallas_kernels.kernel.Kernel.overwrites`."""
    # An update leaves the parameters to their owner, who has yet to apply it, and replaces the gradient if it can.
    first = (1,) if output == "params" else (0,) if grad.dtype == var.dtype else ()
    return *first, 2, 3, 4


def kind(hardware, grad, var, m, v, s, coefficients, *, mode, output) -> Kind:
    """Returns what makes cases alike; see `pallas_kernels.kernel.Kernel.kind`."""
    return Kind(f"{dtype_names(grad, var, m, v, s)}, {mode}, {output}", (max(1, grad.size),))


KERNEL = Kernel(
    name="mosaic_tpu", platform="tpu", run=run, refuses=refuses, configs=configs, kind=kind, overwrites=overwrites
)
