"""Places of a program's results: those that overwrite donated arguments are taken to be in the same memory."""

from collections.abc import Mapping, Sequence

from lowering.schedule.data_hints import PROGRAM
from lowering.schedule.machine import PARAMETER
from lowering.tpu_core.bundles import Bundle, value_of
from lowering.tpu_core.scalar_memory import ScalarMemory
from lowering.tpu_core.unknown import Unknown


def place_results(memory: ScalarMemory, bundles: Sequence[Bundle], aliases: Mapping[int | None, int]) -> None:
    """Tells a top-level program that each aliased result is where its parameter is.

    The program compares the two addresses, and copies the parameter if they differ. The runtime hands it the address of
    its only result, or of a table in HBM of the addresses of all results.
    """
    word = _first_word_in_hbm(bundles)
    if word is None or not aliases:
        return
    places = {result: memory.address(PROGRAM, f"#{PARAMETER} {number}") for result, number in aliases.items()}
    at = memory.address(PROGRAM, word)
    of_many = {result: place for result, place in places.items() if result is not None}
    if not of_many:
        memory.store(at, places[None])
        return
    table = memory.address(PROGRAM, "#results") + 1  # no other address is odd, shifted or not
    memory.store(at, table)
    words = [of_many.get(result, Unknown()) for result in range(1 + max(of_many))]
    memory.hold(table, words, is_scalar=False)


def _first_word_in_hbm(bundles: Sequence[Bundle]) -> str | None:
    """Returns the name of the word from which the program takes the first pointer to HBM: that of its results."""
    loads = {x.value: x.operands[0] for bundle in bundles for x in bundle.instructions if x.opcode == "sld"}
    for bundle in bundles:
        for instruction in bundle.instructions:
            named = value_of(instruction.operands[0]) if instruction.opcode == "int_to_ptr.hbm" else None
            if named is not None and named[0] in loads:
                return loads[named[0]].removeprefix("[smem:[").removesuffix("]]")
    return None
