"""Divisive normalization of images on TPU, forward and backward: each image passes through VMEM once, row by row.

A step takes a row of pixels. It first adds up along the row what the windows of each pixel hold of it, and keeps that,
beside the row, until the last window that needs it is complete; so the rows above and below are never read again. The
results of a row follow as many steps later as windows reach ahead, and the gradient of x once more as many.
`divisive_norm_rows` says what is kept.

The vector unit binds these kernels on v6e and v7x where there are means, so columns lie before the registers wherever
they can: neighbours then differ in their registers' numbers and share their differences. Sublanes have channels or
images; where XLA stores columns in sublanes, loads with a stride take one column of eight images.
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
from pallas_kernels.tpu.divisive_norm_rows import Columns, of_u, of_x
from pallas_kernels.tpu.stored_order import LANES, SUBLANES, round_up
from pallas_kernels.tpu.streaming_cost import streaming_cost

_DTYPES = ("float32", "bfloat16")
# Of a row of a block in float32. The largest that fits is the default, as each step has a cost of its own.
_ROW_BYTES = tuple(2**n for n in (20, 19, 18, 17, 16))
_MOST_BYTES = 40 * 2**20  # of rows in VMEM, in blocks and kept
# Of a value of a tile. By replays half as many take up to 2 % longer on a v6e. With fewer registers a piece, tiles
# of as many in all take 3 % less, but two to three times as long to trace.
_REGISTERS = 168
_SMALL_BYTES = 4 * 2**20
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
      tile: the shape of a tile: columns, sublanes of channels or images, and lanes; or images, columns and lanes.
      tiles: how many of them a block has.
      has_columns_in_sublanes: whether columns lie in the registers of a tile.
    """

    view: max_pool_views.View
    shape: tuple[int, ...]
    block: tuple[int, ...]
    tile: tuple[int, int, int]
    tiles: int
    has_columns_in_sublanes: bool

    @classmethod
    def of(cls, shape: tuple[int, ...], is_narrow: bool, row_bytes: int) -> "_Blocks":
        """Returns blocks whose rows take so many bytes in float32, if a tile is not larger."""
        view = max_pool_views.view_of(shape)
        shape = view.shape(shape)
        lanes = min(LANES, shape[-1])
        if view.has_pixels_outside:
            _, _, width, _, rows, _ = shape
            sublanes = min(rows, 2 * SUBLANES if is_narrow else SUBLANES)
            tiles, together = _even_tiles(pl.cdiv(rows, sublanes), (width, sublanes, lanes), row_bytes)
            tile = (width, together * sublanes, lanes)
            return cls(view, shape, (1, 1, width, 1, tiles * tile[1], lanes), tile, tiles, False)
        images, _, _, width, _ = shape
        # A load that skips the other columns takes one from each of some images; of packed pixels there are no such.
        if images % SUBLANES == width % SUBLANES == 0 and not is_narrow:
            tiles, together = _even_tiles(images // SUBLANES, (width, SUBLANES, lanes), row_bytes)
            tile = (width, together * SUBLANES, lanes)
            return cls(view, shape, (tiles * tile[1], 1, 1, width, lanes), tile, tiles, False)
        tiles, together = _even_tiles(images, (width, lanes), row_bytes)
        return cls(view, shape, (tiles * together, 1, 1, width, lanes), (together, width, lanes), tiles, True)

    def piece(self, ref: Any, tile: Any, place: tuple[Any, ...], is_interpreted: bool) -> Any:
        """Returns where in a block a piece of a tile lies, given its place in the tile."""
        rows = self.tile[0 if self.has_columns_in_sublanes else 1]
        first = tile * rows if isinstance(tile, int) else pl.multiple_of(tile * rows, rows)
        if self.has_columns_in_sublanes:
            return ref.at[(pl.ds(first, rows), 0, 0, *place[1:])]
        if self.view.has_pixels_outside:
            return ref.at[0, 0, *place, 0, pl.ds(first, rows)]
        images, _, _, columns, lanes = self.block
        if is_interpreted:  # by what has no reshaped references
            return ref.at[pl.ds(first, rows), 0, 0, *place]
        return ref.reshape(images * columns, lanes).at[pl.ds(first * columns + place[0], rows, stride=columns)]

    def grid(self, steps: int) -> tuple[int, ...]:
        """Returns the grid, whose last axis has the steps of an image."""
        sizes = [pl.cdiv(size, block) for size, block in zip(self.shape, self.block, strict=True)]
        return (*(size for axis, size in enumerate(sizes) if axis != 1), steps)

    def spec(self, row: Callable[[Any], Any]) -> pl.BlockSpec:
        """Returns the specification of blocks, given the row of each step."""
        return pl.BlockSpec(self.block, lambda first, *others: (first, row(others[-1]), *others[:-1]))


def _even_tiles(count, tile, row_bytes):
    """Returns how many tiles a block has, of how many of these: blocks and tiles are as even as can be."""
    count = _even(count, row_bytes // _bytes_of(tile))
    together = _even(count, _REGISTERS * 4 * SUBLANES * LANES // _bytes_of(tile))
    return pl.cdiv(count, together), together


def _even(tiles, most):
    """Counts the tiles of a block, at most so many, where blocks are as even as can be."""
    return pl.cdiv(tiles, pl.cdiv(tiles, max(1, min(tiles, most))))


def _bytes_of(tile):
    *untiled, rows, lanes = tile
    return 4 * math.prod(untiled) * round_up(rows, SUBLANES) * round_up(lanes, LANES)


def _kernel(*refs, norm, blocks, is_interpreted):
    names = (*norm.operands, *norm.results, *norm.kept, "shifted")
    ref = dict(zip(names, refs, strict=True))
    (height, width), (before, after) = norm.image, norm.rows
    step = pl.program_id(len(blocks.block) - 1)

    def slot(row):
        return lax.rem(row, norm.reach)

    def columns_of(tile):
        return Columns(width, ref["shifted"].at[:, tile] if blocks.has_columns_in_sublanes else None)

    def load(name, tile, place):
        return blocks.piece(ref[name], tile, place, is_interpreted)[...].astype(jnp.float32)

    def store(name, tile, place, value):
        blocks.piece(ref[name], tile, place, is_interpreted)[...] = value.astype(ref[name].dtype)

    def keep(row, tile, place, values):
        for name, value in values.items():
            ref[name][slot(row), tile, *place] = value

    def over_rows(row, before, after, kept, is_whole, part_of):
        """Adds up parts of the rows around one, from what is kept of each; `is_whole` if none is outside."""
        total = None
        for near in range(-before, after + 1):
            at = row + near if is_whole else jnp.clip(row + near, 0, height - 1)
            parts = part_of(functools.partial(kept, slot(at)))
            if near and not is_whole:
                is_inside = (row + near >= 0) & (row + near < height)
                parts = [jnp.where(is_inside, part, 0) for part in parts]
            total = parts if total is None else [a + b for a, b in zip(total, parts, strict=True)]
        return total

    def kept_of(tile, place):
        return lambda at, name: ref[name][at, tile, *place]

    def add_row(tile):
        columns = columns_of(tile)
        kept = of_x(columns, lambda start: load("x", tile, columns.place(start)), norm)
        for start in columns.starts:
            keep(step, tile, columns.place(start), kept(start))

    def normalize_row(tile, is_whole):
        row, columns = step - after, columns_of(tile)
        means = columns.row(lambda start: load("means", tile, columns.place(start))) if norm.has_means else None

        def sums(start):
            """Returns s, and the sum of deviations in each window if that is needed."""

            def part_of(kept):
                if means is None:
                    return [kept("squares"), *([kept("deviation")] if norm.means_grad else [])]
                apart = (kept("finite") - means(start)) + kept("offset")
                return [kept("squares"), apart * apart, *([apart] if norm.means_grad else [])]

            kept = kept_of(tile, columns.place(start))
            squares, *rest = over_rows(row, before, after, kept, is_whole, part_of)
            s = norm.k + norm.share * squares
            if means is None:
                return s, rest
            count = columns.count(start, *norm.columns)
            return s + (norm.share * count) * rest[0], [count * part for part in rest[1:]]

        def normalize(start):
            s, _ = sums(start)
            place = columns.place(start)
            store("y", tile, place, ref["pixels"][slot(row), tile, *place] * norm.power(s, norm.beta))

        def gradient(start):
            """Keeps what is scaled, stores the gradient of the means, and returns -2 u."""
            (s, deviation), place = sums(start), columns.place(start)
            x, grad = ref["pixels"][slot(row), tile, *place], load("grad", tile, place)
            keep(row, tile, place, {"scaled": grad * norm.power(s, norm.beta)})
            u = (2 * norm.beta * norm.share) * grad * x * norm.power(s, norm.beta + 1)
            if norm.means_grad:
                store("dmeans", tile, place, u * deviation[0])
            return u

        if not norm.has_grad:
            for start in columns.starts:
                normalize(start)
            return
        kept = of_u(columns, columns.row(gradient), means, norm)
        for start in columns.starts:
            keep(row, tile, columns.place(start), kept(start))

    def finish_row(tile, is_whole):
        row, columns = step - after - before, columns_of(tile)
        for start in columns.starts:
            place = columns.place(start)
            x, scaled = (ref[name][slot(row), tile, *place] for name in ("pixels", "scaled"))

            def part_of(kept, x=x):
                return [(kept("mean") - x) * kept("total") + kept("moment") if norm.has_means else kept("total")]

            (part,) = over_rows(row, after, before, kept_of(tile, place), is_whole, part_of)
            store("dx", tile, place, scaled + part if norm.has_means else scaled - x * part)

    def of_tiles(is_due, compute):
        @pl.when(is_due)
        def _():
            if blocks.tiles == 1:
                compute(0)
            else:
                lax.fori_loop(0, blocks.tiles, lambda tile, _: compute(tile), None)

    def of_rows(row, before, after, compute):
        is_whole = (row >= before) & (row < height - after)
        of_tiles(is_whole, functools.partial(compute, is_whole=True))
        is_there = (row >= 0) & (row < height)
        of_tiles(is_there & ~is_whole, functools.partial(compute, is_whole=False))

    @pl.when(step == 0)
    def _():
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
        functools.partial(_kernel, norm=norm, blocks=blocks, is_interpreted=bool(interpret)),
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
    )(*(_streamed(blocks.view.of(array), interpret) for array in arrays))
    return tuple(blocks.view.back(one, images.x.shape) for one in results)


def _streamed(array, interpret):
    """Keeps an operand in HBM.

    XLA would copy it to VMEM ahead of the gradient's kernel, beside the value's, which is bound by HBM. What is small
    may lie there already.
    """
    from jax.experimental.pallas import tpu as pltpu

    is_small = array.size * array.dtype.itemsize < _SMALL_BYTES
    return array if interpret or is_small else pltpu.with_memory_space_constraint(array, pltpu.HBM)


def _scratch(norm, blocks):
    """Returns the shapes of scratch: rows that are kept, and rows between zeros."""
    kept = [(norm.reach, blocks.tiles, *blocks.tile)] * len(norm.kept)
    if not blocks.has_columns_in_sublanes:
        return [*kept, (SUBLANES, LANES)]
    images, width, lanes = blocks.tile
    edges = 2 * round_up(max(1, *norm.columns), SUBLANES)
    return [*kept, (2, blocks.tiles, images, width + edges, lanes)]


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
            found.append((blocks.block, {"row_bytes": row_bytes}))
    # Larger rows of few images are no larger.
    return [config for i, (block, config) in enumerate(found) if block not in [one for one, _ in found[i + 1 :]]]


def kind(hardware, images, *grad, window, beta, means_grad=None, **_) -> Kind:
    """Returns what makes cases alike; see `pallas_kernels.kernel.Kernel.kind`."""
    view = max_pool_views.view_of(images.x.shape)
    sublanes = "columns" if _blocks(images, *grad, row_bytes=0).has_columns_in_sublanes else "images"
    within = "pixels outside" if view.has_pixels_outside else f"{sublanes} in sublanes"
    stored = within if view.is_stored_so else "transposed"
    means = "no means" if images.means is None else "means"
    wanted = ", their gradient" if means_grad else ""
    *batch, _, rows, columns, channels = images.x.shape
    sizes = rows, columns, math.prod(batch) * channels
    return Kind(f"{dtype_names(images.x, *grad)}, {means}{wanted}, {stored}, n={window[1]}, beta={beta:g}", sizes)


KERNEL = Kernel(name="mosaic_tpu", platform="tpu", run=run, refuses=refuses, configs=configs, kind=kind)
BACKWARD_KERNEL = Kernel(
    name="mosaic_tpu", platform="tpu", run=run_backward, refuses=refuses, configs=configs, kind=kind
)
