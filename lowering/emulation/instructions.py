"""Translates instructions of a compiled kernel into functions on registers, memory and units."""

import collections
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lowering.emulation.memory import Memory
from lowering.emulation.registers import Get, Registers
from lowering.emulation.transfers import Transfers
from lowering.emulation.units import Units, next_of
from lowering.tpu_core import packing, vector_unit
from lowering.tpu_core.bundles import Bundle, Instruction, Predicate
from lowering.tpu_core.dumps import place_of
from lowering.tpu_core.faults import MachineFaultError, UnknownFormError
from lowering.tpu_core.opcode_names import known_name
from lowering.tpu_core.operands import bits_of, labelled
from lowering.tpu_core.scalar_memory import wrapped
from lowering.tpu_core.scalar_unit import divided, function_of
from lowering.tpu_core.transfers import pointers_in, transfer_of
from lowering.tpu_core.unknown import Unknown
from lowering.tpu_core.vectors import LANE, LANES, SUBLANE, SUBLANES, whole

Call = Callable[[Instruction], Callable[[], None]]
NOT_WRITTEN, RENAMED_ONLY = object(), object()  # what a predicate may leave in place of a result
_RENAMES = ("int_to_ptr.", "sphi", "pphi", "vphi")  # another name for what a register holds
_NOTHING = frozenset(
    {
        *("sfence", "snop", "nop", "vnop", "strace", "vtrace", "sdelay", "vdelay"),
        *("compiler-scheduling-barrier", "vsettm"),
        *("vsetiar.raw.iar0", "vsetiar.raw.iar1"),  # no load or store that uses these index registers is known
    }
)
_LOADS = ("vld", "vld.bf16", "vld.sshfl")
# Why the compiler's check of a transfer halts: the address of one end by its name, both memories, and that end's; or
# which end it is, by number. And the line.
_BOUNDS = re.compile(r"^BoundsCheck \d+ deref of (s\d+) for .*?\bdma\.(\w+?)_to_(\w+).*?\b(\w+) \1\b")
_BOUNDS_OF_END = re.compile(r"^BoundsCheck \d+ deref of opnd ([01]) for dma\.(\w+?)_to_(\w+)")
_LINE = re.compile(r"([\w.-]+\.py) :(\d+)")
_STORED = re.compile(r"(?:vm=(%\w+),\s*)?vst_source=(\S+)")


@dataclasses.dataclass
class Slot:
    """One instruction, translated.

    Attributes:
      compute: returns what goes into `register`; None for none.
      effect: what else happens.
      register: where the result goes.
      value: its name.
      renames: "at once" or "then", if it only gives another name to what its register holds.
      sources: of these, the names before.
    """

    compute: Get | None = None
    effect: Callable[[], None] | None = None
    register: str = ""
    value: str = ""
    renames: str = ""
    sources: frozenset[str] = frozenset()


class Translator:
    """Instructions as functions, with the units whose results wait until they are popped.

    Attributes:
      registers: what each holds.
    """

    def __init__(
        self,
        bundles: Sequence[Bundle],
        registers: Registers,
        memory: Memory,
        transfers: Transfers,
        *,
        operands: Callable[[Instruction], Get],
        generation: int,
        eup_error: float = 0.0,
        calls: Call | None = None,
        jump: Callable[[int], None],
    ) -> None:
        """Takes the kernel and what it reaches, see `Machine`, and what a branch that is taken calls."""
        self.registers = registers
        self._memory = memory
        self._transfers = transfers
        self._operands = operands
        self._calls = calls
        self._jump = jump
        self._bundles = bundles
        self._started: dict[int, int] = {}  # the bundle of the last transfer to each semaphore
        self._pointers = pointers_in(bundles)
        self._units = Units(registers, generation=generation, eup_error=eup_error)
        self._semaphores_read: collections.deque[int] = collections.deque()
        self._divisions: collections.deque[int] = collections.deque()
        self._to_scalars: collections.deque[int] = collections.deque()

    def slot(self, instruction: Instruction) -> Slot:
        """Translates an instruction.

        Raises:
          UnknownFormError: if its meaning is not settled.
        """
        opcode = known_name(instruction.opcode)
        if (target := instruction.target) is not None:
            return Slot(effect=self._where(instruction.predicate, lambda: self._jump(target)))
        if opcode.startswith(_RENAMES):
            return self._renamed(opcode, instruction)
        if opcode in _NOTHING:
            return Slot()
        effect = self._effect(opcode, instruction)
        if effect is not None:
            return Slot(effect=self._where(instruction.predicate, effect))
        compute = self._value(opcode, instruction)
        if compute is None:
            raise UnknownFormError(f"opcode {opcode!r} with {', '.join(instruction.operands)!r}")
        if not instruction.register:
            raise UnknownFormError(f"{opcode} without a register for its result")
        otherwise: Get = lambda: NOT_WRITTEN  # noqa: E731
        if instruction.otherwise.rpartition("_")[2] == instruction.register:
            otherwise = lambda: RENAMED_ONLY  # noqa: E731 its register has both names then
        elif instruction.otherwise:
            is_scalar = instruction.register.startswith(("s", "p"))
            read = self.registers.scalar if is_scalar else self.registers.vector
            otherwise = read(instruction.otherwise)
        if instruction.predicate is not None:
            compute = self._either(instruction.predicate, compute, otherwise)
        return Slot(compute, register=instruction.register, value=instruction.value)

    def _renamed(self, opcode: str, instruction: Instruction) -> Slot:
        """Gives a value another name. A value of a loop has one register; a pointer may get its own."""
        places = {operand.strip().rpartition("_")[2] for operand in instruction.operands}
        if opcode.endswith("phi") and places != {instruction.register}:
            raise UnknownFormError(f"{opcode} of {', '.join(instruction.operands)!r} in {instruction.register}")
        if places == {instruction.register}:
            when = "at once" if opcode.endswith("phi") else "then"
            sources = frozenset(operand.strip().strip("%").rpartition("_")[0] for operand in instruction.operands)
            return Slot(register=instruction.register, value=instruction.value, renames=when, sources=sources)
        (operand,) = instruction.operands
        read = self.registers.scalar(operand)
        return Slot(read, register=instruction.register, value=instruction.value)

    def _holds(self, predicate: Predicate) -> Get:
        read, negated = self.registers.register(f"%{predicate.value}", "p"), predicate.negated
        return lambda: read() != negated

    def _where(self, predicate: Predicate | None, effect: Callable[[], None]) -> Callable[[], None]:
        if predicate is None:
            return effect
        holds = self._holds(predicate)

        def predicated() -> None:
            if holds():
                effect()

        return predicated

    def _either(self, predicate: Predicate, compute: Get, otherwise: Get) -> Get:
        holds = self._holds(predicate)
        return lambda: compute() if holds() else otherwise()

    def _effect(self, opcode: str, instruction: Instruction) -> Callable[[], None] | None:
        """Returns what an instruction without a result does; None for others."""
        if opcode.startswith("dma.") and opcode != "dma.done.wait":
            return self._transfer(opcode, instruction)
        name = opcode.partition(".")[0]
        if opcode in ("vst", "vst.msk", "vst.sshfl"):
            return self._store(instruction)
        found = _EFFECTS.get(opcode) or _EFFECTS.get(name)
        if found is not None:
            return found(self, opcode, instruction)
        return self._units.effect(opcode, instruction)

    def _value(self, opcode: str, instruction: Instruction) -> Get | None:
        """Returns what computes an instruction's result; None where nobody knows."""
        registers, name = self.registers, opcode.partition(".")[0]
        if opcode in vector_unit.FUNCTIONS:
            return self._computed(vector_unit.FUNCTIONS[opcode], instruction)
        if opcode in vector_unit.MASKS and not (opcode == "vmmov" and not instruction.operands[0].startswith("%")):
            function, masks = vector_unit.MASKS[opcode], [registers.mask(x) for x in instruction.operands]
            return lambda: function(*(mask() for mask in masks))
        if opcode in vector_unit.TESTS:
            function = vector_unit.TESTS[opcode]
            operands = registers.vectors(instruction, len(instruction.operands))
            return lambda: function(*(operand() for operand in operands))
        found = _VALUES.get(opcode) or _VALUES.get(name)
        if found is not None:
            return found(self, opcode, instruction)
        if opcode.startswith(("vpop.", "vmovacc.")):
            return self._units.popped(opcode, instruction)
        if opcode.startswith(("s", "p", "core_id", "reloc")):
            return self._scalar(opcode, instruction)
        return None

    def _computed(self, function: Callable[..., Any], instruction: Instruction) -> Get:
        if len(instruction.operands) == 2:
            a, b = self.registers.vectors(instruction, 2)
            return lambda: whole(function(a(), b()))
        (operand,) = self.registers.vectors(instruction, 1)
        return lambda: whole(function(operand()))

    def _scalar(self, opcode: str, instruction: Instruction) -> Get | None:
        labels = ("predicate", "on_true", "on_false") if opcode == "scalar_select" else [""] * len(instruction.operands)
        function = function_of(opcode)
        if function is None:
            return None
        operands = [self.registers.scalar(operand) for operand in labelled(instruction, *labels)]

        def compute() -> Any:
            result = function(*(operand() for operand in operands))
            if isinstance(result, Unknown):
                raise UnknownFormError(f"{opcode} of {', '.join(str(operand()) for operand in operands)}")
            return result

        return compute

    # Memory and transfers.

    def _load(self, opcode: str, instruction: Instruction) -> Get:
        (text,) = labelled(instruction, "")
        place = self.registers.address(text)
        if opcode not in _LOADS or place.rest or bool(place.pattern) != opcode.endswith("sshfl"):
            raise UnknownFormError(f"{opcode} with {text!r}")
        memory = self._memory
        if opcode == "vld.bf16":
            return lambda: vector_unit.only_bfloat16(memory.load(place))
        return lambda: memory.load(place)

    def _store(self, instruction: Instruction) -> Callable[[], None]:
        place = self.registers.address(", ".join(instruction.operands))
        found = _STORED.fullmatch(place.rest)
        is_masked, is_shuffled = instruction.opcode == "vst.msk", instruction.opcode == "vst.sshfl"
        if found is None or (found[1] is not None) != is_masked or bool(place.pattern) != is_shuffled:
            raise UnknownFormError(f"{instruction.opcode} with {place.rest!r}")
        mask = None if found[1] is None else self.registers.mask(found[1])
        vector, memory = self.registers.vector(found[2]), self._memory
        return lambda: memory.store(place, None if mask is None else mask(), vector())

    def _transfer(self, opcode: str, instruction: Instruction) -> Callable[[], None]:
        scalar, transfers, transfer = self.registers.scalar, self._transfers, transfer_of(instruction, self._pointers)
        if not set(transfer.spaces) <= {"hbm", "vmem", "smem"}:
            raise UnknownFormError(f"{opcode} between {' and '.join(map(repr, transfer.spaces))}")
        read, of_level = [scalar(text) for text in transfer[1:5]], [scalar(text) for text in transfer.strides]
        strides: Callable[[], list[tuple[int, int, int]]] = list
        if transfer.table:
            table = scalar(transfer.table, "smem")
            strides = lambda: self._levels(table())  # noqa: E731
        elif of_level:
            strides = lambda: [(of_level[0](), of_level[1](), of_level[2]())]  # noqa: E731

        def effect() -> None:
            granules, at, to, semaphore = (one() for one in read)
            self._started[semaphore] = self._memory.bundle
            transfers.start(transfer.spaces, granules, at, to, semaphore, strides(), is_of_window=transfer.is_of_window)

        return effect

    def not_awaited(self) -> str:
        """Says which bundles started the last transfers to semaphores that are not 0; "" for none."""
        held = [at for semaphore, at in self._started.items() if self._memory.semaphores[semaphore]]
        where = " or ".join(place_of(self._bundles[at]) for at in dict.fromkeys(held))
        return f": nothing waits for a transfer that bundle {where} starts" if held else ""

    def _levels(self, table: int) -> list[tuple[int, int, int]]:
        """Reads strides from scalar memory: for each level those of source and destination, and a count.

        Nothing is written to the table of a transfer that is one piece at both ends.
        """
        words = self._memory.written_words(table, 9)
        if len(words) % 3:
            raise MachineFaultError(f"a table of strides with {len(words)} words")
        return [(words[at], words[at + 1], words[at + 2]) for at in range(0, len(words), 3)]


# Instructions by opcode, or by what is before its first point: each returns what happens, or what computes the result.


def _wait(core: Translator, _: str, instruction: Instruction) -> Callable[[], None]:
    semaphore, amount = (core.registers.scalar(x, "sflag") for x in labelled(instruction, "", ""))
    for_transfer = instruction.opcode == "dma.done.wait"
    return lambda: core._transfers.wait(semaphore(), amount(), for_transfer=for_transfer)


def _signal(core: Translator, _: str, instruction: Instruction) -> Callable[[], None]:
    semaphore, amount = (core.registers.scalar(x, "sflag") for x in labelled(instruction, "", ""))

    def add() -> None:
        core._memory.semaphores[semaphore()] += wrapped(amount())

    return add


def _set_semaphore(core: Translator, _: str, instruction: Instruction) -> Callable[[], None]:
    """Sets a semaphore to 0 where a kernel begins; where it ends, checks that it is left so."""
    semaphore, at_end = (core.registers.scalar(x, "sflag") for x in labelled(instruction, "", ""))

    def set_or_check() -> None:
        held = core._memory.semaphores[semaphore()]
        if at_end() and held:
            holds = core._transfers.in_words(semaphore(), held)
            raise MachineFaultError(f"a semaphore holds {holds} when the kernel ends{core.not_awaited()}")
        core._transfers.clear(semaphore())

    return set_or_check


def _read_semaphore(core: Translator, _: str, instruction: Instruction) -> Callable[[], None]:
    (semaphore,) = (core.registers.scalar(x, "sflag") for x in labelled(instruction, ""))
    return lambda: core._semaphores_read.append(core._memory.semaphores[semaphore()])


def _halt(core: Translator, _: str, instruction: Instruction) -> Callable[[], None]:
    reason = instruction.operands[0].removeprefix("reason=") if instruction.operands else "it gives no reason"

    def halt() -> None:
        left = core.not_awaited() if reason.startswith("Semaphore") else ""
        why = f"{reason.rstrip('.')}{left}" if left else _beyond(core, reason) or reason
        raise MachineFaultError(f"a check that the compiler has put in fails: {why}")

    return halt


def _beyond(core: Translator, reason: str) -> str:
    """Says which memory a transfer would have left; "" where the compiler halts for another reason."""
    address = None
    if bounds := _BOUNDS.search(reason):
        name, source, destination, space = bounds.groups()
        reads, address = space == source, core.registers.named(name)
    elif bounds := _BOUNDS_OF_END.search(reason):
        reads, source, destination = bounds[1] == "0", bounds[2], bounds[3]
        space = source if reads else destination
    else:
        return ""
    line = _LINE.search(reason)
    route = f"a transfer from {source} to {destination}{f' ({line[1]}:{line[2]})' if line else ''}"
    where = "" if address is None else core._memory.around(space, address)
    return f"{route} {'reads' if reads else 'writes'} {where or f'beyond its operand in {space}'}"


def _store_scalar(core: Translator, _: str, instruction: Instruction) -> Callable[[], None]:
    address, word = labelled(instruction, "", "")
    at, value = core.registers.scalar(address, "smem"), core.registers.scalar(word)
    return lambda: core._memory.store_scalar(at(), int(value()))


def _divide(core: Translator, opcode: str, instruction: Instruction) -> Callable[[], None]:
    dividend, divisor = (core.registers.scalar(x) for x in instruction.operands[:2])
    wanted = instruction.operands[2:]
    return lambda: core._divisions.extend(divided(opcode, dividend(), divisor(), *wanted))


def _push_scalar(core: Translator, _: str, instruction: Instruction) -> Callable[[], None]:
    (vector,) = core.registers.vectors(instruction, 1)
    return lambda: core._to_scalars.append(int(whole(vector())[0, 0].view(np.int32)))


def _load_scalar(core: Translator, _: str, instruction: Instruction) -> Get:
    address = core.registers.scalar(labelled(instruction, "")[0], "smem")
    return lambda: core._memory.load_scalar(address())


def _operand(core: Translator, _: str, instruction: Instruction) -> Get:
    return core._operands(instruction)


def _call(core: Translator, opcode: str, instruction: Instruction) -> Callable[[], None]:
    if core._calls is None:
        raise UnknownFormError(f"{opcode} of {instruction.callee!r}")
    return core._calls(instruction)


def _spread(core: Translator, _: str, instruction: Instruction) -> Get:
    scalar = core.registers.vector(labelled(instruction, "")[0])
    return lambda: np.full((SUBLANES, LANES), scalar(), np.uint32)


def _constant(vector: np.ndarray) -> Get:
    return lambda: vector


def _rectangle(_: Translator, __: str, instruction: Instruction) -> Get:
    return _constant(vector_unit.rectangle(bits_of(labelled(instruction, "")[0])))


def _bytes(_: Translator, opcode: str, instruction: Instruction) -> Get:
    if opcode != "vsmask.f32":
        raise UnknownFormError(f"opcode {opcode!r}")
    return _constant(vector_unit.bytes_of_sublanes(bits_of(labelled(instruction, "")[0])))


def _positions(_: Translator, __: str, instruction: Instruction) -> Get:
    labelled(instruction)
    return _constant((LANE + np.uint32(LANES) * SUBLANE).astype(np.uint32))


def _constant_mask(_: Translator, __: str, instruction: Instruction) -> Get:
    return _constant(np.full((SUBLANES, LANES), bits_of(labelled(instruction, "")[0]) != 0))


def _select(core: Translator, _: str, instruction: Instruction) -> Get:
    mask, on_true, on_false = labelled(instruction, "vm", "on_true_vy", "on_false_vx")
    read, yes, no = core.registers.mask(mask), core.registers.vector(on_true), core.registers.vector(on_false)
    return lambda: vector_unit.selected(read(), yes(), no())


def _upper_half(core: Translator, __: str, instruction: Instruction) -> Get:
    # The lower half, which another instruction has computed, adds nothing.
    a, b, *_ = map(core.registers.vector, labelled(instruction, "lhs_vy", "rhs_vx", "low"))
    return lambda: vector_unit.upper_half(a(), b())


def _clamp(core: Translator, opcode: str, instruction: Instruction) -> Get:
    """Bounds float32 by two whole numbers."""
    operand, *limits = labelled(instruction, "", "", "")
    if not all(re.fullmatch(r"-?\d+", limit.strip()) for limit in limits):
        raise UnknownFormError(f"{opcode} to {' and '.join(limits)}")
    vector, (least, most) = core.registers.vector(operand), map(np.float32, limits)
    return lambda: np.clip(whole(vector()).view(np.float32), least, most).view(np.uint32)


def _pack_floats(core: Translator, opcode: str, instruction: Instruction) -> Get:
    first, second, descriptor = labelled(instruction, "vx", "vy", "cvtdesc")
    dtype = packing.DESCRIBED.get(descriptor)
    if dtype is None:
        raise UnknownFormError(f"{opcode} with {descriptor}")
    a, b = core.registers.vector(first), core.registers.vector(second)
    return lambda: packing.packed_float32(dtype, a(), b())


def _compare(core: Translator, opcode: str, instruction: Instruction) -> Get:
    _, relation, dtype, *order = opcode.split(".")
    function = vector_unit.comparison(relation, dtype)
    if function is None or order not in (["totalorder"], ["partialorder"]):
        raise UnknownFormError(f"opcode {opcode!r}")
    a, b = core.registers.vectors(instruction, 2)
    return lambda: function(a(), b())


def _pop_scalar(core: Translator, opcode: str, instruction: Instruction) -> Get:
    queue = core._divisions if opcode == "spop.drf" else core._to_scalars
    return lambda: next_of(queue)


def _pop_semaphore(core: Translator, _: str, __: Instruction) -> Get:
    return lambda: next_of(core._semaphores_read)


_EFFECTS: Mapping[str, Callable[[Translator, str, Instruction], Callable[[], None]]] = {
    "inlined_call": _call,
    "dma.done.wait": _wait,
    "vwait.ge": _wait,
    "vwait.ge.trace": _wait,
    "vsyncadd": _signal,
    "vsyncpa": _set_semaphore,
    "vsyncmov": _read_semaphore,
    "shalt.err": _halt,
    "sst": _store_scalar,
    "sdivrem": _divide,
    "vpush": _push_scalar,
}
_VALUES: Mapping[str, Callable[[Translator, str, Instruction], Get]] = {
    "inlined_call_operand": _operand,
    "scalar_parameter_address": _operand,
    "sld": _load_scalar,
    "spop": _pop_scalar,
    "vpop.sfrf": _pop_semaphore,
    "vld": Translator._load,
    "vstv": _spread,
    "vcmask": _rectangle,
    "vsmask": _bytes,
    "vlaneseq": _positions,
    "vmmov": _constant_mask,
    "vsel": _select,
    "vmul.u32.u64.high": _upper_half,
    "vcmp": _compare,
    "vclampa.f32": _clamp,
    "vpack.c.f32.eXmY": _pack_floats,
}
