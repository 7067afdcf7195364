"""The EMA-Adam operator: against the documented formula in NumPy float64, and the promises of every operator."""

import functools
import re

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowering
from jaxops import ema_adam, ema_params, fused_apply
from jaxops._checks.arguments import BadParamError
from jaxops._checks.dtypes import accumulation_dtype
from jaxops.ema_adam.operator import APPLY_FUSED_EMA_ADAM, Coefficients, step_coefficients
from pallas_kernels import ema_adam_update

HYPERPARAMETERS = {
    "learning_rate": 1e-2,
    "ema_decay": 0.9999,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "bias_correction": True,
}
DTYPES = {  # of grad, var, m, v, s
    "float32": ("float32",) * 5,
    "bfloat16": ("bfloat16",) * 5,
    "float16": ("float16",) * 5,
    "mixed": ("bfloat16", "bfloat16", "float32", "float32", "float16"),
}


def oracle(
    grad,
    var,
    m,
    v,
    s,
    *,
    step,
    mode,
    output,
    learning_rate,
    ema_decay,
    beta1,
    beta2,
    eps,
    weight_decay,
    bias_correction,
):
    """The formula of the document, in float64 on what the operands hold."""
    grad, var, m, v, s = (np.asarray(x).astype(np.float64) for x in (grad, var, m, v, s))
    c1, c2 = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    g = grad + weight_decay * var if mode == "l2" else grad
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    with np.errstate(divide="ignore", invalid="ignore"):
        u = (m / c1) / (np.sqrt(v / c2) + eps)
    if mode == "adamw":
        u = u + weight_decay * var
    new_var = var - learning_rate * u
    s = ema_decay * s + (1 - ema_decay) * new_var
    return (new_var if output == "params" else -learning_rate * u), m, v, s


def draw(rng, shape, dtypes=DTYPES["float32"]):
    grad, var, m, s = (rng.normal(size=shape) for _ in range(4))
    values = grad, var, m, rng.uniform(0.1, 1, size=shape), s
    return tuple(jnp.asarray(value, dtype) for value, dtype in zip(values, dtypes, strict=True))


def take_step(*operands, step=3, mode="adamw", output="params", **changes):
    dtype = "float64" if operands[1].dtype == np.float64 else "float32"
    coefficients = step_coefficients(jnp.int32(step), dtype, **{**HYPERPARAMETERS, **changes})
    return APPLY_FUSED_EMA_ADAM(*operands, coefficients, mode=mode, output=output)


def assert_correct(results, operands, *, step=3, mode="adamw", output="params", **changes):
    expected = oracle(*operands, step=step, mode=mode, output=output, **{**HYPERPARAMETERS, **changes})
    for name, result, truth, operand in zip(("first", "m", "v", "s"), results, expected, operands[1:], strict=True):
        assert result.shape == operand.shape, name
        assert result.dtype == operand.dtype, name
        # One rounding to the stored dtype, after a few of the arithmetic.
        rtol = 0.501 * float(jnp.finfo(result.dtype).eps) + (1e-14 if result.dtype == np.float64 else 1e-6)
        atol = float(jnp.finfo(result.dtype).smallest_subnormal) + (1e-15 if result.dtype == np.float64 else 2e-7)
        np.testing.assert_allclose(np.asarray(result).astype(np.float64), truth, rtol=rtol, atol=atol, err_msg=name)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 0, 2), (5, 3), (2, 1, 2, 1, 2, 1, 2, 3)], ids=str)
def test_ema_adam_takes_any_shape(shape, rng):
    operands = draw(rng, shape)
    assert_correct(take_step(*operands), operands)


@pytest.mark.parametrize("output", ["params", "update"])
@pytest.mark.parametrize("mode", ["adamw", "l2"])
@pytest.mark.parametrize("dtypes", DTYPES)
def test_ema_adam_agrees_with_float64(dtypes, mode, output, rng):
    operands = draw(rng, (9, 45), DTYPES[dtypes])
    assert_correct(take_step(*operands, mode=mode, output=output), operands, mode=mode, output=output)


@pytest.mark.parametrize("mode", ["adamw", "l2"])
def test_ema_adam_in_float64(mode, rng):
    with jax.enable_x64(True):
        operands = draw(rng, (40,), ("float32", *("float64",) * 4))
        assert_correct(take_step(*operands, mode=mode), operands, mode=mode)


@pytest.mark.parametrize("step", [1, 2, 1000, 10**6, 2**31 - 1])
def test_ema_adam_corrects_bias_at_any_step(step, rng):
    operands = draw(rng, (16,))
    assert_correct(take_step(*operands, step=step), operands, step=step)


@pytest.mark.parametrize(("beta1", "beta2"), [(0.0, 0.0), (0.0, 0.999), (0.9, 0.999999), (0.5, 1e-30)])
def test_ema_adam_takes_extreme_decays(beta1, beta2, rng):
    operands = draw(rng, (16,))
    for step in (1, 5):
        results = take_step(*operands, step=step, beta1=beta1, beta2=beta2)
        assert_correct(results, operands, step=step, beta1=beta1, beta2=beta2)


def test_ema_adam_without_bias_correction(rng):
    operands = draw(rng, (16,))
    assert_correct(take_step(*operands, bias_correction=False), operands, bias_correction=False)


@pytest.mark.parametrize("beta", [0.0, 0.9, 0.999])
def test_ema_adam_step_zero_divides_by_zero(beta, rng):
    """As documented: no clamping. 0^0 is 1, so that holds for a decay of 0 too."""
    operands = draw(rng, (16,))
    var, m, v, s = take_step(*operands, step=0, beta1=beta, beta2=beta)
    assert not np.any(np.isfinite(var))
    assert not np.any(np.isfinite(s))
    assert np.all(np.isfinite(m))
    assert np.all(np.isfinite(v))


def test_ema_adam_negative_second_moment_is_nan_in_its_element_only(rng):
    grad, var, m, v, s = draw(rng, (8,))
    grad, v = grad.at[2].set(0), v.at[2].set(-1.0)
    results = take_step(grad, var, m, v, s)
    assert np.flatnonzero(np.isnan(results[0])).tolist() == [2]
    assert np.flatnonzero(np.isnan(results[3])).tolist() == [2]
    assert not np.any(np.isnan(results[1]))
    assert not np.any(np.isnan(results[2]))


@pytest.mark.parametrize("grad", [1e-4, 6e4])
def test_ema_adam_keeps_the_chain_unrounded(grad):
    """A v' that float16 cannot hold, small or large, does not disturb the step; s' follows the unrounded var'."""
    values = (grad, 1.0, 0.0, 0.0, 0.0)
    operands = tuple(jnp.full((4,), value, "float16") for value in values)
    results = take_step(*operands, beta2=0.9, ema_decay=0.5)
    stored_v = np.asarray(results[2], np.float32)
    assert np.all(np.isinf(stored_v)) if grad > 1 else not np.any(stored_v)
    with np.errstate(over="ignore"):
        expected = oracle(
            *operands, step=3, mode="adamw", output="params", **{**HYPERPARAMETERS, "beta2": 0.9, "ema_decay": 0.5}
        )
        for result, truth in zip((results[0], results[3]), (expected[0], expected[3]), strict=True):
            np.testing.assert_array_equal(np.asarray(result), truth.astype(np.float16))


def test_ema_adam_decouples_decay_from_the_old_parameters():
    """var' = 1 - 0.5 (1 + 0.5 * 1) with a unit Adam direction; decaying the new parameters would give another value."""
    one, zero = jnp.ones((1,)), jnp.zeros((1,))
    settings = {"learning_rate": 0.5, "beta1": 0.0, "beta2": 0.0, "eps": 0.0, "weight_decay": 0.5, "ema_decay": 0.75}
    var, m, v, s = take_step(one, one, zero, zero, zero, step=1, **settings)
    assert (var.item(), m.item(), v.item(), s.item()) == (0.25, 1.0, 1.0, 0.0625)


@pytest.mark.parametrize("array", [False, True], ids=["numbers", "arrays"])
def test_step_coefficients_keep_the_digits_of_complements(array):
    decays = {"ema_decay": 0.9999, "beta1": 0.9, "beta2": 0.999}
    given = {name: jnp.float32(value) if array else value for name, value in decays.items()}
    packed = Coefficients(*np.asarray(step_coefficients(jnp.int32(1), "float32", **{**HYPERPARAMETERS, **given})))
    held = {name: float(np.float32(value)) if array else value for name, value in decays.items()}
    for name, decay in (("ema_gain", "ema_decay"), ("gain1", "beta1"), ("gain2", "beta2"), ("correction2", "beta2")):
        np.testing.assert_allclose(getattr(packed, name), 1 - held[decay], rtol=2e-7, err_msg=name)


@pytest.mark.parametrize("dtype", ["int32", "complex64"])
def test_init_names_the_parameter_that_it_refuses(dtype):
    params = {"layer": {"kernel": jnp.ones(2), "steps": jnp.ones(3, dtype)}}
    with pytest.raises(BadParamError, match=re.escape("params must have a floating dtype at ['layer']['steps']")):
        ema_adam(1e-3).init(params)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "int32"])
def test_step_coefficients_take_any_integer_step(dtype):
    packed = Coefficients(*step_coefficients(jnp.asarray(100, dtype), "float32", **HYPERPARAMETERS))
    np.testing.assert_allclose(packed.correction2, 1 - 0.999**100, rtol=2e-7)


def test_coefficients_have_the_order_of_the_kernels():
    assert Coefficients._fields == ema_adam_update.COEFFICIENTS


def test_ema_adam_gradient_is_finite_where_nothing_has_moved():
    """At v' = 0 the square root has no derivative; parameters that never had a gradient must not spread NaN."""
    zero = jnp.zeros((3,))

    def total(grad, var):
        return sum(jnp.sum(result) for result in take_step(grad, var, zero, zero, zero))

    for gradient in jax.grad(total, (0, 1))(zero, jnp.ones((3,))):
        assert np.all(np.isfinite(gradient))


COEFFICIENTS = jnp.asarray([1e-2, 0.9, 0.1, 0.9, 0.1, 0.99, 0.01, 0.271, 0.0297, 1e-3, 0.1], jnp.float32)
CASES = [
    contract.Case(
        name=f"{mode}-{output}",
        fn=functools.partial(
            lambda *operands, **params: APPLY_FUSED_EMA_ADAM(
                *operands, COEFFICIENTS.astype(accumulation_dtype(operands[1].dtype)), **params
            ),
            mode=mode,
            output=output,
        ),
        operands=lambda rng: tuple(np.asarray(x) for x in draw(rng, (16, 2))),
        differentiable=(0, 1, 2, 3, 4),
        batched=(0, 0, 0, 0, 0),
        operator="apply_fused_ema_adam",
    )
    for mode, output in (("adamw", "params"), ("l2", "update"))
] + [
    contract.Case(
        name="coefficients",
        fn=functools.partial(APPLY_FUSED_EMA_ADAM, mode="adamw", output="params"),
        operands=lambda rng: (*(np.asarray(x) for x in draw(rng, (16,))), np.asarray(COEFFICIENTS)),
        differentiable=(5,),
        batched=(0, 0, 0, 0, 0, None),
        operator="apply_fused_ema_adam",
    ),
    contract.Case(
        name="kernel",
        fn=functools.partial(APPLY_FUSED_EMA_ADAM, mode="adamw", output="params"),
        operands=lambda rng: (*(np.asarray(x) for x in draw(rng, (16, 3))), np.asarray(COEFFICIENTS)),
        differentiable=(),
        batched=(0, 0, 0, 0, 0, None),
        operator="apply_fused_ema_adam",
        implementation="interpret:mosaic_tpu",
    ),
]


@pytest.mark.parametrize("promise", contract.PROMISES, ids=contract.promise_name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ema_adam_keeps_promise(case, promise):
    promise(case)


ARRAY = jnp.ones((4,))
REFUSALS = [
    ("grad", {"grad": jnp.ones((4,), jnp.int32)}, "have a floating dtype; got int32[4]"),
    ("v", {"v": jnp.ones((4,), jnp.complex64)}, "have a floating dtype; got complex64[4]"),
    ("mode", {"mode": "adam"}, "be one of adamw, l2; got 'adam'"),
    ("output", {"output": "both"}, "be one of params, update; got 'both'"),
    ("s", {"s": jnp.ones((4, 1))}, "have grad's shape [4]; got float32[4, 1]"),
    ("coefficients", {"coefficients": jnp.ones((10,))}, "be float32[11]; got float32[10]"),
    ("coefficients", {"coefficients": jnp.ones((11,), jnp.bfloat16)}, "be float32[11]; got bfloat16[11]"),
]


@pytest.mark.parametrize(("argument", "changes", "words"), REFUSALS, ids=lambda x: x if isinstance(x, str) else "")
def test_ema_adam_refuses(argument, changes, words):
    names = ("grad", "var", "m", "v", "s", "coefficients")
    values = {**dict.fromkeys(names, ARRAY), "coefficients": COEFFICIENTS, "mode": "l2", "output": "params", **changes}
    call = functools.partial(APPLY_FUSED_EMA_ADAM, mode=values["mode"], output=values["output"])
    operands = [values[name] for name in names]
    for attempt in (call, jax.jit(call), functools.partial(lowering.explain, call)):
        with pytest.raises(BadParamError) as refusal:
            attempt(*operands)
        assert str(refusal.value) == f"apply_fused_ema_adam: {argument} must {words}"
        assert refusal.value.status == 161002


def step_of(**attributes):
    """One step, which calls the functions that the attributes are."""
    optimizer = ema_adam(**{"learning_rate": 0.1, **attributes})
    return optimizer.update(jnp.ones(2), optimizer.init(jnp.ones(2)), jnp.ones(2))


def raising(_):
    raise KeyError("first line\nsecond line")


NOT_CALLABLE_SO = {
    "raises": (raising, "one that raises KeyError: 'first line"),
    "no-argument": (lambda: 0.1, "one that raises TypeError: "),
    "two-arguments": (lambda count, more: 0.1, "one that raises TypeError: "),
    "needs-the-value": (lambda count: 0.1 if count > 3 else 0.2, "one that raises "),
    "text": (lambda count: "0.1", "'0.1'"),
    "none": (lambda count: None, "None"),
    "three": (lambda count: jnp.ones(3), "float32[3]"),
}


@pytest.mark.parametrize("argument", ["learning_rate", "ema_decay", "mask"])
@pytest.mark.parametrize("name", NOT_CALLABLE_SO)
def test_ema_adam_refuses_functions_that_cannot_be_called_so(argument, name):
    function, words = NOT_CALLABLE_SO[name]
    if (argument, name) == ("mask", "none"):
        pytest.skip("None is a tree without leaves")
    with pytest.raises(BadParamError) as refusal:
        jax.eval_shape(lambda: step_of(**{argument: function}))
    message = str(refusal.value)
    assert message.startswith(f"ema_adam: {argument} must be a ")
    assert f"; got {words}" in message
    assert "\n" not in message
    assert ("raises" in words) == (refusal.value.__cause__ is not None)


LOOP = [jnp.ones(2)]
LOOP.append(LOOP)


@pytest.mark.parametrize("tree", [{1: jnp.ones(2), "a": jnp.ones(2)}, LOOP], ids=["keys", "loop"])
def test_ema_adam_refuses_what_is_no_pytree(tree):
    optimizer, good = ema_adam(1e-3), jnp.ones(2)
    state = optimizer.init(good)
    calls = [
        ("ema_adam: params", lambda: optimizer.init(tree)),
        ("ema_adam: grads", lambda: optimizer.update(tree, state, good)),
        ("ema_adam: params", lambda: optimizer.update(good, state, tree)),
        ("ema_adam: mask", lambda: ema_adam(1e-3, mask=tree)),
        ("ema_params: opt_state", lambda: ema_params((state, tree))),
        ("fused_apply: grads", lambda: fused_apply(optimizer, tree, state, good)),
        ("fused_apply: opt_state", lambda: fused_apply(optimizer, good, tree, good)),
    ]
    for subject, call in calls:
        with pytest.raises(BadParamError, match=f"^{subject} must be a pytree; got one ") as refusal:
            call()
        assert "\n" not in str(refusal.value)
