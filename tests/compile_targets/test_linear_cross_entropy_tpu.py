"""The linear cross entropy kernels compiled by the real XLA:TPU and Mosaic compilers; run with `-m tpu_compile`."""

import functools

import jax
import jax.numpy as jnp
import pytest

import lowering
from jaxops import aclnn
from jaxops.linear_cross_entropy import linear_cross_entropy
from jaxops.linear_cross_entropy.operands import Columns, CotangentTerms, Needs, Rows
from pallas_kernels.tpu.linear_cross_entropy import backward, statistics

pytestmark = pytest.mark.tpu_compile

F32, BF16 = "float32", "bfloat16"
CASES = {  # rows, features, classes, dtype, attributes
    "small": (2048, 512, 32000, F32, {}),
    "llama3": (16384, 4096, 128256, BF16, {}),
    "gemma2": (8192, 2304, 256000, BF16, {"softcap": 30.0}),
    "gpt2": (1000, 768, 50257, BF16, {"z_loss": 1e-4, "label_smoothing": 0.1, "bias": True}),
    "odd": (13, 100, 2050, BF16, {"label_smoothing": 0.1, "bias": True, "softcap": 5.0}),
    "row": (1, 100, 1000, F32, {"bias": True}),
    "least": (1, 1, 1, BF16, {}),
}


def compile_for(target, fn, *operands):
    with lowering.use("pallas"):
        return lowering.compile(fn, *operands, target=target)


def array(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


FORWARD = {"linear_cross_entropy": 1}
BACKWARD = {"linear_cross_entropy_x_grad": 1, "linear_cross_entropy_weight_grad": 1}


def make_loss(attributes, **options):
    """The loss of x, weight, labels and, where attributes ask for it, bias."""
    attributes = {name: value for name, value in attributes.items() if name != "bias"}

    def loss(x, weight, labels, bias=None):
        options_too = {"strategy": "recompute", **attributes, **options}
        return linear_cross_entropy(x, weight, labels, bias=bias, **options_too)

    return loss


def operands_of(rows, features, classes, dtype, attributes):
    x, weight = (array(size, features, dtype=dtype) for size in (rows, classes))
    return x, weight, array(rows, dtype="int32"), *([array(classes)] if attributes.get("bias") else [])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_linear_cross_entropy_compiles_without_logits(tpu, case):
    rows, features, classes, dtype, attributes = case
    operands = operands_of(*case)
    differentiated = (0, 1, 3) if attributes.get("bias") else (0, 1)
    report = compile_for(tpu, jax.value_and_grad(make_loss(attributes), differentiated), *operands)
    assert report.kernels == FORWARD | BACKWARD
    # x without the rows that are skipped, and its gradient with them; neither a copy of the weight, nor more than a
    # hundredth of the logits.
    copies_of_x = 2 * rows * features * jnp.dtype(dtype).itemsize
    assert report.memory.temporaries < copies_of_x + max(4 * rows * classes // 100, 2**23)


IN_CHUNKS = {
    "odd": (1300, 100, 2050, F32, {"label_smoothing": 0.1, "bias": True}),
    "even": (2048, 512, 32768, BF16, {"softcap": 30.0}),
}


@pytest.mark.parametrize("case", IN_CHUNKS.values(), ids=IN_CHUNKS)
def test_linear_cross_entropy_compiles_with_gradients_in_the_forward_pass(tpu, case):
    rows, features, classes, _, attributes = case
    differentiated = (0, 1, 3) if attributes.get("bias") else (0, 1)
    loss = make_loss(attributes, strategy="grad_in_forward", chunk_rows=min(512, rows))
    report = compile_for(tpu, jax.value_and_grad(loss, differentiated), *operands_of(*case))
    assert report.kernels == {"linear_cross_entropy_exponentials": 1}
    # The weight's gradient in float32; where rows are computed again, theirs, the sum in bfloat16, and 2^24 logits at
    # a time with their exponentials and cotangents.
    assert report.memory.temporaries < (2 * 4 + 2) * classes * features + 3 * 4 * 2**24


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_linear_cross_entropy_compiles_with_aux(tpu, dtype):
    report = compile_for(tpu, make_loss({}, return_aux=True), *operands_of(500, 384, 2050, dtype, {}))
    assert report.kernels == FORWARD


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_linear_cross_entropy_compiles_with_features_in_parts(tpu, dtype):
    sizes = {"block_hidden": 512}
    forward = functools.partial(statistics.run, config={**sizes, "block_rows": 128, "block_vocab": 256})
    back = functools.partial(backward.run, config={**sizes, "block_staying": 256, "block_streaming": 128})
    x, weight, labels, bias = operands_of(300, 1300, 777, dtype, {"bias": True})
    operands = Rows(x, labels), Columns(weight, bias)
    assert compile_for(tpu, functools.partial(forward, softcap=None, metrics=False), *operands).kernels == FORWARD
    back = functools.partial(back, needs=Needs(x=True, weight=True, bias=True), softcap=None)
    assert compile_for(tpu, back, CotangentTerms(*[array(300)] * 4), *operands).kernels == BACKWARD


@pytest.mark.parametrize("tpu", ["tpu-v5e", "tpu-v6e"], indirect=True)  # matrix units of 128 and of 256 rows
def test_linear_cross_entropy_compiles_in_full_precision(tpu):
    case = (300, 512, 2050, F32, {})
    with jax.default_matmul_precision("highest"):
        report = compile_for(tpu, jax.grad(make_loss({}), (0, 1)), *operands_of(*case))
    assert report.kernels == FORWARD | BACKWARD


@pytest.mark.parametrize(("rows", "features", "classes"), [(77, 100, 1000), (4096, 1024, 16032)])
def test_aclnn_linear_cross_entropy_compiles(tpu, rows, features, classes):
    def calls(x, weight, target, grad):
        limits = {"vocab_start_index": classes, "vocab_end_index": 2 * classes}
        own = aclnn.fused_linear_online_max_sum(x, weight, target, **limits)
        statistics = {"logits_max": own.logits_max_local, "sum_exp_logits": own.sum_exp_logits_local}
        masks = own.target_mask, own.masked_target
        return own, aclnn.fused_linear_cross_entropy_loss_grad(grad, x, weight, *masks, **statistics)

    operands = operands_of(rows, features, classes, BF16, {})
    assert compile_for(tpu, calls, *operands, array(rows)).kernels == FORWARD | BACKWARD
