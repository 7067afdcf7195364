"""The gradient of max pooling on NVIDIA GPUs from Hopper on, for channels that lie last and windows that lie apart.

No two windows share an element, so every element is read once and written once. A thread takes some channels, and a
thread block a row of windows with the pixels up to the next ones. Nothing is shared between threads.

Functions import `mosaic_gpu` themselves: it takes a third of a second, which only those who lower for a GPU should pay.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import whole_images
from pallas_kernels._jax_private import interpret_gpu_params
from pallas_kernels.gpu import hopper
from pallas_kernels.gpu.hopper import VECTOR, WARPGROUP
from pallas_kernels.kernel import Kernel

_MAX_WINDOW = 16  # pixels from window to window: the loop over them is unrolled
# Registers of a thread: the best value, its number, the gradient and one element, 4 * width / 128 at least.
_CONFIGS = ({"width": 128}, {"width": 256}, {"width": 512})


def _kernel(x_gmem, grad_gmem, dx_gmem, *, window, stride, width, propagate_nan, pin_layouts):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    _, height, columns, channels = x_gmem.shape
    _, output_rows, output_columns, _ = grad_gmem.shape
    image, cell_row = lax.axis_index("image"), lax.axis_index("row")
    layout = None
    lanes = lax.broadcasted_iota(jnp.int32, (width,), 0)
    if pin_layouts:
        vector = min(VECTOR, width // WARPGROUP) if channels % VECTOR == 0 else 1
        layout = plgpu.Layout.WG_STRIDED((width,), vec_size=vector)
        lanes = plgpu.broadcasted_iota(jnp.int32, (width,), 0, layout=layout)

    def load(ref, row, column, run):
        values = ref[image, row, column, run]
        return (values if layout is None else plgpu.layout_cast(values, layout)).astype(jnp.float32)

    def cell(i, run):
        """Handles one window, and the pixels up to the next ones."""
        first_row, first_column = cell_row * stride[0], i * stride[1]

        def element(offset):
            row, column = (
                jnp.minimum(first_row + offset[0], height - 1),
                jnp.minimum(first_column + offset[1], columns - 1),
            )
            return load(x_gmem, row, column, run)

        offsets = list(itertools.product(*map(range, window)))
        best, winner = element(offsets[0]), jnp.zeros_like(lanes)
        for number, offset in enumerate(offsets[1:], 1):
            value = element(offset)
            # The first of equal values stays, and so does the first NaN, which is neither more nor less nor equal. NaN
            # beats any number if it is propagated; otherwise any number beats NaN.
            stronger, weaker = (best, value) if propagate_nan else (value, best)
            wins = jnp.where(value > best, 1, jnp.where(weaker == weaker, 0, jnp.where(stronger == stronger, 1, 0)))
            best, winner = jnp.where(wins == 1, value, best), jnp.where(wins == 1, number, winner)
        # Pixels left over at the edges fill no window, so their gradient is 0. Compared element by element, as Mosaic
        # cannot broadcast a scalar condition.
        grad = load(grad_gmem, jnp.minimum(cell_row, output_rows - 1), jnp.minimum(i, output_columns - 1), run)
        limit = jnp.where((cell_row < output_rows) & (i < output_columns), width, 0)
        grad = jnp.where(lanes < limit, grad, 0.0)
        for offset in itertools.product(*map(range, stride)):
            values = (
                jnp.where(winner == offsets.index(offset), grad, 0.0) if offset in offsets else jnp.zeros_like(grad)
            )
            row, column = first_row + offset[0], first_column + offset[1]

            @pl.when((row < height) & (column < columns))
            def _(row=row, column=column, values=values):
                dx_gmem[image, row, column, run] = values.astype(dx_gmem.dtype)

    def cells(i, _):
        # Accesses cannot be masked: the last run may overlap the one before, where it stores the same values.
        for start in range(0, channels, width):
            cell(i, pl.ds(min(start, channels - width), width))

    lax.fori_loop(0, pl.cdiv(columns, stride[1]), cells, None)


def run(x, grad, *, window, stride, padding, propagate_nan, config, interpret=False):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    images = math.prod(x.shape[:-3])
    view = (images, *x.shape[-3:])
    (dx,) = pl.kernel(
        functools.partial(
            _kernel,
            window=window[1:],
            stride=stride[1:],
            width=config["width"],
            propagate_nan=propagate_nan,
            pin_layouts=not interpret,  # the interpreter of jax 0.10 has no layouts
        ),
        out_type=[jax.ShapeDtypeStruct(view, grad.dtype)],
        mesh=plgpu.Mesh(grid=(images, pl.cdiv(view[1], stride[1])), grid_names=("image", "row")),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret_gpu_params() if interpret is True else interpret,
        name="max_pool_backward",
    )(x.reshape(view), grad.reshape(images, *grad.shape[-3:]))
    return (dx.reshape(x.shape),)


def refuses(hardware, x, grad, *, window, stride, padding, **_) -> str | None:
    """Why the kernel cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    if reason := hopper.refusal(hardware, x=x, grad=grad) or whole_images.refusal(x):
        return reason
    if (window[0], stride[0], padding[0]) != (1, 1, (0, 0)):
        return "the kernel pools rows and columns; these windows reach over the depth as well"
    if any(map(any, padding)) or any(k > s for k, s in zip(window, stride, strict=True)):
        return "the kernel takes windows that share no element and no padding: others would be read several times"
    if math.prod(stride) > _MAX_WINDOW:
        return f"the kernel is written out for up to {_MAX_WINDOW} pixels from window to window; these are {stride[1:]}"
    if x.shape[-1] < WARPGROUP:
        return f"a warpgroup takes {WARPGROUP} channels that lie side by side; the last axis of x has {x.shape[-1]}"
    return None


def configs(hardware, x, *operands, **_):
    """Runs of channels worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    return [config for config in _CONFIGS if config["width"] <= x.shape[-1]]


KERNEL = Kernel(
    name="mosaic_gpu", platform="cuda", run=run, refuses=refuses, configs=configs, interpreter_is_pure=False
)
