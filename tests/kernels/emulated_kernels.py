"""Runs the interpreter's tests of TPU kernels in another way: `pytest --emulate tpu-v5e -n 2 tests`.

Each kernel that a test interprets is compiled for the chip instead, and executed as `lowering.emulate` does, with
transfers in three orders and a NaN where nobody has written. A test fails if that shows anything.

With `--emulate two-cores` it is interpreted: by two cores, copies as late as somebody waits for them, and blocks that
may run in parallel in another order.
"""

import collections
import dataclasses
import datetime
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lowering.emulation.emulator import Emulator
from lowering.targets import named

TWO_CORES = "two-cores"
_OTHERWISE = {"dma_execution_mode": "on_wait", "random_seed": 2, "num_cores_or_threads": 2}
_pallas_call = pl.pallas_call
_emulators: list[Emulator] = []
_interpreted: list[str] = []


def install(chip: str) -> None:
    """Lets an emulated chip, or the interpreter with other options, take the place of the interpreter."""
    pl.pallas_call = _interpreted_by_two_cores if chip == TWO_CORES else _emulated_by(chip)


def _interpreted_by_two_cores(kernel: Any, *args: Any, interpret: Any = False, **params: Any) -> Any:
    if isinstance(interpret, pltpu.InterpretParams):
        interpret = dataclasses.replace(interpret, **_OTHERWISE)
        _interpreted.append(params.get("name", "kernel"))
    return _pallas_call(kernel, *args, interpret=interpret, **params)


def _emulated_by(chip: str) -> Any:
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

    return pallas_call


def take() -> tuple[list[Any], list[Any]]:
    """Returns the kernels that have run since the last time, and what was found."""
    jax.effects_barrier()
    kernels = [kernel for emulator in _emulators for kernel in emulator.kernels()] + _interpreted
    findings = [finding for emulator in _emulators for finding in emulator.findings()]
    _emulators.clear()
    _interpreted.clear()
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
