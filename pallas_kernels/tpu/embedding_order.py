"""Ids of an embedding's gradient on TPU: sorted, cut into tiles of the table, and packed as the kernel takes them.

The kernel's scalar unit has little time for a position, so XLA works out beforehand where its row of the gradient lies
and where its sum goes, and packs both into one word.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

LANES = 128
SUBLANES = 8
_NO_ROW = 2**31 - 1
_CHUNK_ROWS = 128  # at most


class Blocks(NamedTuple):
    """Blocks into which a table (V, D) and the positions are cut.

    Attributes:
      rows: of a tile.
      strips: of 128 columns, in each row.
      chunk_rows: positions in a chunk.
      tiles: how many cover the table's rows.
      chunks: how many cover the positions.
      is_resident: if the only chunk has the gradient's rows as they come, and not in the order of their ids.
    """

    rows: int
    strips: int
    chunk_rows: int
    tiles: int
    chunks: int
    is_resident: bool

    @property
    def steps(self) -> int:
        """The most pairs of a tile and a chunk that share positions, where a tile without positions counts as one."""
        return self.tiles + self.chunks - 1

    @property
    def unrolled(self) -> int:
        """Positions in one turn of the kernel's loop: as many as keep the scalar unit busy, less for wide rows."""
        return max(2, 128 // max(SUBLANES, self.strips))

    @property
    def source_bits(self) -> int:
        """The bits of a word that say where a position's row lies in its chunk."""
        return (self.chunk_rows * self.strips - 1).bit_length()

    @property
    def word_bits(self) -> int:
        """All bits of a word: where the row lies, whether its id is a new one, and where the sum goes in its tile."""
        return self.source_bits + 1 + (self.rows * self.strips - 1).bit_length()


def blocks_of(num_weights: int, width: int, positions: int, dtype: Any, config: Any) -> Blocks:
    """Cuts tiles of about `block_elements`, as wide as the table."""
    multiple, strips = 32 // jnp.dtype(dtype).itemsize, pl.cdiv(width, LANES)
    rows = max(multiple, config["block_elements"] // (strips * LANES) // multiple * multiple)
    # Of 16-bit values two rows share registers, and neither can be read alone.
    is_resident = bool(config.get("resident")) and jnp.dtype(dtype).itemsize == 4
    chunk_rows = round_up(positions, SUBLANES) if is_resident else min(rows, _CHUNK_ROWS)
    rows = min(rows, round_up(num_weights, multiple))
    tiles, chunks = pl.cdiv(num_weights, rows), pl.cdiv(positions, chunk_rows)
    return Blocks(rows, strips, chunk_rows, tiles, chunks, is_resident)


def round_up(size: int, multiple: int) -> int:
    """Returns the smallest multiple that is not below `size`."""
    return pl.cdiv(size, multiple) * multiple


class Order(NamedTuple):
    """The positions in the order of their ids.

    Attributes:
      schedule: for each step the tile, the chunk, and where in the chunk its positions begin and end. If rows are
        resident: where each tile's positions begin, and where the last one's end.
      words: for each position, see `Blocks.word_bits`.
      positions: which they are.
    """

    schedule: tuple[jax.Array, ...]
    words: jax.Array
    positions: jax.Array


def in_order(indices: jax.Array, blocks: Blocks, num_weights: int, padding_idx: int | None) -> Order:
    """Sorts the ids, fills them up to whole chunks, and says what is to be done in each step."""
    ids, positions = _sorted_ids(indices, num_weights, padding_idx)
    missing = blocks.chunks * blocks.chunk_rows - ids.size
    ids = jnp.pad(ids, (0, missing), constant_values=_NO_ROW)
    positions = jnp.pad(positions, (0, missing))
    row = positions if blocks.is_resident else jnp.arange(ids.size, dtype=jnp.int32) % blocks.chunk_rows
    is_new = jnp.concatenate([jnp.ones(1, bool), ids[1:] != ids[:-1]]).astype(jnp.int32)
    words = (_place(ids % blocks.rows, blocks.strips) << 1 | is_new) << blocks.source_bits
    words |= _place(row, blocks.strips)
    # A comparison of all with all is one pass of the vector unit, where a binary search takes a dozen gathers.
    edges = blocks.rows * jnp.arange(blocks.tiles + 1, dtype=jnp.int32)
    starts = jnp.sum(ids[None] < edges[:, None], axis=1, dtype=jnp.int32)
    schedule = (starts,) if blocks.is_resident else _pairs(starts, blocks)
    return Order(schedule, words, positions)


def _sorted_ids(indices: jax.Array, num_weights: int, padding_idx: int | None) -> tuple[jax.Array, jax.Array]:
    """Sorts ids, with ids that are not a row last, and returns the positions that hold them."""
    ids = indices.reshape(-1)
    ids = ids if ids.dtype.itemsize == 8 else ids.astype(jnp.int32)
    live = (ids >= 0) & (ids < num_weights)
    if padding_idx is not None:
        live &= ids != padding_idx
    positions, bits = jnp.arange(ids.size, dtype=jnp.int32), (ids.size - 1).bit_length()
    if (num_weights + 1) << bits <= 2**31:
        # To sort both in one word takes less than to sort one and move the other with it.
        ids = jnp.where(live, ids, jnp.full_like(ids, num_weights)).astype(jnp.int32)
        (keys,) = jax.lax.sort((ids << bits | positions,), is_stable=False)
        return keys >> bits, keys & (2**bits - 1)
    ids = jnp.where(live, ids, jnp.full_like(ids, _NO_ROW)).astype(jnp.int32)
    ids, positions = jax.lax.sort((ids, positions), num_keys=1)
    return ids, positions


def _place(row: jax.Array, strips: int) -> jax.Array:
    """Returns where a row begins, in rows of 128 lanes: memory has 8 rows of a strip of 128 columns, then the next."""
    return row // SUBLANES * (SUBLANES * strips) + row % SUBLANES


def _pairs(starts: jax.Array, blocks: Blocks) -> tuple[jax.Array, ...]:
    """Returns, for each step, the tile, the chunk, and where in the chunk the tile's positions begin and end."""
    start, stop = starts[:-1], starts[1:]
    first_chunk = jnp.minimum(start // blocks.chunk_rows, blocks.chunks - 1)
    last_chunk = jnp.maximum(first_chunk, (stop - 1) // blocks.chunk_rows)
    steps_before = jnp.cumsum(last_chunk - first_chunk + 1, dtype=jnp.int32)
    step = jnp.arange(blocks.steps, dtype=jnp.int32)
    tile = jnp.searchsorted(steps_before, step, side="right").astype(jnp.int32)
    is_idle, tile = tile == blocks.tiles, jnp.minimum(tile, blocks.tiles - 1)
    # Counted back from the tile's last step. Idle steps at the end repeat the last chunk, which copies nothing.
    chunk = jnp.minimum(last_chunk[tile] - (steps_before[tile] - 1 - step), last_chunk[tile])
    begin = jnp.clip(start[tile] - chunk * blocks.chunk_rows, 0, blocks.chunk_rows)
    end = jnp.clip(stop[tile] - chunk * blocks.chunk_rows, 0, blocks.chunk_rows)
    return tile, chunk, begin, jnp.where(is_idle, 0, end)
