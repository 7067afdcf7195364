r"""Plans of train steps for slices that are not here, and of runs whose measured times others have published.

python benchmarks/plan.py --output benchmarks/results/plan.json --page docs/plan.md

It needs `jaxops targets --install tpu` and `--install cuda`; what was compiled is kept, so it goes on where it stopped.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import harness
import jax.numpy as jnp
from plan_models import DEMO_7B, Decoder, step_of

import lowering
from lowering.planning.report import mesh_text

_RECIPES = "https://github.com/AI-Hypercomputer/tpu-recipes/blob/main/training/trillium"
_MAXTEXT = "https://github.com/AI-Hypercomputer/maxtext/blob/main/MaxText/configs"
_NANOTRON = "https://huggingface.co/nanotron/old_bench/blob/main/llama-1B"

SECTIONS = ("growing", "published", "meshes")
# With little and with much tensor parallelism.
TARGETS = ("tpu-v5e:16x16", "tpu-v6e:16x16", "tpu-v5p:8x8x8", "cuda-h100:64")
MESHES = (
    {"data": 1, "fsdp": -1, "tensor": 4},
    {"data": 1, "fsdp": -1, "tensor": 16},
)
GROWING = ("tpu-v5p:2x2x1", "tpu-v5p:2x2x4", "tpu-v5p:4x4x4", "tpu-v5p:8x8x8")
# Prices of a chip and hour, on demand, as an example.
PRICES = {"tpu-v5e": 1.2, "tpu-v6e": 2.7, "tpu-v5p": 4.2, "cuda-h100": 3.0}


class Published(NamedTuple):
    """A run that others have measured.

    Attributes:
      seconds: of one step; where only flops per second are published, these divided into the flops that they count.
      memory_bytes: what a chip held at its peak, where that is published.
    """

    name: str
    target: str
    mesh: Mapping[str, int]
    model: Decoder
    source: str
    seconds: float | None = None
    tflops_per_s: float | None = None
    memory_bytes: int | None = None


def maxtext(width: int, depth: int, heads: int, hidden: int, batch: int, remat: str = "full") -> Decoder:
    return Decoder(32000, width, depth, heads, heads, 128, hidden, 2048, batch, remat=remat)


def nanotron(data: int, sequences: int) -> Decoder:
    """1.1 billion parameters, and 1024 sequences in parts of so many on each rank; three words more, to be divided."""
    sizes = (50260, 2048, 24, 32, 32, 64, 4096, 4096)
    return Decoder(*sizes, 1024, 1024 // (data * sequences), remat="products", parts=8)


def fsdp(size: int, tensor: int = 1, data: int = 1) -> dict[str, int]:
    return {"data": data, "fsdp": size, "tensor": tensor}


# What MaxText's recipes offload to host memory.
OFFLOADED = ("layer_input", "query", "key", "value", "out")


def llama3(width: int, depth: int, heads: int, hidden: int, sequences: int, **options: Any) -> Decoder:
    """Llama 3.1 with 8192 tokens, as tpu-recipes trains it."""
    return Decoder(
        128256, width, depth, heads, 8, 128, hidden, 8192, sequences, parts=8, groups_in_turn=True, **options
    )


def llama3_8b(chips: int, of_a_chip: int) -> Decoder:
    return llama3(4096, 32, 32, 14336, chips * of_a_chip, offloaded=OFFLOADED)


def llama3_70b(chips: int, of_a_chip: int, **options: Any) -> Decoder:
    return llama3(8192, 80, 64, 28672, chips * of_a_chip, offloaded=OFFLOADED[:4], **options)


LLAMA2_70B = Decoder(32000, 8192, 80, 64, 8, 128, 28672, 4096, 3 * 256, groups_in_turn=True, offloaded=OFFLOADED[1:4])
MISTRAL_7B = llama3(4096, 32, 32, 14336, 6 * 8, offloaded=OFFLOADED)._replace(vocabulary=32000)
MIB = 2**20
V5E, V6E = "tpu-v5e:16x16", "tpu-v6e:16x16"
PUBLISHED = (
    Published(
        "nanotron Llama 1B, tp 2",
        "cuda-h100:8",
        fsdp(1, 2, 4),
        nanotron(4, 8),
        f"{_NANOTRON}/8_GPUS/dp-4_tp-2_pp-1_mbz-8/log_metrics.csv",
        15.8,
        memory_bytes=43650 * MIB,
    ),
    Published(
        "nanotron Llama 1B, tp 4",
        "cuda-h100:8",
        fsdp(1, 4, 2),
        nanotron(2, 8),
        f"{_NANOTRON}/8_GPUS/dp-2_tp-4_pp-1_mbz-8/log_metrics.csv",
        19.0,
        memory_bytes=25808 * MIB,
    ),
    Published(
        "nanotron Llama 1B, tp 4",
        "cuda-h100:16",
        fsdp(1, 4, 4),
        nanotron(4, 16),
        f"{_NANOTRON}/16_GPUS/dp-4_tp-4_pp-1_mbz-16/log_metrics.csv",
        10.3,
        memory_bytes=47549 * MIB,
    ),
    Published(
        "MaxText 16B",
        V5E,
        fsdp(256),
        maxtext(4096, 32, 64, 28672, 6 * 256),
        f"{_MAXTEXT}/v5e/README.md",
        tflops_per_s=120,
    ),
    Published(
        "MaxText 32B",
        V5E,
        fsdp(256),
        maxtext(8192, 32, 64, 28672, 4 * 256),
        f"{_MAXTEXT}/v5e/README.md",
        tflops_per_s=132,
    ),
    Published(
        "MaxText 32B",
        "tpu-v5p:4x4x4",
        fsdp(16, 4),
        maxtext(8192, 32, 64, 28672, 7 * 64, remat="products")._replace(features_split=True),
        f"{_MAXTEXT}/v5p/README.md",
        tflops_per_s=328,
    ),
    Published("MaxText Llama 2 70B", V6E, fsdp(256), LLAMA2_70B, f"{_RECIPES}/Llama2-70B-MaxText/README.md", 9.052),
    Published(
        "MaxText Mistral 7B", "tpu-v6e:2x4", fsdp(8), MISTRAL_7B, f"{_RECIPES}/Mistral-7B-MaxText/README.md", 6.320
    ),
    *(
        Published(
            "MaxText Llama 3.1 8B",
            f"tpu-v6e:{topology}",
            fsdp(chips),
            llama3_8b(chips, of_a_chip),
            f"{_RECIPES}/Llama3.1-8B-MaxText/v6e-{chips}/README.md",
            seconds,
        )
        for topology, chips, of_a_chip, seconds in (
            ("2x4", 8, 3, 3.443),
            ("4x4", 16, 3, 3.393),
            ("4x8", 32, 3, 3.495),
            ("8x8", 64, 5, 5.652),
            ("8x16", 128, 4, 4.602),
            ("16x16", 256, 4, 4.546),
        )
    ),
    *(
        Published(
            "MaxText Llama 3.1 70B",
            f"tpu-v6e:{topology}",
            fsdp(chips),
            llama3_70b(chips, of_a_chip, **options),
            f"{_RECIPES}/Llama3.1-70B-MaxText/v6e-{chips}/README.md",
            seconds,
        )
        for topology, chips, of_a_chip, seconds, options in (
            ("4x8", 32, 2, 17.790, {"weight_dtype": jnp.bfloat16}),
            ("8x8", 64, 2, 18.688, {}),
            ("8x16", 128, 4, 34.786, {}),
            ("16x16", 256, 5, 42.656, {}),
        )
    ),
)


def model_flops(model: Decoder) -> float:
    """What MaxText counted as a step's flops: six for each weight and token, and attention without a mask."""
    attention = 12 * model.depth * model.heads * model.head_size * model.context
    return model.tokens * (6.0 * model.parameters + attention)


def published_seconds(run: Published, chips: int) -> float:
    if run.seconds is not None:
        return run.seconds
    assert run.tflops_per_s is not None
    return model_flops(run.model) / chips / (1e12 * run.tflops_per_s)


def planned(model: Decoder, targets: Any, meshes: Any, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    step, args, shardings = step_of(model)
    plan = lowering.plan(
        step,
        *args,
        targets=list(targets),
        meshes=list(meshes),
        shardings=shardings,
        tokens=model.tokens,
        price_per_chip_hour=PRICES,
        **options,
    )
    print(plan, flush=True)
    return [_record(row, model) for row in plan.rows]


def _record(row: lowering.Plan, model: Decoder) -> dict[str, Any]:
    record = row.to_record()
    kept = ("kind", "arrays", "axes", "group", "count", "bytes", "seconds")
    record["collectives"] = [{name: one[name] for name in kept} for one in record["collectives"]]
    record["vocabulary_gathers"] = [
        one["arrays"]
        for one in record["collectives"]
        if "gather" in one["kind"] and _has_words(one["arrays"], row, model)
    ]
    return record


def _has_words(arrays: Any, row: Any, model: Decoder) -> bool:
    """Whether an array is as long as the table, or as a chip's part of it."""
    sizes = {model.vocabulary, model.vocabulary // row.mesh["tensor"]}
    return any(sizes & {int(size) for size in text.partition("[")[2].rstrip("]").split(",") if size} for text in arrays)


def published(options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for run in PUBLISHED:
        for row in planned(run.model, [run.target], [run.mesh], options):
            seconds = published_seconds(run, row["devices"])
            ratio = seconds / row["bound_seconds"] if row["bound_seconds"] else None
            yield {
                "name": run.name,
                "parameters": run.model.parameters,
                "source": run.source,
                "measured_seconds": seconds,
                "measured_memory_bytes": run.memory_bytes,
                "of_the_bound": ratio,
                "plan": row,
            }


def small() -> Decoder:
    return DEMO_7B._replace(
        vocabulary=8192, width=1024, depth=8, heads=8, kv_heads=8, hidden=4096, context=512, batch=512
    )


def page(results: Mapping[str, Any], text: str) -> str:
    """A page with the tables of these results in place of those between its marks."""
    for name, table in (("meshes", _meshes_table(results)), ("published", _published_table(results))):
        before, _, rest = text.partition(f"<!-- {name} -->\n")
        _, mark, after = rest.partition(f"<!-- end of {name} -->")
        text = f"{before}<!-- {name} -->\n{table}{mark}{after}"
    return text


def _meshes_table(results: Mapping[str, Any]) -> str:
    lines = [
        "| slice and mesh | memory, GB | spare, GB | matmul, ms | HBM, ms | links, ms | tokens/s at the bound |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in results["meshes"]:
        times = [row[f"{name}_seconds"] for name in ("matmul", "memory", "link")]
        figures = ["-" if size is None else f"{size / 1e9:,.1f}" for size in (row["memory_bytes"], row["spare_bytes"])]
        figures += ["-" if seconds is None else f"{1e3 * seconds:,.0f}" for seconds in times]
        tokens = f"{row['tokens_per_second']:,.0f}" if row["tokens_per_second"] else row["refusal"] or "does not fit"
        lines.append(f"| {row['target']} {mesh_text(row['mesh'])} | {' | '.join([*figures, tokens])} |")
    return "\n".join(lines) + "\n"


def _published_table(results: Mapping[str, Any]) -> str:
    lines = [
        "| run | slice and mesh | measured, s | bound, s | in turn, s | measured by bound | measured by in turn "
        "| host, s | GB | measured, GB |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for run in results["published"]:
        row, held = run["plan"], run["measured_memory_bytes"]
        mesh = {name: size for name, size in row["mesh"].items() if size > 1}
        times = [run["measured_seconds"], row["bound_seconds"], row["serial_seconds"], run["of_the_bound"]]
        times += [run["measured_seconds"] / row["serial_seconds"], row["host_seconds"] or None]
        shown = ["-" if time is None else f"{time:.2f}" for time in times]
        sizes = ["-" if size is None else f"{size / 1e9:,.1f}" for size in (row["memory_bytes"], held)]
        name = f"[{run['name']}]({run['source']})"
        where = f"{row['target']} {mesh_text(mesh)}"
        lines.append(f"| {' | '.join([name, where, *shown, *sizes])} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = harness.parser(__doc__.partition("\n")[0])
    parser.add_argument("--page", type=Path, help="the page of documentation whose tables to write")
    parser.add_argument("--cache", type=Path, help="a folder for what was compiled")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds for each plan")
    parser.add_argument("--only", choices=SECTIONS, help="plan this part, and keep the other results")
    arguments = parser.parse_args()
    options = {"cache": arguments.cache, "budget_seconds": arguments.budget}
    model = small() if arguments.quick else DEMO_7B
    plans: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "growing": lambda: planned(small(), GROWING, [fsdp(-1, 4)], options),
        "published": lambda: [] if arguments.quick else list(published(options)),
        "meshes": lambda: planned(model, TARGETS, MESHES, options),
    }
    is_begun = arguments.only and arguments.output is not None and arguments.output.is_file()
    results = json.loads(arguments.output.read_text()) if is_begun else {"benchmark": "plan", "environments": {}}
    for section in [arguments.only] if arguments.only else SECTIONS:
        results[section] = plans[section]()
        results["environments"][section] = harness.environment()
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    if arguments.page:
        arguments.page.write_text(page(results, arguments.page.read_text()))


if __name__ == "__main__":
    main()
