"""The sizes of chunks of rows and of tiles of columns, which are computed at a time, and where they come from."""

import math
from typing import Any, NamedTuple

import jax


class ChunkSizes(NamedTuple):
    """Sizes of chunks and tiles, in elements, rows or columns.

    Attributes:
      logits: of a chunk of rows: 64 MiB in float32. Fewer cost time, as each chunk adds to the gradient of the weight.
      least: with fewer rows, a chunk mostly reads the weight and adds to its gradient; with fewer columns, products are
        too small to be fast.
      exponentials: of a chunk of rows whose exponentials are written in 16 bits, 0.5 GiB, as on TPUs and in kernels:
        by replay, smaller chunks spend over a tenth of their time on the float32 sum for the weight.
      tile_logits: of a tile of columns over all rows: 1 MiB in float32, which stays in a processor's cache between the
        steps that read it.
      fused_logits: of a tile of columns over a chunk of rows on a TPU, where only sums of rows leave a tile: 16 MiB in
        float32. By replay, smaller ones take longer, and larger ones are stored.
      vocabulary_parts: the devices over which a vocabulary may lie without being moved by tiles. More parts would be
        shorter than the units in which memory is laid out.
      block: of the gradient of a weight, in elements, that a CPU adds a product to at a time: it stays in a cache.
      first_columns: those that decide a row's reference before its logits are known: their maximum is below that of
        128,000 by some 1.7 standard deviations.
      kept_chunks: into how many chunks rows go, about, if only those that count are taken.
      least_kept_rows: with fewer rows, such a chunk is too small for fast products.
    """

    logits: int = 2**24
    least: int = 256
    exponentials: int = 2**28
    tile_logits: int = 2**18
    fused_logits: int = 2**22
    vocabulary_parts: int = 16
    block: int = 2**20
    first_columns: int = 256
    kept_chunks: int = 8
    least_kept_rows: int = 512


SIZES = ChunkSizes()


def rows_of_logits(classes: Any, features: Any, arrays: int = 1) -> int | None:
    """Returns how many rows a chunk of float32 logits has: enough that adding to the weight's gradient is cheap.

    None, all rows, where sizes are symbolic. Where the compiler writes several arrays of a chunk's size, it has fewer.
    """
    if jax.export.is_symbolic_dim(classes) or jax.export.is_symbolic_dim(features):
        return None
    return max(SIZES.least, features // 4, SIZES.logits // max(1, arrays * classes))


def rows_of_exponentials(classes: int, features: int, *, metrics: bool = False) -> int:
    """Returns how many rows a chunk of 16-bit exponentials has; half with metrics, whose logits are float32."""
    rows = SIZES.exponentials // max(1, classes) // (2 if metrics else 1)
    return max(SIZES.least, features // 4, rows)


def columns_of_tile(
    all_rows: Any,
    rows: Any,
    weight_shape: tuple[int, ...],
    chunk_rows: int | None,
    tile_logits: int = SIZES.tile_logits,
) -> int | None:
    """Returns how many columns are computed at a time, of as many rows as are taken at once; None for all columns.

    Their logits are as many as those of `chunk_rows` whole rows; without it, all of few, else `tile_logits`, or of many
    rows so many that reading and writing the rows' feature sums is cheap.
    """
    classes, features = weight_shape
    if jax.export.is_symbolic_dim(classes):
        return None
    least = SIZES.least if jax.export.is_symbolic_dim(features) else max(SIZES.least, features // 2)
    if jax.export.is_symbolic_dim(rows):
        return least
    if chunk_rows is None and all_rows * classes <= SIZES.logits:
        return None
    logits = max(tile_logits, all_rows * least) if chunk_rows is None else chunk_rows * classes
    return math.ceil(logits / max(1, rows))
