"""Replays of whole programs, written by hand as libtpu writes them, and what is refused before compilers are asked."""

import json
import re

import jax
import jax.numpy as jnp
import pytest
from bundle_text import HLO, TOP_LEVEL, dma, program, wait, written

import jaxops
import lowering
from lowering.operators import operator_in
from lowering.schedule.chips import CHIPS, bytes_per_cycle
from lowering.schedule.compare import Compared, Comparison
from lowering.schedule.data_hints import DependsOnDataError, Given
from lowering.schedule.kernel import HBM_LATENCY_CYCLES
from lowering.schedule.report import schedule_of
from lowering.targets import named

V5E = CHIPS["tpu-v5e"]


@pytest.fixture
def folder(tmp_path):
    return written(tmp_path)


def test_a_program_is_replayed_with_what_it_calls(folder):
    schedule = schedule_of(folder, named("tpu-v5e"), border_bytes=2 * 4 * 8 * 128)
    first, second, rest = schedule.kernels
    assert (first.name, first.kind, first.calls, first.source) == ("fusion", "fusion", 3, "model.py:12 (loss)")
    assert (second.name, second.calls) == ("fusion.1", 1)  # whose code is that of its equal
    assert (first.operator, second.operator) == ("", "softmax(f32[8,128])")
    assert second.source == first.source
    assert (rest.name, rest.kind) == ("program", "program")
    assert first.cycles == pytest.approx(32000 / bytes_per_cycle(V5E, named("tpu-v5e")) + HBM_LATENCY_CYCLES + 2, abs=1)
    assert first.time_us == pytest.approx(3 * first.cycles / 1500)
    assert sum(kernel.time_us for kernel in schedule.kernels) == pytest.approx(schedule.total_us)
    assert sum(kernel.share for kernel in schedule.kernels) == pytest.approx(1)
    assert schedule.unknown == ()
    assert json.loads(schedule.to_json())["kernels"][0]["dma_bytes"] == 32000


def test_the_table_names_what_is_unknown_and_how_accurate_replays_are(folder):
    (folder / "18-fusion-01-packed-bundles-post-ra.txt").write_text(program("%s1_s1 = sfrobnicate.u32 3, 4"))
    text = str(schedule_of(folder, named("tpu-v7x"), border_bytes=0, given=Given({"fusion": 2})))
    assert "Not understood, and left out: sfrobnicate.u32." in text
    assert f"tpu-v7x: {CHIPS['tpu-v7x'].accuracy}." in text
    assert "the caller said: fusion 2." in text
    assert "model.py:12 (loss)" in text


# Two kernels of equal code, which turns a loop as often as their first operand says: a constant of the program.
KERNELS = """
%called_computation (param_0.9: s32[8]) -> s32[8] {
  ROOT %copy.9 = s32[8]{0:T(128)} copy(%param_0.9)
}, execution_thread="sparsecore"

ENTRY %main.2 (args_0_.1: s32[8]) -> f32[8,128] {
  %constant.3 = s32[8]{0:T(128)} constant({3, 0, 0, 0, 0, 0, 0, 0})
  %constant.5 = s32[]{:T(128)} constant(5)
  %copy.5 = s32[]{:T(128)} copy(%constant.5)
  %broadcast.5 = s32[8]{0:T(128)} broadcast(%copy.5), dimensions={}
  %args_0_.1 = s32[8]{0:T(128)} parameter(0)
  %start.9 = s32[8]{0:T(128)} async-start(%args_0_.1), calls=%called_computation
  %kernel.1 = f32[8,128]{1,0:T(8,128)} custom-call(%constant.3), custom_call_target="tpu_custom_call", \
frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block\\": 512}"
}}, metadata={op_name="jit(loss)/kernel"}
  %kernel.2 = f32[8,128]{1,0:T(8,128)} custom-call(%broadcast.5), custom_call_target="tpu_custom_call"
  ROOT %kernel.3 = f32[8,128]{1,0:T(8,128)} custom-call(%args_0_.1), custom_call_target="tpu_custom_call"
}
"""
KERNEL = program(
    "%s1_s1 = inlined_call_operand.smem [shape: s32[8], index: 0, kind: input]  ;;  %s2_s2 = smov 0",
    "%s4_s4 = sld [smem:[%s1_s1]]",
    "%s3_s2 = sphi %s2_s2, %s5_s2  ;;  %s5_s2 = sadd.s32 1, %s3_s2",
    "%p1_p0 = scmp.lt.s32.totalorder %s5_s2, %s4_s4",
    "%9 = sbr.rel (%p1_p0) target bundleno = 2 (0x2)",
    *[""] * 5,
)


def test_kernels_of_equal_code_are_replayed_with_what_each_of_them_holds(folder):
    (folder / "17-TLP-hlo.txt").write_text(KERNELS)
    calls = (f"%{n} = inlined_call %s{n}_s0 /* %kernel.{n} = custom-call(%args_0_.1) */" for n in (1, 2, 3))
    (folder / "17-TLP-01-packed-bundles-post-ra.txt").write_text(program(*calls))
    (folder / "18-kernel.1-01-packed-bundles-post-ra.txt").write_text(KERNEL)
    with pytest.raises(DependsOnDataError, match=r"scalars what is in operand 0 \(s32\[8\]\) of kernel"):
        schedule_of(folder, named("tpu-v5e"), border_bytes=0)
    given = Given.of(None, {"kernel.3": {0: [9]}})
    found = {
        kernel.name: kernel for kernel in schedule_of(folder, named("tpu-v5e"), border_bytes=0, given=given).kernels
    }
    turns = {name: max(region.trips for region in kernel.regions) for name, kernel in found.items() if kernel.regions}
    assert turns == {"kernel.1": 3, "kernel.2": 5, "kernel.3": 9}


def test_a_schedule_that_was_not_written_is_reported(folder):
    (folder / "18-fusion-01-packed-bundles-post-ra.txt").unlink()
    schedule = schedule_of(folder, named("tpu-v5e"), border_bytes=0)
    assert schedule.unknown == (
        "the schedule of fusion, which was not written",
        "the schedule of fusion.1, which was not written",
    )


def test_what_other_cores_do_is_one_entry(folder):
    lines = (
        "%1 = vsyncset.remote %s1_s1, 0  ;;  %2 = vsyncset %s2_s2, 0",
        *wait(7),
        *wait(8, "[#allocation5]"),
        "vtrace 1",
    )
    (folder / "17-TLP-01-packed-bundles-post-ra.txt").write_text(program(*lines))
    unknown = schedule_of(folder, named("tpu-v7x"), border_bytes=0).unknown
    assert unknown == ("what other cores do, as SparseCores, and 2 waits for them",)


# A gather between both fusions: it makes 4 MiB, of two operands with 4 KiB each.
GATHER = """  %start.1 = ((f32[8,128]{1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)}), f32[1024,1024]{1,0:T(8,128)}) \
call-start(%args_0_.1, %fusion), async_execution_thread="sparsecore", to_apply=%fused_computation
  %done.1 = f32[1024,1024]{1,0:T(8,128)} call-done(%start.1)
  ROOT %fusion.1"""
LOOP = """  %while.1 = f32[8,128]{1,0:T(8,128)} while(%args_0_.1), condition=%fused_computation.1, body=%repeated.1
  %start.1"""
BODY = """%repeated.1 (param_0.2: f32[8,128]) -> f32[8,128] {
  %param_0.2 = f32[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %fusion = f32[8,128]{1,0:T(8,128)} fusion(%param_0.2), kind=kLoop, calls=%fused_computation
}

ENTRY"""


@pytest.mark.parametrize("is_repeated", [False, True])
def test_sparse_cores_need_at_least_the_time_for_what_they_move(folder, is_repeated):
    chip = named("tpu-v7x")
    hlo = HLO.replace("  ROOT %fusion.1", GATHER)
    if is_repeated:  # what runs before the gather is a loop, which itself has no code
        hlo = re.sub("  %fusion = .*\n", "", hlo).replace("  %start.1", LOOP).replace("ENTRY", BODY)
    (folder / "17-TLP-hlo.txt").write_text(hlo)
    schedule = schedule_of(folder, chip, border_bytes=0)
    fusions = [kernel for kernel in schedule.kernels if kernel.kind == "fusion"]
    (rest,) = (kernel for kernel in schedule.kernels if kernel.name == "program")
    moved = 2**22 + 2**13
    gather_us = moved / bytes_per_cycle(CHIPS["tpu-v7x"], chip) / CHIPS["tpu-v7x"].hz * 1e6
    assert len(fusions) == 2
    assert schedule.total_us == pytest.approx(sum(kernel.time_us for kernel in fusions) + gather_us, rel=1e-6)
    assert (rest.bound, rest.dma_bytes) == ("HBM", moved)


def test_a_schedule_is_plotted(folder, tmp_path):
    figure = schedule_of(folder, named("tpu-v5e"), border_bytes=0).plot(tmp_path / "schedule.png", most=1)
    assert (tmp_path / "schedule.png").stat().st_size > 0
    assert len(figure.axes[0].patches) == 4  # the first and the rest, each with what it needs at best


# XLA copies a donated parameter that the runtime did not give the memory of its result, which nobody can know here.
COPY_OF_PARAMETER = (
    "%s1_s1 = scalar_parameter_address 1",
    "%p1_p0 = scmp.eq.s32.totalorder %s5_s5, %s1_s1",
    "%9 = sbr.rel (%p1_p0) target bundleno = 40 (0x28)",
    *[""] * 4,
    dma(1000, kind="hbm_to_hbm"),
    *wait(1000),
)
RESULT_WORD = "%s4_s4 = sld [smem:[#allocation4]]  ;;  %s5_s5 = int_to_ptr.hbm [resolvable:$false] %s4_s4"
RESULT_TABLE = (
    "%s6_s6 = sld [smem:[#allocation4]]  ;;  %s7_s7 = int_to_ptr.hbm [resolvable:$false] %s6_s6",
    "%s8_s8 = sshll.u32 %s7_s7, 4  ;;  %s2_s2 = smov [#allocation6]",
    "%16 = dma.hbm_to_smem /*hbm=*/%s8_s8, /*size_in_granules=*/16, /*smem=*/%s2_s2, /*dst_syncflagno=*/[#allocation5]",
    *wait(16, "[#allocation5]"),
    "%s4_s4 = sld [smem:[#allocation6 + $0x2]]  ;;  %s5_s5 = int_to_ptr.hbm [resolvable:$false] %s4_s4",
)


@pytest.mark.parametrize(
    ("result", "load", "copies"),
    [("{}", (RESULT_WORD,), 0), ("{2}", RESULT_TABLE, 1)],  # the table itself is brought from HBM
    ids=["one result", "several"],
)
def test_donated_arguments_are_not_copied(folder, result, load, copies):
    lines = *load, *COPY_OF_PARAMETER
    (folder / "17-TLP-01-packed-bundles-post-ra.txt").write_text(program(*lines, *[""] * (45 - len(lines))))
    donated = f"is_scheduled=true, input_output_alias={{ {result}: (1, {{}}, may-alias) }}, entry_computation_layout="
    (folder / "17-TLP-hlo.txt").write_text(HLO.replace("is_scheduled=true", donated))
    (rest,) = schedule_of(folder, named("tpu-v5e"), border_bytes=0).kernels
    assert rest.dma_count == copies


def test_copies_that_run_meanwhile_share_hbm_with_a_kernel(folder):
    busy = program(dma(20_000), *wait(20_000))
    (folder / "18-fusion-01-packed-bundles-post-ra.txt").write_text(busy)
    alone = schedule_of(folder, named("tpu-v5e"), border_bytes=0)
    lines = TOP_LEVEL.replace("%s1_s4 = smov 0", f"%s1_s4 = smov 0  ;;  {dma(100_000)}", 1)
    (folder / "17-TLP-01-packed-bundles-post-ra.txt").write_text(lines)
    together = schedule_of(folder, named("tpu-v5e"), border_bytes=0)
    assert together.kernels[-1].dma_bytes == 3_200_000
    assert together.kernels[0].cycles == alone.kernels[0].cycles
    assert alone.kernels[0].time_us < together.kernels[0].time_us <= 2 * alone.kernels[0].time_us


def test_schedules_are_of_tpus_only():
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    for target in ("cpu", "cuda-h100"):
        with pytest.raises(lowering.CompileError, match=f"schedule must be asked for a TPU; got '{target}'"):
            lowering.compile(jaxops.softmax, x, target=target, schedule=True)
    with pytest.raises(lowering.CompileError, match="schedule must be asked for one chip, without others; got"):
        lowering.compile(jaxops.softmax, x, target="tpu-v5e:2x2", schedule=True)
    with pytest.raises(lowering.CompileError, match="trip_counts must come with schedule=True"):
        lowering.compile(jaxops.softmax, x, target="cpu", trip_counts={"softmax": 1})
    with pytest.raises(lowering.CompileError, match="auto_layouts must come with schedule=True"):
        lowering.compile(jaxops.softmax, x, target="cpu", auto_layouts=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"trip_counts": {"kernel": "often"}}, "trip_counts must give a name a number of at least 0; got {'kernel'"),
        ({"trip_counts": 3}, "trip_counts must be a mapping; got 3"),
        ({"scalars": {"kernel": 3}}, "scalars must map a kernel's name to its operands; got {'kernel': 3}"),
        (
            {"scalars": {"kernel": {0: [0.5]}}},
            "scalars must map an operand's position to integers or to float32; got {0: ",
        ),
        (
            {"scalars": {"kernel": {"ids": [1]}}},
            "scalars must map an operand's position to integers or to float32; got {'ids'",
        ),
    ],
    ids=str,
)
def test_what_is_said_of_data_is_checked(options, words):
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    with pytest.raises(lowering.CompileError, match=re.escape(f"lowering.compile: {words}")):
        lowering.compile(jaxops.softmax, x, target="tpu-v5e", schedule=True, **options)


def test_operators_are_compared_by_the_times_of_what_belongs_to_them(folder):
    with_operator = schedule_of(folder, named("tpu-v5e"), border_bytes=0)
    (folder / "17-TLP-hlo.txt").write_text(HLO.replace("softmax(", "unknown("))
    without = schedule_of(folder, named("tpu-v5e"), border_bytes=0)
    rows = Compared("reference", schedule=with_operator), Compared("pallas", schedule=without), Compared("auto")
    found = Comparison("tpu-v5e", rows)
    softmax, other = found.operators
    assert (softmax.operator, other.operator) == ("softmax(f32[8,128])", "other")
    assert softmax.time_us == {"reference": with_operator.kernels[1].time_us, "pallas": None}
    totals = [softmax.time_us["reference"] + other.time_us["reference"], other.time_us["pallas"]]
    assert totals == pytest.approx([with_operator.total_us, without.total_us])
    assert json.loads(found.to_json())["operators"][0]["operator"] == "softmax(f32[8,128])"
    assert re.search(r"softmax\(f32\[8,128\]\) +│ +[\d.]+ │ +- │ +- │", str(found))


def test_metadata_names_operators_and_their_operands():
    def both(x):
        return jaxops.softmax(x[:, None]), jaxops.softmax(x)

    text = jax.jit(both).lower(jnp.ones((8, 128))).compile().as_text()
    assert set(map(operator_in, re.findall('op_name="([^"]*)"', text))) >= {
        "softmax(f32[8,128])",
        "softmax(f32[8,1,128])",
    }


def test_implementations_to_compare_are_a_sequence():
    for implementations in (3, "pallas"):
        with pytest.raises(TypeError, match="compare: implementations must be a sequence of names; got"):
            lowering.compare(jaxops.softmax, jnp.ones(3), target="tpu-v5e", implementations=implementations)
