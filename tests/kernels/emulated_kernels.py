"""Runs the interpreter's tests of TPU kernels on compiled code: `pytest --emulate tpu-v5e -n 2 tests`.

Each kernel that a test interprets is compiled for the chip instead, and executed as `lowering.emulate` does, with
transfers in three orders and a NaN where nobody has written. A test fails if that shows anything.
"""

import collections
import datetime
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import pallas as pl

from lowering.emulation.emulator import Emulator
from lowering.targets import named

_pallas_call = pl.pallas_call
_emulators: list[Emulator] = []


def install(chip: str) -> None:
    """Lets an emulated chip take the place of Pallas' interpreter of TPU kernels."""

    def pallas_call(kernel: Any, *args: Any, interpret: Any = False, **params: Any) -> Any:
        if not interpret:
            return _pallas_call(kernel, *args, interpret=interpret, **params)
        emulator = Emulator(named(chip), checks=True)
        _emulators.append(emulator)
        emulated = emulator.emulated(_pallas_call(kernel, *args, interpret=False, **params))

        def call(*operands: Any) -> Any:
            # Traced by itself, so that JAX keeps what the kernel is compiled to.
            return emulated(*operands)

        return call

    pl.pallas_call = pallas_call


def take() -> tuple[list[Any], list[Any]]:
    """Returns the kernels that have run since the last time, and what was found."""
    jax.effects_barrier()
    kernels = [kernel for emulator in _emulators for kernel in emulator.kernels()]
    findings = [finding for emulator in _emulators for finding in emulator.findings()]
    _emulators.clear()
    return kernels, findings


class Coverage:
    """Counts how much of each kernel's code was executed, over all cases."""

    def __init__(self) -> None:
        self._kernels: dict[str, list[Any]] = collections.defaultdict(list)

    def add(self, kernels: list[Any]) -> None:
        """Adds kernels that have run."""
        for kernel in kernels:
            self._kernels[kernel.name.rpartition(".")[0]].append(kernel)

    def write(self, path: Path, chip: str) -> None:
        """Adds the counts to a file, by kernel and chip."""
        record = json.loads(path.read_text()) if path.exists() else {"kernels": {}}
        record |= {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "jax": jax.__version__}
        known = record["kernels"]
        for name, kernels in sorted(self._kernels.items()):
            known.setdefault(name, {})[chip] = {
                "cases": len(kernels),
                "bundles": sum(kernel.bundles for kernel in kernels),
                "coverage": round(float(np.mean([kernel.coverage for kernel in kernels])), 3),
                "least coverage": round(min(kernel.coverage for kernel in kernels), 3),
            }
        path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
