"""Executes small cases of the kinds of kernels that `evidence.py` replays, as they are compiled."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from evidence_cases import Family, Sizes, uses

import lowering
from lowering.compiling.compile import CompileError
from lowering.measuring.agreement import fault_of, truth_in_float64
from lowering.measuring.problems import Problem
from lowering.operators import on_arrays, unpacked
from pallas_kernels.hardware import Hardware
from pallas_kernels.kernel import Kernel

MOST_EXECUTED = 2**15  # elements of the largest operand of a case that is executed
TOO_LARGE = 2**21
ONLY_SLOW = "XLA keeps fewer", "blocks pass through VMEM one behind the other"


def shrunk(
    family: Family, option: Any, sizes: Sizes, key: tuple[str, str, str], hardware: Hardware
) -> tuple[Sizes, dict[str, Any]] | None:
    """Returns sizes of the same kind that halving makes small enough to be executed, and the kernel's configuration.

    It halves the last axis first or, if that does not do, the first, as a kind may ask for a large table. What is of a
    kind because it does not fit VMEM is smaller on chips with less VMEM; these are tried one by one. And a kernel runs
    as well where it refuses for nothing but speed: XLA's on what stays in VMEM, its own on few blocks.
    """

    def config_of(sizes: Sizes, chip: Hardware) -> dict[str, Any] | None:
        for use, kernel in uses(family, option, sizes, hardware):
            if (use.operator.name, kernel.name) == key[:2]:
                structured, attributes = unpacked(use.operands, use.params)
                offered = kernel.configs(chip, *structured, **attributes)
                reason = kernel.refuses(chip, *structured, **attributes)
                is_able = offered and (reason is None or reason.startswith(ONLY_SLOW))
                if is_able and kernel.kind(chip, *structured, **attributes).text == key[2]:
                    return dict(offered[0])
        return None

    def elements(sizes: Sizes) -> int:
        return max(math.prod(x.shape) for x in family.call(option, sizes)[1])

    vmem_bytes = hardware.on_chip_bytes or 0
    chips = [dataclasses.replace(hardware, on_chip_bytes=vmem_bytes >> n) for n in range(6)]
    for chip, order in itertools.product(chips, (-1, 1)):
        small = sizes
        for axis in range(len(sizes))[::order]:
            tried = small
            while tried[axis] > 8 and elements(tried) > MOST_EXECUTED:
                tried = (*tried[:axis], tried[axis] // 2, *tried[axis + 1 :])
                small = small if config_of(tried, chip) is None else tried
        for wanted in (tuple(size + size // 5 + 1 for size in small), small):
            if elements(wanted) <= TOO_LARGE and (config := config_of(wanted, chip)) is not None:
                return wanted, config
    return None


def arguments(family: Family, option: Any, sizes: Sizes) -> list[jax.Array]:
    """Makes up values of the operands of a case."""
    _, operands = family.call(option, sizes)
    draws = np.random.default_rng(1)

    def values(x: Any) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.integer):
            return jnp.asarray(draws.integers(0, sizes[-1], x.shape), x.dtype)
        return jnp.asarray(draws.normal(size=x.shape), x.dtype)

    return [values(x) for x in operands]


def executed(problem: Problem, kernel: Kernel, config: dict[str, Any], hardware: Hardware) -> str:
    """Says what is wrong with a kernel whose compiled code is executed; "" if nothing."""
    structured, attributes = unpacked(problem.operands, problem.params)
    launch = {"config": config} | ({"in_place": False} if kernel.overwrites(*structured, **attributes) else {})
    run = on_arrays(functools.partial(kernel.run, **launch), problem.params)
    try:
        emulation = lowering.emulate(run, *problem.operands, target=hardware.name)
    except (lowering.EmulationError, CompileError) as error:
        return str(error).partition("\n")[0]
    expected = jax.jit(problem.meaning)(*problem.operands)
    truth = truth_in_float64(problem.meaning, problem.operands)
    wrong = fault_of(emulation.results, expected, truth, problem.operands)
    return wrong or "; ".join(map(str, emulation.findings))
