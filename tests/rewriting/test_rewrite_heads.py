"""Heads in every dtype, form and size are rewritten where that saves memory, or the report says why not."""

import functools
import re
from collections.abc import Callable
from typing import Any

import heads
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rewrite_checks
from heads import FORMS

import lowering
from jaxops.linear_cross_entropy.rewriting import savings

users_promotion = pytest.fixture(autouse=True)(rewrite_checks.users_promotion)
few_logits_count = pytest.fixture(rewrite_checks.few_logits_count)

LARGE, ODD, NARROW, FEW_ROWS = (2048, 512, 32000), (1537, 96, 20011), (600, 8, 32512), (512, 1024, 50257)
SMALL, TINY = (512, 64, 32000), (260, 32, 2000)
BATCHES, ODD_BATCHES, AS_MANY_FEATURES = (8, 256, 512, 32000), (3, 400, 512, 32000), (2048, 2048, 50304)
KEPT = "up to 16,777,216 logits are left alone"
COSTS = "the operator could need more temporaries, for copies or sums of a weight that is so large"
RULES = dict.fromkeys(FORMS, "cross_entropy_sum") | {
    "of_rows": "cross_entropy",
    "focal": "row_cone_sum",
    "own_derivative_of_maxtext": "row_cone_sum",
    "narrow_own_derivative_of_maxtext": "row_cone_sum",
}

# Form, dtype and size, and the rule that rewrites it, or why none does.
HEADS: dict[tuple[str, Any, tuple[int, ...]], str] = {
    **{(name, jnp.bfloat16, LARGE): rule for name, rule in RULES.items()},
    **{(name, jnp.float32, ODD): rule for name, rule in RULES.items() if "bias" not in name and "nnx" not in name},
    ("widened", jnp.float16, LARGE): "cross_entropy_sum",
    ("as_they_are", jnp.bfloat16, (1024, 512, 32000)): "cross_entropy_sum",
    ("widened", jnp.bfloat16, (1024, 512, 32000)): "cross_entropy_sum",
    ("widened", jnp.bfloat16, (8192, 4096, 128256)): "cross_entropy_sum",
    ("linear_of_nnx", jnp.bfloat16, (1024, 512, 32000)): "cross_entropy_sum",
    ("attend_of_nnx", jnp.bfloat16, (1024, 512, 32000)): "cross_entropy_sum",
    ("attend_of_nnx", jnp.bfloat16, (8192, 4096, 128256)): "cross_entropy_sum",
    ("attend_of_nnx", jnp.bfloat16, (2, 512, 2048, 50257)): "cross_entropy_sum"
    if savings.KEEPS_ROUNDED
    else "cross_entropy",
    ("attend_of_nnx", jnp.bfloat16, (3, 100, 2304, 128256)): COSTS if savings.KEEPS_ROUNDED else "cross_entropy",
    ("own_derivative_of_maxtext", jnp.float32, (2048, 2048, 50304)): COSTS,
    ("masked", jnp.bfloat16, (1024, 640, 32000)): "cross_entropy_sum",
    ("accumulated", jnp.bfloat16, (1024, 640, 32000)): "cross_entropy_sum",
    ("own_derivative_of_maxtext", jnp.bfloat16, (1024, 512, 32000)): "row_cone_sum",
    ("own_derivative_of_maxtext", jnp.bfloat16, (2048, 512, 50257)): "row_cone_sum",
    ("narrow_own_derivative_of_maxtext", jnp.bfloat16, (4096, 2048, 32000)): "row_cone_sum",
    ("narrow_own_derivative_of_maxtext", jnp.bfloat16, BATCHES): "row_cone_sum",
    ("one_hot", jnp.bfloat16, (1024, 256, 50257)): "cross_entropy_sum",
    ("one_hot", jnp.bfloat16, (4096, 512, 32000)): "cross_entropy_sum",
    ("widened", jnp.bfloat16, ODD): "cross_entropy_sum",
    ("widened", jnp.bfloat16, NARROW): "cross_entropy_sum",
    ("widened", jnp.float32, NARROW): "cross_entropy_sum",
    ("widened", jnp.bfloat16, BATCHES): "cross_entropy_sum",
    ("widened", jnp.float32, BATCHES): "cross_entropy_sum",
    ("widened", jnp.bfloat16, ODD_BATCHES): "cross_entropy_sum",
    ("as_they_are", jnp.bfloat16, BATCHES): "cross_entropy_sum",
    ("widened_behind_the_bias", jnp.bfloat16, BATCHES): "cross_entropy_sum",
    ("dense_of_linen", jnp.bfloat16, BATCHES): "cross_entropy_sum",
    ("narrow_dense_of_linen", jnp.bfloat16, BATCHES): "cross_entropy_sum",
    ("attend_of_linen", jnp.bfloat16, BATCHES): "cross_entropy_sum",
    ("linear_of_nnx", jnp.bfloat16, BATCHES): "cross_entropy_sum",
    ("own_derivative_of_maxtext", jnp.bfloat16, BATCHES): "row_cone_sum",
    ("own_derivative_of_maxtext", jnp.float32, BATCHES): "row_cone_sum",
    ("widened", jnp.float32, (4096, 2048, 50304)): "cross_entropy_sum",
    ("widened", jnp.float32, (4200, 4096, 4096)): COSTS,
    ("widened", jnp.float32, (4096, 4096, 50304)): COSTS,
    ("tied", jnp.float32, (4096, 4096, 50304)): "cross_entropy_sum",
    ("tied", jnp.float32, (2048, 2048, 128256)): "cross_entropy_sum",
    ("tied", jnp.float32, (1024, 4096, 50304)): "cross_entropy_sum",
    ("tied", jnp.float32, (1024, 4096, 32000)): "cross_entropy_sum",
    ("widened", jnp.bfloat16, (2048, 4096, 128256)): COSTS,
    ("widened", jnp.bfloat16, FEW_ROWS): COSTS,
    ("widened", jnp.float32, FEW_ROWS): COSTS,
    ("tied", jnp.float32, FEW_ROWS): "cross_entropy_sum",
    ("widened", jnp.float32, AS_MANY_FEATURES): "cross_entropy_sum" if savings.KEEPS_ROUNDED else COSTS,
    ("own_derivative_of_maxtext", jnp.bfloat16, FEW_ROWS): COSTS,
    ("as_they_are", jnp.bfloat16, SMALL): KEPT,
    ("dense_of_linen", jnp.float32, SMALL): KEPT,
    ("own_derivative_of_maxtext", jnp.bfloat16, TINY): KEPT,
}


def named(case: Any) -> str:
    if isinstance(case, tuple):
        return "x".join(map(str, case))
    return case if isinstance(case, str) else jnp.dtype(case).name


def temporaries(fn: Callable[..., Any], args: Any) -> int:
    return jax.jit(heads.with_gradients(fn)).lower(*args).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "dtype", "size"), HEADS, ids=named)
def test_a_head_is_rewritten_or_the_reason_is_said(name: str, dtype: Any, size: tuple[int, ...]) -> None:
    report = lowering.rewrite(FORMS[name][0]).report(*heads.arguments(name, dtype, *size))
    expected = HEADS[name, dtype, size]
    if expected in RULES.values():
        assert [one.pattern for one in report.applied] == [expected]
    else:
        (one,) = report.refused
        assert report.applied == ()
        assert re.match(rf"[0-9,]+ logits {jnp.dtype(dtype).name}|[0-9,]+ logits float32", one.detail)
        assert one.reason.startswith(expected)
        assert one.source.startswith("heads.py:")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "size"), HEADS, ids=named)
def test_what_is_said_of_memory_is_what_xla_reports(
    name: str, dtype: Any, size: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    fn, args = FORMS[name][0], heads.arguments(name, dtype, *size)
    fast = lowering.rewrite(fn)
    plain, applied = temporaries(fn, args), fast.report(*args).applied
    if applied:
        saved = plain - temporaries(fast, args)
        assert saved >= 0.2 * plain
        assert saved >= 0.75 * applied[0].saved_bytes
    else:
        # Nor would a rewrite have saved anything in any order of gradients, if estimates were not asked.
        monkeypatch.setattr(savings, "saving", lambda logits, *_, **__: savings.Saving(logits.size, logits.size))
        params, x, labels = args
        turned = temporaries(lambda x, params, labels: fn(params, x, labels), (x, params, labels))
        assert min(plain, turned) - temporaries(lowering.rewrite(fn), args) < 0.2 * min(plain, turned)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=named)
@pytest.mark.parametrize("name", FORMS)
def test_16_bit_results_are_as_near_to_float64_as_the_forms_own(name: str, dtype: Any, few_logits_count) -> None:
    few_logits_count(64)
    fn, rows, features, classes = FORMS[name][0], 24, 16, 40
    rng = np.random.default_rng(0)
    params, x, _ = heads.arguments(name, dtype, rows, features, classes)
    params, x = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), (params, x))
    labels = jnp.asarray(rng.integers(0, classes, rows), jnp.int32)
    fast = lowering.rewrite(fn)
    assert fast.report(params, x, labels).applied
    with jax.enable_x64():
        # Parameters that a form rounds are what it rounds them to.
        wide = jax.tree.map(lambda leaf: jnp.asarray(leaf.astype(dtype), jnp.float64), (params, x))
        truth = jax.tree.leaves(heads.with_gradients(fn)(*wide, labels))
    own, found = (jax.tree.leaves(jax.jit(heads.with_gradients(f))(params, x, labels)) for f in (fn, fast))
    for mine, theirs, right in zip(found, own, truth, strict=True):
        distance = functools.partial(relative_distance, np.asarray(right, float))
        assert distance(mine) <= 1.5 * distance(theirs) + 2 * float(jnp.finfo(dtype).eps) / 16


def relative_distance(truth: np.ndarray, found: Any) -> float:
    difference = np.asarray(found, float) - truth
    return float(np.linalg.norm(difference) / np.linalg.norm(truth))
