"""`fused_apply`: one pass over memory gives what `update` and `apply_updates` give, whatever wraps the transform."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from optimizers import (
    WRAPPERS,
    assert_trees_close,
    jitted,
    make_params,
    one_pass,
    remember,
    run,
    two_calls,
)

import lowering
from jaxops import ema_adam, ema_params, fused_apply


@pytest.fixture(autouse=True)
def _standard_promotion():
    """Optax itself mixes dtypes (`MultiSteps`, `clip_by_global_norm`), which strict promotion refuses."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:fused_apply.*drifts")
@pytest.mark.parametrize("name", WRAPPERS)
def test_fused_apply_equals_update_and_apply(name):
    wrap, count = WRAPPERS[name]
    optimizer, params = wrap(ema_adam), make_params()
    expected = run(two_calls(optimizer), optimizer.init(params), params)
    assert_trees_close(run(one_pass(optimizer), optimizer.init(params), params), expected)
    jaxpr = str(jax.make_jaxpr(functools.partial(fused_apply, optimizer))(params, optimizer.init(params), params))
    assert jaxpr.count("output=params") == count


DRIFTING = {
    "scale": optax.scale(0.1),
    "schedule": optax.scale_by_schedule(lambda count: 0.5),
    "decay": optax.add_decayed_weights(0.1),
    "clip": optax.clip_by_global_norm(1e-3),
    "clip each": optax.clip(0.01),
    "keep nonnegative": optax.keep_params_nonnegative(),
    "set to zero": optax.masked(optax.set_to_zero(), {"w": True}),
    "where": optax.stateless(lambda updates, _: jax.tree.map(lambda u: jnp.where(u < 0, u, 0), updates)),
    "skipped behind": optax.stateless(
        lambda updates, params: jax.tree.map(lambda u: jnp.where(jnp.sum(params["w"]) < 9, 0, u), updates)
    ),
}


@pytest.mark.parametrize("name", DRIFTING)
def test_fused_apply_warns_where_parameters_and_average_drift_apart(name):
    optimizer, params = optax.chain(ema_adam(0.1, ema_decay=0.0), DRIFTING[name]), {"w": jnp.array([1.0, -1.0])}
    with pytest.warns(UserWarning, match="put ema_adam last in the chain"):
        new_params, state = fused_apply(optimizer, params, optimizer.init(params), params)
    # Without memory, the average should be the parameters.
    assert np.abs(ema_params(state)["w"] - new_params["w"]).max() > 1e-3


def test_fused_apply_warns_once_of_each_transform():
    params = {"w": jnp.array([1.0, -1.0])}
    scaled = [optax.chain(ema_adam(0.1), optax.scale(0.1)) for _ in range(2)]
    for optimizer in (*scaled, optax.MultiSteps(scaled[0], 2)):
        state = optimizer.init(params)
        with warnings.catch_warnings(record=True, action="always") as caught:
            for _ in range(3):
                _, state = fused_apply(optimizer, params, state, params)
        assert [str(one.message).partition(":")[0] for one in caught] == ["fused_apply"]


def test_fused_apply_warns_of_no_transform_that_keeps_the_average_right():
    params = {"w": jnp.array([1.0, -1.0])}
    make = functools.partial(ema_adam, 0.1, ema_decay=0.0)
    for optimizer in (
        make(),
        optax.chain(optax.scale(0.1), make()),
        optax.chain(make(), optax.identity()),
        optax.apply_if_finite(make(), 2),
        optax.inject_hyperparams(ema_adam)(0.1, ema_decay=0.0),
        optax.masked(make(), {"w": True}),
        optax.multi_transform({"ours": make(), "frozen": optax.set_to_zero()}, {"w": "ours"}),
        optax.MultiSteps(make(), 1),
        optax.MultiSteps(make(), 2),
        optax.chain(make(), remember(optax.tree_utils.tree_norm)),
        jitted(make()),
    ):
        with warnings.catch_warnings(action="error"):
            new_params, state = fused_apply(optimizer, params, optimizer.init(params), params)
        np.testing.assert_allclose(ema_params(state)["w"], new_params["w"], rtol=1e-6)


def test_fused_apply_passes_extra_arguments_on():
    seen = []

    def update(updates, state, params=None, *, value, **extra_args):
        seen.append(value)
        return updates, state

    first = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    optimizer, params = optax.chain(first, ema_adam(1e-2)), make_params()
    fused_apply(optimizer, params, optimizer.init(params), params, value=3.0)
    assert set(seen) == {3.0}


def test_fused_apply_leaks_no_tracers():
    optimizer, params = jitted(ema_adam(1e-2)), make_params()
    with jax.checking_leaks():
        for transform in (optimizer, ema_adam(1e-2)):
            one_pass(transform)(params, transform.init(params), params)


def test_fused_apply_never_takes_an_update_for_parameters():
    """A wrapper that shows other parameters to the transform inside gets updates: adding them is up to it."""
    inner = ema_adam(1e-2)
    ahead = optax.GradientTransformation(
        inner.init, lambda grads, state, params: inner.update(grads, state, jax.tree.map(lambda p: p + 1, params))
    )
    params = make_params()
    expected = run(two_calls(ahead), ahead.init(params), params)
    assert_trees_close(run(one_pass(ahead), ahead.init(params), params), expected)


@pytest.mark.parametrize("name", ["itself", "inject_hyperparams", "multi_transform"])
def test_fused_apply_works_in_place(name):
    """With donated buffers everything is aliased, and temporaries stay below one leaf."""
    optimizer = WRAPPERS[name][0](ema_adam)
    params = {"layers": [jnp.ones((256, 256 + i)) for i in range(4)], "scale": jnp.ones((100,))}
    opt_state = optimizer.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, grads):
        return fused_apply(optimizer, grads, opt_state, params)

    memory = step.lower(params, opt_state, params).compile().memory_analysis()
    assert memory.temp_size_in_bytes < max(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert memory.alias_size_in_bytes >= sum(leaf.nbytes for leaf in jax.tree.leaves((params, opt_state)))
    new_params, new_state = step(params, opt_state, jax.tree.map(jnp.ones_like, params))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((new_params, new_state)))


@pytest.mark.slow
def test_fused_apply_takes_kernels():
    optimizer, params = ema_adam(1e-2, weight_decay=0.1), make_params()
    expected = run(one_pass(optimizer), optimizer.init(params), params, steps=1)
    with lowering.use("interpret:mosaic_tpu"):
        assert_trees_close(run(one_pass(optimizer), optimizer.init(params), params, steps=1), expected)
    with lowering.use("pallas"):
        lowered = one_pass(optimizer).trace(params, optimizer.init(params), params).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count("tpu_custom_call") >= 1
    explanation = lowering.explain(one_pass(optimizer), params, optimizer.init(params), params, target="tpu-v5e")
    assert {row.operator for row in explanation.rows} == {"apply_fused_ema_adam"}
    assert sum(row.count for row in explanation.rows) == 3


def test_fused_apply_inside_shard_map():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    optimizer, params, grads = ema_adam(1e-2), jnp.arange(16.0), jnp.cos(jnp.arange(16.0))
    state = optimizer.init(params)
    specs = (P("x"), jax.tree.map(lambda leaf: P("x") if leaf.ndim else P(), state), P("x"))
    step = jax.shard_map(functools.partial(fused_apply, optimizer), mesh=mesh, in_specs=specs, out_specs=specs[:0:-1])
    assert_trees_close(jax.jit(step)(grads, state, params), fused_apply(optimizer, grads, state, params))
