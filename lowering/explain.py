"""Which implementation every operator of a function takes on a target, and why not the others."""

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from io import StringIO
from typing import Any

import jax
from jax.extend.core import Jaxpr
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lowering import cost, register
from lowering.select import Refusal
from lowering.targets import here, named
from pallas_kernels.hardware import Hardware


@dataclasses.dataclass(frozen=True)
class Row:
    """One operator at one set of shapes, which the function runs `count` times; flops and bytes are those of one run.

    `flops` are the reference's; `bytes` are those of operands and results, the least that any implementation moves.
    """

    operator: str
    count: int
    operands: tuple[str, ...]
    results: tuple[str, ...]
    implementation: str
    refusals: tuple[Refusal, ...]
    flops: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `explain` found. `print` it for a table; `to_json` for a program.

    Attributes:
      target: the name of the target that was lowered for.
      rows: one for each operator and set of shapes, in order of first use.
      total_flops: of the whole function, operators of ours and everything else.
    """

    target: str
    rows: tuple[Row, ...]
    total_flops: int

    @property
    def share(self) -> float:
        """The part of the function's flops that is spent in our operators, from 0 to 1."""
        ours = sum(row.count * row.flops for row in self.rows)
        return ours / self.total_flops if self.total_flops else 0.0

    def to_json(self) -> str:
        """Everything, as a JSON object."""
        return json.dumps({**dataclasses.asdict(self), "share": self.share}, indent=2)

    def table(self) -> Table:
        """The rows as a `rich` table: those of one operator together, with the costs of all of their runs."""
        title = f"{self.target}: {self.share:.0%} of {_si(self.total_flops)}flop in these operators"
        table = Table(title=title, title_justify="left")
        for name in ("operator and operands", "implementation"):
            table.add_column(name, overflow="fold")
        for name in ("runs", "flop", "bytes"):
            table.add_column(name, justify="right", no_wrap=True)
        for rows in _alike(self.rows):
            first = rows[0]
            reasons = [f"{refusal.kernel}: {refusal.reason}" for refusal in first.refusals]
            if first.implementation == "reference" and not reasons:
                reasons = ["has no kernel"]
            table.add_row(
                Text.assemble((first.operator, "bold"), *(f"\n  {_brief(row.operands)}" for row in rows)),
                Text.assemble(first.implementation, *((f"\n  {reason}", "dim") for reason in reasons)),
                str(sum(row.count for row in rows)),
                _si(sum(row.count * row.flops for row in rows)),
                _si(sum(row.count * row.bytes for row in rows)),
            )
        return table

    def __str__(self) -> str:
        text = StringIO()
        Console(file=text, width=140, no_color=True).print(self.table())
        return text.getvalue().rstrip()


def explain(fn: Callable[..., Any], *args: Any, target: str | None = None) -> Explanation:
    """Traces a function and says what each of our operators in it would run as.

    Walks the whole computation, through jit, scan, cond, shard_map, checkpoint and derivative rules. Nothing is
    compiled or run. All branches of a cond count, and one turn of a while loop.

    Args:
      fn: a function of arrays.
      *args: what it is called with: arrays, `jax.ShapeDtypeStruct`s, or pytrees of them. Arrays that lie on several
        devices are taken to stay there.
      target: the name of one of `targets()`; by default, the devices of this process.

    Raises:
      ValueError: for an unknown target.
      OperatorError: what an operator has to say about its arguments, in the words that calling the function would give.
    """
    hardware = here() if target is None else named(target)
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    device_count = max((len(_devices(leaf)) for leaf in jax.tree.leaves(args)), default=1)
    rows: dict[Any, Row] = {}
    for operator, equation, count in _operators(jaxpr, 1):
        row = _row(operator, equation, count, hardware, device_count)
        key = dataclasses.replace(row, count=0)
        rows[key] = dataclasses.replace(row, count=row.count + (rows[key].count if key in rows else 0))
    elsewhere = cost.flops(jaxpr)
    ours = sum(row.count * row.flops for row in rows.values())
    return Explanation(hardware.name, tuple(rows.values()), elsewhere + ours)


def _operators(jaxpr: Jaxpr, count: int) -> Iterator[tuple[register.Operator, Any, int]]:
    """Each operator of ours with its equation and how often that runs."""
    for equation in jaxpr.eqns:
        operator = register.operator_of(equation.primitive)
        if operator is not None:
            yield operator, equation, count
        for body in cost.inner_jaxprs(equation):
            yield from _operators(body, count * cost.repetitions(equation))


def _row(operator: register.Operator, equation: Any, count: int, hardware: Hardware, device_count: int) -> Row:
    params = dict(equation.params)
    request = params.pop("selection").request(operator.name)
    operands = [x.aval for x in equation.invars]
    results = [x.aval for x in equation.outvars]
    split = register.partitioning(operands, device_count)
    choice = register.choose(operator, request, hardware, operands, params, split)
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in operands]
    mesh_axes = list(register.mesh_of(operands).shape.items())
    reference = jax.make_jaxpr(lambda *x: operator.meaning(*x, **params), axis_env=mesh_axes)(*shapes)
    return Row(
        operator=operator.name,
        count=count,
        operands=tuple(_describe(aval) for aval in operands),
        results=tuple(_describe(aval) for aval in results),
        implementation=choice.implementation,
        refusals=choice.refusals,
        flops=cost.flops(reference.jaxpr),
        bytes=cost.array_bytes([*operands, *results]),
    )


def _describe(aval: Any) -> str:
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def _alike(rows: tuple[Row, ...]) -> list[list[Row]]:
    """Rows that differ in their shapes only, together."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault((row.operator, row.implementation, row.refusals), []).append(row)
    return list(groups.values())


def _brief(operands: tuple[str, ...]) -> str:
    """Operands as jaxprs write them, equal neighbours once; without those of size 0, which stand for absent ones."""
    short = (re.sub(r"^(bf|f|u|i)(?:loat|int|nt)(?=\d)", r"\1", operand) for operand in operands)
    present = (operand for operand in short if not re.search(r"\b0\b", operand))
    groups = ((operand, len(list(group))) for operand, group in itertools.groupby(present))
    return ", ".join(operand if number == 1 else f"{number} x {operand}" for operand, number in groups)


def _devices(leaf: Any) -> set[Any]:
    return getattr(getattr(leaf, "sharding", None), "device_set", set())


def _si(quantity: float) -> str:
    """A number with a decimal prefix: 3 significant digits and then k, M, G, T or P."""
    power = min(int(math.log10(quantity) // 3), 5) if quantity >= 1 else 0
    return f"{quantity / 1000**power:.3g} {('', 'k', 'M', 'G', 'T', 'P')[power]}"
