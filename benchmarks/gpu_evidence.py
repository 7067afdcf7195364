"""Evidence on GPU kernels from what `gpu.py` has measured.

python benchmarks/gpu_evidence.py benchmarks/results/gpu_cuda-h100.json

This writes lowering/tuned/cuda-h100.evidence.jsonl, of the form that `evidence.py` writes for TPUs. Results count as
long as a kernel's code is what was measured.
"""

import argparse
import ast
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gpu_grid
import jax
import jax.numpy as jnp
from evidence import header, kinds
from evidence_cases import FAMILIES

from jaxops._suite import SUITE
from lowering.evidence import Case
from lowering.explain import operator_uses
from lowering.operators import kind_of, unpacked
from lowering.register import kernels_of
from lowering.static_leaves import jaxpr_of, of_arrays
from lowering.targets import named
from pallas_kernels.hardware import Hardware

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def records(results: Mapping[str, Any]) -> Iterator[Any]:
    """Yields what a file of evidence holds: its header, the cases, and the kinds that were verified on the device."""
    probe = next(case for case in results["cases"] if "target" in case)
    hardware, environment = named(probe["target"]), probe["environment"]
    versions = {name: environment["versions"][name] for name in ("jax", "jaxlib")}
    now = header(hardware.name)
    yield now | {"how": "measured", "versions": versions, "date": environment["date"]}
    found = [case for one in results["grid"] if (case := case_of_record(one, hardware)) is not None]
    found += cases_of_losses(results["cases"], hardware)
    cases = [case for case in found if results["code"].get(code_name(case)) == now["code"][code_name(case)]]
    yield from cases
    waiting = {case[:3] for case in cases if was_right(case, results["verified"])}
    for operator, kernel, kind, sizes in verified_kinds(hardware):
        if (operator, kernel, kind) in waiting:
            waiting.remove((operator, kernel, kind))
            yield {"executed": [operator, kernel, kind, sizes]}


def code_name(case: Case) -> str:
    """Returns the name of a case's kernel."""
    return f"{case.operator}/{case.kernel}"


def was_right(case: Case, verified: Mapping[str, int]) -> bool:
    """Tells whether all that was verified of a case's kernel was right."""
    outcomes = {name.rpartition(": ")[2] for name in verified if name.startswith(f"{code_name(case)}: ")}
    return "verified" in outcomes and outcomes <= {"verified", "refused"}


@functools.cache
def verified_kinds(hardware: Hardware) -> list[tuple[str, str, str, tuple[int, ...]]]:
    """Lists the kinds of all kernels, with sizes, that the library's suite verifies."""
    found = []
    for case in SUITE:
        for size in case.verified_at:
            args = jax.eval_shape(functools.partial(case.arguments, *size))
            for use in operator_uses(jaxpr_of(*of_arrays(case.fn, args)), args, hardware):
                for kernel in kernels_of(use.operator):
                    kind = kind_of(kernel, hardware, *unpacked(use.operands, use.params))
                    if kind is not None and kernel.platform == hardware.platform:
                        found.append((use.operator.name, kernel.name, *kind))
    return found


def case_of_record(record: Mapping[str, Any], hardware: Hardware) -> Case | None:
    """Returns the case of a record of `gpu_grid.py`; None without times by the device's clock."""
    reference, *others = record.get("rows", [{}])
    own = next((row for row in others if row.get("implementation") == record.get("kernel")), None)
    is_timed = reference.get("implementation") == "reference" and own is not None
    if not is_timed or any(row["median_us"] == row["wall_us"] for row in (reference, own)):
        return None
    first, *rest = (DTYPES.get(part, part) for part in record["option"])
    family = gpu_grid.FAMILIES[record["family"]]
    for use, kernel, kind in kinds(family, (first, *rest) if rest else first, tuple(record["sizes"]), hardware):
        if (use.operator.name, kernel.name) == (record["operator"], record["kernel"]):
            time = round(own["median_us"] / reference["median_us"], 3)
            temporaries = reference["temporaries"], own["temporaries"]
            return Case(use.operator.name, kernel.name, *kind, time, reference["median_us"], temporaries)
    return None


def cases_of_losses(cases: list[Any], hardware: Hardware) -> Iterator[Case]:
    """Yields the cases of the summed loss: whole steps by the host's clock, as copies count there, too."""
    steps = {case["name"]: case for case in cases if case["stage"] == "lce"}
    for name, own in steps.items():
        if "grad_in_forward+pallas" in name:
            reference, sizes = steps[name.replace("pallas", "xla_by_rows")], ast.literal_eval(name.partition(" ")[2])
            ((use, kernel, kind),) = kinds(FAMILIES["gradients"], jnp.bfloat16, sizes, hardware)
            temporaries = int(1e9 * reference["temporary_gb"]), int(1e9 * own["temporary_gb"])
            ms = host_ms(reference)
            time, us = round(host_ms(own) / ms, 3), round(1e3 * ms, 1)
            yield Case(use.operator.name, kernel.name, *kind, time, us, temporaries)


def host_ms(case: Mapping[str, Any]) -> float:
    """Returns the least time of a launch by the host's clock, alone or in a row: what disturbs it only adds to it."""
    return min(case[name] for name in ("wall_ms", "series_ms") if name in case)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, help="as gpu.py writes them")
    parser.add_argument("--folder", type=Path, default=Path("lowering/tuned"))
    options = parser.parse_args()
    first, *rest = records(json.loads(options.results.read_text()))
    path = options.folder / f"{first['target']}.evidence.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in (first, *rest)))


if __name__ == "__main__":
    main()
