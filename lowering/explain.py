"""Which implementation every operator of a function takes on a target, and why not the others."""

import dataclasses
import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.export
from jax.extend.core import Jaxpr
from rich.table import Table
from rich.text import Text

from lowering import cost, register, tables
from lowering.cpu_rates import with_measured_rates
from lowering.measurements import type_text
from lowering.notes import heard
from lowering.patterns import Opportunity, opportunities
from lowering.select import Choice, Refusal
from lowering.static_leaves import of_arrays
from lowering.targets import here, named_slice
from pallas_kernels.hardware import Hardware


@dataclasses.dataclass(frozen=True)
class Row:
    """One operator at one set of shapes, which the function runs `count` times.

    What follows is of one run. `flops` are the reference's, and of these `matmul_flops` are on the matrix units, by
    kind of product; `bytes` are those of operands and results, the least that any implementation moves. `seconds` is
    the time that the target needs for them at its best, evenly divided where operands lie on a mesh, and `bound` what
    it waits for: "memory" or "matmul". Both are None where too little is known of the target.
    """

    operator: str
    count: int
    operands: tuple[str, ...]
    results: tuple[str, ...]
    implementation: str
    refusals: tuple[Refusal, ...]
    flops: int
    matmul_flops: tuple[tuple[str, int], ...]
    bytes: int
    seconds: float | None
    bound: str | None


@dataclasses.dataclass(frozen=True)
class OperatorUse:
    """One equation of a function that is an operator of ours, and what is chosen for it.

    Attributes:
      operator: its record.
      count: how often the equation runs.
      operands: their types.
      results: their types.
      params: the operator's attributes.
      choice: the implementation, and what was refused before it.
      split: how operands are split over devices, as `register.partitioning` says.
      shared_by: over how many devices operands and results are divided.
    """

    operator: register.Operator
    count: int
    operands: Sequence[Any]
    results: Sequence[Any]
    params: Mapping[str, Any]
    choice: Choice
    split: str
    shared_by: int


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `explain` found. `print` it for a table; `to_json` for a program.

    Attributes:
      target: the name of the target that was lowered for.
      rows: one for each operator and set of shapes, in order of first use.
      total_flops: of the whole function, operators of ours and everything else; by primitives, before any compiler.
      opportunities: plain JAX in the function that an operator of ours would replace, what saves most first.
      notes: what operators chose while the function was traced, and why.
      near_misses: plain JAX that an operator computes as well, and what keeps that from saving anything.
    """

    target: str
    rows: tuple[Row, ...]
    total_flops: int
    opportunities: tuple[Opportunity, ...] = ()
    notes: tuple[str, ...] = ()
    near_misses: tuple[Opportunity, ...] = ()

    @property
    def share(self) -> float | None:
        """The part of the function's flops that is spent in our operators, from 0 to 1; None for symbolic sizes."""
        if jax.export.is_symbolic_dim(self.total_flops):
            return None
        return self.flops / self.total_flops if self.total_flops else 0.0

    @property
    def flops(self) -> int:
        """Of all runs of these operators."""
        return sum(row.count * row.flops for row in self.rows)

    @property
    def bytes(self) -> int:
        """Of all runs of these operators."""
        return sum(row.count * row.bytes for row in self.rows)

    @property
    def seconds(self) -> float | None:
        """The roofline's time for all runs of these operators; None where that of one is not known."""
        return _total_seconds(self.rows)

    def to_json(self) -> str:
        """Everything, as a JSON object."""
        totals = {name: getattr(self, name) for name in ("flops", "bytes", "seconds", "share")}
        return json.dumps({**dataclasses.asdict(self), **totals}, indent=2, default=str)

    def table(self) -> Table | Text:
        """The rows as a `rich` table: those of one operator together, with the costs of all of their runs."""
        if not self.rows:
            return Text(f"{self.target}: none of {_si(self.total_flops)}flop in operators of this library")
        share = "a part" if self.share is None else f"{self.share:.0%}"
        title = f"{self.target}: {share} of {_si(self.total_flops)}flop in these operators"
        table = Table(title=title, title_justify="left", show_footer=len(self.rows) > 1)
        totals = ("", _si(self.flops), _si(self.bytes), _si_seconds(self.seconds))
        table.add_column("operator and operands", "all", overflow="fold")
        table.add_column("implementation", overflow="fold")
        for name, total in zip(("runs", "flop", "bytes", "at best"), totals, strict=True):
            table.add_column(name, total, justify="right", no_wrap=True)
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
                "\n".join([_si_seconds(_total_seconds(rows)), *dict.fromkeys(row.bound or "" for row in rows)]).strip(),
            )
        return table

    def __str__(self) -> str:
        return "\n".join([tables.text(self.table()), *self.remarks])

    @property
    def remarks(self) -> list[str]:
        """Notes, opportunities and near misses, a line each, as they stand below the table."""
        return [*self.notes, *map(str, self.opportunities), *map(str, self.near_misses)]


def explain(fn: Callable[..., Any], *args: Any, target: str | None = None) -> Explanation:
    """Traces a function and says what each of our operators in it would run as, and what another would replace.

    Walks the whole computation, through jit, scan, cond, shard_map, checkpoint and derivative rules. Nothing is
    compiled or run. All branches of a cond count, and one turn of a while loop. Opportunities are looked for in the
    function and in each body of a loop, a branch or a shard_map, but not across the border between two of them.

    Args:
      fn: a function of arrays.
      *args: what it is called with: arrays, `jax.ShapeDtypeStruct`s, or pytrees of them. Arrays that lie on several
        devices are taken to stay there. What else is in a pytree, as in modules of Equinox, is fixed.
      target: the name of one of `targets()`, also of a slice as `compile` takes it; by default, the devices of this
        process. What a CPU reaches is measured here, once in a process.

    Raises:
      ValueError: for an unknown target.
      OperatorError: what an operator has to say about its arguments, in the words that calling the function would give.
    """
    hardware = here() if target is None else named_slice(target)
    fn, args = of_arrays(fn, args)
    with heard() as notes:
        jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    counts: dict[Row, int] = {}
    for use in operator_uses(jaxpr, args, hardware):
        row = _row(use, hardware)
        counts[row] = counts.get(row, 0) + use.count
    rows = tuple(dataclasses.replace(row, count=count) for row, count in counts.items())
    elsewhere = cost.flops(jaxpr, excluding={row.operator for row in rows})
    found = opportunities(jaxpr, register.patterns(), hardware.platform)
    return Explanation(
        hardware.name,
        rows,
        elsewhere + sum(row.count * row.flops for row in rows),
        opportunities=tuple(x for x in found if not x.obstacle),
        notes=tuple(notes),
        near_misses=tuple(x for x in found if x.obstacle),
    )


def operator_uses(jaxpr: Jaxpr, args: Any, hardware: Hardware) -> Iterator[OperatorUse]:
    """Every place where a function of these arguments uses an operator of ours, in order."""
    device_count = max((_device_count(leaf) for leaf in jax.tree.leaves(args)), default=1)
    yield from _uses(jaxpr, 1, hardware, device_count)


def _uses(jaxpr: Jaxpr, count: int, hardware: Hardware, device_count: int) -> Iterator[OperatorUse]:
    for equation in jaxpr.eqns:
        operator = register.operator_of(equation.primitive)
        if operator is not None:
            params = dict(equation.params)
            selection = params.pop("selection")
            operands, results = ([x.aval for x in side] for side in (equation.invars, equation.outvars))
            split = register.partitioning(operands, device_count)
            choice = register.choose(operator, selection, hardware, operands, params, split)
            shared_by = {"auto": device_count, "explicit": register.mesh_of(operands).size}.get(split, 1)
            yield OperatorUse(operator, count, operands, results, params, choice, split, shared_by)
        for body in cost.inner_jaxprs(equation):
            yield from _uses(body, count * cost.repetitions(equation), hardware, device_count)


def _row(use: OperatorUse, hardware: Hardware) -> Row:
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in use.operands]
    mesh_axes = list(register.mesh_of(use.operands).shape.items())
    meaning = functools.partial(use.operator.meaning, **use.params)
    reference = jax.make_jaxpr(meaning, axis_env=mesh_axes)(*shapes).jaxpr
    matmul_flops, moved = cost.matmul_flops(reference), cost.read_bytes(reference) + cost.array_bytes(use.results)
    seconds, bound = _roofline(hardware, matmul_flops, moved)
    return Row(
        operator=use.operator.name,
        count=0,
        operands=tuple(type_text(aval) for aval in use.operands),
        results=tuple(type_text(aval) for aval in use.results),
        implementation=use.choice.implementation,
        refusals=use.choice.refusals,
        flops=cost.flops(reference),
        matmul_flops=tuple(matmul_flops.items()),
        bytes=moved,
        seconds=None if seconds is None else seconds / use.shared_by,
        bound=bound,
    )


def _roofline(hardware: Hardware, matmul_flops: dict[str, int], moved: int) -> tuple[float | None, str | None]:
    """The least time that the chip needs for these products and bytes, and which of the two it waits for."""
    if jax.export.is_symbolic_dim(moved):
        return None, None
    if hardware == here() and hardware.platform == "cpu":
        hardware = with_measured_rates(hardware, matmul_flops)
    rates = dict(hardware.matmul_flops_per_s)
    if hardware.memory_bytes_per_s is None or any(kind not in rates for kind in matmul_flops):
        return None, None
    in_products = sum(count / rates[kind] for kind, count in matmul_flops.items())
    in_memory = moved / hardware.memory_bytes_per_s
    return max(in_products, in_memory), "matmul" if in_products > in_memory else "memory"


def _total_seconds(rows: Sequence[Row]) -> float | None:
    """Of all runs; None where that of one is not known."""
    known = [row.count * row.seconds for row in rows if row.seconds is not None]
    return sum(known) if len(known) == len(rows) else None


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


def _device_count(leaf: Any) -> int:
    sharding = getattr(leaf, "sharding", None)
    return 1 if sharding is None else sharding.num_devices


def _si(quantity: Any) -> str:
    """A number with a decimal prefix: 3 significant digits and then k, M, G, T or P. A symbolic one as it is."""
    if jax.export.is_symbolic_dim(quantity):
        return f"{quantity} "
    power = min(int(math.log10(quantity) // 3), 5) if quantity >= 1 else 0
    return f"{quantity / 1000**power:.3g} {('', 'k', 'M', 'G', 'T', 'P')[power]}"


def _si_seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    unit, name = next(((unit, name) for unit, name in ((1, "s"), (1e-3, "ms")) if seconds >= unit), (1e-6, "us"))
    return f"{seconds / unit:.3g} {name}"
