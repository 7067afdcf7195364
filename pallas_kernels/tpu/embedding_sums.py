"""The kernel of an embedding's gradient on TPU: it adds rows up in VMEM, and writes each sum once.

What limits it, beside HBM, is the scalar unit: two instructions a cycle, and each position needs some for its word and
for two addresses. So

* arrays come as rows of 128 lanes, in the order in which memory has them: 8 rows of a strip of 128 columns, then 8 of
  the next strip. A row is then a load with a stride, and its address takes one addition.
* equal ids follow each other. Their sum stays in registers, and each position stores it anew: nothing is loaded from
  the sums, and no store has to end before the next position begins.
* sums go to HBM from where they are, if nothing has to be done with them, with several tiles on their way.
* a tile with far more positions than others would keep HBM waiting. If each tile has one step, the rows of the fullest
  one are added in the steps of others.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.tpu.embedding_order import LANES, SUBLANES, Blocks

# Tiles of sums that go to HBM as they are: one is summed while others are on their way.
SLOTS = 3


class Plan(NamedTuple):
    """Plan that the kernel is traced for.

    Attributes:
      blocks: how table and positions are cut.
      in_place: if sums go to HBM as they are. Else the pipeline writes blocks that are made from them.
      is_converted: if the gradient's rows have 16 bits.
      averaged: if a row's sum is divided by how often its id is there.
    """

    blocks: Blocks
    in_place: bool
    is_converted: bool
    averaged: bool

    @property
    def slots(self) -> int:
        """The number of tiles of sums, beside the fullest one's."""
        return SLOTS if self.in_place else 1

    @property
    def fullest_at(self) -> int:
        """The step of the fullest tile, whose rows are added in the steps before; 0 if it is not treated apart.

        It is not the last, so that its sums are on their way to HBM while those of others are computed.
        """
        return max(0, self.blocks.tiles - 3) if self.blocks.is_resident and self.in_place else 0

    @property
    def turns(self) -> int:
        """Tiles that use the slots by turns."""
        return self.blocks.tiles - (self.fullest_at > 0)


class _Step(NamedTuple):
    """The tile, where its positions begin and end, if the step is the tile's first or last, and the tile's turn."""

    tile: Any
    begin: Any
    end: Any
    is_first: Any
    is_last: Any
    turn: Any


# What the kernel keeps in scalar memory: the slot whose turn it is, the fullest tile, and where its positions lie.
_SLOT, _FULLEST, _BEGIN, _END = range(4)


def _resident_step(plan: Plan, state_ref: Any, starts_ref: Any) -> _Step:
    step, at = pl.program_id(0), plan.fullest_at
    if not at:
        return _Step(step, starts_ref[step], starts_ref[step + 1], True, True, step)
    turn = step - (step > at).astype(jnp.int32)
    tile = jnp.where(step == at, state_ref[_FULLEST], _tile_of_turn(plan, state_ref, turn))
    # The steps before have added all rows of the fullest tile.
    return _Step(tile, starts_ref[tile + (step == at).astype(jnp.int32)], starts_ref[tile + 1], True, True, turn)


def _tile_of_turn(plan: Plan, state_ref: Any, turn: Any) -> Any:
    """Returns the tile of a turn: they take turns in their order, without the fullest."""
    return turn + (jnp.asarray(turn, jnp.int32) >= state_ref[_FULLEST]).astype(jnp.int32) if plan.fullest_at else turn


def _gathered_step(plan: Plan, tile_ref: Any, chunk_ref: Any, begin_ref: Any, end_ref: Any) -> _Step:
    """Returns this step's tile and positions; the steps of one tile follow each other."""
    del chunk_ref
    step, steps = pl.program_id(0), plan.blocks.steps
    tile = tile_ref[step]
    is_first = (step == 0) | (tile_ref[jnp.maximum(step - 1, 0)] != tile)
    is_last = (step == steps - 1) | (tile_ref[jnp.minimum(step + 1, steps - 1)] != tile)
    return _Step(tile, begin_ref[step], end_ref[step], is_first, is_last, tile)


def _find_fullest(plan: Plan, state_ref: Any, starts_ref: Any) -> None:
    """Finds the fullest tile on the scalar unit: XLA would bring what it finds to HBM and back."""

    def compare(tile: Any, found: tuple[Any, ...]) -> tuple[Any, ...]:
        fullest, begin, end, start = found
        stop = starts_ref[tile + 1]
        is_fuller = stop - start > end - begin
        here = (jnp.where(is_fuller, new, old) for new, old in ((tile, fullest), (start, begin), (stop, end)))
        return *here, stop

    first = starts_ref[0]
    found = jax.lax.fori_loop(0, plan.blocks.tiles, compare, (jnp.int32(0), first, first, first))
    state_ref[_FULLEST], state_ref[_BEGIN], state_ref[_END] = found[:3]


def kernel(*refs: Any, plan: Plan) -> None:
    """Runs one step; `refs`: scalars, words, rows, the result, sums, state, what is carried, then `Plan`'s scratch."""
    is_resident, step, at = plan.blocks.is_resident, pl.program_id(0), plan.fullest_at
    scalars = 1 if is_resident else 4
    scalar_refs, (words_ref, rows_ref, out_ref, sums_ref, state_ref) = refs[:scalars], refs[scalars : scalars + 5]
    carry_refs = list(refs[scalars + 5 :])
    written = carry_refs.pop() if plan.in_place else None
    fetch = _copy(rows_ref, carry_refs[-2], carry_refs.pop()) if is_resident else None
    float32_ref = carry_refs.pop() if is_resident or plan.is_converted else rows_ref
    for_copy = functools.partial(_for_copy, plan, sums_ref, out_ref, written)
    add_all = functools.partial(_add_all, plan, words_ref, float32_ref)

    @pl.when(step == 0)
    def _start() -> None:
        if fetch is not None:
            fetch.start()
        state_ref[_SLOT] = 0
        for ref in carry_refs:
            ref[...] = jnp.zeros_like(ref)
        if at:
            _find_fullest(plan, state_ref, *scalar_refs)
            sums_ref[plan.slots] = jnp.zeros(sums_ref.shape[1:], jnp.float32)

    now = _resident_step(plan, state_ref, *scalar_refs) if is_resident else _gathered_step(plan, *scalar_refs)
    has_turn = jnp.asarray(step != at if at else True)
    slot = jnp.where(has_turn, state_ref[_SLOT], plan.slots)

    @pl.when(has_turn & now.is_first)
    def _empty() -> None:
        if plan.in_place and plan.turns > plan.slots:
            earlier = now.turn - plan.slots
            tile = _tile_of_turn(plan, state_ref, earlier)
            pl.when(earlier >= 0)(lambda: for_copy(tile, slot, lambda copy: copy.wait()))
        sums_ref[slot] = jnp.zeros(sums_ref.shape[1:], jnp.float32)

    if fetch is not None:
        pl.when(step == 0)(fetch.wait)
    elif plan.is_converted:
        pl.when(now.begin < now.end)(lambda: _convert(rows_ref, float32_ref))

    add_all(sums_ref.at[slot], now.begin, now.end, () if at else carry_refs)
    if at:
        add_all(sums_ref.at[plan.slots], *_part_of_fullest(plan, state_ref), carry_refs)

    @pl.when(now.is_last)
    def _write() -> None:
        if plan.in_place:
            for_copy(now.tile, slot, lambda copy: copy.start())
        else:
            _store_block(plan, sums_ref.at[slot], out_ref)
        # Slots take turns.
        state_ref[_SLOT] = jnp.where(has_turn, jnp.where(slot == plan.slots - 1, 0, slot + 1), state_ref[_SLOT])

    if plan.in_place:
        pl.when(step == plan.blocks.steps - 1)(lambda: _wait_for_last(plan, state_ref, for_copy))


def _convert(rows_ref: Any, float32_ref: Any) -> None:
    """Converts all rows: a row of 16-bit values shares its registers with the next and cannot be read alone."""
    float32_ref[...] = rows_ref[...].astype(jnp.float32)


def _wait_for_last(plan: Plan, state_ref: Any, for_copy: Callable[..., None]) -> None:
    """Waits for the tiles of sums that are still on their way."""
    for turn in range(max(0, plan.turns - plan.slots), plan.turns):
        for_copy(_tile_of_turn(plan, state_ref, turn), turn % plan.slots, lambda copy: copy.wait())
    if plan.fullest_at:
        for_copy(state_ref[_FULLEST], plan.slots, lambda copy: copy.wait())


def _store_block(plan: Plan, sums_ref: Any, out_ref: Any) -> None:
    """Turns a tile of sums into a block of the result."""
    sums = sums_ref[...].reshape(-1, plan.blocks.strips, SUBLANES, LANES)
    for strip in range(plan.blocks.strips):
        of_strip = sums[:, strip].reshape(plan.blocks.rows, LANES)
        out_ref[:, strip * LANES : (strip + 1) * LANES] = of_strip.astype(out_ref.dtype)


def _part_of_fullest(plan: Plan, state_ref: Any) -> tuple[Any, Any]:
    """Returns where this step's even part of the fullest tile's positions begins and ends."""
    begin, end, unrolled = state_ref[_BEGIN], state_ref[_END], plan.blocks.unrolled
    # (end - begin) / fullest_at, rounded up to whole turns of the loop; by a product, as the divisor is a constant.
    part = (((end - begin) * pl.cdiv(2**14, plan.fullest_at * unrolled) >> 14) + 1) * unrolled
    begin = jnp.minimum(begin + pl.program_id(0) * part, end)
    return begin, jnp.minimum(begin + part, end)


def _copy(source_ref: Any, target_ref: Any, semaphore: Any) -> Any:
    from jax.experimental.pallas import tpu as pltpu  # here, because only lowering for a TPU needs its 0.2 s

    return pltpu.make_async_copy(source_ref, target_ref, semaphore)


def _for_copy(
    plan: Plan, sums_ref: Any, out_ref: Any, semaphores: Any, tile: Any, slot: Any, act: Callable[[Any], None]
) -> None:
    """Calls act(the copy of a tile's sums to HBM); the last tile may be cut."""
    size = plan.blocks.rows * plan.blocks.strips

    def copy(valid: int) -> None:
        there = out_ref.at[pl.ds(pl.multiple_of(tile * size, SUBLANES), valid)]
        act(_copy(sums_ref.at[slot, pl.ds(0, valid)], there, semaphores.at[slot]))

    rest = out_ref.shape[0] % size
    if not rest:
        copy(size)
    else:
        is_cut = jnp.asarray(tile == plan.blocks.tiles - 1)
        pl.when(jnp.logical_not(is_cut))(lambda: copy(size))
        pl.when(is_cut)(lambda: copy(rest))


def _add_all(plan: Plan, words_ref: Any, rows_ref: Any, sums_ref: Any, begin: Any, end: Any, carry_refs: Any) -> None:
    """Adds the rows of positions from `begin` to `end`, to what is carried from an earlier step.

    Rows are added one by one, in the order of positions: equal ids may follow each other, and the sum must not depend
    on how the work is cut.
    """
    blocks = plan.blocks
    bits = blocks.source_bits

    def row_at(ref, place):
        return ref.at[pl.ds(place, blocks.strips, stride=SUBLANES)]

    def add(position, carried):
        total, *count = carried
        word = words_ref[0, 0, position]
        words = jnp.full(total.shape, word, jnp.int32)
        is_new = words & (1 << bits) != 0
        total = jnp.where(is_new, 0.0, total) + row_at(rows_ref, word & ((1 << bits) - 1))[...]
        count = [jnp.where(is_new, 0.0, n) + 1.0 for n in count]
        result = total * (1 / count[0]) if count else total
        place = jax.lax.shift_right_logical(word, jnp.int32(bits + 1))
        row_at(sums_ref, place)[...] = result
        return total, *count

    def add_some(index, carried):
        for offset in range(blocks.unrolled):
            carried = add(begin + index * blocks.unrolled + offset, carried)
        return carried

    nothing = jnp.zeros((blocks.strips, LANES), jnp.float32)
    carried = tuple(ref[...] for ref in carry_refs) or (nothing,) * (1 + plan.averaged)
    whole = jax.lax.div(jnp.maximum(end - begin, 0), jnp.int32(blocks.unrolled))
    carried = jax.lax.fori_loop(0, whole, add_some, carried)
    carried = jax.lax.fori_loop(begin + whole * blocks.unrolled, end, add, carried)
    for ref, value in zip(carry_refs, carried, strict=False):
        ref[...] = value
