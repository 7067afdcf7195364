"""Linear cross entropy for Hopper, compiled by the real NVIDIA compilers: kernels, registers, spills, temporaries."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import lowering
from jaxops.linear_cross_entropy import linear_cross_entropy
from jaxops.linear_cross_entropy.logits import Needs
from lowering.targets import named
from pallas_kernels.gpu.linear_cross_entropy import gradients, statistics

pytestmark = pytest.mark.cuda_compile

H100 = named("cuda-h100")
BF16, F16, F32 = "bfloat16", "float16", "float32"
SHAPES = {  # rows, hidden, classes
    "llama": (16384, 4096, 128256),
    "gpt2": (8192, 768, 50257),
    "odd": (100, 200, 1000),
}
FORMS = {  # softcap, metrics, bias, target
    "plain": (None, False, False, False),
    "bias": (None, False, True, False),
    "softcap": (30.0, False, False, False),
    "target": (None, False, False, True),
    "everything": (30.0, True, True, True),
}
# From JAX 0.12 ptxas ignores Mosaic GPU's requests for registers, those of JAX's own kernels too: a thread has 168, and
# what is added up beside the logits does not fit.
GETS_REGISTERS = jax.__version_info__ < (0, 12)


@pytest.fixture
def ptxas_reports(tmp_path, monkeypatch):
    """Returns what ptxas has said of the kernels compiled so far."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    return lambda: [path.read_text(errors="replace") for path in sorted(tmp_path.glob("*.ptxas"))]


def compiled(sharding, function, *shapes_and_dtypes):
    operands = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in shapes_and_dtypes]
    return jax.jit(function).lower(*operands).compile()


def spilled_bytes(report):
    assert int(re.search(r"Used (\d+) registers", report).group(1)) <= 168  # as launched; warpgroups trade them then
    return int(re.search(r"(\d+) bytes spill stores", report).group(1))


def operands_of(shape, form, dtype):
    rows, hidden, classes = shape
    _, _, has_bias, has_target = form
    return (
        ((rows, hidden), dtype),
        ((classes, hidden), dtype),
        ((classes * has_bias,), F32),
        ((rows,), "int32"),
        ((classes * has_target,), F32),
        ((rows, 0), F32),
    )


def configs_of(kernel, operands, **params):
    return kernel.configs(H100, *(jax.ShapeDtypeStruct(*operand) for operand in operands), **params)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_linear_cross_entropy_statistics_compile_in_registers(h100_sharding, form, shape, ptxas_reports):
    softcap, metrics, *_ = FORMS[form]
    operands = operands_of(SHAPES[shape], FORMS[form], BF16)
    params = {"softcap": softcap, "metrics": metrics}
    config = configs_of(statistics.KERNEL, operands, **params)[0]
    program = compiled(h100_sharding, functools.partial(statistics.run, config=config, **params), *operands)
    assert program.as_text().count('custom_call_target="mosaic_gpu_v2"') == 1
    (report,) = ptxas_reports()
    limit = {"target": 32, "everything": 128} if GETS_REGISTERS else {"bias": 192, "target": 512, "everything": 1536}
    assert spilled_bytes(report) <= limit.get(form, 0 if GETS_REGISTERS else 16)
    _, hidden, classes = SHAPES[shape]
    copied = 2 * classes * hidden * (classes % 8 > 0 or hidden % 64 > 0)
    assert program.memory_analysis().temp_size_in_bytes <= 64 * 2**20 + 1.1 * copied


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_linear_cross_entropy_gradients_compile_in_registers(h100_sharding, form, shape, ptxas_reports):
    softcap, metrics, has_bias, _ = FORMS[form]
    rows = SHAPES[shape][0]
    operands = (*[((rows,), F32)] * 6, *operands_of(SHAPES[shape], FORMS[form], BF16), ((rows, 0), F32))
    params = {"softcap": softcap, "metrics": metrics, "needs": Needs(True, True, has_bias, False, False)}
    config = configs_of(gradients.KERNEL, operands, **params)[0]
    program = compiled(h100_sharding, functools.partial(gradients.run, config=config, **params), *operands)
    # One for whole chunks of the vocabulary, in a loop, and one for the rest.
    classes, chunk = SHAPES[shape][2], config["chunk_columns"]
    launches = 1 if classes <= chunk or classes % chunk == 0 else 2
    assert program.as_text().count('custom_call_target="mosaic_gpu_v2"') == launches
    limit = {"odd": 32} if GETS_REGISTERS else {"everything": 1024}
    spilled = max(spilled_bytes(report) for report in ptxas_reports())
    assert spilled <= (limit.get(shape, 0) if GETS_REGISTERS else limit.get(form, 128))
    assert program.memory_analysis().temp_size_in_bytes <= 1.5e9


@pytest.mark.parametrize("index", range(4))
def test_linear_cross_entropy_configs_compile(h100_sharding, index):
    operands = operands_of(SHAPES["gpt2"], FORMS["plain"], F16)
    params = {"softcap": None, "metrics": False}
    config = configs_of(statistics.KERNEL, operands, **params)[index]
    compiled(h100_sharding, functools.partial(statistics.run, config=config, **params), *operands)
    operands = (*[(operands[3][0], F32)] * 6, *operands, operands[5])
    params["needs"] = Needs(True, True, False, False, False)
    config = configs_of(gradients.KERNEL, operands, **params)[index]
    compiled(h100_sharding, functools.partial(gradients.run, config=config, **params), *operands)


def test_linear_cross_entropy_trains_within_three_gigabytes(h100_sharding):
    """Loss and gradients of a large model's last layer, as a user asks for them; the logits alone are 8.4 GB."""
    rows, hidden, classes = SHAPES["llama"]

    def loss(x, weight, labels):
        return linear_cross_entropy(x, weight, labels, strategy="recompute", z_loss=1e-4)

    shapes = (((rows, hidden), BF16), ((classes, hidden), BF16), ((rows,), jnp.int32))
    with lowering.use("pallas"):
        program = compiled(h100_sharding, jax.value_and_grad(loss, (0, 1)), *shapes)
    assert program.as_text().count('custom_call_target="mosaic_gpu_v2"') == 3
    assert program.memory_analysis().temp_size_in_bytes < 3e9
