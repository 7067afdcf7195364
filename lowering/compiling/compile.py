"""Compiles a function for a chip, in this machine or not, with that chip's real compiler."""

import contextlib
import dataclasses
import itertools
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from lowering import _jax_private, static_leaves
from lowering.artifact_arguments import Expected, fixed_text, types_by_path
from lowering.compiling import compilers, process
from lowering.compiling.progress import shown
from lowering.compiling.report import UNCHECKED_CALLS, CompiledReport, compiled_facts, gpu_resources, report_of
from lowering.describe import shortened, show
from lowering.functions import with_changes
from lowering.schedule.data_hints import DependsOnDataError, Given
from lowering.schedule.report import Schedule, schedule_of
from lowering.targets import TargetSlice, TopologyError, abstract_device, compiled_for, here, parse
from lowering.tpu_core.dumps import libtpu_flags
from pallas_kernels.hardware import Hardware

_SCREEN = 30  # lines


class CompileError(RuntimeError):
    """The compiler for a target refuses a function, or is not installed; or its program refuses its arguments."""


def availability(hardware: Hardware) -> str:
    """Tells whether this machine has a chip, can compile for it, or needs a compiler first.

    Args:
      hardware: one of `lowering.targets()`.

    Returns:
      "here", "can compile for", or "needs: " and the command that installs the compiler.

    Example:
      >>> cpu, *others = lowering.targets()
      >>> lowering.availability(cpu)
      'here'
    """
    if not isinstance(hardware, Hardware):
        raise TypeError(f"availability: hardware must be one of lowering.targets(); got {show(hardware)}")
    if hardware.platform == "cpu" or hardware == here():
        return "here"
    if compilers.interpreter(hardware.platform):
        return "can compile for"
    return f"needs: {compilers.command(hardware.platform)}"


def compile(
    fn: Callable[..., Any],
    *args: Any,
    target: str,
    schedule: bool = False,
    trip_counts: Mapping[str, float] | None = None,
    scalars: Mapping[str, Mapping[int, jax.typing.ArrayLike]] | None = None,
    auto_layouts: bool = False,
) -> CompiledReport:
    """Compiles a function with a chip's real compiler, even if this machine does not have the chip.

    For a chip of another platform, the function is traced and lowered in this process and compiled in a second one,
    so no setting changes here. The second process stays alive for a while, ready for the next call. On a terminal a
    spinner shows progress. Operators use the implementations that `lowering.explain` names for the target; to ask for
    kernels, call this within `jaxops.use("pallas")`.

    Args:
      fn: a function of arrays, jitted or not. Donated arguments stay donated.
      *args: its arguments: arrays, `jax.ShapeDtypeStruct`s, or pytrees of them. For a slice, give them shardings over
        a mesh with as many devices as the slice; a `jax.sharding.AbstractMesh` will do.
      target: the name of one of `targets()`; for a slice, followed by its topology, as in "tpu-v5e:16x16",
        "tpu-v5p:8x8x8" or "cuda-h100:8".
      schedule: whether to replay the schedule that a TPU's compiler makes, for `report.schedule`: how long the program
        takes, by kernel, and what binds it. See docs/schedule.md for how far that is to be trusted.
      trip_counts: how often a loop turns in the mean, or what a branch may skip is run (as a fraction), where
        data decides that, by the name that a refusal gives, or by kernel.
      scalars: what operands of kernels hold that decide such things, as integer arrays, or one integer for all
        elements: by kernel, and by the position of the operand in its call. Those of scalar prefetch come first.
      auto_layouts: for schedules, whether the compiler chooses how arguments and results lie in memory, as it does
        for what is computed within a larger program. With JAX's default layouts, an operator alone may be charged
        with copies that no model makes.

    Returns:
      The facts and texts of the compiled program. If the target is in this machine, `call` runs the program, and
      refuses other arguments with CompileError.

    Raises:
      CompileError: if the compiler is missing or refuses the function, if the mesh and the target differ in their
        numbers of devices, or if a shape is symbolic. For schedules: if the target is not a TPU, or if data decides
        what happens and neither `trip_counts` nor `scalars` says what.
      TypeError: if JAX cannot trace `fn`, or the arguments are not pytrees.
      ValueError: for an unknown target.
      OperatorError: if an operator refuses its arguments.

    Example:
      >>> x = jax.ShapeDtypeStruct((4, 3), jnp.float32)
      >>> report = lowering.compile(jax.nn.relu, x, target="cpu")
      >>> report.memory.arguments
      48
    """
    slice_ = _parsed(target)
    data = _given(schedule, trip_counts, scalars, auto_layouts)
    hardware = slice_.hardware
    if schedule and (hardware.platform != "tpu" or slice_.topology):
        kind = "one chip, without others" if slice_.topology else "a TPU"
        raise CompileError(f"lowering.compile: schedule must be asked for {kind}; got {show(target)}")
    given = args
    fn, args = static_leaves.of_arrays(fn, args)
    _require_known_sizes(args)
    jitted = fn if hasattr(fn, "trace") else jax.jit(with_changes(fn))
    if availability(hardware) == "here" and not slice_.topology and not schedule:
        with shown(f"compiling for {target}"):
            return _compiled_here(jitted, args, given, hardware)
    status = "has no slices" if hardware.platform == "cpu" else availability(hardware)
    if status != "can compile for" and not (schedule and status == "here" and compilers.interpreter("tpu")):
        raise CompileError(
            "lowering.compile: target must be one that is here or can be compiled for; "
            f"got {show(target)}, which {status}"
        )
    with shown(f"tracing and lowering for {target}"):
        exported, request = _lowered_for(jitted, args, hardware)
    if exported.nr_devices != slice_.device_count:
        raise CompileError(
            f"lowering.compile: args must lie on {slice_.device_count} devices, as {show(target)} has; "
            f"got a mesh of {exported.nr_devices}"
        )
    with shown(f"compiling for {target}"):
        return _compiled_in_child(exported, {**request, "target": target, "auto_layouts": auto_layouts}, hardware, data)


def _given(schedule: Any, trip_counts: Any, scalars: Any, auto_layouts: Any) -> Given | None:
    """Checks and returns what the caller says of data; None if no schedule is wanted."""
    for name, value in (("schedule", schedule), ("auto_layouts", auto_layouts)):
        if not isinstance(value, bool):
            raise CompileError(f"lowering.compile: {name} must be a bool; got {show(value)}")
    try:
        given = Given.of(trip_counts, scalars)
    except ValueError as error:
        raise CompileError(f"lowering.compile: {error}") from None
    options = {"trip_counts": given.trip_counts, "scalars": given.scalars, "auto_layouts": auto_layouts}
    for name, value in options.items() if not schedule else ():
        if value:
            raise CompileError(f"lowering.compile: {name} must come with schedule=True; got schedule=False")
    return given if schedule else None


def _parsed(target: str) -> TargetSlice:
    try:
        found = parse(target)
    except TopologyError as error:
        raise CompileError(str(error).replace("lowering", "lowering.compile", 1)) from None
    if not found.hardware.device_kind:
        raise CompileError(f"lowering.compile: target must name a chip; got the platform {show(target)}")
    return found


def _require_known_sizes(args: Any) -> None:
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(args)]
    unknown = [shape for shape in shapes if any(map(jax.export.is_symbolic_dim, shape))]
    if unknown:
        raise CompileError(f"lowering.compile: args must have shapes of known sizes; got {unknown[0]}")


def _compiled_here(jitted: Any, args: Sequence[Any], given: Sequence[Any], hardware: Hardware) -> CompiledReport:
    platform = "gpu" if hardware.platform == "cuda" else hardware.platform
    with jax.default_device(jax.devices(platform)[0]):
        lowered = jitted.lower(*args)
        start = time.perf_counter()
        compiled = lowered.compile()
        seconds = time.perf_counter() - start
    facts = compiled_facts(compiled, seconds)
    call = _checked(compiled, fixed_text(given, args))
    return report_of(hardware, facts, lowered.as_text(), compiled.as_text(), call=call)


def _checked(compiled: Any, fixed: Mapping[str, str]) -> Callable[..., Any]:
    """Calls a compiled program, once its arguments are checked."""
    types = compiled.args_info[0]  # without the static arguments of a jitted function
    avals = jax.tree.leaves(types)
    expected = Expected(
        "lowering.compile", CompileError, "compiled", len(types), types_by_path(types, avals), fixed, avals
    )

    def call(*args: Any) -> Any:
        with contextlib.suppress(TypeError, ValueError, SystemError):  # JAX is quick to refuse, but not in our words
            if all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(args)):
                return compiled(*args)
        leaves = expected.leaves(args)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise CompileError("lowering.compile: args must have values; got arrays that are being traced")
        arrays, keywords = jax.tree.unflatten(compiled.in_tree, leaves)
        try:
            return compiled(*arrays, **keywords)
        except ValueError as error:  # of other shardings or devices
            raise CompileError(
                f"lowering.compile: args must lie where they were compiled for; got {shortened(str(error))}"
            ) from None

    return call


def _lowered_for(jitted: Any, args: Sequence[Any], hardware: Hardware) -> tuple[jax.export.Exported, dict[str, Any]]:
    """Lowers the function to StableHLO with flat arguments and results; adds what the compiler's process must know."""
    mesh, args = _on_chips(args, hardware)
    with compiled_for(hardware), jax.sharding.use_abstract_mesh(mesh), _jax_private.without_devices():
        exported = jax.export.export(jitted, platforms=[hardware.platform], disabled_checks=UNCHECKED_CALLS)(*args)
        donated = [argument.donated for argument in jax.tree.leaves(jitted.trace(*args).args_info)]
    return flattened(exported), {
        "x64": bool(jax.config.read("jax_enable_x64")),
        "donated": [position for position, is_donated in enumerate(donated) if is_donated],
        "axis_sizes": mesh.axis_sizes,
        "axis_names": mesh.axis_names,
        "axis_types": [axis_type.name for axis_type in mesh.axis_types],
    }


def _on_chips(args: Any, hardware: Hardware) -> tuple[AbstractMesh, Any]:
    """Returns the mesh that arguments lie on, without its devices, or one of a single chip; and their types on it."""
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args)]
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1]
    if not meshes:
        device = abstract_device(hardware)
        return AbstractMesh((1,), ("chip",), (AxisType.Auto,), abstract_device=device), args
    # The function may name its own mesh, for example in shard_map; that has to be the mesh around it.
    mesh = meshes[0].abstract_mesh

    def on_mesh(leaf: Any) -> Any:
        sharding = getattr(leaf, "sharding", None)
        spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
        aval = jax.typeof(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=NamedSharding(mesh, spec))

    return mesh, jax.tree.map(on_mesh, args)


def flattened(exported: jax.export.Exported) -> jax.export.Exported:
    """Flattens a function's arguments and results: pytrees of users' own types cannot be written to a file."""
    in_tree = jax.tree.structure((tuple(exported.in_avals), {}))
    out_tree = jax.tree.structure(tuple(exported.out_avals))
    return dataclasses.replace(exported, in_tree=in_tree, out_tree=out_tree)


def _compiled_in_child(
    exported: jax.export.Exported,
    request: dict[str, Any],
    hardware: Hardware,
    given: Given | None,
) -> CompiledReport:
    with _compiled(exported, request, hardware, schedules=given is not None) as folder:
        facts = json.loads((folder / "facts.json").read_text())
        resources = tuple(gpu_resources(folder))
        stablehlo = exported.mlir_module()
        report = report_of(hardware, facts, stablehlo, (folder / "hlo").read_text(), resources)
        if given is None:
            return report
        return dataclasses.replace(report, schedule=_replayed(folder / process.SCHEDULES, report, hardware, given))


@contextlib.contextmanager
def schedules_of(jitted: Any, args: Sequence[Any], hardware: Hardware) -> Iterator[Path]:
    """Compiles a jitted function for one absent TPU; yields the folder to which the compiler has written schedules.

    Raises:
      CompileError: if the compiler is missing, or refuses the function.
    """
    if compilers.interpreter("tpu") is None:
        raise CompileError(f"lowering.emulate: target must have its compiler here; {compilers.command('tpu')}")
    exported, request = _lowered_for(jitted, args, hardware)
    request |= {"target": hardware.name, "auto_layouts": False}
    with _compiled(exported, request, hardware, schedules=True) as folder:
        yield folder / process.SCHEDULES


@contextlib.contextmanager
def _compiled(
    exported: jax.export.Exported, request: dict[str, Any], hardware: Hardware, *, schedules: bool
) -> Iterator[Path]:
    """Yields a folder with what the compiler's process has made of a function."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "exported").write_bytes(exported.serialize())
        (folder / "request.json").write_text(json.dumps(request))
        compiler = f"lowering.compile: {hardware.name}'s compiler"
        try:
            gpu_kernels = hardware.name, _mosaic_gpu_kernels(exported.mlir_module())
            process.compile_folder(folder, hardware.platform, gpu_kernels, libtpu_flags if schedules else None)
        except process.CompilerEndedError as error:
            lines = str(error).strip().splitlines()
            unknown = [line for line in lines if "unknown command line flag" in line.lower()]
            if unknown:
                raise CompileError(f"{compiler} does not take a flag: {unknown[0]}") from None
            said = list(itertools.takewhile(lambda line: "stack trace" not in line, lines)) or lines
            raise CompileError(f"{compiler} dies of {exported.fun_name}: {_screen(said[-_SCREEN:])}") from None
        refusal = folder / "error"
        if refusal.exists():
            lines = refusal.read_text().strip().splitlines()
            raise CompileError(f"{compiler} refuses {exported.fun_name}: {_screen(lines[:_SCREEN])}")
        yield folder


def _replayed(folder: Path, report: CompiledReport, hardware: Hardware, given: Given) -> Schedule:
    border_bytes = report.memory.arguments + report.memory.outputs
    try:
        return schedule_of(folder, hardware, border_bytes=border_bytes, given=given)
    except DependsOnDataError as error:
        raise CompileError(f"lowering.compile: {error}") from None


def _mosaic_gpu_kernels(stablehlo: str) -> frozenset[str]:
    """Returns the hashes of a program's Mosaic GPU kernels. A process dumps each only when it first compiles it."""
    return frozenset(re.findall(r'kernel_hash = "((?:[^"\\]|\\.)*)"', stablehlo))


def _screen(lines: Sequence[str]) -> str:
    return "\n".join(lines) or "no message"
