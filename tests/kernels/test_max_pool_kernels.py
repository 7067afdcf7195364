"""The kernels of max pooling's gradient under the interpreters of their dialects, against loops in NumPy float64."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from pooling_oracle import expected, make_case, sides

import lowering
from jaxops import max_pool
from jaxops._checks.arguments import NotSupportedError
from pallas_kernels._jax_private import interpret_gpu_params
from pallas_kernels.gpu import max_pool_backward as gpu
from pallas_kernels.hardware import Hardware
from pallas_kernels.tpu import max_pool_backward as tpu
from pallas_kernels.tpu import max_pool_pixels

pytestmark = pytest.mark.emulated

KERNELS = {
    "tpu": (tpu, {"vmem_bytes": 12 * 2**20}, pltpu.InterpretParams(detect_races=True), "tpu_custom_call"),
    "gpu": (gpu, {"width": 128}, interpret_gpu_params(detect_races=True), "mosaic_gpu"),
}
BAND_BYTES = 6 * 4 * 128 * 8 * 8  # of eight rows of eight columns
# Extents, window, stride, padding; how many channels; and what VMEM may be used, where it is to be little.
CASES = [
    pytest.param(name, geometry, channels, vmem_bytes, id=f"{name}-{case}")
    for name, case, geometry, channels, vmem_bytes in (
        ("tpu", "overlapping-and-padded", ((7, 9), (3, 3), (2, 2), (1, 1)), 5, None),
        ("tpu", "every-pixel", ((5, 6), (3, 2), (1, 1), (2, 1)), 3, None),
        ("tpu", "before-only", ((7, 6), (3, 2), (2, 2), ((2, 0), (1, 0))), 4, None),
        ("tpu", "behind-only", ((21, 8), (2, 2), (4, 2), ((0, 1), (0, 1))), 4, None),
        ("tpu", "blocks-of-channels", ((4, 6), (2, 2), (2, 2), (0, 0)), 200, None),
        ("tpu", "bands-with-gaps-and-rest", ((21, 8), (2, 1), (4, 3), (0, 0)), 4, BAND_BYTES),
        ("tpu", "rows-without-windows", ((9, 8), (2, 2), (4, 2), (0, 0)), 4, BAND_BYTES // 2),
        ("tpu", "whole", ((5, 3), (5, 3), (1, 1), (0, 0)), 4, None),
        ("gpu", "2-by-2", ((4, 6), (2, 2), (2, 2), (0, 0)), 128, None),
        ("gpu", "gaps-and-rest", ((9, 8), (2, 1), (4, 3), (0, 0)), 160, None),
        ("gpu", "whole", ((5, 3), (5, 3), (5, 3), (0, 0)), 256, None),
        ("gpu", "parts", ((2, 53), (2, 2), (2, 2), (0, 0)), 129, None),
    )
]


def launched(name, x, grad, geometry, vmem_bytes=None, propagate_nan=True):
    """The gradient of images with their channels first."""
    kernel, config, interpret, _ = KERNELS[name]
    window, stride, padding = geometry[1:]
    run = functools.partial(
        kernel.run,
        window=(1, *window),
        stride=(1, *stride),
        padding=((0, 0), *sides(padding)),
        propagate_nan=propagate_nan,
        config=config if vmem_bytes is None else {"vmem_bytes": vmem_bytes},
        interpret=interpret,
    )
    (dx,) = jax.jit(run)(*(jnp.moveaxis(jnp.asarray(array), 1, -1)[:, None] for array in (x, grad)))
    return np.moveaxis(np.asarray(dx)[:, 0], -1, 1)


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "geometry", "channels", "vmem_bytes"), CASES)
def test_max_pool_kernels_agree_with_float64(name, geometry, channels, vmem_bytes, rng, capfd):
    x, grad = make_case(rng, geometry, images=(2, channels))
    truth = expected("max", x, grad, geometry)[1]
    np.testing.assert_allclose(launched(name, x, grad, geometry, vmem_bytes), truth, rtol=1e-6, atol=1e-6)
    assert "RACE DETECTED" not in capfd.readouterr().out


# Images as XLA stores them when a batch of 128 fills the lanes: eight rows or columns, or channels, fill the sublanes.
STORED = [
    pytest.param(channels_last, geometry, id=f"{kind}-{case}")
    for kind, channels_last, case, geometry in (
        ("columns", False, "overlapping-and-padded", ((7, 8), (3, 3), (2, 2), (1, 1))),
        ("pixels", True, "overlapping-and-padded", ((7, 9), (3, 3), (2, 2), (1, 1))),
        ("pixels", True, "last-row-alone", ((6, 6), (3, 3), (2, 2), (1, 1))),
        ("pixels", True, "begun-late", ((9, 7), (3, 3), (2, 2), (0, 0))),
        ("pixels", True, "behind-only", ((6, 6), (3, 3), (2, 2), ((0, 1), (0, 1)))),
        ("pixels", True, "apart", ((5, 6), (2, 2), (2, 2), (0, 0))),
        ("pixels", True, "with-gaps", ((7, 8), (2, 1), (3, 3), (0, 0))),
        ("pixels", True, "before-only", ((7, 6), (3, 2), (2, 2), ((2, 0), (1, 0)))),
        ("transposed", True, "three-blocks-of-rows", ((5, 6), (3, 3), (1, 1), (1, 1))),
    )
]


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize(("channels_last", "geometry"), STORED)
def test_max_pool_kernel_takes_images_as_stored(channels_last, geometry, rng, capfd, request):
    x, grad = make_case(rng, geometry, images=(128, 8))
    truth = expected("max", x, grad, geometry)[1]
    window, stride, padding = geometry[1:]
    # (n, d, h, w, c), or (n, c, d, h, w, 1).
    views = [np.moveaxis(a, 1, -1)[:, None] if channels_last else a[:, :, None, ..., None] for a in (x, grad)]
    geometry = {"window": (1, *window), "stride": (1, *stride), "padding": ((0, 0), *sides(padding))}
    view = tpu.view_for(views[0].shape, **geometry)
    kind = "pixels" if view.has_pixels_outside else "columns" if view.is_stored_so else "transposed"
    assert kind in request.node.callspec.id
    _, config, interpret, _ = KERNELS["tpu"]
    (dx,) = jax.jit(functools.partial(tpu.run, **geometry, propagate_nan=True, config=config, interpret=interpret))(
        *map(jnp.asarray, views)
    )
    dx = np.asarray(dx)
    dx = np.moveaxis(dx[:, 0], -1, 1) if channels_last else dx[:, :, 0, ..., 0]
    np.testing.assert_allclose(dx, truth, rtol=1e-6, atol=1e-6)
    assert "RACE DETECTED" not in capfd.readouterr().out


def test_max_pool_kernel_masks_rows_behind_the_image_and_none_where_blocks_divide_it():
    draw, seen = np.random.default_rng(0), set()
    for _ in range(300):
        height, window, stride = (int(draw.integers(1, most)) for most in (14, 6, 5))
        geometry = {"window": (1, window, 1), "stride": (1, stride, 1)}
        geometry["padding"] = (0, 0), tuple(map(int, draw.integers(0, window, 2))), (0, 0)
        if max_pool_pixels.refusal(**geometry) or height + sum(geometry["padding"][1]) < window:
            continue
        blocks = max_pool_pixels.blocks_of((1, height, 4, 1, 8, 128), 2**24, **geometry)
        steps = range(blocks.delay, blocks.delay + blocks.outputs[0])
        behind = {row for step in steps for row in blocks.searched_rows if step * stride + row >= height}
        assert behind <= {*blocks.rows_behind}
        assert height % stride or behind or not blocks.rows_behind
        seen.add((blocks.is_late, len(behind)))
    assert seen >= {(is_late, count) for is_late in (False, True) for count in (0, 1, 2)}


@pytest.mark.long
def test_max_pool_kernel_takes_gradients_as_stored(rng, capfd):
    """24 columns fill their tiles, 12 do not: XLA puts the images of the gradients into sublanes."""
    geometry = ((6, 24), (2, 2), (2, 2), (0, 0))
    x, grad = map(jnp.asarray, make_case(rng, geometry, images=(16, 128)))
    truth = expected("max", x, np.asarray(grad), geometry)[1]
    params = {"window": (1, 2, 2), "stride": (1, 2, 2), "padding": ((0, 0),) * 3, "propagate_nan": True}
    views = [jnp.moveaxis(a, 1, -1)[:, None] for a in (x, grad)]
    _, config, interpret, _ = KERNELS["tpu"]
    run = jax.jit(functools.partial(tpu.run, **params, config=config, interpret=interpret))
    assert "f32[3,12,16,128]" in str(jax.make_jaxpr(run)(*views))
    (dx,) = run(*views)
    np.testing.assert_array_equal(np.moveaxis(np.asarray(dx, np.float64)[:, 0], -1, 1), truth)
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.parametrize("name", KERNELS)
def test_max_pool_kernels_round_once(name, rng):
    geometry = ((4, 4), (2, 2), (2, 2), (0, 0))
    x, grad = make_case(rng, geometry, images=(1, 128))
    x, grad = jnp.asarray(x, jnp.bfloat16), jnp.asarray(grad, jnp.bfloat16)
    dx = launched(name, x, grad, geometry)
    assert dx.dtype == jnp.bfloat16
    np.testing.assert_array_equal(dx.astype(np.float64), expected("max", x, np.asarray(grad), geometry)[1])


@pytest.mark.sampled
@pytest.mark.parametrize("name", KERNELS)
def test_max_pool_kernels_treat_nan_infinity_and_zeros_as_the_operator_does(name):
    nan, inf = np.nan, np.inf
    windows = [
        [3, nan, nan, 4],
        [-inf, nan, -inf, nan],
        [nan, -inf, -1, inf],
        [-0.0, 0.0, -0.0, 0.0],
        [-inf] * 4,
        [nan, -inf, -inf, nan],
        [nan] * 4,
    ]
    x = np.array(windows, np.float32).reshape(1, 7, 1, 2, 2).repeat(128, 1).reshape(1, 7 * 128, 2, 2)
    grad = np.ones((1, 7 * 128, 1, 1), np.float32)
    geometry = ((2, 2), (2, 2), (2, 2), (0, 0))
    for propagate_nan, firsts in ((True, [1, 1, 0, 0, 0, 0, 0]), (False, [3, 0, 3, 0, 0, 1, 0])):
        dx = launched(name, x, grad, geometry, propagate_nan=propagate_nan).reshape(7, 128, 4)
        np.testing.assert_array_equal(dx, np.eye(4)[firsts][:, None].repeat(128, 1))


@pytest.mark.parametrize("name", KERNELS)
def test_max_pool_gradient_launches_its_kernel(name):
    platform, custom_call = KERNELS[name][0].KERNEL.platform, KERNELS[name][3]
    gradient = jax.grad(lambda x: jnp.sum(max_pool(x, 2, layout="NHWC")))
    with lowering.use("pallas"):
        text = jax.jit(gradient).trace(jnp.ones((2, 8, 8, 128))).lower(lowering_platforms=(platform,)).as_text()
    assert text.count(f"stablehlo.custom_call @{custom_call}") == 1


@pytest.mark.sampled
@pytest.mark.parametrize("shape", [(2, 12, 12, 128), (8, 12, 12, 64), (2, 8, 8, 256)], ids=str)
def test_max_pool_runs_the_interpreted_kernel(shape, rng):
    x = jnp.asarray(rng.normal(size=shape), jnp.float32)

    def loss(x):
        return jnp.sum(jnp.sin(max_pool(x, 3, stride=2, padding=1, layout="NHWC")))

    with lowering.use("interpret:mosaic_tpu"):
        assert "mosaic_tpu" in str(lowering.explain(jax.grad(loss), x))
        interpreted = jax.jit(jax.grad(loss))(x)
    np.testing.assert_allclose(interpreted, jax.grad(loss)(x), atol=1e-6)


def test_max_pool_kernels_refuse_what_they_cannot_run():
    def reason(kernel, hardware, shape=(8, 1, 8, 8, 128), dtype="float32", **geometry):
        x = types.SimpleNamespace(shape=shape, dtype=jnp.dtype(dtype))
        grad = types.SimpleNamespace(shape=shape, dtype=jnp.dtype(dtype))
        return kernel.KERNEL.refuses(
            hardware, x, grad, **{"window": (1, 2, 2), "stride": (1, 2, 2), "padding": ((0, 0),) * 3, **geometry}
        )

    v5e = Hardware(name="tpu-v5e", platform="tpu")
    h100 = Hardware(name="cuda-h100", platform="cuda", compute_capability=(9, 0))
    a100 = Hardware(name="cuda-a100", platform="cuda", compute_capability=(8, 0))
    for kernel, hardware in ((tpu, v5e), (gpu, h100)):
        assert reason(kernel, hardware) is None
        assert "x is float64" in reason(kernel, hardware, dtype="float64")
        assert "nothing" in reason(kernel, hardware, shape=(0, 1, 8, 8, 128))
        assert "depth" in reason(kernel, hardware, window=(2, 2, 2))
    assert "x is float16" in reason(tpu, v5e, dtype="float16")
    assert reason(tpu, v5e, shape=(8, 64, 1, 64, 128, 1)) is None
    assert "transpose" in reason(tpu, v5e, shape=(8, 64, 1, 64, 112, 1))
    assert "128 lanes; these are 96" in reason(tpu, v5e, shape=(4, 24, 1, 64, 128, 1))
    assert "[512, 512] pixels" in reason(tpu, v5e, shape=(8, 1, 512, 512, 128), window=(1, 3, 3))
    assert reason(tpu, v5e, shape=(8, 1, 512, 512, 128)) is None
    assert "cuda-a100 has 8.0" in reason(gpu, a100)
    assert "share no element" in reason(gpu, h100, window=(1, 3, 3))
    assert "no padding" in reason(gpu, h100, padding=((0, 0), (0, 1), (0, 0)))
    behind = ((0, 0), (0, 1), (0, 0))
    assert "[512, 512] pixels" in reason(tpu, v5e, shape=(8, 1, 512, 512, 128), padding=behind)
    assert "(5, 5)" in reason(gpu, h100, stride=(1, 5, 5))
    assert "the last axis of x has 64" in reason(gpu, h100, shape=(8, 1, 8, 8, 64))
    assert "2147483648" in reason(gpu, h100, shape=(2**14, 1, 32, 32, 128))


@pytest.mark.interpreted
def test_max_pool_kernel_runs_where_images_are_and_refuses_to_gather_their_parts(rng):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    x = jnp.asarray(rng.normal(size=(8, 8, 8, 128)), jnp.float32)
    gradient = jax.grad(lambda x: jnp.sum(jnp.sin(max_pool(x, 2, layout="NHWC"))))
    images, rows = (jax.device_put(x, NamedSharding(mesh, spec)) for spec in (P("data"), P(None, "data")))
    plain = jax.jit(gradient)(x)
    np.testing.assert_allclose(jax.jit(gradient)(rows), plain, atol=1e-6)
    with lowering.use(max_pool_backward="interpret:mosaic_tpu"):
        np.testing.assert_allclose(jax.jit(gradient)(images), plain, atol=1e-6)
        with pytest.raises(NotSupportedError, match="would gather x"):
            jax.jit(gradient)(rows)


def test_max_pool_kernels_offer_configurations():
    x = jnp.zeros((2, 1, 56, 56, 256))
    geometry = {"window": (1, 2, 2), "stride": (1, 2, 2), "padding": ((0, 0),) * 3}
    for kernel in (tpu, gpu):
        configs = kernel.KERNEL.configs(None, x, None, **geometry)
        assert len(configs) == len({tuple(config.items()) for config in configs}) > 1
