"""The kernel of max pooling's value under Mosaic TPU's interpreter, against loops in NumPy float64."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from pooling_oracle import expected, make_case, sides

import lowering
from jaxops import max_pool
from lowering.targets import named
from pallas_kernels.tpu import max_pool as kernel
from pallas_kernels.tpu.max_pool_views import view_of

pytestmark = pytest.mark.emulated


def attributes_of(geometry):
    window, stride, padding = geometry[1:]
    return {"window": (1, *window), "stride": (1, *stride), "padding": ((0, 0), *sides(padding))}


def launched(x, geometry, propagate_nan=True):
    """The value of images with their channels first, which the kernel takes with channels last."""
    interpret = pltpu.InterpretParams(detect_races=True)
    run = functools.partial(
        kernel.run, **attributes_of(geometry), propagate_nan=propagate_nan, config={}, interpret=interpret
    )
    (y,) = jax.jit(run)(jnp.moveaxis(jnp.asarray(x), 1, -1)[:, None])
    return np.moveaxis(np.asarray(y, np.float64)[:, 0], -1, 1)


# Images, channels and geometry. Of 16 bfloat16 or 8 float32 images, results are stored with images in sublanes where
# their columns fill no tiles.
CASES = {
    "bands-of-rows": (1, 128, ((12, 16), (2, 2), (2, 2), (0, 0))),
    "images-in-sublanes-in-bands-of-rows": (16, 128, ((13, 24), (2, 2), (2, 2), (0, 0))),
    "overlapping-and-padded": (2, 128, ((7, 24), (3, 3), (2, 2), (1, 1))),
    "images-in-sublanes": (32, 128, ((6, 24), (2, 2), (2, 2), (0, 0))),
    "images-in-sublanes-overlapping": (16, 128, ((6, 24), (3, 3), (2, 2), (1, 1))),
    "pixels-outside": (128, 16, ((7, 9), (3, 3), (2, 2), (1, 1))),
    "pixels-outside-behind-only": (128, 16, ((6, 6), (3, 3), (2, 2), ((0, 1), (0, 1)))),
    "pixels-outside-begun-late": (128, 16, ((9, 7), (3, 3), (2, 2), (0, 0))),
    "pixels-outside-with-gaps": (128, 16, ((7, 8), (2, 1), (3, 3), (0, 0))),
    "pixels-outside-before-only": (128, 16, ((7, 6), (3, 2), (2, 2), ((2, 0), (1, 0)))),
    "every-pixel": (3, 128, ((5, 16), (3, 2), (1, 1), (2, 1))),
    "rest-unread": (2, 200, ((11, 48), (3, 3), (3, 3), (0, 0))),
    "gaps-and-padding-behind": (3, 128, ((9, 32), (2, 1), (4, 2), ((0, 1), (0, 0)))),
    "before-only": (2, 128, ((7, 16), (3, 2), (2, 2), ((2, 0), (1, 0)))),
}


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_max_pool_value_kernel_agrees_with_float64(case, dtype, rng, capfd, monkeypatch):
    images, channels, geometry = CASES[case]
    if case.endswith("bands-of-rows"):
        monkeypatch.setattr(kernel, "_BLOCK_BYTES", 2**19 if images > 1 else 2**15)
    x, cotangent = make_case(rng, geometry, images=(images, channels))
    x = jnp.asarray(x, dtype)
    np.testing.assert_array_equal(launched(x, geometry), expected("max", x, cotangent, geometry)[0])
    assert "RACE DETECTED" not in capfd.readouterr().out
    assert view_of((images, *geometry[0], channels)).has_pixels_outside == case.startswith("pixels-outside")
    if case.startswith("pixels-outside"):
        return
    stored = kernel.blocks_of(jnp.moveaxis(x, 1, -1)[:, None], **attributes_of(geometry))
    assert (stored.rows < geometry[0][0] - 1) == case.endswith("bands-of-rows")
    assert stored.is_grouped == case.startswith("images-in-sublanes")


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("propagate_nan", [True, False])
def test_max_pool_value_kernel_treats_nan_and_infinity_as_the_operator_does(propagate_nan, dtype):
    nan, inf = np.nan, np.inf
    windows = [[3, nan, nan, 4], [-inf, nan, -inf, nan], [nan, -inf, -1, inf], [-inf] * 4, [nan] * 4, [1, 2, 3, nan]]
    row = np.array(windows, np.float32).reshape(-1, 2, 2).repeat(4, 0)
    x = np.concatenate(row, axis=1)  # 24 windows beside each other
    firsts = [nan, nan, nan, -inf, nan, nan] if propagate_nan else [4, -inf, inf, -inf, -inf, 3]
    for images, channels in ((32, 128), (128, 16)):  # columns in sublanes, and pixels outside of the tiles
        x = jnp.asarray(np.broadcast_to(x[..., -2:, -48:], (images, channels, 2, 48)), dtype)
        found = launched(x, ((2, 48), (2, 2), (2, 2), (0, 0)), propagate_nan=propagate_nan)
        np.testing.assert_array_equal(found, np.broadcast_to(np.repeat(firsts, 4), found.shape))
        x = np.asarray(x[0, 0], np.float32)


def test_max_pool_value_kernel_runs_where_it_pays_and_gives_way_elsewhere():
    def chosen(shape, dtype="float32", **options):
        x = jax.ShapeDtypeStruct(shape, dtype)
        report = lowering.explain(functools.partial(max_pool, **options), x, target="tpu-v7x")
        return report.rows[0].implementation, "".join(refusal.reason for refusal in report.rows[0].refusals)

    with lowering.use("pallas"):
        assert chosen((256, 64, 112, 112), window=3, stride=2, padding=1, layout="NCHW")[0].startswith("mosaic_tpu")
        assert chosen((256, 56, 56, 128), "bfloat16", window=2, layout="NHWC")[0].startswith("mosaic_tpu")
        assert chosen((256, 112, 112, 64), "bfloat16", window=3, stride=2, layout="NHWC")[0].startswith("mosaic_tpu")
        reasons = {
            "XLA keeps fewer": chosen((128, 28, 28, 64), "bfloat16", window=3, layout="NHWC"),
            "in lanes": chosen((8, 112, 112, 64), "bfloat16", window=3, layout="NHWC"),
            "these are 1": chosen((1, 56, 56, 128), window=2, layout="NHWC"),
            "x is float16": chosen((256, 56, 56, 128), "float16", window=2, layout="NHWC"),
            "depth": chosen((256, 2, 56, 56, 128), window=2, layout="NDHWC"),
            "VMEM": chosen((8, 512, 512, 128), window=3, layout="NHWC", stride=2),
            "at most 16": chosen((256, 56, 56, 128), window=28, layout="NHWC"),
        }
    for part, (implementation, reason) in reasons.items():
        assert implementation in ("reference", "xla_one_pass")
        assert part in reason


def test_max_pool_value_kernel_refuses_to_gather():
    spec = types.SimpleNamespace(spec=(None, None, "data"))
    x = types.SimpleNamespace(shape=(256, 1, 56, 56, 128), dtype=jnp.dtype("float32"), sharding=spec)
    geometry = attributes_of(((56, 56), (2, 2), (2, 2), (0, 0)))
    assert "would gather x" in kernel.refuses(named("tpu-v5e"), x, **geometry)
