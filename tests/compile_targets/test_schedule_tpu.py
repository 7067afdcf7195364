"""Replays of what the TPU's compiler schedules, against times that others have measured and published."""

import functools
import gzip
import importlib
import inspect
import json
import statistics
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compile_targets.conftest import installed
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

import jaxops
import lowering
from lowering.targets import named

pytestmark = pytest.mark.tpu_compile

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MEAN_ERROR, WORST_ERROR = 0.05, 0.10
MOST = 0.01  # by which a replay may differ from the one that was recorded with the same JAX


@pytest.fixture
def published(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("tpu_published")


def replayed(fn, *args, target="tpu-v5e", **options):
    return lowering.compile(fn, *args, target=installed(target), schedule=True, **options).schedule


def test_replays_agree_with_published_measurements_and_with_what_was_recorded(published):
    installed("tpu-v5e")
    replays = [published.replayed(case)["candidates"]["replay"] for case in published.products_on_v5e()]
    errors = [abs(replay["error"]) for replay in replays]
    assert max(errors) <= WORST_ERROR, replays
    assert statistics.mean(errors) <= MEAN_ERROR, replays
    runs = json.loads((BENCHMARKS / "results" / "tpu_published.json").read_text())["runs"]
    for run in [run for run in runs if run["environment"]["versions"]["jax"] == jax.__version__]:
        recorded = [case["candidates"]["replay"] for case in run["cases"][: len(replays)]]
        times = [[replay["replayed_us"] for replay in one] for one in (replays, recorded)]
        assert times[0] == pytest.approx(times[1], rel=MOST)


def test_nothing_is_faster_at_the_nominal_clock_and_bandwidth_than_the_chip_allows():
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    for target, most in (("tpu-v5e", 1 / 0.88), ("tpu-v6e", 1 / 0.85)):
        schedule = replayed(jnp.copy, x, target=target)
        nominal = schedule.us_at(1.0, 1.0)
        assert nominal >= 2 * x.size * 2 / named(target).memory_bytes_per_s * 1e6
        assert 1 / 0.95 <= schedule.total_us / nominal <= most


@pytest.mark.parametrize("target", ["tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7x"])
def test_a_users_kernel_is_replayed(published, target):
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    schedule = replayed(functools.partial(published.matmul, blocks=(256, 256, 256)), x, x, target=target)
    kernel = next(kernel for kernel in schedule.kernels if kernel.kind == "mosaic")
    assert kernel.name.startswith("matmul")
    assert kernel.calls == 1
    assert "tpu_published.py" in kernel.source
    steps = 64 // (named(target).cores or 1)
    assert any(region.trips == steps for region in kernel.regions)
    product = max(kernel.regions, key=lambda region: region.cycles * (region.bound == "MXU"))
    assert "jnp.dot" in inspect.getsourcelines(published)[0][int(product.source.rpartition(":")[2]) - 1]
    assert 0 < kernel.slots["MXU"] < 1
    assert schedule.unknown == ()
    assert schedule.roofline_us <= schedule.total_us
    assert f"{target}: replays were " in str(schedule)


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
    times = {row.operator: row.time_us for row in found.operators}
    assert set(times) == {"softmax(f32[4096,4096])", "other"}
    assert times["softmax(f32[4096,4096])"]["pallas"] > 0.99 * pallas.schedule.total_us


def test_operands_of_one_word_decide_what_is_replayed():
    x, key = jax.ShapeDtypeStruct((1024, 4096), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.uint32)

    def issued(rate):
        keep = {"dropout": {0: np.int32((1 - rate) * 2**24)}}
        with lowering.use("pallas"):
            options = {"trip_counts": {"dropout": 0}, "scalars": keep}
            schedule = replayed(lambda x, key: jaxops.dropout(key, x, rate), x, key, **options)
        (kernel,) = (kernel for kernel in schedule.kernels if kernel.name.startswith("dropout"))
        return kernel.cycles - kernel.stall_cycles

    assert 1.5 * issued(0.5) < issued(0.1)  # 4 binary digits are drawn for each element, or 12 and more


@pytest.mark.parametrize("target", ["tpu-v5e", "tpu-v7x"])
def test_what_splash_attention_knows_of_its_mask_is_known(target):
    heads, length, block = 2, 1024, 256
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((length, length))] * heads)
    sizes = splash_attention_kernel.BlockSizes(block_q=block, block_kv=block, block_kv_compute=block)
    attend = splash_attention_kernel.make_splash_mha_single_device(mask, block_sizes=sizes)
    x = jax.ShapeDtypeStruct((heads, length, 128), jnp.bfloat16)
    schedule = replayed(lambda q, k, v: attend(q, k, v), x, x, x, target=target)
    assert schedule.unknown == ()
    # Of 16 blocks a head, those in the mask.
    assert heads * 10 in [region.trips for region in schedule.kernels[0].regions]


@pytest.mark.parametrize("target", ["tpu-v5e", "tpu-v7x"])
def test_a_kernel_reads_a_semaphore(target):
    def kernel(out_ref, semaphore):
        pl.semaphore_signal(semaphore, 77)

        def body(row, carry):
            out_ref[pl.ds(pl.multiple_of(8 * row, 8), 8)] = jnp.zeros((8, 128), jnp.float32)
            return carry

        jax.lax.fori_loop(0, pl.semaphore_read(semaphore), body, 0)
        pl.semaphore_wait(semaphore, 77)

    out = jax.ShapeDtypeStruct((1024, 128), jnp.float32)
    scratch = [pltpu.SemaphoreType.REGULAR]
    schedule = replayed(lambda: pl.pallas_call(kernel, out_shape=out, scratch_shapes=scratch)(), target=target)
    assert schedule.unknown == ()
    assert 77 in [region.trips for region in schedule.kernels[0].regions]


def test_an_operator_is_ranked_without_copies_that_no_model_makes():
    x = jax.ShapeDtypeStruct((256, 28, 28, 256), jnp.bfloat16)
    channels = (jax.ShapeDtypeStruct((256,), jnp.float32),) * 4
    options = {"target": installed("tpu-v5e"), "by": "schedule", "progress": False}
    normalize = functools.partial(jaxops.batch_norm, layout="NHWC")
    result = lowering.tune(normalize, x, *channels, **options)
    moved = 2 * 256 * 28 * 28 * 256 * 2 / 819e3
    with lowering.use("reference"):
        assert result.entries[0].best("reference").median_us <= 1.01 * replayed(normalize, x, *channels).total_us
    assert moved < result.entries[0].best("mosaic_tpu").median_us < 1.25 * moved


def test_an_operator_is_ranked_with_operands_that_come_from_hbm():
    x = jax.ShapeDtypeStruct((16, 128, 56, 56), jnp.float32)
    options = {"target": installed("tpu-v5e"), "by": "schedule", "progress": False}
    result = lowering.tune(functools.partial(jaxops.max_pool, window=2, stride=2, layout="NCHW"), x, **options)
    moved = 16 * 128 * (56 * 56 + 28 * 28) * 4 / 819e3
    assert all(candidate.median_us > moved for candidate in result.entries[0].candidates)


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


@pytest.mark.parametrize("target", ["tpu-v5e", "tpu-v7x"])
def test_a_users_kernel_is_traced_over_time(published, target, tmp_path):
    x = jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16)
    schedule = replayed(functools.partial(published.matmul, blocks=(128, 128, 128)), x, x, target=target)
    schedule.to_perfetto(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert (tmp_path / "trace.json").stat().st_size < 2e6
    assert max(event["ts"] for event in events if event["ph"] == "E") == pytest.approx(schedule.total_us)
    kernel = next(kernel for kernel in schedule.kernels if kernel.kind == "mosaic")
    steps = 16**3 // (named(target).cores or 1)
    names = [event["name"] for event in events if event["ph"] == "B"]
    assert kernel.name in names
    assert any(name.startswith("step 1 of ") for name in names)
    (between,) = (event for event in events if "not in detail" in event.get("name", ""))
    assert int(between["name"].split()[5].strip(",").replace(",", "")) in range(steps, steps + 3)
    begun = [event for event in events if event["ph"] == "b" and "beside kernels" not in event["name"]]
    moved = sum(event["args"]["HBM bytes"] for event in begun)
    assert moved + between["args"]["HBM bytes"] == kernel.dma_bytes


def test_the_command_prints_a_schedule(tmp_path):
    installed("tpu-v5e")
    file = tmp_path / "user.py"
    file.write_text("import jax.numpy as jnp\n\ndef twice(x):\n    return 2 * x\n")
    command = [sys.executable, "-m", "jaxops", "compile", f"{file}:twice", "--arg", "f32[1024,1024]"]
    command += ["--target", "tpu-v5e", "--schedule"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "us by its schedule" in done.stdout
    assert "not measured" in done.stdout


def test_the_command_notices_that_a_kernel_has_become_slower(tmp_path):
    installed("tpu-v5e")
    file = tmp_path / "user.py"
    file.write_text("import jaxops\n\ndef probs(x):\n    return jaxops.softmax(x)\n")
    command = [sys.executable, "-m", "jaxops", "compile", f"{file}:probs", "--arg", "f32[4096,4096]"]
    command += ["--target", "tpu-v5e", "--schedule"]
    options = {"capture_output": True, "text": True, "cwd": tmp_path}
    saved = ["--implementation", "pallas", "--save", "base.json", "--perfetto", "trace.json.gz"]
    assert subprocess.run([*command, *saved], check=True, **options).returncode == 0
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    base = lowering.Schedule.load(tmp_path / "base.json")
    assert {kernel.name for kernel in base.kernels} <= {event.get("name") for event in events}
    against = ["--against", "base.json", "--slower-than", "3%"]
    again = subprocess.run([*command, "--implementation", "pallas", *against], check=False, **options)
    assert (again.returncode, "without a change" in again.stdout) == (0, True)
    slower = subprocess.run([*command, "--implementation", "reference", *against], check=False, **options)
    assert slower.returncode == 1
    assert "slower than base.json by more than 3%: the program takes " in slower.stderr
