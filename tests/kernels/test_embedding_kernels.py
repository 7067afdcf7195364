"""The kernels of the embedding gradient under the interpreters of their Pallas dialects, against NumPy float64."""

import functools
import types

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from embedding_oracle import expected_gradient
from jax.experimental.pallas import tpu as pltpu

import lowering
from jaxops import embedding
from lowering.targets import named
from pallas_kernels._jax_private import interpret_gpu_params
from pallas_kernels.gpu import embedding as gpu
from pallas_kernels.hardware import Hardware
from pallas_kernels.tpu import embedding as tpu

pytestmark = pytest.mark.emulated

# Blocks far smaller than the default let small tables and batches span several of them.
KERNELS = {
    "tpu": (tpu, {"block_elements": 2048}, pltpu.InterpretParams(detect_races=True), "tpu_custom_call"),
    "tpu-resident": (
        tpu,
        {"block_elements": 2048, "resident": 1},
        pltpu.InterpretParams(detect_races=True),
        "tpu_custom_call",
    ),
    "gpu": (gpu, {"chunk_rows": 8}, interpret_gpu_params(detect_races=True), "mosaic_gpu"),
}
# Rows and width of the table, and positions: several tiles of rows or of columns, ragged ones, few rows, one position.
CASES = [
    *(
        pytest.param("tpu", *sizes, id=f"tpu-{sizes}")
        for sizes in ((50, 128, 40), (48, 128, 40), (3, 131, 60), (20, 300, 20), (9, 1, 20))
    ),
    # Tiles of 16, 8 and 4 rows: many that are written in place, the last one cut or whole, and some that are not.
    *(
        pytest.param("tpu-resident", *sizes, id=f"tpu-resident-{sizes}")
        for sizes in ((200, 128, 100), (96, 256, 120), (50, 128, 40), (32, 128, 20), (3, 131, 60), (9, 1, 20))
    ),
    *(
        pytest.param("gpu", *sizes, id=f"gpu-{sizes}")
        for sizes in ((50, 128, 40), (3, 256, 70), (20, 300, 20), (20, 6, 20))
    ),
    *(pytest.param(name, 7, 128, 1, id=f"{name}-one") for name in KERNELS),
]


def launch(name, *, num_weights, padding_idx=None, scale_grad_by_freq=False):
    kernel, config, interpret, _ = KERNELS[name]
    params = {"num_weights": num_weights, "padding_idx": padding_idx, "scale_grad_by_freq": scale_grad_by_freq}
    return jax.jit(functools.partial(kernel.run, config=config, interpret=interpret, **params))


def run(name, grad, indices, **params):
    return launch(name, **params)(grad, indices)[0]


def two_ids(indices, rows):
    """Returns as many ids: one in eight is 0, and all others are the id in the middle."""
    return np.where(np.arange(indices.size) % 8, rows // 2, 0).astype(indices.dtype).reshape(indices.shape)


def check(name, grad, indices, capfd, *, emulated, **attributes):
    """Compares gradients with float64; of a compiled kernel, also with more ids."""
    gradient, rows = launch(name, **attributes), attributes.pop("num_weights")
    tolerance = 0.501 * float(jnp.finfo(grad.dtype).eps) + 1e-6
    for ids in (indices, two_ids(indices, rows))[: 1 + emulated]:
        out = gradient(grad, ids)[0]
        assert out.dtype == grad.dtype
        truth = expected_gradient(grad, ids, rows=rows, **attributes)
        np.testing.assert_allclose(np.asarray(out).astype(np.float64), truth, rtol=tolerance, atol=1e-5)
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", contract.first_in_every_run(["float32", "bfloat16"]))
@pytest.mark.parametrize(("name", "num_weights", "width", "positions"), CASES)
def test_embedding_kernel_agrees_with_float64(name, num_weights, width, positions, dtype, rng, capfd, emulated):
    """With ids out of range and padding; with and without frequencies."""
    if (name, dtype) == ("tpu-resident", "bfloat16"):
        pytest.skip("rows of 16-bit values are gathered")
    grad = jnp.asarray(rng.normal(size=(positions, width)), dtype)
    indices = np.minimum(rng.zipf(1.5, positions) - 2, num_weights + 1).astype(np.int32)
    scale = (dtype == "bfloat16") != (num_weights % 2 == 1)
    options = {"num_weights": num_weights, "padding_idx": 1, "scale_grad_by_freq": scale}
    check(name, grad, indices, capfd, emulated=emulated, **options)


@pytest.mark.sampled
@pytest.mark.parametrize("name", KERNELS)
def test_embedding_kernel_takes_batch_axes_and_other_ids(name, rng, capfd, emulated):
    grad, indices = jnp.asarray(rng.normal(size=(4, 5, 128)), jnp.float32), rng.integers(0, 4, (4, 5)).astype(np.uint8)
    check(name, grad, indices, capfd, emulated=emulated, num_weights=4)


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("name", KERNELS)
def test_embedding_kernel_sums_one_id_over_many_blocks(name, capfd):
    """A run that fills blocks from edge to edge, or ends within one, between two others; exact in bfloat16."""
    gradient = launch(name, num_weights=9)
    for counts in ([8, 64, 24, 0], [7, 66, 20, 3]):  # the last id is out of range
        out = gradient(jnp.ones((96, 128), jnp.bfloat16), np.repeat([2, 5, 6, 9], counts).astype(np.int32))[0]
        np.testing.assert_array_equal(out[:, 0], np.bincount([2, 5, 6, 9], counts)[:9])
        np.testing.assert_array_equal(out, jnp.broadcast_to(out[:, :1], out.shape))
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.sampled
@pytest.mark.parametrize("name", KERNELS)
def test_embedding_kernel_keeps_nan_to_its_row(name):
    grad = jnp.ones((20, 128)).at[jnp.array([1, 4])].set(jnp.nan).at[2].set(jnp.inf)
    indices = np.full(20, 4)
    indices[:5] = [5, 0, 1, 5, 3]
    out = run(name, grad, indices, num_weights=6, padding_idx=3)
    np.testing.assert_array_equal(out[:, 0], [np.nan, np.inf, 0, 0, 15, 2])


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_embedding_kernel_is_the_same_in_every_run_and_order(name, rng):
    indices, order = rng.integers(0, 4, 20).astype(np.int32), rng.permutation(20)
    whole = jnp.asarray(rng.integers(-8, 8, (20, 128)), jnp.float32)  # sums exactly, in any order
    of_id = jnp.asarray(rng.normal(size=(4, 128)), jnp.float32)[indices]
    gradient = launch(name, num_weights=4)
    for grad in (whole, of_id):
        first = np.asarray(gradient(grad, indices)[0])
        for again in (gradient(grad, indices), gradient(grad[order], indices[order])):
            assert np.asarray(again[0]).tobytes() == first.tobytes()


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("fullest", [0, 5, 11, 12])
def test_embedding_kernel_spreads_the_fullest_tile_over_the_steps_of_others(fullest, rng, capfd, emulated):
    """Wherever it is, in bits that do not depend on the way."""
    indices = np.where(rng.random(150) < 0.7, 16 * fullest + 3, rng.integers(0, 200, 150)).astype(np.int32)
    grad = jnp.asarray(rng.normal(size=(150, 128)), jnp.float32)
    check("tpu-resident", grad, indices, capfd, emulated=emulated, num_weights=200, padding_idx=7)
    spread, alone = (launch(name, num_weights=200) for name in ("tpu-resident", "tpu"))
    for ids in (indices, two_ids(indices, 200))[: 1 + emulated]:
        assert np.asarray(spread(grad, ids)[0]).tobytes() == np.asarray(alone(grad, ids)[0]).tobytes()


@pytest.mark.parametrize("name", KERNELS)
def test_embedding_gradient_launches_its_kernel(name):
    kernel, *_, custom_call = KERNELS[name]
    table, indices = jnp.ones((16, 128)), jnp.zeros((4, 4), jnp.int32)
    with lowering.use("pallas"):
        traced = jax.jit(jax.grad(lambda table: jnp.sum(jnp.sin(embedding(table, indices))))).trace(table)
        text = traced.lower(lowering_platforms=(kernel.KERNEL.platform,)).as_text()
    assert text.count(f"stablehlo.custom_call @{custom_call}") == 1


@pytest.mark.long
def test_embedding_gradient_runs_the_interpreted_kernel(rng):
    table, indices = jnp.asarray(rng.normal(size=(16, 4)), jnp.float32), rng.integers(0, 16, (3, 6)).astype(np.int32)
    gradient = jax.grad(lambda table: jnp.sum(jnp.sin(embedding(table, indices, scale_grad_by_freq=True))))
    expected = gradient(table)
    with lowering.use("interpret:mosaic_tpu"):
        assert "mosaic_tpu" in str(lowering.explain(gradient, table))
        np.testing.assert_allclose(jax.jit(gradient)(table), expected, atol=1e-6)


def test_embedding_kernels_refuse_what_they_cannot_run():
    def reason(kernel, hardware, shape=(64, 256), dtype="float32", num_weights=100):
        grad = types.SimpleNamespace(shape=shape, dtype=jnp.dtype(dtype))
        indices = types.SimpleNamespace(shape=shape[:-1], dtype=jnp.dtype("int32"))
        params = {"num_weights": num_weights, "padding_idx": None, "scale_grad_by_freq": False}
        return kernel.KERNEL.refuses(hardware, grad, indices, **params)

    v5e = Hardware(name="tpu-v5e", platform="tpu")
    h100 = Hardware(name="cuda-h100", platform="cuda", compute_capability=(9, 0))
    a100 = Hardware(name="cuda-a100", platform="cuda", compute_capability=(8, 0))
    assert reason(gpu, h100, dtype="float16") is None
    assert "cuda-a100 has 8.0" in reason(gpu, a100)
    assert "grad is float64" in reason(gpu, h100, dtype="float64")
    assert "3200000000" in reason(gpu, h100, shape=(8, 128), num_weights=25_000_000)
    assert "grad is [0, 128]" in reason(gpu, h100, shape=(0, 128))
    assert reason(tpu, v5e, shape=(2, 3, 160), dtype="bfloat16") is None
    assert "grad is float16" in reason(tpu, v5e, dtype="float16")
    assert "grad is [4, 0]" in reason(tpu, v5e, shape=(4, 0))
    assert "rows of 20000000 ids" in reason(tpu, v5e, shape=(8, 16384), num_weights=20_000_000)
    v5e, columns = named("tpu-v5e"), "XLA stores tables of width 2123 by columns"
    assert columns in reason(tpu, v5e, shape=(26510, 2123), num_weights=39605)
    for shape, dtype in (((26510, 2123), "bfloat16"), ((26510, 2176), "float32"), ((2000, 2123), "float32")):
        assert reason(tpu, v5e, shape=shape, dtype=dtype, num_weights=39605) is None


@pytest.mark.parametrize("name", KERNELS)
def test_embedding_kernel_configs_differ(name):
    grad, indices = jnp.zeros((64, 256)), jnp.zeros(64, jnp.int32)
    configs = KERNELS[name][0].KERNEL.configs(Hardware(name=name, platform=name), grad, indices, num_weights=1000)
    assert len(configs) == len({tuple(config.items()) for config in configs}) > 1
