"""Plain JAX that an operator would replace is named with its line, and nothing else is."""

import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from patterns_clean import CLEAN
from patterns_planted import PLANTED, W, X, f32
from typer.testing import CliRunner

import lowering
from jaxops.__main__ import app
from lowering.patterns import graphs, opportunities
from lowering.register import patterns


@pytest.fixture(autouse=True)
def _users_promotion() -> Iterator[None]:
    """What users have: optax itself needs it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def marked_line(fn: Callable[..., Any], mark: str = "# here") -> int:
    lines, first = inspect.getsourcelines(fn)
    (offset,) = (i for i, line in enumerate(lines) if line.rstrip().endswith(mark))
    return first + offset


@pytest.mark.parametrize("name", PLANTED)
def test_explain_finds_what_is_planted(name: str) -> None:
    fn, args, replacement, count = PLANTED[name]
    (found,) = lowering.explain(fn, *args).opportunities
    assert found.replacement == replacement
    assert found.source.startswith(f"patterns_planted.py:{marked_line(fn)} (")
    assert found.count == count


@pytest.mark.parametrize("name", CLEAN)
def test_explain_finds_nothing_in_clean_functions(name: str) -> None:
    fn, args = CLEAN[name]
    assert lowering.explain(fn, *args).opportunities == ()


@pytest.mark.parametrize("name", [name for name in PLANTED if "shard" not in name])
def test_explain_finds_the_same_under_vmap(name: str) -> None:
    fn, args, replacement, _ = PLANTED[name]
    batched = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), args)
    (found,) = lowering.explain(jax.vmap(fn), *batched).opportunities
    assert found.replacement == replacement


def test_explain_names_the_caller_of_what_jax_jits() -> None:
    fn, args = PLANTED["second_of_two_alike"][:2]
    (found,) = lowering.explain(fn, *args).opportunities
    assert f"patterns_planted.py:{marked_line(fn, '# picked')} (" in found.detail


def test_explanation_shows_opportunities_below_the_table() -> None:
    fn, args = PLANTED["sixteen_bits"][:2]
    explanation = lowering.explain(fn, *args)
    line = str(explanation).splitlines()[-1]
    (shown,) = json.loads(explanation.to_json())["opportunities"]
    assert line == str(explanation.opportunities[0])
    # 6 x 16 logits of two bytes
    assert "bfloat16[6,16] (192 bytes)" in line
    assert shown["source"].endswith("(sixteen_bits)")
    assert shown["count"] == 1


def test_command_shows_opportunities_below_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = inspect.getsource(PLANTED["optax_integer_labels"][0]).replace("@planted(LOGITS, W, X, Y)", "import optax")
    (tmp_path / "head.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    arguments = ("--arg", "f32[8,16]", "--arg", "f32[6,8]", "--arg", "i32[6]")
    result = CliRunner().invoke(app, ["explain", "head.py:optax_integer_labels", *arguments])
    assert result.stdout.splitlines()[-1] == (
        "head.py:3 (optax_integer_labels): logits float32[6,16] (384 bytes) for a log-softmax that labels pick from on "
        "head.py:4 (optax_integer_labels): jaxops.linear_cross_entropy would replace this"
    )


def test_explanation_shows_nothing_where_there_is_none() -> None:
    fn, args = CLEAN["our_optimizer"]
    assert str(lowering.explain(fn, *args)).splitlines()[-1].startswith("└")


def test_explain_finds_patterns_under_x64() -> None:
    with jax.enable_x64():
        wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float64), (W, X))
        labels = jax.ShapeDtypeStruct((6,), jnp.int64)
        (found,) = lowering.explain(PLANTED["take_along_axis"][0], *wide, labels).opportunities
    # 6 x 16 logits of eight bytes
    assert "float64[6,16] (768 bytes)" in found.detail


def test_explain_finds_patterns_of_symbolic_shapes() -> None:
    rows, classes = jax.export.symbolic_shape("n, v")
    args = (f32(8, classes), f32(rows, 8), jax.ShapeDtypeStruct((rows,), jnp.int32))
    (found,) = opportunities(jax.make_jaxpr(PLANTED["take_along_axis"][0])(*args).jaxpr, patterns())
    assert "float32[n,v] for" in found.detail


def test_graphs_take_any_jaxpr() -> None:
    def fn(x, key):
        y = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))[1]
        y = jax.pure_callback(lambda y: np.asarray(y), f32(4), y) + jax.random.normal(key, (4,))
        return (
            lax.sort(lax.associative_scan(jnp.add, y)),
            jnp.linalg.qr(jnp.outer(y, y)),
            lax.reduce(y, 0.0, lax.add, [0]),
        )

    jaxpr = jax.make_jaxpr(fn)(f32(4), jax.random.key(0)).jaxpr
    # The function itself, and the condition and the body of its loop.
    assert [graph.count for graph in graphs(jaxpr)] == [1, 1, 1]
