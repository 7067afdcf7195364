"""`aclnn.apply_fused_ema_adam`: the documented call, against values worked from the document."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowering
from jaxops._checks.arguments import BadParamError
from jaxops.aclnn.ema_adam import apply_fused_ema_adam

ATTRIBUTES = {"lr": 1e-3, "ema_decay": 0.5, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.5}


def oracle(grad, var, m, v, s, step, *, lr, ema_decay, beta1, beta2, eps, weight_decay, mode=1, bias_correction=True):
    grad, var, m, v, s = (np.asarray(x).astype(np.float64) for x in (grad, var, m, v, s))
    c1, c2 = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    g = grad + weight_decay * var if mode == 0 else grad
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    u = (m / c1) / (np.sqrt(v / c2) + eps) + (weight_decay * var if mode == 1 else 0)
    var = var - lr * u
    return var, m, v, ema_decay * s + (1 - ema_decay) * var


def documented_operands(dtype="float32"):
    """1 to 8 in (2, 2, 2), as in the document's example."""
    return (np.arange(1, 9, dtype=np.float32).reshape(2, 2, 2).astype(jnp.dtype(dtype)),) * 5


@pytest.mark.parametrize("bias_correction", [True, False], ids=["corrected", "uncorrected"])
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_aclnn_ema_adam_agrees_with_the_document(dtype, mode, bias_correction):
    operands = documented_operands(dtype)
    attributes = {**ATTRIBUTES, "mode": mode, "bias_correction": bias_correction}
    results = apply_fused_ema_adam(*operands, np.asarray([4]), **attributes)
    assert isinstance(results, tuple)
    for result, truth in zip(results, oracle(*operands, 4, **attributes), strict=True):
        assert (result.shape, result.dtype) == ((2, 2, 2), dtype)
        rtol = 0.501 * float(jnp.finfo(dtype).eps) + 1e-6
        np.testing.assert_allclose(np.asarray(result).astype(np.float64), truth, rtol=rtol)


def test_aclnn_ema_adam_of_known_values():
    """Decays of 0 make the direction the sign of the gradient; each value below is exact."""
    settings = {"lr": 0.5, "ema_decay": 0.75, "beta1": 0.0, "beta2": 0.0, "eps": 0.0, "weight_decay": 0.5}
    grad, var, zero = jnp.asarray([2.0, -4.0]), jnp.asarray([1.0, 2.0]), jnp.zeros((2,))
    decoupled = apply_fused_ema_adam(grad, var, zero, zero, zero, 1, **settings, mode=1)
    assert [x.tolist() for x in decoupled] == [[0.25, 2.0], [2.0, -4.0], [4.0, 16.0], [0.0625, 0.5]]
    coupled = apply_fused_ema_adam(grad, var, zero, zero, zero, 1, **settings, mode=0)
    assert [x.tolist() for x in coupled] == [[0.5, 2.5], [2.5, -3.0], [6.25, 9.0], [0.125, 0.625]]


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32"])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 2)], ids=str)
def test_aclnn_ema_adam_reads_the_first_step_only(dtype, shape):
    operands = documented_operands()
    step = np.full(shape, 9, dtype)
    step.flat[0] = 3
    results = apply_fused_ema_adam(*operands, step, **ATTRIBUTES)
    for result, truth in zip(results, oracle(*operands, 3, **ATTRIBUTES), strict=True):
        np.testing.assert_allclose(result, truth, rtol=1e-6)


def test_aclnn_ema_adam_takes_attributes_as_arrays():
    operands = documented_operands()
    call = jax.jit(lambda step, **attributes: apply_fused_ema_adam(*operands, step, **attributes))
    results = call(3, **{name: jnp.float32(value) for name, value in ATTRIBUTES.items()})
    for result, truth in zip(results, oracle(*operands, 3, **ATTRIBUTES), strict=True):
        np.testing.assert_allclose(result, truth, rtol=1e-5)


def test_aclnn_ema_adam_step_zero_is_infinite_or_nan():
    grad = jnp.asarray([1.0, 0.0])
    zero = jnp.zeros((2,))
    var, m, v, s = apply_fused_ema_adam(grad, zero, zero, zero, zero, 0, **ATTRIBUTES)
    assert not np.any(np.isfinite(var))
    assert not np.any(np.isfinite(s))
    np.testing.assert_allclose(m, [0.1, 0], rtol=1e-6)
    np.testing.assert_allclose(v, [0.001, 0], rtol=1e-6)
    finite = apply_fused_ema_adam(grad, zero, zero, zero, zero, 0, **ATTRIBUTES, bias_correction=False)
    assert all(np.all(np.isfinite(x)) for x in finite)


@pytest.mark.parametrize("shape", [(0,), (2, 0, 3)], ids=str)
def test_aclnn_ema_adam_returns_empty_tensors(shape):
    empty = jnp.zeros(shape, "bfloat16")
    for result in apply_fused_ema_adam(empty, empty, empty, empty, empty, 1, **ATTRIBUTES):
        assert (result.shape, result.dtype) == (shape, jnp.bfloat16)


ARRAY, HALF = jnp.ones((4,)), jnp.ones((4,), "float16")
REFUSALS = [
    *(({name: None}, 161001, f"{name} must be given; got None") for name in ("grad", "var", "m", "v", "s", "step")),
    ({"grad": None, "var": HALF, "mode": 7}, 161001, "grad must be given; got None"),
    (
        {"grad": jnp.ones((4,), "int32")},
        161002,
        "grad must have one of the dtypes float32, float16, bfloat16; got int32[4]",
    ),
    ({"v": HALF, "mode": 7}, 161002, "v must have grad's dtype float32; got float16[4]"),
    ({"step": jnp.ones((1,))}, 161002, "step must have an integer dtype; got float32[1]"),
    ({"step": jnp.ones((1,), bool)}, 161002, "step must have an integer dtype; got bool[1]"),
    ({"mode": 2, "m": jnp.ones((3,))}, 161002, "mode must be 0 or 1; got 2"),
    ({"lr": None}, 161002, "lr must be a finite number or a 0-d array of one; got None"),
    ({"eps": "a"}, 161002, "eps must be a finite number or a 0-d array of one; got 'a'"),
    ({"beta1": np.ones(1)}, 161002, "beta1 must be a finite number or a 0-d array of one; got float64[1]"),
    (
        {"beta2": jnp.bfloat16(0.999)},
        161002,
        "beta2 must be at least float32: in 16 bits a decay near 1 is 1; got bfloat16[]",
    ),
    ({"bias_correction": "no"}, 161002, "bias_correction must be a bool; got 'no'"),
    ({"mode": [1]}, 161002, "mode must be 0 or 1; got [1]"),
    ({"mode": "l2"}, 161002, "mode must be 0 or 1; got 'l2'"),
    ({"grad": jnp.ones(())}, 161002, "grad must have rank 1 to 8; got float32[]"),
    ({"grad": jnp.ones((1,) * 9)}, 161002, f"grad must have rank 1 to 8; got float32{[1] * 9}"),
    ({"s": jnp.ones((4, 1))}, 161002, "s must have grad's shape [4]; got float32[4, 1]"),
    ({"step": jnp.ones((0,), "int32")}, 161002, "step must have at least one element; got int32[0]"),
]


@pytest.mark.parametrize(("changes", "status", "words"), REFUSALS, ids=[words.split(";")[0] for *_, words in REFUSALS])
def test_aclnn_ema_adam_refuses(changes, status, words):
    names = ("grad", "var", "m", "v", "s", "step")
    values = {**dict.fromkeys(names, ARRAY), "step": jnp.asarray([1]), "mode": 1, **ATTRIBUTES, **changes}
    operands = [values.pop(name) for name in names]
    call = functools.partial(apply_fused_ema_adam, **values)
    for attempt in (call, jax.jit(call), functools.partial(lowering.explain, call)):
        with pytest.raises(BadParamError) as refusal:
            attempt(*operands)
        assert str(refusal.value) == f"apply_fused_ema_adam: {words}"
        assert refusal.value.status == status


def test_aclnn_ema_adam_refuses_float64():
    with jax.enable_x64(True):
        wide = jnp.ones((4,), "float64")
        with pytest.raises(BadParamError, match="got float64"):
            apply_fused_ema_adam(wide, wide, wide, wide, wide, 1, **ATTRIBUTES)
