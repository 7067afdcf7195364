"""Parameters, optimizers inside what wraps them, and steps, for the tests of `ema_adam` and `fused_apply`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxops import fused_apply


def make_params(dtype="float32"):
    rng = np.random.default_rng(1)

    def leaf(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    return {"layers": [{"kernel": leaf(3, 5), "bias": leaf(5)}, None], "scale": leaf()}


def make_grads(params, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params)


def is_matrix(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def run(step, opt_state, params, steps=3):
    for seed in range(steps):
        params, opt_state = step(make_grads(params, seed), opt_state, params)
    return params, opt_state


def two_calls(optimizer):
    def step(grads, opt_state, params):
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return jax.jit(step)


def one_pass(optimizer):
    return jax.jit(functools.partial(fused_apply, optimizer))


def assert_trees_close(actual, expected, rtol=1e-6):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=rtol, atol=rtol)


def schedule(count):
    return 1e-2 / (1.0 + 0.1 * count)


WRAPPERS = {  # and in how many of the three arrays the parameters are written by the operator itself
    "itself": (lambda make: make(1e-2), 3),
    "clipping": (lambda make: optax.chain(optax.clip_by_global_norm(0.1), make(1e-2)), 3),
    "inject_hyperparams": (lambda make: optax.inject_hyperparams(make, hyperparam_dtype=jnp.float32)(1e-2), 3),
    "injected schedule": (lambda make: optax.inject_hyperparams(make)(schedule), 3),
    "masked": (lambda make: optax.masked(make(1e-2), is_matrix), 1),
    "multi_transform": (
        lambda make: optax.multi_transform(
            {"ours": make(1e-2), "theirs": optax.sgd(0.1)}, {"layers": "ours", "scale": "theirs"}
        ),
        2,
    ),
    "MultiSteps": (lambda make: optax.MultiSteps(make(1e-2), 2), 0),
    "apply_if_finite": (lambda make: optax.apply_if_finite(make(1e-2), 2), 0),
    "touched afterwards": (lambda make: optax.chain(make(1e-2), optax.scale(0.5)), 0),
    "read afterwards": (lambda make: optax.chain(make(1e-2), remember(optax.tree_utils.tree_norm)), 0),
    "kept afterwards": (lambda make: optax.chain(make(1e-2), remember(lambda updates: updates)), 0),
    "jitted": (lambda make: jitted(make(1e-2)), 0),
    "not ours": (lambda make: optax.sgd(0.1), 0),
}


def remember(summarise):
    """A transform that returns updates as they are, and something of them as its state."""
    zeros = functools.partial(jax.tree.map, jnp.zeros_like)
    return optax.GradientTransformation(lambda params: summarise(zeros(params)), lambda u, state, _: (u, summarise(u)))


def jitted(optimizer):
    return optax.GradientTransformationExtraArgs(optimizer.init, jax.jit(optimizer.update))
