"""Selection as a pure function: what is asked for, what kernels say, and what is taken."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jaxops
import lowering
from lowering import select
from lowering.targets import here, named, of_device
from pallas_kernels.hardware import Hardware
from pallas_kernels.kernel import Kernel

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
    choice = select.choose("op", (), "pallas:mosaic_gpu", H100, FLOAT32, {})
    assert choice.implementation == "reference"


@pytest.mark.parametrize("wrong", ["fast", "auto:mosaic_tpu", "", "pallas:", 3])
def test_use_refuses_an_unknown_implementation(wrong):
    words = "use: implementation must be one of auto, reference, pallas, interpret; got"
    with pytest.raises(ValueError, match=words), lowering.use(wrong):
        pytest.fail("entered the context")


def test_use_refuses_an_unknown_operator():
    words = r"use: operator must be one of .*, nll_loss, .*; got 'nl_loss'"
    with pytest.raises(ValueError, match=words), lowering.use(nl_loss="pallas"):
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
    assert of_device("cuda", "NVIDIA H100 80GB HBM3") is H100
    assert of_device("cuda", "NVIDIA L4").name == "cuda"
    assert here() is CPU
    with pytest.raises(ValueError, match=r"target must be one of cpu, tpu-v5e, .*; got 'tpu-v99'"):
        named("tpu-v99")


def test_choose_leaves_the_reference_to_operators_whose_kernels_give_way():
    yielding = dataclasses.replace(TPU_KERNEL, gives_way=True)
    choice = select.choose("op", (yielding,), "pallas", V5E, [FLOAT64], {})
    assert (choice.implementation, choice.refusals[0].kernel) == ("reference", "mosaic_tpu")
    assert select.choose("op", (yielding,), "pallas", V5E, [FLOAT32], {}).implementation == "mosaic_tpu"
    with pytest.raises(lowering.NotSupportedError):
        select.choose("op", (yielding, TPU_KERNEL), "pallas", V5E, [FLOAT64], {})
