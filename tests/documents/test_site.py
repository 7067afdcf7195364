"""What only the site shows: programs on its pages run as pasted, plots are drawn, and notebooks have their pictures.

`make docs` builds it, and fails on a warning, a broken link or a public name without a page.
"""

import codeop
import importlib
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxops

ROOT = Path(__file__).parents[2]


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)


def program(page: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that a page's blocks define, run in order as users would."""
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # as it was, after a block that sets it
    names: dict[str, Any] = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in blocks(page):
            exec(block, names)
    return names


@pytest.mark.parametrize("page", ["start.md", "scale.md", "frameworks.md", "recipes.md"])
def test_page_can_be_pasted_into_a_shell(page: str) -> None:
    """A shell reads line by line, and a blank line ends a function or a loop."""
    for block in blocks(page):
        pending: list[str] = []
        for line in [*block.splitlines(), ""]:
            pending.append(line)
            if codeop.compile_command("\n".join(pending)) is not None:
                pending = []
        assert pending == []


@pytest.mark.slow
def test_start_runs_as_pasted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)  # a terminal of 88 columns, as the page says
    monkeypatch.setenv("COLUMNS", "88")
    names = program("start.md", monkeypatch)
    page = (ROOT / "docs" / "start.md").read_text()
    shown = "".join(re.findall(r"^```\n\n```\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    printed = "".join(f"{line.rstrip()}\n" for line in capsys.readouterr().out.splitlines())
    number = re.compile(r"\d+\.\d+")
    assert number.sub("", printed.replace("<string>", "start.py")) == number.sub("", shown)
    assert [float(x) for x in number.findall(printed)] == pytest.approx([float(x) for x in number.findall(shown)], 0.1)
    plain, *others = (
        float(loss(names["x"], names["weight"])) for loss in (names["plain"], names["ours"], names["rewritten"])
    )
    assert others == pytest.approx([plain] * 2, rel=1e-5)
    assert round(plain, 1) == 10.2
    assert names["megabytes"]["ours"] < names["megabytes"]["plain"] / 4
    assert names["losses"] == sorted(names["losses"], reverse=True)
    assert len(names["rewritten"].report(names["x"], names["weight"]).applied) == 1


@pytest.mark.long
def test_scale_runs_as_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    names = program("scale.md", monkeypatch)
    expected = float(names["one_device"])
    assert [float(names[name]) for name in ("by_rows", "by_vocabulary")] == pytest.approx([expected] * 2, rel=1e-5)


@pytest.mark.slow
def test_frameworks_runs_as_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    names = program("frameworks.md", monkeypatch)
    for framework in ("nnx", "linen", "equinox"):
        assert float(names[f"{framework}_loss"]) == pytest.approx(math.log(1000), rel=0.2)


@pytest.mark.slow
def test_recipes_are_those_of_logits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert max(block.count("\n") for block in re.findall(r"(?<=\ndef )(?:.+\n)+", "\n".join(blocks("recipes.md")))) < 15
    names = program("recipes.md", monkeypatch)

    def with_logits(x: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
        picked = jnp.take_along_axis(jax.nn.log_softmax(x @ head.T), labels.clip(min=0)[..., None], axis=-1)
        return jnp.where(labels == -100, 0, picked[..., 0])

    monkeypatch.setattr(jaxops, "linear_log_probs", with_logits)
    expected = program("recipes.md", monkeypatch)
    for loss in ("dpo", "grpo", "sampled", "whole"):
        assert float(names[loss]) == pytest.approx(float(expected[loss]), rel=1e-5)
    students, teachers = (
        [jax.ShapeDtypeStruct((rows, width), jnp.float32) for rows in (2048, 32768)] for width in (256, 512)
    )
    gradient = jax.jit(jax.grad(names["distillation_loss"], (0, 1)))
    memory = gradient.lower(*students, *teachers).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2048 * 32768 * 4 / 2


def test_plots_are_drawn_from_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    plots = importlib.import_module("plots")
    for path, plot in plots.PLOTS.items():
        assert all(axes.lines or axes.patches for axes in plot().axes)
        assert (ROOT / path).exists()
    measured = {"batch_norm", "dropout", "max_pool", "softmax", "linear_cross_entropy", "ema_adam", "embedding"}
    assert measured <= {label.get_text() for label in plots.ours_by_pytorch().axes[0].get_yticklabels()}


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_has_stored_its_pictures(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    assert sum("image/png" in output.get("data", {}) for output in outputs)
    assert not [output for output in outputs if output["output_type"] == "error"]
