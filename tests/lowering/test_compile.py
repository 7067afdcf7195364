"""Compiling for a chip: what the report says, on the CPU that is here, and what is said where it cannot be done.

Targets that are not here stand in `tests/compile_targets`.
"""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import time

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxops
import lowering
from lowering.compiling import compilers, process
from lowering.compiling.report import Collective, GpuResources, Memory, _collectives, _kernels, gpu_resources
from lowering.targets import named


@pytest.fixture(autouse=True)
def no_compilers_of_their_own(monkeypatch, tmp_path):
    """Those in the user's cache folder are left alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def scaled(x, y):
    return 2 * x, x @ y


X, Y = jax.ShapeDtypeStruct((8, 4), jnp.float32), jax.ShapeDtypeStruct((4, 16), jnp.float32)


def test_compile_reports_what_the_program_takes():
    report = lowering.compile(scaled, X, Y, target="cpu")
    assert report.target == "cpu"
    assert report.kernels == {}
    assert report.memory.arguments == 4 * (8 * 4 + 4 * 16)
    # And a table of two pointers.
    assert 0 <= report.memory.outputs - 4 * (8 * 4 + 8 * 16) <= 16
    assert report.memory.peak == report.memory.arguments + report.memory.outputs + report.memory.temporaries
    assert report.cost["flops"] >= 2 * 8 * 4 * 16
    assert "stablehlo.dot_general" in report.stablehlo
    assert report.hlo.startswith("HloModule")
    assert f'"peak": {report.memory.peak}' in report.to_json()
    assert re.search(rf"compiled for cpu in .* s\n.*peak, bytes +│ +{report.memory.peak:,} │", str(report), re.DOTALL)


def test_peak_of_memory_is_no_more_than_what_a_compiler_says_lives_at_once():
    assert Memory(arguments=60, outputs=50, aliased=40, temporaries=30).peak == 100
    assert Memory(arguments=60, outputs=50, aliased=40, temporaries=30, at_once=90).peak == 90
    assert Memory(arguments=60, outputs=50, aliased=40, temporaries=30, at_once=110).peak == 100
    assert lowering.compile(scaled, X, Y, target="cpu").memory.at_once is None


def test_compiled_program_can_be_called_where_its_target_is_here(rng):
    report = lowering.compile(scaled, X, Y, target="cpu")
    x, y = (rng.normal(size=shape.shape).astype(np.float32) for shape in (X, Y))
    np.testing.assert_allclose(report.call(x, y)[1], x @ y, rtol=1e-5)


def test_compiled_program_says_what_it_takes():
    report = lowering.compile(lambda x, tree: x @ tree["w"], X, {"w": Y}, target="cpu")
    x, y = np.ones(X.shape, np.float32), np.ones(Y.shape, np.float32)
    refusals = [
        ((), "args[0] must be float32[8,4]; got nothing"),
        ((x,), "args[1]['w'] must be float32[4,16]; got nothing"),
        ((x, {"w": x}), "args[1]['w'] must be float32[4,16]; got float32[8,4]"),
        ((x, {"w": y.astype(np.int32)}), "args[1]['w'] must be float32[4,16]; got int32[4,16]"),
        ((x, {"w": y, "b": y}), "args[1]['b'] must not be given; got float32[4,16]"),
        ((x, {"w": "text"}), "args[1]['w'] must be float32[4,16]; got 'text'"),
        ((X, {"w": y}), "args[0] must be float32[8,4]; got a ShapeDtypeStruct of float32[8,4]"),
        ((x, {"w": y}, None), "args must be 2, as compiled; got 3"),
        ((x, {"w": y, 1: y}), "args must be pytrees; got one with a dict whose keys cannot be sorted"),
    ]
    assert (report.call(x, {"w": y}) == X.shape[1]).all()
    for args, sentence in refusals:
        with pytest.raises(lowering.CompileError) as refusal:
            report.call(*args)
        assert str(refusal.value) == f"lowering.compile: {sentence}"
    with pytest.raises(lowering.CompileError, match=r"args must have values; got arrays that are being traced"):
        jax.jit(report.call)(x, {"w": y})


def test_static_arguments_are_part_of_the_program():
    scaled_by = jax.jit(lambda factor, x: x * factor, static_argnums=0)
    x = np.ones(3, np.float32)
    for program in (lowering.compile(scaled_by, 3, x, target="cpu"), lowering.export(scaled_by, 3, x)):
        assert program.call(x).tolist() == [3.0] * 3
    assert lowering.explain(scaled_by, 3, x).total_flops == 3
    assert lowering.tune(scaled_by, 3, x).complete


def test_compile_keeps_donation():
    donating = jax.jit(lambda x: x + 1, donate_argnums=0)
    assert lowering.compile(donating, X, target="cpu").memory.aliased == 4 * 8 * 4


def test_compile_refuses_an_unknown_target():
    with pytest.raises(ValueError, match=r"target must be one of cpu, tpu-v5e, .*; got 'abacus'"):
        lowering.compile(scaled, X, Y, target="abacus")


def test_compile_refuses_a_platform_without_a_chip():
    with pytest.raises(lowering.CompileError, match="target must name a chip; got the platform 'tpu'"):
        lowering.compile(scaled, X, Y, target="tpu")


@pytest.mark.parametrize("topology", ["4by4", "x", "2x2x2x2"])
def test_compile_refuses_what_is_no_topology(topology):
    with pytest.raises(lowering.CompileError, match=f"must have a topology such as 16x16 or 8; got '{topology}'"):
        lowering.compile(scaled, X, Y, target=f"tpu-v5e:{topology}")


@pytest.mark.parametrize(("target", "platform"), [("tpu-v5e", "tpu"), ("cuda-h100", "cuda")])
def test_compile_says_what_to_install(target, platform, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    words = f"{target}', which needs: jaxops targets --install {platform}"
    with pytest.raises(lowering.CompileError, match=words):
        lowering.compile(scaled, X, Y, target=target)


def test_compiler_in_an_environment_of_its_own_comes_first(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert compilers.interpreter("tpu") == sys.executable
    python = compilers.environment("tpu") / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert compilers.interpreter("tpu") == str(python)
    assert f"tpu-jax{jax.__version__}-" in str(python)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert lowering.availability(named("tpu-v5e")) == "can compile for"
    assert lowering.availability(named("cuda-h100")) == "needs: jaxops targets --install cuda"


@pytest.mark.parametrize(("platform", "package"), [("tpu", "jax[tpu]"), ("cuda", "jax[cuda13-local]")])
def test_compilers_have_the_version_that_this_jax_pins(platform, package):
    requirements = compilers._requirements(compilers._COMPILERS[platform].extra)
    assert requirements[0] == f"{package}=={jax.__version__}"


@pytest.mark.slow  # makes an environment
def test_installation_that_fails_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr(compilers, "_requirements", lambda extra: ["./there-is-no-such-file.whl"])
    with pytest.raises(compilers.InstallError, match=r"pip cannot install \./there-is-no-such-file\.whl: ERROR"):
        compilers.install("tpu")
    assert not [*compilers.environment("tpu").parent.iterdir()]


def test_long_work_is_shown_on_a_terminal_and_nowhere_else(monkeypatch, capsys):
    lowering.compile(scaled, X, Y, target="cpu")
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    lowering.compile(scaled, X, Y, target="cpu")
    assert "compiling for cpu" in capsys.readouterr().err


def test_compile_refuses_symbolic_shapes():
    (rows,) = jax.export.symbolic_shape("rows")
    with pytest.raises(lowering.CompileError, match=r"args must have shapes of known sizes; got \(rows, 3\)"):
        lowering.compile(jnp.sin, jax.ShapeDtypeStruct((rows, 3), jnp.float32), target="cpu")


def test_compile_passes_on_what_an_operator_refuses():
    with pytest.raises(jaxops.BadParamError, match="nll_loss: labels must be integers"):
        lowering.compile(jaxops.nll_loss, X, jax.ShapeDtypeStruct((8,), jnp.float32), target="cpu")


@pytest.fixture
def with_compilers(monkeypatch):
    """As if every compiler were installed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


@pytest.mark.usefixtures("with_compilers")
def test_compile_refuses_another_number_of_devices():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    for target, chips in (("tpu-v5e", 1), ("tpu-v5e:4x4", 16)):
        with pytest.raises(
            lowering.CompileError, match=f"args must lie on {chips} devices, as .* has; got a mesh of 8"
        ):
            lowering.compile(lambda x: 2 * x, x, target=target)


def test_availability_of_the_device_in_hand():
    assert lowering.availability(named("cpu")) == "here"


HLO = """
  %ema_adam.1 = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/ema_adam/pallas_call"}
  %a.2 = f32[8]{0} custom-call(%y), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/while/ema_adam/pallas_call"}
  %b = f32[8]{0} custom-call(%z), custom_call_target="ConcatBitcast", metadata={op_name="jit(f)/concatenate/x"}
"""  # noqa: E501
COLLECTIVES = """
  %all-reduce.1 = f32[16,64]{1,0} all-reduce(%x), channel_id=1
  %r = (bf16[8]{0}, f32[]) all-reduce(%x, %y), channel_id=2
  %start = (bf16[4]{0}, bf16[16]{0}) all-gather-start(%x), channel_id=3
  %done = bf16[16]{0} all-gather-done(%start)
  %all-gather-of-users = f32[7]{0} add(%x, %y)
"""
PTXAS = {
    "one": """ptxas info    : Compiling entry function 'one_mosaic_gpu_kernel' for 'sm_90a'
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 79 registers, used 2 barriers
""",
    "two": """ptxas info    : Compiling entry function 'two' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers
""",
}
LAUNCH = """
    %121 = gpu.launch async [%5] threads(%arg5) in (%arg11 = %c384) dynamic_shared_memory_size %c114752_i32 {
    %122 = gpu.launch_func async [%9] @one::@one blocks in (%c1) dynamic_shared_memory_size %c1_i32 args(%84)
"""


def test_kernels_are_counted_by_name():
    assert _kernels(HLO) == {"ema_adam": 2}


def test_collectives_are_counted_with_the_bytes_of_their_results():
    expected = (Collective("all-gather", 1, 32), Collective("all-reduce", 2, 4096 + 16 + 4))
    assert _collectives(COLLECTIVES) == expected


def test_dumps_of_mosaic_gpu_are_read(tmp_path):
    for name, report in PTXAS.items():
        (tmp_path / f"{name}_0.ptxas").write_text(report)
        (tmp_path / f"{name}_0.mlir-passes.log").write_text(LAUNCH)
    (tmp_path / "one_0.sass_ctrl").write_text("EXIT")  # nvdisasm need not be there
    one, two = GpuResources("one", 79, 28, 114752, 2, "EXIT"), GpuResources("two", 40, 0, 114752, 0)
    assert gpu_resources(tmp_path) == [one, two]


@pytest.mark.slow
def test_compiler_process_is_kept_and_replaced_when_it_has_ended(tmp_path):
    def process_of_a_refusal(name):
        folder = tmp_path / name
        folder.mkdir()  # without a function to compile
        process.compile_folder(folder, "tpu")
        assert "request.json" in (folder / "error").read_text()
        return process._running["tpu"]

    first = process_of_a_refusal("first")
    assert process_of_a_refusal("second") is first
    first._process.kill()
    third = process_of_a_refusal("third")
    assert third is not first
    third.end()
    del process._running["tpu"]


def test_last_words_of_a_compiler_are_told(monkeypatch, tmp_path):
    dying = tmp_path / "dying"
    dying.write_text("#!/bin/sh\necho 'F0000 Check failed: too large' >&2\nexit 134\n")
    dying.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(dying))
    monkeypatch.setattr(sys.modules["lowering.compiling.compile"], "availability", lambda hardware: "can compile for")
    message = "tpu-v5e's compiler dies of scaled: F0000 Check failed: too large"
    with pytest.raises(lowering.CompileError, match=message):
        lowering.compile(scaled, X, Y, target="tpu-v5e")


ASKS = """
import os, subprocess, sys
child = [sys.executable, "-m", "lowering.compiling.child", str(os.getpid())]
print(subprocess.Popen(child, stdin=int(sys.argv[1])).pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_compiler_does_not_outlive_the_process_that_asked():
    """One that is killed cannot tell it, and a compiler at work does not see that its input has ended."""
    reading, writing = os.pipe()
    command, pipe = [sys.executable, "-c", ASKS, str(reading)], subprocess.PIPE
    with subprocess.Popen(command, pass_fds=[reading], stdin=pipe, stdout=pipe) as asking:
        child = pathlib.Path("/proc", asking.stdout.readline().decode().strip(), "cmdline")
        assert comes_true(lambda: b"lowering.compiling.child" in child.read_bytes())
        asking.kill()
    assert comes_true(lambda: not child.exists() or not child.read_bytes())
    os.close(writing)
    os.close(reading)


def comes_true(condition):
    ends = time.monotonic() + 60
    while not (fulfilled := condition()) and time.monotonic() < ends:
        time.sleep(0.1)
    return fulfilled
