"""Work that a TensorCore hands to its SparseCores: copies that transpose, gathers and sums by rows, on a v7x.

Their programs are not replayed. But what they take and make moves through the chip's HBM, so they need at least the
time for that, from where the TensorCore starts them on, and it waits for them where it needs what they make.
"""

import re
from collections.abc import Mapping

from lowering.tpu_core.dumps import Dumps
from lowering.tpu_core.layouts import size_bytes

_THREAD = 'async_execution_thread="sparsecore"'
_ARRAY = re.compile(r"[a-z]+\d*\w*\[[\d,]*\](?:\{[^}]*\})?")


def bound(dumps: Dumps, cycles_of: Mapping[str, float], hbm_bytes_per_cycle: float) -> tuple[float, float, int]:
    """Walks through the program in the order in which it is scheduled.

    Args:
      dumps: of the program.
      cycles_of: for how long each instruction of the TensorCore runs in all, by its name.
      hbm_bytes_per_cycle: the bandwidth of HBM; SparseCores are taken to get all of it.

    Returns:
      For how many cycles the program runs at least, for how many of them the TensorCore waits, and the bytes that
      SparseCores move.
    """
    now = waited = free_at = 0.0
    moved_bytes = 0
    done_at: dict[str, float] = {}
    for name in dumps.computations[""]:
        instruction = dumps.instructions[name]
        if _THREAD in instruction.text and instruction.opcode.endswith("-start"):
            size = _moved_bytes(dumps, name)
            free_at = max(now, free_at) + size / hbm_bytes_per_cycle
            done_at[name] = free_at
            moved_bytes += size
        elif instruction.opcode.endswith("-done") and instruction.operands[:1] and instruction.operands[0] in done_at:
            late = max(done_at[instruction.operands[0]] - now, 0.0)
            now, waited = now + late, waited + late
        now += _cycles(dumps, name, cycles_of)
    return now, waited, moved_bytes


def _cycles(dumps: Dumps, name: str, cycles_of: Mapping[str, float]) -> float:
    """Returns for how long an instruction runs, or all turns of a loop."""
    body = dumps.instructions[name].body
    repeated = dumps.computations.get(body, []) if body else []
    return cycles_of.get(name, 0.0) + sum(_cycles(dumps, inner, cycles_of) for inner in repeated)


def _moved_bytes(dumps: Dumps, start: str) -> int:
    """Counts what is written, and what is read for it at least: no more of the operands than there is of results."""
    taken = sum(_bytes(operand_type) for operand_type in dumps.operand_types(start).values())
    made = sum(_bytes(one.type) for one in dumps.instructions.values() if one.operands == (start,))
    return made + min(made, taken)


def _bytes(types: str) -> int:
    return sum(map(size_bytes, _ARRAY.findall(types)))
