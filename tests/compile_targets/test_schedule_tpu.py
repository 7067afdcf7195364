"""Replays of what the TPU's compiler schedules, against times that others have measured on a v5e and published."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from compile_targets.conftest import installed
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import jaxops
import lowering
from lowering.targets import named

pytestmark = pytest.mark.tpu_compile

MEAN_ERROR, WORST_ERROR = 0.05, 0.10

# Milliseconds of bfloat16 products of square matrices on a v5e, less what the host needs to start one, which each
# source shows with an empty or a tiny program; by size and blocks (m, k, n), None for XLA's own.
_IN_JAX_DOCS_MS = {  # jax: docs/pallas/tpu/matmul.ipynb; 0.105 ms
    (4096, None): 0.722,
    (8192, None): 5.942,
    (4096, (512, 1024, 1024)): 0.784,
    (8192, (512, 1024, 1024)): 5.994,
    (4096, (128, 128, 128)): 11.667,
}
_IN_PALLAS_FORGE_MS = {  # linhkid/pallas-forge, notebook 05; 0.222 ms
    (2048, (64, 128, 128)): 2.665 - 0.222,
    (2048, (64, 256, 256)): 1.092 - 0.222,
    (2048, (128, 128, 128)): 1.603 - 0.222,
    (2048, (128, 256, 256)): 0.693 - 0.222,
    (2048, (128, 512, 512)): 0.457 - 0.222,
    (2048, (256, 128, 128)): 0.974 - 0.222,
    (2048, (256, 256, 512)): 0.416 - 0.222,
    (2048, (256, 512, 512)): 0.380 - 0.222,
}
MEASURED_MS = _IN_JAX_DOCS_MS | _IN_PALLAS_FORGE_MS


def matmul_kernel(x_ref, y_ref, z_ref, acc_ref, *, steps):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == steps - 1)
    def _():
        z_ref[...] = acc_ref[...].astype(z_ref.dtype)


def matmul(x, y, *, blocks):
    if blocks is None:
        return x @ y
    size, (bm, bk, bn) = x.shape[0], blocks
    return pl.pallas_call(
        functools.partial(matmul_kernel, steps=size // bk),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0,
            in_specs=[pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)), pl.BlockSpec((bk, bn), lambda i, j, k: (k, j))],
            out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
            scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
            grid=(size // bm, size // bn, size // bk),
        ),
        out_shape=jax.ShapeDtypeStruct((size, size), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        name="matmul",
    )(x, y)


def replayed(fn, *args, target="tpu-v5e", **options):
    return lowering.compile(fn, *args, target=installed(target), schedule=True, **options).schedule


def matmul_schedule(size, blocks, target="tpu-v5e"):
    x = jax.ShapeDtypeStruct((size, size), jnp.bfloat16)
    return replayed(functools.partial(matmul, blocks=blocks), x, x, target=target)


def test_replays_agree_with_published_measurements():
    errors = {}
    for (size, blocks), measured_ms in MEASURED_MS.items():
        replayed_ms = matmul_schedule(size, blocks).total_us / 1000
        errors[size, blocks] = replayed_ms / measured_ms - 1
        print(
            f"{size} {blocks}: measured {measured_ms:.3f} ms, replayed {replayed_ms:.3f}, {errors[size, blocks]:+.1%}"
        )
    absolute = [abs(error) for error in errors.values()]
    assert max(absolute) <= WORST_ERROR, errors
    assert sum(absolute) / len(absolute) <= MEAN_ERROR, errors


@pytest.mark.parametrize("target", ["tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7x"])
def test_a_users_kernel_is_replayed(target):
    schedule = matmul_schedule(1024, (256, 256, 256), target)
    kernel = next(kernel for kernel in schedule.kernels if kernel.kind == "mosaic")
    assert kernel.name.startswith("matmul")
    assert kernel.calls == 1
    assert "test_schedule_tpu.py" in kernel.source
    steps = 64 // (named(target).cores or 1)
    assert any(region.trips == steps for region in kernel.regions)
    assert 0 < kernel.slots["MXU"] < 1
    assert schedule.unknown == ()
    assert schedule.roofline_us <= schedule.total_us
    assert ("not validated" in str(schedule)) == (target != "tpu-v5e")


def test_bytes_are_those_of_operands_and_results():
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    with lowering.use("pallas"):
        schedule = replayed(jaxops.softmax, x)
    kernel = schedule.kernels[0]
    assert (kernel.kind, kernel.bound) == ("mosaic", "HBM")
    assert kernel.dma_bytes == 2 * 4 * 4096 * 4096
    assert schedule.total_us == pytest.approx(schedule.roofline_us, rel=0.02)


def test_a_scan_runs_its_body_as_often_as_it_turns():
    def body(carry, weights):
        return jnp.tanh(carry @ weights), None

    x, weights = jax.ShapeDtypeStruct((512, 512), jnp.float32), jax.ShapeDtypeStruct((10, 512, 512), jnp.float32)
    schedule = replayed(lambda x, weights: jax.lax.scan(body, x, weights)[0], x, weights)
    assert 10 in [kernel.calls for kernel in schedule.kernels]
    assert sum(kernel.time_us for kernel in schedule.kernels) == pytest.approx(schedule.total_us)


@pytest.mark.parametrize("target", ["tpu-v5e", "tpu-v6e"])
def test_donated_arguments_are_not_copied(target):
    def step(*leaves):
        settings = {"lr": 1e-3, "ema_decay": 0.999, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
        return jaxops.aclnn.apply_fused_ema_adam(*leaves, jnp.int32(1), **settings)

    leaf = jax.ShapeDtypeStruct((8192, 1024), jnp.float32)
    with lowering.use("pallas"):
        schedule = replayed(jax.jit(step, donate_argnums=(1, 2, 3, 4)), *[leaf] * 5, target=target)
    assert schedule.kernels[0].kind == "mosaic"
    assert schedule.total_us == pytest.approx(schedule.roofline_us, rel=0.02)


def test_a_loop_that_data_ends_is_refused_by_name_until_the_caller_says_how_often_it_turns():
    def doubled_until_large(x):
        return jax.lax.while_loop(lambda x: x.sum() < 100, lambda x: 2 * x, x)

    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    with pytest.raises(
        lowering.CompileError, match=r"depends on data: trip_counts must say how often, as in \{'program@"
    ):
        replayed(doubled_until_large, x)
    three, five = (replayed(doubled_until_large, x, trip_counts={"program": turns}) for turns in (3, 5))
    assert three.total_us < five.total_us
    assert 5 in [kernel.calls for kernel in five.kernels]


def test_implementations_are_compared():
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    installed("tpu-v5e")
    found = lowering.compare(jaxops.softmax, x, target="tpu-v5e")
    reference, pallas = found.rows
    assert pallas.taken == {"softmax": ["mosaic_tpu"]}
    assert pallas.schedule.total_us < 0.7 * reference.schedule.total_us
    assert "softmax: mosaic_tpu" in str(found)


def test_configurations_are_ranked_by_replay_and_not_twice(tmp_path):
    x = jax.ShapeDtypeStruct((2048, 1024), jnp.float32)
    options = {"target": installed("tpu-v5e"), "by": "schedule", "path": tmp_path / "tuned.json", "progress": False}
    result = lowering.tune(jaxops.softmax, x, **options)
    (entry,) = result.entries
    assert result.complete
    assert entry.replayed
    assert entry.best("mosaic_tpu").median_us < entry.best("reference").median_us
    assert lowering.tune(jaxops.softmax, x, **options, budget_seconds=1e-6).entries == (entry,)


def test_an_unknown_flag_of_libtpu_is_one_sentence(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--no_such_flag=1")
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    with pytest.raises(lowering.CompileError, match=r"compiler does not take a flag: .*no_such_flag"):
        replayed(jnp.sin, x)


def test_the_command_prints_a_schedule(tmp_path):
    installed("tpu-v5e")
    file = tmp_path / "user.py"
    file.write_text("import jax.numpy as jnp\n\ndef twice(x):\n    return 2 * x\n")
    command = [sys.executable, "-m", "jaxops", "compile", f"{file}:twice", "--arg", "f32[1024,1024]"]
    command += ["--target", "tpu-v5e", "--schedule"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "us by its schedule" in done.stdout
    assert "not measured" in done.stdout
