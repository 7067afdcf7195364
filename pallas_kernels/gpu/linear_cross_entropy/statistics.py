"""Row statistics of a linear layer's logits on Hopper: one pass over the weight, and no logits in device memory.

Each thread block reduces its rows over its run of vocabulary tiles as online softmax does: a new maximum rescales the
earlier sums. XLA merges the few numbers per row and run afterwards.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.gpu.linear_cross_entropy import pipeline, tiles
from pallas_kernels.gpu.linear_cross_entropy.tiles import Tiling
from pallas_kernels.kernel import Kernel
from pallas_kernels.linear_cross_entropy_kinds import kind

# Columns are compared as float32, which represents integers exactly up to this number.
_MAX_PREDICTED_COLUMNS = 2**24
# The columns of a tile that are reduced at a time; the second number is for metrics with target weights. Beside the 128
# registers of a 128 x 128 tile, a thread has about 100 left, and each term of 128 x 32 logits takes 32 of them.
_PART_COLUMNS = (32, 16)


class _Partial(NamedTuple):
    """Statistics of rows after some of their logits z. m is the largest of these, or 0 if all are -inf.

    Attributes:
      maximum: max z, -inf at the start.
      less_one: sum exp(z - m) - 1. Added to the 1 of the maximum, the small terms of a confident row would be lost.
      label: the label's z, 0 if it was not among them.
      target: sum t (z - m), or None.
      mean: sum exp(z - m) (z - m), or None.
      prediction: the first column of the largest z, or None.
    """

    maximum: jax.Array
    less_one: jax.Array
    label: jax.Array
    target: jax.Array | None
    mean: jax.Array | None
    prediction: jax.Array | None


class Reduced(NamedTuple):
    """Statistics of whole rows: `RowStatistics` with sum exp(z - m) - 1 in place of log sum exp(z - m)."""

    maximum: jax.Array
    less_one: jax.Array
    label: jax.Array
    target: jax.Array
    mean: jax.Array
    prediction: jax.Array


def _reference_point(maximum: jax.Array) -> jax.Array:
    """Returns a finite m, so that z - m is not NaN while all logits are -inf."""
    return jnp.where(maximum == -jnp.inf, 0.0, maximum)


def _first_column(z: jax.Array, maximum: jax.Array, columns: jax.Array) -> jax.Array:
    """Finds the first column of each row's maximum: the maximum of negated columns, as rows reduce by one anyway."""
    is_maximum = z == tiles.by_row(maximum, z)
    return -jnp.max(jnp.where(is_maximum, -columns.astype(jnp.float32), -jnp.inf), axis=1)


class _Params(NamedTuple):
    softcap: float | None
    has_bias: bool
    has_scale: bool
    has_target: bool
    metrics: bool

    @property
    def part_columns(self) -> int:
        return _PART_COLUMNS[self.metrics and self.has_target]


def _kernel(x_gmem, weight_gmem, labels_gmem, *refs, tiling, params, interpret):
    """Takes as `refs`, if present, bias, row scales, target weights and their sums before each split; results."""
    *optional, results_gmem = refs
    bias_gmem = optional.pop(0) if params.has_bias else None
    scale_gmem = optional.pop(0) if params.has_scale else None
    target_gmem, target_sums_gmem = optional if params.has_target else (None, None)
    part_columns = params.part_columns
    load = functools.partial(tiles.load, interpret=interpret)

    def body(first, fold):
        labels = load(labels_gmem, first.rows)
        scale = load(scale_gmem, first.rows) if params.has_scale else None
        zeros = jnp.zeros(labels.shape, jnp.float32)

        # z is a whole tile in registers. Its statistics, one number per row each, stay in registers across tiles.
        def consume(place, z, partial):
            for start in range(0, tiling.block_columns, part_columns):
                part = lax.slice(z, (0, start), (z.shape[0], start + part_columns))
                partial = consume_part(part, place.column + start, partial)
            return partial

        def consume_part(z, column, partial):
            own_columns = pl.ds(column, part_columns)
            columns = lax.broadcasted_iota(jnp.int32, z.shape, 1) + column
            if params.has_bias:
                z = z + tiles.by_column(load(bias_gmem, own_columns), z)
            if params.softcap is not None:
                z = tiles.capped(z, params.softcap)
            if scale is not None:
                z = z * tiles.by_row(scale, z)
            # Columns beyond the last count for nothing, as exp(-inf - m) = 0.
            z = jnp.where(columns < tiling.columns, z, -jnp.inf)
            tile_maximum = jnp.max(z, axis=1)
            maximum = jnp.maximum(partial.maximum, tile_maximum)
            before, after = _reference_point(partial.maximum), _reference_point(maximum)
            shifted = z - tiles.by_row(after, z)
            exponential = jnp.exp2(tiles.LOG2_E * shifted)
            rescale = jnp.exp2(tiles.LOG2_E * (partial.maximum - after))
            # Without a new maximum `rescale` is 1, and a small sum keeps its digits.
            less_one = rescale * partial.less_one + (jnp.sum(exponential, axis=1) + (rescale - 1))
            is_label = columns == tiles.by_row(labels, columns)
            label = partial.label + jnp.sum(jnp.where(is_label, z, 0.0), axis=1)
            target, mean, prediction = partial.target, partial.mean, partial.prediction
            if target_sums_gmem is not None:
                weights = tiles.by_column(load(target_gmem, own_columns), z)
                products = jnp.where(columns < tiling.columns, weights * shifted, 0.0)
                # sum t (z - m) moves with m by the sum of t so far, which XLA has computed ahead: one load a part.
                weight_before = target_sums_gmem[lax.div(column, jnp.int32(part_columns))]
                target = target + weight_before * (before - after) + jnp.sum(products, axis=1)
            if params.metrics:
                finite = jnp.where(shifted == -jnp.inf, 0.0, shifted)
                mean = rescale * (mean + (before - after) * (1 + partial.less_one))
                mean = mean + jnp.sum(exponential * finite, axis=1)
                is_new = tile_maximum > partial.maximum
                prediction = jnp.where(is_new, _first_column(z, tile_maximum, columns), prediction)
            return _Partial(maximum, less_one, label, target, mean, prediction)

        of_target, of_metrics = zeros if params.has_target else None, zeros if params.metrics else None
        start = _Partial(zeros - jnp.inf, zeros - 1, zeros, of_target, of_metrics, of_metrics)
        found = fold(lambda place: functools.partial(consume, place), start)
        # No two thread blocks have the same rows and split, so results are stored without atomics, in any order.
        split = lax.div(first.tile, jnp.int32(tiling.tiles_per_split))
        for field, values in enumerate(value for value in found if value is not None):
            results_gmem[field, split, first.rows] = values

    pipeline.fold_tiles(body, x_gmem, weight_gmem, tiling=tiling, interpret=interpret)


def reduced_rows(
    x: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    *,
    bias: jax.Array | None = None,
    target: jax.Array | None = None,
    scale: jax.Array | None = None,
    softcap: float | None,
    metrics: bool,
    config: Any,
    interpret: Any,
) -> Reduced:
    """Computes the statistics of rows (n, H); `bias` and `target` are (V,), and logits may have a scale (n,)."""
    params = _Params(softcap, bias is not None, scale is not None, target is not None, metrics)
    rows = x.shape[0]
    tiling = Tiling.of(config, rows, weight.shape)
    operands = [x, weight, tiles.filled(labels, (tiling.rows,), -1)]
    if bias is not None:
        operands.append(tiles.filled(bias.astype(jnp.float32), (tiling.tiles * tiling.block_columns,)))
    if scale is not None:
        operands.append(tiles.filled(scale.astype(jnp.float32), (tiling.rows,)))
    split_weights = jnp.zeros((tiling.vocab_splits,), jnp.float32)
    if target is not None:
        padded = tiling.vocab_splits * tiling.tiles_per_split * tiling.block_columns
        target = tiles.filled(target.astype(jnp.float32), (padded,))
        part_weights = jnp.sum(target.reshape(tiling.vocab_splits, -1, params.part_columns), axis=2)
        split_weights = jnp.sum(part_weights, axis=1)
        operands += [target, (jnp.cumsum(part_weights, axis=1) - part_weights).reshape(-1)]
    # The results in device memory are (fields, splits, rows): a few numbers per row, in place of `columns` logits.
    fields = 3 + params.has_target + 2 * metrics
    results = pipeline.launch(
        functools.partial(_kernel, tiling=tiling, params=params, interpret=bool(interpret)),
        operands,
        jax.ShapeDtypeStruct((fields, tiling.vocab_splits, tiling.rows), jnp.float32),
        tiling=tiling,
        name="linear_cross_entropy",
        interpret=interpret,
    )
    maximum, less_one, label, *others = results[:, :, :rows]
    partial = _Partial(
        maximum,
        less_one,
        label,
        target=others[0] if params.has_target else None,
        mean=others[-2] if metrics else None,
        prediction=others[-1] if metrics else None,
    )
    return _merged(partial, labels, split_weights, weight.shape[0])


def _merged(partial: _Partial, labels: jax.Array, split_weights: jax.Array, columns: int) -> Reduced:
    """Merges the partial statistics of the vocabulary splits, (splits, rows) each."""
    maximum = _reference_point(jnp.max(partial.maximum, axis=0))
    shift = _reference_point(partial.maximum) - maximum[None]
    rescale = jnp.exp(partial.maximum - maximum[None])
    total = 1 + partial.less_one
    # One of the splits that have the maximum counts without the 1 that this adds.
    best = jnp.argmax(partial.maximum, axis=0)
    is_best = lax.broadcasted_iota(jnp.int32, total.shape, 0) == best[None]
    less_one = jnp.sum(jnp.where(is_best, partial.less_one, rescale * total), axis=0)
    zeros = jnp.zeros_like(maximum)
    is_column = (labels >= 0) & (labels < columns)
    label = jnp.where(is_column, jnp.sum(partial.label, axis=0) - maximum, zeros)
    target, mean, prediction = zeros, zeros, zeros
    if partial.target is not None:
        target = jnp.sum(partial.target + split_weights[:, None] * shift, axis=0)
    if partial.mean is not None and partial.prediction is not None:
        mean = jnp.sum(rescale * (partial.mean + shift * total), axis=0) / (1 + less_one)
        # argmax takes the first of equal maxima, and splits are in the order of their columns.
        prediction = jnp.take_along_axis(partial.prediction, best[None], axis=0)[0]
    return Reduced(maximum, less_one, label, target, mean, prediction.astype(jnp.int32))


def run(rows, columns, *, softcap, metrics, config, interpret=False, **_):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    x = rows.x.astype(columns.weight.dtype)
    found = reduced_rows(
        x.reshape(-1, x.shape[-1]),
        columns.weight,
        rows.labels.reshape(-1),
        bias=columns.bias,
        target=columns.class_targets,
        scale=None if rows.scale is None else rows.scale.reshape(-1),
        softcap=softcap,
        metrics=metrics,
        config=config,
        interpret=interpret,
    )
    log_sum_exp, target_loss = jnp.log1p(found.less_one), None
    if columns.class_targets is not None:
        target_loss = jnp.sum(columns.class_targets.astype(jnp.float32)) * log_sum_exp - found.target
    metrics_of_rows = (found.mean, found.prediction) if metrics else (None, None)
    results = (found.maximum, log_sum_exp, found.label, target_loss, *metrics_of_rows)
    return tuple(None if result is None else result.reshape(x.shape[:-1]) for result in results)


def refuses(hardware, rows, columns, *, metrics, **_) -> str | None:
    """Tells why the kernel cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    if metrics and columns.weight.shape[0] > _MAX_PREDICTED_COLUMNS:
        classes = columns.weight.shape[0]
        return f"the kernel tells {_MAX_PREDICTED_COLUMNS} columns apart; the vocabulary has {classes}"
    return label_refusal(rows) or tiles.refuses_linear(hardware, rows.x, columns.weight)


def label_refusal(rows) -> str | None:
    """Tells why the kernel cannot take what rows are compared with."""
    return None if rows.labels is not None else "the kernel compares rows with labels, and these have none"


def configs(hardware, rows, columns, **_):
    """Returns tiles, stages and vocabulary splits worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    return launch_configs(hardware, math.prod(rows.x.shape[:-1]), *columns.weight.shape)


def launch_configs(hardware: Any, rows: int, columns: int, hidden: int) -> tuple[dict[str, int], ...]:
    """Lists the configurations for a launch over this many rows and columns."""
    return tuple(
        {**sizes, "vocab_splits": tiles.vocab_splits(hardware, sizes, rows, columns, hidden)}
        for sizes in tiles.grouped_sizes(rows, hidden)
    )


TAKES = frozenset({"x", "labels", "scale", "weight", "bias", "class_targets"})
KERNEL = Kernel(
    name="mosaic_gpu",
    platform="cuda",
    run=run,
    refuses=refuses,
    configs=configs,
    kind=kind,
    interpreter_is_pure=False,
    takes=TAKES,
)
