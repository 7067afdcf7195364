"""Reports what a compiler made of a function, from the compiled program and its text."""

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.export
from rich.table import Table

from lowering import tables
from lowering.schedule.report import Schedule
from pallas_kernels.hardware import Hardware

KERNEL_CALLS = ("tpu_custom_call", "mosaic_gpu_v2", "mosaic_gpu", "__gpu$xla.gpu.triton")
UNCHECKED_CALLS = tuple(map(jax.export.DisabledSafetyCheck.custom_call, KERNEL_CALLS))  # as an artifact may hold them


@dataclasses.dataclass(frozen=True)
class Memory:
    """Device memory of a compiled function, in bytes.

    Attributes:
      arguments: its arguments.
      outputs: its results.
      aliased: what is part of both.
      temporaries: everything else, without the code.
      at_once: what a TPU's compiler says lives at the same time, where that is known.
      host: temporaries in host memory, such as activations that `jax.checkpoint` offloads.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    at_once: int | None = None
    host: int = 0

    @property
    def peak(self) -> int:
        """The most memory that the device holds while the function runs, without the code."""
        total = self.arguments + self.outputs - self.aliased + self.temporaries
        # On a TPU, results may take the place of temporaries, so that the sum is too much. What the compiler says is
        # too much where arrays are in the chip's vector memory, which it counts as well.
        return total if self.at_once is None else min(total, self.at_once)


@dataclasses.dataclass(frozen=True)
class GpuResources:
    """Resources that one Mosaic GPU kernel occupies on a multiprocessor.

    Attributes:
      kernel: its name; in a program with several kernels the compiler's name for it, which may be its body's.
      registers: per thread.
      spilled_bytes: stores and loads of a thread that the registers could not hold.
      shared_bytes: shared memory per thread block.
      barriers: named barriers per thread block.
      sass: the machine code as nvdisasm prints it, with what each instruction waits for; empty without nvdisasm.
    """

    kernel: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    barriers: int
    sass: str = dataclasses.field(default="", repr=False)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of communication between chips in a program.

    Attributes:
      kind: XLA's name, such as "all-reduce".
      count: occurrences in the program; those in a loop run more often.
      bytes: of all their results on one chip.
    """

    kind: str
    count: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class CompiledReport:
    """Facts about a compiled function.

    Attributes:
      target: the name of the chip.
      kernels: how often each Pallas kernel occurs in the optimised program, by name.
      gpu_resources: for each compiled Mosaic GPU kernel, in the order of compilation.
      collectives: the communication between the chips of a slice.
      memory: of the program on one chip, as the compiler reports it.
      cost: the compiler's own estimates, such as "flops"; empty if it makes none.
      compile_seconds: the time to compile, without tracing.
      stablehlo: the program that the compiler was given.
      hlo: the program that the compiler optimised.
      call: runs the program on arrays; None if the target is not in this machine.
      schedule: how long the program takes by its own schedule, if that was asked for.
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
    schedule: Schedule | None = dataclasses.field(default=None, repr=False)

    def to_json(self) -> str:
        """Writes everything but the program's texts as a JSON object."""
        resources = [dataclasses.asdict(used) for used in self.gpu_resources]
        record = {
            "target": self.target,
            "kernels": self.kernels,
            "gpu_resources": [{name: fact for name, fact in used.items() if name != "sass"} for used in resources],
            "collectives": [dataclasses.asdict(collective) for collective in self.collectives],
            "memory": {**dataclasses.asdict(self.memory), "peak": self.memory.peak},
            "cost": self.cost,
            "compile_seconds": self.compile_seconds,
            "schedule": None if self.schedule is None else self.schedule.to_record(),
        }
        return json.dumps(record, indent=2)

    def __str__(self) -> str:
        shown = tables.text(self.table())
        return shown if self.schedule is None else f"{shown}\n{self.schedule}"

    def table(self) -> Table:
        """Lays out the facts as a `rich` table."""
        table = Table(
            title=f"compiled for {self.target} in {self.compile_seconds:.1f} s", title_justify="left", show_header=False
        )
        table.add_column()
        table.add_column(justify="right")
        for name in ("arguments", "outputs", "aliased", "temporaries", "peak"):
            table.add_row(f"{name}, bytes", f"{getattr(self.memory, name):,}")
        if self.memory.host:
            table.add_row("temporaries in host memory, bytes", f"{self.memory.host:,}")
        for name, count in self.kernels.items():
            table.add_row(f"kernel {name}", str(count))
        for resources in self.gpu_resources:
            table.add_row(f"{resources.kernel}, registers of a thread", str(resources.registers))
            table.add_row(
                f"{resources.kernel}, spilled and shared bytes",
                f"{resources.spilled_bytes:,}, {resources.shared_bytes:,}",
            )
        for collective in self.collectives:
            table.add_row(f"{collective.kind}, {collective.count} times, bytes", f"{collective.bytes:,}")
        if "flops" in self.cost:
            table.add_row("flop, as the compiler counts", f"{self.cost['flops']:,.0f}")
        return table


def compiled_facts(compiled: Any, seconds: float) -> dict[str, Any]:
    """Collects the facts of a compiled program, in the process that compiled it."""
    memory = compiled.memory_analysis()
    cost = compiled.cost_analysis() or {}
    return {
        "memory": {
            "arguments": memory.argument_size_in_bytes,
            "outputs": memory.output_size_in_bytes,
            "aliased": memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "at_once": memory.peak_memory_in_bytes,
            "host": memory.host_temp_size_in_bytes,
        },
        # Leave out single operands, such as "bytes accessed3{}", and negative values: the compiler could not estimate
        # those.
        "cost": {name: value for name, value in cost.items() if "{" not in name and value >= 0},
        "compile_seconds": seconds,
    }


def report_of(
    hardware: Hardware,
    facts: dict[str, Any],
    stablehlo: str,
    hlo: str,
    gpu_resources: tuple[GpuResources, ...] = (),
    call: Callable[..., Any] | None = None,
) -> CompiledReport:
    """Makes the report from `compiled_facts` and the program's text before and after compiling."""
    memory = Memory(**facts["memory"])
    if hardware.platform != "tpu":
        # A GPU's compiler says the sum, and the CPU's forgets the temporaries.
        memory = dataclasses.replace(memory, at_once=None)
    kernels = _kernels(hlo)
    if len(kernels) == 1:  # whatever the compiler calls it, the resources are its own
        gpu_resources = tuple(dataclasses.replace(one, kernel=next(iter(kernels))) for one in gpu_resources)
    return CompiledReport(
        target=hardware.name,
        kernels=kernels,
        gpu_resources=gpu_resources,
        collectives=_collectives(hlo),
        memory=memory,
        cost=facts["cost"],
        compile_seconds=facts["compile_seconds"],
        stablehlo=stablehlo,
        hlo=hlo,
        call=call,
    )


def _kernels(hlo: str) -> dict[str, int]:
    """Counts the Pallas kernels in an optimised program; a kernel's name is the last part of the path to its launch."""
    calls = "|".join(map(re.escape, KERNEL_CALLS))
    pattern = rf'custom_call_target="(?:{calls})".*?op_name="(?:[^"]*/)?([^"/]+)/[^"/]+"'
    names = re.findall(pattern, hlo)
    return {name: names.count(name) for name in sorted(set(names))}


def _collectives(hlo: str) -> tuple[Collective, ...]:
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast|ragged-all-to-all"
    found: dict[str, list[int]] = {}
    for types, kind, start in re.findall(rf"^ *(?:ROOT )?%\S+ = (.*?) ({kinds})(-start)?\(", hlo, re.MULTILINE):
        sizes = [_array_bytes(dtype, shape) for dtype, shape in re.findall(r"([a-z]\w*)\[([\d,]*)\]", types)]
        # A "-start" lists its operands and its results, half of the sizes each. But all-reduce-start lists results
        # only, unless a tuple of operands comes first (JAX 0.12).
        names_both = start and (kind != "all-reduce" or types.startswith("(("))
        results = sizes[len(sizes) // 2 :] if names_both else sizes
        found.setdefault(kind, []).append(sum(results))
    return tuple(Collective(kind, len(sizes), sum(sizes)) for kind, sizes in sorted(found.items()))


def _array_bytes(dtype: str, shape: str) -> int:
    bits = re.search(r"\d+", dtype)
    return math.prod(int(size) for size in shape.split(",") if size) * (int(bits.group()) if bits else 8) // 8


def gpu_resources(dump: Path) -> list[GpuResources]:
    """Reads Mosaic GPU's dump: ptxas' reports of registers and spills, launches' shared memory, nvdisasm's code."""
    facts = (
        r"entry function '(\w+?)(?:_mosaic_gpu_kernel)?' for.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?"
        r"Used (\d+) registers(?:, used (\d+) barriers)?"
    )
    found = []
    for report in sorted(dump.glob("*.ptxas")):
        passes = report.with_suffix(".mlir-passes.log").read_text(errors="replace")
        launch = re.search(r"gpu\.launch.*dynamic_shared_memory_size %c(\d+)", passes)
        disassembled = report.with_suffix(".sass_ctrl")
        sass = disassembled.read_text(errors="replace") if disassembled.exists() else ""
        for name, stores, loads, registers, barriers in re.findall(
            facts, report.read_text(errors="replace"), re.DOTALL
        ):
            found.append(
                GpuResources(
                    kernel=name,
                    registers=int(registers),
                    spilled_bytes=int(stores) + int(loads),
                    shared_bytes=int(launch.group(1)) if launch else 0,
                    barriers=int(barriers or 0),
                    sass=sass,
                )
            )
    return found
