"""What is said about rewrites: the report, the command, and the page."""

import importlib
import inspect
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rewrite_checks
from rewrite_checks import ARGS, loss
from rewritten_models import LABELS, MODELS, X
from typer.testing import CliRunner

import lowering
from jaxops_command.app import app
from lowering.rewriting.graph import levels
from lowering.static_leaves import jaxpr_of

users_promotion = pytest.fixture(autouse=True)(rewrite_checks.users_promotion)
few_logits_count = pytest.fixture(rewrite_checks.few_logits_count)
PADDED, HEAD, _ = MODELS["padded_vocabulary"]


def test_patterns_are_switched_by_name(few_logits_count) -> None:
    few_logits_count(95)
    names = "cross_entropy_sum", "row_cone_sum", "cross_entropy", "row_cone"
    for i, name in enumerate(names):
        assert lowering.rewrite(loss, off=names[:i]).report(*ARGS).applied[0].pattern == name
    assert lowering.rewrite(loss, only=("max_pool",)).report(*ARGS).applied == ()
    words = (
        r"^lowering.rewrite: only must be the name of a pattern, or a tuple of names, from .*, dropout; got 'cross'$"
    )
    with pytest.raises(ValueError, match=words):
        lowering.rewrite(loss, only="cross")
    for name in (3, None, 1.5, [["cross_entropy"]], (3,)):
        for argument in ("only", "off"):
            with pytest.raises(ValueError, match=rf"^lowering.rewrite: {argument} must be .* dropout; got \S+$"):
                lowering.rewrite(loss, **{argument: name})
    with pytest.raises(ValueError, match=words):
        lowering.rewrite(only="cross")
    for fn in (3, None):
        with pytest.raises(TypeError, match=rf"^lowering.rewrite: fn must be a function or an operator; got {fn}$"):
            lowering.rewrite(fn)
    with pytest.raises(TypeError, match=r"^lowering.rewrite: fn must be a function, and no class; got "):
        lowering.rewrite(dict)
    with pytest.raises(
        ValueError, match=r"^lowering.rewrite: off must leave a pattern that `only` names; got 'dropout'$"
    ):
        lowering.rewrite(loss, only="dropout", off="dropout")


def test_report_holds_for_numpy_arrays_as_under_jit(few_logits_count) -> None:
    few_logits_count(95)
    args = tuple(map(np.asarray, ARGS))
    assert [one.pattern for one in lowering.rewrite(loss).report(*args).applied] == ["cross_entropy_sum"]
    assert "linear_cross_entropy" in str(jax.make_jaxpr(lowering.rewrite(loss))(*args))

    def with_values(w, x, labels):
        return loss(w, x[np.flatnonzero(labels >= 0)], labels[labels >= 0])

    assert [one.pattern for one in lowering.rewrite(with_values).report(ARGS[0], *args[1:]).applied] == [
        "cross_entropy_sum"
    ]


def test_report_is_shown_and_written() -> None:
    shapes = jax.ShapeDtypeStruct((512, 32000), jnp.float32), jax.ShapeDtypeStruct((2048, 512), jnp.float32)
    report = lowering.rewrite(loss).report(*shapes, jax.ShapeDtypeStruct((2048,), jnp.int32))
    (one,) = report.applied
    assert one.source.startswith("rewrite_checks.py:")
    assert one.source.endswith("(loss)")
    # The logits and their cotangent, but for a chunk of 512 rows, the weight as the operator has it,
    # and the gradient of x.
    assert one.saved_bytes == 2 * 262_144_000 - 262_144_000 // 4 - 4 * 512 * 32000 - 4 * 2048 * 512
    assert "cross_entropy" in str(report)
    assert json.loads(report.to_json())["applied"][0]["pattern"] == "cross_entropy_sum"
    assert "rewrite_checks.py" in str(report)


def test_command_rewrites_before_it_explains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "head.py").write_text("from typing import Any\nimport optax\n\n" + inspect.getsource(loss))
    monkeypatch.chdir(tmp_path)
    arguments = ("--arg", "f32[64,32000]", "--arg", "f32[1024,64]", "--arg", "i32[1024]")
    result = CliRunner().invoke(app, ["explain", "head.py:loss", "--rewrite", *arguments])
    assert "cross_entropy" in result.stdout
    assert "linear_cross_entropy" in result.stdout
    plain = CliRunner().invoke(app, ["explain", "head.py:loss", *arguments])
    (advice,) = [line for line in plain.stdout.splitlines() if "head.py" in line]
    assert "`lowering.rewrite` would save about" in advice
    assert "by cross_entropy_sum: logits" in advice
    assert advice.endswith("; or call jaxops.linear_cross_entropy instead")
    record = json.loads(CliRunner().invoke(app, ["explain", "head.py:loss", "--rewrite", "--json", *arguments]).stdout)
    assert record["rewrite"]["applied"][0]["source"] == "head.py:5 (loss)"
    exported = CliRunner().invoke(app, ["export", "head.py:loss", "--rewrite", "--output", "head.bin", *arguments])
    assert "linear_cross_entropy" in exported.stdout


def pooled(x: jax.Array) -> jax.Array:
    return jnp.sum(jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2), (1, 2), "VALID") ** 2)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("fn", "args"),
    [(loss, ARGS), (jax.grad(loss), ARGS), (jax.grad(PADDED), (HEAD, X, LABELS)), (jax.grad(pooled), ARGS[:1])],
    ids=["sum", "gradient", "padding", "pooling"],
)
def test_what_takes_the_place_of_equations_keeps_their_line(fn, args, few_logits_count) -> None:
    """`explain` of a rewritten function names lines of the user's code, as it does for the function itself."""
    few_logits_count(0)
    jax.clear_caches()  # what JAX itself jits keeps the lines of whoever called it first
    rewritten = lowering.rewrite(fn)
    assert rewritten.report(*args).applied
    sources = {node.source for level in levels(jaxpr_of(rewritten, args)) for node in level.nodes}
    files = {source.partition(":")[0] for source in sources}
    assert files <= {"test_rewrite_report.py", "rewrite_checks.py", "rewritten_models.py"}
    assert not any("unknown" in remark for remark in lowering.explain(rewritten, *args).remarks)


@pytest.mark.parametrize("is_loop", [False, True])
def test_report_says_when_few_logits_matter(is_loop) -> None:
    """A loop of gradients, as of accumulated ones, keeps nothing of its steps; a gradient around the loop does."""

    def stepped(weight, x, labels):
        one = jax.value_and_grad(loss)
        if not is_loop:
            return one(weight, x, labels)
        return jax.lax.map(lambda batch: one(weight, *batch), (jnp.stack([x, x]), jnp.stack([labels, labels])))

    weight, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 1000), (64, 16)))
    args = weight, x, jax.ShapeDtypeStruct((64,), jnp.int32)
    (left,) = lowering.rewrite(stepped).report(*args).refused
    advice = "a gradient around the loop, not one inside of it" if is_loop else "linear_cross_entropy takes any number"
    assert "up to 16,777,216 logits are left alone, as they are few" in left.reason
    assert advice in left.reason


def test_explain_of_a_gradient_advises_to_rewrite_the_loss_and_says_what_is_a_loop() -> None:
    shapes = jax.ShapeDtypeStruct((512, 32000), jnp.float32), jax.ShapeDtypeStruct((2048, 512), jnp.float32)
    args = *shapes, jax.ShapeDtypeStruct((2048,), jnp.int32)
    (advice,) = lowering.explain(jax.grad(loss), *args).remarks
    assert "by row_cone: logits float32[2048,32000], in chunks of rows; if this takes the gradient of a loss" in advice
    assert advice.endswith("rewrite the loss itself: that saves more; or call jaxops.linear_cross_entropy instead")
    rewritten = lowering.explain(lowering.rewrite(jax.grad(loss)), *args)
    (said,) = rewritten.notes
    assert rewritten.rows == ()
    assert ": row_cone computes logits float32[2048,32000], in chunks of rows, in a loop of JAX, which takes no" in said
    assert lowering.explain(jax.grad(lowering.rewrite(loss)), *args).notes == ()


def test_page_shows_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.syspath_prepend(root / "benchmarks")
    results = json.loads((root / "benchmarks" / "results" / "rewriting_cpu.json").read_text())
    assert importlib.import_module("rewriting").table(results) in (root / "docs" / "rewriting.md").read_text()


def of_two_heads(weights, x, labels):
    return jax.vmap(loss, (0, 0, None))(weights, x, labels).sum()


def of_pixels(kernel, images, labels):
    logits = jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()


NO_HEADS = {
    "2 weights make them: rewrite the function inside of jax.vmap": (of_two_heads, (2, 8, 96), (2, 64, 8), (64,)),
    "their number is symbolic: jaxops.linear_cross_entropy takes": (loss, (8, 96), "b, 8", "b"),
    "they come from a convolution that is more than one layer": (of_pixels, (3, 3, 4, 96), (1, 8, 8, 4), (1, 8, 8)),
}


@pytest.mark.parametrize("words", NO_HEADS)
def test_report_says_why_logits_are_those_of_no_layer(words, few_logits_count) -> None:
    few_logits_count(95)
    fn, *shapes = NO_HEADS[words]
    scope = jax.export.SymbolicScope()
    sizes = [jax.export.symbolic_shape(x, scope=scope) if isinstance(x, str) else x for x in shapes]
    args = [jax.ShapeDtypeStruct(size, dtype) for size, dtype in zip(sizes, ("f4", "f4", "i4"), strict=True)]
    report = lowering.rewrite(fn).report(*args)
    assert report.applied == ()
    assert [one.reason.startswith(words) for one in report.refused] == [True]
