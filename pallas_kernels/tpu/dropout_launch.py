"""The launch of a kernel of dropout on TPU."""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.dropout_mask import WORD_BITS
from pallas_kernels.tpu.streaming_cost import streaming_cost

# Vector operations for an element: the generator's, for 32 elements at once; then a bit is tested, and the element
# scaled and selected.
_DRAW_FLOPS = 7 * 120 // WORD_BITS
_SELECT_FLOPS = 4


def launch(kernel, name, grid, in_specs, out_specs, results, interpret, operands, *, scratch=()):
    """Launches a kernel, which takes the operands without specs as scalars.

    Where words are left in scratch for the next step, the last axis of the grid is a sequence.
    """
    from jax.experimental.pallas import tpu as pltpu  # here, because only lowering for a TPU needs its 0.2 s

    draws = len(results) > 1
    semantics: Any = ("parallel", "arbitrary") if draws and scratch else ("parallel",) * len(grid)
    return pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        # The scalar core reads scalars from SMEM.
        in_specs=[*[pl.BlockSpec(memory_space=pltpu.SMEM)] * (len(operands) - len(in_specs)), *in_specs],
        out_specs=out_specs,
        out_shape=results,
        scratch_shapes=[pltpu.VMEM(shape, jnp.uint32) for shape in scratch],
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
        cost_estimate=streaming_cost((*operands, *results), results[0].size, flops=draws * _DRAW_FLOPS + _SELECT_FLOPS),
        interpret=interpret,
    )(*operands)
