"""Replays of what semaphores hold, of the compiler's checks, and of counts that do not fit together; no libtpu."""

import math

import pytest
from bundle_text import dma, program, wait

from lowering.schedule.chips import CHIPS
from lowering.schedule.data_hints import DependsOnDataError, Given
from lowering.schedule.kernel import HBM_LATENCY_CYCLES, replay
from lowering.tpu_core.bundles import read_bundles

LEFT = "transfers or signals in kernel for which nothing waits"


def run(*lines, **given):
    return replay("kernel", read_bundles(program(*lines)), CHIPS["tpu-v5e"], 32.0, given=Given(**given))


def loop(turns, first):
    """A loop that turns as often as a value says."""
    return (
        "%s8_s8 = smov 0",
        "%s7_s8 = sphi %s8_s8, %s9_s8  ;;  %s9_s8 = sadd.s32 1, %s7_s8",
        f"%p1_p0 = scmp.lt.s32.totalorder %s9_s8, {turns}",
        f"%9 = sbr.rel (%p1_p0) target bundleno = {first + 1} ({first + 1:#x})",
        *[""] * 5,
    )


@pytest.mark.parametrize("opcode", ["vwait.ge", "vwait.ge.trace"])
def test_a_semaphore_is_read_after_signals_and_waits(opcode):
    taken = "%2 = vsyncadd [#allocation2], 4294967294", f"%3 = {opcode} [#allocation2], 0"
    read = "%4 = vsyncmov [#allocation2]", "%s1_s1 = vpop.sfrf %4"
    found = run("%1 = vsyncadd [#allocation2], 9", *taken, *read, *loop("%s1_s1", 5), *taken * 3)
    assert max(region.trips for region in found.regions) == 7
    assert found.unknown == (LEFT,)  # 9 signals were sent, and 8 taken


def test_a_semaphore_says_whether_a_transfer_is_done():
    # As one polls: the loop turns until what was asked for at bundle 0 has arrived, in four bundles and four slots.
    lines = (
        dma(100),
        "%4 = vsyncmov [#allocation4]",
        "%s1_s1 = vpop.sfrf %4",
        "%p1_p0 = scmp.lt.s32.totalorder %s1_s1, 100",
        "%9 = sbr.rel (%p1_p0) target bundleno = 1 (0x1)",
        *[""] * 4,
        *wait(100),
    )
    found = run(*lines)
    assert max(region.trips for region in found.regions) == 1 + math.ceil((100 + HBM_LATENCY_CYCLES - 1) / 8)
    assert found.unknown == ()


def test_a_wait_for_signals_that_nothing_sends_is_listed_and_makes_the_semaphore_unknown():
    taken = "%2 = vsyncadd [#allocation2], 4294967293", "%3 = vwait.ge [#allocation2], 0"
    read = "%4 = vsyncmov [#allocation2]", "%s1_s1 = vpop.sfrf %4"
    found = run("%1 = vsyncadd [#allocation2], 2", *taken)
    assert found.unknown == ("a wait at kernel@0x2 for what nothing that is replayed starts",)
    with pytest.raises(DependsOnDataError, match="the trip count of a loop depends on data"):
        run(*taken, *read, *loop("%s1_s1", 4))


def test_what_vectors_send_is_new_each_time():
    lines = (
        "%s8_s8 = smov 0",
        "%s7_s8 = sphi %s8_s8, %s9_s8  ;;  %s9_s8 = sadd.s32 1, %s7_s8  ;;  %s1_s1 = vpop.sfrf %5",
        "%p2_p1 = scmp.eq.s32.totalorder %s1_s1, 0",
        "%6 = sbr.rel (%p2_p1) target bundleno = 9 (0x9)",
        *[""] * 4,
        "",
        "%p1_p0 = scmp.lt.s32.totalorder %s9_s8, 10",
        "%9 = sbr.rel (%p1_p0) target bundleno = 1 (0x1)",
        *[""] * 5,
    )
    (branch,) = (region for region in run(*lines, trip_counts={"kernel": 0.5}).regions if region.first == 8)
    assert branch.trips == 5


def test_a_delay_may_be_left_out():
    assert run("%p1_p0 = scmp.lt.s32.totalorder 2, 1", "%1 = vdelay (%p1_p0), 5000", "").cycles == 3


@pytest.mark.parametrize("held", [0, 3])
def test_a_check_that_fails_is_listed(held):
    lines = (
        f"%1 = vsyncadd [#allocation2], {held}",
        "%4 = vsyncmov [#allocation2]",
        "%s1_s1 = vpop.sfrf %4",
        "%p1_p0 = scmp.ne.s32.totalorder %s1_s1, 0",
        "%5 = shalt.err (%p1_p0) /* Semaphore has a nonzero value upon exit */",
    )
    failing = "a check at kernel@0x4 that fails (the chip would halt)", LEFT
    assert run(*lines).unknown == (failing if held else ())


# As a grid whose bound is an operand: loop and transfers are decided one by one, where nothing is said of the operand.
DYNAMIC_GRID = (
    "%s1_s1 = inlined_call_operand.<no memory space> [shape: s32[], index: 0, kind: input]  ;;  %s8_s8 = smov 0",
    "%s7_s8 = sphi %s8_s8, %s9_s8  ;;  %s9_s8 = sadd.s32 1, %s7_s8  ;;  %s2_s2 = sadd.s32 1, %s1_s1",
    "%p2_p1 = scmp.lt.s32.totalorder %s7_s8, %s1_s1  ;;  %p3_p2 = scmp.gt.s32.totalorder %s7_s8, 0",
    dma(100, predicate="(%p2_p1), "),
    "%1 = dma.done.wait (%p3_p2), [#allocation4], 100",
    "%2 = vsyncadd (%p3_p2), [#allocation4], 4294967196",
    "%p1_p0 = scmp.lt.s32.totalorder %s9_s8, %s2_s2",
    "%9 = sbr.rel (%p1_p0) target bundleno = 1 (0x1)",
    *[""] * 5,
)


def test_a_grid_that_an_operand_bounds_is_taken_from_scalars_alone():
    found = run(*DYNAMIC_GRID, scalars={"kernel": {0: [4]}})
    assert (found.dma_count, found.unknown) == (4, ())
    must = r"trip_counts do not fit together in kernel: scalars must say what is in operand 0 \(s32\[\]\)$"
    with pytest.raises(DependsOnDataError, match=must):
        run(*DYNAMIC_GRID, trip_counts={"kernel": 4})
