"""Row statistics of logits, and gradients, computed one tile of columns after the other.

Each tile of the weight is read once, and each tile of its gradient is written once. If rows may be reordered, those
that count go first, and a tile is computed in chunks of them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._checks.dtypes import accumulation_dtype
from jaxops._primitive.derivative import Arrays
from jaxops._primitive.sharding import varying_with
from jaxops.linear_cross_entropy.column_tiles import Tile, fold_columns, tile_columns
from jaxops.linear_cross_entropy.live_rows import live_rows
from jaxops.linear_cross_entropy.logits import (
    SKIPPED,
    CotangentTerms,
    Needs,
    RowSums,
    Targets,
    added,
    is_present,
    linear_gradients,
    linear_logits,
    logits_of_zero,
    no_columns,
    row_statistics,
    row_sums,
    scaled,
)

# How many operands come before the scale: of `tiled_gradients`, and of these, how many have rows.
_UNSCALED = 13
_UNSCALED_ROWS = 10
# The gradients of weight, bias and shared target.
_COLUMN_SUMS = 3


def with_tile(sums: RowSums, tile: Tile, logits: jax.Array, targets: Targets, *, metrics: bool) -> RowSums:
    """The sums over earlier columns, and over those of a tile; targets are the tile's, but labels the vocabulary's."""
    in_tile = targets._replace(labels=tile.local(targets.labels))
    here = row_sums(logits, in_tile, metrics=metrics)
    here = here._replace(prediction=tile.global_columns(here.prediction))
    return added(sums, here, (tile.precedes(targets.labels), in_tile.labels >= 0))


def tiled_statistics(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    labels: jax.Array,
    shared_target: jax.Array,
    row_target: jax.Array,
    *scale: jax.Array,
    softcap: float | None,
    tile_logits: int | None,
    metrics: bool,
) -> Arrays:
    """The `RowStatistics` of x weight^T + bias; operands as in `operator.linear_row_statistics`."""
    x = x.astype(weight.dtype)
    # Probabilities are too large to be reordered, and metrics are wanted for all rows.
    live = None if is_present(row_target) or metrics else live_rows(labels)
    operands = (x, labels, row_target, *scale)
    rows = operands if live is None else tuple(map(live.take, operands))

    def add_tile(sums: Arrays, tile: Tile) -> Arrays:
        weight_part, bias_part, shared_part = tile.of(weight), tile.of(bias), tile.of(shared_target)

        def add(_: Arrays, sums: Arrays, *chunk: jax.Array) -> tuple[Arrays, Arrays]:
            x, labels, row_part, *scale = chunk
            logits = scaled(linear_logits(x, weight_part, bias_part, softcap), tuple(scale))
            return with_tile(RowSums(*sums), tile, logits, Targets(labels, shared_part, row_part), metrics=metrics), ()

        x, labels, row_target, *scale = rows
        chunk = (x, labels, tile.of(row_target, row_target.ndim - 1), *scale)
        return add((), sums, *chunk)[0] if live is None else live.fold(add, (), sums, chunk)[0]

    no_sums = no_columns(rows[1].shape, accumulation_dtype(x.dtype))
    start = varying_with(no_sums, (*operands, weight, bias, shared_target))
    columns = tile_columns(labels.size if live is None else live.chunk_rows, weight.shape, tile_logits)
    statistics = RowSums(*fold_columns(add_tile, start, weight.shape[0], columns)).statistics
    if live is None:
        return tuple(statistics)
    skipped = row_statistics(
        logits_of_zero(bias, weight.shape[0], softcap, accumulation_dtype(x.dtype)),
        Targets(jnp.asarray(SKIPPED, labels.dtype), shared_target, jnp.zeros((0,), row_target.dtype)),
        metrics=False,
    )
    pairs = zip(map(live.restore, statistics), skipped, strict=True)
    return tuple(jnp.where(labels == SKIPPED, of_skipped, of_live) for of_live, of_skipped in pairs)


def _zeros_if(needed: bool, *shape: int, dtype: Any) -> jax.Array:
    return jnp.zeros(shape if needed else (0, *shape[1:]), dtype)


def tiled_gradients(
    *operands: jax.Array, softcap: float | None, tile_logits: int | None, metrics: bool, needs: Needs
) -> Arrays:
    """The gradients of x, weight, bias, shared and row targets, from the cotangent of the logits.

    Operands are the fields of `CotangentTerms`, the operands of `tiled_statistics` without the scale, the logits before
    they are `scaled`, (..., 0) if not kept, and the scale, if any. With one, the last result is as in
    `linear_gradients`.
    """
    *terms, x, weight, bias, labels, shared_target, row_target, logits = operands[:_UNSCALED]
    scale = operands[_UNSCALED:]
    x_dtype, x = x.dtype, x.astype(weight.dtype)
    live = None if is_present(row_target) or is_present(logits) else live_rows(labels)
    # Fillers must get probabilities of 0: their logits are the bias, and exp(bias) alone may overflow.
    fills = (0, 0, 0, 0, 0, jnp.inf, 0, 0, 0, 0, *(1 for _ in scale))
    rows = (*terms, x, labels, row_target, logits, *scale)
    if live is not None:
        rows = tuple(map(live.take, rows, fills))
    shared = (weight, bias, shared_target)
    zeros = functools.partial(_zeros_if, dtype=accumulation_dtype(x.dtype))

    def add_tile(carry: Arrays, tile: Tile) -> Arrays:
        of_rows, of_columns = carry[:-_COLUMN_SUMS], carry[-_COLUMN_SUMS:]
        weight_part, bias_part, shared_part = map(tile.of, shared)

        def add(sums: Arrays, results: Arrays, *chunk: jax.Array) -> tuple[Arrays, Arrays]:
            *terms, x, labels, row_part, logits = chunk[:_UNSCALED_ROWS]
            row_terms = CotangentTerms(*terms) if metrics else CotangentTerms(*terms)._replace(softmax_slope=None)
            if not is_present(logits):
                logits = linear_logits(x, weight_part, bias_part, softcap)
            targets = Targets(tile.local(labels), shared_part, row_part)
            arguments = (row_terms, x, weight_part, targets, logits, softcap, needs)
            parts, column_parts = linear_gradients(*arguments, scale=chunk[_UNSCALED_ROWS:])
            # All row results are sums over tiles, except the gradient of row targets: each of its columns is in one.
            totals = (total + part for total, part in zip(results[2:], parts[2:], strict=True))
            added_columns = tuple(total + part for total, part in zip(sums, column_parts, strict=True))
            return (results[0] + parts[0], parts[1], *totals), added_columns

        *others, row_target = rows[: _UNSCALED_ROWS - 1]
        chunk = (*others, tile.of(row_target, row_target.ndim - 1), *rows[_UNSCALED_ROWS - 1 :])
        sums: Arrays = (
            zeros(needs.weight, tile.columns, x.shape[-1]),
            zeros(needs.bias, tile.columns),
            zeros(needs.shared_target, tile.columns),
        )
        # Rows with targets of their own are never reordered, so `fold` has no gradient of row targets to add.
        parts, sums = add(sums, of_rows, *chunk) if live is None else live.fold(add, sums, of_rows, chunk)
        row_grad = tile.put(of_rows[1], parts[1].astype(of_rows[1].dtype), of_rows[1].ndim - 1)
        pairs = zip(of_columns, sums, strict=True)
        return parts[0], row_grad, *parts[2:], *(tile.put(total, part.astype(total.dtype)) for total, part in pairs)

    batch = rows[0].shape
    start = (
        jnp.zeros((*batch, x.shape[-1] if needs.x else 0), accumulation_dtype(x.dtype)),
        jnp.zeros((*batch, weight.shape[0] if needs.row_target else 0), row_target.dtype),
        *(jnp.zeros_like(row_scale, shape=batch) for row_scale in scale),
        zeros(needs.weight, *weight.shape).astype(weight.dtype),
        zeros(needs.bias, weight.shape[0]).astype(bias.dtype),
        zeros(needs.shared_target, weight.shape[0]).astype(shared_target.dtype),
    )
    columns = None
    if not is_present(logits):
        columns = tile_columns(labels.size if live is None else live.chunk_rows, weight.shape, tile_logits)
    folded = fold_columns(add_tile, varying_with(start, operands), weight.shape[0], columns)
    of_rows, of_columns = folded[:-_COLUMN_SUMS], folded[-_COLUMN_SUMS:]
    x_grad, row_grad, *along_logits = of_rows if live is None else map(live.restore, of_rows)
    return (x_grad.astype(x_dtype), *of_columns, row_grad, *along_logits)
