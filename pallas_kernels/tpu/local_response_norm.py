"""Local response normalization on TPU, forward and backward: each image passes through VMEM once.

A block holds all channels of some pixels. XLA keeps the channels in lanes, in sublanes, or before both, wherever the
array pads least, and the kernels take the array as it is. Windows of channels are cheapest to add before both, where a
register has many pixels of one channel, and then in sublanes, so channels in lanes are transposed in registers.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.kernel import Kernel, Kind, dtype_names
from pallas_kernels.local_response_norm_windows import reach, refusal
from pallas_kernels.tpu.local_response_norm_sums import in_registers, in_scratch, windows
from pallas_kernels.tpu.stored_order import LANES, SUBLANES, round_up, stored_order
from pallas_kernels.tpu.streaming_cost import streaming_cost

_ROWS = 16  # of a register of 16-bit values; a register of 32-bit values has eight
_DTYPES = ("float32", "bfloat16")
# Of a block: three in the backward kernel (x, the gradient, dx), two buffers each, are 12 MiB at most. To these come
# two to three times _GROUP_ELEMENTS in float32, for windows and for what registers do not hold.
_BLOCK_BYTES = tuple(2**n for n in (21, 20, 19, 18))
_VMEM_BYTES = 32 * 2**20  # to ask for; XLA grants 16 MiB to kernels that do not, and TPUs have 64 MiB or more
# Elements that are computed without a loop, so that one tile's transpositions and powers run beside another's sums.
# By replays on v7x, half as many take 3 to 5 % longer.
_GROUP_ELEMENTS, _MOST_TILES = 2**19, 64
# Channels in a window; by replays on v6e and v7x, adding 24 of them by doubling in registers takes longer, 32 less.
_MOST_IN_SCRATCH = 24
_CHANNELS = -4


class View(NamedTuple):
    """Images as they are stored.

    Attributes:
      order: the axes of the images that are longer than 1, in the order in which they are stored.
      shape: five axes: what comes before the channels, the channels or 1, what lies between, rows and columns.
      channel_axis: 1, 3 or 4.
    """

    order: tuple[int, ...]
    shape: tuple[int, ...]
    channel_axis: int

    def of(self, x: jax.Array) -> jax.Array:
        """Returns images in this view."""
        rest = (axis for axis in range(x.ndim) if axis not in self.order)
        return jnp.transpose(x, (*rest, *self.order)).reshape(self.shape)

    def back(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Inverts `of`, for images of this shape."""
        rest = [axis for axis in range(len(shape)) if axis not in self.order]
        order = [*rest, *self.order]
        return jnp.transpose(x.reshape([shape[axis] for axis in order]), [order.index(i) for i in range(len(shape))])


def view_of(shape):
    """Returns the order in which XLA stores images (..., c, d, h, w)."""
    channels = len(shape) + _CHANNELS
    # Axes of size 1 take no space. Two axes are needed all the same, for sublanes and lanes.
    axes = [axis for axis, size in enumerate(shape) if size > 1 or axis == channels]
    axes = axes if len(axes) > 1 else [next(axis for axis in range(len(shape)) if axis != channels), *axes]
    order = tuple(axes[i] for i in stored_order(tuple(shape[axis] for axis in axes)))
    sizes = [shape[axis] for axis in order]
    place = order.index(channels)
    if place < len(order) - 2:
        untiled = (math.prod(sizes[:place]), sizes[place], math.prod(sizes[place + 1 : -2]))
        return View(order, (*untiled, *sizes[-2:]), 1)
    return View(order, (math.prod(sizes[:-2]), 1, 1, *sizes[-2:]), place - len(order) + 5)


def block_of(view, block_elements):
    """Returns a block of at most `block_elements` padded elements with all channels; None if none is that small."""
    shape, units = list(view.shape), [1, 1, 1, _ROWS, LANES]
    if view.channel_axis == 4 and LANES * round_up(shape[4], LANES) <= block_elements:
        # So many rows of so many images make a tile that can be transposed.
        units[3] = min(LANES, max(_ROWS, pl.next_power_of_2(shape[3])))
        units[0] = LANES // units[3]
        shape[0], shape[3] = (round_up(shape[axis], units[axis]) for axis in (0, 3))
    block = list(map(min, shape, units))
    block[view.channel_axis] = shape[view.channel_axis]
    # Grown from the minor axis outwards, as longer runs in HBM are copied faster.
    for axis, unit in reversed(list(enumerate(units))):
        if axis not in (1, view.channel_axis):
            others = _padded_elements([1 if i == axis else size for i, size in enumerate(block)]) // (
                {4: LANES, 3: _ROWS}.get(axis, 1)
            )
            block[axis] = max(block[axis], min(shape[axis], block_elements // others // unit * unit))
    if _padded_elements(block) > block_elements:
        return None
    # Whole registers, so that nothing is masked: DMAs copy what the array has.
    if view.channel_axis != 4:
        block[4] = round_up(block[4], LANES)
    if view.channel_axis == 1 and block[3] > SUBLANES:
        block[3] = round_up(block[3], _ROWS)
    return tuple(block)


def _padded_elements(block):
    *untiled, rows, columns = block
    return math.prod(untiled) * round_up(rows, _ROWS) * round_up(columns, LANES)


class _Norm(NamedTuple):
    """Norm that a kernel computes, of blocks whose channels lie in an axis."""

    channel_axis: int
    n: int
    alpha: float
    beta: float
    k: float

    @property
    def share(self) -> float:
        """The part of a square in a window that s gets, the sum that is raised to a power."""
        return self.alpha / self.n

    def power(self, s: jax.Array) -> jax.Array:
        """Computes s^-beta: s is positive, as `refusal` requires alpha >= 0 and k > 0."""
        return jnp.exp2((-self.beta / math.log(2)) * jnp.log(s))

    def gradient(self, scaled: jax.Array, x: jax.Array, shared: jax.Array) -> jax.Array:
        """Computes the result from the scaled gradient and the sum of what windows that hold x have in common."""
        return scaled - (2 * self.beta * self.share) * x * shared

    def tile(self, block: tuple[int, ...]) -> tuple[int, int, int]:
        """Returns the images, rows and columns that are computed together: a register's, beside all channels."""
        images, *_, rows, columns = block
        if self.channel_axis == 4:
            part = next((count for count in (LANES, 64, 32, 16, 8) if rows % count == 0), rows)
            together = LANES // part if part == rows and LANES % part == 0 else 1
            return (together if images % together == 0 else 1), part, columns
        columns = LANES if columns % LANES == 0 else columns
        return 1, (_ROWS if self.channel_axis == 1 and rows % _ROWS == 0 else rows), columns

    def is_transposed(self, block: tuple[int, ...]) -> bool:
        """Tells whether tiles have their channels in lanes, and as many pixels as there are lanes."""
        images, rows, _ = self.tile(block)
        return self.channel_axis == 4 and images * rows == LANES

    def tiles(self, block: tuple[int, ...]) -> tuple[int, ...]:
        """Counts the tiles along all axes but the untiled one of channels."""
        images, rows, columns = self.tile(block)
        return block[0] // images, block[2], block[3] // rows, block[4] // columns

    def group(self, block: tuple[int, ...]) -> int:
        """Counts the tiles that are computed without a loop."""
        images, rows, columns = self.tile(block)
        elements = images * block[1] * round_up(rows, SUBLANES) * round_up(columns, LANES)
        return min(max(1, _GROUP_ELEMENTS // elements), _MOST_TILES, math.prod(self.tiles(block)))

    def edge(self, block: tuple[int, ...]) -> int | None:
        """Counts the zeros before and behind the channels in scratch; None if windows are added in registers."""
        if not (self.channel_axis == 3 or self.is_transposed(block)) or self.n > _MOST_IN_SCRATCH:
            return None
        return round_up(max(1, *reach(self.n, block[self.channel_axis])), SUBLANES)


def _forward(norm, sums, channels, x):
    s = norm.k + norm.share * sums(x * x, *reach(norm.n, channels))
    return x * norm.power(s)


def _backward(norm, sums, channels, x, grad):
    before, after = reach(norm.n, channels)
    s = norm.k + norm.share * sums(x * x, before, after)
    scaled = grad * norm.power(s)
    # Channel i is in the window of channel j if j is in the mirror image of i's window: before and after swap.
    return norm.gradient(scaled, x, sums(scaled * x / s, after, before))


def _channel_by_channel(norm, x_ref, *refs, place):
    """Computes a tile whose channels lie before rows and columns, in an order that keeps reused values in registers."""
    *grad_refs, result_ref = refs
    channels, image, pixels = x_ref.shape[1], place[0], place[1:]
    before, after = reach(norm.n, channels)

    def element(ref, c):
        return ref[(image, c, *pixels)].astype(jnp.float32)

    def scaled_square(c):
        root = math.sqrt(norm.share) * x(c)
        return root * root

    def in_image(fn):
        return functools.cache(lambda c: fn(c) if 0 <= c < channels else None)

    x = functools.cache(functools.partial(element, x_ref))
    sums = windows(in_image(scaled_square), before + after + 1, norm.k)
    s = functools.cache(lambda c: sums(c - before))
    scaled = functools.cache(lambda c: element(grad_refs[0], c) * norm.power(s(c)))
    shared = windows(in_image(lambda c: scaled(c) * x(c) / s(c)), before + after + 1)
    for c in range(channels):
        y = norm.gradient(scaled(c), x(c), shared(c - after)) if grad_refs else x(c) * norm.power(s(c))
        result_ref[(image, c, *pixels)] = y.astype(result_ref.dtype)


def _all_channels(norm, *refs, edge, places):
    """Computes tiles with channels in sublanes or lanes, step by step: each step's instructions are independent."""
    *operand_refs, result_ref, scratch = refs
    block = result_ref.shape
    channels, (images, rows, columns) = block[norm.channel_axis], norm.tile(block)
    is_transposed = norm.is_transposed(block)
    axis = 0 if is_transposed or norm.channel_axis == 3 else 1

    def load(ref, place):
        x = ref[place].astype(jnp.float32).reshape(images * rows, columns)
        return x.T if is_transposed else x

    def store(ref, place, x):
        x = x.T if is_transposed else x
        ref[place] = x.reshape(ref.at[place].shape).astype(ref.dtype)

    def sums_of(i):
        if edge is None:
            return functools.partial(in_registers, axis=axis)
        return functools.partial(in_scratch, ref=scratch.at[i], edge=edge)

    values = [[load(ref, place) for ref in operand_refs] for place in places]
    compute = _forward if len(operand_refs) == 1 else _backward
    results = [compute(norm, sums_of(i), channels, *each) for i, each in enumerate(values)]
    for place, result in zip(places, results, strict=True):
        store(result_ref, place, result)


def _kernel(*refs, norm):
    block = refs[0].shape
    images, rows, columns = norm.tile(block)
    edge, group = norm.edge(block), norm.group(block)
    sizes = norm.tiles(block)
    if edge is not None:
        zeros = jnp.zeros((edge, LANES), jnp.float32)
        for i in range(group):
            refs[-1][i, :edge] = refs[-1][i, edge + block[norm.channel_axis] :] = zeros

    def place_of(i):
        indices: list[Any] = []
        for size in reversed(sizes):
            i, index = _divided(i, size)
            indices.insert(0, index)
        image, between, row, column = indices
        image = image if images == 1 else _part(image, images, block[0])
        return image, between, _part(row, rows, block[3]), _part(column, columns, block[4])

    def compute(first, count):
        places = [place_of(first + i) for i in range(count)]
        if norm.channel_axis > 1:
            _all_channels(norm, *refs, edge=edge, places=[(image, 0, *place) for image, *place in places])
        for place in places if norm.channel_axis == 1 else ():
            _channel_by_channel(norm, *refs[:-1], place=place)

    groups, left = divmod(math.prod(sizes), group)
    lax.fori_loop(0, groups, lambda i, _: compute(i * group, group), None)
    compute(groups * group, left)


def _divided(i, size):
    """Returns quotient and remainder of what is not negative, without the signs that `//` asks for."""
    if isinstance(i, int):
        return divmod(i, size)
    if size == 1:
        return i, 0
    return lax.div(i, i.dtype.type(size)), lax.rem(i, i.dtype.type(size))


def _part(i, size, total):
    return slice(None) if size == total else pl.ds(pl.multiple_of(i * size, size), size)


def _launch(name, *operands, config, interpret, **params):
    """Runs a kernel over blocks; the result has the last operand's shape and dtype."""
    from jax.experimental.pallas import tpu as pltpu  # here, because only lowering for a TPU needs its 0.2 s

    view = view_of(operands[0].shape)
    block = block_of(view, config["block_elements"])
    norm = _Norm(view.channel_axis, **params)
    edge = norm.edge(block)
    scratch = (1, SUBLANES) if edge is None else (norm.group(block), block[norm.channel_axis] + 2 * edge)
    # Beyond the edges of the other axes a block holds anything, but no pixel reads another.
    spec = pl.BlockSpec(block, lambda *indices: indices)
    result = jax.ShapeDtypeStruct(view.shape, operands[-1].dtype)
    y = pl.pallas_call(
        functools.partial(_kernel, norm=norm),
        name=name,
        grid=tuple(map(pl.cdiv, view.shape, block)),
        in_specs=[spec] * len(operands),
        out_specs=spec,
        out_shape=result,
        scratch_shapes=[pltpu.VMEM((*scratch, LANES), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 5, vmem_limit_bytes=_VMEM_BYTES),
        # Sums over a window of five take some ten loads and additions; a power is a logarithm and an exponential.
        cost_estimate=streaming_cost((*operands, result), result.size, flops=20 * len(operands), transcendentals=2),
        interpret=interpret,
    )(*map(view.of, operands))
    return (view.back(y, operands[0].shape),)


def run(x, *, config, interpret=False, **params):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    return _launch("local_response_norm", x, config=config, interpret=interpret, **params)


def run_backward(x, grad, *, config, interpret=False, **params):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    return _launch("local_response_norm_backward", x, grad, config=config, interpret=interpret, **params)


def refuses(hardware, x, *grad, alpha, k, **_) -> str | None:
    """Says why the kernels cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    for name, operand in zip(("x", "grad"), (x, *grad), strict=False):
        if jnp.dtype(operand.dtype).name not in _DTYPES:
            return f"Mosaic TPU computes on {' and '.join(_DTYPES)}; {name} is {jnp.dtype(operand.dtype).name}"
    if reason := refusal(x, alpha=alpha, k=k):
        return reason
    if not configs(hardware, x, *grad):
        return f"VMEM holds no block with all {x.shape[_CHANNELS]} channels of some pixels"
    return None


def configs(hardware, x, *operands, **_):
    """Lists block sizes worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    view = view_of(x.shape)
    widest = max(jnp.dtype(operand.dtype).itemsize for operand in (x, *operands))
    sizes = [size // widest for size in _BLOCK_BYTES]
    return [{"block_elements": size} for size in sizes if block_of(view, size) is not None]


def kind(hardware, x, *grad, n, beta, **_) -> Kind:
    """Returns what makes cases alike; see `pallas_kernels.kernel.Kernel.kind`."""
    place = {1: "planes", 3: "sublanes", 4: "lanes"}[view_of(x.shape).channel_axis]
    sizes = x.shape[_CHANNELS], math.prod(x.shape) // x.shape[_CHANNELS]
    return Kind(f"{dtype_names(x, *grad)}, channels along {place}, n={n}, beta={beta:g}", sizes)


KERNEL = Kernel(name="mosaic_tpu", platform="tpu", run=run, refuses=refuses, configs=configs, kind=kind)
BACKWARD_KERNEL = Kernel(
    name="mosaic_tpu", platform="tpu", run=run_backward, refuses=refuses, configs=configs, kind=kind
)
