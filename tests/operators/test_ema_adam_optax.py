"""`ema_adam` as an optax transform: against optax and an average of the parameters, and inside what wraps one."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optimizers import (
    WRAPPERS,
    assert_trees_close,
    is_matrix,
    make_grads,
    make_params,
    one_pass,
    run,
    schedule,
    two_calls,
)

from jaxops import ema_adam, ema_params, fused_apply
from jaxops._checks.arguments import BadParamError
from jaxops.ema_adam.api import EmaParamsState


@pytest.fixture(autouse=True)
def _standard_promotion():
    """Optax itself mixes dtypes (`MultiSteps`, `clip_by_global_norm`), which strict promotion refuses."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def ema_schedule(count):
    return jnp.minimum(0.999, (1.0 + count) / (10.0 + count))


# What each keyword means in optax's own terms: a transform, and the decay of the average at each count.
SETTINGS = {
    "adamw": ({"weight_decay": 0.1}, lambda lr: optax.adamw(lr, weight_decay=0.1)),
    "l2": ({"weight_decay": 0.1, "mode": "l2"}, lambda lr: optax.chain(optax.add_decayed_weights(0.1), optax.adam(lr))),
    "mask": ({"weight_decay": 0.1, "mask": is_matrix}, lambda lr: optax.adamw(lr, weight_decay=0.1, mask=is_matrix)),
    "l2-mask": (
        {"weight_decay": 0.1, "mode": "l2", "mask": {"layers": True, "scale": False}},
        lambda lr: optax.chain(optax.add_decayed_weights(0.1, {"layers": True, "scale": False}), optax.adam(lr)),
    ),
    "betas": ({"b1": 0.0, "b2": 0.5, "eps": 0.1}, lambda lr: optax.adam(lr, b1=0.0, b2=0.5, eps=0.1)),
}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("scheduled", "fused"), [(False, False), (True, True)], ids=["constant-update", "schedule-fused_apply"]
)
@pytest.mark.parametrize("name", SETTINGS)
def test_ema_adam_equals_optax_and_an_average_in_float64(name, scheduled, fused):
    """For 100 steps, to 1e-12."""
    with jax.enable_x64(True):
        settings, make_peer = SETTINGS[name]
        learning_rate, ema_decay = (schedule, ema_schedule) if scheduled else (1e-2, 0.99)
        optimizer, peer = ema_adam(learning_rate, ema_decay=ema_decay, **settings), make_peer(learning_rate)
        params = peer_params = average = make_params("float64")
        opt_state, peer_state = optimizer.init(params), peer.init(params)
        step, peer_step = (one_pass if fused else two_calls)(optimizer), two_calls(peer)
        for seed in range(100):
            grads = make_grads(params, seed)
            params, opt_state = step(grads, opt_state, params)
            peer_params, peer_state = peer_step(grads, peer_state, peer_params)
            decay = float(ema_schedule(jnp.float64(seed))) if scheduled else ema_decay
            average = jax.tree.map(lambda s, p, d=decay: d * s + (1 - d) * p, average, peer_params)
        peer_adam = [x for x in jax.tree.leaves(peer_state, is_leaf=is_adam) if is_adam(x)]
        assert_trees_close(params, peer_params, rtol=1e-12)
        assert_trees_close(ema_params(opt_state), average, rtol=1e-12)
        assert_trees_close(opt_state[0], peer_adam[0], rtol=1e-12)


def is_adam(x):
    return isinstance(x, optax.ScaleByAdamState)


def test_ema_adam_state_is_a_tuple_that_begins_with_adam():
    state = ema_adam(1e-3).init(make_params())
    assert type(state) is tuple
    assert isinstance(state[0], optax.ScaleByAdamState)
    assert isinstance(state[1], EmaParamsState)
    assert (state[0].count.dtype, int(state[0].count)) == (jnp.int32, 0)
    assert optax.tree_utils.tree_get(state, "mu")["layers"][1] is None


def test_ema_adam_average_starts_in_buffers_of_its_own():
    params = make_params()
    state = ema_adam(1e-3).init(params)
    assert_trees_close(ema_params(state), params, rtol=0)
    for leaf in jax.tree.leaves(params):
        leaf.delete()
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(state))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_ema_adam_keeps_state_of_16_bit_parameters_in_float32(dtype):
    params = make_params(dtype)
    optimizer = ema_adam(1e-3)
    updates, state = optimizer.update(params, optimizer.init(params), params)
    assert {x.dtype.name for x in jax.tree.leaves(updates)} == {dtype}
    assert {x.dtype.name for x in jax.tree.leaves(state)} == {"int32", "float32"}


def test_ema_adam_takes_explicit_dtypes():
    optimizer = ema_adam(1e-3, mu_dtype=jnp.bfloat16, nu_dtype="float16", ema_dtype=np.float32)
    params = make_params("bfloat16")
    for state in (optimizer.init(params), optimizer.update(params, optimizer.init(params), params)[1]):
        assert {x.dtype.name for x in jax.tree.leaves(state[0].mu)} == {"bfloat16"}
        assert {x.dtype.name for x in jax.tree.leaves(state[0].nu)} == {"float16"}
        assert {x.dtype.name for x in jax.tree.leaves(ema_params(state))} == {"float32"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_ema_adam_second_moment_of_a_constant_gradient(dtype):
    """1 - 0.999^2000 = 0.8648; rounded to bfloat16 at each step it would stop at 0.5."""
    optimizer = ema_adam(1e-3)
    ones = jnp.ones((3,), dtype)

    def body(carry, _):
        return fused_apply(optimizer, ones, carry[1], carry[0]), None

    (_, state), _ = jax.jit(lambda carry: jax.lax.scan(body, carry, length=2000))((ones, optimizer.init(ones)))
    np.testing.assert_allclose(state[0].nu, 1 - 0.999**2000, rtol=1e-4)
    assert np.all(np.asarray(ema_params(state)) < 1)


@pytest.mark.sampled
@pytest.mark.parametrize("name", [name for name in WRAPPERS if name != "not ours"])
def test_ema_adam_inside_wrappers_equals_optax(name):
    wrap, _ = WRAPPERS[name]
    peer, params = wrap(optax.adam), make_params()
    expected, _ = run(two_calls(peer), peer.init(params), params)
    optimizer = wrap(ema_adam)
    is_warned = name == "touched afterwards"
    with pytest.warns(UserWarning, match="it drifts away") if is_warned else contextlib.nullcontext():
        actual, state = run(one_pass(optimizer), optimizer.init(params), params)
    assert_trees_close(actual, expected, rtol=1e-5)
    averages = ema_params(state, params)
    assert jax.tree.structure(averages) == jax.tree.structure(params)


def test_ema_adam_leaves_parameters_without_gradient_alone():
    params = {"trained": jnp.ones((3,)), "frozen": jnp.ones((2,)), "absent": None}
    optimizer = ema_adam(1e-2, weight_decay=0.1)
    grads = {"trained": jnp.ones((3,)), "frozen": None, "absent": None}
    state = optimizer.init(params)
    updates, new_state = optimizer.update(grads, state, params)
    assert updates["frozen"] is None
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    new_params, _ = fused_apply(optimizer, grads, state, params)
    assert new_params["frozen"] is params["frozen"]
    assert np.all(np.asarray(new_params["trained"]) < 1)


@pytest.mark.parametrize("leaf", [1.5, np.float32(1.5), np.ones((2,), np.float32)], ids=["float", "scalar", "numpy"])
def test_ema_adam_takes_leaves_that_are_not_jax_arrays(leaf):
    optimizer = ema_adam(1e-2)
    updates, state = optimizer.update(leaf, optimizer.init(leaf), leaf)
    np.testing.assert_allclose(updates, -1e-2 * np.ones_like(leaf), rtol=1e-6)
    assert ema_params(state).dtype == jnp.float32


@pytest.mark.slow
def test_ema_adam_is_differentiable_in_injected_hyperparameters():
    params, grads = make_params(), make_grads(make_params(), 0)

    def loss(learning_rate, b2):
        optimizer = ema_adam(learning_rate, b2=b2)
        params_after, _ = run(functools.partial(fused_apply, optimizer), optimizer.init(params), params, steps=2)
        return optax.tree_utils.tree_sum(jax.tree.map(lambda p, g: jnp.sum(p * g), params_after, grads))

    point = (jnp.float32(0.1), jnp.float32(0.9))
    for gradient, argument in zip(jax.jit(jax.grad(loss, (0, 1)))(*point), (0, 1), strict=True):
        moved = [[x + h * (i == argument) for i, x in enumerate(point)] for h in (-1e-2, 1e-2)]
        np.testing.assert_allclose(gradient, (loss(*moved[1]) - loss(*moved[0])) / 2e-2, rtol=2e-2)


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: optax.chain(optax.clip(1.0), x)], ids=["itself", "chain"])
def test_ema_adam_vmaps_over_members_of_an_ensemble(wrap):
    optimizer = wrap(ema_adam(1e-2))
    params = jnp.arange(6.0).reshape(2, 3)
    states = jax.vmap(optimizer.init)(params)
    together, _ = jax.vmap(functools.partial(fused_apply, optimizer))(params, states, params)
    for member in range(2):
        alone, _ = fused_apply(optimizer, params[member], optimizer.init(params[member]), params[member])
        np.testing.assert_allclose(together[member], alone, rtol=1e-6)


def test_ema_adam_init_takes_abstract_parameters():
    params, optimizer = make_params("bfloat16"), ema_adam(1e-3, mu_dtype="bfloat16")
    of_types = functools.partial(jax.tree.map, lambda x: (x.shape, x.dtype))
    abstract = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    expected = of_types(optimizer.init(params))
    assert of_types(optimizer.init(abstract)) == expected
    assert of_types(jax.eval_shape(optimizer.init, params)) == expected
    assert of_types(jax.eval_shape(optimizer.init, abstract)) == expected


@pytest.mark.sampled
@pytest.mark.parametrize("fused", [False, True], ids=["update", "fused_apply"])
def test_ema_adam_keeps_explicit_shardings(fused):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    optimizer = optax.chain(optax.clip(1.0), ema_adam(1e-2, weight_decay=0.1))
    with jax.set_mesh(mesh):
        params = {
            "w": jnp.ones((2, 8, 4), jnp.float16, out_sharding=NamedSharding(mesh, P(None, "x"))),
            "b": jnp.ones((3,)),
        }
        types = functools.partial(jax.tree.map, jax.typeof)
        state = optimizer.init(params)
        assert types(jax.jit(optimizer.init)(params)) == types(state)
        step = functools.partial(fused_apply, optimizer) if fused else two_calls(optimizer)
        for attempt in (step, jax.jit(step)):
            assert types(attempt(params, state, params)) == types((params, state))
        assert "all-gather" not in jax.jit(step).lower(params, state, params).compile().as_text()
    assert jax.typeof(state[1][0].mu["w"]).sharding.spec == P(None, "x", None)


def test_ema_adam_keeps_automatic_shardings():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("x"))
    params = jax.device_put(jnp.arange(16.0), sharding)
    optimizer = ema_adam(1e-2)
    state = optimizer.init(params)
    step = one_pass(optimizer)
    new_params, new_state = step(params, state, params)
    for leaf in (*jax.tree.leaves(state)[1:], new_params, *jax.tree.leaves(new_state)[1:]):
        assert leaf.sharding.is_equivalent_to(sharding, 1)
    assert "all-gather" not in step.lower(params, state, params).compile().as_text()
    abstract = jax.ShapeDtypeStruct(params.shape, params.dtype, sharding=sharding)
    assert optimizer.init(abstract)[1].ema.sharding == sharding


def test_ema_adam_survives_orbax(tmp_path):
    optimizer, params = optax.chain(optax.clip(1.0), ema_adam(1e-2)), make_params()
    _, state = run(one_pass(optimizer), optimizer.init(params), params)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(optimizer.init, params))
    assert_trees_close(restored, state, rtol=0)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ema_adam_continues_from_an_adamw_checkpoint(dtype, tmp_path):
    """As the docstring says."""
    params, adamw, optimizer = make_params(dtype), optax.adamw(1e-2), ema_adam(1e-2, weight_decay=1e-4)
    params, adamw_state = run(two_calls(adamw), adamw.init(params), params)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", adamw_state)
        checkpointer.wait_until_finished()
        adamw_state = checkpointer.restore(tmp_path / "state", jax.eval_shape(adamw.init, params))
    fresh = optimizer.init(params)
    moments = jax.tree.map(lambda new, old: old.astype(new.dtype), fresh[0], adamw_state[0])
    opt_state = (moments, fresh[1])
    assert int(opt_state[0].count) == 3
    new_params, new_state = run(one_pass(optimizer), opt_state, params, steps=1)
    expected, _ = run(two_calls(adamw), adamw_state, params, steps=1)
    assert_trees_close(new_params, expected, rtol=1e-6 if dtype == "float32" else 1e-2)
    assert jax.tree.map(jnp.result_type, new_state) == jax.tree.map(jnp.result_type, fresh)


def test_ema_params_merges_what_several_transforms_average():
    params = make_params()
    labels = {"layers": "first", "scale": "second"}
    optimizer = optax.multi_transform({"first": ema_adam(1e-2), "second": ema_adam(1e-1)}, labels)
    new_params, state = run(one_pass(optimizer), optimizer.init(params), params)
    averages = ema_params(state)
    assert jax.tree.structure(averages) == jax.tree.structure(params)
    assert not np.array_equal(averages["scale"], new_params["scale"])


def test_ema_params_leaves_places_without_average_to_the_caller():
    params = make_params()
    state = optax.masked(ema_adam(1e-2), {"layers": True, "scale": False}).init(params)
    assert ema_params(state)["scale"] == optax.MaskedNode()
    assert ema_params(state, params)["scale"] is params["scale"]


def test_ema_adam_gives_up_no_precision_in_16_bit_hyperparameters():
    params = make_params("bfloat16")
    with pytest.raises(
        BadParamError, match=r"ema_adam: b1 must be at least float32.* hyperparam_dtype.*; got bfloat16"
    ):
        optax.inject_hyperparams(ema_adam)(1e-2).init(params)
    optimizer = optax.inject_hyperparams(ema_adam, hyperparam_dtype=jnp.float32)(1e-2)
    new_params, _ = run(one_pass(optimizer), optimizer.init(params), params)
    assert np.all(np.isfinite(np.asarray(new_params["scale"], np.float32)))


def update_without_params():
    optimizer, params = ema_adam(1e-3), make_params()
    return optimizer.update(params, optimizer.init(params))


def update_with_other_shapes(make=lambda size: jnp.ones(size)):
    grads, params = make(3), make(2)
    optimizer = ema_adam(1e-3)
    return optimizer.update(grads, optimizer.init(params), params)


def without_classes(tree):
    """As orbax restores it without a target: NamedTuples are dicts, and tuples are lists."""
    if hasattr(tree, "_asdict"):
        return {name: without_classes(child) for name, child in tree._asdict().items()}
    return [*map(without_classes, tree)] if isinstance(tree, tuple) else tree


def restored_without_target():
    return ema_params(without_classes(ema_adam(1e-3).init(make_params())))


def update_of_restored():
    params = make_params()
    return ema_adam(1e-3).update(params, without_classes(ema_adam(1e-3).init(params)), params)


REFUSALS = {
    "mode": (lambda: ema_adam(1e-3, mode="sgd"), "ema_adam: mode must be one of adamw, l2; got 'sgd'", 161002),
    "b1": (lambda: ema_adam(1e-3, b1=1.0), "ema_adam: b1 must lie in [0, 1); got 1.0", 161002),
    "b2": (lambda: ema_adam(1e-3, b2=-0.1), "ema_adam: b2 must lie in [0, 1); got -0.1", 161002),
    "ema_decay": (lambda: ema_adam(1e-3, ema_decay=1.5), "ema_adam: ema_decay must lie in [0, 1]; got 1.5", 161002),
    "b1-float32": (lambda: ema_adam(1e-3, b1=np.float32(1)), "ema_adam: b1 must lie in [0, 1); got", 161002),
    "learning_rate": (
        lambda: ema_adam([1e-3]),
        "ema_adam: learning_rate must be a finite number or a 0-d array of one, or a schedule; got [0.001]",
        161002,
    ),
    "weight_decay": (
        lambda: ema_adam(1e-3, weight_decay=None),
        "ema_adam: weight_decay must be a finite number or a 0-d array of one; got None",
        161002,
    ),
    "eps": (lambda: ema_adam(1e-3, eps=-1.0), "ema_adam: eps must be at least 0; got -1.0", 161002),
    "weight_decay-negative": (
        lambda: ema_adam(1e-3, weight_decay=-1),
        "ema_adam: weight_decay must be at least 0; got -1",
        161002,
    ),
    "shape-of-leaf": (
        lambda: update_with_other_shapes(lambda size: {"w": jnp.ones(size)}),
        "ema_adam: grads['w'] must have its parameter's shape [2]; got float32[3]",
        161002,
    ),
    "shape-of-state": (
        lambda: ema_adam(1e-3).update({"w": jnp.ones(2)}, ema_adam(1e-3).init({"w": jnp.ones(3)}), {"w": jnp.ones(2)}),
        "ema_adam: mu['w'] must have its parameter's shape [2]; got float32[3]",
        161002,
    ),
    "mask": (lambda: ema_adam(1e-3, mask="w"), "ema_adam: mask must be a tree of bools, or a function", 161002),
    "mask-of-others": (
        lambda: ema_adam(1e-3, mask={"z": True}).init({"w": jnp.ones(3)}),
        "ema_adam: mask must have the structure of params, or a prefix of it; got {'z': True}",
        161002,
    ),
    "mu_dtype": (
        lambda: ema_adam(1e-3, mu_dtype="junk"),
        "ema_adam: mu_dtype must be a floating dtype, such as bfloat16 or float32; got 'junk'",
        161002,
    ),
    "nu_dtype": (
        lambda: ema_adam(1e-3, nu_dtype="int32"),
        "ema_adam: nu_dtype must be a floating dtype, such as bfloat16 or float32; got 'int32'",
        161002,
    ),
    "params": (update_without_params, "ema_adam: params must be given; got None", 161001),
    "shape": (update_with_other_shapes, "ema_adam: grads must have its parameter's shape [2]; got float32[3]", 161002),
    "apply": (
        lambda: fused_apply(ema_adam(1e-3), 1.0, None, None),
        "fused_apply: params must be given; got None",
        161001,
    ),
    "gradient": (
        lambda: fused_apply(
            ema_adam(1e-3), {"w": jnp.ones(4)}, ema_adam(1e-3).init({"w": jnp.ones(3)}), {"w": jnp.ones(3)}
        ),
        "fused_apply: grads['w'] must have its parameter's shape [3]; got float32[4]",
        161002,
    ),
    "none": (lambda: ema_params(optax.adam(1e-3).init(1.0)), "hold the state of an ema_adam as its init", 161002),
    "restored": (
        restored_without_target,
        "ema_params: opt_state must hold the state of an ema_adam as its init returned "
        "it; restore a checkpoint with `optimizer.init(params)` as the target; got [{'count': int32[]",
        161002,
    ),
    "restored-update": (
        update_of_restored,
        "ema_adam: state must be what the init of this transform returned; restore a checkpoint "
        "with `optimizer.init(params)` as the target; got [{'count': int32[]",
        161002,
    ),
    "two": (
        lambda: ema_params(optax.chain(ema_adam(1e-3), ema_adam(1e-3)).init(jnp.ones((2,)))),
        "ema_params: opt_state must hold no more than one average of a parameter; got float32[2]",
        161002,
    ),
}


def test_complex_parameters_are_two_real_ones(rng):
    numbers = rng.normal(size=(2, 6)).astype("float32")
    params = {"z": jnp.asarray(numbers[0] + 1j * numbers[1]), "x": jnp.asarray(numbers[0])}
    ours, theirs = map(optax.contrib.split_real_and_imaginary, (ema_adam(0.1, ema_decay=0.5), optax.adam(0.1)))
    state, their_state, their_params = ours.init(params), theirs.init(params), params
    averages = jax.tree.map(np.asarray, params)
    for step in range(1, 4):
        grads = jax.tree.map(lambda x, step=step: x * step, params)
        their_grads = jax.tree.map(lambda x, step=step: x * step, their_params)
        updates, state = ours.update(grads, state, params)
        their_updates, their_state = theirs.update(their_grads, their_state, their_params)
        params, their_params = optax.apply_updates(params, updates), optax.apply_updates(their_params, their_updates)
        averages = jax.tree.map(lambda average, x: 0.5 * average + 0.5 * np.asarray(x), averages, their_params)
    for found, expected in ((params, their_params), (ema_params(state), averages)):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), found, expected)
    with pytest.raises(
        BadParamError, match=r"at \['z'\] \(optax.contrib.split_real_and_imaginary takes complex ones\)"
    ):
        ema_adam(0.1).init({"z": params["z"]})


@pytest.mark.parametrize("dtype", ["int32", "complex64"])
def test_init_refuses_the_parameters_that_update_refuses(dtype):
    optimizer, params = ema_adam(1e-3), jnp.ones(3)
    wrong = {"w": params.astype(dtype)}
    sentences = set()
    for call in (
        lambda: optimizer.init(wrong),
        lambda: optimizer.init(jax.eval_shape(lambda: wrong)),
        lambda: optimizer.update({"w": params}, optimizer.init({"w": params}), wrong),
    ):
        with pytest.raises(
            BadParamError, match=rf"ema_adam: params must have a floating dtype( at \['w'\])? \(.*; got {dtype}\[3\]"
        ) as e:
            call()
        sentences.add(str(e.value).replace(" at ['w']", ""))
    assert len(sentences) == 1


@pytest.mark.parametrize("name", REFUSALS)
def test_ema_adam_optax_refuses(name):
    call, words, status = REFUSALS[name]
    for attempt in (call, jax.jit(call)):
        with pytest.raises(BadParamError) as refusal:
            attempt()
        assert words in str(refusal.value)
        assert refusal.value.status == status
