"""`linear_cross_entropy` on CPU: tile by tile of columns, and several chunks at once in the gradient of the weight."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linear_cross_entropy_oracle import IGNORED, assert_equals_float64, expected, make_case, value_and_gradients

from jaxops.linear_cross_entropy import cpu_chunks, linear_cross_entropy
from lowering.placement import placed

# Chunks of 15 rows; with room for those of 32 in the gradient, three of them at once: 32 rows, and 13 beside it.
ROWS, HIDDEN, OPTIONS = 100, 32, {"strategy": "grad_in_forward", "chunk_rows": 16}


@pytest.fixture(autouse=True)
def runs(monkeypatch):
    """Small tiles of columns, and the rows of the parts that have been taken at once, as they are taken."""
    taken = []
    with_gradients = cpu_chunks.with_gradients

    def counted(parts, *args, are_first, **kwargs):
        if are_first:
            jax.debug.callback(lambda: taken.append([len(part.x) for part in parts]))
        return with_gradients(parts, *args, are_first=are_first, **kwargs)

    monkeypatch.setattr(cpu_chunks, "with_gradients", counted)
    monkeypatch.setattr(cpu_chunks, "_TILE_SIZE", 1)
    return taken


CASES = [
    ((), {}, "float32"),
    (("bias",), {"z_loss": 0.01}, "float32"),
    (("class_weight",), {"softcap": 3.0}, "float32"),
    (("bias", "class_weight"), {"label_smoothing": 0.2, "z_loss": 0.01, "softcap": 2.0}, "float32"),
    (("bias",), {"label_smoothing": 0.1}, "bfloat16"),
    (("bias",), {"z_loss": 0.01}, "float16"),
]


@pytest.mark.sampled
@pytest.mark.parametrize("classes", [601, 500], ids=["three tiles and a column", "two tiles"])
@pytest.mark.parametrize(("names", "attributes", "dtype"), CASES, ids=str)
def test_chunks_at_once_equal_float64(names, attributes, dtype, classes, runs, rng):
    x, weight, labels = make_case(rng, rows=(4, ROWS // 4), hidden=HIDDEN, classes=classes, dtype=dtype)
    # Labels in the first column and in the last, which is alone in its tile or ends a whole one.
    labels[0, :2], labels[1, :2] = 0, classes - 1
    poisoned = x.at[labels == IGNORED].set(jnp.nan)
    attributes = attributes | {name: rng.uniform(0.2, 2, size=classes).astype(np.float32) for name in names}
    actual = value_and_gradients(poisoned, weight, labels, **OPTIONS, **attributes)
    rtol = {"float32": 2e-5, "bfloat16": 8e-3, "float16": 1e-3}[dtype]
    assert_equals_float64(actual, (x, weight, labels), attributes, rtol=rtol)
    jax.effects_barrier()
    assert runs == [[32, 13]]


@pytest.mark.parametrize(("kept", "at_once"), [(0, 0), (30, 0), (31, 1), (45, 1), (46, 1), (ROWS, 1)])
def test_chunks_are_taken_at_once_where_each_has_a_live_row(kept, at_once, runs, rng):
    x, weight, labels = make_case(rng, rows=(ROWS,), hidden=HIDDEN, classes=600, ignored=0)
    labels[rng.permutation(ROWS)[kept:]] = IGNORED
    options = OPTIONS | {"reduction": "sum"}
    assert_equals_float64(value_and_gradients(x, weight, labels, **options), (x, weight, labels), options)
    jax.effects_barrier()
    assert len(runs) == at_once


def test_rows_that_fill_the_gradient_exactly_have_no_second_part(runs, rng):
    x, weight, labels = make_case(rng, rows=(45,), hidden=45, classes=300, ignored=0)
    assert_equals_float64(value_and_gradients(x, weight, labels, **OPTIONS), (x, weight, labels), OPTIONS)
    jax.effects_barrier()
    assert runs == [[45]]


@pytest.mark.parametrize("scale", [8.0, 640.0])
def test_chunks_at_once_take_large_logits(scale, runs, rng):
    x, weight, labels = make_case(rng, rows=(ROWS,), hidden=HIDDEN, classes=600, scale=scale)
    assert_equals_float64(value_and_gradients(x, weight, labels, **OPTIONS), (x, weight, labels), OPTIONS, rtol=1e-4)
    jax.effects_barrier()
    assert runs


def test_aux_of_chunks_at_once(runs, rng):
    x, weight, labels = make_case(rng, rows=(ROWS,), hidden=HIDDEN, classes=601)
    logits = np.asarray(x).astype(np.float64) @ np.asarray(weight).astype(np.float64).T
    lse = np.log(np.exp(logits).sum(-1))
    p = np.exp(logits - lse[:, None])
    loss = functools.partial(linear_cross_entropy, return_aux=True, **OPTIONS)
    (value, aux), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(x, weight, labels)
    assert_equals_float64((value, *grads), (x, weight, labels), {})
    np.testing.assert_allclose(aux.lse, lse, rtol=1e-5)
    np.testing.assert_allclose(aux.entropy, -(p * np.log(p)).sum(-1), rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(aux.prediction, logits.argmax(-1))
    jax.effects_barrier()
    assert runs == [[32, 13]]


def test_a_gradient_of_class_weights_from_chunks_at_once(runs, rng):
    x, weight, labels = make_case(rng, rows=(ROWS,), hidden=HIDDEN, classes=601, ignored=0)
    class_weight = rng.uniform(0.2, 2, size=601).astype(np.float32)
    fixed = {**OPTIONS, "reduction": "sum", "label_smoothing": 0.3}
    actual = jax.jit(
        jax.grad(
            lambda weight, by_class: linear_cross_entropy(x, weight, labels, class_weight=by_class, **fixed), (0, 1)
        )
    )(weight, class_weight)[1]
    # The loss is linear in the weights: its slope along each is the loss with that weight alone.
    for column in (0, 7, 600):
        alone = np.eye(601)[column]
        slope = expected(x, weight, labels, class_weight=alone, reduction="sum", label_smoothing=0.3)[0]
        np.testing.assert_allclose(actual[column], slope, rtol=2e-5)
    jax.effects_barrier()
    assert runs


def test_chunks_are_taken_one_by_one_elsewhere():
    gradient = jax.ShapeDtypeStruct((600, HIDDEN), jnp.float32)
    parts = {}
    for platform, devices in (("cpu", 1), ("cuda", 1), ("tpu", 1)):
        with placed(platform, devices):
            parts[platform] = cpu_chunks.parts_at_once(gradient, gradient.dtype, 15, 7)
    assert parts == {"cpu": [32, 13], "cuda": [], "tpu": []}
    with placed("cpu"):
        assert cpu_chunks.parts_at_once(gradient, jnp.dtype("float64"), 15, 7) == []
        assert cpu_chunks.parts_at_once(gradient, gradient.dtype, 17, 7) == []


def test_chunks_at_once_take_the_memory_of_one():
    shapes = ((1024, 768), jnp.float32), ((50257, 768), jnp.float32), ((1024,), jnp.int32)
    compiled = jax.jit(jax.value_and_grad(linear_cross_entropy, (0, 1))).lower(
        *(jax.ShapeDtypeStruct(*of) for of in shapes)
    )
    # Four chunks of 256 rows: the logits of one are 51 MB, and the gradient itself is no temporary.
    assert compiled.compile().memory_analysis().temp_size_in_bytes < 65e6
