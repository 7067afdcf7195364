"""Plain JAX that an operator would replace is named with its line, and nothing else is."""

import dataclasses
import importlib
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from patterns_clean import CLEAN
from patterns_planted import KEY, PLANTED, W, X, f32
from rewrite_checks import let_few_logits_count
from typer.testing import CliRunner

import jaxops
import lowering
from jaxops_command.app import app
from lowering.opportunities import opportunities
from lowering.rewriting import rules as registered_rules
from lowering.rewriting.graph import Level, levels
from lowering.rewriting.rules import Rule, Suggestion, add_rules, rules


@pytest.fixture
def _few_logits_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the operator kept none, so that patterns can be planted in small functions."""
    let_few_logits_count(monkeypatch)


@pytest.fixture(autouse=True)
def _users_promotion() -> Iterator[None]:
    """What users have: optax itself needs it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def marked_line(fn: Callable[..., Any], mark: str = "# here") -> int:
    lines, first = inspect.getsourcelines(fn)
    (offset,) = (i for i, line in enumerate(lines) if line.rstrip().endswith(mark))
    return first + offset


@pytest.mark.sampled
@pytest.mark.usefixtures("_few_logits_count")
@pytest.mark.parametrize("name", PLANTED)
def test_explain_finds_what_is_planted(name: str) -> None:
    fn, args, replacement, count = PLANTED[name]
    (found,) = lowering.explain(fn, *args).opportunities
    assert found.replacement == replacement
    assert found.source.startswith(f"patterns_planted.py:{marked_line(fn)} (")
    assert found.count == count


@pytest.mark.sampled
@pytest.mark.usefixtures("_few_logits_count")
@pytest.mark.parametrize("name", CLEAN)
def test_explain_finds_nothing_in_clean_functions(name: str) -> None:
    fn, args = CLEAN[name]
    explanation = lowering.explain(fn, *args)
    assert (explanation.opportunities, explanation.near_misses) == ((), ())


@pytest.mark.sampled
@pytest.mark.usefixtures("_few_logits_count")
@pytest.mark.parametrize("name", [name for name in PLANTED if "shard" not in name])
def test_explain_finds_the_same_under_vmap(name: str) -> None:
    fn, args, replacement, _ = PLANTED[name]
    batched = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), args)
    (found,) = lowering.explain(jax.vmap(fn), *batched).opportunities
    assert found.replacement == replacement


@pytest.mark.usefixtures("_few_logits_count")
def test_explain_names_the_caller_of_what_jax_jits() -> None:
    fn, args = PLANTED["second_of_two_alike"][:2]
    (found,) = lowering.explain(fn, *args).opportunities
    assert f"patterns_planted.py:{marked_line(fn, '# picked')} (" in found.detail


HEAD = f32(512, 32000), f32(2048, 512), jax.ShapeDtypeStruct((2048,), jnp.int32)


def optax_loss(w, x, labels):
    logits = x @ w  # here
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def temporaries(fn: Callable[..., Any], args: tuple[Any, ...]) -> int:
    return jax.jit(fn).lower(*args).compile().memory_analysis().temp_size_in_bytes


def flax_pooling(x):
    return jnp.sum(nn.max_pool(x, (3, 3), (2, 2), "SAME") ** 2)


def our_pooling(x):
    return jnp.sum(jaxops.max_pool(x, 3, stride=2, padding="SAME", layout="NHWC") ** 2)


def flax_dropout(x, key):
    return jnp.sum(nn.Dropout(0.1, deterministic=False).apply({}, x, rngs={"dropout": key}) ** 2)


def our_dropout(x, key):
    return jnp.sum(jaxops.dropout(key, x, 0.1) ** 2)


def our_loss(w, x, labels):
    return jaxops.linear_cross_entropy(x, w, labels, transpose_weight=True)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("theirs", "ours", "args"),
    [
        (optax_loss, our_loss, HEAD),
        pytest.param(optax_loss, our_loss, (f32(256, 50257), f32(512, 256), HEAD[2].update(shape=(512,)))),
        (flax_pooling, our_pooling, (f32(16, 32, 32, 64),)),
        (flax_dropout, our_dropout, (f32(256, 1024), KEY)),
    ],
    ids=["logits", "few rows of logits", "pooling", "dropout"],
)
def test_what_is_recommended_saves_about_what_is_said(theirs, ours, args) -> None:
    theirs, ours = jax.value_and_grad(theirs), jax.value_and_grad(ours)
    (found,) = lowering.explain(theirs, *args).opportunities
    # What the compiler reports.
    assert 0 < found.saved_bytes <= 1.5 * (temporaries(theirs, args) - temporaries(ours, args))
    assert lowering.explain(ours, *args).opportunities == ()


def test_few_logits_are_left_alone() -> None:
    rows = 2**24 // 32000
    args = HEAD[0], f32(rows, 512), jax.ShapeDtypeStruct((rows,), jnp.int32)
    explanation = lowering.explain(jax.grad(optax_loss), *args)
    assert (explanation.opportunities, explanation.near_misses) == ((), ())


def returned(w, x, labels):
    logits = x @ w  # here
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), jax.nn.softmax(logits)


def ranked_and_printed(w, x, labels):
    logits = x @ w  # here
    best = lax.top_k(logits, 5)[1]  # ranked
    jax.debug.print("{}", logits)  # printed
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), best


def mixed_into_features(w, x, labels):
    logits = x @ w  # here
    features = jax.nn.softmax(logits) @ w.T  # mixed
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), features


def stacked_by_scan(w, x, labels):
    def chunk(total, rows):
        logits = rows[0] @ w  # here
        return total + optax.softmax_cross_entropy_with_integer_labels(logits, rows[1]).sum(), logits

    return lax.scan(chunk, 0.0, (x[None], labels[None]))


READERS = {
    returned: ["returned"],
    ranked_and_printed: ["read by top_k on {ranked}", " on {printed}"],
    mixed_into_features: ["read by dot_general on {mixed}"],
    stacked_by_scan: ["returned"],
}


@pytest.mark.parametrize("fn", READERS, ids=lambda fn: fn.__name__)
def test_other_readers_of_the_logits_are_named(fn) -> None:
    for asked in (fn, jax.value_and_grad(fn, has_aux=True)):
        explanation = lowering.explain(asked, *HEAD)
        assert explanation.opportunities == ()
        (missed,) = explanation.near_misses
        assert missed.source.startswith(f"test_patterns.py:{marked_line(fn)} (")
        for reader in READERS[fn]:
            for mark in ("ranked", "printed", "mixed"):
                if f"{{{mark}}}" in reader:
                    reader = reader.format(**{mark: f"test_patterns.py:{marked_line(fn, '# ' + mark)} ("})
            assert reader in missed.obstacle
        assert str(explanation).splitlines()[-1] == str(missed)


def accuracy_and_last_prediction(w, x, labels):
    logits = x @ w
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, (logits.argmax(-1) == labels).mean(), jnp.max(logits)


def test_accuracy_is_no_other_reader() -> None:
    def loss(w, x, labels):
        value, *rest = accuracy_and_last_prediction(w, x, labels)
        return value, rest

    explanation = lowering.explain(jax.value_and_grad(loss, has_aux=True), *HEAD)
    assert explanation.near_misses == ()
    assert len(explanation.opportunities) == 1


def test_what_saves_most_comes_first() -> None:
    def step(w, x, labels, images, key):
        dropped = nn.Dropout(0.1, deterministic=False).apply({}, x, rngs={"dropout": key})
        return optax_loss(w, dropped, labels) + flax_pooling(images)

    explanation = lowering.explain(jax.grad(step, argnums=(0, 3)), *HEAD, f32(2, 8, 8, 4), KEY)
    assert [x.replacement for x in explanation.opportunities] == [
        "jaxops.linear_cross_entropy",
        "jaxops.dropout",
        "jaxops.max_pool",
    ]
    assert 'jaxops.max_pool(..., layout="NHWC") would replace this' in str(explanation.opportunities[2])
    saved = [x.saved_bytes for x in explanation.opportunities]
    assert saved == sorted(saved, reverse=True)
    assert str(explanation.opportunities[1]).endswith("of temporaries with other random bits")


def test_nothing_is_recommended_where_the_compiler_keeps_nothing() -> None:
    assert lowering.explain(jax.grad(flax_dropout), f32(256, 1024), KEY, target="tpu-v5e").opportunities == ()
    assert lowering.explain(jax.grad(flax_pooling), f32(2, 8, 8, 4), target="tpu-v5e").opportunities == ()


def test_installed_packages_are_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's line is outside of site-packages; where all is installed, it is one of the package that was traced."""
    installed = tmp_path / "site-packages"
    for package, code in {
        "a_model": "import a_head\n\ndef step(w, x, labels):\n    return a_head.of(w, x, labels)\n",
        "a_head": "import optax\n\ndef of(w, x, labels):\n"
        "    return optax.softmax_cross_entropy_with_integer_labels(x @ w, labels).mean()\n",
    }.items():
        (installed / package).mkdir(parents=True)
        (installed / package / "__init__.py").write_text(code)
    monkeypatch.syspath_prepend(installed)
    a_model = importlib.import_module("a_model")

    def mine(w, x, labels):
        return a_model.step(w, x, labels)  # here

    (found,) = lowering.explain(mine, *HEAD).opportunities
    assert found.source.startswith(f"test_patterns.py:{marked_line(mine)} (")
    (found,) = lowering.explain(a_model.step, *HEAD).opportunities
    assert found.source == "__init__.py:4 (step)"


def test_explanation_shows_opportunities_below_the_table() -> None:
    explanation = lowering.explain(optax_loss, *HEAD)
    line = str(explanation.opportunities[0])
    # A place that can be rewritten has one line, that of the rewrite.
    assert str(dataclasses.replace(explanation, rewrites=())).splitlines()[1:] == [line]
    assert str(explanation).splitlines()[1:] == explanation.remarks
    assert line not in explanation.remarks
    (shown,) = json.loads(explanation.to_json())["opportunities"]
    # 2048 x 32000 logits of four bytes and their cotangent, but for a chunk of 512 rows, the
    # weight as the operator has it, and the gradient of x.
    assert "float32[2048,32000] (262,144,000 bytes)" in line
    assert shown["saved_bytes"] == 2 * 262_144_000 - 262_144_000 // 4 - 4 * 512 * 32000 - 4 * 2048 * 512
    assert "would replace this and save about 389 MB of temporaries where it is differentiated" in line
    assert shown["source"].endswith("(optax_loss)")
    assert shown["count"] == 1


def test_command_shows_opportunities_below_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "head.py").write_text("import optax\n\n\n" + inspect.getsource(optax_loss))
    monkeypatch.chdir(tmp_path)
    arguments = ("--arg", "f32[512,32000]", "--arg", "f32[2048,512]", "--arg", "i32[2048]")
    (rule,) = (rule for rule in rules() if rule.name == "cross_entropy_sum")
    for target, where, on_tpu in (("cpu", "", ""), ("tpu-v5e", " on a CPU", f"{rule.on_tpu}; ")):
        result = CliRunner().invoke(app, ["explain", "head.py:optax_loss", *arguments, "--target", target])
        (advice,) = result.stdout.splitlines()[1:]
        assert advice.startswith("head.py:5 (optax_loss): `lowering.rewrite` would save about ")
        assert advice.endswith(
            f" MB{where} by cross_entropy_sum: logits float32[2048,32000], read by a sum of cross entropies; "
            f"{on_tpu}or call jaxops.linear_cross_entropy instead"
        )


def test_each_rewrite_on_a_line_names_its_own_operator() -> None:
    table, tokens = jax.ShapeDtypeStruct((32000, 64), jnp.bfloat16), jax.ShapeDtypeStruct((2048,), jnp.int32)

    def tied(table: Any, tokens: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(table[tokens] @ table.T, tokens).mean()

    found = {
        line.partition(" by ")[2].partition(":")[0]: line for line in lowering.explain(tied, table, tokens).remarks
    }
    assert {name: "call jaxops." in line for name, line in found.items()} == {
        "cross_entropy_sum": True,
        "embedding": False,
    }


def test_explanation_shows_nothing_where_there_is_none() -> None:
    fn, args = CLEAN["our_optimizer"]
    assert str(lowering.explain(fn, *args)).splitlines()[-1].startswith("└")


@pytest.mark.usefixtures("_few_logits_count")
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
    (found,) = opportunities(jax.make_jaxpr(PLANTED["take_along_axis"][0])(*args).jaxpr, rules(), "cpu")
    assert "float32[n,v] for" in found.detail


def test_explain_asks_the_rules_of_other_packages_where_they_may_have_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def suggest(level: Level) -> Iterator[Suggestion]:
        asked.append(level)
        return (Suggestion(node, "a sine", None, arguments="in_degrees=False") for node in level.named("sin"))

    rule = Rule("sine", frozenset({"sin"}), suggest=suggest, replacement="theirs.sine", platforms=frozenset({"cpu"}))
    monkeypatch.setattr(registered_rules, "_rules", {})
    add_rules((rule,))
    assert lowering.explain(lambda x: lax.fori_loop(0, 3, lambda _, x: jnp.cos(x), x), f32(4)).opportunities == ()
    assert lowering.explain(jnp.sin, f32(4), target="tpu-v5e").opportunities == ()
    assert asked == []
    (found,) = lowering.explain(lambda x: lax.fori_loop(0, 3, lambda _, x: jnp.sin(x), x), f32(4)).opportunities
    assert (found.pattern, found.count, found.call) == ("sine", 3, "theirs.sine(..., in_degrees=False)")
    with pytest.raises(ValueError, match="only must be the name of a pattern"):
        lowering.rewrite(jnp.sin, only="sine")


def test_levels_take_any_jaxpr() -> None:
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
    assert [level.count for level in levels(jaxpr)] == [1, 1, 1]
