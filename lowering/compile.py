"""Compiles a function for a chip, in this machine or not, with that chip's real compiler."""

import dataclasses
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec
from rich.table import Table

from lowering.targets import here, named
from pallas_kernels.hardware import Hardware

# What a compiler needs, by platform: a module that shows it is installed, and the extra that installs it.
_COMPILERS = {"tpu": ("libtpu", "tpu-compile"), "cuda": ("jax_cuda13_plugin", "cuda-compile")}
KERNEL_CALLS = ("tpu_custom_call", "mosaic_gpu_v2", "mosaic_gpu")
# Read by libtpu, the CUDA plugin and JAX when they start, which is why the compiler runs in a process of its own.
_CHILD_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "MOSAIC_GPU_DUMP_PTXAS": "1",
}


class CompileError(RuntimeError):
    """The compiler for a target refuses a function, or is not installed."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Device memory of a compiled function, in bytes; what is `aliased` counts among arguments and outputs both."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int

    @property
    def peak(self) -> int:
        """What the device holds while the function runs, without the code."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


@dataclasses.dataclass(frozen=True)
class GpuResources:
    """What one Mosaic GPU kernel takes on a multiprocessor, as ptxas reports it."""

    registers: int
    spilled_bytes: int
    barriers: int


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of communication between chips in a program.

    Attributes:
      kind: as XLA calls it, such as "all-reduce".
      count: how often it stands in the program; what stands in a loop runs more often.
      bytes: of all their results on one chip.
    """

    kind: str
    count: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class CompiledReport:
    """What a compiler made of a function.

    Attributes:
      target: what was compiled for.
      kernels: how often each Pallas kernel occurs in the optimised program, by name.
      gpu_resources: of each Mosaic GPU kernel that was compiled, in the order of compilation.
      collectives: what the chips of a slice exchange.
      memory: of the program on one chip, as the compiler states it.
      cost: the compiler's own estimates, such as "flops"; some give none.
      compile_seconds: what compiling took, without tracing.
      stablehlo: the program as the compiler got it.
      hlo: the program as the compiler optimised it.
      call: runs it on arrays; None where the target is not in this machine.
    """

    target: str
    kernels: dict[str, int]
    gpu_resources: tuple[GpuResources, ...]
    collectives: tuple[Collective, ...]
    memory: Memory
    cost: dict[str, float]
    compile_seconds: float
    stablehlo: str = dataclasses.field(repr=False)
    hlo: str = dataclasses.field(repr=False)
    call: Callable[..., Any] | None = dataclasses.field(default=None, repr=False)

    def to_json(self) -> str:
        """Everything but the texts of the program, as a JSON object."""
        record = {
            "target": self.target,
            "kernels": self.kernels,
            "gpu_resources": [dataclasses.asdict(resources) for resources in self.gpu_resources],
            "collectives": [dataclasses.asdict(collective) for collective in self.collectives],
            "memory": {**dataclasses.asdict(self.memory), "peak": self.memory.peak},
            "cost": self.cost,
            "compile_seconds": self.compile_seconds,
        }
        return json.dumps(record, indent=2)

    def table(self) -> Table:
        """The facts as a `rich` table."""
        table = Table(title=f"compiled for {self.target} in {self.compile_seconds:.1f} s", title_justify="left")
        table.add_column("")
        table.add_column("", justify="right")
        for name in ("arguments", "outputs", "aliased", "temporaries", "peak"):
            table.add_row(f"{name}, bytes", f"{getattr(self.memory, name):,}")
        for name, count in self.kernels.items():
            table.add_row(f"kernel {name}", str(count))
        for resources in self.gpu_resources:
            table.add_row("its registers a thread, spilled bytes", f"{resources.registers}, {resources.spilled_bytes}")
        for collective in self.collectives:
            table.add_row(f"{collective.kind}, {collective.count} times, bytes", f"{collective.bytes:,}")
        if "flops" in self.cost:
            table.add_row("flop, as the compiler counts", f"{self.cost['flops']:,.0f}")
        return table


def availability(hardware: Hardware) -> str:
    """Whether a target is "here", this environment "can compile for" it, or what that "needs: pip install ..."."""
    if hardware.platform == "cpu" or hardware == here():
        return "here"
    module, extra = _COMPILERS[hardware.platform]
    return "can compile for" if importlib.util.find_spec(module) else f"needs: pip install 'jaxops[{extra}]'"


def compile(fn: Callable[..., Any], *args: Any, target: str) -> CompiledReport:
    """Compiles a function with a chip's real compiler, whether or not the chip is in this machine.

    For another platform than this process computes on, the function is traced and lowered here, and compiled in a
    process that is started for it: nothing in this one changes. Operators take the implementations that
    `lowering.explain` names for the target; `jaxops.use("pallas")` around the call asks for kernels.

    Args:
      fn: a function of arrays, jitted or not. What it donates is donated.
      *args: what it is called with: arrays, `jax.ShapeDtypeStruct`s, or pytrees of them. For a slice, with shardings
        over a mesh of as many devices, which may be a `jax.sharding.AbstractMesh`.
      target: the name of one of `targets()`; for a slice of several chips with its topology, as in "tpu-v5e:16x16",
        "tpu-v5p:8x8x8" or "cuda-h100:8".

    Raises:
      CompileError: if the target's compiler is not installed or refuses the function, and for functions over another
        number of devices than the target has.
      ValueError: for an unknown target.
      OperatorError: what an operator has to say about its arguments.
    """
    name, _, topology = target.partition(":")
    hardware = named(name)
    chips = _chips(topology)
    if not hardware.device_kind:
        raise CompileError(f"lowering.compile: target must name a chip; got the platform {target!r}")
    jitted = fn if hasattr(fn, "trace") else jax.jit(fn)
    if availability(hardware) == "here" and not topology:
        return _compiled_here(jitted, args, hardware)
    status = availability(hardware)
    if status != "can compile for":
        raise CompileError(
            f"lowering.compile: target must be one that is here or can be compiled for; got {target!r}, which {status}"
        )
    exported, request = _lowered_for(jitted, args, hardware)
    if exported.nr_devices != chips:
        raise CompileError(
            f"lowering.compile: args must lie on {chips} chips, as {target!r} has; got a mesh of {exported.nr_devices}"
        )
    return _compiled_in_child(exported, {**request, "topology": topology}, hardware)


def _chips(topology: str) -> int:
    """How many chips a topology such as "16x16" has; 1 for none."""
    if not re.fullmatch(r"(\d+(x\d+){0,2})?", topology):
        raise CompileError(f"lowering.compile: target must have a topology such as 16x16 or 8; got {topology!r}")
    return math.prod(int(size) for size in topology.split("x") if size)


def _compiled_here(jitted: Any, args: Sequence[Any], hardware: Hardware) -> CompiledReport:
    platform = "gpu" if hardware.platform == "cuda" else hardware.platform
    with jax.default_device(jax.devices(platform)[0]):
        lowered = jitted.lower(*args)
        start = time.perf_counter()
        compiled = lowered.compile()
        seconds = time.perf_counter() - start
    facts = compiled_facts(compiled, seconds)
    return _report(hardware, facts, lowered.as_text(), compiled.as_text(), call=compiled)


def _lowered_for(jitted: Any, args: Sequence[Any], hardware: Hardware) -> tuple[jax.export.Exported, dict[str, Any]]:
    """The function as StableHLO for the target, of flat arguments and results; its mesh, and what it donates."""
    device = AbstractDevice(
        device_kind=hardware.device_kind,
        num_cores=hardware.cores,
        platform="gpu" if hardware.platform == "cuda" else hardware.platform,
    )
    mesh, args = _on_chips(args, device)
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in KERNEL_CALLS]
    with jax.sharding.use_abstract_mesh(mesh):
        exported = jax.export.export(jitted, platforms=[hardware.platform], disabled_checks=checks)(*args)
        lowered = jitted.trace(*args).lower(lowering_platforms=(hardware.platform,))
    donated = [argument.donated for argument in jax.tree.leaves(lowered.args_info)]
    return flattened(exported), {
        "target": hardware.name,
        "donated": [position for position, is_donated in enumerate(donated) if is_donated],
        "axis_sizes": mesh.axis_sizes,
        "axis_names": mesh.axis_names,
        "axis_types": [axis_type.name for axis_type in mesh.axis_types],
    }


def _on_chips(args: Any, device: AbstractDevice) -> tuple[AbstractMesh, Any]:
    """A mesh of chips of this kind, like the one that arguments lie on if they do; and their types on it."""
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args)]
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1]
    if not meshes:
        return AbstractMesh((1,), ("chip",), (AxisType.Auto,), abstract_device=device), args
    mesh = AbstractMesh(meshes[0].axis_sizes, meshes[0].axis_names, meshes[0].axis_types, abstract_device=device)

    def on_mesh(leaf: Any) -> Any:
        sharding = getattr(leaf, "sharding", None)
        spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
        aval = jax.typeof(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=NamedSharding(mesh, spec))

    return mesh, jax.tree.map(on_mesh, args)


def flattened(exported: jax.export.Exported) -> jax.export.Exported:
    """The same of flat arguments and results: trees of users' own types cannot be written to a file."""
    in_tree = jax.tree.structure((tuple(exported.in_avals), {}))
    out_tree = jax.tree.structure(tuple(exported.out_avals))
    return dataclasses.replace(exported, in_tree=in_tree, out_tree=out_tree)


def _compiled_in_child(exported: jax.export.Exported, request: dict[str, Any], hardware: Hardware) -> CompiledReport:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "exported").write_bytes(exported.serialize())
        (folder / "request.json").write_text(json.dumps(request))
        paths = [path for path in sys.path if path]
        environment = {
            **os.environ,
            **_CHILD_ENVIRONMENT,
            "MOSAIC_GPU_DUMP_TO": name,
            "PYTHONPATH": os.pathsep.join(paths),
        }
        command = [sys.executable, "-m", "lowering._compile_in_child", name]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if result.returncode:
            raise CompileError(f"lowering.compile: {hardware.name}'s compiler refuses fn: {_last_error(result.stderr)}")
        facts = json.loads((folder / "facts.json").read_text())
        reports = (path.read_text(errors="replace") for path in sorted(folder.glob("*.ptxas")))
        resources = tuple(resources for report in reports for resources in _gpu_resources(report))
        return _report(hardware, facts, exported.mlir_module(), (folder / "hlo").read_text(), resources)


def compiled_facts(compiled: Any, seconds: float) -> dict[str, Any]:
    """What is asked of a compiled program, in either process."""
    memory = compiled.memory_analysis()
    cost = compiled.cost_analysis() or {}
    return {
        "memory": {
            "arguments": memory.argument_size_in_bytes,
            "outputs": memory.output_size_in_bytes,
            "aliased": memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
        },
        # "bytes accessed3{}" and the like are of single operands; what a compiler cannot estimate is negative.
        "cost": {name: value for name, value in cost.items() if "{" not in name and value >= 0},
        "compile_seconds": seconds,
    }


def _report(
    hardware: Hardware,
    facts: dict[str, Any],
    stablehlo: str,
    hlo: str,
    gpu_resources: tuple[GpuResources, ...] = (),
    call: Callable[..., Any] | None = None,
) -> CompiledReport:
    return CompiledReport(
        target=hardware.name,
        kernels=_kernels(hlo),
        gpu_resources=gpu_resources,
        collectives=_collectives(hlo),
        memory=Memory(**facts["memory"]),
        cost=facts["cost"],
        compile_seconds=facts["compile_seconds"],
        stablehlo=stablehlo,
        hlo=hlo,
        call=call,
    )


def _kernels(hlo: str) -> dict[str, int]:
    """The Pallas kernels in an optimised program: the name that a kernel was given ends the path before the launch."""
    calls = "|".join(KERNEL_CALLS)
    pattern = rf'custom_call_target="(?:{calls})".*?op_name="(?:[^"]*/)?([^"/]+)/[^"/]+"'
    names = re.findall(pattern, hlo)
    return {name: names.count(name) for name in sorted(set(names))}


def _collectives(hlo: str) -> tuple[Collective, ...]:
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast|ragged-all-to-all"
    found: dict[str, list[int]] = {}
    for types, kind, start in re.findall(rf"^ *(?:ROOT )?%\S+ = (.*?) ({kinds})(-start)?\(", hlo, re.MULTILINE):
        sizes = [_array_bytes(dtype, shape) for dtype, shape in re.findall(r"([a-z]\w*)\[([\d,]*)\]", types)]
        # Where one that is started names its operands and its results, they are half of what it names each.
        results = sizes[len(sizes) // 2 :] if start and kind != "all-reduce" else sizes
        found.setdefault(kind, []).append(sum(results))
    return tuple(Collective(kind, len(sizes), sum(sizes)) for kind, sizes in sorted(found.items()))


def _array_bytes(dtype: str, shape: str) -> int:
    bits = re.search(r"\d+", dtype)
    return math.prod(int(size) for size in shape.split(",") if size) * (int(bits.group()) if bits else 8) // 8


def _gpu_resources(ptxas_report: str) -> list[GpuResources]:
    pattern = r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers(?:, used (\d+) barriers)?"
    found = re.findall(pattern, ptxas_report, re.DOTALL)
    return [
        GpuResources(int(registers), int(stores) + int(loads), int(barriers or 0))
        for stores, loads, registers, barriers in found
    ]


def _last_error(stderr: str) -> str:
    """The exception that ended the child, at most a screen of it."""
    lines = stderr.rstrip().splitlines()
    starts = [i for i, line in enumerate(lines) if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return "\n".join(lines[starts[-1] if starts else -1 :][:30]) if lines else "no message"
