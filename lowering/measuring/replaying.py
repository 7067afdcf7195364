"""The ways to run one operator on a TPU that is not here, ranked by the schedules that its compiler makes."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from lowering.compiling.compile import CompileError, compile
from lowering.compiling.process import more_libtpu_flags
from lowering.compiling.report import CompiledReport
from lowering.describe import first_line
from lowering.measurements import REFERENCE, Entry, Measurement
from lowering.measuring.candidates import Candidate, Machine
from lowering.measuring.entries import require_comparison
from lowering.measuring.problems import Problem
from pallas_kernels.hardware import Hardware

# Where a whole program is one operator, libtpu may keep an argument in VMEM from one run to the next: on TPU v5e up to
# 128 MB, and then the operator seems faster than HBM is. In a model its operands come from elsewhere.
_KEEP_NO_ARGUMENT = "--xla_max_cross_program_prefetches=0"


def replay(
    run: Callable[..., Any],
    operands: Sequence[Any],
    hardware: Hardware,
    data: Mapping[str, Any],
    in_place: tuple[int, ...] = (),
    auto_layouts: bool = True,
) -> CompiledReport:
    """Compiles a function of arrays by itself, as if its operands came from HBM, and replays its schedule.

    Raises:
      CompileError: if it does not compile, or if data decide what runs and `data` does not say it.
    """
    jitted = jax.jit(lambda *arrays: tuple(run(*arrays)), donate_argnums=in_place)
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    with more_libtpu_flags(_KEEP_NO_ARGUMENT):
        return compile(jitted, *types, target=hardware.name, schedule=True, auto_layouts=auto_layouts, **data)


def replayed_entry(problem: Problem, machine: Machine, data: Mapping[str, Any], deadline: float) -> Entry:
    """Replays the reference and every configuration of every kernel of an operator, with the times of their schedules.

    Args:
      problem: the operator, and the types of its operands.
      machine: the TPU.
      data: `trip_counts` and `scalars` of `compile`.
      deadline: when to stop compiling, by `timing.clock`.

    Raises:
      OutOfTimeError: if by the deadline nothing is compiled that could be compared with the reference.
    """

    def replayed(candidate: Candidate, auto_layouts: bool = True) -> Measurement:
        try:
            report = replay(
                candidate.run, problem.operands, machine.hardware, data, candidate.in_place, auto_layouts=auto_layouts
            )
        except CompileError as error:
            reason = str(error).removeprefix("lowering.compile: ").partition("\n")[0]
            return dataclasses.replace(candidate.way, discarded=reason)
        except Exception as error:  # Pallas' lowering raises many kinds for what it does not take
            if candidate.way.implementation == REFERENCE:
                raise
            return dataclasses.replace(candidate.way, discarded=first_line(error))
        assert report.schedule is not None
        return dataclasses.replace(candidate.way, median_us=round(report.schedule.total_us, 3))

    # In a model, what is around an operator can take and give any layout. Those that XLA chooses for its own program
    # are not always its best.
    references = [replayed(machine.reference(problem), auto_layouts) for auto_layouts in (True, False)]
    found = [min(references, key=lambda each: math.inf if each.median_us is None else each.median_us)]
    for candidate in machine.candidates(problem, deadline=deadline):
        found.append(candidate if isinstance(candidate, Measurement) else replayed(candidate))
    require_comparison(found, deadline)
    return Entry(problem.key, tuple(found), repeats=0, replayed=True)
