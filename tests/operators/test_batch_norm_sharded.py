"""`batch_norm` of batches that are split over devices: automatic and explicit meshes, and shared statistics."""

import functools

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lowering
from jaxops import BadParamError, NotSupportedError, batch_norm, mcdnn
from jaxops.testing.meshes import gathered_sizes


def draw(rng):
    x, residual = (rng.normal(1.5, 2, (16, 4, 3, 2)).astype(np.float32) for _ in range(2))
    scale, bias = (rng.uniform(0.5, 2, 4).astype(np.float32) for _ in range(2))
    return x, scale, bias, residual


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_batch_norm_of_a_split_batch_has_the_statistics_of_all_of_it(axis_type, rng):
    x, scale, bias, residual = draw(rng)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    placed = [*(jax.device_put(a, s) for a, s in ((x, split), (scale, whole), (bias, whole), (residual, split)))]

    @jax.jit
    def step(x, scale, bias, residual):
        def loss(x, scale, bias, residual):
            out = batch_norm(x, scale, bias, 0 * scale, scale, residual=residual, activation="relu", layout="NCHW")
            return jnp.sum(jnp.sin(out.y)), out

        return jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(x, scale, bias, residual)

    compiled = step.lower(*placed).compile()
    contract.assert_close(compiled(*placed), step(x, scale, bias, residual))
    assert not [size for size in gathered_sizes(compiled.as_text()) if size >= x.size // 8]


@pytest.mark.sampled
@pytest.mark.parametrize("check_vma", [True, False])
def test_batch_norm_shares_statistics_over_a_mesh_axis(check_vma, rng):
    x, scale, bias, residual = draw(rng)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def loss(x, scale, bias, residual, axis_name=None):
        out = batch_norm(
            *(x, scale, bias, jnp.zeros(4), jnp.ones(4)),
            **{"residual": residual, "activation": "swish", "axis_name": axis_name, "layout": "NCHW"},
        )
        total = jnp.sum(jnp.sin(out.y))
        return (total if axis_name is None else jax.lax.psum(total, axis_name)), out.running_var

    sharded = jax.shard_map(
        functools.partial(loss, axis_name="data"),
        mesh=mesh,
        in_specs=(P("data"), P(), P(), P("data")),
        out_specs=(P(), P()),
        check_vma=check_vma,
    )

    def everything(fn, *operands):
        """The result, its gradients, a derivative in forward mode, and a second-order gradient in x."""
        values, pull_back, _ = jax.vjp(fn, *operands, has_aux=True)
        x, residual = operands[0], operands[3]
        along = jax.jvp(lambda x: fn(x, *operands[1:])[0], (x,), (residual,))
        slope = jax.grad(lambda x: fn(x, *operands[1:])[0])
        return fn(*operands), pull_back(jnp.ones_like(values)), along, jax.grad(lambda x: jnp.sum(jnp.cos(slope(x))))(x)

    shared, whole = (jax.jit(functools.partial(everything, fn)) for fn in (sharded, loss))
    contract.assert_close(shared(x, scale, bias, residual), whole(x, scale, bias, residual))


@pytest.mark.long
@pytest.mark.parametrize("axis_name", ["batch", ("batch",)], ids=str)
def test_batch_norm_shares_statistics_over_the_axis_of_a_vmap(axis_name, rng):
    x, *operands = draw(rng)
    running = np.zeros(operands[0].shape, np.float32), np.ones(operands[0].shape, np.float32)

    def train(axis_name, x, scale, bias, residual):
        found = batch_norm(
            x, scale, bias, *running, residual=residual, activation="relu", axis_name=axis_name, layout="NCHW"
        )
        return found.y, found[1:]

    def split(x):
        return x.reshape(2, -1, *x.shape[1:])

    def mapped(x, scale, bias, residual):
        axes = {"in_axes": (0, None, None, 0), "out_axes": (0, None), "axis_name": "batch"}
        y, saved = jax.vmap(functools.partial(train, axis_name), **axes)(split(x), scale, bias, split(residual))
        return y.reshape(x.shape), saved

    whole = functools.partial(train, None)
    for fn in (mapped, jax.jit(mapped)):
        values, pull_back, saved = jax.vjp(fn, x, *operands, has_aux=True)
        true, true_pull_back, true_saved = jax.vjp(whole, x, *operands, has_aux=True)
        contract.assert_close((values, saved), (true, true_saved))
        contract.assert_close(pull_back(jnp.cos(true)), true_pull_back(jnp.cos(true)))


@pytest.mark.parametrize("axis_name", ["batch", ("batch",)], ids=str)
def test_batch_norm_refuses_an_axis_that_nothing_splits(axis_name, rng):
    x, scale, bias, _ = draw(rng)
    message = "batch_norm: axis_name must name an axis of a surrounding shard_map or vmap, and none here"
    for call in (lambda fn: fn(x), lambda fn: jax.vmap(fn, axis_name="other")(x[None])):
        with pytest.raises(BadParamError, match=message):
            call(lambda x: batch_norm(x, scale, bias, axis_name=axis_name, layout="NCHW").y)


@pytest.mark.parametrize(
    "spec", contract.first_in_every_run([P(None, "data"), P("data"), P(None, None, "data")]), ids=str
)
def test_batch_norm_has_the_same_reserve_space_on_an_explicit_mesh(spec, rng):
    x = rng.normal(size=(8, 6, 8, 2)).astype(np.float32)
    ones, relu = np.ones((1, 6, 1, 1), np.float32), mcdnn.ActivationDescriptor("RELU")

    def train(x):
        return mcdnn.batch_normalization_forward_training_ex(
            "SPATIAL", "OPS_BN_ACTIVATION", x, ones, ones, exponential_average_factor=0.1, activation=relu
        )

    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        split = jax.jit(train)(jax.device_put(x, NamedSharding(mesh, spec)))
    whole = train(x)
    np.testing.assert_array_equal(split.reserve_space, whole.reserve_space)
    np.testing.assert_allclose(split.y, whole.y, rtol=1e-5, atol=1e-5)


def test_batch_norm_kernels_refuse_a_split_batch(rng):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    x, scale, bias, _ = draw(rng)
    x = jax.device_put(x, NamedSharding(mesh, P("data")))
    with lowering.use("pallas"):
        traced = jax.jit(lambda x: batch_norm(x, scale, bias, layout="NCHW").y).trace(x)
        with pytest.raises(NotSupportedError, match="x is split over a mesh"):
            traced.lower(lowering_platforms=("tpu",))
