"""Values of --scalars for the operands that schedules depend on."""

import re
from collections.abc import Sequence

import numpy as np

from jaxops_command.options import CommandError, scalar_words, shortened


def scalars_of(given: Sequence[str]) -> dict[str, dict[int, np.ndarray]]:
    """Reads KERNEL:POSITION=1,2,3 and KERNEL:POSITION=FILE.npy options into nested dictionaries."""
    operands: dict[str, dict[int, np.ndarray]] = {}
    for text in given:
        kernel, position, numbers = scalar_words(text)
        operands.setdefault(kernel, {})[position] = _integers(numbers)
    return operands


def _integers(text: str) -> np.ndarray:
    if re.fullmatch(r"-?\d+(,-?\d+)*", text):
        numbers = [int(number) for number in text.split(",")]
        return np.array(numbers if len(numbers) > 1 else numbers[0])
    try:
        return np.load(text)
    except (OSError, ValueError, EOFError):
        raise CommandError(f"--scalars must name integers or a file of NumPy's; got {shortened(repr(text))}") from None
