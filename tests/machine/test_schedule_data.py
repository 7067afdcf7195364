"""Replays of what data decides: what the caller says of it, and what follows from that; without libtpu."""

import jax.numpy as jnp
import numpy as np
import pytest
from bundle_text import dma, program, wait

from jaxops_command.options import CommandError
from jaxops_command.schedule_data import scalars_of
from lowering.schedule.chips import CHIPS
from lowering.schedule.data_hints import Decisions, DependsOnDataError, Given, names_of
from lowering.schedule.kernel import replay
from lowering.tpu_core.bundles import read_bundles
from lowering.tpu_core.layouts import in_memory
from lowering.tpu_core.scalar_memory import ScalarMemory
from lowering.tpu_core.scalar_unit import float_bits, function_of
from lowering.tpu_core.unknown import Unknown


def run(*lines, operands=None, **given):
    bundles = read_bundles(program(*lines))
    return replay("kernel", bundles, CHIPS["tpu-v5e"], 32.0, operands=operands, given=Given(**given))


SECOND = "%s1_s1 = inlined_call_operand.{} [shape: s32[8], index: 0, kind: input]", "%s2_s2 = sld [smem:[%s1_s1]]"


@pytest.mark.parametrize(("part", "moved"), [(0, 200), (1, 100)])
def test_what_is_decided_of_one_branch_holds_for_the_other(part, moved):
    # As XLA writes cond: what is run where the first condition fails has the opposite one, spilled in between.
    lines = (
        SECOND[0].format("smem"),
        SECOND[1],
        "%p1_p0 = scmp.lt.s32.totalorder %s2_s2, 1  ;;  %p2_p1 = scmp.ge.s32.totalorder %s2_s2, 1",
        "%s3_s3 = scalar_select /*predicate=*/%p1_p0, /*on_true=*/1, /*on_false=*/0",
        "%5 = sst [smem:[#allocation9_spill]] %s3_s3",
        "%6 = sbr.rel (%p2_p1) target bundleno = 11 (0xb)",
        *[""] * 4,
        dma(100),
        "%s4_s4 = sld [smem:[#allocation9_spill]]",
        "%p3_p2 = scmp.ne.s32.totalorder %s4_s4, 0",
        "%7 = sbr.rel (%p3_p2) target bundleno = 19 (0x13)",
        *[""] * 4,
        dma(200),
        "",
    )
    assert run(*lines, trip_counts={"kernel": part}).dma_bytes == 32 * moved


def test_what_follows_a_loop_over_data_in_its_delay_slots_happens_once():
    lines = (
        SECOND[0].format("smem"),
        SECOND[1] + "  ;;  %s3_s3 = smov 0",
        "%s4_s3 = sphi %s3_s3, %s5_s3  ;;  %s5_s3 = sadd.s32 1, %s4_s3",
        "%p1_p0 = scmp.ge.s32.totalorder %s5_s3, %s2_s2",
        "%9 = sbr.rel (!%p1_p0) target bundleno = 2 (0x2)",
        dma(100, predicate="(%p1_p0), "),
        *[""] * 3,
        *wait(100),
    )
    found = run(*lines, trip_counts={"kernel": 7})
    assert found.dma_count == 1
    assert max(region.trips for region in found.regions) == 7


def test_a_word_that_the_program_passes_is_known():
    lines = (
        SECOND[0].format("<no memory space>"),
        "%p1_p0 = scmp.lt.s32.totalorder %s1_s1, 5",
        "%9 = sbr.rel (%p1_p0) target bundleno = 12 (0xc)",
        *[""] * 10,
    )
    assert [run(*lines, operands={"s1": word}).cycles for word in (4, 5)] == [3 + 4 + 1, 13]
    with pytest.raises(DependsOnDataError, match=r"or scalars what is in operand 0 \(s32\[8\]\) of kernel"):
        run(*lines, operands={"s1": Unknown()})


def test_an_operand_that_is_given_in_part_is_named_where_data_decides():
    given = Given.of(None, {"kernel": {0: [0, 1]}}).of_call("kernel.1", "kernel", {0: "s32[4]{0:T(128)}"})
    with pytest.raises(DependsOnDataError, match=r"; scalars give 2 of the 4 elements of operand 0$"):
        Decisions("kernel", {}, given).holds(5, None)
    whole = Given.of(None, {"kernel": {0: [0, 1, 2, 3]}}).of_call("kernel.1", "kernel", {0: "s32[4]{0:T(128)}"})
    assert whole.gaps == ()


def test_a_transfer_overwrites_more_words_than_are_known():
    memory = ScalarMemory(unwritten=0)
    memory.hold(1000, [7], is_scalar=False)
    for at in range(3):
        memory.store(10 + at, 5)
    memory.fill(10, 8, 1000)
    assert (memory.load(10), memory.load(12), memory.load(9)) == (7, 5, 0)
    assert isinstance(memory.load(11), Unknown)


def test_an_opcode_that_may_have_decided_is_named():
    lines = "%s1_s1 = sfrobnicate.u32 3, 4", "%p1_p0 = scmp.eq.s32.totalorder %s1_s1, 1"
    with pytest.raises(
        DependsOnDataError, match=r"depends on data, or on sfrobnicate.u32, not understood: trip_counts"
    ):
        run(*lines, "%9 = sbr.rel (%p1_p0) target bundleno = 0 (0x0)", *[""] * 4)


@pytest.mark.parametrize(
    ("opcode", "operands", "result"),
    [
        ("sadd.f32", (1.5, 0.1), np.float32(1.5) + np.float32(0.1)),
        ("smul.f32", (0.1, -3.0), np.float32(0.1) * np.float32(-3)),
        ("smin.f32", (-1.0, 2.0), -1),
        ("sfloor.f32", (-1.5,), -2),
        ("sceil.f32", (-1.5,), -1),
    ],
)
def test_scalar_floats_have_32_bits(opcode, operands, result):
    assert function_of(opcode)(*map(float_bits, operands)) == float_bits(result)


def test_scalar_floats_are_compared_and_converted():
    less = function_of("scmp.lt.f32.partialorder")
    assert less(float_bits(-2.0), float_bits(-1.0))
    assert isinstance(less(float_bits(np.nan), float_bits(1.0)), Unknown)
    assert function_of("scvt.s32.f32")(-7) == float_bits(-7.0)
    assert function_of("scvt.f32.s32")(float_bits(-7.0)) == -7
    assert isinstance(function_of("scvt.f32.s32")(float_bits(0.5)), Unknown)


def test_a_loop_that_a_float_ends_turns_as_often_as_it_says():
    lines = (
        "%s1_s4 = smov 1.0",
        "%s2_s4 = sphi %s1_s4, %s3_s4  ;;  %s3_s4 = smul.f32 1.5, %s2_s4",
        "%p1_p0 = scmp.lt.f32.partialorder %s3_s4, 100.0",
        "%9 = sbr.rel (%p1_p0) target bundleno = 1 (0x1), region = 2",
        *[""] * 4,
    )
    assert max(region.trips for region in run(*lines).regions) == 12  # 1.5 ** 12 > 100


def test_operands_lie_in_memory_by_their_layouts():
    values = np.arange(390).reshape(3, 130)
    words = in_memory(values, "s32[3,130]{1,0:T(4,128)S(1)}")
    assert len(words) == 4 * 256
    assert (words[128 + 2], words[512 + 128 + 1], words[512 + 2], words[3 * 128]) == (132, 259, None, None)
    assert in_memory(values, "s32[3,130]{0,1}")[:4] == [0, 130, 260, 1]
    assert in_memory(np.arange(5), "s32[8]{0:T(128)}") == [0, 1, 2, 3, 4]
    assert in_memory(np.asarray(7), "s32[3]{0:T(128)}") == [7, 7, 7]


def test_words_hold_several_operands_of_few_bits():
    mask = np.asarray([[1, 0, -1], [2, 3, 4]])
    words = in_memory(mask, "s8[2,3]{1,0:T(4,128)(4,1)}")
    assert (len(words), words[:4]) == (128, [0x0201, 0x0300, 0x04FF, None])
    ids = in_memory(np.arange(-1, 299), "s16[300]{0:T(256)(128)(2,1)S(1)}")
    assert (len(ids), ids[0], ids[1], ids[128 + 43], ids[128 + 44]) == (256, 127 << 16 | 0xFFFF, 128 << 16, 298, None)


def test_what_is_said_of_operands_has_their_shapes():
    given = Given.of(None, {"kernel": {0: jnp.arange(6), 1: np.float32([0.5])}})
    assert given.of_call("kernel.1", "kernel.1", {0: "s32[3,2]{1,0:T(4,128)}", 1: "f32[1]"}).scalars["kernel.1"][1] == [
        float_bits(0.5)
    ]
    with pytest.raises(DependsOnDataError, match=r"operand 0 of kernel.1 all that it holds, s32\[4,32\]; got 6 of 128"):
        given.of_call("kernel.1", "kernel.1", {0: "s32[4,32]{1,0:T(4,128)}", 1: "f32[1]"})
    with pytest.raises(DependsOnDataError, match=r"must name one of the 1 operands of kernel.1 by its position; got 1"):
        given.of_call("kernel.1", "kernel.1", {0: "s32[6]"})
    assert Given.of({"softmax@0x3": 1, "program": 2}, {"kernel": {}}).unused(["kernel.1"]) == ["softmax"]
    assert names_of("flash.d128.2.x_ref") == ("flash.d128.2.x_ref", "flash.d128.2", "flash.d128")


def test_what_is_said_of_one_of_two_equal_kernels_is_not_said_of_the_other():
    given = Given.of({"kernel": 3, "kernel.2": 5, "kernel.2@0x4": 7, "other": 1}, {"kernel.2": {0: [1]}})
    first, second = (given.of_call(name, "kernel.1", {0: "s32[1]"}) for name in ("kernel.1", "kernel.2"))
    assert (first.trip_counts, first.scalars) == ({"kernel.1": 3}, {"kernel.1": {}})
    assert (second.trip_counts, second.scalars) == ({"kernel.1": 5, "kernel.1@0x4": 7}, {"kernel.1": {0: [1]}})
    assert first.key() != second.key() == given.of_call("kernel.2", "kernel.1", {0: "s32[1]"}).key()


def test_commands_take_what_operands_hold(tmp_path):
    np.save(tmp_path / "pages.npy", np.arange(6).reshape(2, 3))
    found = scalars_of(["paged:0=3,-1", f"paged:1={tmp_path}/pages.npy"])
    assert (found["paged"][0].tolist(), found["paged"][1].tolist()) == ([3, -1], [[0, 1, 2], [3, 4, 5]])
    with pytest.raises(CommandError, match=r"--scalars must name integers or a file of NumPy's; got 'none\.npy'"):
        scalars_of(["paged:0=none.npy"])


def test_a_value_that_a_branch_was_to_skip_is_known_once_the_branch_is_decided():
    lines = (
        SECOND[0].format("smem"),
        SECOND[1] + "  ;;  %s9_s3 = smov 7",
        "%p1_p0 = scmp.le.s32.totalorder %s2_s2, 0",
        "%s3_s3 = smov (!%p1_p0), 0",
        "%6 = sbr.rel (%p1_p0) target bundleno = 15 (0xf)",
        *[""] * 4,
        "%s4_s3 = sphi %s3_s3, %s5_s3  ;;  %s5_s3 = sadd.s32 1, %s4_s3",
        "%p2_p1 = scmp.lt.s32.totalorder %s5_s3, 10",
        "%9 = sbr.rel (%p2_p1) target bundleno = 9 (0x9)",
        *[""] * 5,
    )
    assert max(region.trips for region in run(*lines, trip_counts={"kernel@0x4": 1}).regions) == 10
    assert run(*lines, trip_counts={"kernel@0x4": 0}).cycles == 5 + 4 + 2


@pytest.mark.parametrize(("otherwise", "turns"), [("", 3), (", 8", 2)])
def test_what_a_predicate_left_out_is_known_once_a_branch_decides_it(otherwise, turns):
    # Both ways of the branch lead to the loop, which counts to 10 from 0 or from what its register holds otherwise.
    lines = (
        SECOND[0].format("smem"),
        SECOND[1] + "  ;;  %s9_s3 = smov 7",
        "%p1_p0 = scmp.le.s32.totalorder %s2_s2, 0",
        f"%s3_s3 = smov (!%p1_p0{otherwise}), 0",
        "%6 = sbr.rel (%p1_p0) target bundleno = 9 (0x9)",
        *[""] * 4,
        "%s4_s3 = sphi %s3_s3, %s5_s3  ;;  %s5_s3 = sadd.s32 1, %s4_s3",
        "%p2_p1 = scmp.lt.s32.totalorder %s5_s3, 10",
        "%9 = sbr.rel (%p2_p1) target bundleno = 9 (0x9)",
        *[""] * 5,
    )
    found = {part: run(*lines, trip_counts={"kernel@0x4": part}).regions for part in (0, 1)}
    assert {part: max(region.trips for region in regions) for part, regions in found.items()} == {0: turns, 1: 10}
