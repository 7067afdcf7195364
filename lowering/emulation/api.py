"""The public function `emulate`."""

import functools
from collections.abc import Callable
from numbers import Real
from typing import Any

import jax
import numpy as np

from lowering import static_leaves
from lowering.describe import one_of, show
from lowering.emulation.emulator import Emulator
from lowering.emulation.faults import EmulationError
from lowering.emulation.report import Emulation
from lowering.emulation.whole_program import emulated_program
from lowering.register import emulate_with
from lowering.select import EMULATED
from lowering.targets import TARGETS
from pallas_kernels.hardware import Hardware


def emulate(
    fn: Callable[..., Any],
    *args: Any,
    target: str,
    checks: bool = True,
    eup_error: float = 0.0,
    whole_program: bool = False,
) -> Emulation:
    """Runs a function whose Pallas TPU kernels are executed as they are compiled for a TPU, where no TPU is.

    Each kernel, this library's or the user's own, is compiled with the chip's real compiler. Its final machine program
    is then executed on the CPU, bundle by bundle and register by register, with its transfers, semaphores and vectors;
    everything else is evaluated by JAX on the CPU, or with `whole_program` executed as compiled as well. So what runs
    is what a chip would run: the compiler's layouts, masks, packed values, sizes of transfers at ragged edges and
    operands that the matrix unit rounds.

    Operators use the implementations that `lowering.explain` names for the target; to ask for kernels, call this within
    `jaxops.use("pallas")`.

    Args:
      fn: a function of arrays, jitted or not.
      *args: its arguments: arrays, or pytrees of them.
      target: "tpu-v5e", "tpu-v6e" or "tpu-v7x".
      checks: whether to execute each call of a kernel four times: with transfers that happen when they are
        started, when they are waited for, and half and half (twice if three share a semaphore), and with other
        bits in memory that nothing has written, or from which the grid's pipeline has sent a block of an output.
        Each pair of transfers that are in flight together, where one of them writes bytes that they share, takes
        one more execution. Also follows which value each register holds. Without, a call is executed once.
      eup_error: a relative error of the transcendental unit's results, whose accuracy no document states. 0 stands for
        exact ones. Results that change more than they may depend on it.
      whole_program: whether to execute all that the compiler makes of the function, XLA's fusions and copies as well
        as kernels, in the memory of one program and in its order.

    Returns:
      An `Emulation`: the results, the kernels, or all parts of the program, with how much of their code was executed,
      and the findings.

    Raises:
      EmulationError: if what is executed has an instruction whose meaning nobody has settled, or does what no program
        may, such as to wait for what nobody sends; if the target is another than the three that are known; if arguments
        have no values, or for a whole program others than numbers of 8, 16 or 32 bits.
      CompileError: if the compiler is missing or refuses a kernel.
      OperatorError: if an operator refuses its arguments.

    Numerics:
      Arithmetic of float32 and bfloat16 is IEEE's. The matrix unit rounds float32 operands to bfloat16, as the chip
      does, but in which order it adds up is not known. Denormal numbers are kept. See docs/emulation.md for what an
      emulation cannot show.

    Example:
      >>> emulation = lowering.emulate(lambda x: 2 * x, jnp.ones(3), target="tpu-v5e")
      >>> print(emulation)  # of a function with kernels, a table
      tpu-v5e: no Pallas kernel runs
    """
    hardware = checked(target, checks, eup_error, whole_program)
    fn, arrays = of_values(fn, args)
    if whole_program:
        return emulated_program(fn, arrays, hardware, checks=checks, eup_error=float(eup_error))
    emulator = Emulator(hardware, checks=checks, eup_error=float(eup_error), defers=True)
    results = jax.block_until_ready(jax.jit(emulator.emulated(fn))(*arrays))
    if emulator.error is not None:
        raise emulator.error
    kernels, findings = emulator.kernels(), emulator.findings()
    if emulator.memory_findings:
        # Kernels may return rows that nobody reads, so the function's own results decide.
        others = jax.jit(emulator.with_other_memory().emulated(fn))(*arrays)
        if any(_bits(a) != _bits(b) for a, b in zip(*map(jax.tree.leaves, (results, others)), strict=True)):
            findings += tuple(emulator.memory_findings)
    return Emulation(
        target=hardware.name,
        results=results,
        kernels=kernels,
        findings=findings,
        unknown=emulator.unknown(),
        is_checked=checks,
        passed_over=tuple(emulator.passed_over),
    )


@functools.cache
def _emulator(chip: Hardware) -> Callable[..., Any]:
    """Returns what runs functions as a chip would, whose kernels stay compiled."""
    return Emulator(chip, checks=False).emulated


emulate_with(_emulator)


def checked(target: str, checks: Any = False, eup_error: Any = 0.0, whole_program: Any = False) -> Hardware:
    """Returns the chip; refuses what is wrong with these arguments."""
    hardware = TARGETS.get(target) if isinstance(target, str) else None
    if hardware is None or hardware.name not in EMULATED:
        raise EmulationError(f"lowering.emulate: target must be {one_of(EMULATED, target)}")
    for name, option in {"checks": checks, "whole_program": whole_program}.items():
        if not isinstance(option, bool):
            raise EmulationError(f"lowering.emulate: {name} must be a bool; got {show(option)}")
    if not isinstance(eup_error, Real) or not 0 <= float(eup_error) < 1:
        raise EmulationError(f"lowering.emulate: eup_error must be a number from 0 to 1; got {show(eup_error)}")
    return hardware


def of_values(fn: Callable[..., Any], args: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a function of arrays and its arguments; refuses types without values."""
    fn, arrays = static_leaves.of_arrays(fn, args)
    for leaf in jax.tree.leaves(arrays):
        if isinstance(leaf, jax.ShapeDtypeStruct | jax.core.Tracer):
            is_traced = isinstance(leaf, jax.core.Tracer)
            where, what = (": call it outside of jit and of other transforms", "a traced ") if is_traced else ("", "")
            raise EmulationError(f"lowering.emulate: args must have values{where}; got {what}{show(leaf)}")
    return fn, arrays


def _bits(array: jax.Array) -> bytes:
    return np.asarray(array).tobytes()
