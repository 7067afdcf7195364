"""Times whole functions under each implementation, on the device of this process."""

import dataclasses
import itertools
import json
import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from rich.progress import TaskID
from rich.table import Table
from rich.text import Text

from lowering.describe import show
from lowering.errors import NotSupportedError
from lowering.explain import explain
from lowering.functions import with_changes
from lowering.measurements import versions
from lowering.measuring import timing
from lowering.measuring.inputs import made_up
from lowering.select import use
from lowering.static_leaves import of_arrays
from lowering.targets import device_name, here

_MOST_SECONDS = 60  # after which no further repeat begins


@dataclasses.dataclass(frozen=True)
class Row:
    """A function under one implementation, or the reason why it cannot run.

    Attributes:
      implementation: as in `lowering.use`.
      function: its name, if several are compared.
      taken: the implementations of each operator in the function.
      median_ms: of the times; None if the program was not run.
      quartiles_ms: the first and the third.
      repeats: how often the program was timed.
      temporary_bytes: what the program allocates while it runs.
      same_as: the name of an earlier row with the same program, whose times these are; timing it twice would only show
        noise.
      refused: the reason; empty if the function runs.
    """

    implementation: str
    function: str = ""
    taken: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    median_ms: float | None = None
    quartiles_ms: Sequence[float] = ()
    repeats: int = 0
    temporary_bytes: int = 0
    same_as: str = ""
    refused: str = ""

    @property
    def name(self) -> str:
        """Names what the row times, such as "auto", or "before.py:step, auto"."""
        return ", ".join(filter(None, (self.function, self.implementation)))


@dataclasses.dataclass(frozen=True)
class BenchResult:
    """Measurements of `bench`, with the device and the versions."""

    device: str
    versions: Mapping[str, str]
    rows: tuple[Row, ...]

    @property
    def compares_nothing(self) -> bool:
        """Tells whether all rows that run are one program."""
        timed = [row for row in self.rows if row.median_ms is not None]
        return len(self.rows) > 1 and sum(not row.same_as for row in timed) == 1

    def to_json(self) -> str:
        """Writes everything as a JSON object."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    def table(self) -> Table:
        """Lays out the rows as a `rich` table."""
        title = f"{self.device}: medians of interleaved repeats, and temporaries in MB"
        table = Table(title=title, title_justify="left")
        table.add_column("function" if any(row.function for row in self.rows) else "implementation", overflow="fold")
        for name in ("median, ms", "of the first", "quartiles, ms", "repeats", "MB"):
            table.add_column(name, justify="right", no_wrap=True)
        first_ms = next((row.median_ms for row in self.rows if row.median_ms is not None), math.nan)
        for row in self.rows:
            taken = "".join(f"\n  {operator}: {', '.join(names)}" for operator, names in row.taken.items())
            if row.median_ms is None or row.same_as:
                reason = row.refused or f"the same program as {row.same_as}"
                table.add_row(Text(f"{row.name}\n  {reason}"), *"-----", style="dim")  # not markup
                continue
            first, third = row.quartiles_ms
            relative = f"{row.median_ms / first_ms:.2f}"
            figures = _figures(row.median_ms), relative, f"{_figures(first)} to {_figures(third)}", str(row.repeats)
            table.add_row(Text(f"{row.name}{taken}"), *figures, _figures(1e-6 * row.temporary_bytes))
        return table


def _figures(number: float) -> str:
    """Writes a number with three decimals, with one from 10 on, and with none from 100 on."""
    digits = 0 if abs(number) >= 100 else 1 if abs(number) >= 10 else 3
    return f"{number:,.{digits}f}"


def bench(
    fn: Callable[..., Any],
    *args: Any,
    implementations: Sequence[str] = ("auto", "reference", "pallas"),
    repeats: int = 20,
    progress: bool | None = None,
) -> BenchResult:
    """Compiles a function under each implementation, then times them in turn.

    Args:
      fn: a function of arrays, jitted or not. Donated arguments are copied before the clock starts.
      *args: its arguments: arrays, or pytrees of them. A `jax.ShapeDtypeStruct` becomes a random array.
      implementations: as in `lowering.use`.
      repeats: how often to time each, at least 2. After a minute no further repeat begins, once there are three.
      progress: whether to show a progress bar on stderr; by default, if stderr is a terminal.

    Raises:
      OperatorError: if an operator refuses its arguments.
    """
    return compare({"": fn}, *args, implementations=implementations, repeats=repeats, progress=progress)


def compare(
    functions: Mapping[str, Callable[..., Any]],
    *args: Any,
    implementations: Sequence[str] = ("auto",),
    by_operator: Mapping[str, Any] = types.MappingProxyType({}),
    repeats: int = 20,
    progress: bool | None = None,
) -> BenchResult:
    """Times several functions of the same arguments, which run in turn, as `bench` times one.

    Args:
      functions: the functions by name.
      *args: as in `bench`.
      implementations: as in `bench`.
      by_operator: implementations of single operators, in force under each of `implementations`.
      repeats: as in `bench`.
      progress: as in `bench`.
    """
    is_count = isinstance(repeats, Integral) and not isinstance(repeats, bool) and repeats >= 2
    if not is_count:
        raise TypeError(f"bench: repeats must be an integer of at least 2; got {show(repeats)}")
    found = {name: of_arrays(fn, args) for name, fn in functions.items()}
    prepared = {name: (fn, _arrays(moving)) for name, (fn, moving) in found.items()}
    rows: dict[str, Row] = {}
    programs: dict[str, _Program] = {}
    by_text: dict[str, str] = {}
    with timing.progress_bar(len(functions) * len(implementations) + repeats, progress) as bar:
        for function, implementation in itertools.product(functions, implementations):
            row = Row(implementation, function)
            bar.update(TaskID(0), description=f"compiling {row.name}")
            with use(implementation, **by_operator):
                rows[row.name] = _compiled(row, *prepared[function], by_text, programs)
            bar.advance(TaskID(0))
        bar.update(TaskID(0), description="timing")
        times = timing.times_ms(
            {name: program.run for name, program in programs.items()},
            repeats=repeats,
            until=timing.clock() + _MOST_SECONDS,
            prepare=lambda name: programs[name].arguments(),
            after_round=lambda: bar.advance(TaskID(0)),
        )
    for name, row in rows.items():
        timed = row.same_as or name
        if timed in programs:
            temporary_bytes = programs[timed].run.memory_analysis().temp_size_in_bytes
            rows[name] = dataclasses.replace(row, temporary_bytes=temporary_bytes, **timing.summary(times[timed]))
    device = device_name(here()) or here().name
    return BenchResult(device, dict(versions()), tuple(rows.values()))


class _Program(NamedTuple):
    """A compiled program, with the arrays it runs on and which of them it overwrites."""

    run: Any
    arrays: Any
    donated: Sequence[bool]

    def arguments(self) -> Any:
        leaves, structure = jax.tree.flatten(self.arrays)
        fresh = [jnp.copy(x) if is_donated else x for x, is_donated in zip(leaves, self.donated, strict=True)]
        return jax.tree.unflatten(structure, fresh)


def _compiled(
    row: Row, fn: Callable[..., Any], args: Any, by_text: dict[str, str], programs: dict[str, _Program]
) -> Row:
    """Compiles under the current selection what is not among the programs already, and completes the row."""
    jitted: Any = fn if hasattr(fn, "trace") else jax.jit(with_changes(fn))
    try:
        lowered = jitted.lower(*args)
    except NotSupportedError as error:
        return dataclasses.replace(row, refused=str(error))
    row = dataclasses.replace(row, taken=_taken(jitted, args))
    text = re.sub(r"^module @\S+", "module", lowered.as_text())  # functions' names are no part of what they do
    first = by_text.setdefault(text, row.name)
    if first != row.name:
        return dataclasses.replace(row, same_as=first)
    donated = [argument.donated for argument in jax.tree.leaves(lowered.args_info)]
    programs[row.name] = _Program(lowered.compile(), args, donated)
    return row


def _arrays(args: Any) -> Any:
    leaves, structure = jax.tree.flatten(args)
    types = [leaf for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]
    known_sizes = [
        size for leaf in leaves if not isinstance(leaf, jax.ShapeDtypeStruct) for size in getattr(leaf, "shape", ())
    ]
    arrays = iter(made_up(types, known_sizes))
    filled = [next(arrays) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf for leaf in leaves]
    return jax.tree.unflatten(structure, filled)


def _taken(jitted: Any, args: Any) -> dict[str, list[str]]:
    """Returns the implementations that each operator takes on this device."""
    found: dict[str, set[str]] = {}
    for row in explain(jitted, *args).rows:
        found.setdefault(row.operator, set()).add(row.implementation)
    return {operator: sorted(names) for operator, names in found.items()}
