"""EMA-Adam on NVIDIA GPUs from Hopper on: one pass over device memory, in place if the program donates.

Five arrays are read and four written, with some thirty flops per element, and no element is needed twice. So each
thread block moves its elements straight between device memory and registers: shared memory would save no traffic.

Functions import `mosaic_gpu` themselves: it takes a third of a second, which only those who lower for a GPU should pay.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._jax_private import interpret_gpu_params
from pallas_kernels.ema_adam_update import COEFFICIENTS, ema_adam_update
from pallas_kernels.gpu import hopper
from pallas_kernels.gpu.hopper import VECTOR, WARPGROUP
from pallas_kernels.kernel import Kernel, Kind, dtype_names

_CONFIGS = ({"block_elements": 1024}, {"block_elements": 512}, {"block_elements": 2048})


def _full_blocks(size: int, block_elements: int) -> int:
    """Counts the blocks that are updated whole; the rest is nothing, or enough to fill a warpgroup."""
    return size // block_elements if size % block_elements == 0 else (size - WARPGROUP) // block_elements


def _sqrt(x: jax.Array) -> jax.Array:
    # Mosaic GPU has no square root before jax 0.12. At 0 and infinity the product would be NaN.
    return jnp.where((x == 0) | (x == jnp.inf), x, x * lax.rsqrt(x))


def _kernel(coefficients_gmem, *refs, result_indices, mode, output, block_elements, pin_layouts):
    """Takes as `refs` grad, var, m, v, s, then results with buffers of their own; `result_indices` locates all four."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    operands_gmem, results_gmem = refs[:5], [refs[i] for i in result_indices]
    size = operands_gmem[0].shape[0]
    full_blocks = _full_blocks(size, block_elements)
    block = lax.axis_index("block")

    def load(start, width, vector):
        values = [ref[pl.ds(start, width)] for ref in operands_gmem]
        if pin_layouts:
            layout = plgpu.Layout.WG_STRIDED((width,), vec_size=vector)
            values = [plgpu.layout_cast(value, layout) for value in values]
        return [value.astype(jnp.float32) for value in values]

    def update(start, width, operands):
        coefficients = [coefficients_gmem[i] for i in range(len(COEFFICIENTS))]
        results = ema_adam_update(operands, coefficients, mode=mode, output=output, sqrt=_sqrt)
        for ref, result in zip(results_gmem, results, strict=True):
            ref[pl.ds(start, width)] = result.astype(ref.dtype)

    @pl.when(block < full_blocks)
    def _():
        start = block * block_elements
        update(start, block_elements, load(start, block_elements, min(VECTOR, block_elements // WARPGROUP)))

    rest = full_blocks * block_elements
    if rest < size:

        @pl.when(block == full_blocks)
        def _():
            # Accesses cannot be masked, so two runs of one width cover the rest, from its start and up to its end.
            # Overlapping elements are computed twice, from the same values to the same result: both runs are read
            # before either is written. The second may start anywhere, so vector accesses would not be aligned.
            width = 1 << ((size - rest).bit_length() - 1)
            starts = (rest, size - width)
            operands = [load(start, width, 1) for start in starts]
            plgpu.commit_smem()  # taken for its barrier
            for start, values in zip(starts, operands, strict=True):
                update(start, width, values)


def _result_indices(grad: jax.Array, var: jax.Array, output: str) -> tuple[int, int, int, int]:
    """Returns which of grad, var, m, v and s each result replaces; from 5 on, it has a buffer of its own."""
    # An update leaves the parameters to their owner, who has yet to apply it, and replaces the gradient if it can.
    first = 1 if output == "params" else 0 if grad.dtype == var.dtype else 5
    return first, 2, 3, 4


def run(grad, var, m, v, s, coefficients, *, mode, output, config, interpret=False, in_place=True):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if grad.size == 0:
        return var, m, v, s
    block_elements, padding = config["block_elements"], max(0, WARPGROUP - grad.size)
    operands = [x.reshape(-1) for x in (grad, var, m, v, s)]
    if padding:
        operands = [jnp.pad(x, (0, padding)) for x in operands]
    size = operands[0].size
    full_blocks = _full_blocks(size, block_elements)
    result_indices = _result_indices(grad, var, output) if in_place else (5, 6, 7, 8)
    # pl.kernel updates Refs in place; plgpu.kernel wraps it in a custom_vmap that takes none in jax 0.10.
    refs = [jax.new_ref(x, memory_space=plgpu.GMEM) if i in result_indices else x for i, x in enumerate(operands)]
    new_buffers = pl.kernel(
        functools.partial(
            _kernel,
            result_indices=result_indices,
            mode=mode,
            output=output,
            block_elements=block_elements,
            pin_layouts=not interpret,  # the interpreter of jax 0.10 has no layouts
        ),
        out_type=[jax.typeof(x) for x, i in zip(operands[1:], result_indices, strict=True) if i >= len(operands)],
        mesh=plgpu.Mesh(grid=(full_blocks + (full_blocks * block_elements < size),), grid_names=("block",)),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret_gpu_params() if interpret is True else interpret,
        name="ema_adam",
    )(coefficients, *refs)
    buffers = (*refs, *new_buffers)
    results = (jax.freeze(buffers[i]) if i < len(refs) else buffers[i] for i in result_indices)
    return tuple(x[: grad.size].reshape(grad.shape) for x in results)


def refuses(hardware, grad, var, m, v, s, coefficients, *, mode, output) -> str | None:
    """Says why the kernel cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    return hopper.refusal(hardware, grad=grad, var=var, m=m, v=v, s=s)


def configs(hardware, grad, var, m, v, s, coefficients, *, mode, output):
    """Lists block sizes worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    return _CONFIGS


def overwrites(grad, var, m, v, s, coefficients, *, mode, output):
    """Returns the operands that are updated in place; see `pallas_kernels.kernel.Kernel.overwrites`."""
    return tuple(index for index in _result_indices(grad, var, output) if index < 5)


def kind(hardware, grad, var, m, v, s, coefficients, *, mode, output) -> Kind:
    """Returns what makes cases alike; see `pallas_kernels.kernel.Kernel.kind`."""
    return Kind(f"{dtype_names(grad, var, m, v, s)}, {mode}, {output}", (max(1, grad.size),))


KERNEL = Kernel(
    name="mosaic_gpu",
    platform="cuda",
    run=run,
    refuses=refuses,
    configs=configs,
    kind=kind,
    interpreter_is_pure=False,
    overwrites=overwrites,
)
