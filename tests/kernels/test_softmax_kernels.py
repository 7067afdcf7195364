"""The softmax kernels under the interpreters of their Pallas dialects, against NumPy float64."""

import functools
import types

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import softmax_oracle as oracle
from jax.experimental.pallas import tpu as pltpu

import lowering
from jaxops import softmax
from pallas_kernels._jax_private import interpret_gpu_params
from pallas_kernels.gpu import softmax as gpu
from pallas_kernels.gpu import softmax_backward as gpu_backward
from pallas_kernels.hardware import Hardware
from pallas_kernels.softmax_groups import Groups, View
from pallas_kernels.tpu import softmax as tpu
from pallas_kernels.tpu import softmax_backward as tpu_backward

pytestmark = pytest.mark.emulated

# Blocks far smaller than the default let small arrays span several of them.
KERNELS = {
    "tpu": (tpu, tpu_backward, {"block_elements": 2048}, pltpu.InterpretParams(detect_races=True)),
    "gpu": (gpu, gpu_backward, {"width": 128}, interpret_gpu_params(detect_races=True)),
}
# shape, axes, and whether all of a group is taken at once
ARRAYS = {
    "tpu": {
        "rows": ((20, 30), (1,), True),
        "rows-in-pieces": ((12, 512), (1,), False),
        "rows-in-ragged-pieces": ((3, 701), (1,), False),
        "channels": ((3, 2, 5, 40), (1,), True),
        "channels-in-pieces": ((2, 32, 200), (1,), False),
        "channels-in-one-ragged-piece": ((1, 5, 9, 100), (1,), False),
        "channels-in-sublanes": ((9, 16, 100), (1,), True),
        "channels-in-ragged-sublanes": ((2, 45, 200), (1,), False),
        "channels-in-lanes": ((2, 64, 3, 5), (1,), True),
        "volumes": ((2, 2, 2, 3, 70), (1,), True),
        "images": ((3, 4, 5, 6), (1, 2, 3), True),
        "parted": ((2, 3, 4, 5), (1, 3), True),
        "one": ((1, 1), (1,), True),
    },
    "gpu": {
        "rows": ((3, 256), (1,), True),
        "rows-that-overlap": ((2, 300), (1,), True),
        "channels": ((2, 3, 256), (1,), True),
        "channels-that-overlap": ((2, 3, 15, 20), (1,), True),
        "many-channels": ((1, 70, 130), (1,), False),
        "images": ((2, 3, 7, 8), (1, 2, 3), True),
        "parted": ((2, 8, 3, 17), (1, 3), True),
    },
}
CASES = [
    pytest.param(name, *array, id=f"{name}-{case}") for name, arrays in ARRAYS.items() for case, array in arrays.items()
]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Makes the kernels for TPUs take small groups in pieces, as they take rows of a vocabulary."""
    monkeypatch.setattr(tpu, "_ONE_PIECE", 2048)
    monkeypatch.setattr(tpu, "_PIECE_ELEMENTS", 1024)


def run_both(name, x, dy, axes, log):
    """What the kernels make of x, and of that and dy."""
    forward, backward, config, interpret = KERNELS[name]
    groups = Groups.along(x.shape, axes)
    params = {"log": log, "groups": groups, "config": config, "interpret": interpret}

    @jax.jit
    def y_of(x):
        return groups.in_memory(forward.run(groups.of(x), **params)[0])

    @jax.jit
    def dx_of(y, dy):
        return groups.in_memory(backward.run(groups.of(y), groups.of(dy), **params)[0])

    y = y_of(x)
    return y, dx_of(y, dy)


def is_whole(name, x, axes):
    groups = Groups.along(x.shape, axes)
    shape, config = jax.eval_shape(groups.of, x).shape, KERNELS[name][2]
    if name == "tpu":
        view = tpu.view_of(groups, shape)
        return tpu.blocks_of(view, [x.dtype], config["block_elements"]).piece == view.size
    return gpu.tiling_of(View.in_memory(groups, shape), config["width"], [x.dtype] * 2).is_read_once


def assert_close(actual, exact, dtype):
    assert actual.dtype == jnp.dtype(dtype)
    # Most probabilities are small: rounded to 16 bits, they are right to their own last digit.
    rounding, sums = 0.51 * float(jnp.finfo(dtype).eps), 4e-6
    np.testing.assert_allclose(np.asarray(actual, np.float64), exact, rtol=rounding + sums, atol=sums)


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "shape", "axes", "whole"), CASES)
def test_softmax_kernels_agree_with_float64(name, shape, axes, whole, rng, capfd):
    # The logarithm is a second formula on the same way; half of the arrays take each.
    log = len(shape) == 2
    x, dy = (jnp.asarray(4 * rng.normal(size=shape), jnp.float32) for _ in range(2))
    assert is_whole(name, x, axes) == whole
    y, dx = run_both(name, x, dy, axes, log)
    assert_close(y, oracle.forward(x, axes, log), "float32")
    assert_close(dx, oracle.backward(y, dy, axes, log), "float32")
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("log", [False, True], ids=["softmax", "log"])
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "in-parts"])
@pytest.mark.parametrize("name", KERNELS)
def test_softmax_kernels_round_once(name, whole, log, rng, monkeypatch):
    # Of two operands two accesses, so that the second array takes two reads.
    monkeypatch.setattr(gpu, "_HELD", 4)
    monkeypatch.setattr(gpu, "SHARED_BYTES", 0)
    shape = {"tpu": (2, 100), "gpu": (2, 200)}[name] if whole else (1, 600)
    x, dy = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for _ in range(2))
    assert is_whole(name, x, (1,)) == whole
    y, dx = run_both(name, x, dy, (1,), log)
    assert_close(y, oracle.forward(x, 1, log), "bfloat16")
    assert_close(dx, oracle.backward(y, dy, 1, log), "bfloat16")


@pytest.mark.parametrize(
    ("size", "room", "log"),
    [
        (1100, "kept", True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(2041, "kept", False), (1100, "reread", False)]),
    ],
)
def test_softmax_warpgroups_with_one_row_agree_with_float64(size, room, log, rng, capfd, monkeypatch):
    """Four warpgroups hold a row going forward; going backward, its beginning, and the rest is kept or read again."""
    few_registers(monkeypatch, shared_bytes=2**20 if room == "kept" else 0)
    view = View.in_memory(Groups((size,), (0,)), (1, size))
    forward, backward = (gpu.tiling_of(view, 128, [np.dtype("float32")] * operands) for operands in (1, 2))
    assert (forward.warpgroups, forward.held_steps, forward.kept_steps) == (4, forward.steps, 0)
    assert (backward.warpgroups, backward.held_steps) == ((4, 1) if room == "kept" else (1, 0))
    assert backward.is_read_once == (backward.kept_steps > 1) == (room == "kept")
    x, dy = (jnp.asarray(4 * rng.normal(size=(1, size)), jnp.float32) for _ in range(2))
    y, dx = run_both("gpu", x, dy, (1,), log)
    assert_close(y, oracle.forward(x, 1, log), "float32")
    assert_close(dx, oracle.backward(y, dy, 1, log), "float32")
    assert "RACE DETECTED" not in capfd.readouterr().out


def few_registers(monkeypatch, shared_bytes):
    for name, value in (("_HELD", 4), ("_PASSING", 1), ("SHARED_BYTES", shared_bytes)):
        monkeypatch.setattr(gpu, name, value)


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "in-parts"])
@pytest.mark.parametrize("along", contract.first_in_every_run(["channels", "rows"]))
@pytest.mark.parametrize("name", KERNELS)
def test_softmax_kernels_take_special_values(name, along, whole, rng, monkeypatch):
    size = {"rows": 600, "channels": 40}[along]
    if whole:
        size = {"rows": 256, "channels": 8}[along]
    else:
        monkeypatch.setattr(gpu, "_HELD", 0)
        monkeypatch.setattr(gpu, "SHARED_BYTES", 0)
    x, axis = special_rows(size, rng), 1
    # The groups as rows, or as channels with 128 positions behind them; six of these differ.
    if along == "channels":
        x = np.concatenate([x, np.zeros((122, size), np.float32)]).T[None]
    assert is_whole(name, x, (axis,)) == whole
    assert_takes_special_values(name, x, axis)


@pytest.mark.slow
def test_softmax_warpgroups_with_one_row_take_special_values(rng, monkeypatch):
    few_registers(monkeypatch, shared_bytes=2**20)
    assert_takes_special_values("gpu", special_rows(1100, rng)[1::2], 1)


def special_rows(size, rng):
    x = rng.normal(size=(6, size)).astype(np.float32)
    x[0, 1:] = -np.inf  # one number in a group, which many of a block's threads never see
    x[0, 0] = -1e4
    x[1, : size // 2] = -np.inf  # and one that comes late
    x[2] = -np.inf
    x[3, size // 3] = np.nan
    x[4, -1] = np.inf
    return x


def assert_takes_special_values(name, x, axis):
    for log in (False, True):
        y, dx = run_both(name, jnp.asarray(x), jnp.ones_like(x), (axis,), log)
        exact = oracle.forward(x, axis, log)
        np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(dx, oracle.backward(y, np.ones_like(x), axis, log), rtol=1e-4, atol=2e-3)


@pytest.mark.sampled
@pytest.mark.parametrize("name", KERNELS)
def test_softmax_gradient_launches_its_kernels(name):
    custom_call = {"tpu": "tpu_custom_call", "gpu": "mosaic_gpu"}[name]
    x = jnp.ones((4, 256, 16, 16))

    def step(x):
        y, pull_back = jax.vjp(lambda x: softmax(x, axis=1), x)
        return pull_back(y)

    with lowering.use("pallas"):
        platform = KERNELS[name][0].KERNEL.platform
        text = jax.jit(step).trace(x).lower(lowering_platforms=(platform,)).as_text()
    assert text.count(f"stablehlo.custom_call @{custom_call}") == 2


def test_softmax_runs_the_interpreted_kernel(rng):
    x = rng.normal(size=(4, 30)).astype(np.float32)

    def loss(x):
        return jnp.sum(jnp.sin(softmax(x, algorithm="log")))

    with lowering.use("interpret:mosaic_tpu"):
        rows = lowering.explain(jax.grad(loss), x).rows
        assert {row.implementation for row in rows} == {"mosaic_tpu (interpreted)"}
        interpreted = jax.jit(jax.grad(loss))(x)
    np.testing.assert_allclose(interpreted, jax.grad(loss)(x), atol=1e-5)


def test_softmax_kernels_are_opt_in_where_there_is_no_evidence():
    for target, reason in (("tpu-v5e", "no evidence near these sizes"), ("cuda-h200", "not measured on this target")):
        rows = lowering.explain(softmax, np.ones((8, 256), np.float32), target=target).rows
        assert [row.implementation for row in rows] == ["reference"]
        assert f"opt-in: {reason}" in str([row.refusals for row in rows])


def test_softmax_kernels_refuse_what_they_cannot_run():
    def reason(kernel, hardware, shape=(8, 256), dtype="float32", axes=(1,), spec=None):
        x = types.SimpleNamespace(shape=shape, dtype=jnp.dtype(dtype), sharding=types.SimpleNamespace(spec=spec or ()))
        operands = (x, x) if "backward" in kernel.__name__ else (x,)
        return kernel.KERNEL.refuses(hardware, *operands, log=False, groups=Groups((shape[-1],), (0,)))

    v5e = Hardware(name="tpu-v5e", platform="tpu")
    h100 = Hardware(name="cuda-h100", platform="cuda", compute_capability=(9, 0))
    a100 = Hardware(name="cuda-a100", platform="cuda", compute_capability=(8, 0))
    for kernel in (tpu, tpu_backward):
        assert reason(kernel, v5e, (5, 3)) is None
        assert "an operand is float16" in reason(kernel, v5e, dtype="float16")
        assert "nothing" in reason(kernel, v5e, (0, 4))
        assert "whole groups; x is split over a mesh as (None, 'model')" in reason(kernel, v5e, spec=(None, "model"))
        assert reason(kernel, v5e, spec=("data", None)) is None
        assert reason(kernel, v5e, (8, 2**18)) is None
        assert "groups of 2097152 elements need" in reason(kernel, v5e, (8, 2**21))
    for kernel in (gpu, gpu_backward):
        assert reason(kernel, h100, dtype="float16") is None
        assert "cuda-a100 has 8.0" in reason(kernel, a100)
        assert "takes float32, bfloat16, float16; " in reason(kernel, h100, dtype="float64")
        assert "the last axis in memory has 100" in reason(kernel, h100, (2, 100))
        assert "2147483648" in reason(kernel, h100, (2**10, 2**21))
        assert "nothing" in reason(kernel, h100, (4, 0))


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((1024, 1000), (2**18, 2**19, 2**20)),
        ((8, 50257), (2**18,)),
        ((16, 50257), (2**18, 2**20)),
        ((8, 2**18), (2**18,)),
    ],
    ids=str,
)
def test_softmax_kernel_on_tpu_tries_blocks_that_differ(shape, sizes):
    """Blocks hold whole groups, of eight rows at least."""
    groups = Groups.along(shape, (1,))
    configs = tpu.configs(Hardware("tpu", "tpu"), jax.ShapeDtypeStruct(shape, jnp.float32), log=False, groups=groups)
    assert configs == [{"block_elements": size} for size in sizes]


# What XLA:TPU was seen to do with parameters of these shapes: channels in lanes, or the images' own axes.
STORED = {
    "channels-in-lanes": ((16, 64, 56, 56), (1, 1, 16 * 56, 56, 64), 4),
    "images": ((32, 21, 512, 512), (32, 21, 1, 512, 512), 1),
    "volumes": ((2, 3, 4, 32, 256), (2, 3, 4, 32, 256), 1),
}


@pytest.mark.parametrize(("shape", "seen", "axis"), STORED.values(), ids=STORED)
def test_softmax_kernel_on_tpu_sees_channels_as_they_are_stored(shape, seen, axis):
    groups = Groups.along(shape, (1,))
    view = tpu.view_of(groups, jax.eval_shape(groups.of, jax.ShapeDtypeStruct(shape, jnp.float32)).shape)
    assert (view.shape, view.axis) == (seen, axis)


@pytest.mark.sampled
@pytest.mark.parametrize("axes", [(1,), (1, 2), (1, 3), (), (0, 1, 2, 3)], ids=str)
def test_groups_are_put_back_where_they_lay(axes, rng):
    x = jnp.asarray(rng.normal(size=(2, 3, 4, 5)))
    groups = Groups.along(x.shape, axes)
    of_each = groups.of(x)
    assert of_each.shape == (
        *(n for axis, n in enumerate(x.shape) if axis not in axes),
        np.prod([x.shape[axis] for axis in axes], dtype=int),
    )
    np.testing.assert_array_equal(groups.in_memory(of_each), x)
    for view in (View.in_memory(groups, of_each.shape), tpu.view_of(groups, of_each.shape)):
        seen = view.to_view(of_each)
        assert seen.shape == view.shape
        assert seen.max(view.axis).size == of_each[..., 0].size
        np.testing.assert_array_equal(view.from_view(seen, of_each.shape), of_each)


MESHES = [
    one
    for one in contract.PROMISES
    if any(word in contract.promise_name(*one.values) for word in ("mesh", "shard", "vmap", "split"))
]


@pytest.mark.sampled
@pytest.mark.parametrize("promise", MESHES, ids=contract.promise_name)
@pytest.mark.parametrize("implementation", ["interpret:mosaic_tpu"])
def test_softmax_kernel_keeps_promise(implementation, promise):
    case = contract.Case(
        "channels",
        functools.partial(softmax, axis=1),
        lambda rng: (rng.normal(size=(8, 3, 4)).astype(np.float32),),
        differentiable=(0,),
        batched=(0,),
        operator="softmax",
        backward="softmax_backward",
        implementation=implementation,
    )
    promise(case)
