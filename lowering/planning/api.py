"""Plans where a function could run: compiles it for every slice and mesh, and reads what that takes."""

import dataclasses
import itertools
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, use_abstract_mesh
from rich.progress import TaskID

from lowering.compiling.compile import CompileError, availability, compile
from lowering.describe import opening, show
from lowering.errors import UsageError
from lowering.explain import product_flops
from lowering.functions import named_as, with_changes
from lowering.measuring.timing import progress_bar
from lowering.planning import cache as kept
from lowering.planning import hlo, links
from lowering.planning.cases import Case, PlanError, UnevenError, cases, placed
from lowering.planning.collectives import Collective, collectives
from lowering.planning.host import host_copies
from lowering.planning.products import compiled_product_flops
from lowering.planning.report import Plan, Row, TimedCollective, mesh_text, ordered
from lowering.schedule.report import Schedule
from lowering.static_leaves import of_arrays

# From how many times its share on a plan says what a chip computes. Remat repeats a forward pass, which is a third.
_REPEATED = 1.8
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# How a TPU's compiler says that memory does not suffice: what it needs, and what there is.
_TOO_LARGE = (
    re.compile(r"[Uu]sed (?P<used>[\d.]+)(?P<used_unit>[KMGT]) of (?P<limit>[\d.]+)(?P<limit_unit>[KMGT]) hbm"),
    re.compile(
        r"\((?P<used>[\d.]+)(?P<used_unit>[KMGT])\) exceeds available HBM \((?P<limit>[\d.]+)(?P<limit_unit>[KMGT])\)"
    ),
)


def plan(
    fn: Callable[..., Any] | Mapping[str, Callable[..., Any]],
    *args: Any,
    targets: Sequence[str],
    meshes: Sequence[Mapping[str, int]],
    shardings: Callable[[AbstractMesh], Any] | None = None,
    tokens: int | None = None,
    price_per_chip_hour: Mapping[str, float] | None = None,
    budget_seconds: float = math.inf,
    cache: str | Path | None = None,
    progress: bool | None = None,
) -> Plan:
    """Compiles a function for every slice and mesh, and tells what fits, what is sent, and how fast it could be.

    No chip is needed: each slice's real compiler runs here, as for `lowering.compile`. A step takes at least

        max(matmul flops / rate, bytes in memory / bandwidth, bytes on links / links' rates, bytes offloaded / PCIe)

    which is `bound_seconds` of a row; `serial_seconds` is the sum of the four. What it takes beyond is unknown:
    stragglers, latencies, input from the host, and what XLA's fusions really read. What was compiled is kept, so the
    same plan costs nothing the next time, and one that the budget has stopped goes on.

    Args:
      fn: a step, jitted or not. Donated arguments stay donated. It may name the mesh's axes in
        `jax.lax.with_sharding_constraint(x, PartitionSpec(...))`. Or several by name, such as one step for each policy
        of `jax.checkpoint`: all are planned, and a row names its own as `variant`.
      *args: its arguments: arrays, `jax.ShapeDtypeStruct`s, or pytrees of them.
      targets: slices, such as "tpu-v5e:4x4" or "cuda-h100:64", or single chips.
      meshes: the sizes of the axes, by name; -1 takes what the other axes leave. A mesh is planned on every target that
        has as many devices.
      shardings: for a mesh, a tuple with an entry for each argument: a `PartitionSpec`, None for what every device
        holds whole, or a pytree of them that is a prefix of the argument. By default, every device holds everything.
      tokens: of one step, for `tokens_per_second`.
      price_per_chip_hour: by chip, such as {"tpu-v5e": 1.2}, for `cost_per_step`.
      budget_seconds: after which no further compilation begins.
      cache: a folder for what was compiled; by default one in the user's cache.
      progress: whether to show a progress bar on stderr; by default, if stderr is a terminal.

    Returns:
      A row for each slice and mesh, the best first; `print` shows a table.

    Raises:
      PlanError: if a target, mesh, spec, price or budget cannot be used, or a compiler is missing.
      TypeError: if JAX cannot trace `fn`, or the arguments are not pytrees.

    Example:
      >>> lowering.plan(jnp.sin, jnp.ones(8), targets=["tpu-v5e:2x2"], meshes=[{"data": 3}])
      Traceback (most recent call last):
          ...
      lowering.planning.cases.PlanError: plan: meshes must have as many devices as a target; ...
    """
    variants = _variants(fn, args)
    found = list(itertools.product(cases(targets, meshes), variants))
    _require_numbers(tokens, price_per_chip_hour, budget_seconds)
    folder = kept.folder(cache)
    deadline = time.monotonic() + budget_seconds
    rows: list[Row] = []
    left = 0
    with progress_bar(len(found), progress) as bar:
        for case, (variant, jitted, arrays) in found:
            bar.update(TaskID(0), description=f"{case.name} {mesh_text(case.mesh.shape)} {variant}")
            row = _row(jitted, arrays, case, shardings, folder, deadline)
            if row is None:
                left += 1
            else:
                row = dataclasses.replace(row, variant=variant)
                rows.append(_with_rates(row, case, tokens, price_per_chip_hour or {}))
            bar.advance(TaskID(0))
    stopped = f"stopped at the time budget: {left} of {len(found)} left" if left else ""
    return Plan(ordered(rows), stopped)


def _variants(fn: Any, args: tuple[Any, ...]) -> list[tuple[str, Any, tuple[Any, ...]]]:
    """Returns the functions to plan, jitted, with their names and arguments; a function alone has no name."""
    if isinstance(fn, Mapping) and not (fn and all(isinstance(name, str) and name for name in fn)):
        raise PlanError(f"plan: fn must be a function, or a dict of functions by name; got {show(fn)}")
    given = {name: of_arrays(one, args) for name, one in (fn if isinstance(fn, Mapping) else {"": fn}).items()}
    return [
        (name, one if hasattr(one, "trace") else jax.jit(with_changes(one)), arrays)
        for name, (one, arrays) in given.items()
    ]


def _require_numbers(tokens: Any, prices: Any, budget_seconds: Any) -> None:
    if tokens is not None and not (isinstance(tokens, int) and tokens > 0):
        raise PlanError(f"plan: tokens must be a positive integer; got {show(tokens)}")
    if prices is not None and not (
        isinstance(prices, Mapping)
        and all(isinstance(price, int | float) and 0 <= price < math.inf for price in prices.values())
    ):
        raise PlanError(f"plan: price_per_chip_hour must be a dict of prices by chip; got {show(prices)}")
    for name in prices or {}:
        if name not in links.LINKS:
            raise PlanError(f"plan: price_per_chip_hour must name {', '.join(links.LINKS)}; got {show(name)}")
    if not (isinstance(budget_seconds, int | float) and budget_seconds >= 0):
        raise PlanError(f"plan: budget_seconds must be a number of seconds; got {show(budget_seconds)}")


def _row(
    jitted: Any,
    args: Sequence[Any],
    case: Case,
    shardings: Callable[[AbstractMesh], Any] | None,
    folder: Path,
    deadline: float,
) -> Row | None:
    """Returns the needs of one case; None if it would have to be compiled and there is no time left."""
    began = time.perf_counter()
    mesh = dict(case.mesh.shape)
    empty = Row(case.name, mesh, case.target.device_count, None, None, case.target.hardware.memory_bytes)
    try:
        types = placed(args, case.mesh, shardings)
        with use_abstract_mesh(case.mesh):
            traced = jitted.trace(*types)
    except UnevenError as error:
        return dataclasses.replace(empty, refusal=str(error).removeprefix("plan: "))
    except ValueError as error:
        if isinstance(error, PlanError | UsageError):
            raise
        return dataclasses.replace(empty, refusal=opening(str(error), "a call of the function"))
    donated = [argument.donated for argument in jax.tree.leaves(traced.args_info)]
    name = kept.key(case, traced.jaxpr, types, donated)
    record = kept.read(folder, name)
    if record is None:
        if time.monotonic() >= deadline:
            return None
        record = _compiled(_alone(jitted, traced, case.mesh) if case.mesh.size == 1 else jitted, types, case)
        record["compile_seconds"] = time.perf_counter() - began
        kept.write(folder, name, record)
    return _of_record(empty, record, product_flops(traced.jaxpr.jaxpr, types, case.target.hardware), case)


def _alone(jitted: Any, traced: Any, mesh: AbstractMesh) -> Any:
    """Returns the function on one chip, where it may still name the axes of its mesh."""
    arguments = traced.args_info[0]
    donated = [number for number, one in enumerate(arguments) if any(leaf.donated for leaf in jax.tree.leaves(one))]

    @named_as(jitted)
    def call(*args: Any) -> Any:
        with use_abstract_mesh(mesh):
            return jitted(*args)

    return jax.jit(call, donate_argnums=donated)


def _compiled(jitted: Any, types: Sequence[Any], case: Case) -> dict[str, Any]:
    """Returns the compiler's report on a program, as it is kept."""
    hardware = case.target.hardware
    if availability(hardware) not in ("here", "can compile for"):
        raise PlanError(
            f"plan: targets must be chips that can be compiled for; got {case.name}, which {availability(hardware)}"
        )
    try:
        report = compile(jitted, *types, target=case.name)
    except CompileError as error:
        message = str(error)
        for pattern in _TOO_LARGE:
            if found := pattern.search(message):
                sizes = {side: round(float(found[side]) * _UNITS[found[f"{side}_unit"]]) for side in ("used", "limit")}
                return {"memory_bytes": sizes["used"], "memory_limit_bytes": sizes["limit"]}
        return {"refusal": opening(message.removeprefix("lowering.compile: "), "`lowering.compile`")}
    program = hlo.parse(report.hlo)
    return {
        "memory": dataclasses.asdict(report.memory),
        "memory_bytes": report.memory.peak,
        "product_flops": compiled_product_flops(program),
        "collectives": [dataclasses.asdict(one) for one in collectives(program, dict(case.mesh.shape))],
        "unknown_loops": program.unknown_loops,
        "host_copies": host_copies(program),
        "replayed_us": _replayed_us(_schedule(jitted, types, case)),
    }


def _schedule(jitted: Any, types: Sequence[Any], case: Case) -> Schedule | None:
    """Replays a single TPU's program, if data decides nothing in it."""
    if case.target.hardware.platform != "tpu" or case.target.topology:
        return None
    try:
        return compile(jitted, *types, target=case.name, schedule=True).schedule
    except CompileError:
        return None


def _replayed_us(schedule: Schedule | None) -> float | None:
    return None if schedule is None or schedule.unknown else schedule.total_us


def _of_record(empty: Row, record: Mapping[str, Any], flops: Mapping[str, int], case: Case) -> Row:
    """Returns the row for the record kept of a program."""
    if record.get("refusal"):
        return dataclasses.replace(empty, refusal=record["refusal"])
    limit = record.get("memory_limit_bytes", empty.memory_limit_bytes)
    memory = record.get("memory", {})
    found = [_timed(one, case) for one in record.get("collectives", ())]
    replayed_us = record.get("replayed_us")
    repeated = _repeated(flops, record.get("product_flops", 0), case)
    seconds, per_chip = _matmul(flops, repeated, case)
    # A TPU's compiler gives no program that does not fit; what it reports adds up to more than the peak.
    is_placed = bool(memory) and case.target.hardware.platform == "tpu"
    row = dataclasses.replace(
        empty,
        fits=is_placed or record["memory_bytes"] <= limit,
        memory_bytes=min(record["memory_bytes"], limit) if is_placed else record["memory_bytes"],
        memory_limit_bytes=limit,
        collectives=tuple(sorted(found, key=lambda one: -one.seconds)),
        matmul_flops=per_chip,
        matmul_seconds=seconds,
        replayed_seconds=None if replayed_us is None else 1e-6 * replayed_us,
        compile_seconds=record.get("compile_seconds", 0.0),
        remarks=_remarks(record, repeated, case),
    )
    if not memory:  # the compiler gives no program
        return row
    moved = memory["arguments"] + memory["outputs"] + 2 * memory["temporaries"]
    bandwidth = case.target.hardware.memory_bytes_per_s
    offloaded = sum(record["host_copies"])
    to_host, _ = links.HOST_LINKS.get(case.target.hardware.name, (None, ""))
    return dataclasses.replace(
        row,
        host_bytes=offloaded,
        host_seconds=None if to_host is None else offloaded / to_host,
        memory_seconds=None if bandwidth is None else moved / bandwidth,
        link_seconds=sum(one.seconds for one in found),
    )


def _timed(record: Mapping[str, Any], case: Case) -> TimedCollective:
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in record.items()
    }
    one = Collective(**fields)
    return TimedCollective(**fields, seconds=links.seconds(one, case.target))


def _repeated(flops: Mapping[str, int], compiled_flops: int, case: Case) -> float:
    """Returns how many times its even share of the products each chip computes."""
    share = sum(flops.values()) / case.target.device_count
    return max(1.0, compiled_flops / share) if share else 1.0


def _matmul(flops: Mapping[str, int], repeated: float, case: Case) -> tuple[float | None, int]:
    """Returns the time and flops of a chip's products."""
    rates = dict(case.target.hardware.matmul_flops_per_s)
    share = round(repeated * sum(flops.values()) / case.target.device_count)
    if any(kind not in rates for kind in flops):
        return None, share
    seconds = sum(count / rates[kind] for kind, count in flops.items()) / case.target.device_count
    return seconds * repeated, share


def _remarks(record: Mapping[str, Any], repeated: float, case: Case) -> tuple[str, ...]:
    remarks = []
    if repeated >= _REPEATED:
        where = f"{case.name} {mesh_text(case.mesh.shape)}"
        cure = "what `shardings` leaves whole, every chip computes"
        remarks.append(f"{where}: each chip computes {repeated:.1f} times its share of the products; {cure}")
    if record.get("unknown_loops"):
        remarks.append(f"{case.name}: loops whose turns data decides count as one turn: {len(record['unknown_loops'])}")
    chip = case.target.hardware.name
    if case.target.device_count > 1:
        remarks.append(f"{chip}'s links: {links.LINKS[chip].source}")
    if any(record.get("host_copies", ())):
        _, source = links.HOST_LINKS.get(chip, (None, "its rate is not published"))
        remarks.append(f"{chip}'s link to its host: {source}")
    return tuple(remarks)


def _with_rates(row: Row, case: Case, tokens: int | None, prices: Mapping[str, float]) -> Row:
    seconds = row.bound_seconds
    if not seconds or not row.fits:
        return row
    price = prices.get(case.target.hardware.name)
    chips = case.target.device_count / case.target.hardware.devices_per_chip
    return dataclasses.replace(
        row,
        tokens_per_second=None if tokens is None else tokens / seconds,
        cost_per_step=None if price is None else price * chips * seconds / 3600,
    )
