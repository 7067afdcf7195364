"""The EMA-Adam kernels under the interpreters of both Pallas dialects, against NumPy float64."""

import functools
import types

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lowering
from jaxops.ema_adam.operator import APPLY_FUSED_EMA_ADAM
from pallas_kernels._jax_private import interpret_gpu_params
from pallas_kernels.ema_adam_update import COEFFICIENTS
from pallas_kernels.gpu import ema_adam as gpu_ema_adam
from pallas_kernels.hardware import Hardware
from pallas_kernels.tpu import ema_adam as tpu_ema_adam

pytestmark = pytest.mark.emulated

LEARNING_RATE, EMA_DECAY, BETA1, BETA2, EPS, WEIGHT_DECAY, STEP = 0.01, 0.75, 0.9, 0.99, 1e-6, 0.1, 3
F32, BF16, F16 = "float32", "bfloat16", "float16"

# Blocks far smaller than the default let small arrays span several of them.
KERNELS = {
    "tpu": (tpu_ema_adam, {"block_elements": 8192}, pltpu.InterpretParams(detect_races=True), "tpu_custom_call"),
    "gpu": (gpu_ema_adam, {"block_elements": 256}, interpret_gpu_params(detect_races=True), "mosaic_gpu"),
}
# Below, at and beside every edge: a lane row, a warpgroup, a block, a tile, a view in another order of axes.
SHAPES = [
    (),
    (0,),
    (1,),
    (7,),
    (128,),
    (129,),
    (3, 5, 7),
    (1000,),
    (1024,),
    (257, 129),
    (5, 1),
    (2, 0, 3),
    (40, 3, 1, 2),
]
DTYPES = {  # of grad, var, m, v, s
    "float32": (F32, F32, F32, F32, F32),
    "bfloat16": (BF16, BF16, BF16, BF16, BF16),
    "float16": (F16, F16, F16, F16, F16),
    "mixed": (BF16, F32, BF16, F32, F16),
}


def make_operands(shape, dtypes, seed=0):
    rng = np.random.default_rng(seed)
    grad, var, m, s = (rng.normal(size=shape) for _ in range(4))
    values = grad, var, m, rng.uniform(size=shape), s
    return tuple(jnp.asarray(value, dtype) for value, dtype in zip(values, dtypes, strict=True))


def make_coefficients():
    correction1, correction2 = 1 - BETA1**STEP, 1 - BETA2**STEP
    gains = (EMA_DECAY, 1 - EMA_DECAY, BETA1, 1 - BETA1, BETA2, 1 - BETA2)
    return jnp.asarray((LEARNING_RATE, *gains, correction1, correction2, EPS, WEIGHT_DECAY), F32)


def oracle(grad, var, m, v, s, *, mode, output):
    """The documented step in float64, on what the operands hold."""
    grad, var, m, v, s = (np.asarray(x).astype(np.float64) for x in (grad, var, m, v, s))
    if mode == "l2":
        grad = grad + WEIGHT_DECAY * var
    m = BETA1 * m + (1 - BETA1) * grad
    v = BETA2 * v + (1 - BETA2) * grad**2
    direction = m / (1 - BETA1**STEP) / (np.sqrt(v / (1 - BETA2**STEP)) + EPS)
    if mode == "adamw":
        direction = direction + WEIGHT_DECAY * var
    new_var = var - LEARNING_RATE * direction
    s = EMA_DECAY * s + (1 - EMA_DECAY) * new_var
    return (new_var if output == "params" else -LEARNING_RATE * direction), m, v, s


def assert_step(results, operands, *, mode, output):
    expected = oracle(*operands, mode=mode, output=output)
    for name, result, truth, operand in zip(("first", "m", "v", "s"), results, expected, operands[1:], strict=True):
        assert (result.shape, result.dtype) == (operand.shape, operand.dtype), name
        # One rounding to the stored dtype, after a few of float32.
        tolerance = 0.501 * float(jnp.finfo(result.dtype).eps) + 1e-6
        smallest = float(jnp.finfo(result.dtype).smallest_subnormal)
        np.testing.assert_allclose(
            np.asarray(result).astype(np.float64), truth, rtol=tolerance, atol=smallest + 1e-7, err_msg=name
        )


def launch(name, operands, *, mode, output, interpret, in_place=True):
    kernel, config, _, _ = KERNELS[name]
    settings = {"config": config, "interpret": interpret, "in_place": in_place}
    run = functools.partial(kernel.run, mode=mode, output=output, **settings)
    return jax.jit(run)(*operands, make_coefficients())


@pytest.mark.interpreted
@pytest.mark.sampled
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_ema_adam_kernel_takes_any_shape(name, shape, capfd):
    operands = make_operands(shape, DTYPES["mixed"])
    results = launch(name, operands, mode="adamw", output="params", interpret=KERNELS[name][2])
    assert_step(results, operands, mode="adamw", output="params")
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.sampled
@pytest.mark.parametrize(("mode", "output"), [("adamw", "update"), ("l2", "params")])
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("name", KERNELS)
def test_ema_adam_kernel_agrees_with_float64(name, dtypes, mode, output, capfd):
    operands = make_operands((9, 45), DTYPES[dtypes])
    results = launch(name, operands, mode=mode, output=output, interpret=KERNELS[name][2])
    assert_step(results, operands, mode=mode, output=output)
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.sampled
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ema_adam_tpu_kernel_interprets_as_hlo(shape):
    operands = make_operands(shape, DTYPES["bfloat16"])
    results = launch("tpu", operands, mode="l2", output="update", interpret=True)
    assert_step(results, operands, mode="l2", output="update")


@pytest.mark.interpreted
@pytest.mark.parametrize("name", KERNELS)
def test_ema_adam_kernel_rounds_once(name):
    """A second moment too small for float16 still scales the step, and the average follows the unrounded parameters."""
    ones = np.ones(130)
    values = 1e-4 * ones, ones, 0 * ones, 0 * ones, 0 * ones
    operands = tuple(jnp.asarray(value, F16) for value in values)
    results = launch(name, operands, mode="adamw", output="params", interpret=KERNELS[name][2])
    assert not np.any(np.asarray(results[2]))  # 1e-10 is below the smallest float16
    assert_step(results, operands, mode="adamw", output="params")


@pytest.mark.parametrize("name", KERNELS)
def test_ema_adam_kernel_keeps_nan_and_infinity_to_their_elements(name):
    grad, var, m, v, s = make_operands((300,), DTYPES["float32"])
    grad, v = grad.at[5].set(jnp.nan), v.at[7].set(jnp.inf).at[9].set(-1.0)
    operands = grad.at[11].set(0.0), var, m, v.at[11].set(0.0), s
    results = launch(name, operands, mode="adamw", output="params", interpret=KERNELS[name][2])
    with np.errstate(invalid="ignore"):
        assert_step(results, operands, mode="adamw", output="params")
    assert sorted(np.flatnonzero(np.isnan(results[0]))) == [5, 9]


@pytest.mark.sampled
@pytest.mark.parametrize("grad_dtype", [F32, BF16])
@pytest.mark.parametrize("output", ["params", "update"])
@pytest.mark.parametrize("name", KERNELS)
def test_ema_adam_kernel_launches_once_and_in_place(name, output, grad_dtype):
    kernel, config, _, custom_call = KERNELS[name]
    operands = make_operands((40, 300), (grad_dtype, F32, F32, BF16, F32))
    run = functools.partial(kernel.run, mode="adamw", output=output, config=config)
    first = (1,) if output == "params" else (0,) if grad_dtype == F32 else ()
    donated = (*first, 2, 3, 4)
    traced = jax.jit(run, donate_argnums=donated).trace(*operands, make_coefficients())
    text = traced.lower(lowering_platforms=(kernel.KERNEL.platform,)).as_text()
    assert text.count(f"stablehlo.custom_call @{custom_call}") == 1
    assert text.count("stablehlo.output_operand_alias<") == len(donated)
    assert text.count("tf.aliasing_output") == len(donated)


@pytest.mark.parametrize("donated", [(), (1, 2, 3, 4)], ids=["kept", "donated"])
@pytest.mark.parametrize("name", KERNELS)
def test_ema_adam_kernel_writes_over_operands_in_programs_that_donate(name, donated):
    kernel, _, _, custom_call = KERNELS[name]
    operands = (*make_operands((40, 300), (F32,) * 5), make_coefficients())
    step = functools.partial(APPLY_FUSED_EMA_ADAM, mode="adamw", output="params")
    with lowering.use("pallas"):
        traced = jax.jit(lambda *leaves: jax.jit(step)(*leaves), donate_argnums=donated).trace(*operands)
        text = traced.lower(lowering_platforms=(kernel.KERNEL.platform,)).as_text()
    assert text.count(f"stablehlo.custom_call @{custom_call}") == 1
    assert text.count("stablehlo.output_operand_alias<") == len(donated)


@pytest.mark.interpreted
@pytest.mark.sampled
@pytest.mark.parametrize("output", ["params", "update"])
@pytest.mark.parametrize("name", KERNELS)
def test_ema_adam_kernel_writes_new_arrays(name, output, capfd):
    operands = make_operands((9, 45), DTYPES["mixed"])
    results = launch(name, operands, mode="adamw", output=output, interpret=KERNELS[name][2], in_place=False)
    assert_step(results, operands, mode="adamw", output=output)
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("split", ["shard_map", "explicit"])
def test_ema_adam_kernel_updates_each_devices_part_in_place(name, split):
    kernel, _, _, custom_call = KERNELS[name]
    axis_type = AxisType.Explicit if split == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    specs = (*[P("data")] * 5, P())
    operands = (*make_operands((16, 130), (F32,) * 5), make_coefficients())
    step = functools.partial(APPLY_FUSED_EMA_ADAM, mode="l2", output="params")
    if split == "shard_map":
        step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P("data"))
    else:
        operands = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(operands, specs, strict=True)]
    with lowering.use("pallas"):
        traced = jax.jit(step, donate_argnums=(1, 2, 3, 4)).trace(*operands)
        text = traced.lower(lowering_platforms=(kernel.KERNEL.platform,)).as_text()
    assert text.count(f"stablehlo.custom_call @{custom_call}") == 1
    assert text.count("stablehlo.output_operand_alias<") == 4
    assert "tensor<2x130xf32>" in text


def test_ema_adam_exports_to_every_platform_with_its_own_kernel():
    operands = (*make_operands((16, 130), (F32,) * 5), make_coefficients())
    step = jax.jit(functools.partial(APPLY_FUSED_EMA_ADAM, mode="adamw", output="params"))
    kernels_call_custom = jax.export.DisabledSafetyCheck.custom_call
    checks = [kernels_call_custom(name) for name in ("tpu_custom_call", "mosaic_gpu", "mosaic_gpu_v2")]
    with lowering.use("pallas"):
        exported = jax.export.export(step, platforms=["cpu", "cuda", "tpu"], disabled_checks=checks)(*operands)
    text = exported.mlir_module()
    for _, _, _, custom_call in KERNELS.values():
        assert text.count(f"stablehlo.custom_call @{custom_call}") == 1
    on_cpu = jax.export.deserialize(exported.serialize()).call(*operands)
    for actual, expected in zip(on_cpu, step(*operands), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_ema_adam_kernels_refuse_what_they_cannot_run():
    def reason(kernel, hardware, shape=(8,), **dtypes):
        arrays = [
            types.SimpleNamespace(shape=shape, dtype=dtypes.get(name, F32)) for name in ("grad", "var", "m", "v", "s")
        ]
        coefficients = types.SimpleNamespace(shape=(len(COEFFICIENTS),), dtype=F32)
        return kernel.KERNEL.refuses(hardware, *arrays, coefficients, mode="adamw", output="params")

    v5e = Hardware(name="tpu-v5e", platform="tpu")
    h100 = Hardware(name="cuda-h100", platform="cuda", compute_capability=(9, 0))
    a100 = Hardware(name="cuda-a100", platform="cuda", compute_capability=(8, 0))
    assert reason(tpu_ema_adam, v5e, var=BF16) is None
    assert "v is float16" in reason(tpu_ema_adam, v5e, v=F16)
    assert "grad is float64" in reason(tpu_ema_adam, v5e, grad="float64")
    assert reason(tpu_ema_adam, v5e, shape=(2**26,)) is None
    assert "67108865" in reason(tpu_ema_adam, v5e, shape=(2**26 + 1,))
    assert reason(gpu_ema_adam, h100, var=BF16, v=F16) is None
    assert reason(gpu_ema_adam, Hardware(name="cuda", platform="cuda")) is None
    assert "s is float64" in reason(gpu_ema_adam, h100, s="float64")
    assert "cuda-a100 has 8.0" in reason(gpu_ema_adam, a100)
    assert "2147483648" in reason(gpu_ema_adam, h100, shape=(2**20, 2**11))


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_ema_adam_kernel_configs_agree(name):
    kernel, _, interpret, _ = KERNELS[name]
    operands = make_operands((33, 130), DTYPES["float32"])
    configs = kernel.KERNEL.configs(
        Hardware(name=name, platform=name), *operands, make_coefficients(), mode="l2", output="params"
    )
    assert len(configs) == len({tuple(config.items()) for config in configs})
    for config in configs:
        run = functools.partial(kernel.run, mode="l2", output="params", config=config, interpret=interpret)
        assert_step(jax.jit(run)(*operands, make_coefficients()), operands, mode="l2", output="params")
