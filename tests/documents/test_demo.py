"""The demo: its parts on sizes that take seconds, and its saving on its own."""

import io
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from rich.progress import Progress

import lowering
from jaxops._demo import corpus, model, report, train
from lowering.compiling.progress import said_if_long

SHAPE = model.Shape(vocabulary=61, width=16, heads=2, depth=2, context=8)
SETTINGS = train.Settings(steps=20, batch=4)


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """What users have; optax's schedules divide an integer count by floats."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def tokens(rng: np.random.Generator) -> jax.Array:
    return jnp.asarray(rng.integers(0, SHAPE.vocabulary, (SETTINGS.batch, SHAPE.context + 1)), jnp.int32)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_train_step_is_that_of_the_plain_formulation(tokens: jax.Array) -> None:
    results = []
    for formulation in (train.operators(SETTINGS), train.plain(SETTINGS)):
        params = model.init(jax.random.key(0), SHAPE)
        state = (params, formulation.init(params))
        step = train.train_step(formulation, SHAPE)
        losses = []
        for _ in range(3):
            *state, loss = step(*state, tokens)
            losses.append(loss)
        results.append((state[0], losses))
    for ours, plain in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_train_step_is_explained_and_compiled_and_needs_less_memory_than_the_plain_one() -> None:
    settings, shape = train.Settings(), model.Shape(corpus.VOCABULARY_SIZE)
    ours = train.operators(settings)
    step, args = train.train_step(ours, shape), train.step_arguments(ours, settings, shape)
    explanation = lowering.explain(step, *args, target="cpu")
    assert {row.implementation for row in explanation.rows} == {"reference", "xla_by_rows", "xla_flat_scatter"}
    compiled = lowering.compile(step, *args, target="cpu")
    leaf_bytes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(args)]
    assert compiled.memory.arguments == sum(leaf_bytes)
    assert compiled.memory.aliased == sum(leaf_bytes[:-1])
    assert compiled.hlo.count("may-alias") == len(leaf_bytes) - 1
    plain = train.compiled_step(train.plain(settings), settings, shape)
    assert compiled.memory.temporaries < 0.7 * train.temporary_bytes(plain)


@pytest.mark.parametrize(("steps", "words"), [(1, "in 1 step:"), (2, "in 2 steps:")])
def test_demo_counts_its_steps(steps: int, words: str) -> None:
    assert words in report._opening(train.Settings(steps=steps), Path("demo_output"))


def test_steps_are_said_now_and_then_where_there_is_no_terminal() -> None:
    log = io.StringIO()
    progress = Progress(console=Console(file=log))
    show_step = report._shows_steps(progress, progress.add_task("", total=60), 60)
    for step in range(1, 61):
        show_step(step, 100 / step)
    assert log.getvalue() == "step 25 of 60, loss 4.00\nstep 50 of 60, loss 2.00\n"


@pytest.mark.long
def test_model_does_not_look_ahead(tokens: jax.Array) -> None:
    params = jax.tree.map(lambda leaf: leaf + 0.1, model.init(jax.random.key(0), SHAPE))
    changed = tokens.at[:, 5:].set(0)
    before, after = (
        model.hidden_states(params, x[:, :-1], SHAPE, lambda table, indices: table[indices]) for x in (tokens, changed)
    )
    np.testing.assert_allclose(before[:, :5], after[:, :5], rtol=1e-5)
    assert not np.allclose(before[:, 5:], after[:, 5:])


def test_corpus_holds_out_a_tenth_in_whole_files() -> None:
    texts = ["x" * length for length in (50, 1000, 30, 200, 90, 700, 10, 400)]
    train_texts, validation_texts = corpus._hold_out(texts)
    assert sorted(train_texts + validation_texts) == sorted(texts)
    assert 0.05 < sum(map(len, validation_texts)) / sum(map(len, texts)) <= 0.1


def test_corpus_windows() -> None:
    np.testing.assert_array_equal(corpus.windows(np.arange(9), np.array([0, 4]), 3), [[0, 1, 2], [4, 5, 6]])


def test_long_work_is_said_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with said_if_long("compiling for tpu-v5e", seconds=0.01):
        time.sleep(0.2)
    with said_if_long("compiling for cpu", seconds=60):
        pass
    assert capsys.readouterr() == ("", "compiling for tpu-v5e\n")
