"""Measures the implementations of a function's operators on the device in hand."""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from rich.progress import Progress, TaskID

from lowering.explain import operator_uses
from lowering.measurements import Entry, Key, Measurement
from lowering.measuring import timing
from lowering.measuring.candidates import Candidate, candidates
from lowering.measuring.inputs import made_up
from lowering.measuring.replaying import replayed_entry
from lowering.register import Operator, operator_of
from lowering.static_leaves import of_arrays
from lowering.targets import here, named
from lowering.tuning import TuningError, TuningResult, merged
from pallas_kernels.hardware import Hardware

INTERRUPTED = "interrupted"
_OUT_OF_TIME = "stopped at the time budget"
_ROUNDS_AT_LEAST = 3


class _OutOfTimeError(Exception):
    """The budget ended before all candidates of an operator were compiled."""


@dataclasses.dataclass(frozen=True)
class _Problem:
    """One operator at one set of shapes; its operands where they are given."""

    operator: Operator
    types: tuple[Any, ...]
    params: Mapping[str, Any]
    operands: tuple[jax.Array, ...] | None


def tune(
    fn: Callable[..., Any],
    *args: Any,
    target: str | None = None,
    by: str = "device",
    trip_counts: Mapping[str, float] | None = None,
    budget_seconds: float = 60.0,
    repeats: int = 30,
    progress: bool | None = None,
    path: str | Path | None = None,
    again: bool = False,
    **params: Any,
) -> TuningResult:
    """Times the reference and every configuration of every kernel, for each operator in a function, on this device.

    With `by="schedule"` the device is a TPU that need not be here: times are those of the schedules that its compiler
    makes (docs/schedule.md), and nothing runs or is checked. Such results choose a kernel's configuration where nothing
    was measured, under `use("pallas")`; they make no kernel the default.

    Each candidate is compiled, compared with the reference in float32, and discarded if it fails or is wrong. The rest
    are timed turn by turn, one launch at a time, which includes what it takes to launch; the winner has the smallest
    median. A kernel that updates operands in place is timed on copies that it may keep, made before the clock starts:
    as under jit with donated arguments. Operators that are split over a mesh outside of shard_map are left out.

    `with result:` uses what was found, and so does everyone who finds it in this library's `lowering/tuned/`.

    Args:
      fn: a function of arrays, whose operators are measured one by one on random operands; or one of
        `jaxops.operators()`.
      *args: what it is called with: arrays, `jax.ShapeDtypeStruct`s, or pytrees of them. An operator is measured on its
        arrays.
      target: the name of the device here, which is the only one that can be measured; of any TPU for schedules.
      by: what gives the times, "device" or "schedule".
      trip_counts: for schedules, as `lowering.compile` takes them.
      budget_seconds: when to stop. An operator all of whose candidates are compiled by then is still timed, 3 times.
      repeats: how often each candidate is timed, if there is time.
      progress: whether to show a progress bar on stderr; by default, if that is a terminal.
      path: a file that keeps the results, written after each operator. What it holds already stays in it, and is not
        measured again.
      again: measures that, too.
      **params: an operator's attributes; for a function, further keyword arguments.

    Returns:
      What was measured of the operators in `fn`, now or earlier. `stopped` says why not all of them were, if so: out of
      time, or interrupted from the keyboard.

    Raises:
      TuningError: for another target, no time or no repeats, and if `path` holds anything but an earlier result; all
        before anything is measured.
      OperatorError: what an operator has to say about its arguments.
    """
    hardware = _tuned_for(target, by)
    for name, value in {"budget_seconds": budget_seconds, "repeats": repeats}.items():
        if not value > 0:
            raise TuningError(f"tune: {name} must be positive; got {value}")
    problems, left_out = _problems(*of_arrays(functools.partial(fn, **params) if params else fn, args), hardware)
    if _is_operator(fn) and not any(isinstance(x, jax.ShapeDtypeStruct) for x in args):
        arrays = tuple(jnp.asarray(x) for x in args)
        problems = {key: dataclasses.replace(problem, operands=arrays) for key, problem in problems.items()}
    held = [entry for entry in _held(path) if entry.key in problems and entry.replayed == (by == "schedule")]
    known = {} if again else {entry.key: entry for entry in held}
    measured: dict[Key, Entry] = {}

    def save(stopped: str) -> None:
        if path is not None:
            TuningResult(merged(_held(path), measured.values()), stopped).save(path)

    save(INTERRUPTED)  # which is true until the end, and shows now whether the file can be written
    stopped = left_out
    deadline = timing.clock() + budget_seconds
    waiting = [key for key in problems if key not in known]
    try:
        with timing.progress_bar(len(waiting), progress) as bar:
            for position, key in enumerate(waiting):
                now = timing.clock()
                until = min(deadline, now + (deadline - now) / (len(waiting) - position))
                if by == "schedule":
                    measured[key] = _replay(key, problems[key], hardware, trip_counts, deadline, bar)
                else:
                    measured[key] = _measure(key, problems[key], hardware, repeats, until, deadline, bar)
                bar.update(TaskID(0), completed=position + 1)
                save(INTERRUPTED)
    except _OutOfTimeError:
        stopped = _OUT_OF_TIME
    except KeyboardInterrupt:
        stopped = INTERRUPTED
    save(stopped)
    found = known | measured
    return TuningResult(tuple(found[key] for key in problems if key in found), stopped)


def _tuned_for(target: str | None, by: str) -> Hardware:
    """The chip that is tuned for."""
    if by not in ("device", "schedule"):
        raise TuningError(f"tune: by must be 'device' or 'schedule'; got {by!r}")
    hardware = here() if target is None else named(target)
    if by == "device" and hardware != here():
        raise TuningError(f"tune: target must be the device here, {here().name}; got {target!r}")
    if by == "schedule" and (hardware.platform != "tpu" or not hardware.device_kind):
        raise TuningError(f"tune: target must be a TPU for by='schedule'; got {hardware.name!r}")
    return hardware


def _replay(
    key: Key,
    problem: _Problem,
    hardware: Hardware,
    trip_counts: Mapping[str, float] | None,
    deadline: float,
    bar: Progress,
) -> Entry:
    bar.update(TaskID(0), description=f"{key.operator} {', '.join(key.operands)}")

    def require_time() -> None:
        if timing.clock() >= deadline:
            raise _OutOfTimeError

    return replayed_entry(key, problem.operator, problem.types, problem.params, hardware, trip_counts, require_time)


def _held(path: str | Path | None) -> tuple[Entry, ...]:
    """What the file holds, which another process may be extending, too."""
    return TuningResult.load(path).entries if path is not None and Path(path).exists() else ()


def _problems(fn: Callable[..., Any], args: Sequence[Any], hardware: Hardware) -> tuple[dict[Key, _Problem], str]:
    """Every distinct operator, in order of first use; and in words which are left out."""
    found: dict[Key, _Problem] = {}
    split: set[str] = set()
    for use in operator_uses(jax.make_jaxpr(fn)(*args).jaxpr, args, hardware):
        if use.split not in ("none", "manual"):
            split.add(use.operator.name)
            continue
        key = Key.of(use.operator.name, hardware, use.operands, use.params)
        assert key is not None  # the device here is known
        found.setdefault(key, _Problem(use.operator, tuple(use.operands), use.params, None))
    return found, f"without {', '.join(sorted(split))}, which is split over a mesh" if split else ""


def _is_operator(fn: Any) -> bool:
    primitive = getattr(fn, "primitive", None)
    return isinstance(primitive, Primitive) and operator_of(primitive) is not None


def _measure(
    key: Key, problem: _Problem, hardware: Hardware, repeats: int, until: float, deadline: float, bar: Progress
) -> Entry:
    operands = problem.operands or made_up(problem.types, list(problem.params.values()))
    found: list[Candidate | Measurement] = []
    bar.update(TaskID(0), description=f"{key.operator} {', '.join(key.operands)}")
    for candidate in candidates(problem.operator, hardware, operands, problem.params):
        found.append(candidate)
        if timing.clock() >= deadline:
            raise _OutOfTimeError
    right = {str(position): x for position, x in enumerate(found) if isinstance(x, Candidate)}
    times = timing.times_ms(
        {name: candidate.run for name, candidate in right.items()},
        repeats=repeats,
        warmups=1,
        prepare=lambda name: right[name].arguments(operands),
        until=until,
        at_least=_ROUNDS_AT_LEAST,
        after_round=lambda: bar.advance(TaskID(0), 1 / repeats),
    )
    measurements = [
        Measurement(x.implementation, x.config, round(1e3 * statistics.median(times[str(position)]), 3))
        if isinstance(x, Candidate)
        else x
        for position, x in enumerate(found)
    ]
    return Entry(key, tuple(measurements), repeats=max((len(series) for series in times.values()), default=0))
