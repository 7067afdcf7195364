"""Selection as a pure function: what is asked for, what kernels say, and what is taken."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice

import jaxops
import lowering
from lowering import select
from lowering.targets import here, named, of_device
from pallas_kernels.gpu import softmax
from pallas_kernels.gpu.linear_cross_entropy import exponentials
from pallas_kernels.hardware import Hardware
from pallas_kernels.kernel import Kernel
from pallas_kernels.softmax_groups import Groups

H100 = named("cuda-h100")
V5E = named("tpu-v5e")
CPU = named("cpu")


def refuses_float64(hardware: Hardware, x: jax.Array) -> str | None:
    return "takes no float64" if x.dtype == "float64" else None


TPU_KERNEL = Kernel("mosaic_tpu", "tpu", lambda x: x, refuses_float64)
GPU_KERNEL = Kernel("mosaic_gpu", "cuda", lambda x: x, refuses_float64, measured_on=frozenset({"cuda-h100"}))
KERNELS = (TPU_KERNEL, GPU_KERNEL)
FLOAT32 = jax.ShapeDtypeStruct((4,), jnp.dtype("float32"))
FLOAT64 = jax.ShapeDtypeStruct((4,), jnp.dtype("float64"))


def choose(request: str, hardware: Hardware, operand: jax.ShapeDtypeStruct = FLOAT32, **rest: str) -> select.Choice:
    return select.choose("op", KERNELS, request, hardware, [operand], {}, **rest)


@pytest.mark.parametrize(
    ("request_", "hardware", "implementation"),
    [
        ("auto", CPU, "reference"),
        ("auto", V5E, "reference"),
        ("auto", H100, "mosaic_gpu"),
        ("auto", named("cuda-b200"), "reference"),
        ("auto", named("cuda"), "reference"),
        ("reference", H100, "reference"),
        ("pallas", CPU, "reference"),
        ("pallas", V5E, "mosaic_tpu"),
        ("pallas:mosaic_gpu", H100, "mosaic_gpu"),
        ("interpret", CPU, "mosaic_tpu (interpreted)"),
        ("interpret:mosaic_gpu", CPU, "mosaic_gpu (interpreted)"),
    ],
)
def test_choose_takes_the_first_kernel_that_does_not_refuse(request_, hardware, implementation):
    assert choose(request_, hardware).implementation == implementation


def test_choose_keeps_every_refusal_with_its_reason():
    refusals = {refusal.kernel: refusal.reason for refusal in choose("auto", V5E).refusals}
    assert refusals == {"mosaic_tpu": "opt-in: not measured on this target", "mosaic_gpu": "runs on cuda only"}
    assert choose("auto", H100, FLOAT64).refusals[1] == select.Refusal("mosaic_gpu", "takes no float64")


@pytest.mark.parametrize(("request_", "hardware"), [("pallas", V5E), ("interpret", CPU), ("pallas:mosaic_gpu", CPU)])
def test_choose_raises_when_a_kernel_was_asked_for_and_all_refuse(request_, hardware):
    with pytest.raises(
        lowering.NotSupportedError, match=r"^op: implementation must be one that .* can take; got 'p?"
    ) as e:
        choose(request_, hardware, FLOAT64)
    assert e.value.status == 361001
    assert str(e.value).endswith(f': use("{request_}", op="reference") keeps it on its reference')
    assert "takes no float64" in str(e.value) or "runs on cuda only" in str(e.value)


def test_choose_takes_the_reference_where_no_kernel_can_be_used():
    choice = choose("auto", H100, placement_reason="split over devices")
    assert choice.kernel is None
    assert choice.refusals[1].reason == "split over devices"


def test_auto_asks_nothing_of_a_kernel_that_no_evidence_takes():
    asked = []
    kernel = Kernel("mosaic_tpu", "tpu", lambda x: x, refuses=lambda *_, **__: asked.append(1))
    choice = select.choose("op", (kernel,), "auto", V5E, [FLOAT32], {})
    assert (choice.implementation, asked) == ("reference", [])
    assert choice.refusals == (select.Refusal("mosaic_tpu", "opt-in: not measured on this target"),)


def test_use_nests_and_the_inner_one_wins():
    with lowering.use("pallas", embedding="reference"):
        assert lowering.current_selection().request("nll_loss") == "pallas"
        assert lowering.current_selection().request("embedding") == "reference"
        with lowering.use(nll_loss="interpret:mosaic_gpu"):
            assert lowering.current_selection().request("nll_loss") == "interpret:mosaic_gpu"
            assert lowering.current_selection().request("embedding") == "reference"
        with lowering.use("auto"):
            assert lowering.current_selection() == select.Selection()
    assert lowering.current_selection() == select.Selection()


def test_choose_leaves_an_operator_without_kernels_on_the_reference():
    choice = select.choose("op", (), "pallas:mosaic_gpu", H100, [FLOAT32], {})
    assert choice.implementation == "reference"


@pytest.mark.parametrize("wrong", ["fast", "auto:mosaic_tpu", "", "pallas:", 3])
def test_use_refuses_an_unknown_implementation(wrong):
    named = "emulate:tpu-v5e, emulate:tpu-v6e, emulate:tpu-v7x, or a kernel or form that `explain` names"
    words = f"use: implementation must be one of auto, .*interpret, {named}; got"
    with pytest.raises(ValueError, match=words), lowering.use(wrong):
        pytest.fail("entered the context")


def test_use_refuses_an_unknown_operator():
    words = r"use: operator must be one of \d+ names; got 'nl_loss', did you mean nll_loss\?"
    with pytest.raises(ValueError, match=words), lowering.use(nl_loss="pallas"):
        pytest.fail("entered the context")
    words = r"use: operator must be one of .*, nll_loss, .*; got 'something'"
    with pytest.raises(ValueError, match=words), lowering.use(something="pallas"):
        pytest.fail("entered the context")


def test_add_kernel_refuses_what_is_no_kernel():
    with pytest.raises(TypeError, match=r"kernel must be a pallas_kernels\.kernel\.Kernel; got 'mosaic_tpu'"):
        lowering.add_kernel(jaxops.operators()[0], "mosaic_tpu")


def test_use_is_part_of_the_cache_key_of_jit():
    traced_under = []

    @jax.jit
    def function(x):
        traced_under.append(lowering.current_selection().default)
        return x

    function(1.0)
    for _ in range(2):
        with lowering.use("reference"):
            function(1.0)
    function(1.0)
    assert traced_under == ["auto", "reference"]


def test_targets_are_found_by_name_and_by_device():
    assert of_device("cuda", AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")) is H100
    assert of_device("tpu", AbstractDevice("TPU v99", 3, "tpu")) == Hardware("tpu", "tpu", "TPU v99")
    assert here() is CPU
    with pytest.raises(ValueError, match=r"target must be one of cpu, tpu-v5e, .*; got 'tpu-v99'"):
        named("tpu-v99")


def a_gpu(kind, capability, cores):
    """What the runtime says of a GPU."""
    return types.SimpleNamespace(device_kind=kind, compute_capability=capability, core_count=cores)


@pytest.mark.parametrize(
    ("gpu", "softmax_refusal", "loss_refusal"),
    [
        (a_gpu("NVIDIA A10", "8.6", 72), "NVIDIA A10 has 8.6", "NVIDIA A10 has 8.6"),
        (a_gpu("NVIDIA GeForce RTX 5090", "12.0", 170), "NVIDIA GeForce RTX 5090 has 12.0", "5090 has 12.0"),
        (a_gpu("NVIDIA GB300", "10.3", 160), None, "NVIDIA GB300 has 10.3"),
        (a_gpu("NVIDIA H100 PCIe", "9.0", 114), None, None),
    ],
    ids=lambda gpu: getattr(gpu, "device_kind", ""),
)
def test_kernels_know_a_gpu_without_a_record_by_what_the_runtime_says(gpu, softmax_refusal, loss_refusal, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    x, weight = jax.ShapeDtypeStruct((4096, 256), jnp.bfloat16), jax.ShapeDtypeStruct((50257, 256), jnp.bfloat16)
    abstract = AbstractDevice(gpu.device_kind, gpu.core_count, "gpu")
    groups = Groups.along(x.shape, [1])
    for hardware in (here(), of_device("cuda", gpu), of_device("cuda", abstract)):
        assert (hardware.name, hardware.label, hardware.cores) == ("cuda", gpu.device_kind, gpu.core_count)
        of_softmax = softmax.KERNEL.refuses(hardware, x, log=False, groups=groups)
        of_loss = exponentials.refusal(hardware, x, weight)
        for reason, words in ((of_softmax, softmax_refusal), (of_loss, loss_refusal)):
            assert reason is None if words is None else reason.endswith(words)
        # As many thread blocks as multiprocessors, so that none waits for another to end.
        assert exponentials.configs(hardware, x, weight, 4096)[0]["workers"] == gpu.core_count


def test_an_absent_gpu_without_a_record_has_the_cores_that_its_mesh_says():
    hardware = of_device("cuda", AbstractDevice("NVIDIA H20", 78, "gpu"))
    assert (hardware.label, hardware.cores, hardware.compute_capability) == ("NVIDIA H20", 78, None)


def test_choose_leaves_the_reference_to_operators_whose_kernels_give_way():
    yielding = dataclasses.replace(TPU_KERNEL, gives_way=True)
    choice = select.choose("op", (yielding,), "pallas", V5E, [FLOAT64], {})
    assert (choice.implementation, choice.refusals[0].kernel) == ("reference", "mosaic_tpu")
    assert select.choose("op", (yielding,), "pallas", V5E, [FLOAT32], {}).implementation == "mosaic_tpu"
    with pytest.raises(lowering.NotSupportedError):
        select.choose("op", (yielding, TPU_KERNEL), "pallas", V5E, [FLOAT64], {})
