"""Replays of single kernels, written by hand as libtpu writes them."""

import os

import jax
import pytest
from bundle_text import dma, program, wait

from lowering.schedule import units
from lowering.schedule.chips import CHIPS
from lowering.schedule.data_hints import Decisions, DependsOnDataError, Given
from lowering.schedule.kernel import HBM_LATENCY_CYCLES, replay
from lowering.tpu_core.bundles import Predicate, read_bundles

V5E = CHIPS["tpu-v5e"]
BYTES_PER_CYCLE = 32.0  # a granule


def run(*lines, **given):
    return replay("kernel", read_bundles(program(*lines)), V5E, BYTES_PER_CYCLE, given=Given(**given))


COUNTED_LOOP = (
    "%s1_s4 = smov 0",
    "%s2_s4 = sphi %s1_s4, %s3_s4  ;;  %s3_s4 = sadd.s32 1, %s2_s4",
    "%p1_p0 = scmp.lt.s32.totalorder %s3_s4, 10",
    "%9 = sbr.rel (%p1_p0) target bundleno = 1 (0x1), region = 2",
    *[""] * 4,
    "",
)


def test_bundles_are_read_with_predicates_labels_and_calls():
    text = """= control target key start
     0   :  { %s9_s2 = sld [smem:[#allocation3 + $0x1]] (!%p5_p0)  ;;  %7 = vst [vmem:[#allocation2_spill] sm:$0xff] \
/*vst_source=*/%v1_v0 } /* Start region 0 */
  0x1 LB: > { %12 = dma.hbm_to_vmem [thread:$0]  (%p1_p1), /*hbm=*/%s1_s1, /*size_in_granules=*/1024, /*vmem=*/%s2_s2,\
 /*dst_syncflagno=*/[#allocation4] /*
base_bounds: (256, 16)
 */ }
  0x2   : > { %s5_s3 = smov (%p2_p0, %s3_s3), 0 }
 0x14c PF:  { %32 = inlined_call %s12_s0, %s11_s2 /* %matmul.1 = custom-call(%a, %b) */ }
 0x14d   :  { %33 = inlined_call /* <late-initialization> */ }
 0x14e   :  {}
"""
    load, dma, move, call, runtime, empty = read_bundles(text)
    assert [bundle.number for bundle in (load, dma, call, empty)] == [0, 1, 0x14C, 0x14E]
    scalar, vector = load.instructions
    assert (scalar.opcode, scalar.value, scalar.register) == ("sld", "s9", "s2")
    assert scalar.predicate == Predicate("p5_p0", negated=True)
    assert scalar.operands == ("[smem:[#allocation3 + $0x1]]",)
    assert vector.opcode == "vst"
    assert dma.instructions[0].operands[1] == "size_in_granules=1024"
    assert dma.instructions[0].predicate == Predicate("p1_p1", negated=False)
    assert (move.instructions[0].otherwise, move.instructions[0].operands) == ("%s3_s3", ("0",))
    assert call.instructions[0].callee == "matmul.1"
    assert runtime.instructions[0].callee == "<late-initialization>"
    assert empty.instructions == ()


def test_each_bundle_is_a_cycle_and_so_is_each_delay_slot():
    # 1 bundle, ten turns of 3 bundles with 4 delay slots after the nine branches that are taken, and 5 bundles.
    found = run(*COUNTED_LOOP)
    assert found.cycles == 1 + 10 * 3 + 9 * 4 + 5
    assert [(region.first, region.last, region.trips) for region in found.regions] == [(0, 0, 1), (1, 7, 10), (8, 8, 1)]


def test_another_name_for_a_value_that_is_left_out_changes_no_register():
    # On the way out of a loop, a value that only the way out needs takes the counter's register.
    lines = list(COUNTED_LOOP)
    lines[2] += "  ;;  %p2_p1 = scmp.ge.s32.totalorder %s3_s4, 10"
    lines[4] = "%s5_s4 = sshll.u32 (%p2_p1), %s9_s9, 4  ;;  %s6_s4 = int_to_ptr.vmem [resolvable:$false] %s5_s4"
    assert run(*lines).cycles == run(*COUNTED_LOOP).cycles


def test_delay_slots_are_executed_and_what_follows_them_is_not():
    lines = "%s1_s1 = smov 1", "%9 = sbr.rel target bundleno = 8 (0x8)", "%s1_s2 = smov 2", *[""] * 3, "", "", "", ""
    assert run(*lines).cycles == 2 + 4 + 2


@pytest.mark.parametrize(("count", "taken"), [(4, True), (12, False)])
def test_a_predicate_decides_what_a_value_is(count, taken):
    lines = (
        f"%s1_s1 = smov {count}",
        "%p1_p0 = scmp.lt.s32.totalorder %s1_s1, 10",
        "%s2_s2 = smov (%p1_p0, %s1_s1), 7",
        "%p2_p1 = scmp.eq.s32.totalorder %s2_s2, 7",
        "%9 = sbr.rel (%p2_p1) target bundleno = 20 (0x14)",
        *[""] * 16,
    )
    assert run(*lines).cycles == (5 + 4 + 1 if taken else 21)


def test_values_are_told_from_registers_of_the_same_name():
    lines = list(COUNTED_LOOP)
    lines[0] += "  ;;  %s4_s9 = smov 1000"  # the value s4; the register s4 holds what the loop carries
    assert run(*lines).cycles == run(*COUNTED_LOOP).cycles


def test_spilled_scalars_and_addresses_are_found_again():
    lines = (
        "%s1_s1 = smov 3",
        "%5 = sst [smem:[#allocation7_spill]] %s1_s1",
        "%s2_s2 = smov [#allocation8]  ;;  %s3_s3 = scalar_lea.smem [#allocation8], 2",
        "%6 = sst [smem:[%s2_s2 + $0x2]] %s1_s1",
        "%s4_s4 = sld [smem:[%s3_s3]]  ;;  %s5_s5 = sld [smem:[#allocation7_spill]]",
        "%s6_s6 = ssub.s32 %s4_s4, %s5_s5",
        "%p1_p0 = scmp.ne.s32.totalorder %s6_s6, 0",
        "%9 = sbr.rel (%p1_p0) target bundleno = 0 (0x0)",
        *[""] * 4,
    )
    assert run(*lines).cycles == 12


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("sadd.s32 2147483647, 1", -(2**31)),
        ("ssub.s32 3, 5", -2),
        ("sshrl.u32 4294967295, 28", 15),
        ("sshra.s32 4294967280, 4", -1),
        ("smulhi.u32 4294967295, 16", 15),
        ("sand.u32 12, 10", 8),
        ("smin.u32 4294967295, 5", 5),
        ("smin.u32 4294967291, 4294967293", -5),
        ("sshrl.u32 4294967295, 0", -1),
        ("sclz 5", 29),
        ("sshllo.u32 0, 5", 31),
        ("scalar_select predicate=%p9_p9, on_true=1, on_false=2", 2),
    ],
)
def test_integers_have_32_bits(instruction, expected):
    lines = (
        "%p9_p9 = scmp.lt.u32.totalorder 4294967295, 1",
        f"%s1_s1 = {instruction}",
        f"%p1_p0 = scmp.ne.s32.totalorder %s1_s1, {expected}",
        "%9 = sbr.rel (%p1_p0) target bundleno = 0 (0x0)",
        *[""] * 4,
    )
    assert run(*lines).cycles == 8


def test_remainders_are_taken_after_quotients():
    lines = (
        "%7 = sdivrem.u32 23, 6",
        "%s1_s1 = spop.drf %7",
        "%s2_s2 = spop.drf %7",
        "%s3_s3 = smul.u32 10, %s1_s1",
        "%s4_s4 = sadd.s32 %s2_s2, %s3_s3",
        "%p1_p0 = scmp.ne.s32.totalorder %s4_s4, 35",
        "%9 = sbr.rel (%p1_p0) target bundleno = 0 (0x0)",
        *[""] * 4,
    )
    assert run(*lines).cycles == 11


@pytest.mark.parametrize("place", ["", 'loc("/a/b.py":73:95 to :118) :: '], ids=["", "with its place"])
@pytest.mark.parametrize(
    ("operands", "wanted", "result"),
    [("23, 6", "kDiv", 3), ("23, 6", "kRem", 5), ("4294967291, 4294967293", "kRem", -5)],
)
def test_a_division_may_give_its_quotient_or_its_remainder_alone(operands, wanted, result, place):
    lines = (
        f"%7 = sdivrem.u32 {operands} /* {place}{wanted} */",
        "%s1_s1 = spop.drf %7",
        f"%p1_p0 = scmp.ne.s32.totalorder %s1_s1, {result}",
        "%9 = sbr.rel (%p1_p0) target bundleno = 0 (0x0)",
        *[""] * 4,
    )
    assert run(*lines).cycles == 8


def test_transfers_queue_in_hbm_and_arrive_after_its_latency():
    found = run(dma(1000), dma(500), *wait(1500), "")
    assert found.dma_bytes == 32 * 1500
    assert found.dma_count == 2
    assert found.cycles == 1500 + HBM_LATENCY_CYCLES + 3  # the wait and the two bundles behind it
    assert found.stall_cycles == 1500 + HBM_LATENCY_CYCLES - 2


def test_waiting_for_one_transfer_does_not_wait_for_the_next():
    found = run(dma(100), dma(5000, flag="[#allocation5]"), *wait(100), "")
    assert found.cycles == 100 + HBM_LATENCY_CYCLES + 3


def test_transfers_on_the_chip_leave_hbm_alone():
    assert run(dma(100, kind="vmem_to_vmem"), *wait(100)).dma_bytes == 0
    assert run(dma(100, kind="hbm_to_hbm"), *wait(100)).dma_bytes == 2 * 3200


@pytest.mark.parametrize(("ends", "times"), [("hbm hbm", 2), ("hbm vmem", 1), ("vmem vmem", 0)])
def test_a_transfer_between_any_two_places_is_known_by_its_ends(ends, times):
    source, destination = ends.split()
    lines = (
        f"%s1_s1 = int_to_ptr.{source} [resolvable:$true] %s3_s3  ;;  "
        f"%s2_s2 = int_to_ptr.{destination} [resolvable:$true] %s4_s4",
        "%9 = dma.general /*src=*/%s1_s1, /*size_in_granules=*/100, /*dst=*/%s2_s2, /*dst_syncflagno=*/[#allocation4], "
        "/*src_syncflagno=*/[#allocation5], /*stridedescaddr=*/[#allocation6]",
        *wait(100),
    )
    assert run(*lines).dma_bytes == times * 3200


def test_a_delay_takes_its_time():
    assert run("%1 = vdelay 5000", "").cycles == 5002


def test_a_kernel_that_waits_for_small_transfers_is_bound_by_their_latency():
    assert run(dma(10), *wait(10), *[""] * 50).bound(V5E) == "DMA latency"
    assert run(dma(10_000), *wait(10_000)).bound(V5E) == "HBM"


def test_work_is_counted_by_unit():
    lines = (
        "%1 = vmatmul.bf16.gmra.mxu0 %v1_v1  ;;  %2 = vmatmul.f32.gmra.mxu1 %v2_v2",
        "%v3_v3 = vadd.xlane.f32.xlu0 %v1_v1  ;;  %v4_v4 = vrot.slane %v1_v1, 4  ;;  %v5_v5 = vpop.xlane.xlu0 %v3_v3",
        "%3 = vst [vmem:[#allocation5_spill]] %v4_v4  ;;  %v6_v6 = vld [vmem:[#allocation5_spill]]",
        "%v7_v7 = vpow2.f32 %v6_v6  ;;  %s1_s1 = smov 1",
    )
    found = run(*lines)
    assert found.work == {
        "MXU": 16 + 8,
        "vector": 2,
        "transcendental": 0,
        "cross-lane": 9,
        "load": 1,
        "store": 1,
        "scalar": 1,
    }
    assert found.spills == 2
    assert units.unit("vperm.slane") == "vector"


def test_regions_name_the_line_of_most_of_their_instructions():
    library = os.path.dirname(jax.__file__)
    instruction = '%v1_v1 = vadd.f32 %v2_v2, %v3_v3 /* loc("{}":{}:11 to :103) */'
    lines = [instruction.format(f"{library}/numpy.py", 1), instruction.format("/home/me/model.py", 7)]
    (region,) = run("  ;;  ".join([lines[0], lines[0], lines[1]]), "").regions
    assert region.source == "model.py:7"
    (region,) = run(lines[0], "").regions
    assert region.source == ""


FROM_IDS = (
    "%s1_s1 = inlined_call_operand.smem [shape: s32[8], index: 0, kind: input]",
    "%s2_s2 = sld [smem:[%s1_s1]]",
    "%p1_p0 = scmp.lt.s32.totalorder %s2_s2, 5",
)


def test_a_branch_on_data_is_refused_by_name_or_decided_by_the_caller():
    lines = *FROM_IDS, "%9 = sbr.rel (%p1_p0) target bundleno = 12 (0xc)", *[""] * 9
    with pytest.raises(DependsOnDataError, match=r"a branch depends on data: .* \{'kernel@0x3': 1\}"):
        run(*lines)
    assert run(*lines, trip_counts={"kernel@0x3": 1}).cycles == 13
    assert run(*lines, trip_counts={"kernel@0x3": 0}).cycles == 4 + 4 + 1
    assert run(*lines, trip_counts={"kernel": 1}).cycles == 13


@pytest.mark.parametrize("trips", [1, 4])
def test_a_loop_over_data_is_refused_by_name_or_turns_as_often_as_the_caller_says(trips):
    lines = *FROM_IDS, "", "%9 = sbr.rel (%p1_p0) target bundleno = 3 (0x3)", *[""] * 4
    with pytest.raises(DependsOnDataError, match=r"the trip count of a loop depends on data: .*'kernel@0x3'"):
        run(*lines)
    assert run(*lines, trip_counts={"kernel@0x3": trips}).cycles == 3 + 2 * trips + 4 * trips


def test_a_loop_over_data_turns_as_often_as_said_in_the_mean():
    decisions = Decisions("kernel", {8: 3}, Given({"kernel": 1.5}))

    def turns():
        return 1 + sum(1 for _ in iter(lambda: decisions.holds(8, 3), False))

    assert [turns() for _ in range(6)] == [1, 2] * 3


def test_data_that_decides_nothing_is_no_reason_to_refuse():
    lines = *FROM_IDS, "%s3_s3 = sshll.u32 %s2_s2, 4", "%p2_p1 = pand %p1_p0, %p1_p0", "%s4_s4 = smov (%p2_p1), 3"
    assert run(*lines).cycles == 6


def test_a_transfer_may_happen_a_part_of_the_times():
    lines = *FROM_IDS, dma(100, predicate="(%p1_p0), "), "%s3_s3 = smov 1"
    with pytest.raises(DependsOnDataError, match="a transfer depends on data"):
        run(*lines)
    assert [run(*lines, trip_counts={"kernel@0x3": part}).dma_count for part in (0, 0.5, 1)] == [0, 0, 1]


def test_an_operand_of_one_word_is_its_value():
    lines = (
        "%s1_s1 = inlined_call_operand.<no memory space> [shape: s32[1], index: 0, kind: input]",
        "%s2_s2 = smov [#allocation7]  ;;  %12 = sst [smem:[#allocation7]] %s1_s1",
        "%s3_s3 = sld [smem:[%s2_s2]]",
        *FROM_IDS[2:],
        "%9 = sbr.rel (%p1_p0) target bundleno = 12 (0xc)",
        *[""] * 9,
    )
    lines = tuple(line.replace("%s2_s2, 5", "%s3_s3, 5") for line in lines)
    with pytest.raises(DependsOnDataError, match="a branch depends on data"):
        run(*lines)
    assert [run(*lines, scalars={"kernel": {0: [word]}}).cycles for word in (4, 5)] == [5 + 4 + 2, 14]


@pytest.mark.parametrize("kind", ["vmem", "smem"])
def test_the_caller_says_what_operands_hold(kind):
    brought = (
        f"%s1_s9 = inlined_call_operand.{kind} [shape: s32[8], index: 0, kind: input, shape index: {{}}]",
        "%s2_s2 = smov [#allocation7]  ;;  %s3_s3 = sshll.u32 %s1_s9, 4  ;;  %s8_s8 = smov [#allocation5]",
        "%16 = dma.vmem_to_smem /*vmem=*/%s3_s3, /*size_in_granules=*/1, /*smem=*/%s2_s2, /*dst_syncflagno=*/%s8_s8",
        *wait(1, "%s8_s8"),
    )
    words = "[#allocation7 + $0x2]" if kind == "vmem" else "[%s1_s9 + $0x2]"
    lines = (
        *(brought if kind == "vmem" else brought[:1]),
        f"%s4_s4 = sld [smem:{words}]  ;;  %s5_s6 = smov 0",
        "%s6_s6 = sphi %s5_s6, %s7_s6  ;;  %s7_s6 = sadd.s32 1, %s6_s6",
        "%p1_p0 = scmp.lt.s32.totalorder %s7_s6, %s4_s4",
        f"%9 = sbr.rel (%p1_p0) target bundleno = {len(brought) + 1 if kind == 'vmem' else 2} (0x0)",
        *[""] * 4,
        "",
    )
    with pytest.raises(DependsOnDataError, match="trip_counts must say how often"):
        run(*lines)
    cycles = [run(*lines, scalars={"kernel": {0: [0, 0, turns]}}).cycles for turns in (3, 5)]
    assert cycles[1] - cycles[0] == 2 * (3 + 4)  # two more turns of three bundles and four delay slots


def test_the_first_core_stands_for_all():
    lines = "%s1_s1 = sld [smem:[#allocation0]] /* megacore core id :: core id */", *COUNTED_LOOP[1:]
    assert run(*(line.replace("s1_s1", "s1_s4") for line in lines)).cycles == run(*COUNTED_LOOP).cycles


def test_the_size_of_a_transfer_must_not_depend_on_data():
    with pytest.raises(DependsOnDataError, match="the size of a transfer at kernel@0x3"):
        run(*FROM_IDS, dma("%s2_s2"))


def test_unknown_opcodes_are_reported_and_never_guessed():
    found = run("%s1_s1 = sfrobnicate.u32 3, 4", "%s2_s2 = sadd.s32 1, %s1_s1", *wait(7))
    assert found.unknown == ("sfrobnicate.u32", "a wait at kernel@0x2 for what nothing that is replayed starts")
    lines = "%s1_s1 = sfrobnicate.u32 3, 4", "%p1_p0 = scmp.eq.s32.totalorder %s1_s1, 1"
    with pytest.raises(DependsOnDataError):
        run(*lines, "%9 = sbr.rel (%p1_p0) target bundleno = 0 (0x0)", *[""] * 4)


def test_a_program_that_never_ends_is_refused(monkeypatch):
    monkeypatch.setattr("lowering.tpu_core.sequencer._MOST_BLOCKS", 1000)
    with pytest.raises(DependsOnDataError, match="kernel does not end"):
        run("%9 = sbr.rel target bundleno = 0 (0x0)", *[""] * 4)
