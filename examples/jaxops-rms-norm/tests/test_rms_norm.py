"""The operator against NumPy in float64, its promises, its kernel, and what `lowering` does with it once installed."""

import inspect
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxops_rms_norm import rms_norm, tpu

import jaxops
import lowering
from jaxops.testing import check_operator

RNG = np.random.default_rng(7)
X = RNG.standard_normal((8, 24)).astype(np.float32)
WEIGHT = RNG.standard_normal(24).astype(np.float32)


def in_float64(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide / np.sqrt(np.mean(wide**2, -1, keepdims=True) + 1e-6) * weight


def in_jnp(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * weight


def test_values_are_those_of_numpy() -> None:
    np.testing.assert_allclose(rms_norm(X, WEIGHT), in_float64(X, WEIGHT), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(rms_norm(np.zeros((2, 24), np.float32), WEIGHT), np.zeros((2, 24)))


def test_every_promise_is_kept() -> None:
    report = check_operator(rms_norm, (X, WEIGHT), batched=(0, None), reference=in_jnp)
    report.raise_if_broken()
    assert report.skipped == ()


def test_kernel_keeps_them_too() -> None:
    with jaxops.use("interpret"):
        report = check_operator(rms_norm, (X, WEIGHT), batched=(0, None), reference=in_jnp)
    report.raise_if_broken()
    assert [name for name, _ in report.skipped] == ["float16_accuracy"]


@pytest.mark.parametrize("shape", [(8, 24), (3, 5, 128), (40, 256), (24,)], ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_kernel_computes_the_same(shape: tuple[int, ...], dtype: jnp.dtype) -> None:
    x, weight = jnp.asarray(RNG.standard_normal(shape), dtype), jnp.asarray(RNG.standard_normal(shape[-1]), dtype)
    with jaxops.use("interpret"):
        rows = lowering.explain(rms_norm, x, weight).rows
        y = rms_norm(x, weight)
    assert [row.implementation for row in rows] == ["mosaic_tpu (interpreted)"]
    tolerance = 1e-5 if dtype == jnp.float32 else 1e-2
    expected = in_float64(np.asarray(x), np.asarray(weight, np.float64))
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=tolerance, atol=tolerance)


def test_kernel_leaves_out_what_lies_beyond_the_last_row() -> None:
    x, weight = RNG.standard_normal((40, 256)).astype(np.float32), np.ones(256, np.float32)
    (y,) = tpu.run(jnp.asarray(x), jnp.asarray(weight), epsilon=1e-6, config={"block_rows": 16}, interpret=True)
    np.testing.assert_allclose(y, in_float64(x, weight), rtol=1e-5, atol=1e-5)


def test_explain_says_what_would_run() -> None:
    (row,) = lowering.explain(rms_norm, X, WEIGHT, target="tpu-v5e").rows
    assert (row.operator, row.implementation) == ("rms_norm", "reference")
    assert [refusal.reason for refusal in row.refusals] == ["opt-in: not measured on this target"]
    (row,) = lowering.explain(rms_norm, X.astype(np.float16), WEIGHT, target="tpu-v5e").rows
    assert row.refusals[0].reason == "Mosaic TPU computes on float32 and bfloat16; x is float16"


def test_export_holds_the_kernel_for_tpus_and_runs_here(tmp_path: Path) -> None:
    with jaxops.use("pallas"):
        artifact = lowering.export(rms_norm, X, WEIGHT)
    assert artifact.implementations["tpu"] == {"rms_norm": ["mosaic_tpu"]}
    assert "tpu_custom_call" in artifact.stablehlo
    artifact.save(tmp_path / "rms_norm")
    y = lowering.load(tmp_path / "rms_norm").call(X, WEIGHT)
    np.testing.assert_allclose(y, in_float64(X, WEIGHT), rtol=1e-5, atol=1e-6)


def test_explain_finds_the_same_in_plain_jax() -> None:
    (found,) = lowering.explain(in_jnp, X, WEIGHT).near_misses
    assert (found.replacement, found.detail) == ("jaxops_rms_norm.rms_norm", "RMS normalization of float32[8,24]")
    assert "test_rms_norm.py" in found.source


def test_command_finds_it_without_an_import(tmp_path: Path) -> None:
    """By the entry point of the installed package."""
    (tmp_path / "plain.py").write_text(f"import jax\nimport jax.numpy as jnp\n\n{inspect.getsource(in_jnp)}")
    command = ["explain", "plain.py:in_jnp", "--arg", "f32[8,24]", "--arg", "f32[24]"]
    done = subprocess.run([sys.executable, "-m", "jaxops", *command], cwd=tmp_path, capture_output=True, text=True)
    assert "plain.py:5 (in_jnp): RMS normalization of float32[8,24]: jaxops_rms_norm.rms_norm" in done.stdout, done


@pytest.mark.parametrize(
    ("x", "weight", "sentence"),
    [
        (X, WEIGHT[1:], "weight must have one element for each of the last axis of x; got [23] for [8, 24]"),
        (X.astype(np.int32), WEIGHT, "x must be floating point; got int32"),
    ],
    ids=["shape", "dtype"],
)
def test_bad_argument_gets_one_sentence(x: np.ndarray, weight: np.ndarray, sentence: str) -> None:
    for fn in (rms_norm, jax.jit(rms_norm)):
        with pytest.raises(jaxops.BadParamError) as refusal:
            fn(x, weight)
        assert str(refusal.value) == f"rms_norm: {sentence}"
