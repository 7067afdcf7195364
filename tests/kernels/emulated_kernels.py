"""Runs the interpreter's tests of TPU kernels in another way: `pytest --emulate tpu-v5e -n 2 tests`.

Each kernel that a test interprets is compiled for the chip instead, and executed as `lowering.emulate` does, with
transfers in three orders and a NaN where nobody has written. A test fails if that shows anything.

With `--emulate at-once` or `two-cores`, tests whose kernels take several blocks are interpreted, with blocks that may
run in parallel in another order: once with copies that happen at once, and once by two cores, with copies as late as
somebody waits for them.
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

INTERPRETERS = {
    "at-once": {"dma_execution_mode": "eager", "random_seed": 1},
    "two-cores": {"dma_execution_mode": "on_wait", "random_seed": 2, "num_cores_or_threads": 2},
}
OF_SEVERAL_BLOCKS = frozenset(
    {
        "test_softmax_kernels_agree_with_float64[tpu-channels-in-pieces]",
        "test_batch_norm_kernels_agree_with_float64[tpu-channels-first]",
        "test_batch_norm_kernels_on_tpu_agree_with_float64_whatever_vmem_keeps[rows-of-channels-none]",
        "test_local_response_norm_kernels_agree_with_float64[tpu-channels-in-sublanes]",
        "test_embedding_kernel_agrees_with_float64[tpu-(50, 128, 40)-float32]",
        "test_embedding_kernel_agrees_with_float64[tpu-resident-(96, 256, 120)-float32]",
        "test_ema_adam_kernel_takes_any_shape[tpu-(257, 129)]",
        "test_dropout_kernels_draw_the_same_mask[tpu-(40, 768)-float32-0.25]",
        "test_grid_sample_kernels_agree_with_float64[odd-columns-centres]",
        "test_max_pool_value_kernel_agrees_with_float64[bands-of-rows-float32]",
        "test_max_pool_value_kernel_agrees_with_float64[pixels-outside-float32]",
        "test_max_pool_kernels_agree_with_float64[tpu-bands-with-gaps-and-rest]",
        "test_max_pool_pairs_come_in_bands_of_rows",
        "test_divisive_norm_kernels_agree_with_float64[columns-in-sublanes-zero-means]",
        "test_linear_cross_entropy_tpu_kernels_agree_with_float64[all]",
        "test_exponentials_and_their_sums_agree_with_float64",
    }
)
_pallas_call = pl.pallas_call
_emulators: list[Emulator] = []
_of_interpreter: list[str] = []


def install(chip: str) -> None:
    """Lets an emulated chip, or the interpreter with other options, take the place of the interpreter."""
    pl.pallas_call = _interpreted(INTERPRETERS[chip]) if chip in INTERPRETERS else _emulated_by(chip)


def _interpreted(options: dict[str, Any]) -> Any:
    def pallas_call(kernel: Any, *args: Any, interpret: Any = False, **params: Any) -> Any:
        if isinstance(interpret, pltpu.InterpretParams):
            interpret = dataclasses.replace(interpret, **options)
            _of_interpreter.append(params.get("name", "kernel"))
        return _pallas_call(kernel, *args, interpret=interpret, **params)

    return pallas_call


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
    kernels = [kernel for emulator in _emulators for kernel in emulator.kernels()] + _of_interpreter
    findings = [finding for emulator in _emulators for finding in emulator.findings()]
    _emulators.clear()
    _of_interpreter.clear()
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
