"""Times a whole function under each implementation, on the device of this process."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
from rich.progress import TaskID
from rich.table import Table
from rich.text import Text

from lowering.describe import show
from lowering.errors import NotSupportedError
from lowering.explain import explain
from lowering.measurements import device_name, versions
from lowering.measuring import timing
from lowering.measuring.inputs import made_up
from lowering.select import use
from lowering.static_leaves import of_arrays
from lowering.targets import here


@dataclasses.dataclass(frozen=True)
class Row:
    """A function under one implementation, or the reason why it cannot run.

    Attributes:
      implementation: as in `lowering.use`.
      taken: the implementations of each operator in the function.
      median_ms: of the times; None if the program was not run.
      quartiles_ms: the first and the third.
      repeats: how often the program was timed.
      temporary_bytes: what the program allocates while it runs.
      same_as: an earlier row with the same program, whose times these are; timing it twice would only show noise.
      refused: the reason; empty if the function runs.
    """

    implementation: str
    taken: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    median_ms: float | None = None
    quartiles_ms: Sequence[float] = ()
    repeats: int = 0
    temporary_bytes: int = 0
    same_as: str = ""
    refused: str = ""


@dataclasses.dataclass(frozen=True)
class BenchResult:
    """Measurements of `bench`, with the device and the versions."""

    device: str
    versions: Mapping[str, str]
    rows: tuple[Row, ...]

    def to_json(self) -> str:
        """Writes everything as a JSON object."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    def table(self) -> Table:
        """Lays out the rows as a `rich` table."""
        table = Table(title=f"{self.device}, medians of interleaved repeats", title_justify="left")
        table.add_column("implementation", overflow="fold")
        for name in ("median, ms", "quartiles, ms", "repeats", "temporaries, bytes"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in self.rows:
            taken = "".join(f"\n  {operator}: {', '.join(names)}" for operator, names in row.taken.items())
            if row.median_ms is None or row.same_as:
                reason = row.refused or f"the same program as {row.same_as}"
                table.add_row(Text(f"{row.implementation}\n  {reason}"), *"----", style="dim")  # not markup
                continue
            first, third = row.quartiles_ms
            figures = f"{row.median_ms:,.3f}", f"{first:,.3f} to {third:,.3f}", str(row.repeats)
            table.add_row(Text(f"{row.implementation}{taken}"), *figures, f"{row.temporary_bytes:,}")
        return table


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
      repeats: how often to time each; at least 2.
      progress: whether to show a progress bar on stderr; by default, if stderr is a terminal.

    Raises:
      OperatorError: if an operator refuses its arguments.
    """
    is_count = isinstance(repeats, Integral) and not isinstance(repeats, bool) and repeats >= 2
    if not is_count:
        raise TypeError(f"bench: repeats must be an integer of at least 2; got {show(repeats)}")
    fn, args = of_arrays(fn, args)
    args = _arrays(args)
    jitted: Any = fn if hasattr(fn, "trace") else jax.jit(fn)
    rows: dict[str, Row] = {}
    compiled: dict[str, Any] = {}
    by_program: dict[str, str] = {}
    donated: list[bool] = []
    with timing.progress_bar(len(implementations) + repeats, progress) as bar:
        for implementation in implementations:
            bar.update(TaskID(0), description=f"compiling for {implementation}")
            with use(implementation):
                try:
                    lowered = jitted.lower(*args)
                except NotSupportedError as error:
                    rows[implementation] = Row(implementation, refused=str(error))
                    continue
                row = Row(implementation, _taken(jitted, args))
            first = by_program.setdefault(lowered.as_text(), implementation)
            if first == implementation:
                compiled[implementation] = lowered.compile()
                donated = [argument.donated for argument in jax.tree.leaves(lowered.args_info)]
            rows[implementation] = row if first == implementation else dataclasses.replace(row, same_as=first)
            bar.advance(TaskID(0))
        bar.update(TaskID(0), description="timing")
        times = timing.times_ms(
            compiled,
            repeats=repeats,
            prepare=lambda _: _fresh(args, donated),
            after_round=lambda: bar.advance(TaskID(0)),
        )
    for name, row in rows.items():
        timed = row.same_as or name
        if timed in compiled:
            temporary_bytes = compiled[timed].memory_analysis().temp_size_in_bytes
            rows[name] = dataclasses.replace(row, temporary_bytes=temporary_bytes, **timing.summary(times[timed]))
    device = device_name(here()) or here().name
    return BenchResult(device, dict(versions()), tuple(rows.values()))


def _arrays(args: Any) -> Any:
    leaves, structure = jax.tree.flatten(args)
    types = [leaf for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]
    known_sizes = [
        size for leaf in leaves if not isinstance(leaf, jax.ShapeDtypeStruct) for size in getattr(leaf, "shape", ())
    ]
    arrays = iter(made_up(types, known_sizes))
    filled = [next(arrays) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf for leaf in leaves]
    return jax.tree.unflatten(structure, filled)


def _fresh(args: Any, donated: Sequence[bool]) -> Any:
    leaves, structure = jax.tree.flatten(args)
    fresh = [jnp.copy(x) if is_donated else x for x, is_donated in zip(leaves, donated, strict=True)]
    return jax.tree.unflatten(structure, fresh)


def _taken(jitted: Any, args: Any) -> dict[str, list[str]]:
    """The implementations that each operator takes on this device."""
    found: dict[str, set[str]] = {}
    for row in explain(jitted, *args).rows:
        found.setdefault(row.operator, set()).add(row.implementation)
    return {operator: sorted(names) for operator, names in found.items()}
