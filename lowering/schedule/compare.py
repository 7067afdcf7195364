"""Comparison of a function under several implementations, by the schedules that a compiler makes of it."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from rich.table import Table
from rich.text import Text

from lowering import tables
from lowering.compiling.compile import compile
from lowering.describe import show
from lowering.errors import NotSupportedError
from lowering.explain import explain
from lowering.schedule.report import Schedule
from lowering.select import use

_LEAST_SHARE = 0.01  # of a program, for a kernel to have a line; of a kernel, for its roofline to say anything
_OTHER = "other"


@dataclasses.dataclass(frozen=True)
class Compared:
    """A function under one implementation.

    Attributes:
      implementation: of `lowering.use`.
      taken: the implementations of each operator in it.
      schedule: how long it takes; None where it is refused.
      refused: why.
    """

    implementation: str
    taken: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    schedule: Schedule | None = None
    refused: str = ""


@dataclasses.dataclass(frozen=True)
class OperatorTimes:
    """Times of one operator under each implementation.

    Attributes:
      operator: with its operands, such as "softmax(f32[8,128])"; "other" for all that belongs to none.
      time_us: of all kernels and fusions that the compiler's metadata assigns to it, by implementation; None where
        there are none, as where XLA has fused it into something else.
    """

    operator: str
    time_us: Mapping[str, float | None]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Findings of `compare`, in the order that was asked for. `print` it for tables."""

    target: str
    rows: tuple[Compared, ...]

    @property
    def operators(self) -> tuple[OperatorTimes, ...]:
        """The time of each operator, what takes longest under the first implementation first; last all other."""
        times: dict[str, dict[str, float]] = {row.implementation: {} for row in self.rows if row.schedule is not None}
        for row in self.rows:
            for kernel in row.schedule.kernels if row.schedule is not None else ():
                of_row, name = times[row.implementation], kernel.operator or _OTHER
                of_row[name] = of_row.get(name, 0.0) + kernel.time_us
        names = dict.fromkeys(name for of_row in times.values() for name in sorted(of_row, key=lambda x: -of_row[x]))
        ordered = [*(name for name in names if name != _OTHER), *([_OTHER] if _OTHER in names else [])]
        return tuple(OperatorTimes(name, {each: times[each].get(name) for each in times}) for name in ordered)

    def to_json(self) -> str:
        """Returns everything as a JSON object."""
        rows = [{**vars(row), "schedule": row.schedule and row.schedule.to_record()} for row in self.rows]
        operators = [*map(dataclasses.asdict, self.operators)]
        return json.dumps({"target": self.target, "rows": rows, "operators": operators}, indent=2)

    def table(self) -> Table:
        """Lays out each implementation's time as a `rich` table, with the kernels that it is made of."""
        table = Table(title=f"{self.target}, by the compiler's schedules", title_justify="left")
        table.add_column("implementation", overflow="fold")
        table.add_column("bound by")
        for name in ("us", "of the first", "of the roofline"):
            table.add_column(name, justify="right", no_wrap=True)
        known = [row.schedule.total_us for row in self.rows if row.schedule is not None]
        for row in self.rows:
            if row.schedule is None:
                table.add_row(Text(f"{row.implementation}\n  {row.refused}"), *["-"] * 4, style="dim")
                continue
            taken = "".join(f"\n  {operator}: {', '.join(names)}" for operator, names in row.taken.items())
            total_us, roofline_us = row.schedule.total_us, row.schedule.roofline_us
            ratios = f"{total_us / known[0]:.2f}", f"{total_us / roofline_us:.2f}" if roofline_us else "-"
            table.add_row(Text.assemble((row.implementation, "bold"), taken), "", f"{total_us:,.1f}", *ratios)
            for kernel in row.schedule.kernels:
                if kernel.share >= _LEAST_SHARE:
                    calls = f" x {kernel.calls}" if kernel.calls > 1 else ""
                    is_bound = kernel.roofline_us > _LEAST_SHARE * kernel.time_us
                    part = f"{kernel.time_us / kernel.roofline_us:.2f}" if is_bound else "-"
                    table.add_row(
                        Text(f"    {kernel.name}{calls}"), kernel.bound, f"{kernel.time_us:,.1f}", "", part, style="dim"
                    )
            table.add_section()
        return table

    def table_by_operator(self) -> Table:
        """Lays out each operator's time under each implementation as a `rich` table."""
        table = Table(title="us, by operator", title_justify="left")
        table.add_column("operator and operands", overflow="fold")
        for position, name in enumerate(self.operators[0].time_us if self.operators else ()):
            table.add_column(name, justify="right", no_wrap=True)
            if position:
                table.add_column("of the first", justify="right", no_wrap=True)
        for row in self.operators:
            first, *others = row.time_us.values()
            cells = ["-" if first is None else f"{first:,.1f}"]
            for time_us in others:
                cells.append("-" if time_us is None else f"{time_us:,.1f}")
                cells.append(f"{time_us / first:.2f}" if first and time_us is not None else "-")
            table.add_row(row.operator, *cells, style="dim" if row.operator == _OTHER else "")
        return table

    def __str__(self) -> str:
        remarks = dict.fromkeys(remark for row in self.rows if row.schedule for remark in row.schedule.remarks)
        return "\n".join([tables.text(self.table()), tables.text(self.table_by_operator(), tuple(remarks))])


def compare(
    fn: Callable[..., Any],
    *args: Any,
    target: str,
    implementations: Sequence[str] = ("reference", "pallas"),
    trip_counts: Mapping[str, float] | None = None,
    scalars: Mapping[str, Mapping[int, jax.typing.ArrayLike]] | None = None,
    auto_layouts: bool = False,
) -> Comparison:
    """Compiles a function for a TPU under each implementation, and replays what the compiler has scheduled.

    Nothing runs, and the chip need not be here. docs/schedule.md says how far such times are to be trusted.

        >>> def loss(x):
        ...     return jaxops.softmax(x).max()
        >>> try:
        ...     lowering.compare(
        ...         loss, jax.ShapeDtypeStruct((8, 128), jnp.float32), target="cpu"
        ...     )
        ... except lowering.CompileError as error:
        ...     print(error)
        lowering.compile: schedule must be asked for a TPU; got 'cpu'

    Args:
      fn: a function of arrays, jitted or not.
      *args: what it is called with: arrays, `jax.ShapeDtypeStruct`s, or pytrees of them.
      target: the name of a TPU.
      implementations: of `lowering.use`, such as "reference", "pallas" and "auto"; all are compared to the first.
      trip_counts: as for `compile`.
      scalars: likewise.
      auto_layouts: likewise.

    Raises:
      CompileError: as for `compile`.
      OperatorError: what an operator has to say about its arguments, under every implementation.
      TypeError: if `implementations` is not a sequence of names.
    """
    if isinstance(implementations, str) or not isinstance(implementations, Sequence):
        raise TypeError(f"compare: implementations must be a sequence of names; got {show(implementations)}")
    rows = []
    options: dict[str, Any] = {"trip_counts": trip_counts, "scalars": scalars, "auto_layouts": auto_layouts}
    for implementation in implementations:
        with use(implementation):
            try:
                report = compile(fn, *args, target=target, schedule=True, **options)
            except NotSupportedError as error:
                rows.append(Compared(implementation, refused=str(error)))
                continue
            taken: dict[str, list[str]] = {}
            for row in explain(fn, *args, target=target).rows:
                names = taken.setdefault(row.operator, [])
                names += [row.implementation] if row.implementation not in names else []
        rows.append(Compared(implementation, taken, report.schedule))
    return Comparison(target, tuple(rows))
