"""Units of the core, by instruction, and the cycles for which one keeps them."""

import collections
from collections.abc import Iterable, Sequence

from lowering.schedule.chips import Chip
from lowering.tpu_core.bundles import Bundle, Instruction

_NEITHER = ("vsync", "vtrace", "vwait", "vdelay", "vnop", "inlined", "compiler-", "int_to_ptr", "sphi", "pphi")
_SIXTEEN_BITS_OR_LESS = ("bf16", "f16", "s8", "u8", "f8", "s4", "u4")


def unit(opcode: str) -> str:
    """Returns the unit that executes an opcode, as `Chip.slots` names them; "" for none that is counted."""
    if opcode.startswith(_NEITHER):
        return ""
    if opcode.startswith("vmatmul"):
        return "MXU"
    if opcode.startswith(("vxpose", "vperm", "vrot")) or ".xlane" in opcode:
        # Along sublanes only, the vector unit does it; what is popped has been counted where it was started.
        return "" if opcode.startswith("vpop") else "vector" if ".slane" in opcode else "cross-lane"
    if opcode == "vpop.eup":
        return "transcendental"
    if opcode.startswith(("vld", "vst.", "vst")):
        return "vector" if opcode == "vstv" else "load" if opcode.startswith("vld") else "store"
    if opcode.startswith(("vpop", "vmatpush", "vmatprep", "vset", "vpush")):
        return ""
    return "vector" if opcode.startswith("v") else "scalar"


def cycles_of(opcode: str, chip: Chip) -> int:
    """Returns for how many cycles an instruction keeps its unit."""
    if opcode.startswith("vmatmul"):
        types = opcode.split(".")
        packed = "lmr" not in types and not set(_SIXTEEN_BITS_OR_LESS).isdisjoint(types)
        return chip.matmul_cycles * (2 if packed else 1)
    return chip.cross_lane_cycles if unit(opcode) == "cross-lane" else 1


def used(bundles: Iterable[Bundle], issues: Sequence[int], chip: Chip) -> dict[str, int]:
    """Counts the cycles of work for all units of each kind, of bundles that were issued so often."""
    cycles = dict.fromkeys(chip.slots, 0)
    for bundle in bundles:
        for instruction in bundle.instructions if issues[bundle.number] else ():
            kind = unit(instruction.opcode)
            if kind:
                cycles[kind] += issues[bundle.number] * cycles_of(instruction.opcode, chip)
    return cycles


def spills(bundles: Iterable[Bundle], issues: Sequence[int]) -> dict[str, int]:
    """Counts the vector registers that were stored for want of registers ("vst"), and loaded again ("vld")."""
    counts: collections.Counter[str] = collections.Counter({"vst": 0, "vld": 0})
    for bundle in bundles:
        for instruction in bundle.instructions:
            if _is_spill(instruction):
                counts[instruction.opcode[:3]] += issues[bundle.number]
    return dict(counts)


def _is_spill(instruction: Instruction) -> bool:
    return instruction.opcode[:3] in ("vst", "vld") and any("_spill" in operand for operand in instruction.operands)
