"""Compiles all of a function for an absent TPU, executes the program, and says what was found."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowering.compiling.compile import schedules_of
from lowering.emulation.emulator import MOST_STARTS, UNWRITTEN, Emulator, depending, later, of_fault
from lowering.emulation.faults import EmulationError, KernelFaultError
from lowering.emulation.kernels import POISONS
from lowering.emulation.programs import PROGRAM, Program, Run
from lowering.emulation.report import Emulation, Finding
from lowering.emulation.transfers import Transfers
from lowering.functions import name_of
from lowering.tpu_core.dumps import Dumps
from lowering.tpu_core.faults import MachineFaultError, UnknownFormError
from pallas_kernels.hardware import Hardware

# How a program is executed again, and what its results depend on if they differ then.
_OTHER_WAYS: tuple[tuple[dict[str, Any], str], ...] = (
    *(({"order": order}, "when transfers happen") for order in Transfers.ORDERS[1:-1]),
    ({"poison": POISONS[1]}, UNWRITTEN),
)


def emulated_program(
    fn: Callable[..., Any], args: Sequence[Any], hardware: Hardware, *, checks: bool, eup_error: float
) -> Emulation:
    """Runs a function of arrays as the program that a chip's compiler makes of it; see `emulate`."""
    with Emulator(hardware, checks=False).tracing():
        like, structure = jax.tree.flatten(jax.eval_shape(fn, *args))
    if not like:
        raise EmulationError(f"lowering.emulate: {name_of(fn)} must return an array; got none")
    keys = [x for x in (*jax.tree.leaves(args), *like) if jnp.issubdtype(x.dtype, jax.dtypes.extended)]
    if keys:
        must = "take and return arrays of numbers, such as jax.random.key_data"
        raise EmulationError(f"lowering.emulate: {name_of(fn)} must {must}; got {keys[0].dtype}")

    @functools.wraps(fn)
    def without_donation(*arrays: Any) -> Any:
        return fn(*arrays)

    with schedules_of(jax.jit(without_donation), args, hardware) as folder:
        try:
            program = Program.of(Dumps(folder), hardware.name)
        except UnknownFormError as error:
            raise EmulationError(f"{PROGRAM} on {hardware.name}: {error}") from None
    operands = list(map(np.asarray, jax.tree.leaves(args)))

    def executed(**how: Any) -> tuple[tuple[np.ndarray, ...], Run]:
        run = Run(program, operands, eup_error=eup_error, **how)
        return run.run(like), run

    try:
        results, run = executed(checks=checks)
    except UnknownFormError as error:
        why = f"{error}, whose meaning nobody has settled"
        raise EmulationError(f"{PROGRAM} on {hardware.name}: {why}") from None
    except MachineFaultError as error:
        raise KernelFaultError(f"{PROGRAM} on {hardware.name}: {error}") from None
    found = dict.fromkeys(run.findings())

    def depends_on(how: dict[str, Any]) -> str:
        try:
            return depending(results, executed(**how)[0])
        except MachineFaultError as error:
            return of_fault(error)

    for meeting in run.meetings()[:MOST_STARTS]:
        if depends := depends_on(later(meeting)):
            found[run.found(meeting, depends)] = None
    for how, what in _OTHER_WAYS if checks else ():
        if depends := depends_on(how):
            found[Finding(PROGRAM, "", f"{depends} on {what}")] = None
    return Emulation(
        target=hardware.name,
        results=jax.tree.unflatten(structure, map(jnp.asarray, results)),
        kernels=tuple(calls.described() for calls in run.calls.values() if calls.count),
        findings=tuple(found),
        unknown=run.unknown(),
        is_whole_program=True,
        is_checked=checks,
    )
