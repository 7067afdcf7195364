"""Explains which implementation each operator in a function takes on a target, and why it takes no other."""

import collections
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.export
from jax.extend.core import Jaxpr
from rich.table import Table
from rich.text import Text

from lowering import cost, register, tables
from lowering.cpu_rates import with_measured_rates
from lowering.describe import show
from lowering.errors import NotSupportedError
from lowering.functions import with_changes
from lowering.operators import Operator, brief, heard, operator_of, type_text
from lowering.opportunities import Opportunity, opportunities
from lowering.rewriting.plan import Planner
from lowering.rewriting.report import Applied, megabytes
from lowering.rewriting.rules import rules_for
from lowering.select import Choice, Refusal
from lowering.source_lines import Site
from lowering.static_leaves import jaxpr_of, of_arrays
from lowering.targets import here, parse
from pallas_kernels.hardware import Hardware


@dataclasses.dataclass(frozen=True)
class Row:
    """One operator at one set of shapes. All figures are for a single run.

    Attributes:
      operator: its name.
      count: how often the function runs it.
      operands: their dtypes and shapes, such as "float32[8,128]".
      results: likewise.
      implementation: "reference", or the name of the form or kernel, such as "xla_prior_shift" or "mosaic_tpu".
      evidence: why "auto" takes a kernel that was not tuned at these shapes, or why the operator has none; else "".
      refusals: the kernels that were not chosen and the forms that refuse, with reasons.
      flops: arithmetic of the reference.
      matmul_flops: the part of `flops` on the matrix units, by kind of product.
      bytes: operands and results, the least that any implementation moves.
      seconds: the roofline's time, divided evenly if operands lie on a mesh; None if the target's rates are unknown.
      bound: what that time waits for, "memory" or "matmul"; None with `seconds`.
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
    evidence: str = ""


@dataclasses.dataclass(frozen=True)
class OperatorUse:
    """One equation of a function that is an operator of this library, and the implementation chosen for it.

    Attributes:
      operator: its record.
      count: how often the equation runs.
      operands: their types.
      results: their types.
      params: the operator's attributes.
      choice: the implementation, and the kernels that were refused.
      split: how operands are split over devices, as `register.partitioning` returns it.
      shared_by: the number of devices that operands and results are divided over.
    """

    operator: Operator
    count: int
    operands: Sequence[Any]
    results: Sequence[Any]
    params: Mapping[str, Any]
    choice: Choice
    split: str
    shared_by: int

    def reference(self) -> Jaxpr:
        """Traces what the operator means, in plain JAX."""
        shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in self.operands]
        mesh_axes = list(register.mesh_of(self.operands).shape.items())
        meaning = functools.partial(self.operator.meaning, **self.params)
        return jax.make_jaxpr(meaning, axis_env=mesh_axes)(*shapes).jaxpr


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Findings of `explain`. `print` shows a table; `to_json` is for programs.

    Attributes:
      target: the name of the target.
      rows: one for each operator at each set of shapes, in order of first use.
      total_flops: of the whole function, counted by primitive before any compiler runs.
      opportunities: plain JAX in the function that an operator could replace, the largest saving first.
      notes: choices that operators made while the function was traced, and why, and the function's own Pallas kernels.
      near_misses: plain JAX that an operator computes as well, and why replacing it saves nothing.
      rewrites: what `lowering.rewrite` would replace in the function as it is, to save memory.
    """

    target: str
    rows: tuple[Row, ...]
    total_flops: int
    opportunities: tuple[Opportunity, ...] = ()
    notes: tuple[str, ...] = ()
    near_misses: tuple[Opportunity, ...] = ()
    rewrites: tuple[Applied, ...] = ()

    @property
    def share(self) -> float | None:
        """The fraction of the function's flops that operators spend, from 0 to 1; None for symbolic sizes."""
        if jax.export.is_symbolic_dim(self.total_flops):
            return None
        return self.flops / self.total_flops if self.total_flops else 0.0

    @property
    def flops(self) -> int:
        """The flops of all runs of all operators."""
        return sum(row.count * row.flops for row in self.rows)

    @property
    def bytes(self) -> int:
        """The bytes of all runs of all operators."""
        return sum(row.count * row.bytes for row in self.rows)

    @property
    def seconds(self) -> float | None:
        """The roofline's time for all runs of all operators; None if one of them is unknown."""
        return _total_seconds(self.rows)

    def to_json(self) -> str:
        """Writes everything as a JSON object."""
        totals = {name: getattr(self, name) for name in ("flops", "bytes", "seconds", "share")}
        return json.dumps({**dataclasses.asdict(self), **totals}, indent=2, default=str)

    def table(self) -> Table | Text:
        """Lays out the rows as a `rich` table: each operator once, with the costs of all its runs."""
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
        for rows in _by_operator(self.rows):
            first = rows[0]
            reasons = [first.evidence] * bool(first.evidence)
            reasons += [f"{refusal.kernel}: {refusal.reason}" for refusal in first.refusals]
            if first.implementation == "reference" and not reasons:
                reasons = ["no kernel"]
            table.add_row(
                Text.assemble((first.operator, "bold"), *(f"\n  {brief(row.operands)}" for row in rows)),
                Text.assemble(first.implementation, *((f"\n  {reason}", "dim") for reason in reasons)),
                str(sum(row.count for row in rows)),
                _si(sum(row.count * row.flops for row in rows)),
                _si(sum(row.count * row.bytes for row in rows)),
                "\n".join([_si_seconds(_total_seconds(rows)), *dict.fromkeys(row.bound or "" for row in rows)]).strip(),
            )
        return table

    def __str__(self) -> str:
        return tables.text(self.table(), self.remarks)

    @property
    def remarks(self) -> list[str]:
        """The lines below the table: notes, what can be rewritten, other opportunities, and near misses."""
        rewritten = {one.source for one in self.rewrites}
        others = [one for one in self.opportunities if one.source not in rewritten]
        return [*self.notes, *map(self._rewrite, self.rewrites), *map(str, others), *map(str, self.near_misses)]

    def _rewrite(self, one: Applied) -> str:
        """Says what a rewrite would do in one place, and names the operator that a user could call there instead."""
        on_tpu = one.on_tpu if self.target.startswith("tpu") else ""
        here = (x for x in self.opportunities if (x.source, x.replacement) == (one.source, one.replacement))
        calls = dict.fromkeys(f"or call {x.call} instead" for x in here)
        saved = f"{megabytes(one.saved_bytes)}{'' if self.target == 'cpu' else ' on a CPU'}"
        would = f"`lowering.rewrite` would save about {saved} by {one.pattern}"
        return f"{one.source}: {would}: {'; '.join(filter(None, (one.detail, one.remark, on_tpu, *calls)))}"


def explain(fn: Callable[..., Any], *args: Any, target: str | None = None, require: str | None = None) -> Explanation:
    """Traces a function and tells which implementation each operator in it takes, and what another could replace.

    Walks the whole computation, through jit, scan, cond, shard_map, checkpoint and derivative rules. Compiles and runs
    nothing. Counts every branch of a cond, and one iteration of a while loop. Looks for opportunities in the function
    and in each body of a loop, branch or shard_map, but for none that crosses the border of a body.

    Args:
      fn: a function of arrays.
      *args: its arguments: arrays, `jax.ShapeDtypeStruct`s, or pytrees of them. Arrays on several devices are assumed
        to stay there. Everything else in a pytree, as in modules of Equinox, is fixed.
      target: the name of one of `targets()`, or of a slice, as `compile` takes it. By default, the devices of this
        process. The rates of a CPU are measured here, once per process.
      require: "kernel" makes it an error if an operator that has kernels for the target's platform takes none, or if
        the function has no operator, for the tests of a model that is meant to run on kernels. None requires nothing.

    Returns:
      The explanation; `print` shows it as a table.

    Raises:
      TypeError: if JAX cannot trace `fn`, or the arguments are not pytrees.
      ValueError: for an unknown target or requirement.
      NotSupportedError: if a kernel is required and not taken, with the reasons.
      OperatorError: if an operator refuses its arguments, in the words that a call of the function would give.

    Example:
      >>> explanation = lowering.explain(jaxops.softmax, jnp.ones((8, 128)), target="tpu-v5e")
      >>> explanation.rows[0].implementation
      'reference'
      >>> explanation.rows[0].refusals[0].reason
      'opt-in: no evidence near these sizes'
      >>> print(
      ...     lowering.explain(jaxops.softmax, jnp.ones((4096, 4096)), target="tpu-v5e")
      ...     .rows[0]
      ...     .implementation
      ... )
      mosaic_tpu
    """
    if require not in (None, "kernel"):
        raise ValueError(f'explain: require must be None or "kernel"; got {show(require)}')
    hardware = here() if target is None else parse(target).hardware
    fn, args = of_arrays(fn, args)
    with heard() as notes:
        jaxpr = jaxpr_of(with_changes(fn), args)
    uses = list(operator_uses(jaxpr, args, hardware))
    if require is not None:
        _require_kernels(uses, hardware)
    counts: dict[Row, int] = {}
    for use in uses:
        row = _row(use, hardware)
        counts[row] = counts.get(row, 0) + use.count
    rows = tuple(dataclasses.replace(row, count=count) for row, count in counts.items())
    elsewhere = cost.flops(jaxpr, hardware.platform, excluding={row.operator for row in rows})
    rules = rules_for(jaxpr)
    found = opportunities(jaxpr, rules, hardware.platform)
    usual = [rule for rule in rules if not rule.asked]
    saving = {rule.name for rule in usual if rule.platforms is None or hardware.platform in rule.platforms}
    return Explanation(
        hardware.name,
        rows,
        elsewhere + sum(row.count * row.flops for row in rows),
        opportunities=tuple(x for x in found if not x.obstacle),
        notes=(*notes, *_kernels_of_users(jaxpr, hardware.platform)),
        near_misses=tuple(x for x in found if x.obstacle),
        rewrites=tuple(x for x in Planner(usual).plan(jaxpr).applied if x.saved_bytes and x.pattern in saving),
    )


def _kernels_of_users(jaxpr: Jaxpr, platform: str) -> dict[str, None]:
    """Names the Pallas kernels that a function calls itself, outside of operators."""
    found: dict[str, None] = {}
    for equation in jaxpr.eqns:
        if equation.primitive.name == cost.PALLAS_CALL:
            line = Site(equation.source_info.traceback).line
            note = f"{line}: a Pallas kernel of the function's own, which runs as it is; `lowering.compile` shows it"
            found[note] = None
        for body in cost.bodies_on(equation, platform):
            found.update(_kernels_of_users(body, platform))
    return found


def _require_kernels(uses: Sequence[OperatorUse], hardware: Hardware) -> None:
    """Refuses operators that could take a kernel for the hardware and take none."""
    if not uses:
        raise NotSupportedError(
            f"explain: an operator of this library must take a kernel on {hardware.name}; the function has none"
        )
    without: dict[str, None] = {}
    for use in uses:
        own = {kernel.name for kernel in register.kernels_of(use.operator) if kernel.platform == hardware.platform}
        if own and use.choice.kernel is None:
            reasons = (
                f"{refusal.kernel}: {refusal.reason}" for refusal in use.choice.refusals if refusal.kernel in own
            )
            what = f"{use.operator.name}({brief([type_text(aval) for aval in use.operands])})"
            without[f"{what} ({'; '.join(reasons) or use.choice.implementation})"] = None
    if without:
        raise NotSupportedError(
            f"explain: each operator must take a kernel on {hardware.name}; got {', '.join(without)}"
        )


def product_flops(jaxpr: Jaxpr, args: Any, hardware: Hardware) -> dict[str, int]:
    """Counts the flops of a function's matrix products by kind, those that its operators mean too."""
    found = collections.Counter(cost.matmul_flops(jaxpr, hardware.platform))
    for use in operator_uses(jaxpr, args, hardware):
        for kind, flops in cost.matmul_flops(use.reference(), hardware.platform).items():
            found[kind] += use.count * flops
    return dict(found)


def operator_uses(jaxpr: Jaxpr, args: Any, hardware: Hardware) -> Iterator[OperatorUse]:
    """Yields every use of an operator in a function of these arguments, in order."""
    device_count = max((_device_count(leaf) for leaf in jax.tree.leaves(args)), default=1)
    yield from _uses(jaxpr, 1, hardware, device_count)


def _uses(jaxpr: Jaxpr, count: int, hardware: Hardware, device_count: int) -> Iterator[OperatorUse]:
    for equation in jaxpr.eqns:
        operator = operator_of(equation.primitive)
        if operator is not None:
            params = dict(equation.params)
            selection = params.pop("selection")
            operands, results = ([x.aval for x in side] for side in (equation.invars, equation.outvars))
            split = register.partitioning(operands, device_count)
            choice = register.choose_in_program(operator, selection, hardware, operands, params, device_count)
            shared_by = {"auto": device_count, "explicit": register.mesh_of(operands).size}.get(split, 1)
            yield OperatorUse(operator, count, operands, results, params, choice, split, shared_by)
        for body in cost.bodies_on(equation, hardware.platform):
            yield from _uses(body, count * cost.repetitions(equation), hardware, device_count)


def _row(use: OperatorUse, hardware: Hardware) -> Row:
    reference = use.reference()
    matmul_flops = cost.matmul_flops(reference, hardware.platform)
    moved_bytes = cost.read_bytes(reference) + cost.array_bytes(use.results)
    seconds, bound = _roofline(hardware, matmul_flops, moved_bytes)
    return Row(
        operator=use.operator.name,
        count=0,
        operands=tuple(type_text(aval) for aval in use.operands),
        results=tuple(type_text(aval) for aval in use.results),
        implementation=use.choice.implementation,
        refusals=use.choice.refusals,
        flops=cost.flops(reference, hardware.platform),
        matmul_flops=tuple(matmul_flops.items()),
        bytes=moved_bytes,
        seconds=None if seconds is None else seconds / use.shared_by,
        bound=bound,
        evidence=use.choice.evidence or (use.operator.no_kernel and f"no kernel: {use.operator.no_kernel}"),
    )


def _roofline(hardware: Hardware, matmul_flops: dict[str, int], moved_bytes: int) -> tuple[float | None, str | None]:
    """Returns the least time that the chip needs for these products and bytes, and which of the two limits it."""
    if jax.export.is_symbolic_dim(moved_bytes):
        return None, None
    if hardware == here() and hardware.platform == "cpu":
        hardware = with_measured_rates(hardware, matmul_flops)
    rates = dict(hardware.matmul_flops_per_s)
    if hardware.memory_bytes_per_s is None or any(kind not in rates for kind in matmul_flops):
        return None, None
    in_products = sum(count / rates[kind] for kind, count in matmul_flops.items())
    in_memory = moved_bytes / hardware.memory_bytes_per_s
    return max(in_products, in_memory), "matmul" if in_products > in_memory else "memory"


def _total_seconds(rows: Sequence[Row]) -> float | None:
    """Returns the time of all runs; None if one row's is unknown."""
    known = [row.count * row.seconds for row in rows if row.seconds is not None]
    return sum(known) if len(known) == len(rows) else None


def _by_operator(rows: tuple[Row, ...]) -> list[list[Row]]:
    """Groups rows that differ only in their shapes."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault((row.operator, row.implementation, row.refusals, row.evidence), []).append(row)
    return list(groups.values())


def _device_count(leaf: Any) -> int:
    sharding = getattr(leaf, "sharding", None)
    return 1 if sharding is None else sharding.num_devices


def _si(quantity: Any) -> str:
    """Writes three significant digits and a decimal prefix: k, M, G, T or P. A symbolic size stays as it is."""
    if jax.export.is_symbolic_dim(quantity):
        return f"{quantity} "
    power = min(int(math.log10(quantity) // 3), 5) if quantity >= 1 else 0
    return f"{quantity / 1000**power:.3g} {('', 'k', 'M', 'G', 'T', 'P')[power]}"


def _si_seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    unit, name = next(((unit, name) for unit, name in ((1, "s"), (1e-3, "ms")) if seconds >= unit), (1e-6, "us"))
    return f"{seconds / unit:.3g} {name}"
