"""Measures the implementations of a function's operators on the device of this process."""

import dataclasses
import functools
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from rich.progress import TaskID

from lowering.describe import show
from lowering.errors import TuningError
from lowering.explain import operator_uses
from lowering.functions import require_function
from lowering.measurements import Entry, Key
from lowering.measuring import timing
from lowering.measuring.candidates import Machine
from lowering.measuring.entries import measure_all, measured_entry
from lowering.measuring.problems import Problem
from lowering.measuring.replaying import replayed_entry
from lowering.operators import operator_of
from lowering.schedule.data_hints import Given
from lowering.static_leaves import jaxpr_of, of_arrays
from lowering.targets import here, named
from lowering.tuning import TuningResult, merged
from pallas_kernels.hardware import Hardware


def tune(
    fn: Callable[..., Any],
    *args: Any,
    target: str | None = None,
    by: str = "device",
    trip_counts: Mapping[str, float] | None = None,
    scalars: Mapping[str, Mapping[int, jax.typing.ArrayLike]] | None = None,
    budget_seconds: float = 60.0,
    repeats: int = 30,
    progress: bool | None = None,
    path: str | Path | None = None,
    again: bool = False,
    **params: Any,
) -> TuningResult:
    """Times the reference and every configuration of every kernel, for each operator in a function, on this device.

    Each candidate is compiled and compared with the reference in float32; one that fails or is wrong is discarded. The
    others take turns; the smallest median wins. GPUs and TPUs are timed by their own clocks, on operands that their
    caches do not hold; a CPU's times include the launch. A kernel that updates operands in place gets copies, made
    before the clock starts, as under jit with donated arguments. Operators split over a mesh outside of shard_map are
    left out.

    With `by="schedule"` the chip is a TPU that need not be here. The times are those of the schedules that its compiler
    makes (docs/schedule.md); nothing runs and nothing is checked. Such results choose a kernel's configuration under
    `use("pallas")` if nothing was measured. They never make a kernel the default.

    Args:
      fn: a function of arrays, whose operators are measured on random operands; or one of `jaxops.operators()`.
      *args: its arguments: arrays, `jax.ShapeDtypeStruct`s, or pytrees of them. An operator is measured on its arrays.
      target: the name of the device here, the only one that can be measured; for schedules, of any TPU.
      by: what gives the times, "device" or "schedule".
      trip_counts: for schedules, as `lowering.compile` takes them.
      scalars: likewise.
      budget_seconds: when to stop. What is compiled by then is still timed, 3 times; a later call with the same
        `path` measures the operator anew, if that was not everything.
      repeats: how often to time each candidate, if time allows.
      progress: whether to show a progress bar on stderr; by default, if stderr is a terminal.
      path: a file for the results, written after each operator. Results that it already holds are kept and reused.
      again: measures those anew.
      **params: an operator's attributes; for a function, further keyword arguments.

    Returns:
      Measurements of the operators in `fn`; `with result:` applies them. If some are missing, `stopped` says why.

    Raises:
      TuningError: for another target, if an option is not what it has to be, or if `path` holds anything but an earlier
        result; always before measuring starts.
      TypeError: if JAX cannot trace `fn`, or the arguments are not pytrees.
      OperatorError: if an operator refuses its arguments.

    Example:
      >>> result = lowering.tune(jaxops.softmax, jnp.ones((8, 128)), repeats=3)
      >>> # The CPU has no kernels.
      >>> result.entries[0].key.operator, result.entries[0].winner.name
      ('softmax', 'reference')
    """
    hardware = _checked_chip(target, by)
    _check_options(budget_seconds, repeats, progress, path, again)
    data = _checked_data(by, trip_counts=trip_counts, scalars=scalars)
    require_function(fn)
    problems, left_out = _problems(*of_arrays(functools.partial(fn, **params) if params else fn, args), hardware)
    if _is_operator(fn) and not any(isinstance(x, jax.ShapeDtypeStruct) for x in args):
        operands = tuple(map(jnp.asarray, args))
        problems = {key: dataclasses.replace(problem, operands=operands) for key, problem in problems.items()}
    held = [entry for entry in _held(path) if entry.key in problems and entry.replayed == (by == "schedule")]
    found = {} if again else {entry.key: entry for entry in held if not entry.is_unfinished}
    waiting = [problem for key, problem in problems.items() if key not in found]
    measured: list[Entry] = []
    machine, deadline = Machine(hardware), timing.clock() + budget_seconds

    def save(stopped: str) -> None:
        if path is not None:
            TuningResult(merged(_held(path), measured), stopped).save(path)

    def keep(entry: Entry) -> None:
        measured.append(entry)
        found[entry.key] = entry
        bar.update(TaskID(0), completed=len(measured))
        save(timing.INTERRUPTED)

    def entry_of(problem: Problem, until: float) -> Entry:
        bar.update(TaskID(0), description=str(problem))
        if by == "schedule":
            return replayed_entry(problem, machine, data, deadline)
        return measured_entry(
            problem.with_arrays(),
            machine,
            repeats=repeats,
            until=until,
            deadline=deadline,
            after_round=lambda: bar.advance(TaskID(0), 1 / repeats),
        )

    save(timing.INTERRUPTED)  # true until the end, and shows at once whether the file can be written
    with timing.progress_bar(len(waiting), progress) as bar:
        stopped = timing.why_stopped(lambda: measure_all(waiting, entry_of, keep, deadline)) or left_out
    save(stopped)
    return TuningResult(tuple(found[key] for key in problems if key in found), stopped)


def _checked_chip(target: str | None, by: str) -> Hardware:
    """Checks and returns the chip that is tuned for."""
    if not isinstance(by, str) or by not in ("device", "schedule"):
        raise TuningError(f"tune: by must be 'device' or 'schedule'; got {show(by)}")
    hardware = here() if target is None else named(target)
    if by == "device" and hardware != here():
        raise TuningError(f"tune: target must be the device here, {here().name}; got {show(target)}")
    if by == "schedule" and (hardware.platform != "tpu" or not hardware.device_kind):
        raise TuningError(f"tune: target must be a TPU for by='schedule'; got {show(hardware.name)}")
    return hardware


def _check_options(budget_seconds: Any, repeats: Any, progress: Any, path: Any, again: Any) -> None:
    is_path = path is None or isinstance(path, str | os.PathLike)
    checks = (
        (_is_number(budget_seconds, Real), "budget_seconds", "be a positive number", budget_seconds),
        (_is_number(repeats, Integral), "repeats", "be a positive integer", repeats),
        (progress is None or isinstance(progress, bool), "progress", "be a bool or None", progress),
        (is_path, "path", "be a string or a path", path),
        (isinstance(again, bool), "again", "be a bool", again),
    )
    for fits, argument, rule, got in checks:
        if not fits:
            raise TuningError(f"tune: {argument} must {rule}; got {show(got)}")


def _checked_data(by: str, **data: Any) -> dict[str, Any]:
    """Checks and returns what the caller says of data."""
    try:
        Given.of(**data)
    except ValueError as error:
        raise TuningError(f"tune: {error}") from None
    for name, value in data.items():
        if value and by != "schedule":
            raise TuningError(f"tune: {name} must come with by='schedule'; got by={by!r}")
    return data


def _is_number(value: Any, kind: Any) -> bool:
    """Tells whether this is a positive number of this kind that a float can hold; bools do not count."""
    return (
        isinstance(value, kind)
        and not isinstance(value, bool)
        and bool(0 < value <= sys.float_info.max or value == math.inf)
    )


def _held(path: str | Path | None) -> tuple[Entry, ...]:
    """Returns what the file holds now; another process may be adding to it."""
    return TuningResult.load(path).entries if path is not None and os.path.exists(path) else ()


def _problems(fn: Callable[..., Any], args: Sequence[Any], hardware: Hardware) -> tuple[dict[Key, Problem], str]:
    """Returns every distinct operator in order of first use, and a sentence about those that are left out."""
    found: dict[Key, Problem] = {}
    split: set[str] = set()
    for use in operator_uses(jaxpr_of(fn, args), args, hardware):
        if use.split not in ("none", "manual"):
            split.add(use.operator.name)
            continue
        types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in use.operands]
        problem = Problem.of(use.operator, hardware, types, use.params)
        found.setdefault(problem.key, problem)
    return found, f"without {', '.join(sorted(split))}, which is split over a mesh" if split else ""


def _is_operator(fn: Any) -> bool:
    primitive = getattr(fn, "primitive", None)
    return isinstance(primitive, Primitive) and operator_of(primitive) is not None
