"""The machinery on an operator made for it: kernels on every kind of mesh, batching, derivatives, refusals."""

import contextlib
import functools
import pickle

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxops
import lowering
from jaxops._checks.arguments import BadParamError, require
from jaxops._primitive.derivative import Derivative
from jaxops._primitive.operator import Operator
from pallas_kernels.kernel import Kernel


def check(x, factors):
    require(x.shape[-1:] == factors.shape, "toy_scale", "factors", f"have shape {list(x.shape[-1:])}", factors)


def reference(x, factors):
    """x * factors, and its sum over all batch axes."""
    scaled = jnp.einsum("...k,k->...k", x, factors)
    return scaled, jnp.sum(scaled, axis=tuple(range(x.ndim - 1)))


def run(x, factors, *, config, interpret):
    def kernel(x_ref, factors_ref, scaled_ref, total_ref):
        scaled_ref[...] = x_ref[...] * jnp.broadcast_to(factors_ref[...], x_ref.shape)
        total_ref[...] = jnp.sum(scaled_ref[...], axis=0, keepdims=True)

    out_shape = [jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((1, *factors.shape), x.dtype)]
    scaled, total = pl.pallas_call(kernel, out_shape=out_shape, interpret=interpret)(x, factors[None])
    return scaled, total[0]


def refuses(hardware, x, factors):
    return "takes matrices only" if len(x.shape) != 2 else None


def vjp(residuals, cotangents, active):
    x, factors, *_ = residuals
    return toy_scale_backward(*cotangents, x, factors, active=tuple(active))


def backward_reference(grad_scaled, grad_total, x, factors, active):
    grad = grad_scaled + jnp.broadcast_to(grad_total, grad_scaled.shape)
    grad_factors = jnp.einsum("...k,...k->k", grad, x) if active[1] else jnp.zeros_like(factors)
    return jnp.einsum("...k,k->...k", grad, factors), grad_factors


toy_scale_backward = Operator(
    "toy_scale_backward", "... k, k, ... k, k -> ... k, k", lambda *operands, active: None, backward_reference
)
# A single result may be an array by itself.
toy_twice = Operator(
    "toy_twice",
    "... -> ...",
    None,
    lambda x: 2 * x,
    Derivative(lambda residuals, cotangent, active: (2 * cotangent + 0 * residuals[1],)),
)
toy_scale = Operator(
    "toy_scale",
    "... k, k -> ... k, k",
    check,
    reference,
    Derivative(vjp),
    kernels=(Kernel("mosaic_tpu", "tpu", run, refuses),),
)

CASE = contract.Case(
    "scale",
    toy_scale,
    lambda rng: (rng.normal(size=(16, 4)).astype(np.float32), rng.normal(size=4).astype(np.float32)),
    differentiable=(0, 1),
    batched=(0, None),
    operator="toy_scale",
    backward="toy_scale_backward",
)


@pytest.mark.parametrize("promise", contract.PROMISES, ids=contract.promise_name)
def test_operator_keeps_promise(promise):
    promise(CASE)


def operands_on(axis_type, rng):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    x, factors = CASE.operands(rng)
    return mesh, jax.device_put(x, NamedSharding(mesh, P("data"))), jax.device_put(factors, NamedSharding(mesh, P()))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_kernel_runs_on_each_device_of_a_mesh(axis_type, rng):
    mesh, x, factors = operands_on(axis_type, rng)
    with lowering.use("interpret"):
        compiled = jax.jit(toy_scale).lower(x, factors).compile()
        gradient = jax.jit(jax.grad(lambda *xs: sum(jnp.sum(r) for r in toy_scale(*xs)), (0, 1)))(x, factors)
    scaled, total = compiled(x, factors)
    np.testing.assert_allclose(scaled, np.asarray(x) * np.asarray(factors), rtol=1e-6)
    np.testing.assert_allclose(total, np.sum(np.asarray(x) * np.asarray(factors), 0), rtol=1e-5)
    np.testing.assert_allclose(gradient[1], 2 * np.sum(np.asarray(x), 0), rtol=1e-5)
    assert scaled.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2)
    assert "all-gather" not in compiled.as_text()
    assert "all-reduce" in compiled.as_text()


def test_kernel_runs_inside_shard_map_with_varying_axes_checked(rng):
    x, factors = CASE.operands(rng)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def local(x, factors):
        scaled, total = toy_scale(x, factors)
        return scaled, jax.lax.psum(total, "data")

    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P()), out_specs=(P("data"), P())))
    with lowering.use("interpret"):
        scaled, total = mapped(x, factors)
    np.testing.assert_allclose(scaled, x * factors, rtol=1e-6)
    np.testing.assert_allclose(total, np.sum(x * factors, 0), rtol=1e-5)


def test_vmap_runs_once_over_batch_axes_and_one_by_one_over_shared_operands(rng):
    x, factors = CASE.operands(rng)
    over_batch = jax.make_jaxpr(jax.vmap(lambda x: jnp.sum(toy_scale(x[None], factors)[0])))(x)
    assert contract.primitives(jax.vmap(toy_scale, (None, 0)), x, np.stack([factors] * 2)) >= {"scan", "toy_scale"}
    assert "toy_scale" in str(over_batch)


def test_vmap_one_by_one_takes_what_is_split_over_an_explicit_mesh(rng):
    x, factors = CASE.operands(rng)
    mesh = jax.make_mesh((8,), ("data",))
    many = rng.normal(size=(8, *factors.shape)).astype(np.float32)
    placed = jax.device_put(many, NamedSharding(mesh, P("data")))
    scaled, total = jax.jit(jax.vmap(toy_scale, (None, 0)))(x, placed)
    np.testing.assert_allclose(scaled, x * many[:, None], rtol=1e-6)
    np.testing.assert_allclose(total, np.sum(x * many[:, None], 1), rtol=1e-5)


def test_a_single_result_may_be_an_array(rng):
    x = jnp.asarray(rng.normal(size=(3, 4)).astype(np.float32))
    y, grad = jax.value_and_grad(lambda x: jnp.sum(toy_twice(x)))(x)
    np.testing.assert_allclose(y, 2 * np.sum(np.asarray(x, np.float64)), rtol=1e-5)
    np.testing.assert_array_equal(grad, np.full((3, 4), 2, np.float32))


def test_gradients_trace_the_reference_once():
    traced = []

    def reference(x):
        traced.append(x)
        return 3 * x

    derivative = Derivative(lambda residuals, cotangent, active: (3 * cotangent,))
    thrice = Operator("toy_thrice", "... -> ...", None, reference, derivative)
    jax.make_jaxpr(jax.grad(lambda x: jnp.sum(thrice(x))))(jnp.ones(3))
    assert len(traced) == 1


def test_backward_does_no_work_for_a_frozen_operand(rng):
    x, factors = CASE.operands(rng)
    jaxpr = str(jax.make_jaxpr(jax.grad(CASE.trial.loss, 0))(x, factors))
    assert "active=(True, False)" in jaxpr


def test_refusal_travels_between_processes():
    refusal = pickle.loads(pickle.dumps(BadParamError("toy_scale: x must be given; got None", 161001)))
    assert (type(refusal), str(refusal), refusal.status) == (
        BadParamError,
        "toy_scale: x must be given; got None",
        161001,
    )


@pytest.mark.parametrize("error", [BadParamError, jaxops.NotSupportedError, jaxops.VersionMismatchError])
def test_refusals_of_other_packages_need_no_status(error):
    refusal = pickle.loads(pickle.dumps(error("rms_norm: x must be floating point; got int32[3]")))
    assert (type(refusal), str(refusal)) == (error, "rms_norm: x must be floating point; got int32[3]")
    assert refusal.status is None


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, lambda f: functools.partial(lowering.explain, f)])
def test_refusal_has_the_same_words_eagerly_under_jit_and_in_explain(wrap):
    with pytest.raises(BadParamError) as error:
        wrap(toy_scale)(np.ones((2, 4), np.float32), np.ones(5, np.float32))
    assert str(error.value) == "toy_scale: factors must have shape [4]; got float32[5]"
    assert error.value.status == 161002


def lowered_for_tpu(x, factors):
    return jax.jit(toy_scale).trace(x, factors).lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize(
    ("implementation", "kernels"), [("auto", 0), ("reference", 0), ("pallas", 1), ("pallas:mosaic_tpu", 1)]
)
def test_selection_decides_what_is_lowered_for_the_target(implementation, kernels):
    with lowering.use(implementation):
        assert (
            lowered_for_tpu(np.ones((8, 128), np.float32), np.ones((8, 128), np.float32)[0]).count("tpu_custom_call")
            == kernels
        )


def test_a_refused_kernel_that_was_asked_for_raises_its_reason():
    with lowering.use(toy_scale="pallas"), pytest.raises(lowering.NotSupportedError, match="takes matrices only"):
        lowered_for_tpu(np.ones((2, 8, 128), np.float32), np.ones(128, np.float32))


@pytest.mark.slow  # it clears JAX's caches, so what comes after it is compiled again
def test_add_kernel_is_preferred_and_reaches_functions_that_were_compiled_before():
    x, factors = np.ones((8, 128), np.float32), np.full(128, 2, np.float32)
    function = jax.jit(toy_scale)
    np.testing.assert_allclose(function(x, factors)[0], 2)
    added = Kernel("answers_42", "tpu", lambda x, f, **_: (x + 41, f), lambda *operands: None)
    with contextlib.ExitStack() as undo:
        undo.callback(lowering.remove_kernel, toy_scale, added)
        lowering.add_kernel(toy_scale, added)
        with lowering.use("interpret"):
            np.testing.assert_allclose(function(x, factors)[0], 42)
    with lowering.use("interpret"):
        np.testing.assert_allclose(function(x, factors)[0], 2)


def test_explain_counts_runs_and_says_why():
    def looped(x, factors):
        return jax.lax.scan(lambda carry, _: (toy_scale(carry, factors)[0], None), x, length=3)[0]

    explanation = lowering.explain(looped, np.ones((16, 4), np.float32), np.ones(4, np.float32), target="tpu-v5e")
    (row,) = explanation.rows
    assert (row.operator, row.count, row.implementation) == ("toy_scale", 3, "reference")
    assert row.refusals[0].reason == "opt-in: not measured on this target"
    assert row.bytes == 4 * (64 + 4 + 64 + 4)
    assert "toy_scale" in str(explanation)
    assert '"operator": "toy_scale"' in explanation.to_json()
