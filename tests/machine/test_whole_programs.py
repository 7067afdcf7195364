"""Whole programs as libtpu writes them: a top-level program that calls a part, and what XLA's fusions do besides."""

import numpy as np
import pytest
from bundle_text import program
from test_emulation import A, B, Bench, bits, compressed

from lowering.emulation.programs import Program, Run
from lowering.emulation.report import Finding
from lowering.emulation.transfers import Transfers
from lowering.tpu_core.cross_lane_unit import CrossLaneUnit
from lowering.tpu_core.dumps import Dumps
from lowering.tpu_core.faults import MachineFaultError, UnknownFormError
from lowering.tpu_core.matrix_unit import LATCHED, MatrixUnit

WAIT = "%9 = dma.done.wait [#allocation1], 128", f"%9 = vsyncadd [#allocation1], {2**32 - 128}"
HLO = """HloModule jit_call, is_scheduled=true, entry_computation_layout={(f32[8,128]{1,0:T(8,128)})->\
(f32[8,128]{1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)})}, frontend_attributes={}

ENTRY %main.2 (args_0_.1: f32[8,128]) -> (f32[8,128], f32[8,128]) {
  %args_0_.1 = f32[8,128]{1,0:T(8,128)} parameter(0)
  %constant.1 = f32[8,128]{1,0:T(8,128)} constant({ VALUES })
  %copy.1 = f32[8,128]{1,0:T(8,128)} copy(%constant.1)
  %fusion = f32[8,128]{1,0:T(8,128)} fusion(%args_0_.1), kind=kLoop
}
"""
WORD = "#{} [shape = 'u32[]', space=smem, size = 0x4, offset = 0, fixed_abs, tag = 'smem constant byte address - {}']\n"
# The runtime hands over a table of the results' places. A part doubles the parameter in place of the first result, and
# another copies what is a part of the program to the second.
TOP = program(
    "%s9_s9 = sld [smem:[#allocation0]]",
    "%9 = dma.hbm_to_smem /*hbm=*/%s9_s9, /*size_in_granules=*/1, /*smem=*/[#allocation6], "
    "/*dst_syncflagno=*/[#allocation5]",
    "%9 = dma.done.wait [#allocation5], 1",
    f"%9 = vsyncadd [#allocation5], {2**32 - 1}",
    "%s3_s0 = scalar_parameter_address 0  ;;  %s4_s1 = sld [smem:[#allocation6]]",
    "%1 = inlined_call %s3_s0, %s4_s1 /* %fusion = fusion(%args_0_.1) */",
    "%s5_s2 = sld [smem:[#allocation7]] /* hbm offset */",
    "%s6_s0 = scalar_lea.hbm [#allocation8], %s5_s2  ;;  %s7_s1 = sld [smem:[#allocation6 + $0x1]]",
    "%2 = inlined_call %s6_s0, %s7_s1 /* %copy.1 = copy(%constant.1) */",
    "%3 = inlined_call /* <late-finalization> */",
)
ALLOCATED = (
    WORD.format("allocation0", "output ptr")
    + "#allocation8 [shape = 'f32[8,128]{1,0:T(8,128)}', space=hbm, size = 0xffffffffffffffff, "
    + "tag = 'constant literal']"
)
OPERANDS = (
    "%s20_s0 = inlined_call_operand.hbm [shape: f32[8,128], index: 0, kind: input, shape index: {}]  ;;  "
    "%s21_s1 = inlined_call_operand.hbm [shape: f32[8,128], index: 1, kind: output, shape index: {}]"
)
TO_VMEM = (
    "%9 = dma.hbm_to_vmem /*hbm=*/%s20_s0, /*size_in_granules=*/128, /*vmem=*/%s23_s3, "
    "/*dst_syncflagno=*/[#allocation1]"
)
TO_HBM = (
    "%9 = dma.vmem_to_hbm /*vmem=*/%s23_s3, /*size_in_granules=*/128, /*hbm=*/%s21_s1, "
    "/*dst_syncflagno=*/[#allocation1]"
)
PLACE = "%s22_s2 = smov [#allocation2]", "%s23_s3 = sshll.u32 %s22_s2, 4"
IN_VMEM = "#allocation2 [shape = 'u8[4096]', space=vmem, size = 0x1000, scoped, tag = 'operand span']"
DOUBLED = program(
    OPERANDS,
    *PLACE,
    TO_VMEM,
    *WAIT,
    "%v1_v1 = vld [vmem:[#allocation2] sm:$0xff]",
    "%v2_v2 = vadd.f32 %v1_v1, %v1_v1",
    "%9 = vst [vmem:[#allocation2] sm:$0xff] /*vst_source=*/%v2_v2",
    TO_HBM,
    *WAIT,
)
COPIED = program(OPERANDS, *PLACE, TO_VMEM, *WAIT, TO_HBM, *WAIT)


@pytest.fixture
def folder(tmp_path):
    values = ", ".join(f"{{ {', '.join(str(x) for x in row)} }}" for row in B)
    (tmp_path / "1-TLP-hlo.txt").write_text(HLO.replace("VALUES", values))
    for name, code, allocated in (
        ("TLP", TOP, ALLOCATED),
        ("fusion", DOUBLED, IN_VMEM),
        ("copy.1", COPIED, IN_VMEM),
    ):
        (tmp_path / f"1-{name}-02-packed-bundles-post-ra.txt").write_text(code)
        (tmp_path / f"1-{name}-00-original.txt").write_text(allocated)
    return tmp_path


def replaced(folder, name, old, new):
    (path,) = folder.glob(f"1-{name}-*-*.txt" if old in ALLOCATED else f"1-{name}-02-*.txt")
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize("order", Transfers.ORDERS)
def test_a_program_calls_its_parts_in_one_memory(folder, order):
    run = Run(Program.of(Dumps(folder), "tpu-v6e"), [A], order=order, checks=True)
    doubled, copied = run.run([A, B])
    np.testing.assert_array_equal(doubled, A + A)
    np.testing.assert_array_equal(copied, B)
    assert run.findings() == run.unknown() == ()
    assert {name: (one.count, one.transfers) for name, one in run.calls.items()} == {
        "program": (1, 5),
        "fusion": (1, 2),
        "copy.1": (1, 2),
    }


def test_a_part_may_overwrite_what_the_program_keeps_in_registers(folder):
    replaced(folder, "TLP", "%s5_s2 = sld", "%s8_s4 = sld")
    kept = "%s3_s0 = scalar_parameter_address 0"
    replaced(folder, "TLP", kept, f"{kept}  ;;  %s5_s2 = smov 0")
    run = Run(Program.of(Dumps(folder), "tpu-v6e"), [A], checks=True)
    with pytest.raises(MachineFaultError, match="a transfer of 4,096 bytes that reaches beyond"):
        run.run([A, B])
    assert run.findings()[0] == Finding("program", "", "bundle 0x7: s2 holds s22 where s5 is read")


def test_what_a_kernel_leaves_under_way_names_it(folder):
    (hlo,) = folder.glob("*hlo.txt")
    kernel = 'custom-call(%args_0_.1), custom_call_target="tpu_custom_call"'
    hlo.write_text(hlo.read_text().replace("fusion(%args_0_.1), kind=kLoop", kernel))
    replaced(folder, "fusion", DOUBLED.splitlines()[-1], "")
    run = Run(Program.of(Dumps(folder), "tpu-v6e"), [A], order=Transfers.ORDERS[0])
    run.run([A, B])
    assert run.findings() == (Finding("fusion", "", "1 semaphore not 0 at the end"),)


def test_what_a_part_does_that_nobody_has_settled_names_it(folder):
    replaced(folder, "fusion", "vadd.f32", "vadd.f8")
    run = Run(Program.of(Dumps(folder), "tpu-v6e"), [A])
    with pytest.raises(UnknownFormError, match=r"bundle 0x5: fusion, bundle 0x7: opcode 'vadd.f8'"):
        run.run([A, B])


def test_calls_that_nobody_can_follow_are_refused(folder):
    replaced(folder, "TLP", "<late-finalization>", "<other>")
    with pytest.raises(UnknownFormError, match="a call of <other>"):
        Run(Program.of(Dumps(folder), "tpu-v6e"), [A]).run([A, B])
    replaced(folder, "TLP", "%fusion =", "%fusion.7 =")
    with pytest.raises(UnknownFormError, match=r"the code of fusion\.7"):
        Program.of(Dumps(folder), "tpu-v6e")


def test_an_operand_that_nobody_passes_is_a_fault(folder):
    replaced(folder, "fusion", "%s20_s0", "%s20_s30")
    with pytest.raises(MachineFaultError, match="register s30 holds no operand of what is called"):
        Run(Program.of(Dumps(folder), "tpu-v6e"), [A]).run([A, B])


# What kernels do not do and fusions do.


def test_sublanes_load_from_rows_up_to_15_further():
    bench, rows = Bench(), np.arange(16 * 128, dtype=np.uint32).reshape(16, 128)
    bench.set_rows("vmem", 0, rows)
    machine = bench.run("%v1_v1 = vld.sshfl [vmem:[%s0_s0] sm:$0xff pattern:$0xeeeee420]", s0=bench.places["vmem"][0])
    np.testing.assert_array_equal(machine.registers.held["v1"], rows[[0, 2, 4, 14, 14, 14, 14, 14]])
    # A zero in front is left out.
    machine = bench.run("%v1_v1 = vld.sshfl [vmem:[%s0_s0] sm:$0xff pattern:$0x7654321]", s0=bench.places["vmem"][0])
    np.testing.assert_array_equal(machine.registers.held["v1"], rows[[1, 2, 3, 4, 5, 6, 7, 0]])


def test_halves_are_taken_by_a_number_and_added_to_float32():
    halves = np.random.default_rng(1).integers(0x3000, 0x4200, (8, 128, 2)).astype(np.uint16)
    low, high = (halves[..., at].astype(np.uint32) << 16 for at in range(2))
    machine = Bench().run(
        "%v1_v1 = vunpack.vsel.i.bf16 %v0_v0, %s0_s0  ;;  %v2_v2 = vunpack.vsel.i.bf16 %v0_v0, %s1_s1",
        "%v3_v3 = vadd.low.f32.bf16 %v4_v4, %v0_v0",
        v0=high | low >> 16,
        v4=bits(A),
        s0=0,
        s1=1,
    )
    held = machine.registers.held
    np.testing.assert_array_equal(held["v1"], low)
    np.testing.assert_array_equal(held["v2"], high)
    np.testing.assert_array_equal(held["v3"].view(np.float32), A + low.view(np.float32))


def test_halves_and_bytes_are_packed_beside_others():
    lines = "%v2_v2 = vpack.i.b16 %v0_v0, %v1_v1", "%v3_v3 = vpack.i.b8 %v0_v0, %v1_v1"
    held = Bench().run(*lines, v0=bits(A), v1=bits(B)).registers.held
    np.testing.assert_array_equal(held["v2"], bits(A) << 16 | bits(B) & 0xFFFF)
    of_bytes = np.ascontiguousarray(held["v3"]).view(np.uint8).reshape(8, 128, 4)
    a, b = (np.ascontiguousarray(x).view(np.uint8).reshape(8, 128, 4) for x in (A, B))
    np.testing.assert_array_equal(of_bytes, np.stack([b[..., 0], a[..., 0], b[..., 2], a[..., 2]], -1))


@pytest.mark.parametrize("count", [1, 2])
def test_halves_are_transposed_also_two_matrices_at_once(count):
    matrices = np.random.default_rng(1).integers(0, 1 << 16, (count, 32, 128)).astype(np.uint16)
    unit = CrossLaneUnit()
    for kind, first in (("start", 0), ("end", 16)):
        unit.transposed(f"vxpose.c.b16.{kind}", [compressed(matrix[first : first + 16]) for matrix in matrices], 64, 16)
    for row in range(0, 64, 16):
        for matrix in matrices:
            words = unit.results["trf"].popleft().view(np.uint16)
            turned = words.reshape(8, 128, 2).transpose(0, 2, 1).reshape(16, 128)
            np.testing.assert_array_equal(turned[:, :32], matrix.T[row : row + 16])


@pytest.mark.parametrize("is_transposed", [False, True])
def test_the_second_half_of_weights_begins_at_row_128(is_transposed):
    unit, rng = MatrixUnit(starts_with_last=True), np.random.default_rng(1)
    x, first, second = (rng.integers(-9, 9, (rows, 128)).astype(np.float32) for rows in (16, 24, 40))
    for kind, weight in ((1, first), (2, second)):
        for at in range(len(weight) - 8, -1, -8):
            unit.push("msra", bits(weight[at : at + 8]), "f32", kind, is_transposed=is_transposed)
    unit.prepare("mubr", bits(x[8:]), "f32")
    if is_transposed:
        unit.prepare("mubr", bits(np.zeros_like(x[8:])), "f32")
    unit.multiply(bits(x[:8]), "f32", "msra", "gmra", None)
    left, right = (unit.results.popleft().view(np.float32) for _ in range(2))
    if is_transposed:
        np.testing.assert_array_equal(left[:, :24], x[:8] @ first.T)
        np.testing.assert_array_equal(right[:, :40], x[:8] @ second.T)
    else:
        np.testing.assert_array_equal(left, x[:8, :24] @ first + x[8:, :40] @ second)
        assert not right.any()
    unit.push("msra", bits(A), "f32", 2, is_transposed=is_transposed)
    with pytest.raises(UnknownFormError, match="weights of the kinds"):
        unit.multiply(bits(A), "f32", "msra", "gmra", None)


def test_latched_rows_are_multiplied():
    unit = MatrixUnit(starts_with_last=True)
    rows, weight = np.random.default_rng(1).integers(-9, 9, (2, 128, 128)).astype(np.float32)
    for at in range(120, -1, -8):
        unit.push(LATCHED, bits(rows.T[at : at + 8]), "f32", 0, is_transposed=False)
        unit.push("msra", bits(weight[at : at + 8]), "f32", 0, is_transposed=False)
    unit.latch(12)
    for loaded in ("msra", *[""] * 23):
        unit.multiply(None, "bf16", loaded, "gmra", None)
    found = np.concatenate([unit.results.popleft().view(np.float32) for _ in range(24)])
    np.testing.assert_array_equal(found, np.tile(rows[:96] @ weight, (2, 1)))
    with pytest.raises(MachineFaultError, match="nobody has latched"):
        MatrixUnit(starts_with_last=True).multiply(None, "bf16", "", "gmra", None)
