"""The tests that `--emulate` names: they exist, which only CI's last steps would notice otherwise."""

import subprocess
import sys
from pathlib import Path

import emulated_kernels
import pytest

FILES = [
    str(file) for file in sorted(Path(__file__).parents[1].glob("*/test_*.py")) if "mark.emulated" in file.read_text()
]


@pytest.mark.long
def test_interpreter_with_other_orders_finds_its_tests() -> None:
    collected = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", "--emulate", "at-once", *FILES],
        capture_output=True,
        text=True,
    )
    assert collected.returncode == 0, collected.stdout
    found = {line.split("::")[1] for line in collected.stdout.splitlines() if "::" in line}
    assert found == emulated_kernels.OF_SEVERAL_BLOCKS
