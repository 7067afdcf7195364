"""The process that `lowering.compile` starts: it compiles what it finds in folders, and leaves the results there.

Compilers for absent chips change settings of the whole process, and this process has no other work to disturb. It reads
one folder name per line, answers with a line when the folder is done, and ends after two idle minutes, or when the
process named by its argument has ended, even in the middle of a program.
"""

import json
import os
import select
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import jax
import jax.experimental.mosaic.gpu  # registers the runtime that Mosaic GPU kernels are linked with
import jax.export
import numpy as np
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lowering import _jax_private
from lowering.compiling.report import compiled_facts
from lowering.targets import TargetSlice, gpu_target_config, parse

_IDLE_SECONDS = 120


def main() -> None:
    """Serves requests from standard input."""
    threading.Thread(target=_end_with, args=[int(sys.argv[1])], daemon=True).start()
    # Compilers may print; only answers go where the parent listens.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    while select.select([sys.stdin], [], [], _IDLE_SECONDS)[0] and (line := sys.stdin.readline()):
        folder = Path(line.rstrip("\n"))
        os.environ["MOSAIC_GPU_DUMP_TO"] = str(folder)
        try:
            _compile(folder)
        except Exception as error:
            (folder / "error").write_text("".join(traceback.format_exception_only(error)))
        print("done", file=answers, flush=True)


def _end_with(parent: int) -> None:
    """Ends this process after its parent. A compiler lets other threads run while it is busy."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _compile(folder: Path) -> None:
    """Compiles the exported function in `folder` for the target in its request."""
    request = json.loads((folder / "request.json").read_text())
    jax.config.update("jax_enable_x64", request["x64"])
    exported = jax.export.deserialize(bytearray((folder / "exported").read_bytes()))
    devices = np.array(_devices(parse(request["target"]))[: exported.nr_devices])
    axis_types = tuple(AxisType[name] for name in request["axis_types"])
    mesh = Mesh(devices.reshape(request["axis_sizes"]), request["axis_names"], axis_types=axis_types)
    shardings = [sharding or NamedSharding(mesh, PartitionSpec()) for sharding in exported.in_shardings_jax(mesh)]
    operands = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(exported.in_avals, shardings, strict=True)
    ]
    borders: dict[str, Any] = {}
    if not operands:  # then results say where the function runs
        borders = {"out_shardings": tuple(NamedSharding(mesh, PartitionSpec()) for _ in exported.out_avals)}
    elif request["auto_layouts"]:
        borders = {"in_shardings": Format(Layout.AUTO), "out_shardings": Format(Layout.AUTO)}
    lowered = jax.jit(exported.call, donate_argnums=request["donated"], **borders).lower(*operands)
    start = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        # XLA chooses Triton's tiles by trying them on the GPU. Without a GPU it guesses; if the guess does not fit
        # (JAX 0.10), leave matrix products to cuBLAS, the alternative that XLA would have tried.
        if "output tile sizes" not in str(error):
            raise
        compiled = lowered.compile({"xla_gpu_enable_triton_gemm": False})
    facts = compiled_facts(compiled, time.perf_counter() - start)
    (folder / "hlo").write_text(compiled.as_text() or "")
    (folder / "facts.json").write_text(json.dumps(facts))


def _devices(target: TargetSlice) -> Any:
    """Returns the devices of a slice; for a single chip, those of the smallest slice that can be compiled for."""
    if target.hardware.platform == "tpu":
        generation, _, smallest = target.hardware.smallest_slice.partition(":")
        return topologies.get_topology_desc(f"{generation}:{target.topology or smallest}", platform="tpu").devices
    return _jax_private.cuda_devices(gpu_target_config(target.hardware), target.topology or "1")


if __name__ == "__main__":
    main()
