"""One computation over all rows, a chunk of them at a time, without moving rows between devices."""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxops._derivative import Arrays
from jaxops._sharding import same_varying_axes

# 64 MiB of float32 logits: what is cheaper to keep than to compute in chunks, and a good size for a chunk.
SMALL_LOGITS = 2**24
# With fewer rows the sum of weight gradients, read and written once a chunk, outweighs the matrix products.
LEAST_CHUNK_ROWS = 512


def default_chunk_rows(vocabulary: int) -> int:
    """How many rows of logits a chunk has."""
    return max(LEAST_CHUNK_ROWS, SMALL_LOGITS // max(1, vocabulary))


def map_rows(
    body: Callable[..., tuple[Arrays, Arrays]],
    operands: Sequence[jax.Array],
    batch_rank: int,
    chunk_rows: int | None,
    fills: Sequence[float] = (),
) -> tuple[Arrays, Arrays]:
    """Calls `body` on chunks of about `chunk_rows` rows; puts its row results together again and adds up its sums.

    A batch axis of n * c positions is split into n parts of c positions, and step j takes position j of every part. So
    an axis that lies in contiguous blocks over devices lies so in every chunk: nothing is gathered.

    Args:
      body: `body(*operands of a chunk) -> (row results, sums)`. Row results begin with the batch axes, sums do not
        have them.
      operands: arrays that begin with the batch axes.
      batch_rank: how many batch axes there are.
      chunk_rows: None takes all rows at once.
      fills: what to fill up the last rows of an operand with where an axis cannot be split evenly; zeros where not
        given. The body's sums must not depend on such rows.
    """
    batch_shape = operands[0].shape[:batch_rank]
    splits = _splits(batch_shape, chunk_rows)
    if math.prod(splits) == 1:
        rows, sums = body(*operands)
        return tuple(rows), tuple(sums)
    fills = [*fills, *(0,) * (len(operands) - len(fills))]
    parts = [_split(x, splits, fill) for x, fill in zip(operands, fills, strict=True)]

    def step(sums: Arrays, at: jax.Array) -> tuple[Arrays, Arrays]:
        rows, terms = body(*(_chunk(x, splits, at) for x in parts))
        return tuple(a + b for a, b in zip(sums, terms, strict=True)), tuple(rows)

    steps = jnp.arange(math.prod(splits))
    _, shapes = jax.eval_shape(lambda at: body(*(_chunk(x, splits, at) for x in parts)), steps[0])
    zeros = [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]
    start = tuple(same_varying_axes([*zeros, *operands])[: len(zeros)])
    # Differentiated once more, a step would keep its logits: together they are what the chunks are there to avoid.
    sums, rows = jax.lax.scan(jax.checkpoint(step, prevent_cse=False), start, steps)
    return tuple(_join(x, splits, batch_shape) for x in rows), sums


def _splits(batch_shape: Sequence[int], chunk_rows: int | None) -> tuple[int, ...]:
    """Into how many steps each batch axis is split; the last axis first, as users lay out the first over devices."""
    if any(jax.export.is_symbolic_dim(size) for size in batch_shape):
        return (1,) * len(batch_shape)
    rows = math.prod(batch_shape)
    steps = max(1, math.ceil(rows / chunk_rows)) if chunk_rows else 1
    splits: list[int] = []
    for size in reversed(batch_shape):
        wanted = max(1, min(steps, size))
        even = (count for count in range(wanted, min(2 * wanted, size + 1)) if size % count == 0)
        splits.append(next(even, wanted))
        steps = math.ceil(steps / splits[-1])
    return tuple(reversed(splits))


def _split(array: jax.Array, splits: tuple[int, ...], fill: float) -> jax.Array:
    """(n1 * c1, n2 * c2, ..., rest) -> (n1, c1, n2, c2, ..., rest), which moves nothing where it splits evenly."""
    rest = array.shape[len(splits) :]
    parts = tuple(math.ceil(size / count) for size, count in zip(array.shape, splits, strict=False))
    missing = [(0, n * c - size) for n, c, size in zip(parts, splits, array.shape, strict=False)]
    if any(after for _, after in missing):
        array = jnp.pad(array, [*missing, *((0, 0),) * len(rest)], constant_values=jnp.asarray(fill, array.dtype))
    return array.reshape(*(size for pair in zip(parts, splits, strict=True) for size in pair), *rest)


def _chunk(array: jax.Array, splits: tuple[int, ...], step: jax.Array) -> jax.Array:
    """What a step takes of an array from `_split`: (n1, n2, ..., rest)."""
    positions = jnp.unravel_index(step, splits)
    # The last axis first: those before it stay where they are.
    for axis, at in reversed([*enumerate(positions)]):
        array = jax.lax.dynamic_index_in_dim(array, at, 2 * axis + 1, keepdims=False)
    return array


def _join(array: jax.Array, splits: tuple[int, ...], batch_shape: Sequence[int]) -> jax.Array:
    """The results (c1 * c2 * ..., n1, n2, ..., rest) of all steps as (n1 * c1, n2 * c2, ..., rest), without filling."""
    rank = len(splits)
    parts, rest = array.shape[1 : rank + 1], array.shape[rank + 1 :]
    array = jnp.moveaxis(array.reshape(*splits, *parts, *rest), range(rank), range(1, 2 * rank, 2))
    array = array.reshape(*(n * c for n, c in zip(parts, splits, strict=True)), *rest)
    return array[tuple(slice(size) for size in batch_shape)]
