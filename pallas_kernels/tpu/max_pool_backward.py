"""The gradient of max pooling on TPU: each image passes through VMEM once, as XLA stores it.

XLA keeps the axes that pad least in tiles. With columns in sublanes and channels or images in lanes, the kernel of
`max_pool_columns` runs; with images and channels in the tiles and pixels outside of them, that of `max_pool_pixels`.
Where columns lie in lanes, images are transposed on the way in and out, with the channels of all images beside each
other in full lanes: two more passes over x and two over the result, where XLA's own program takes some ten passes.
"""

import math

import jax.numpy as jnp

from pallas_kernels import whole_images
from pallas_kernels.kernel import Kernel, Kind, dtype_names
from pallas_kernels.tpu import max_pool_columns, max_pool_pairs, max_pool_pixels
from pallas_kernels.tpu.max_pool_views import transposed, view_of
from pallas_kernels.tpu.stored_order import LANES
from pallas_kernels.tpu.streaming_cost import streaming_cost

_DTYPES = ("float32", "bfloat16")
_MIB = 2**20
_MOST_BYTES = 56 * _MIB  # TPUs have 64 MiB of VMEM or more
_LEAST_TRANSPOSED = 2**22  # elements of images that are stored in another order: 16 MiB in float32
# The largest holds an image of 112 by 112 pixels, 40 MiB with its padding; TPUs have 64 MiB or more.
_MIB_OF_BLOCKS = (12, 6, 3, 42)
_MIB_OF_PACKED_BLOCKS = (24, 12, 6, 3)
# The others' vector units compute in 32 bits.
_COMPUTE_IN_16_BITS = ("tpu-v6e", "tpu-v7x")


def run(x, grad, *, window, stride, padding, propagate_nan, config, interpret=False):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    geometry = {"window": window, "stride": stride, "padding": padding}
    # Per element of a window: compare and keep the larger key and its place; compare the place, select and add.
    cost = streaming_cost((x, grad, x), grad.size, flops=6 * math.prod(window))
    if max_pool_pairs.suits(x, grad, **geometry):
        return (max_pool_pairs.launch(x, grad, config, propagate_nan, cost, interpret, **geometry),)
    view = view_for(x.shape, **geometry)
    kernel = max_pool_pixels if view.has_pixels_outside else max_pool_columns
    images, windows = view.of(x), view.of(grad)
    if kernel is max_pool_columns and _is_grouped(x, grad, view, config["vmem_bytes"], **geometry):
        windows = view_of(grad.shape).of(grad).reshape(*grad.shape[-3:-1], images.shape[0], images.shape[-1])
    dx = kernel.launch(images, windows, config, propagate_nan, cost, interpret, **geometry)
    return (view.back(dx, x.shape),)


def view_for(shape, **geometry):
    """Returns how the kernel sees images of this shape."""
    view = view_of(shape)
    fits = not view.has_pixels_outside or max_pool_pixels.refusal(**geometry) is None
    return view if fits else transposed(shape)


def _is_grouped(x, grad, view, vmem_bytes, **geometry):
    """Tells whether XLA stores the gradients with images in sublanes, and VMEM holds those of several images.

    That is where the columns of the images fill their tiles and those of the windows do not, such as 56 and 28. With
    bfloat16, upcasting the gradients of all these images takes longer than to have XLA transpose them.
    """
    stored = view_of(grad.shape)
    before, _, between, _, lanes = view.shape(x.shape)
    if not (grad.dtype == jnp.float32 and view.is_stored_so and stored.has_pixels_outside):
        return False
    blocks = max_pool_columns.blocks_of(view.shape(x.shape), vmem_bytes, **geometry)
    fits = blocks.limit_bytes + max_pool_columns.group_bytes(blocks) <= _MOST_BYTES
    is_whole = before % max_pool_columns.GROUP == 0 and between == 1
    same = stored.order[-1] == view.order[-1] and stored.shape(grad.shape)[-2:] == (before, lanes)
    return fits and is_whole and same


def refuses(hardware, x, grad, *, window, stride, padding, **_) -> str | None:
    """Says why the kernel cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    for name, operand in (("x", x), ("grad", grad)):
        if jnp.dtype(operand.dtype).name not in _DTYPES:
            return f"Mosaic TPU computes on {' and '.join(_DTYPES)}; {name} is {jnp.dtype(operand.dtype).name}"
    if reason := whole_images.refusal(x):
        return reason
    if (window[0], stride[0], padding[0]) != (1, 1, (0, 0)):
        return "the kernel pools rows and columns; these windows reach over the depth as well"
    geometry = {"window": window, "stride": stride, "padding": padding}
    view = view_for(x.shape, **geometry)
    if not view.is_stored_so:
        if (lanes := view.shape(x.shape)[-1]) < LANES:
            return f"images and channels lie beside each other in {LANES} lanes; these are {lanes}"
        if math.prod(x.shape) < _LEAST_TRANSPOSED:
            return f"XLA keeps fewer than {_LEAST_TRANSPOSED} elements in VMEM; the kernel would transpose them in HBM"
    if not configs(hardware, x, grad, **geometry):
        return f"VMEM holds no image of {list(x.shape[-3:-1])} pixels, nor a part that its windows leave alone"
    return None


def configs(hardware, x, grad, *, window, stride, padding, **_):
    """Lists sizes of blocks worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    geometry = {"window": window, "stride": stride, "padding": padding}
    view = view_for(x.shape, **geometry)
    kernel = max_pool_pixels if view.has_pixels_outside else max_pool_columns
    is_bfloat16 = all(operand is not None and operand.dtype == jnp.bfloat16 for operand in (x, grad))
    computes_so = is_bfloat16 and hardware is not None and hardware.name in _COMPUTE_IN_16_BITS
    packed = [{"vmem_bytes": size * _MIB, "is_packed": True} for size in _MIB_OF_PACKED_BLOCKS]
    found = packed if computes_so else [{"vmem_bytes": size * _MIB} for size in _MIB_OF_BLOCKS]
    if is_bfloat16 and max_pool_pairs.suits(x, grad, **geometry):
        return [config for config in found if max_pool_pairs.blocks_of(x, grad, **config, **geometry) is not None]
    # Sums of 16-bit gradients need a column that lies in at most two windows.
    if kernel is max_pool_columns or window[2] > 2 * stride[2]:
        found = [{"vmem_bytes": size * _MIB} for size in _MIB_OF_BLOCKS]
    return [config for config in found if kernel.blocks_of(view.shape(x.shape), **config, **geometry) is not None]


def kind(hardware, x, grad, *, window, stride, padding, **_) -> Kind:
    """Returns what makes cases alike; see `pallas_kernels.kernel.Kernel.kind`."""
    view = view_for(x.shape, window=window, stride=stride, padding=padding)
    *others, height, width, channels = x.shape
    if not view.is_stored_so:
        way = f"channels {'last' if channels > 1 else 'first'}, transposed"
    elif max_pool_pairs.suits(x, grad, window=window, stride=stride, padding=padding):
        way = "pairs of columns"
    else:
        way = "pixels outside of tiles" if view.has_pixels_outside else "columns in tiles"
    windows = f"windows {list(window[1:])}, stride {list(stride[1:])}, padding {list(padding[1:])}"
    return Kind(f"{dtype_names(x, grad)}, {way}, {windows}", (math.prod(others) * channels, height * width))


KERNEL = Kernel(name="mosaic_tpu", platform="tpu", run=run, refuses=refuses, configs=configs, kind=kind)
