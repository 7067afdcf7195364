r"""How far replayed schedules are from times that others have measured on a v5e and published.

python benchmarks/tpu_schedule_accuracy.py --output benchmarks/results/tpu_schedule_accuracy.json \
    --page docs/schedule.md

Run it once with each JAX: a run replaces the earlier one of its own version. Nothing runs on a chip, and it needs
`jaxops targets --install tpu`.
"""

import functools
import json
import os
import re
import statistics
import subprocess
from pathlib import Path
from typing import Any

import harness
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import lowering
from lowering.compiling import compilers

TARGET = "tpu-v5e"

Product = tuple[int, tuple[int, int, int] | None]  # the size of square matrices, and blocks (m, k, n); None for XLA's

# Milliseconds of bfloat16 products, less what the host needs to start one, which each source shows with an empty or a
# tiny program.
_IN_JAX_DOCS_MS: dict[Product, float] = {  # jax: docs/pallas/tpu/matmul.ipynb; 0.105 ms
    (4096, None): 0.722,
    (8192, None): 5.942,
    (4096, (512, 1024, 1024)): 0.784,
    (8192, (512, 1024, 1024)): 5.994,
    (4096, (128, 128, 128)): 11.667,
}
_IN_PALLAS_FORGE_MS: dict[Product, float] = {  # linhkid/pallas-forge, notebook 05; 0.222 ms
    (2048, (64, 128, 128)): 2.665 - 0.222,
    (2048, (64, 256, 256)): 1.092 - 0.222,
    (2048, (128, 128, 128)): 1.603 - 0.222,
    (2048, (128, 256, 256)): 0.693 - 0.222,
    (2048, (128, 512, 512)): 0.457 - 0.222,
    (2048, (256, 128, 128)): 0.974 - 0.222,
    (2048, (256, 256, 512)): 0.416 - 0.222,
    (2048, (256, 512, 512)): 0.380 - 0.222,
}
MEASURED_MS = _IN_JAX_DOCS_MS | _IN_PALLAS_FORGE_MS


def matmul_kernel(x_ref: Any, y_ref: Any, z_ref: Any, acc_ref: Any, *, steps: int) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == steps - 1)
    def _() -> None:
        z_ref[...] = acc_ref[...].astype(z_ref.dtype)


def matmul(x: jax.Array, y: jax.Array, *, blocks: tuple[int, int, int] | None) -> jax.Array:
    """The kernel that both sources have measured, or XLA's product."""
    if blocks is None:
        return x @ y
    size, (bm, bk, bn) = x.shape[0], blocks
    return pl.pallas_call(
        functools.partial(matmul_kernel, steps=size // bk),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0,
            in_specs=[pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)), pl.BlockSpec((bk, bn), lambda i, j, k: (k, j))],
            out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
            scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
            grid=(size // bm, size // bn, size // bk),
        ),
        out_shape=jax.ShapeDtypeStruct((size, size), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        name="matmul",
    )(x, y)


def replayed_ms(product: Product) -> float:
    """The time of a product by the schedule that libtpu makes."""
    size, blocks = product
    x = jax.ShapeDtypeStruct((size, size), jnp.bfloat16)
    schedule = lowering.compile(functools.partial(matmul, blocks=blocks), x, x, target=TARGET, schedule=True).schedule
    assert schedule is not None
    return schedule.total_us / 1000


def name(product: Product) -> str:
    size, blocks = product
    return f"{size}^3, {'XLA' if blocks is None else ', '.join(map(str, blocks))}"


def case(product: Product) -> dict[str, Any]:
    """What is recorded of a product; the error is a part of the measured time."""
    measured, replayed = MEASURED_MS[product], replayed_ms(product)
    error = replayed / measured - 1
    times = {"measured_ms": round(measured, 3), "replayed_ms": round(replayed, 3)}
    return {"name": name(product), "candidates": {"replay": {**times, "error": round(error, 4)}}}


def errors(run: dict[str, Any]) -> list[float]:
    """The errors of all cases of one run, without their signs."""
    return [abs(case["candidates"]["replay"]["error"]) for case in run["cases"]]


def table(runs: list[dict[str, Any]]) -> str:
    """The runs of all versions as a table of documentation."""
    versions = [run["environment"]["versions"] for run in runs]
    titles = [cell for each in versions for cell in (f"JAX {each['jax']}, libtpu {each['libtpu']}", "")]
    rows = [["product, blocks (m, k, n)", "measured, ms", *titles], ["---", *["---:"] * (1 + len(titles))]]
    for cases in zip(*(run["cases"] for run in runs), strict=True):
        found = [case["candidates"]["replay"] for case in cases]
        cells = [cell for one in found for cell in (f"{one['replayed_ms']:.3f}", f"{100 * one['error']:+.1f} %")]
        rows.append([cases[0]["name"], f"{found[0]['measured_ms']:.3f}", *cells])
    for title, of_errors in (("mean error", statistics.mean), ("worst error", max)):
        rows.append([title, "", *(cell for run in runs for cell in ("", f"{100 * of_errors(errors(run)):.1f} %"))])
    return "".join(f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in cells)}|\n" for cells in rows)


def with_table(page: str, runs: list[dict[str, Any]]) -> str:
    """A page of documentation with the table of these runs in the place of an earlier one."""
    return re.sub(r"^\| product, blocks .*\n(?:\|.*\n)*", lambda _: table(runs), page, flags=re.MULTILINE)


def libtpu_version() -> str:
    """The compiler's, which may be in an environment of its own."""
    program = "import importlib.metadata; print(importlib.metadata.version('libtpu'))"
    found = [compilers.interpreter("tpu") or "", "-c", program]
    return subprocess.run(found, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = harness.parser(__doc__.partition("\n")[0])
    parser.add_argument("--page", type=Path, help="a page of documentation whose table of these errors is replaced")
    options = parser.parse_args()
    # What this process computes on does not matter, and a chip that is here is left alone.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    products = list(MEASURED_MS)[: 1 if options.quick else None]
    record = harness.report("tpu_schedule_accuracy", [case(product) for product in products], None)
    run = {"environment": record["environment"], "cases": record["cases"]}
    run["environment"]["versions"]["libtpu"] = libtpu_version()
    held = json.loads(options.output.read_text())["runs"] if options.output and options.output.is_file() else []
    others = [other for other in held if other["environment"]["versions"]["jax"] != jax.__version__]
    runs = sorted([*others, run], key=lambda run: run["environment"]["versions"]["jax"])
    if options.output is not None:
        options.output.write_text(json.dumps({"benchmark": record["benchmark"], "runs": runs}, indent=2) + "\n")
    if options.page is not None:
        options.page.write_text(with_table(options.page.read_text(), runs))


if __name__ == "__main__":
    main()
