"""Grid sampling of images on TPU, and both of its gradients: an image lies in VMEM, and points read or add to it there.

XLA finds out where the points lie, and with what weights they read; `grid_sample_pairs` has the kernels. They take the
channels in lanes, as XLA stores images with many of them. The gradient of the grid needs the products of the gradients
with the pixels at the corners of each point, which the kernel of the gradients returns.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import whole_images
from pallas_kernels.grid_sample_points import Points, Sampling, moves_of, one_batch, points_of, product, slopes, weights
from pallas_kernels.kernel import Kernel, Kind, dtype_names
from pallas_kernels.tpu.grid_sample_pairs import POINTS, SUMS, Plan, backward_kernel, forward_kernel
from pallas_kernels.tpu.stored_order import LANES, SUBLANES, round_up, stored_order
from pallas_kernels.tpu.streaming_cost import streaming_cost

_DTYPES = ("float32", "bfloat16")
_BLOCK_POINTS = (4096, 1024)
_STRIPS = (4, 2, 1)
_TILES = 64  # of one strip, without a loop; by replays on v5e, half as many take 1.1 times as long
_MIB = 2**20
_SMALLEST_VMEM_BYTES = 64 * _MIB  # of all TPUs that can be targets: v5p's and TPU7x's


def run(x, grid, *, sampling, config, interpret=False):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    plan = _plan(x, grid, config)
    images = math.prod(x.shape[:-3])
    (y,) = _launch(
        forward_kernel,
        plan,
        (x, grid),
        results={"rows": jax.ShapeDtypeStruct((images, plan.points, plan.channels), x.dtype)},
        sampling=sampling,
        interpret=interpret,
    )
    return (jnp.moveaxis(y, 2, 1).reshape(*x.shape[:-2], *grid.shape[-3:-1]),)


def run_backward(x, grid, grad, *, sampling, config, interpret=False):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    plan = _plan(x, grid, config)
    images, (height, width) = math.prod(x.shape[:-3]), plan.image
    parts = pl.cdiv(plan.channels, plan.width)
    products = (images, parts, plan.blocks * plan.groups, SUBLANES, LANES)
    dx, products = _launch(
        backward_kernel,
        plan,
        (x, grid, grad),
        results={
            "image": jax.ShapeDtypeStruct((images, height, width, plan.channels), x.dtype),
            "products": jax.ShapeDtypeStruct(products, jnp.float32),
        },
        sampling=sampling,
        interpret=interpret,
    )
    grids = one_batch(grid, 3)
    points = points_of(grids, plan.image, jnp.float32, sampling)
    at_corners = list(_from_tiles(products.sum(1), plan))
    moves = moves_of(grids, plan.image, jnp.float32, sampling)
    dgrid = jnp.stack(slopes(points, at_corners, plan.image, moves, sampling), axis=-1)
    dgrid = jnp.where((points.first[0] < height)[..., None], dgrid, 0)
    return jnp.moveaxis(dx, -1, 1).reshape(x.shape), dgrid.astype(grid.dtype).reshape(grid.shape)


def _launch(kernel, plan, operands, results, sampling, interpret):
    """Runs a kernel over blocks of points, of parts of the channels, of images."""
    from jax.experimental.pallas import tpu as pltpu  # here, because only lowering for a TPU needs its 0.2 s

    x, grid, *grads = operands
    points = points_of(one_batch(grid, 3), plan.image, jnp.float32, sampling)
    image = jnp.moveaxis(one_batch(x, 3), 1, -1)
    rows = [
        jnp.moveaxis(one_batch(grad, 3).reshape(-1, plan.channels, plan.points), 1, 2).astype(grad.dtype)
        for grad in grads
    ]
    arrays = (_starts(points, plan), _in_tiles(points, plan), image, *rows)
    tiles = plan.groups, SUBLANES, LANES
    specs = {
        "starts": pl.BlockSpec(
            (1, 1, 1, plan.groups * plan.together), lambda n, part, block: (n, block, 0, 0), memory_space=pltpu.SMEM
        ),
        "weights": pl.BlockSpec((1, *tiles), lambda n, part, block: (n, block, 0, 0)),
        "image": pl.BlockSpec((1, *plan.image, plan.width), lambda n, part, block: (n, 0, 0, part)),
        "rows": pl.BlockSpec((1, plan.block_points, plan.width), lambda n, part, block: (n, block, part)),
        "products": pl.BlockSpec((1, 1, *tiles), lambda n, part, block: (n, part, block, 0, 0)),
    }
    whole = pltpu.VMEM((plan.strips, plan.sublanes, LANES), jnp.float32)
    return pl.pallas_call(
        functools.partial(kernel, plan=plan),
        name="grid_sample_backward" if grads else "grid_sample",
        grid=(image.shape[0], pl.cdiv(plan.channels, plan.width), plan.blocks),
        in_specs=[specs[name] for name in ("starts", "weights", "image", *["rows"] * len(grads))],
        out_specs=[specs[name] for name in results],
        out_shape=[*results.values()],
        scratch_shapes=[
            whole,
            pltpu.VMEM((plan.strips * plan.tiles * SUBLANES, LANES), jnp.float32),
            *[pltpu.VMEM((2 * plan.tiles * SUBLANES, LANES), jnp.float32)] * len(grads),
            *[whole] * (2 * SUMS * len(grads)),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=(pltpu.PARALLEL, pltpu.PARALLEL, pltpu.ARBITRARY),
            vmem_limit_bytes=_vmem_bytes(plan, has_grad=bool(grads)),
        ),
        cost_estimate=streaming_cost(
            (*arrays, *results.values()), grid.size // 2 * plan.channels, flops=20 if grads else 8
        ),
        interpret=interpret,
    )(*arrays)


def _starts(points: Points, plan: Plan) -> jax.Array:
    """Returns the sublane at which the pixels of each point begin, as (N, blocks, 1, points of a block)."""
    row, column = points.first
    starts = _in_blocks(plan.first + row * plan.pitch + column, plan, plan.behind)
    return starts.reshape(*starts.shape[:2], 1, -1)


def _in_tiles(points: Points, plan: Plan) -> jax.Array:
    """Returns weights as tiles (N, groups, 8, 128): sublanes for pairs of four points, lanes for rows and tiles."""
    steps = [(row, column) for row in range(2) for column in range(2)]
    corners = jnp.stack([product(weights(points.distance, step)) for step in steps])
    images = corners.shape[1]
    corners = jax.vmap(lambda corner: _in_blocks(corner, plan, 0))(corners)
    corners = corners.reshape(2, 2, images, plan.blocks * plan.groups, plan.tiles, POINTS)
    tiles = corners.transpose(2, 3, 5, 1, 0, 4).reshape(images, -1, SUBLANES, 2 * plan.tiles)
    return jnp.pad(tiles, ((0, 0), (0, 0), (0, 0), (0, LANES - 2 * plan.tiles)))


def _from_tiles(tiles: jax.Array, plan: Plan) -> jax.Array:
    """Inverts `_in_tiles`: returns (corners, N, points)."""
    images = tiles.shape[0]
    corners = tiles[..., : 2 * plan.tiles].reshape(images, plan.blocks * plan.groups, POINTS, 2, 2, plan.tiles)
    corners = corners.transpose(4, 3, 0, 1, 5, 2).reshape(4, images, plan.blocks, -1)
    return corners[..., : plan.block_points].reshape(4, images, -1)[..., : plan.points]


def _in_blocks(of_points: jax.Array, plan: Plan, filling: Any) -> jax.Array:
    """Returns (N, points) as (N, blocks, points), in blocks that are filled up to whole groups."""
    missing = plan.blocks * plan.block_points - plan.points
    blocks = jnp.pad(of_points, ((0, 0), (0, missing)), constant_values=filling)
    blocks = blocks.reshape(-1, plan.blocks, plan.block_points)
    missing = plan.groups * plan.together - plan.block_points
    return jnp.pad(blocks, ((0, 0), (0, 0), (0, missing)), constant_values=filling)


def _plan(x: Any, grid: Any, config: Any) -> Plan:
    points = math.prod(grid.shape[-3:-1])
    height, width = x.shape[-2:]
    return Plan(
        (height, width), x.shape[-3], points, config["strips"], min(points, config["block_points"]), config["tiles"]
    )


def _vmem_bytes(plan: Plan, *, has_grad: bool) -> int:
    """Returns the VMEM that a kernel asks for."""
    height, width = plan.image
    lanes_bytes = 4 * plan.strips * LANES
    # What stays: the image with its border, the sums, and the pairs of a group.
    kept = (1 + 2 * SUMS * has_grad) * plan.sublanes + plan.tiles * SUBLANES
    # Two buffers each: images and rows of points, as many of them as arrays, and tiles of weights or products.
    buffers = (1 + has_grad) * height * round_up(width, SUBLANES) + plan.block_points
    # And the products of a group before they are added up.
    tiles = 2 * (1 + has_grad) * plan.groups + 2 * plan.tiles * has_grad
    return (kept + 2 * buffers) * lanes_bytes + tiles * 4 * SUBLANES * LANES + 4 * _MIB


def refuses(hardware, x, grid, *grad, sampling: Sampling) -> str | None:
    """Says why the kernels cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    for name, operand in (("x", x), ("grid", grid), *(("grad", one) for one in grad)):
        if jnp.dtype(operand.dtype).name not in _DTYPES:
            return f"Mosaic TPU computes on {' and '.join(_DTYPES)}; {name} is {jnp.dtype(operand.dtype).name}"
    if sampling.mode == "nearest":
        return 'the kernels interpolate between four pixels; mode is "nearest"'
    if reason := whole_images.refusal(x):
        return reason
    if not grid.size:
        return "there are no points"
    if not configs(hardware, x, grid, *grad, sampling=sampling):
        return f"VMEM does not hold images of {x.shape[-2]} by {x.shape[-1]} pixels as the kernels need them"
    return None


def configs(hardware, x, grid, *grad, **_):
    """Lists block sizes worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    vmem_bytes = getattr(hardware, "on_chip_bytes", None) or _SMALLEST_VMEM_BYTES
    whole = pl.cdiv(x.shape[-3], LANES)
    # Strips that are a part of the channels are as many in each part, and whole.
    parts = [strips for strips in _STRIPS if strips < whole and x.shape[-3] % (strips * LANES) == 0]
    found = []
    for strips in [whole] * (whole <= _STRIPS[0]) + parts:
        for block_points in _BLOCK_POINTS:
            config = {"strips": strips, "block_points": block_points, "tiles": _TILES >> (strips - 1).bit_length()}
            if _vmem_bytes(_plan(x, grid, config), has_grad=bool(grad)) <= 0.85 * vmem_bytes:
                found.append(config)
    # Larger blocks of few points are no larger.
    is_small = math.prod(grid.shape[-3:-1]) <= _BLOCK_POINTS[-1]
    return [config for config in found if not is_small or config["block_points"] == _BLOCK_POINTS[-1]]


def kind(hardware, x, grid, *grad, sampling: Sampling) -> Kind:
    """Returns what makes cases alike; see `pallas_kernels.kernel.Kernel.kind`."""
    *batch, channels, height, width = x.shape
    images, points = math.prod(batch), math.prod(grid.shape[-3:-1])
    stored = ["as stored" if stored_order((images, channels, height, width)) == (0, 2, 3, 1) else "transposed"]
    options = ["whole lanes" if channels % LANES == 0 else "part of the lanes", *stored, sampling.padding_mode]
    options += ["centres"] * sampling.align_corners
    return Kind(", ".join((dtype_names(x, grid, *grad), *options)), (points, height * width, channels, images))


KERNEL = Kernel(name="mosaic_tpu", platform="tpu", run=run, refuses=refuses, configs=configs, kind=kind)
BACKWARD_KERNEL = Kernel(
    name="mosaic_tpu", platform="tpu", run=run_backward, refuses=refuses, configs=configs, kind=kind
)
