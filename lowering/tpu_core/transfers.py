"""Instructions that start transfers between memories."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lowering.tpu_core.bundles import Bundle, Instruction
from lowering.tpu_core.faults import UnknownFormError
from lowering.tpu_core.operands import fields_of

_POINTERS = ("int_to_ptr.", "scalar_lea.", "inlined_call_operand.")
_GENERAL = {
    **dict.fromkeys(("src", "size_in_granules", "dst", "dst_syncflagno", "stridedescaddr"), True),
    **dict.fromkeys(("src_syncflagno", "overrides", "dst_syncflagno_1"), False),
}
_TO_HOST = ("src_address", "size_in_granules", "host_iova_low", "host_iova_high", "dst_syncflagno")
_WINDOW = "of_window"
_STRIDES = ("src_stride", "dst_stride", "steps_per_stride")


class Transfer(NamedTuple):
    """Operands of an instruction that starts a transfer.

    Attributes:
      spaces: from which memory to which; "" for one that is not known.
      granules: how many.
      source: where they are.
      destination: where they go.
      semaphore: to which they are added when they have arrived.
      strides: of source and destination, and how many times 512 bytes follow one another; empty for one piece.
      table: where in scalar memory the strides of several levels are; "" if they are nowhere.
      is_of_window: whether Pallas' pipeline sends a block of an output by it.
    """

    spaces: tuple[str, str]
    granules: str
    source: str
    destination: str
    semaphore: str
    strides: tuple[str, ...] = ()
    table: str = ""
    is_of_window: bool = False


def transfer_of(instruction: Instruction, pointers: Mapping[str, str]) -> Transfer:
    """Reads an instruction that starts a transfer; `pointers` is what `pointers_in` gives.

    Raises:
      UnknownFormError: if it has another form than those that are known.
    """
    if instruction.opcode == "dma.general":
        named = fields_of(instruction, _GENERAL)
        source, destination, table = named["src"], named["dst"], named["stridedescaddr"]
        ends = [pointers.get(end.strip("%").partition("_")[0], "") for end in (source, destination)]
    elif instruction.opcode == "dma.smem_to_host_iova":
        named, table = fields_of(instruction, dict.fromkeys(_TO_HOST, True)), ""
        source, destination, ends = named["src_address"], named["host_iova_low"], ["smem", "host"]
    else:
        ends, table = instruction.opcode.removeprefix("dma.").split("_to_"), ""
        labels = [operand.partition("=")[0] for operand in instruction.operands]
        known = dict.fromkeys((*labels[:1], "size_in_granules", *labels[2:3], "dst_syncflagno"), True)
        named = fields_of(instruction, known | dict.fromkeys((*_STRIDES, _WINDOW), False))
        if [label.partition("_")[0] for label in (labels[0], labels[2])] != ends:
            raise UnknownFormError(f"{instruction.opcode} with {', '.join(instruction.operands)!r}")
        source, destination = named[labels[0]], named[labels[2]]
    strides = tuple(named[name] for name in _STRIDES) if "steps_per_stride" in named else ()
    of_both = named["size_in_granules"], source, destination, named["dst_syncflagno"]
    return Transfer((ends[0], ends[1]), *of_both, strides, table, _WINDOW in named)


def pointers_in(bundles: Sequence[Bundle]) -> Mapping[str, str]:
    """Returns the memory that each pointer is to, by the name of its value."""
    return {
        instruction.value: instruction.opcode.rpartition(".")[2]
        for bundle in bundles
        for instruction in bundle.instructions
        if instruction.opcode.startswith(_POINTERS)
    }
