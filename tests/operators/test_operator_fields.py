"""The machinery on an operator whose operands and results have fields that may be absent."""

from typing import NamedTuple

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import lowering
from jaxops._primitive.derivative import Derivative
from jaxops._primitive.operator import Operator
from lowering.errors import NotSupportedError
from pallas_kernels.kernel import Kernel


class Layer(NamedTuple):
    x: jax.Array
    factors: jax.Array
    shift: jax.Array | None = None
    row_scale: jax.Array | None = None


class Output(NamedTuple):
    y: jax.Array
    total: jax.Array | None = None


LAYER = "... k, k, k, ..."


def reference(layer, *, total):
    """(x * factors + shift) * row_scale, and on request its sum over all batch axes."""
    y = layer.x * jnp.broadcast_to(layer.factors, layer.x.shape)
    y = y if layer.shift is None else y + jnp.broadcast_to(layer.shift, y.shape)
    y = y if layer.row_scale is None else y * layer.row_scale[..., None]
    return Output(y, jnp.sum(y, axis=tuple(range(y.ndim - 1))) if total else None)


def vjp(residuals, cotangents, active, *, total):
    layer, *_ = residuals
    return toy_layer_backward(cotangents, layer, active=active[0])


def backward_reference(cotangents, layer, *, active):
    y_grad = cotangents.y
    if cotangents.total is not None:
        y_grad = y_grad + jnp.broadcast_to(cotangents.total, y_grad.shape)
    z = layer.x * jnp.broadcast_to(layer.factors, layer.x.shape)
    z = z if layer.shift is None else z + jnp.broadcast_to(layer.shift, z.shape)
    z_grad = y_grad if layer.row_scale is None else y_grad * layer.row_scale[..., None]
    batch = tuple(range(z.ndim - 1))
    gradients = Layer(
        z_grad * jnp.broadcast_to(layer.factors, z.shape),
        jnp.sum(z_grad * layer.x, batch),
        jnp.sum(z_grad, batch),
        jnp.sum(y_grad * z, -1),
    )
    return (Layer(*(gradient if is_active else None for gradient, is_active in zip(gradients, active, strict=True))),)


def run(layer, *, config, interpret, total):
    def kernel(x_ref, factors_ref, shift_ref, y_ref):
        y_ref[...] = x_ref[...] * factors_ref[...] + shift_ref[...]

    shift = jnp.zeros_like(layer.factors) if layer.shift is None else layer.shift
    out_shape = jax.ShapeDtypeStruct(layer.x.shape, layer.x.dtype)
    operands = layer.x, jnp.broadcast_to(layer.factors, layer.x.shape), jnp.broadcast_to(shift, layer.x.shape)
    return Output(pl.pallas_call(kernel, out_shape=out_shape, interpret=interpret)(*operands))


toy_layer_backward = Operator(
    "toy_layer_backward", f"... k, k, {LAYER} -> {LAYER}", lambda *_, active: None, backward_reference
)
toy_layer = Operator(
    "toy_layer",
    f"{LAYER} -> ... k, k",
    lambda layer, *, total: None,
    reference,
    Derivative(vjp),
    kernels=(
        Kernel("mosaic_tpu", "tpu", run, lambda hardware, layer, *, total: None, takes=frozenset(Layer._fields[:3])),
    ),
)


def drawn(rng):
    return tuple(rng.normal(size=size).astype(np.float32) for size in ((16, 4), (4,), (4,), (16,)))


def with_all(x, factors, shift, row_scale):
    return tuple(toy_layer(Layer(x, factors, shift, row_scale), total=True))


def without_shift(x, factors, row_scale):
    return (toy_layer(Layer(x, factors, row_scale=row_scale), total=False).y,)


CASES = {
    "all": contract.Case(
        "layer",
        with_all,
        drawn,
        differentiable=(0, 1, 2, 3),
        batched=(0, None, None, 0),
        operator="toy_layer",
        backward="toy_layer_backward",
    ),
    "no-shift": contract.Case(
        "layer",
        without_shift,
        lambda rng: tuple(drawn(rng)[at] for at in (0, 1, 3)),
        differentiable=(0, 1, 2),
        batched=(0, None, 0),
        operator="toy_layer",
        backward="toy_layer_backward",
    ),
}


@pytest.mark.parametrize("promise", contract.PROMISES, ids=contract.promise_name)
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_operator_keeps_promise(promise, case):
    promise(case)


@pytest.mark.parametrize("shift", [True, False], ids=["shift", "no-shift"])
def test_absent_fields_reach_no_equation_and_results_have_the_right_fields(shift, rng):
    x, factors, of_shift, _ = drawn(rng)
    layer = Layer(x, factors, of_shift if shift else None)
    (equation,) = jax.make_jaxpr(lambda layer: toy_layer(layer, total=False))(layer).eqns
    assert (len(equation.invars), len(equation.outvars)) == (2 + shift, 1)
    output = toy_layer(layer, total=False)
    np.testing.assert_allclose(output.y, x * factors + (of_shift if shift else 0), rtol=1e-5, atol=1e-6)
    assert output.total is None


def test_kernel_runs_without_a_field_and_machinery_refuses_one_that_it_does_not_take(rng):
    x, factors, shift, row_scale = drawn(rng)
    with lowering.use("interpret"):
        lowered = jax.jit(lambda layer: toy_layer(layer, total=False).y).lower(Layer(x, factors, shift))
        np.testing.assert_allclose(
            lowered.compile()(Layer(x, factors, shift)), x * factors + shift, rtol=1e-5, atol=1e-6
        )
        with pytest.raises(NotSupportedError, match="mosaic_tpu: takes no row_scale"):
            toy_layer(Layer(x, factors, shift, row_scale), total=False)
    explained = lowering.explain(
        lambda layer: toy_layer(layer, total=False), Layer(x, factors, None, row_scale), target="tpu-v5e"
    )
    assert [refusal.reason for refusal in explained.rows[0].refusals] == ["takes no row_scale"]


@pytest.fixture
def unregistered(monkeypatch):
    """Lets a test make operators that nobody else sees."""
    monkeypatch.setattr(lowering, "register", lambda operator: None)


def test_what_does_not_fit_the_signature_is_refused_in_words(unregistered):
    x = jnp.arange(3.0)
    plus = Operator("toy_plus", "... c, ... c -> ... c", None, lambda x, y: x + y)
    with pytest.raises(TypeError, match="toy_plus: operands must be as many as in its signature, 2; got 3"):
        plus(x, x, x)
    twice = Operator("toy_pair", "... c -> ... c, ... c", None, lambda x: 2 * x)
    with pytest.raises(TypeError, match="toy_pair: results must be as many as in its signature, 2; got 1"):
        jax.make_jaxpr(twice)(x)
    for gradients, got in (((x,), "1"), (x, "a .*Array.*")):
        derivative = Derivative(vjp=lambda *_, gradients=gradients: gradients)
        product = Operator("toy_product", "... c, ... c -> ... c", None, lambda x, y: x * y, derivative)
        match = f"toy_product: vjp must return a gradient, or None, for each of 2 operands; got {got}"
        with pytest.raises(TypeError, match=match):
            jax.make_jaxpr(jax.grad(lambda x, product=product: jnp.sum(product(x, x))))(x)
