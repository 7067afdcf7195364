"""`batch_norm` inside models of equinox and flax: beside flax's own batch norm, addition and relu, step by step."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxops import batch_norm, batch_norm_inference

STEPS, CHANNELS, MOMENTUM = 5, 6, 0.1


class BatchNorm(eqx.Module):
    """What an equinox model needs around the function."""

    scale: jax.Array
    bias: jax.Array
    running: eqx.nn.StateIndex

    def __init__(self):
        self.scale, self.bias = jnp.ones(CHANNELS), jnp.zeros(CHANNELS)
        self.running = eqx.nn.StateIndex((jnp.zeros(CHANNELS), jnp.ones(CHANNELS)))

    def __call__(self, x, state, residual):
        mean, var = state.get(self.running)
        out = batch_norm(
            x, self.scale, self.bias, mean, var, momentum=MOMENTUM, activation="relu", residual=residual, layout="NCHW"
        )
        return out.y, state.set(self.running, (out.running_mean, out.running_var))


class EquinoxBlock(eqx.Module):
    convolution: eqx.nn.Conv2d
    norm: BatchNorm

    def __init__(self, key):
        self.convolution = eqx.nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, use_bias=False, key=key)
        self.norm = BatchNorm()

    def __call__(self, images, state):
        y, state = self.norm(jax.vmap(self.convolution)(images), state, images)
        return y.mean((1, 2, 3)), state


class UnfusedFlaxBlock(nn.Module):
    @nn.compact
    def __call__(self, images):
        y = nn.Conv(CHANNELS, (3, 3), use_bias=False, name="convolution")(images)
        norm = nn.BatchNorm(
            use_running_average=False, momentum=1 - MOMENTUM, use_fast_variance=False, axis_name=None, name="norm"
        )
        return nn.relu(norm(y) + images).mean((1, 2, 3))


def test_equinox_model_trains_as_the_unfused_flax_model(rng):
    images = jnp.asarray(rng.normal(0.5, 2, (STEPS, 4, CHANNELS, 5, 7)), jnp.float32)
    targets = jnp.asarray(rng.normal(size=(STEPS, 4)), jnp.float32)
    optimizer = optax.sgd(0.2, momentum=0.9)
    model, state = eqx.nn.make_with_state(EquinoxBlock)(jax.random.key(0))
    kernel = jnp.transpose(model.convolution.weight, (2, 3, 1, 0))
    params = {"convolution": {"kernel": kernel}, "norm": {"scale": model.norm.scale, "bias": model.norm.bias}}
    running = {"norm": {"mean": jnp.zeros(CHANNELS), "var": jnp.ones(CHANNELS)}}

    @eqx.filter_jit
    def equinox_step(model, state, opt_state, images, targets):
        def loss(model):
            predictions, moved = model(images, state)
            return jnp.mean((predictions - targets) ** 2), moved

        (value, moved), grads = eqx.filter_value_and_grad(loss, has_aux=True)(model)
        updates, opt_state = optimizer.update(grads, opt_state)
        return value, eqx.apply_updates(model, updates), moved, opt_state

    @jax.jit
    def flax_step(params, running, opt_state, images, targets):
        def loss(params):
            variables = {"params": params, "batch_stats": running}
            predictions, moved = UnfusedFlaxBlock().apply(variables, images, mutable=["batch_stats"])
            return jnp.mean((predictions - targets) ** 2), moved["batch_stats"]

        (value, moved), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return value, optax.apply_updates(params, updates), moved, opt_state

    equinox_opt, flax_opt = optimizer.init(eqx.filter(model, eqx.is_inexact_array)), optimizer.init(params)
    for x, target in zip(images, targets, strict=True):
        value, model, state, equinox_opt = equinox_step(model, state, equinox_opt, x, target)
        flax_value, params, running, flax_opt = flax_step(params, running, flax_opt, x.transpose(0, 2, 3, 1), target)
        np.testing.assert_allclose(value, flax_value, rtol=1e-5)
        np.testing.assert_allclose(model.norm.scale, params["norm"]["scale"], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(model.norm.bias, params["norm"]["bias"], rtol=1e-5, atol=1e-5)
        moved = jnp.transpose(model.convolution.weight, (2, 3, 1, 0))
        np.testing.assert_allclose(moved, params["convolution"]["kernel"], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(state.get(model.norm.running)[0], running["norm"]["mean"], rtol=1e-5, atol=1e-5)


def test_equinox_model_infers_with_what_it_averaged(rng):
    x = rng.normal(3, 2, (8, CHANNELS, 4, 4)).astype(np.float32)
    model, state = eqx.nn.make_with_state(BatchNorm)()
    zeros = np.zeros_like(x)
    for _ in range(200):
        _, state = eqx.filter_jit(model)(x, state, zeros)
    mean, var = state.get(model.running)
    y = batch_norm_inference(x, model.scale, model.bias, mean, var, layout="NCHW")
    wide = x.astype(np.float64)
    expected_var = wide.var((0, 2, 3), ddof=1, keepdims=True)
    truth = (wide - wide.mean((0, 2, 3), keepdims=True)) / np.sqrt(expected_var + 1e-5)
    np.testing.assert_allclose(y, truth, rtol=1e-5, atol=1e-5)
