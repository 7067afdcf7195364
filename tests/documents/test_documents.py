"""What the README and the pages in `docs/` show is what happens."""

import functools
import importlib
import inspect
import json
import re
import runpy
import statistics
import sys
import tomllib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxops
import lowering
from lowering.evidence import shipped
from lowering.measurements import versions
from lowering.schedule.chips import CHIPS

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

# The four documents of CANN, with their companions, and the one of mcDNN.
DOCUMENTED = {
    *("aclnn" + name for name in ("EmbeddingDenseBackward", "ApplyFusedEmaAdam")),
    *("aclnnNLLLoss" + suffix for suffix in ("", "Backward", "2d", "2dBackward")),
    *(
        "aclnnFused" + name
        for name in ("LinearOnlineMaxSum", "CrossEntropyLossWithMaxSum", "LinearCrossEntropyLossGrad")
    ),
    *("mcdnnBatchNormalization" + name for name in ("Backward", "BackwardEx", "ForwardTraining", "ForwardTrainingEx")),
    *("mcdnnNormalization" + name for name in ("Backward", "ForwardTraining")),
    *("mcdnnGetBatchNormalization" + name for name in ("BackwardExWorkspaceSize", "ForwardTrainingExWorkspaceSize")),
    "mcdnnGetBatchNormalizationTrainingExReserveSpaceSize",
    *("mcdnnGetNormalization" + name for name in ("BackwardWorkspaceSize", "ForwardTrainingWorkspaceSize")),
    "mcdnnGetNormalizationTrainingReserveSpaceSize",
    *("mcdnn" + name + "Backward" for name in ("Activation", "Softmax", "Pooling", "LRNCrossChannel", "Dropout")),
    *("mcdnn" + name + "Backward" for name in ("DivisiveNormalization", "SpatialTfGridGenerator", "SpatialTfSampler")),
    "mcdnnOpsTrainVersionCheck",
}


def test_readme_examples_run_as_pasted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    first, explained = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    (shown,) = re.findall(r"^```\n(cuda-h100: .*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)  # a terminal of 88 columns, as the page says
    monkeypatch.setenv("COLUMNS", "88")
    names: dict[str, Any] = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # what users have
        exec(first, names)
        losses = [float(loss) for loss in capsys.readouterr().out.split()]
        exec(explained, names)
        report = names["rewritten"].report(names["x"], names["head"], jnp.arange(1024))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    assert [one.pattern for one in report.applied] == ["cross_entropy_sum"]
    timed_with = shipped("cuda-h100").header["versions"]
    assert f"timed on an H100, with JAX {timed_with['jax']}, " in " ".join(README.read_text().split())
    # What it says of versions depends on those that are installed.
    if timed_with.items() <= dict(versions()).items():
        shown = shown.replace("; not run with these versions", "")
    assert capsys.readouterr().out == shown


def test_readme_is_short_and_draws_its_picture_from_what_it_names() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 110
    assert re.findall(r"!\[.*\]\((.*)\)", text) == ["docs/figures/plain_against_ours.svg"]
    results = ("vocabulary_memory_cpu", "linear_cross_entropy_cpu")
    found = [json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text()) for name in results]
    memory, time = (each["environment"] for each in found)
    caption = f"Memory: XLA's report for a CPU, {memory['date']}. Time: 2 cores of an Intel Xeon, {time['date']}."
    assert caption in " ".join(text.split())
    assert memory["versions"]["jax"] == time["versions"]["jax"] == "0.10.2"
    assert (time["cpu"], time["cpu_cores"]) == ("Intel(R) Xeon(R) Processor", 2)


def test_page_of_the_compiler_shows_what_explain_says() -> None:
    """What rewriting saves differs between versions of JAX, by which each estimates its own programs."""
    (shown,) = re.findall(
        r"plain.py:step --target tpu-v6e\n((?:    .*\n)+)", (ROOT / "docs" / "compiler.md").read_text()
    )
    names = runpy.run_path(str(ROOT / "examples" / "plain.py"))
    explanation = lowering.explain(names["step"], *names["example_args"], target="tpu-v6e")
    saving = re.compile(r"(?<=would save about )\d+(?= MB)")
    assert saving.sub("", " ".join(shown.split())) == saving.sub("", " ".join(str(explanation).split()))
    (paged,), (said,) = saving.findall(shown), saving.findall(str(explanation))
    assert 1 / 1.5 < int(paged) / int(said) < 1.5


def test_page_on_emulation_counts_the_faults_that_were_planted() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "emulation_faults.json").read_text())
    page = " ".join((ROOT / "docs" / "emulation.md").read_text().split())
    assert f"of {found['planted']} faults planted into executed bundles of {len(found['cases'])} cases" in page
    assert f"{found['seen']} are seen in the results" in page
    assert found["seen"] >= 0.85 * found["planted"]
    coverage = json.loads((ROOT / "benchmarks" / "results" / "emulation_coverage.json").read_text())["kernels"]
    partly = {name: [chip["coverage"] for chip in chips.values()] for name, chips in coverage.items()}
    partly = {name: parts for name, parts in partly.items() if min(parts) < 1}
    assert partly.keys() == {"dropout", "embedding_dense_backward"}
    assert f"every bundle of {len(coverage) - len(partly)} of {len(coverage)} kernels on each chip" in page
    for parts in partly.values():
        assert " to ".join(dict.fromkeys(f"{part:.2f}" for part in (min(parts), max(parts)))) in page
    rows = [case["candidates"]["emulated"] for case in found["cases"]]
    assert {row["kernel"] for row in rows if row["coverage"] < 1} == {"dropout"}
    assert f"of dropout's {min(row['coverage'] for row in rows):.2f}" in page


def test_contributors_read_how_many_faults_were_seen() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "source_faults.json").read_text())
    seen = [fault for fault in found["faults"] if fault["test"]]
    assert f"source_faults.json`, {len(seen)} were seen" in (ROOT / "CONTRIBUTING.md").read_text()
    assert (found["planted"], found["seen"]) == (len(found["faults"]), len(seen))
    assert all(fault["test"].startswith(("tests/", "no end after ")) for fault in seen)


def test_nobody_is_told_to_install_what_no_index_has() -> None:
    """Until it is published, this library is installed from a clone, with extras that there are."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = (path for name in ("jaxops", "jaxops_command", "lowering") for path in (ROOT / name).rglob("*.py"))
    for page in (*PAGES, *sorted((ROOT / "notebooks").glob("*.ipynb")), *packages):
        text = page.read_text()
        assert not re.search(r"pip install (-\S+ )*['\"\\]*jaxops", text), page.name
        assert set(re.findall(r"pip install (?:-\S+ )*'\.\[([\w-]+)\]'", text)) <= set(project["optional-dependencies"])
    assert all("pip install '.[notebooks]'" in path.read_text() for path in (ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_fits_its_column(page: Path) -> None:
    """A page of 1440 pixels shows 88 characters of code; the rest of a line is cut."""
    text = re.sub(r"^<!--.*?-->$", "", page.read_text(), flags=re.MULTILINE)
    fenced = re.findall(r"^( *)```\w*\n(.*?)^\1```", text, re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^( *)```\w*\n.*?^\1```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line.removeprefix(indent) for indent, block in fenced for line in block.splitlines()]
    lines += re.findall(r"^    (.*)", rest, re.MULTILINE)
    assert [line for line in lines if len(line) > 88] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_pages_name_exist(page: Path) -> None:
    named = re.findall(
        r"`((?:jaxops|lowering|pallas_kernels|tests|benchmarks|notebooks)/[\w/]+(?:\.\w+|/))`", page.read_text()
    )
    assert [path for path in named if not (ROOT / path).exists()] == []


def medians(name: str) -> dict[str, dict[str, str]]:
    """The times in a results file, as pages write them, by case and candidate."""
    cases = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["cases"]
    found = {
        case["name"]: {candidate: row["median_ms"] for candidate, row in case["candidates"].items()} for case in cases
    }
    return {
        case: {candidate: f"{ms:.{2 if ms < 2 else 1 if ms < 40 else 0}f} ms" for candidate, ms in times.items()}
        for case, times in found.items()
    }


def test_pages_compare_batch_norm_with_flax_and_say_where_it_loses():
    found, page = medians("batch_norm_cpu"), (ROOT / "docs" / "numbers.md").read_text()
    readme = " ".join(README.read_text().split())
    for case, times in found.items():
        cells = (times[name] for name in ("jaxops", "flax BatchNorm", "jnp formula", "torch"))
        assert f"| {case.removeprefix('16x64x56x56 ')} | {' | '.join(cells)} |" in page
    best = found["16x64x56x56 NCHW float32 + residual + relu"]
    assert f"56 x 56 | {best['jaxops']} | {best['flax BatchNorm']} | {best['torch']} |" in readme
    for layout in ("NCHW", "NHWC"):
        times = found[f"16x64x56x56 {layout} float32, value alone"]
        peers = f"(flax {times['flax BatchNorm']}, PyTorch {times['torch']})"
        assert f"{times['jaxops']} in {layout} {peers}" in readme


def test_pages_compare_the_optimizer_with_optax():
    single, half = medians("ema_adam_cpu").values()
    page = (ROOT / "docs" / "numbers.md").read_text()
    candidates = ("jaxops fused_apply", "optax adamw + jnp average", "torch fused AdamW + lerp")
    for candidate in (*candidates, "optax adamw + incremental_update"):
        assert re.search(rf"\| {single[candidate]} \| [\d. MB]*\| {half[candidate]} \|", page), candidate
    assert f"85 million parameters | {' | '.join(single[each] for each in candidates)} |" in README.read_text()


def test_readme_has_a_row_in_bfloat16():
    results = json.loads((ROOT / "benchmarks" / "results" / "embedding_cpu.json").read_text())
    found = {case["name"]: case["candidates"] for case in results["cases"]}
    times = found["bfloat16[50257, 768], 8192 positions of 3364 ids (zipf)"]
    cells = (f"{times[name]['median_ms']:.0f} ms" for name in ("jaxops", "jax.grad of indexing", "torch"))
    assert results["environment"]["cpu"] == "AMD EPYC"
    row = "`embedding`'s gradient, bfloat16, 50257 x 768, 8192 ids"
    assert f"| {row} | {' | '.join(cells)} |" in README.read_text()


def test_pages_quote_what_was_measured_on_an_h100():
    results = json.loads((ROOT / "benchmarks" / "results" / "gpu_cuda-h100.json").read_text())
    cases = {(case["stage"], case["name"]): case for case in results["cases"]}
    readme, page = (" ".join(path.read_text().split()) for path in (README, ROOT / "docs" / "numbers.md"))
    moved_gb = 4 * (16384 + 128256) * 4096 / 1e9  # arguments and results
    quoted = {}
    for name, words in (
        ("headline jaxops:grad_in_forward+pallas", "kernel, three products"),
        ("headline jaxops:grad_in_forward+xla_by_rows", "XLA, three products"),
        ("headline jaxops:recompute+pallas", 'kernels, `strategy="recompute"`, four products'),
        ("peers torch.compile", "PyTorch 2.11, `torch.compile`"),
        ("peers torch", "PyTorch 2.11"),
        ("peers liger", "Liger 0.8.5, gradients in bfloat16"),
        ("peers tokamax:xla", "tokamax 0.0.17, XLA"),
        ("peers optax", "logits, optax loss"),
    ):
        stage, _, candidate = name.partition(" ")
        case = cases[stage, f"{candidate} (16384, 4096, 128256)"]
        peak = case["temporary_gb"] + moved_gb if "temporary_gb" in case else case["peak_gb"]
        quoted[candidate] = round(case["median_ms"]), round(peak, 1)
        assert f"| {words} | {case['median_ms']:.1f} ms | {peak:.2f} GB |" in page
    (ours, gb), *peers = (quoted[name] for name in ("jaxops:grad_in_forward+pallas", "torch.compile", "liger", "optax"))
    assert f"16384 x 4096 x 128256: {ours} ms and {gb} GB." in readme
    assert (
        "`torch.compile` takes {} ms and {} GB, Liger {} ms and {} GB, optax {} ms and {} GB".format(
            *(number for pair in peers for number in pair)
        )
        in readme
    )


@pytest.mark.parametrize("chip", ["h100", "v5e"])
def test_numbers_quotes_the_memory_that_compilers_reported(chip):
    text = (ROOT / "docs" / "numbers.md").read_text()
    results = json.loads((ROOT / "benchmarks" / "results" / f"linear_cross_entropy_{chip}.compiled.json").read_text())
    case = results["cases"][0]
    assert "16384x4096x128256" in case["name"]
    for row in case["candidates"].values():
        assert f"| {row['temporary_mb'] / 1e3:.2f} GB | {row['peak_mb'] / 1e3:.2f} GB |" in text


def test_numbers_quotes_the_errors_of_the_weights_gradient():
    results = json.loads((ROOT / "benchmarks" / "results" / "weight_grad_dtype_cpu.json").read_text())
    errors = list(results["cases"][0]["candidates"].values())
    page = (ROOT / "docs" / "numbers.md").read_text()
    for dtype in ("float32", "bfloat16"):
        row = " | ".join(str(error[f"error_{dtype}"]) for error in errors)
        assert f"| summed in {dtype} | {row} |" in page


def test_page_of_replays_shows_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    tpu_schedules = importlib.import_module("tpu_schedules")
    results = json.loads((ROOT / "benchmarks" / "results" / "tpu_schedules.json").read_text())
    assert tpu_schedules.page(results) == (ROOT / "docs" / "replays.md").read_text()


def test_kernels_are_no_slower_than_xla() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "tpu_schedules.json").read_text())
    slower = set()
    for case in results["cases"]:
        xla, kernels = (case["candidates"].get(each, {}) for each in ("xla", "pallas"))
        if "us" not in xla or "us" not in kernels or "unknown" in xla:
            continue
        if kernels["us"] > 1.002 * xla["us"]:
            slower.add(case["name"])
    assert not slower


def test_page_of_schedules_shows_how_far_replays_are_from_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    published = importlib.import_module("tpu_published")
    runs = json.loads((ROOT / "benchmarks" / "results" / "tpu_published.json").read_text())["runs"]
    page = (ROOT / "docs" / "schedule.md").read_text()
    assert published.with_tables(page, runs) == page
    assert len(runs) == 2
    for target, chip in CHIPS.items():
        _, others, _ = published.halves(runs[-1]["cases"], target)
        errors = [abs(error) for error in published.errors(others)]
        told = f"{100 * statistics.mean(errors):.0f} % off in the mean of {len(errors)} published times, and "
        assert chip.accuracy == f"replays were {told}{100 * max(errors):.0f} % at worst"


def test_public_functions_stand_where_the_architecture_says() -> None:
    functions = {name: getattr(jaxops, name) for name in jaxops.__all__ if name not in ("operators", "use")}
    places = {name: fn.__module__.rpartition(".")[2] for name, fn in functions.items() if inspect.isfunction(fn)}
    assert {name: place for name, place in places.items() if place not in (name, "api")} == {}


def test_conformance_table_says_what_there_is() -> None:
    """Every documented function has a row, whose functions exist."""
    table = (ROOT / "docs" / "operators.md").read_text().split("| documented function |", 1)[1].split("\n\n", 1)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert sorted(name for row in rows for name in named(row[0])) == sorted(DOCUMENTED)
    for _, functions, statuses in rows:
        assert statuses
        for name in named(functions):
            assert callable(functools.reduce(getattr, name.split("."), jaxops))


def test_index_of_operators_names_every_function_once() -> None:
    index = (ROOT / "docs" / "operators.md").read_text().split("## Documented calls", 1)[0]
    listed = re.findall(r"^\* \[`(\w+)`\]\(\.\./jaxops/(\w+)", index, re.MULTILINE)
    functions = {
        name: getattr(jaxops, name) for name in jaxops.__all__ if name not in ("operators", "tune_device", "use")
    }
    places = {name: fn.__module__.split(".")[1] for name, fn in functions.items() if inspect.isfunction(fn)}
    assert sorted(listed) == sorted(places.items())


def named(cell: str) -> list[str]:
    return re.findall(r"`([\w.]+)`", cell)
