"""Compiled bundles are executed as hardware executes them: units, registers, memory and transfers, by NumPy's truth."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bundle_text import dma, program

import jaxops
import lowering
from lowering.emulation.kernels import array_of, words_of
from lowering.emulation.machine import Machine
from lowering.emulation.memory import Memory
from lowering.emulation.transfers import Transfers
from lowering.source_lines import users_file_line
from lowering.tpu_core import cross_lane_unit, vector_unit, vectors
from lowering.tpu_core.bundles import read_bundles
from lowering.tpu_core.faults import MachineFaultError, UnknownFormError
from lowering.tpu_core.layouts import places_of
from lowering.tpu_core.matrix_unit import MatrixUnit
from lowering.tpu_core.transfers import transfer_of

POISON = 0xFFC0DEAD
RNG = np.random.default_rng(0)
FLOATS = RNG.normal(size=(3, 8, 128)).astype(np.float32)
INTEGERS = RNG.integers(-(2**31), 2**31, (3, 8, 128)).astype(np.int32)
BYTES = RNG.integers(-128, 128, (4, 8, 128)).astype(np.int8)
FOUR_BITS = RNG.integers(-8, 8, (8, 8, 128)).astype(np.int8)


class Bench:
    """A machine with two allocations in vector memory and two in HBM, all of 16 rows, and what is set by hand."""

    def __init__(self, order=Transfers.ORDERS[0], generation=5, forgets=False):
        self.memory = Memory(poison=POISON, granules_of_pointer=1, forgets=forgets)
        self.transfers = Transfers(self.memory, order)
        self.generation = generation
        self.places = {
            space: [self.memory.allocate(space, space, 16 * 512) for _ in range(2)] for space in ("vmem", "hbm")
        }
        self.symbols = {}

    def run(self, *lines, checks=False, **registers):
        machine = Machine(
            read_bundles(program(*lines), vectors=True, is_kernel=True),
            self.memory,
            self.transfers,
            addresses=self.address,
            operands=lambda instruction: 0,
            generation=self.generation,
            checks=checks,
        )
        machine.registers.held.update(registers)
        machine.run()
        return machine

    def address(self, name, space):
        if name not in self.symbols:
            self.symbols[name] = self.memory.allocate(name, space or "sflag", 4096)
        return self.symbols[name]

    def rows(self, space, number):
        return self.memory.words_of(space, self.places[space][number])[0].reshape(16, 128)

    def set_rows(self, space, number, rows):
        words, is_written = self.memory.words_of(space, self.places[space][number])
        words[:], is_written[:] = np.asarray(rows, np.uint32).reshape(-1), True


def bits(x):
    return np.ascontiguousarray(x).view(np.uint32)


def halves(low, high):
    """Words from 16-bit numbers."""
    low, high = (np.ascontiguousarray(x).view(np.uint16).astype(np.uint32) for x in (low, high))
    return low | high << 16


def compressed(rows):
    """Words in which neighbouring rows of narrower numbers share a word, the first in the lowest bits."""
    width = rows.dtype.itemsize
    parts = np.ascontiguousarray(rows).view(f"u{width}").reshape(-1, 4 // width, rows.shape[-1]).astype(np.uint32)
    return sum(parts[:, at] << np.uint32(8 * width * at) for at in range(4 // width))


def as_bfloat16(x):
    return np.asarray(jnp.asarray(x).astype(jnp.bfloat16))


def of_four_bits():
    rows = FOUR_BITS.transpose(1, 0, 2).reshape(64, 128)
    words = sum((rows[at::8].astype(np.int64) & 0xF) << 4 * at for at in range(8)).astype(np.uint32)
    return words, compressed(rows[:32])


A, B, C = FLOATS
I, J, _ = INTEGERS  # noqa: E741
ROWS_16 = as_bfloat16(np.concatenate([A, B]))
ROWS_8 = BYTES.reshape(32, 128)
ROWS_OF_INTEGERS = np.concatenate([I, J]).astype(np.int16)
SHIFTS = RNG.integers(0, 31, (8, 128)).astype(np.uint32)
EXPECTED = {
    "vadd.f32": ([bits(A), bits(B)], bits(A + B)),
    "vsub.f32": ([bits(A), bits(B)], bits(A - B)),
    "vmax.f32": ([bits(A), bits(B)], bits(np.maximum(A, B))),
    "vadd.s32": ([bits(I), bits(J)], bits((I.astype(np.int64) + J).astype(np.int32))),
    "vmul.u32": ([bits(I), bits(J)], (bits(I).astype(np.uint64) * bits(J) & 0xFFFFFFFF).astype(np.uint32)),
    "vshll.u32": ([bits(I), SHIFTS], (bits(I).astype(np.uint64) << SHIFTS & 0xFFFFFFFF).astype(np.uint32)),
    "vshrl.u32": ([bits(I), SHIFTS], (bits(I).astype(np.uint64) >> SHIFTS).astype(np.uint32)),
    "vshra.s32": ([bits(I), SHIFTS], bits((I.astype(np.int64) >> SHIFTS).astype(np.int32))),
    "vadd.bf16": (
        [compressed(ROWS_16), compressed(ROWS_16[::-1])],
        compressed(np.asarray(jnp.asarray(ROWS_16) + jnp.asarray(ROWS_16[::-1]))),
    ),
    "vsub.s16": (
        [compressed(ROWS_OF_INTEGERS), compressed(ROWS_OF_INTEGERS[::-1])],
        compressed((ROWS_OF_INTEGERS.astype(np.int32) - ROWS_OF_INTEGERS[::-1]).astype(np.int16)),
    ),
    **{
        f"v{name}.s16": (
            [compressed(ROWS_OF_INTEGERS), compressed(ROWS_OF_INTEGERS[::-1])],
            compressed(function(ROWS_OF_INTEGERS, ROWS_OF_INTEGERS[::-1])),
        )
        for name, function in (("max", np.maximum), ("min", np.minimum))
    },
    "vcvt.f32.s32": ([bits(1e3 * A)], bits(np.rint(1e3 * A.astype(np.float64)).astype(np.int32))),
    "vcvt.s32.f32": ([bits(I)], bits(I.astype(np.float32))),
    "vround.rtne.f32": ([bits(1e3 * A)], bits(np.rint(1e3 * A))),
    "vclamps.f32": ([bits(A), np.float32(0.5).view(np.uint32)], bits(np.clip(A, -0.5, 0.5))),
    "vpcnt": ([bits(I)], np.array([f"{x:b}".count("1") for x in bits(I).flat], np.uint32).reshape(8, 128)),
    "vclz": (
        [bits(J) >> SHIFTS],
        np.array([32 - int(x).bit_length() for x in (bits(J) >> SHIFTS).flat], np.uint32).reshape(8, 128),
    ),
    "vpack.c.bf16": ([bits(B), bits(A)], compressed(ROWS_16)),
    "vpack.i.bf16": ([bits(B), bits(A)], halves(as_bfloat16(A), as_bfloat16(B))),
    "vpack.c.b16": ([bits(J), bits(I)], compressed(np.concatenate([I, J]).astype(np.int16))),
    "vpack.c.b8": (
        [
            compressed(np.concatenate(BYTES[2:]).astype(np.int16)),
            compressed(np.concatenate(BYTES[:2]).astype(np.int16)),
        ],
        compressed(ROWS_8),
    ),
    "vunpack.c.l.bf16": ([compressed(ROWS_16)], bits(ROWS_16[:8].astype(np.float32))),
    "vunpack.c.h.bf16": ([compressed(ROWS_16)], bits(ROWS_16[8:].astype(np.float32))),
    "vunpack.i.l.bf16": ([halves(as_bfloat16(A), as_bfloat16(B))], bits(as_bfloat16(A).astype(np.float32))),
    "vunpack.i.h.bf16": ([halves(as_bfloat16(A), as_bfloat16(B))], bits(as_bfloat16(B).astype(np.float32))),
    **{
        f"vunpack.c.{at}.s8": ([compressed(ROWS_8)], bits(ROWS_8[8 * at : 8 * at + 8].astype(np.int32)))
        for at in range(4)
    },
    "vunpack.c.h.s8.bf16": ([compressed(ROWS_8)], compressed(as_bfloat16(ROWS_8[16:].astype(np.float32)))),
    "vunpack.c.l.s16.s32": (
        [compressed(np.concatenate([I, J]).astype(np.int16))],
        bits(I.astype(np.int16).astype(np.int32)),
    ),
    "vunpack.i.l.s16.s32": ([halves(*np.split(ROWS_OF_INTEGERS, 2))], bits(ROWS_OF_INTEGERS[:8].astype(np.int32))),
    "vunpack.i.u.s16.s32": ([halves(*np.split(ROWS_OF_INTEGERS, 2))], bits(ROWS_OF_INTEGERS[8:].astype(np.int32))),
    "vunpack.c.l.b16": ([compressed(ROWS_OF_INTEGERS)], bits(ROWS_OF_INTEGERS[:8].astype(np.int32))),
    "vunpack.c.l.s4": ([of_four_bits()[0]], of_four_bits()[1]),
    "vcombine.low": ([bits(A), bits(B)], bits(np.concatenate([A[:4], B[:4]]))),
    "vcombine.high": ([bits(A), bits(B)], bits(np.concatenate([A[4:], B[4:]]))),
    "vrot.slane": ([bits(A), np.uint32(3)], bits(np.stack([A[(row + 3) % 8] for row in range(8)]))),
    "vrot.slane by a vector": (
        [bits(A), np.broadcast_to(np.array([0, 1, 0, 7, 6, 3, 3, 2], np.uint32)[:, None], (8, 128))],
        bits(A[[0, 2, 2, 2, 2, 0, 1, 1]]),
    ),
    "vperm.slane by a vector": (
        [bits(A), np.broadcast_to(np.array([0, 1, 0, 1, 7, 7, 3, 2], np.uint32)[:, None], (8, 128))],
        bits(A[[0, 1, 0, 1, 7, 7, 3, 2]]),
    ),
    "vperm.slane": ([bits(A), np.uint32(5)], bits(np.stack([A[5]] * 8))),
}


@pytest.mark.parametrize("opcode", EXPECTED)
def test_vector_unit_computes_what_numpy_does(opcode):
    operands, expected = EXPECTED[opcode]
    bench = Bench()
    names = ", ".join(f"%v{at}_v{at}" for at in range(len(operands)))
    machine = bench.run(
        f"%v9_v9 = {opcode.partition(' ')[0]} {names}", **{f"v{at}": x for at, x in enumerate(operands)}
    )
    np.testing.assert_array_equal(machine.registers.held["v9"], expected, strict=True)


def test_masks_are_rectangles_and_select():
    mask = 2 | 5 << 3 | 6 << 10 | 100 << 13
    machine = Bench().run(
        f"%vm1_vm1 = vcmask {mask}",
        "%vm2_vm2 = vcmp.lt.f32.partialorder %v0_v0, %v1_v1",
        "%vm3_vm3 = vmand %vm1_vm1, %vm2_vm2",
        "%v4_v4 = vsel /*vm=*/%vm3_vm3, /*on_true_vy=*/%v0_v0, /*on_false_vx=*/7.0",
        v0=bits(A),
        v1=bits(B),
    )
    inside = np.zeros((8, 128), bool)
    inside[2:7, 5:101] = True
    np.testing.assert_array_equal(machine.registers.held["v4"], bits(np.where(inside & (A < B), A, np.float32(7))))


def test_weird_numbers_are_those_that_are_not_finite():
    x = np.broadcast_to(np.array([0, -0.0, 1e-40, 1, 3e38, np.inf, -np.inf, np.nan], np.float32)[:, None], (8, 128))
    machine = Bench().run(
        "%vm1_vm1 = vweird.f32 %v0_v0  ;;  %vm2_vm2 = vc.u32 %v1_v1, %v2_v2",
        "%v3_v3 = vsel /*vm=*/%vm1_vm1, /*on_true_vy=*/1, /*on_false_vx=*/0",
        "%v4_v4 = vsel /*vm=*/%vm2_vm2, /*on_true_vy=*/1, /*on_false_vx=*/0",
        "%v5_v5 = vmul.u32.u64.high /*lhs_vy=*/%v1_v1, /*rhs_vx=*/%v2_v2, /*low=*/%v4_v4",
        v0=bits(x),
        v1=bits(I),
        v2=bits(J),
    )
    held = machine.registers.held
    np.testing.assert_array_equal(held["v3"], ~np.isfinite(x))
    wide_pair = bits(I).astype(object), bits(J).astype(object)
    np.testing.assert_array_equal(held["v4"], (wide_pair[0] + wide_pair[1]) >> 32)
    np.testing.assert_array_equal(held["v5"], ((wide_pair[0] * wide_pair[1]) >> 32).astype(np.uint32), strict=True)


def test_masks_of_two_vectors_are_packed_into_one_of_halves():
    machine = Bench().run(
        "%vm1_vm1 = vcmp.lt.f32.partialorder %v0_v0, %v1_v1  ;;  %vm2_vm2 = vnez %v3_v3",
        "%vm4_vm4 = vmpackc.low %vm2_vm2, %vm1_vm1",
        "%v5_v5 = vsel /*vm=*/%vm4_vm4, /*on_true_vy=*/%v2_v2, /*on_false_vx=*/0",
        v0=bits(A),
        v1=bits(B),
        v2=compressed(ROWS_OF_INTEGERS),
        v3=SHIFTS % 3,
    )
    expected = np.where(np.concatenate([A < B, SHIFTS % 3 != 0]), ROWS_OF_INTEGERS, np.int16(0))
    np.testing.assert_array_equal(machine.registers.held["v5"], compressed(expected))


def test_bytes_that_are_not_zero_select_bytes():
    # A third of the bytes are 0.
    some, others = (RNG.integers(0, 3, (8, 128, 4)).astype(np.uint8) * np.uint8(0x81) for _ in range(2))
    machine = Bench().run(
        "%vm1_vm1 = vnez.u8 %v0_v0",
        "%v2_v2 = vsel /*vm=*/%vm1_vm1, /*on_true_vy=*/%v1_v1, /*on_false_vx=*/0",
        v0=bits(some)[..., 0],
        v1=bits(others)[..., 0],
    )
    found = np.ascontiguousarray(machine.registers.held["v2"]).view(np.uint8).reshape(some.shape)
    np.testing.assert_array_equal(found, np.where(some != 0, others, 0))


def test_bfloat16_is_rounded_to_the_nearest_even_and_keeps_what_is_not_finite():
    # The high halves: all exponents, infinities and NaN. The low halves: below, at and above the middle between two.
    x = (np.arange(0, 2**16, 7, dtype=np.uint32)[:, None] << 16) | np.uint32([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    found = vectors.rounded_to_bfloat16(x)
    with np.errstate(invalid="ignore"):
        truth = x.view(np.float32).astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(found.view(np.float32), truth, strict=True)


def test_checks_of_the_compiler_are_quoted():
    reason = "/* Semaphore (scratch argument 1) has a nonzero value upon exit, /*hbm=*/%s1_s1 */"
    with pytest.raises(
        MachineFaultError, match=r"fails: Semaphore \(scratch argument 1\) has a nonzero value upon exit"
    ):
        Bench().run(f"%1 = shalt.err (%p0_p0) {reason}", p0=True)


def test_a_semaphore_that_is_left_names_the_transfer_to_it():
    bench, reason = Bench(), "/* Semaphore (scratch argument 1) has a nonzero value upon exit. Await it. */"
    place = {"s1": bench.places["hbm"][0], "s2": bench.places["vmem"][0] << 4}
    with pytest.raises(MachineFaultError, match=r"Await it: nothing waits for a transfer that bundle 0x1 starts$"):
        bench.run(
            COPY, COPY.replace("#flag", "#other"), WAIT, TAKE, f"%1 = shalt.err (%p0_p0) {reason}", p0=True, **place
        )


@pytest.mark.parametrize(("dtype", "like"), [("bf16", jnp.bfloat16), ("s16", np.int16), ("u16", np.uint16)])
def test_halves_of_words_are_compared_each(dtype, like):
    # Of bfloat16, numbers of ordinary size.
    pair = [RNG.integers(0x2000, 0x6000, (16, 128)).astype(np.uint16) for _ in range(2)]
    pair = [x | RNG.integers(0, 2, x.shape).astype(np.uint16) << np.uint16(15) for x in pair]
    pair[1][::3] = pair[0][::3]
    machine = Bench().run(
        f"%vm1_vm1 = vcmp.le.{dtype}.totalorder %v0_v0, %v1_v1",
        "%v2_v2 = vsel /*vm=*/%vm1_vm1, /*on_true_vy=*/%v0_v0, /*on_false_vx=*/0",
        v0=compressed(pair[0]),
        v1=compressed(pair[1]),
    )
    a, b = (x.view(like).astype(np.float64) for x in pair)
    np.testing.assert_array_equal(machine.registers.held["v2"], compressed(np.where(a <= b, pair[0], np.uint16(0))))


def test_cross_lane_unit_reduces_moves_and_transposes():
    bench, pattern = Bench(), RNG.permutation(128).astype(np.uint32)
    machine = bench.run(
        "%1 = vadd.xlane.f32.xlu0 %v0_v0",
        "%2 = vrot.lane.b32.xlu0 %v0_v0, %s1_s1  ;;  %3 = vset.pattern.permute.xlu1 %v1_v1",
        "%4 = vperm.xlu1 /*pattern=*/%3, /*source=*/%v0_v0  ;;  %5 = vbcast.lane.b32.xlu0 %v0_v0, 261",
        "%v5_v5 = vpop.xlane.xlu0 %1  ;;  %v6_v6 = vpop.permute.xlu0 %2  ;;  %v7_v7 = vpop.permute.xlu1 %4",
        "%v8_v8 = vpop.permute.xlu0 %5",
        v0=bits(A),
        v1=np.broadcast_to(pattern, (8, 128)),
        s1=37,
    )
    held = machine.registers.held
    np.testing.assert_allclose(
        held["v5"].view(np.float32), np.tile(A.sum(1, dtype=np.float64)[:, None], 128), atol=1e-5
    )
    np.testing.assert_array_equal(held["v6"], bits(np.roll(A, 37, 1)))
    np.testing.assert_array_equal(held["v7"], bits(A[:, pattern]))
    lanes = 5 + np.arange(8)  # 261 is lane 5, and one further for each sublane
    np.testing.assert_array_equal(held["v8"], bits(np.tile(A[np.arange(8), lanes][:, None], 128)))
    unit = cross_lane_unit.CrossLaneUnit()
    for at, kind in enumerate(("start", "cont", "end")):
        unit.transposed(f"vxpose.b32.{kind}", bits(FLOATS[at]), 128)
    turned = np.concatenate([unit.results["trf"].popleft() for _ in range(16)])
    np.testing.assert_array_equal(turned[:, :24], bits(FLOATS.reshape(24, 128).T))


@pytest.mark.parametrize(("generation", "is_transposed"), [(5, False), (5, True), (7, False), (7, True)])
def test_matrix_unit_multiplies_rounded_operands(generation, is_transposed):
    unit = MatrixUnit(starts_with_last=generation < 7)
    weight = as_bfloat16(RNG.normal(size=(128, 128)).astype(np.float32))
    x = as_bfloat16(RNG.normal(size=(16, 128)).astype(np.float32))
    pushes = [weight[row : row + 16] for row in range(0, 128, 16)]
    for rows in pushes[::-1] if generation < 7 else pushes:
        unit.push("msra", compressed(rows), "bf16", 0, is_transposed=is_transposed)
    unit.multiply(compressed(x), "bf16", "msra", "gmra", None)
    found = np.concatenate([result.view(np.float32) for result in unit.results])
    wide = weight.astype(np.float64)
    np.testing.assert_allclose(found, x.astype(np.float64) @ (wide.T if is_transposed else wide), atol=1e-4)


def test_matrix_buffer_adds_up_until_it_is_popped():
    unit, parts = MatrixUnit(starts_with_last=False), []
    for _ in range(2):
        weight, x = (as_bfloat16(RNG.normal(size=(rows, 128)).astype(np.float32)) for rows in (128, 16))
        for row in range(0, 128, 16):
            unit.push("msra", compressed(weight[row : row + 16]), "bf16", 0, is_transposed=False)
        unit.multiply(compressed(x), "bf16", "msra", "gmra", 4)
        parts.append(x.astype(np.float64) @ weight.astype(np.float64))
    found = np.concatenate([unit.pop(at).view(np.float32) for at in (4, 5)])
    np.testing.assert_allclose(found, parts[0] + parts[1], atol=1e-4)
    with pytest.raises(MachineFaultError, match="nobody has put any"):
        unit.pop(4)


def test_matrix_unit_takes_float32_as_bfloat16():
    unit, weight = MatrixUnit(starts_with_last=True), np.eye(128, dtype=np.float32)
    for row in range(120, -1, -8):
        unit.push("msrb", bits(weight[row : row + 8]), "f32", 0, is_transposed=False)
    unit.multiply(bits(A), "f32", "msrb", "gmrb", None)
    np.testing.assert_array_equal(unit.results.popleft().view(np.float32), as_bfloat16(A).astype(np.float32))


def test_a_bundle_reads_before_it_writes():
    machine = Bench().run("%v2_v1 = vmov %v1_v0  ;;  %v3_v0 = vmov %v4_v1", v0=bits(A), v1=bits(B))
    np.testing.assert_array_equal(machine.registers.held["v0"], bits(B))
    np.testing.assert_array_equal(machine.registers.held["v1"], bits(A))


@pytest.mark.parametrize(("generation", "slots"), [(5, 4), (7, 6)])
def test_a_branch_has_delay_slots(generation, slots):
    lines = [
        "%1 = sbr.rel target bundleno = 12",
        *[f"%s{at}_s{at} = smov {at}" for at in range(1, 12)],
        "%s20_s20 = smov 9",
    ]
    held = Bench(generation=generation).run(*lines).registers.held
    assert sorted(held, key=lambda name: int(name[1:])) == [f"s{at}" for at in (*range(1, slots + 1), 20)]


def test_predicated_values_keep_what_a_register_holds_or_take_another():
    held = (
        Bench()
        .run(
            "%s1_s1 = smov 5  ;;  %p1_p1 = scmp.lt.s32.totalorder 3, 2",
            "%s2_s1 = smov (%p1_p1), 6  ;;  %s3_s3 = smov (%p1_p1, 8), 7  ;;  %s4_s4 = smov (!%p1_p1), 4",
        )
        .registers.held
    )
    assert (held["s1"], held["s3"], held["s4"]) == (5, 8, 4)


def test_loads_and_stores_reach_the_rows_that_they_name():
    bench = Bench()
    rows = np.arange(16 * 128, dtype=np.uint32).reshape(16, 128)
    bench.set_rows("vmem", 0, rows)
    first, second = bench.places["vmem"]
    machine = bench.run(
        "%v1_v1 = vld [vmem:[%s0_s0 + $0x9 - $0x8] ss:$2 sm:$0xff]",
        "%v2_v2 = vld [vmem:[%s0_s0] ss:$8 sps:$4 sm:$0x33]",
        "%v3_v3 = vld [vmem:[%s0_s0 + $0x4] sm:$0xff]",
        "%v5_v5 = vld.sshfl [vmem:[%s0_s0] sm:$0xff pattern:$0x73625140]",
        "%1 = vst [vmem:[%s1_s1 + $0x2] sm:$0x0f] /*vst_source=*/%v3_v3",
        "%3 = vst [vmem:[%s1_s1 - $0x6] sm:$0xc0] /*vst_source=*/%v3_v3",
        "%2 = vst.msk [vmem:[%s1_s1 + $0x8] sm:$0xff] /*vm=*/%vm1_vm1, /*vst_source=*/%v3_v3",
        s0=first,
        s1=second,
        vm1=np.arange(128)[None] < np.full((8, 1), 100),
    )
    held = machine.registers.held
    np.testing.assert_array_equal(held["v1"], rows[1:16:2])
    np.testing.assert_array_equal(held["v5"], rows[[0, 4, 1, 5, 2, 6, 3, 7]])
    np.testing.assert_array_equal(held["v2"][[0, 1, 4, 5]], rows[[0, 1, 8, 9]])
    assert not held["v2"][[2, 3, 6, 7]].any()
    written = bench.rows("vmem", 1)
    np.testing.assert_array_equal(written[2:6], rows[4:8])
    np.testing.assert_array_equal(written[8:, :100], rows[4:12, :100])
    assert (written[8:, 100:] == POISON).all()
    np.testing.assert_array_equal(written[:2], rows[10:12])


COPY = dma(64, flag="[#flag]")
WAIT = "%3 = dma.done.wait [#flag], 64"
TAKE = f"%4 = vsyncadd [#flag], {2**32 - 64}"


@pytest.mark.parametrize("order", Transfers.ORDERS)
def test_transfers_are_complete_when_they_have_been_waited_for(order):
    bench, rows = Bench(order), np.arange(16 * 128).reshape(16, 128)
    bench.set_rows("hbm", 0, rows)
    bench.run(COPY, WAIT, TAKE, s1=bench.places["hbm"][0], s2=bench.places["vmem"][0] << 4)
    np.testing.assert_array_equal(bench.rows("vmem", 0)[:4], rows[:4])
    assert (bench.rows("vmem", 0)[4:] == POISON).all()
    assert not any(bench.memory.semaphores.values())


def test_a_load_that_does_not_wait_depends_on_the_order_of_transfers():
    loaded = []
    for order in Transfers.ORDERS:
        bench = Bench(order)
        bench.set_rows("hbm", 0, np.full((16, 128), 7))
        place = bench.places["vmem"][0]
        load = "%v1_v1 = vld [vmem:[%s3_s3] sm:$0xff]"
        machine = bench.run(COPY, load, WAIT, TAKE, s1=bench.places["hbm"][0], s2=place << 4, s3=place)
        loaded.append(int(machine.registers.held["v1"][0, 0]))
    assert loaded == [7, POISON, POISON, POISON]


def test_of_two_transfers_on_one_semaphore_either_may_be_the_first():
    loaded = []
    for order in Transfers.ORDERS:
        bench = Bench(order)
        bench.set_rows("hbm", 0, np.full((16, 128), 7))
        place, other = bench.places["vmem"]
        load = "%v1_v1 = vld [vmem:[%s3_s3] sm:$0xff]"
        copies = COPY, COPY.replace("%s2_s2", "%s4_s4")
        machine = bench.run(
            *copies, WAIT, TAKE, load, s1=bench.places["hbm"][0], s2=place << 4, s3=place, s4=other << 4
        )
        loaded.append(int(machine.registers.held["v1"][0, 0]))
    assert loaded == [7, POISON, 7, 7]


def test_a_source_that_changes_under_way_is_seen():
    arrived = []
    for order in Transfers.ORDERS:
        bench = Bench(order)
        bench.set_rows("vmem", 0, np.full((16, 128), 1))
        store = "%9 = vst [vmem:[%s3_s3] sm:$0xff] /*vst_source=*/%v1_v1"
        copy = COPY.replace("hbm_to_vmem", "vmem_to_hbm").replace("/*hbm=*/%s1_s1", "/*vmem=*/%s2_s2")
        copy = copy.replace("/*vmem=*/%s2_s2, /*dst", "/*hbm=*/%s1_s1, /*dst")
        source = bench.places["vmem"][0]
        bench.run(
            copy,
            store,
            WAIT,
            TAKE,
            s1=bench.places["hbm"][0],
            s2=source << 4,
            s3=source,
            v1=np.full((8, 128), 2, np.uint32),
        )
        arrived.append(int(bench.rows("hbm", 0)[0, 0]))
    assert arrived == [1, 2, 1, 1]


@pytest.mark.parametrize("order", Transfers.ORDERS)
@pytest.mark.parametrize("sender", ["the pipeline", "the kernel"])
def test_a_block_that_the_pipeline_has_sent_is_not_written_any_more(sender, order):
    bench, rows = Bench(order, forgets=True), np.arange(16 * 128).reshape(16, 128)
    bench.set_rows("vmem", 0, rows)
    send = "%3 = dma.vmem_to_hbm /*vmem=*/%s2_s2, /*size_in_granules=*/128, /*hbm=*/%s1_s1, /*dst_syncflagno=*/[#flag]"
    if sender == "the pipeline":
        send += " /* \nbase_bounds: (16, 1)\nwindow_bounds: (1, 1)\niteration_bounds: (8) */"
    wait = "%4 = dma.done.wait [#flag], 128", f"%5 = vsyncadd [#flag], {2**32 - 128}"
    source = bench.places["vmem"][0]
    loads = [f"%v{at}_v{at} = vld [vmem:[%s3_s3 + ${8 * (at == 3):#x}] sm:$0xff]" for at in range(1, 4)]
    machine = bench.run(send, loads[0], *wait, *loads[1:], s1=bench.places["hbm"][0], s2=source << 4, s3=source)
    held = machine.registers.held
    np.testing.assert_array_equal(bench.rows("hbm", 0)[:8], rows[:8])
    np.testing.assert_array_equal(held["v3"], rows[8:])
    is_sent_by_pipeline = sender == "the pipeline"
    assert (held["v2"] == POISON).all() == is_sent_by_pipeline
    # It is there until the transfer has read it.
    is_read_late = order == Transfers.ORDERS[1]
    assert (held["v1"] == POISON).all() == (is_sent_by_pipeline and not is_read_late)
    assert list(bench.memory.unwritten) == ([] if not is_sent_by_pipeline else [4] if is_read_late else [1, 4])
    assert not bench.memory.sent_unwritten


def test_only_what_a_kernels_pipeline_sends_is_marked():
    sent = "%3 = dma.vmem_to_hbm /*vmem=*/%s2_s2, /*size_in_granules=*/128, /*hbm=*/%s1_s1, /*dst_syncflagno=*/[#flag]"
    by_pipeline = f"{sent} /* \nbase_bounds: (16, 1)\nwindow_bounds: (1, 1) */"
    for line, is_kernel, is_marked in ((by_pipeline, True, True), (by_pipeline, False, False), (sent, True, False)):
        (bundle,) = read_bundles(program(line), vectors=True, is_kernel=is_kernel)
        assert transfer_of(bundle.instructions[0], {}).is_of_window == is_marked


def test_a_transfer_of_what_nobody_has_written_is_noted():
    bench = Bench()
    send = "%3 = dma.vmem_to_hbm /*vmem=*/%s2_s2, /*size_in_granules=*/64, /*hbm=*/%s1_s1, /*dst_syncflagno=*/[#flag]"
    bench.run("%9 = snop 0", send, s1=bench.places["hbm"][0], s2=bench.places["vmem"][0] << 4)
    assert dict(bench.memory.sent_unwritten) == {1: 1}


def test_strided_transfers_take_steps_of_512_bytes():
    bench, rows = Bench(), np.arange(16 * 128).reshape(16, 128)
    bench.set_rows("hbm", 0, rows)
    strides = ", /*src_stride=*/64, /*dst_stride=*/32, /*steps_per_stride=*/2"
    bench.run(COPY + strides, s1=bench.places["hbm"][0], s2=bench.places["vmem"][0] << 4)
    np.testing.assert_array_equal(bench.rows("vmem", 0)[:4], rows[[0, 1, 4, 5]])


REFUSED = {
    "%v1_v1 = vfly.f32 %v0_v0": "opcode 'vfly.f32'",
    "%v1_v1 = vadd.f32 %v0_v0, %v0_v0, %v0_v0": "vadd.f32",
    "%v1_v1 = vadd.f32 %v0_v0, 1.0e": "number '1.0e'",
    "%v1_v1 = vld [vmem:[%s0_s0] sm:$0xff pattern:$0x73625140]": "vld",
    "%v1_v1 = vld [vmem:[%s0_s0] sm:$0xff] beyond": "vld",
    "%1 = vst [vmem:[%s0_s0] sm:$0xff] /*vst_source=*/%v0_v0, /*more=*/1": "vst",
    "%1 = vmatmul.bf16.vlgmr.msra.gmra.quick.mxu0 %v0_v0": "vmatmul",
    f"{dma(1, flag=1)}, /*new=*/2": "new",
    "%vm1_vm1 = vcmp.lt.f64.partialorder %v0_v0, %v0_v0": "vcmp.lt.f64",
    "%s1_s1 = sfly.s32 %s0_s0": "opcode 'sfly.s32'",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_nobody_has_settled_stops_by_name(line):
    with pytest.raises(UnknownFormError, match="bundle 0x1") as error:
        Bench().run("%9 = snop 0", line, s0=0, v0=bits(A))
    assert REFUSED[line] in str(error.value)


FAULTS = {
    "%3 = dma.done.wait [#flag], 64": "a wait for 2,048 bytes more than a semaphore holds, and nothing adds to it",
    "%3 = vwait.ge [#flag], 2": "a wait for 2 signals more than a semaphore holds",
    "%v1_v1 = vpop.eup %7": "nobody has pushed",
    "%v1_v1 = vadd.f32 %v3_v3, %v3_v3": "register v3 is read before",
    "%1 = vst [vmem:[%s0_s0 + $0xc] sm:$0xff] /*vst_source=*/%v0_v0": "a store to row 19 of vmem, which has 16 rows",
    "%v1_v1 = vld [vmem:[%s0_s0 + $0xc0000] sm:$0xff]": "where nothing is allocated",
    "%1 = shalt.err (%p0_p0)": "a check that the compiler has put in",
    (
        "%1 = shalt.err (%p0_p0), reason=BoundsCheck 0 deref of s22 for 26 dma.hbm_to_vmem thread: 0 hbm s22 "
        "size_in_granules 128 vmem s24 dst_syncflagno allocation3 loc( tmp model.py :5:56 to :65)"
    ): "fails: a transfer from hbm to vmem (model.py:5) reads beyond its operand in hbm",
    (
        "%1 = shalt.err (%p0_p0), reason=BoundsCheck 1 deref of opnd 1 for dma.vmem_to_hbm hlo: oob.1"
    ): "fails: a transfer from vmem to hbm writes beyond its operand in hbm",
    "%1 = vmatmul.f32.gmra.mxu0 %v0_v0": "before weights are loaded",
    dma(300): "a transfer of 9,600 bytes that reaches beyond hbm",
}


@pytest.mark.parametrize("line", FAULTS)
def test_what_no_program_may_do_is_a_fault(line):
    bench = Bench()
    place = bench.places["vmem"][0]
    with pytest.raises(MachineFaultError, match="bundle 0x1") as error:
        bench.run("%9 = snop 0", line, s0=place, s1=bench.places["hbm"][0], s2=place << 4, v0=bits(A), p0=True)
    assert FAULTS[line] in str(error.value)


def test_a_store_before_an_allocation_names_its_row() -> None:
    bench = Bench()
    first, second = bench.places["vmem"]
    for place, row in ((first - 8, -8), (second - 8, -8), (second - 4, -4), (first + 16, 23)):
        with pytest.raises(MachineFaultError, match=f"a store to row {row} of vmem, which has 16 rows"):
            bench.run("%1 = vst [vmem:[%s0_s0] sm:$0xff] /*vst_source=*/%v0_v0", s0=place, v0=bits(A))


@pytest.mark.parametrize("word", [-1, 4, 100_000])
def test_a_store_outside_of_scalar_memory_names_its_word(word: int) -> None:
    memory = Bench().memory
    memory.allocate("before", "smem", 64)
    first = memory.allocate("lengths", "smem", 16)
    memory.store_scalar(first + 3, 7)
    with pytest.raises(MachineFaultError, match=f"a store to word {word} of lengths in smem, which has 4 words"):
        memory.store_scalar(first + word, 7)
    assert memory.load_scalar(first + 3) == 7


def test_what_a_transfer_pads_scalar_memory_with_is_not_written() -> None:
    bench = Bench()
    (source, _), lengths = bench.places["hbm"], bench.memory.allocate("lengths", "smem", 32)
    words, is_written = bench.memory.words_of("hbm", source)
    words[:8], is_written[:5] = range(8), True
    bench.transfers.start(("hbm", "smem"), 1, source, lengths, 0)
    assert [bench.memory.load_scalar(lengths + at) for at in range(5)] == list(range(5))
    assert not bench.memory.unwritten
    assert bench.memory.load_scalar(lengths + 5) == int(np.int32(np.uint32(POISON)))
    assert bench.memory.unwritten.total() == 1


@pytest.mark.parametrize("between", range(3))
def test_any_of_three_transfers_on_one_semaphore_is_under_way_after_two_waits_in_an_order(between: int) -> None:
    arrived = []
    for order in Transfers.ORDERS[1:]:
        bench = Bench(order)
        sources, destination = bench.places["hbm"], bench.places["vmem"][0]
        bench.set_rows("hbm", 0, np.full((16, 128), 5))
        for number in range(3):
            bench.transfers.start(("hbm", "vmem"), 16, sources[0], (destination + number) << 4, 0)
        for _ in range(2):
            bench.transfers.wait(0, 16)
            bench.memory.semaphores[0] -= 16
        arrived.append(bench.rows("vmem", 0)[between, 0] == 5)
    assert not all(arrived)


@pytest.mark.parametrize(("line", "holds"), [(COPY, "2,048 bytes"), ("%2 = vsyncadd [#flag], 1", "1 signal")])
def test_what_a_semaphore_holds_at_the_end_has_a_unit(line, holds):
    bench = Bench()
    end = "%1 = vsyncpa [#flag], 1"
    left = ": nothing waits for a transfer that bundle 0x0 starts" if line == COPY else ""
    with pytest.raises(MachineFaultError, match=f"bundle 0x1: a semaphore holds {holds} when the kernel ends{left}$"):
        bench.run(line, end, s1=bench.places["hbm"][0], s2=bench.places["vmem"][0] << 4)


def test_a_clobbered_register_is_seen():
    machine = Bench().run("%s1_s1 = smov 1", "%s2_s1 = smov 2", "%s3_s3 = sadd.s32 1, %s1_s1", checks=True)
    assert list(machine.registers.clobbered) == ["bundle 0x2: s1 holds s2 where s1 is read"]
    machine = Bench().run("%s1_s1 = smov 1", "%s3_s3 = sadd.s32 1, %s1_s1", checks=True)
    assert list(machine.registers.clobbered) == []


def test_a_pointer_renames_only_what_was_written():
    lines = (
        "%s1_s1 = smov 1  ;;  %p1_p1 = scmp.lt.s32.totalorder 3, 2",
        "%s2_s1 = smov (%p1_p1), 2  ;;  %s3_s1 = int_to_ptr.vmem [resolvable:$false] %s2_s1",
    )
    assert not Bench().run(*lines, "%s4_s4 = sadd.s32 1, %s1_s1", checks=True).registers.clobbered
    assert Bench().run(*lines, "%s4_s4 = sadd.s32 1, %s3_s1", checks=True).registers.clobbered


def test_what_waits_in_a_unit_is_popped_in_order():
    with pytest.raises(MachineFaultError, match="1 is popped where 2 is meant"):
        Bench().run("%1 = vpow2.f32 %v0_v0", "%2 = vrcp.f32 %v0_v0", "%v1_v1 = vpop.eup %2", v0=bits(A))


LAYOUTS = {
    "f32[20,300]{1,0:T(8,128)}": np.float32,
    "bf16[20,300]{1,0:T(8,128)(2,1)}": jnp.bfloat16,
    "s8[3,40,130]{2,1,0:T(8,128)(4,1)}": np.int8,
    "f32[5,7,9]{0,2,1:T(8,128)}": np.float32,
    "s32[100]{0:T(128)}": np.int32,
}


@pytest.mark.parametrize("array_type", LAYOUTS)
def test_arrays_are_the_same_after_memory(array_type):
    bits_of_element, shape, places = places_of(array_type)
    array = RNG.integers(-100, 100, shape).astype(LAYOUTS[array_type])
    words, is_written = words_of(array, bits_of_element, places, POISON)
    found = array_of(words, bits_of_element, places, array)
    np.testing.assert_array_equal(found.astype(np.float64), array.astype(np.float64))
    padding = np.array([POISON], np.uint32).view(f"u{bits_of_element // 8}")[-1]
    assert (words[~is_written].view(padding.dtype) == padding).all()
    assert not is_written.all() or array_type.startswith("s32")


def test_float32_in_tiles_lies_as_the_format_says():
    array = np.arange(16 * 256, dtype=np.float32).reshape(16, 256)
    words, _ = words_of(array, *places_of("f32[16,256]{1,0:T(8,128)}")[::2], POISON)
    tiles = words.reshape(2, 2, 8, 128)
    np.testing.assert_array_equal(tiles[1, 0].view(np.float32), array[8:, :128])


def test_transcendental_results_are_those_of_float64_rounded_once():
    x = np.abs(A) + 0.1
    for opcode, function in (("vpow2.f32", np.exp2), ("vlog2.f32", np.log2), ("vrcp.f32", lambda y: 1 / y)):
        found = vector_unit.TRANSCENDENTAL[opcode](bits(x)).view(np.float32)
        np.testing.assert_array_equal(found, function(x.astype(np.float64)).astype(np.float32))


def test_a_line_is_the_users_or_that_of_a_library_with_kernels():
    ours, jaxs, users = jaxops.__file__, jax.__file__, "/home/me/model.py"
    assert users_file_line([f"{ours}:1", f"{jaxs}:2", f"{users}:3"]) == "model.py:3"
    assert users_file_line([f"{ours}:1", f"{jaxs}:2"]) == "__init__.py:2"
    assert users_file_line([f"{ours}:1", f"{lowering.__file__}:2"]) == ""
