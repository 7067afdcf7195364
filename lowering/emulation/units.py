"""Units whose results wait until they are popped: the cross-lane, the matrix and the transcendental unit."""

import collections
import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from lowering.emulation.registers import Get, Registers
from lowering.tpu_core import cross_lane_unit, matrix_unit, packing, vector_unit
from lowering.tpu_core.bundles import Instruction
from lowering.tpu_core.cross_lane_unit import CrossLaneUnit
from lowering.tpu_core.faults import MachineFaultError, UnknownFormError
from lowering.tpu_core.matrix_unit import MatrixUnit
from lowering.tpu_core.operands import bits_of, labelled
from lowering.tpu_core.vectors import LANES, whole

Effect = Callable[[], None]
_ACCUMULATION = re.compile(r"vmaxabs(\.init)?\.(f32|bf16)\.(vacc\d+)")  # since v7x
_MAGNITUDE = {"f32": np.uint32(0x7FFFFFFF), "bf16": np.uint32(0x7FFF7FFF)}
_TRANSPOSITION = re.compile(r"(?:\[\d+/\d+\]\s*)?(?:\((?:short|narrow)\)\s*)*vx=(%\w+)")


class Units:
    """The units of one core, each by the name that opcodes give it."""

    def __init__(self, registers: Registers, *, generation: int, eup_error: float) -> None:
        """Takes the registers that they read; for the rest, see `Machine`."""
        self._registers = registers
        self._eup_error = np.float32(1 + eup_error)
        self._cross_lane: dict[str, CrossLaneUnit] = collections.defaultdict(CrossLaneUnit)
        self._matrix: dict[str, MatrixUnit] = collections.defaultdict(
            lambda: MatrixUnit(starts_with_last=generation < 7)
        )
        self._transcendental: collections.deque[tuple[str, Any]] = collections.deque()
        self._accumulators: dict[str, Any] = {}

    def effect(self, opcode: str, instruction: Instruction) -> Effect | None:
        """Returns what an instruction hands to a unit; None for others.

        Raises:
          UnknownFormError: if its meaning is not settled.
        """
        if opcode in vector_unit.TRANSCENDENTAL:
            return self._transcendental_effect(opcode, instruction)
        if opcode.startswith(("vmat", "vllmr")):
            return self._matrix_effect(opcode, instruction)
        if found := _ACCUMULATION.fullmatch(opcode):
            return self._accumulation(found, instruction)
        if ".xlu" in opcode and not opcode.startswith("vpop"):
            return self._cross_lane_effect(opcode, instruction)
        return None

    def _transcendental_effect(self, opcode: str, instruction: Instruction) -> Effect:
        function, (operand,) = vector_unit.TRANSCENDENTAL[opcode], self._registers.vectors(instruction, 1)
        queue, value, factor = self._transcendental, instruction.value, self._eup_error
        if factor == 1:
            return lambda: queue.append((value, function(operand())))
        return lambda: queue.append((value, (function(operand()).view(np.float32) * factor).view(np.uint32)))

    def _accumulation(self, found: re.Match[str], instruction: Instruction) -> Effect:
        """Keeps the largest absolute values of vectors in an accumulator."""
        first, dtype, name = found.groups()
        operands, held = self._registers.vectors(instruction, 2), self._accumulators
        largest, magnitude = vector_unit.FUNCTIONS[f"vmax.{dtype}"], _MAGNITUDE[dtype]

        def accumulate() -> None:
            values = [whole(operand()) & magnitude for operand in operands]
            held[name] = functools.reduce(largest, values if first else [self._accumulated(name), *values])

        return accumulate

    def _accumulated(self, name: str) -> np.ndarray:
        if name not in self._accumulators:
            raise MachineFaultError(f"{name} is read before anything is written to it")
        return self._accumulators[name]

    def _cross_lane_effect(self, opcode: str, instruction: Instruction) -> Effect | None:
        tokens = opcode.split(".")
        unit = self._cross_lane[next(token for token in tokens if token.startswith("xlu"))]
        name = ".".join(token for token in tokens if not token.startswith("xlu"))
        if name.startswith(("vxpose.b32.", "vxpose.c.b8.", "vxpose.c.b16.", "vxpose.binary.c.b16.")):
            return self._transposition(name, unit, instruction)
        value = instruction.value
        if name in cross_lane_unit.REDUCTIONS:
            function, (operand,) = cross_lane_unit.REDUCTIONS[name], self._registers.vectors(instruction, 1)
            return lambda: unit.results["xlane"].append((value, function(operand())))
        if name == "vset.pattern.permute":
            (pattern,) = self._registers.vectors(instruction, 1)
            return lambda: unit.set_pattern(pattern())
        if name == "vperm":
            of_pattern, source = labelled(instruction, "pattern", "source")
            if not re.fullmatch(r"%\d+", of_pattern):
                raise UnknownFormError(f"{opcode} with pattern {of_pattern!r}")
            vector = self._registers.vector(source)
            return lambda: unit.results["permute"].append((value, unit.permuted(vector())))
        if name in ("vrot.lane.b32", "vbcast.lane.b32"):
            move = cross_lane_unit.rotated if name.startswith("vrot") else cross_lane_unit.one_lane
            vector, by = self._registers.vectors(instruction, 2)
            return lambda: unit.results["permute"].append((value, move(vector(), by())))
        return None

    def _transposition(self, name: str, unit: CrossLaneUnit, instruction: Instruction) -> Effect:
        first, *others = instruction.operands
        found = _TRANSPOSITION.fullmatch(first)
        width = LANES
        if others and others[-1].startswith("width="):
            width = bits_of(others.pop().partition("=")[2])
        beside = [other.removeprefix("vy=") for other in others if "binary" in name]
        known = {"b8", "b16", "start", "cont", "end"} | ({"binary", "c"} if beside else set())
        if found is None or len(others) != len(beside) or not set(name.split(".")[2:]) <= known:
            raise UnknownFormError(f"{name} with {', '.join(instruction.operands)!r}")
        # Of two matrices, the results of the second come first.
        vectors = [self._registers.vector(operand) for operand in (*beside, found[1])]
        bits = next((bits for bits in (8, 16) if f".b{bits}" in name), 32)
        return lambda: unit.transposed(name, [vector() for vector in vectors], width, bits)

    def _matrix_effect(self, opcode: str, instruction: Instruction) -> Effect:
        name, *tokens = opcode.split(".")
        unknown = UnknownFormError(f"opcode {opcode!r} with {', '.join(instruction.operands)!r}")

        def take(*known: str) -> str:
            found = [token for token in tokens if token in known]
            for token in found[:1]:
                tokens.remove(token)
            return found[0] if found else ""

        unit = self._matrix[take(*(token for token in tokens if token.startswith("mxu")))]
        dtype = take(*matrix_unit.TYPES) or "f32"
        if dtype in packing.FLOATS_OF_8_BITS:
            take("bf16")  # as which they are multiplied
        is_latched, count = bool(take("lsf", "lmr")) or name == "vllmr", take(*filter(str.isdigit, tokens))
        vector: Get
        if is_latched and name != "vmatpush":
            labelled(instruction)
            vector = lambda: None  # noqa: E731
        elif take("msk"):
            if is_latched:
                take("msk")  # which such a push says twice
            mask, operand = (
                self._registers.mask(instruction.operands[0]),
                self._registers.vector(labelled(instruction, "", "")[1]),
            )
            vector = lambda: matrix_unit.masked(mask(), operand())  # noqa: E731
        else:
            (vector,) = self._registers.vectors(instruction, 1)
        address = next((re.fullmatch(r"mrb\[(\d+)\]", token) for token in tokens if token.startswith("mrb[")), None)
        if address is not None:
            tokens.remove(address[0])
        match name:
            case "vmatprep":
                register = take("subr", "mubr")
                effect = lambda: unit.prepare(register, vector(), dtype)  # noqa: E731
            case "vmatpush" | "vmatpush1" | "vmatpush2" | "vmatpush3":
                is_transposed, register, kind = bool(take("xpose")), take("msra", "msrb"), int(name[8:] or 0)
                register = matrix_unit.LATCHED if is_latched else register
                effect = lambda: unit.push(register, vector(), dtype, kind, is_transposed=is_transposed)  # noqa: E731
            case "vllmr":
                effect = lambda: unit.latch(int(count))  # noqa: E731
            case "vmatmul":
                take("mubr")
                loaded = take("msra", "msrb") if take("vlgmr") else ""
                weights, at = take("gmra", "gmrb"), None if address is None else int(address[1])
                effect = lambda: unit.multiply(vector(), dtype, loaded, weights, at)  # noqa: E731
            case _:
                raise unknown
        if tokens or bool(count) != (is_latched and name != "vmatpush"):
            raise unknown
        return effect

    def popped(self, opcode: str, instruction: Instruction) -> Get | None:
        """Takes what waits in a unit; where its name is known, it must be the one that is meant."""
        _, *tokens = opcode.split(".")
        meant = instruction.operands[0].removeprefix("%") if instruction.operands else ""
        unit = tokens[-1]
        if opcode == "vpop.eup":
            return self._taken(self._transcendental, meant)
        if opcode.startswith("vmovacc.low.even.vacc"):
            return lambda: self._accumulated(unit)
        if len(tokens) == 2 and unit.startswith("xlu") and tokens[0] in ("xlane", "permute"):
            return self._taken(self._cross_lane[unit].results[tokens[0]], meant)
        if len(tokens) == 2 and unit.startswith("xlu") and tokens[0] == "trf":
            queue: Any = self._cross_lane[unit].results["trf"]
            return lambda: next_of(queue)
        if len(tokens) == 3 and unit.startswith("mxu") and tokens[0] in ("f32", "s32"):
            address, matrix = re.fullmatch(r"mrb\[(\d+)\]", tokens[1]), self._matrix[unit]
            if address is not None:
                at = int(address[1])
                return lambda: matrix.pop(at)
            if tokens[1] == "mrf":
                return lambda: next_of(matrix.results)
        if tokens[:3] == ["add", "s32", "mrf"] and len(tokens) == 5:
            first, second = (self._matrix[unit].results for unit in tokens[3:])
            return lambda: next_of(first) + next_of(second)
        return None

    def _taken(self, queue: collections.deque[tuple[str, Any]], meant: str) -> Get:
        def take() -> Any:
            name, result = next_of(queue)
            if meant and name != meant:
                raise MachineFaultError(f"{name} is popped where {meant} is meant")
            return result

        return take


def next_of(queue: collections.deque[Any]) -> Any:
    """Takes what has waited longest."""
    if not queue:
        raise MachineFaultError("a result is popped that nobody has pushed")
    return queue.popleft()
