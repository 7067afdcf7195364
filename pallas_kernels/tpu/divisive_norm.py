"""Divisive normalization of images on TPU, forward and backward: each image passes through VMEM once, row by row.

A step takes a row of pixels. It first adds up along the row what the windows of each pixel hold of it, and keeps that,
beside the row, until the last window that needs it is complete; so the rows above and below are never read again. The
results of a row follow as many steps later as windows reach ahead, and the gradient of x once more as many.
`divisive_norm_rows` says what is kept.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.kernel import Kernel, Kind, dtype_names
from pallas_kernels.local_response_norm_windows import reach, refusal
from pallas_kernels.tpu import max_pool_views
from pallas_kernels.tpu.divisive_norm_rows import Along, of_u, of_x
from pallas_kernels.tpu.stored_order import LANES, SUBLANES, round_up
from pallas_kernels.tpu.streaming_cost import streaming_cost

_DTYPES = ("float32", "bfloat16")
# Of a row of a block in float32. The largest that fits is the default, as each step has a cost of its own.
_ROW_BYTES = tuple(2**n for n in (20, 19, 18, 17, 16))
_MOST_BYTES = 40 * 2**20  # of rows in VMEM, in blocks and kept
# Registers of a value that is computed without a loop; by replays on v5e, half as many take 5 % longer in sublanes.
_REGISTERS = 56
_VMEM_BYTES = 56 * 2**20  # to ask for: what registers do not hold goes there as well


class _Norm(NamedTuple):
    """Norm of images of some rows and columns.

    Attributes:
      image: the numbers of rows and columns.
      rows: how many of them a window reaches before and after its own.
      columns: the same.
      share: the part of a square in a window that s gets, the sum that is raised to a power.
      beta: the power.
      k: the constant in s.
      has_means: whether squares are of deviations from means.
      has_grad: whether gradients are computed.
      means_grad: whether that of the means is.
    """

    image: tuple[int, int]
    rows: tuple[int, int]
    columns: tuple[int, int]
    share: float
    beta: float
    k: float
    has_means: bool
    has_grad: bool
    means_grad: bool

    @classmethod
    def of(
        cls, x: Any, means: Any, window: Any, *, alpha: float, beta: float, k: float, means_grad: bool | None
    ) -> "_Norm":
        """Returns the norm of images (..., d, h, w, c); without gradients if `means_grad` is None."""
        image = x.shape[-3:-1]
        rows, columns = (reach(n, extent) for n, extent in zip(window[1:], image, strict=True))
        has_grad, share = means_grad is not None, alpha / math.prod(window)
        return cls(image, rows, columns, share, beta, k, means is not None, has_grad, bool(means_grad))

    @property
    def kept(self) -> tuple[str, ...]:
        """Values that are kept of each of the `reach` rows that a window has."""
        names = ["pixels", *(["finite", "offset", "squares"] if self.has_means else ["squares"])]
        names += ["deviation"] if self.means_grad and not self.has_means else []
        if self.has_grad:
            names += ["scaled", "total", *(["mean", "moment"] if self.has_means else [])]
        return tuple(names)

    @property
    def reach(self) -> int:
        """The number of rows of a window."""
        return sum(self.rows) + 1

    @property
    def operands(self) -> tuple[str, ...]:
        """The operands, in order."""
        return ("x", *("means",) * self.has_means, *("grad",) * self.has_grad)

    @property
    def results(self) -> tuple[str, ...]:
        """The results, in order."""
        return ("dx", *("dmeans",) * self.means_grad) if self.has_grad else ("y",)

    @property
    def steps(self) -> int:
        """The number of steps that an image takes."""
        return self.image[0] + (sum(self.rows) if self.has_grad else self.rows[1])

    def row_of(self, array: str, step: Any) -> Any:
        """Returns the row of an operand or result that a step reads or writes; a step may leave it alone."""
        late = {"x": 0, "dx": sum(self.rows)}.get(array, self.rows[1])
        return jnp.clip(step - late, 0, self.image[0] - 1)

    @staticmethod
    def power(s: jax.Array, beta: float) -> jax.Array:
        """Computes s^-beta: s is positive, as `refuses` requires alpha >= 0 and k > 0."""
        return jnp.exp2((-beta / math.log(2)) * jnp.log(s))


class _Blocks(NamedTuple):
    """Blocks of a row of some images, and the tiles in them that are computed one after the other.

    Attributes:
      view: images as they are stored.
      shape: of the view.
      block: the shape of a block.
      tile: the shape of a tile: columns, perhaps sublanes, and lanes.
      tiles: how many of them a block has.
    """

    view: max_pool_views.View
    shape: tuple[int, ...]
    block: tuple[int, ...]
    tile: tuple[int, ...]
    tiles: int

    @classmethod
    def of(cls, shape: tuple[int, ...], is_narrow: bool, row_bytes: int) -> "_Blocks":
        """Returns blocks whose rows take so many bytes in float32, if a tile is not larger."""
        view = max_pool_views.view_of(shape)
        shape = view.shape(shape)
        lanes = min(LANES, shape[-1])
        if view.has_pixels_outside:
            _, _, width, _, rows, _ = shape
            sublanes = min(rows, 2 * SUBLANES if is_narrow else SUBLANES)
            tile: tuple[int, ...] = (width, sublanes, lanes)
            count = _even(pl.cdiv(rows, sublanes), row_bytes // _bytes_of(tile))
            return cls(view, shape, (1, 1, width, 1, count * sublanes, lanes), tile, count)
        tile = shape[3], lanes
        count = _even(shape[0], row_bytes // _bytes_of(tile))
        return cls(view, shape, (count, 1, 1, *tile), tile, count)

    @property
    def together(self) -> int:
        """Counts the tiles that are computed without a loop, whose instructions run beside each other."""
        return max(1, min(self.tiles, _REGISTERS * 4 * SUBLANES * LANES // _bytes_of(self.tile)))

    def place(self, tile: Any) -> tuple[Any, ...]:
        """Returns the indices of a tile in a block."""
        if not self.view.has_pixels_outside:
            return (tile, 0, 0)
        sublanes = self.tile[1]
        rows = slice(None) if self.tiles == 1 else pl.ds(pl.multiple_of(tile * sublanes, sublanes), sublanes)
        return (0, 0, slice(None), 0, rows, slice(None))

    def grid(self, steps: int) -> tuple[int, ...]:
        """Returns the grid, whose last axis has the steps of an image."""
        sizes = [pl.cdiv(size, block) for size, block in zip(self.shape, self.block, strict=True)]
        return (*(size for axis, size in enumerate(sizes) if axis != 1), steps)

    def spec(self, row: Callable[[Any], Any]) -> pl.BlockSpec:
        """Returns the specification of blocks, given the row of each step."""
        return pl.BlockSpec(self.block, lambda first, *others: (first, row(others[-1]), *others[:-1]))


def _even(tiles, most):
    """Counts the tiles of a block, at most so many, where blocks are as even as can be."""
    return pl.cdiv(tiles, pl.cdiv(tiles, max(1, min(tiles, most))))


def _bytes_of(tile):
    *untiled, rows, lanes = tile
    return 4 * math.prod(untiled) * round_up(rows, SUBLANES) * round_up(lanes, LANES)


def _kernel(*refs, norm, blocks):
    names = (*norm.operands, *norm.results, *norm.kept, "counts", "shifted")
    ref = dict(zip(names, refs, strict=True))
    (height, width), (before, after) = norm.image, norm.rows
    step = pl.program_id(len(blocks.block) - 1)

    def load(name, tile):
        return ref[name][blocks.place(tile)].astype(jnp.float32)

    def store(name, tile, value):
        ref[name][blocks.place(tile)] = value.astype(ref[name].dtype)

    def slot(row):
        return lax.rem(row, norm.reach)

    def keep(row, tile, values):
        for name, value in values.items():
            ref[name][slot(row), tile] = value

    def along(tile):
        return Along(None if blocks.view.has_pixels_outside else ref["shifted"], tile)

    def over_rows(row, before, after, tile, is_whole, part_of):
        """Adds up parts of the rows around one, each from what is kept of a row; `is_whole` if none is outside."""
        total = None
        for near in range(-before, after + 1):
            at = slot(row + near if is_whole else jnp.clip(row + near, 0, height - 1))
            parts = part_of(lambda name, at=at: ref[name][at, tile])
            if near and not is_whole:
                is_inside = (row + near >= 0) & (row + near < height)
                parts = [jnp.where(is_inside, part, 0) for part in parts]
            total = parts if total is None else [a + b for a, b in zip(total, parts, strict=True)]
        return total

    def add_row(tile):
        keep(step, tile, of_x(along(tile), load("x", tile), norm, ref["counts"][1]))

    def normalize_row(tile, is_whole):
        row = step - after
        means = load("means", tile) if norm.has_means else None

        def part_of(kept):
            if means is None:
                return [kept("squares"), *([kept("deviation")] if norm.means_grad else [])]
            apart = (kept("finite") - means) + kept("offset")
            return [kept("squares"), apart * apart, *([apart] if norm.means_grad else [])]

        squares, *rest = over_rows(row, before, after, tile, is_whole, part_of)
        if means is not None:
            count = ref["counts"][0]
            squares, rest = squares + count * rest[0], [count * part for part in rest[1:]]
        s, x = norm.k + norm.share * squares, ref["pixels"][slot(row), tile]
        if not norm.has_grad:
            store("y", tile, x * norm.power(s, norm.beta))
            return
        grad = load("grad", tile)
        u = (-norm.beta * norm.share) * grad * x * norm.power(s, norm.beta + 1)
        keep(row, tile, {"scaled": grad * norm.power(s, norm.beta), **of_u(along(tile), u, means, norm.columns)})
        if norm.means_grad:
            store("dmeans", tile, -2 * u * rest[0])

    def finish_row(tile, is_whole):
        row = step - after - before
        x = ref["pixels"][slot(row), tile]

        def part_of(kept):
            return [(x - kept("mean")) * kept("total") - kept("moment") if norm.has_means else kept("total")]

        (part,) = over_rows(row, after, before, tile, is_whole, part_of)
        store("dx", tile, ref["scaled"][slot(row), tile] + 2 * (part if norm.has_means else x * part))

    def of_tiles(is_due, compute):
        @pl.when(is_due)
        def _():
            def group(first, count):
                for tile in range(count):
                    compute(first + tile)

            groups, left = divmod(blocks.tiles, blocks.together)
            lax.fori_loop(0, groups, lambda i, _: group(i * blocks.together, blocks.together), None)
            group(groups * blocks.together, left)

    def of_rows(row, before, after, compute):
        is_whole = (row >= before) & (row < height - after)
        of_tiles(is_whole, functools.partial(compute, is_whole=True))
        is_there = (row >= 0) & (row < height)
        of_tiles(is_there & ~is_whole, functools.partial(compute, is_whole=False))

    @pl.when(step == 0)
    def _():
        column, (left, right) = lax.broadcasted_iota(jnp.int32, blocks.tile, 0), norm.columns
        count = (jnp.minimum(column, left) + jnp.minimum(width - 1 - column, right) + 1).astype(jnp.float32)
        ref["counts"][0], ref["counts"][1] = count, 1 / count
        ref["shifted"][...] = jnp.zeros_like(ref["shifted"])

    of_tiles(step < height, add_row)
    of_rows(step - after, before, after, normalize_row)
    if norm.has_grad:
        of_rows(step - after - before, after, before, finish_row)


def _launch(name, images, *grad, window, config, interpret, means_grad=None, **params):
    """Runs a kernel over rows of images; the results have the last operand's dtype."""
    from jax.experimental.pallas import tpu as pltpu  # here, because only lowering for a TPU needs its 0.2 s

    norm = _Norm.of(images.x, images.means, window, means_grad=means_grad, **params)
    arrays = [x for x in (*images, *grad) if x is not None]
    blocks = _blocks(images, *grad, row_bytes=config["row_bytes"])
    specs = [blocks.spec(functools.partial(norm.row_of, one)) for one in (*norm.operands, *norm.results)]
    result = jax.ShapeDtypeStruct(blocks.shape, arrays[-1].dtype)
    results = pl.pallas_call(
        functools.partial(_kernel, norm=norm, blocks=blocks),
        name=name,
        grid=blocks.grid(norm.steps),
        in_specs=specs[: len(arrays)],
        out_specs=specs[len(arrays) :],
        out_shape=[result] * len(norm.results),
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in _scratch(norm, blocks)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=(*(pltpu.PARALLEL for _ in blocks.block[1:]), pltpu.ARBITRARY),
            vmem_limit_bytes=_VMEM_BYTES,
        ),
        cost_estimate=streaming_cost(
            (*arrays, *[result] * len(norm.results)), result.size, flops=_flops(norm), transcendentals=2
        ),
        interpret=interpret,
    )(*map(blocks.view.of, arrays))
    return tuple(blocks.view.back(one, images.x.shape) for one in results)


def _scratch(norm, blocks):
    """Returns the shapes of scratch: rows that are kept, counts of columns, and rows between zeros."""
    kept = [(norm.reach, blocks.tiles, *blocks.tile)] * len(norm.kept)
    edges = 2 * round_up(max(1, *norm.columns), SUBLANES)
    is_shifted = not blocks.view.has_pixels_outside
    shifted = (2, blocks.tiles, blocks.tile[0] + edges, blocks.tile[1]) if is_shifted else (SUBLANES, LANES)
    return [*kept, (2, *blocks.tile), shifted]


def _flops(norm):
    """Counts about how many operations a pixel takes."""
    rows, columns = (sum(extent) + 1 for extent in (norm.rows, norm.columns))
    return (1 + norm.has_grad) * (5 * columns + 5 * rows if norm.has_means else columns + rows)


def run(images, *, config, interpret=False, **params):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    return _launch("divisive_norm", images, config=config, interpret=interpret, **params)


def run_backward(images, grad, *, config, interpret=False, **params):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    return _launch("divisive_norm_backward", images, grad, config=config, interpret=interpret, **params)


def refuses(hardware, images, *grad, window, alpha, beta, k, means_grad=None) -> str | None:
    """Says why the kernels cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    for name, operand in (("x", images.x), *(("grad", one) for one in grad)):
        if jnp.dtype(operand.dtype).name not in _DTYPES:
            return f"Mosaic TPU computes on {' and '.join(_DTYPES)}; {name} is {jnp.dtype(operand.dtype).name}"
    if reason := refusal(images.x, alpha=alpha, k=k):
        return reason
    depth, _, columns, _ = images.x.shape[-4:]
    if depth > 1:
        return f"the kernels take images; x has {depth} images in each volume"
    if not configs(hardware, images, *grad, window=window, alpha=alpha, beta=beta, k=k, means_grad=means_grad):
        return f"VMEM does not hold as many rows of {columns} columns as windows of {window[1]} reach over"
    return None


def _blocks(images, *grad, row_bytes):
    is_narrow = any(jnp.dtype(x.dtype).itemsize < 4 for x in (images.x, *grad))
    return _Blocks.of(images.x.shape, is_narrow, row_bytes)


def configs(hardware, images, *grad, window, means_grad=None, **params):
    """Lists sizes of rows worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    norm, found = _Norm.of(images.x, images.means, window, means_grad=means_grad, **params), []
    for row_bytes in _ROW_BYTES:
        blocks = _blocks(images, *grad, row_bytes=row_bytes)
        rows = norm.reach * len(norm.kept) + 2 * (len(norm.operands) + len(norm.results))
        if rows * blocks.tiles * _bytes_of(blocks.tile) <= _MOST_BYTES:
            found.append((blocks.tiles, {"row_bytes": row_bytes}))
    # Larger rows of few images are no larger.
    return [config for i, (count, config) in enumerate(found) if count not in [one for one, _ in found[i + 1 :]]]


def kind(hardware, images, *grad, window, beta, means_grad=None, **_) -> Kind:
    """Returns what makes cases alike; see `pallas_kernels.kernel.Kernel.kind`."""
    view = max_pool_views.view_of(images.x.shape)
    stored = "transposed" if not view.is_stored_so else "pixels outside" if view.has_pixels_outside else "columns"
    means = "no means" if images.means is None else "means"
    wanted = ", their gradient" if means_grad else ""
    *batch, _, rows, columns, channels = images.x.shape
    sizes = rows, columns, math.prod(batch) * channels
    return Kind(f"{dtype_names(images.x, *grad)}, {means}{wanted}, {stored}, n={window[1]}, beta={beta:g}", sizes)


KERNEL = Kernel(name="mosaic_tpu", platform="tpu", run=run, refuses=refuses, configs=configs, kind=kind)
BACKWARD_KERNEL = Kernel(
    name="mosaic_tpu", platform="tpu", run=run_backward, refuses=refuses, configs=configs, kind=kind
)
