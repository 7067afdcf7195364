"""Calls of one compiled kernel: its operands are laid out in memory, it is executed, and its results are read."""

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from lowering.describe import counted
from lowering.emulation.in_flight import Meeting
from lowering.emulation.machine import Machine
from lowering.emulation.memory import Memory
from lowering.emulation.registers import Get
from lowering.emulation.transfers import Transfers
from lowering.tpu_core.bundles import Bundle, Instruction, read_bundles
from lowering.tpu_core.dumps import Dumps
from lowering.tpu_core.faults import UnknownFormError
from lowering.tpu_core.layouts import PADDING, places_of
from lowering.tpu_core.scalar_memory import wrapped

_ALLOCATION = re.compile(r"#(allocation\d+) \[shape = '([^']*)', space=(\w+), size = (0x[0-9a-f]+)")
_IN_VMEM = re.compile(r"\[vmem:\[#(allocation\d+)\b")
_OF_ITS_SHAPE = (1 << 64) - 1  # the size of what a whole program allocates
OPERAND = re.compile(
    r"(<no memory space> )?\[shape: [^\]]*\], index: (\d+), kind: (input|output), shape index: \{(\d*)\}"
    r"(?:, may-alias: \{[\d,]*\})?\]"
)
ARRAY_TYPE = re.compile(r"[a-z]+\d*\w*\[[\d,]*\](?:\{[^}]*\})?")
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}")
_SPILL_BYTES, _UNKNOWN_BYTES = 4096, 1 << 20
_GENERATION = re.compile(r"tpu-v(\d+)")
POISONS = (0xFFC0DEAD, 0x7F7F1234)  # a NaN, and a large number


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A compiled kernel.

    Attributes:
      name: of the instruction in the program.
      bundles: its code.
      allocations: the memory and the bytes of each of its allocations, by name.
      operands: the types of what it takes, as in the compiled program.
      results: the types of what it returns.
      aliases: the operands in whose memory results lie, by the position of the result.
      generation: of the chip.
      granules_of_pointer: the unit of its pointers to HBM.
    """

    name: str
    bundles: tuple[Bundle, ...]
    allocations: Mapping[str, tuple[str, int]]
    operands: tuple[str, ...]
    results: tuple[str, ...]
    aliases: Mapping[int, int]
    generation: int
    granules_of_pointer: int

    @classmethod
    def of(cls, dumps: Dumps, name: str, target: str) -> "Kernel":
        """Reads a kernel from what the compiler has written for a target."""
        code = dumps.name_of(name)
        assert code is not None, name
        instruction, text = dumps.instructions[name], dumps.text(code)
        types = dumps.operand_types(name)
        _, _, aliasing = instruction.text.partition("output_to_operand_aliasing={")
        return cls(
            name,
            read_bundles(text, vectors=True, is_kernel=True),
            allocations_of(dumps.allocations(code), text),
            tuple(types[position] for position in sorted(types)),
            tuple(ARRAY_TYPE.findall(re.sub(r"/\*.*?\*/", "", instruction.type))),
            {int(one[1] or 0): int(one[2]) for one in _ALIAS.finditer(aliasing.partition("}}")[0] + "}")},
            generation_of(target),
            granules_of_pointer(target),
        )


def generation_of(target: str) -> int:
    """Returns the number in a chip's name."""
    found = _GENERATION.match(target)
    assert found is not None, target
    return int(found[1])


def granules_of_pointer(target: str) -> int:
    """Returns the unit of a chip's pointers to HBM."""
    return 16 if target == "tpu-v5e" else 1


def allocations_of(text: str, code: str) -> dict[str, tuple[str, int]]:
    """Reads the memory and the bytes of each allocation, by name; some that code has in vector memory nobody lists."""
    found = dict.fromkeys(_IN_VMEM.findall(code), ("vmem", _UNKNOWN_BYTES))
    for name, shape, space, size in _ALLOCATION.findall(text):
        size_bytes = int(size, 16)
        if size_bytes == _OF_ITS_SHAPE:  # nothing, for a type that is not one array's
            size_bytes = 4 * _words_for(shape) if ARRAY_TYPE.fullmatch(shape) else 0
        found[name] = space, size_bytes
    return found


class Allocations:
    """Addresses of what a part of a program allocates, by name."""

    def __init__(self, memory: Memory, sizes: Mapping[str, tuple[str, int]]) -> None:
        """Starts without any; each is made when it is first asked for."""
        self._memory = memory
        self._sizes = sizes
        self._places: dict[str, tuple[str, int]] = {}

    def address(self, name: str, space: str) -> int:
        """Returns the address of an allocation."""
        if name not in self._places:
            default = space or "smem", _SPILL_BYTES if "spill" in name else _UNKNOWN_BYTES
            known_space, size = self._sizes.get(name, default)
            self._places[name] = known_space, self._memory.allocate(name, known_space, size)
        return self._places[name][1]

    def place(self, name: str, space: str, address: int) -> None:
        """Says where an allocation lies that others have made."""
        self._places[name] = space, address

    def forget(self) -> None:
        """Takes everything in vector memory and HBM for not written, as where a part of a program begins anew."""
        for space, address in self._places.values():
            if space in ("vmem", "hbm"):
                self._memory.forget_all(space, address)


@dataclasses.dataclass(frozen=True)
class Execution:
    """One execution of a kernel.

    Attributes:
      results: its results, in order.
      issues: how often each bundle was issued.
      clobbered: reads of registers that held other values than the compiler meant.
      unwritten: bundles that loaded scalars, or vectors with a word in them, that nobody had written, and how often.
      sent_unwritten: bundles that started transfers of such words from vector memory to HBM, and how often.
      starts: the bundle that started each transfer.
      meetings: transfers that were in flight together where one wrote bytes that they share; if these were looked for.
      most_on_one_semaphore: how many transfers of a semaphore were under way at a time, at most; if that was looked at.
      left_over: what was not as it must be at the end.
    """

    results: tuple[np.ndarray, ...]
    issues: tuple[int, ...]
    clobbered: tuple[str, ...]
    unwritten: Mapping[int, int]
    sent_unwritten: Mapping[int, int]
    starts: tuple[int, ...]
    meetings: tuple[Meeting, ...]
    most_on_one_semaphore: int
    left_over: tuple[str, ...]


class _Call:
    """The memory of one call, and where its operands and results lie in it."""

    def __init__(self, kernel: Kernel, operands: Sequence[np.ndarray], poison: int) -> None:
        self._kernel = kernel
        self._arrays = operands
        self._poison = poison
        self._places: dict[tuple[str, int], tuple[str, int]] = {}
        of_chip = {"granules_of_pointer": kernel.granules_of_pointer}
        self.memory = Memory(poison=poison, forgets=poison != POISONS[0], **of_chip)
        self._allocations = Allocations(self.memory, kernel.allocations)

    def machine(self, transfers: Transfers, **options: Any) -> Machine:
        """Returns the machine that executes it."""
        return Machine(
            self._kernel.bundles,
            self.memory,
            transfers,
            addresses=self._allocations.address,
            operands=self.operand,
            generation=self._kernel.generation,
            **options,
        )

    def operand(self, declaration: Instruction) -> Get:
        """Returns what gets the address of an operand or a result; or its value, if it lies in no memory."""
        value = self._operand(declaration)
        return lambda: value

    def _operand(self, declaration: Instruction) -> int:
        space = declaration.opcode.partition(".")[2]
        found = OPERAND.fullmatch(", ".join(declaration.operands))
        if found is None:
            raise UnknownFormError(f"{declaration.opcode} with {', '.join(declaration.operands)!r}")
        position, is_input = int(found[2]), found[3] == "input"
        if is_input:
            array, array_type = self._arrays[position], self._kernel.operands[position]
            if found[1]:
                return wrapped(int.from_bytes(np.asarray(array).reshape(-1)[:1].tobytes(), "little"))
            return self._placed(("operand", position), space, array_type, array)
        number = int(found[4]) if found[4] else position - len(self._kernel.operands)
        if number in self._kernel.aliases:
            shared = self._kernel.aliases[number]
            address = self._placed(("operand", shared), space, self._kernel.operands[shared], self._arrays[shared])
            self._places["result", number] = space, address
            return address
        return self._placed(("result", number), space, self._kernel.results[number], None)

    def _placed(self, key: tuple[str, int], space: str, array_type: str, array: np.ndarray | None) -> int:
        if key in self._places:
            return self._places[key][1]
        address = placed(self.memory, f"{key[0]} {key[1]}", space, array_type, array, self._poison)
        self._places[key] = space, address
        return address

    def result(self, number: int, like: Any) -> np.ndarray:
        """Reads a result."""
        if ("result", number) not in self._places:
            return np.full(like.shape, np.array(self._poison, np.uint32).view(np.int32), like.dtype)
        return read_back(self.memory, *self._places["result", number], self._kernel.results[number], like)


def unsettled(kernel: Kernel, numbers: Sequence[int]) -> list[str]:
    """Lists the instructions in these bundles whose meaning is not settled."""
    call = _Call(kernel, [], POISONS[0])
    return call.machine(Transfers(call.memory, Transfers.ORDERS[0])).unsettled(numbers)


def placed(memory: Memory, name: str, space: str, array_type: str, array: np.ndarray | None, poison: int) -> int:
    """Allocates an array as its type lays it out, and writes its elements if there are any; returns its address."""
    address = memory.allocate(name, space, 4 * _words_for(array_type))
    if array is not None:
        bits, _, places = places_of(array_type)
        words, is_written = words_of(array, bits, places, poison)
        if space == "smem":
            memory.write(space, address, words, is_written)
        else:
            to, flags = memory.words_of(space, address)
            to[: len(words)], flags[: len(words)] = words, is_written
    return address


def read_back(memory: Memory, space: str, address: int, array_type: str, like: Any) -> np.ndarray:
    """Reads an array that lies at an address as its type says."""
    bits, _, places = places_of(array_type)
    count = -(-len(places) * bits // 32)
    if space == "smem":
        words = np.array([memory.load_scalar(address + at) for at in range(count)], np.int32).view(np.uint32)
    else:
        words = memory.words_of(space, address)[0][:count]
    return array_of(words, bits, places, like)


def _words_for(array_type: str) -> int:
    bits, _, places = places_of(array_type)
    return -(-len(places) * bits // 32)


def words_of(array: np.ndarray, bits: int, places: np.ndarray, poison: int) -> tuple[np.ndarray, np.ndarray]:
    """Lays an array out as words of 32 bits; returns which of them hold nothing but padding as not written."""
    if bits < 4:
        raise UnknownFormError(f"an operand with elements of {bits} bits")
    if array.dtype == bool:
        array = array.astype(f"i{bits // 8}")  # Pallas keeps booleans in words
    flat = np.ascontiguousarray(array).reshape(-1)
    unsigned = np.dtype(f"u{max(bits // 8, 1)}")
    elements = flat.view(unsigned)
    fill = np.array([poison], np.uint32).view(unsigned)[-1]
    laid_out = np.where(places == PADDING, fill, elements[np.maximum(places, 0)])
    missing = -len(laid_out) % (32 // bits)
    laid_out = np.concatenate([laid_out, np.full(missing, fill, unsigned)])
    if bits == 4:
        laid_out = laid_out[0::2] & 15 | laid_out[1::2] << 4
    is_element = np.concatenate([places != PADDING, np.zeros(missing, bool)])
    return laid_out.view(np.uint32), np.asarray(is_element.reshape(-1, 32 // bits).any(1))


def array_of(words: np.ndarray, bits: int, places: np.ndarray, like: Any) -> np.ndarray:
    """Reads an array of a shape and dtype from memory."""
    elements = words.view(np.dtype(f"u{max(bits // 8, 1)}"))
    if bits == 4:
        pairs = np.stack([elements & 15, elements >> 4], 1).reshape(-1)
        elements = (pairs ^ 8) - np.uint8(8) if np.issubdtype(like.dtype, np.signedinteger) else pairs
    elements = elements[: len(places)]
    is_element = places != PADDING
    flat = np.empty(int(np.prod(like.shape)), elements.dtype)
    flat[places[is_element]] = elements[is_element]
    return (flat != 0 if like.dtype == bool else flat.view(like.dtype)).reshape(like.shape)


def execute(
    kernel: Kernel,
    operands: Sequence[np.ndarray],
    results: Sequence[Any],
    *,
    order: str = Transfers.ORDERS[0],
    only: Collection[int] | None = None,
    poison: int = POISONS[0],
    checks: bool = False,
    eup_error: float = 0.0,
) -> Execution:
    """Executes a kernel.

    Args:
      kernel: the code.
      operands: what it takes.
      results: the shapes and dtypes of what it returns.
      order: of its transfers, one of `Transfers.ORDERS`.
      only: the numbers of the transfers that alone are in this order; None for all.
      poison: the bits of what nobody has written.
      checks: whether to follow which value each register holds, and which transfers meet.
      eup_error: the relative error of what the transcendental unit computes.

    Raises:
      UnknownFormError: at an instruction whose meaning is not settled.
      MachineFaultError: where the kernel does what no program may.
    """
    call = _Call(kernel, operands, poison)
    transfers = Transfers(call.memory, order, only, is_watched=checks)
    machine = call.machine(transfers, checks=checks, eup_error=eup_error)
    machine.run()
    return Execution(
        tuple(call.result(number, like) for number, like in enumerate(results)),
        tuple(machine.issues()),
        tuple(machine.registers.clobbered),
        dict(call.memory.unwritten),
        dict(call.memory.sent_unwritten),
        tuple(start.bundle for start in transfers.starts),
        () if transfers.in_flight is None else transfers.in_flight.meetings,
        0 if transfers.in_flight is None else transfers.in_flight.most_on_one_semaphore,
        left_over(call.memory, transfers),
    )


def left_over(memory: Memory, transfers: Transfers, but: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Says what is not as it must be at the end, but for what was said already."""
    waiting, held = transfers.finish(), sum(1 for amount in memory.semaphores.values() if amount)
    found = (
        f"{counted(waiting, 'transfer')} for which nothing waits" if waiting else "",
        f"{counted(held, 'semaphore')} not 0 at the end" if held else "",
    )
    return tuple(what for what in found if what and what not in but)
