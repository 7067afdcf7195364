"""Computes something for all rows, a chunk of them at a time, without moving rows between devices."""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

import lowering
from jaxops._primitive.derivative import Arrays
from jaxops._primitive.sharding import varying_with

# 64 MiB of float32 logits. Up to this size they are cheaper to keep than to compute in chunks; also a chunk's size.
SMALL_LOGITS = 2**24
_LEAST_CHUNK_ROWS = 256

Step = Callable[..., tuple[Arrays, Arrays]]


def default_chunk_rows(vocabulary: int, features: int) -> int:
    """How many rows of logits a chunk has: enough that adding to a weight gradient once per chunk is cheap."""
    return max(_LEAST_CHUNK_ROWS, features // 4, SMALL_LOGITS // max(1, vocabulary))


def of_all_devices(chunk_rows: int) -> int:
    """How many rows are a chunk for all devices together, over which the compiler splits them.

    Each device then has as many as one alone would. With fewer, it would mostly read the weight, once for each chunk.
    """
    place = lowering.placement()
    return chunk_rows if place is None else chunk_rows * place.device_count


def map_rows(
    body: Step, operands: Sequence[jax.Array], batch_rank: int, chunk_rows: int | None, fills: Sequence[float] = ()
) -> tuple[Arrays, Arrays]:
    """Calls `body` on chunks of about `chunk_rows` rows, joins its row results and adds up its sums.

    Args:
      body: `body(*operands of a chunk) -> (row results, sums)`. Row results begin with the batch axes; sums lack them.
      operands: arrays that begin with the batch axes.
      batch_rank: the number of batch axes.
      chunk_rows: None takes all rows at once.
      fills: as in `fold_rows`.
    """
    if math.prod(_splits(operands[0].shape[:batch_rank], chunk_rows)) == 1:
        rows, sums = body(*operands)
        return tuple(rows), tuple(sums)

    def step(sums: Arrays, *chunk: jax.Array) -> tuple[Arrays, Arrays]:
        rows, terms = body(*chunk)
        return tuple(rows), tuple(a + b for a, b in zip(sums, terms, strict=True))

    # Sums do not depend on how many rows a chunk has.
    _, shapes = jax.eval_shape(body, *operands)
    zeros = tuple(jnp.zeros(shape.shape, shape.dtype) for shape in shapes)
    return fold_rows(step, zeros, operands, batch_rank, chunk_rows, fills)


def fold_rows(
    step: Step,
    start: Arrays,
    operands: Sequence[jax.Array],
    batch_rank: int,
    chunk_rows: int | None,
    fills: Sequence[float] = (),
) -> tuple[Arrays, Arrays]:
    """Calls `row results, sums = step(sums, *operands of a chunk)` for each chunk; returns all results and sums.

    A batch axis of n * c positions is split into n parts of c positions, and step j takes position j of every part. So
    if contiguous blocks of an axis lie on different devices, the same holds in every chunk, and nothing is gathered.

    Args:
      step: takes and returns the sums so far; row results begin with the batch axes.
      start: the sums before the first step.
      operands: arrays that begin with the batch axes.
      batch_rank: the number of batch axes.
      chunk_rows: about how many rows are in a chunk; None takes all at once.
      fills: the values that fill up an operand's last rows if an axis does not split evenly; zeros by default. The sums
        must not depend on such rows.
    """
    batch_shape = operands[0].shape[:batch_rank]
    splits = _splits(batch_shape, chunk_rows)
    if math.prod(splits) == 1:
        rows, sums = step(start, *operands)
        return tuple(rows), tuple(sums)
    fills = [*fills, *(0,) * (len(operands) - len(fills))]
    parts = [_split(x, splits, fill) for x, fill in zip(operands, fills, strict=True)]

    def one(sums: Arrays, at: jax.Array) -> tuple[Arrays, Arrays]:
        rows, sums = step(sums, *(_chunk(x, splits, at) for x in parts))
        return tuple(sums), tuple(rows)

    start = varying_with(start, operands)
    # Differentiated again, every step would keep its logits, together just what the chunks are there to avoid.
    sums, rows = jax.lax.scan(jax.checkpoint(one, prevent_cse=False), start, jnp.arange(math.prod(splits)))
    return tuple(_join(x, splits, batch_shape) for x in rows), sums


def _splits(batch_shape: Sequence[int], chunk_rows: int | None) -> tuple[int, ...]:
    """How many steps split each batch axis. The last axis comes first, because users split the first over devices."""
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
    """(n1 * c1, n2 * c2, ..., rest) -> (n1, c1, n2, c2, ..., rest), which moves nothing if it splits evenly."""
    rest = array.shape[len(splits) :]
    parts = tuple(math.ceil(size / count) for size, count in zip(array.shape, splits, strict=False))
    missing = [(0, n * c - size) for n, c, size in zip(parts, splits, array.shape, strict=False)]
    if any(after for _, after in missing):
        array = jnp.pad(array, [*missing, *((0, 0),) * len(rest)], constant_values=jnp.asarray(fill, array.dtype))
    return array.reshape(*(size for pair in zip(parts, splits, strict=True) for size in pair), *rest)


def _chunk(array: jax.Array, splits: tuple[int, ...], step: jax.Array) -> jax.Array:
    """The part of an array from `_split` that one step takes: (n1, n2, ..., rest)."""
    positions = jnp.unravel_index(step, splits)
    # The last axis first, so that the positions of those before it do not change.
    for axis, at in reversed([*enumerate(positions)]):
        array = jax.lax.dynamic_index_in_dim(array, at, 2 * axis + 1, keepdims=False)
    return array


def _join(array: jax.Array, splits: tuple[int, ...], batch_shape: Sequence[int]) -> jax.Array:
    """The results (c1 * c2 * ..., n1, n2, ..., rest) of all steps as (n1 * c1, n2 * c2, ..., rest), without fillers."""
    rank = len(splits)
    parts, rest = array.shape[1 : rank + 1], array.shape[rank + 1 :]
    array = jnp.moveaxis(array.reshape(*splits, *parts, *rest), range(rank), range(1, 2 * rank, 2))
    array = array.reshape(*(n * c for n, c in zip(parts, splits, strict=True)), *rest)
    return array[tuple(slice(size) for size in batch_shape)]
