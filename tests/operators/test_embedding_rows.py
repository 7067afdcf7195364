"""Row gradients of an embedding, and EMA-Adam on them: against the dense ones, optax, and the demo's training."""

import functools

import contract
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from embedding_oracle import expected_gradient

import jaxops
from jaxops import BadParamError, RowGradients, embedding_row_gradients
from jaxops._demo import model

NO_ROW = 2**31 - 1
V, WIDTH = 50, 4


def draw(rng, positions=(3, 7), dtype="float32"):
    indices = np.minimum(rng.zipf(1.4, positions) - 2, V + 1).astype(np.int32)  # some are no rows
    return jnp.asarray(rng.normal(size=(*positions, WIDTH)), dtype), indices


def placed_in_zeros(touched, rows=V):
    return (
        jnp.zeros((rows, touched.values.shape[-1]), touched.values.dtype)
        .at[touched.rows]
        .set(touched.values, mode="drop")
    )


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale", [False, True], ids=["sum", "scaled"])
@pytest.mark.parametrize("positions", [(), (1,), (0,), (3, 7), (200,)], ids=str)
def test_row_gradients_equal_float64(positions, scale, dtype, rng):
    grad, indices = draw(rng, positions, dtype)
    attributes = {"padding_idx": 1, "scale_grad_by_freq": scale}
    touched = jax.jit(functools.partial(embedding_row_gradients, num_weights=V, **attributes))(grad, indices)
    expected_rows = np.unique(indices[(indices >= 0) & (indices < V) & (indices != 1)])
    assert touched.rows.shape == (min(indices.size, V),)
    assert touched.values.dtype == grad.dtype
    np.testing.assert_array_equal(touched.rows[: expected_rows.size], expected_rows)
    np.testing.assert_array_equal(touched.rows[expected_rows.size :], NO_ROW)
    np.testing.assert_array_equal(touched.values[expected_rows.size :].astype(jnp.float32), 0)
    truth = expected_gradient(grad, indices, V, **attributes)
    tolerance = 0.501 * float(jnp.finfo(dtype).eps) + 1e-6
    np.testing.assert_allclose(placed_in_zeros(touched).astype(jnp.float32), truth, rtol=tolerance, atol=1e-5)


def test_row_gradients_are_the_dense_gradient_bit_by_bit(rng):
    for dtype in ("float32", "bfloat16"):
        grad, indices = draw(rng, (300,), dtype)
        dense = jaxops.aclnn.embedding_dense_backward(grad, indices, num_weights=V, padding_idx=2)
        touched = embedding_row_gradients(grad, indices, num_weights=V, padding_idx=2)
        assert np.asarray(placed_in_zeros(touched)).tobytes() == np.asarray(dense).tobytes()


def test_row_gradients_skip_padding_and_count_from_the_end(rng):
    grad = jnp.ones((4, WIDTH)).at[1].set(jnp.nan)
    touched = embedding_row_gradients(grad, np.array([7, V - 1, 7, 0]), num_weights=V, padding_idx=-1)
    assert touched.rows.tolist() == [0, 7, NO_ROW, NO_ROW]
    np.testing.assert_array_equal(touched.values[:, 0], [1, 2, 0, 0])


def test_row_gradients_of_a_huge_table_take_memory_for_their_rows():
    grad, indices = jax.ShapeDtypeStruct((64, 32), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.int32)
    compiled = jax.jit(functools.partial(embedding_row_gradients, num_weights=2**31 - 1)).lower(grad, indices).compile()
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 4 * 64 * 32 * 4


GRAD, INDICES = np.ones((2, 3), np.float32), np.zeros(2, np.int32)
REFUSALS = {
    "float-indices": ((GRAD, INDICES.astype(np.float32)), {}, "indices must be integers; got float32[2]"),
    "int-grad": ((GRAD.astype(np.int32), INDICES), {}, "grad must be floating point; got int32[2, 3]"),
    "shape": ((GRAD, INDICES[:1]), {}, "grad must have shape (1, 'D'); got float32[2, 3]"),
    "weights": ((GRAD, INDICES), {"num_weights": 0}, "num_weights must be positive where there are indices; got 0"),
    "many": (
        (GRAD, INDICES),
        {"num_weights": 2**31},
        "num_weights must be an integer from 0 to 2147483647; got 2147483648",
    ),
    "padding": ((GRAD, INDICES), {"padding_idx": 5}, "padding_idx must be None or in [-5, 5); got 5"),
    "scale": ((GRAD, INDICES), {"scale_grad_by_freq": "no"}, "scale_grad_by_freq must be a bool; got 'no'"),
}


@pytest.mark.parametrize(("operands", "attributes", "words"), REFUSALS.values(), ids=REFUSALS)
def test_row_gradients_refuse_bad_input(operands, attributes, words):
    with pytest.raises(BadParamError) as refusal:
        embedding_row_gradients(*operands, **{"num_weights": 5, **attributes})
    assert str(refusal.value) == f"embedding_row_gradients: {words}"
    assert refusal.value.status == 161002


def make_state(rng, optimizer, dtype="float32"):
    """A table and a state as after some steps, with a vector beside the table."""
    params = {"table": jnp.asarray(rng.normal(size=(V, WIDTH)), dtype), "bias": jnp.asarray(rng.normal(size=3), dtype)}
    adam, average = optimizer.init(params)
    noisy = lambda tree: jax.tree.map(lambda x: x + jnp.asarray(rng.uniform(0.1, 1, x.shape), x.dtype), tree)  # noqa: E731
    return params, (adam._replace(count=adam.count + 6, mu=noisy(adam.mu), nu=noisy(adam.nu)), noisy(average))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["adamw", "l2"])
def test_ema_adam_rows_is_ema_adam_on_touched_rows_and_nothing_elsewhere(mode, dtype, rng):
    hyperparameters = {"weight_decay": 0.1, "mode": mode, "ema_decay": 0.9}
    sparse, dense = (make(0.1, **hyperparameters) for make in (jaxops.ema_adam_rows, jaxops.ema_adam))
    params, state = make_state(rng, dense, dtype)
    grad, indices = draw(rng, dtype=dtype)
    bias_grad = jnp.ones(3, dtype)
    touched = embedding_row_gradients(grad, indices, num_weights=V)
    is_touched = np.isin(np.arange(V), indices)
    grads = {"table": touched, "bias": bias_grad}
    found = jax.jit(functools.partial(jaxops.fused_apply, sparse))(grads, state, params)
    grads = {"table": placed_in_zeros(touched), "bias": bias_grad}
    expected = jax.jit(functools.partial(jaxops.fused_apply, dense))(grads, state, params)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    before = (params, state)
    for old, actual, wanted in zip(*map(jax.tree.leaves, (before, found, expected)), strict=True):
        assert actual.dtype == wanted.dtype
        old, actual, wanted = (np.asarray(x).astype(np.float64) for x in (old, actual, wanted))
        if actual.shape[:1] == (V,):
            np.testing.assert_array_equal(actual[~is_touched], old[~is_touched])
            assert np.all(np.any(actual[is_touched] != old[is_touched], axis=1))
            actual, wanted = actual[is_touched], wanted[is_touched]
        np.testing.assert_allclose(actual, wanted, rtol=1e-6 if dtype == "float32" else 8e-3)


@pytest.mark.slow
def test_ema_adam_rows_takes_the_steps_of_optax_where_all_rows_are_touched(rng):
    """Every row is looked up by every step, so that lazy Adam is Adam."""
    optimizer, adam = jaxops.ema_adam_rows(1e-2, weight_decay=0.1), optax.adamw(1e-2, weight_decay=0.1)
    params = peer = jnp.asarray(rng.normal(size=(V, WIDTH)), jnp.float32)
    state, peer_state = optimizer.init(params), adam.init(peer)
    for _ in range(3):
        indices = rng.permutation(np.concatenate([np.arange(V), rng.integers(0, V, 30)])).astype(np.int32)
        grad = jnp.asarray(rng.normal(size=(indices.size, WIDTH)), jnp.float32)
        touched = embedding_row_gradients(grad, indices, num_weights=V)
        params, state = jax.jit(functools.partial(jaxops.fused_apply, optimizer))(touched, state, params)
        dense = jnp.asarray(expected_gradient(grad, indices, V), jnp.float32)
        with jax.numpy_dtype_promotion("standard"):  # which optax needs
            updates, peer_state = adam.update(dense, peer_state, peer)
        peer = optax.apply_updates(peer, updates)
        np.testing.assert_allclose(params, peer, rtol=1e-5, atol=1e-6)


def test_ema_adam_rows_updates_donated_tables_in_place():
    optimizer, rows = jaxops.ema_adam_rows(1e-3), 20000
    params = {"table": jax.ShapeDtypeStruct((rows, 32), jnp.float32)}
    state = jax.eval_shape(optimizer.init, params)
    touched = RowGradients(jax.ShapeDtypeStruct((16,), jnp.int32), jax.ShapeDtypeStruct((16, 32), jnp.float32))

    def step(params, state, touched):
        return jaxops.fused_apply(optimizer, {"table": touched}, state, params)

    memory = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, touched).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 4 * rows * 32 * 4
    assert memory.temp_size_in_bytes < 100 * 16 * 32 * 4


def test_ema_adam_rows_goes_inside_other_transforms(rng):
    params, _ = make_state(rng, jaxops.ema_adam(1e-3))
    labels = {"table": "rows", "bias": "sgd"}
    optimizer = optax.multi_transform({"rows": jaxops.ema_adam_rows(1e-2), "sgd": optax.sgd(0.5)}, labels)
    touched = embedding_row_gradients(*draw(rng), num_weights=V)
    new, state = jaxops.fused_apply(optimizer, {"table": touched, "bias": jnp.ones(3)}, optimizer.init(params), params)
    np.testing.assert_allclose(new["bias"], params["bias"] - 0.5, rtol=1e-6)
    live = np.asarray(touched.rows[touched.rows != NO_ROW])
    # The first step of Adam moves every parameter by the learning rate.
    np.testing.assert_allclose(np.abs(new["table"] - params["table"])[live], 1e-2, rtol=1e-3)
    assert jaxops.ema_params(state)["table"].shape == (V, WIDTH)


def test_ema_adam_rows_refuses_what_does_not_fit():
    optimizer, params = jaxops.ema_adam_rows(1e-3), jnp.zeros((V, WIDTH))
    touched = RowGradients(jnp.zeros(2, jnp.int32), jnp.zeros((2, WIDTH + 1)))
    with pytest.raises(
        BadParamError, match=r"params must have a table \(V, 5\) for RowGradients; got float32\[50, 4\]"
    ):
        optimizer.update(touched, optimizer.init(params), params)
    with pytest.raises(BadParamError, match="ema_adam_rows: params must be given; got None"):
        optimizer.update(touched, optimizer.init(params))
    with pytest.raises(BadParamError, match=r"ema_adam: grads must hold arrays .*; got 'RowGradients'"):
        jaxops.ema_adam(1e-3).update(touched, optimizer.init(params), params)
    clipped, fitting = (
        optax.chain(optax.clip_by_global_norm(1.0), optimizer),
        touched._replace(values=jnp.zeros((2, WIDTH))),
    )
    with pytest.raises(
        BadParamError,
        match=r"^fused_apply: grads must be arrays for every transform but ema_adam_rows, and this one rais",
    ):
        jaxops.fused_apply(clipped, {"table": fitting}, clipped.init({"table": params}), {"table": params})
    with pytest.raises(TypeError, match="nonsense"):
        jaxops.ema_adam_rows(1e-3, nonsense=1)


@pytest.mark.slow
def test_row_gradients_train_the_embedding_of_the_demo_to_the_loss_of_dense_ones():
    """With a head of its own, since a tied one touches all rows."""
    shape = model.Shape(vocabulary=64, width=32, heads=2, depth=1, context=16)
    rng = np.random.default_rng(0)
    successors = rng.integers(0, shape.vocabulary, size=(shape.vocabulary, 2))

    def draw_text():
        tokens = [rng.integers(0, shape.vocabulary, 16)]
        for _ in range(shape.context):
            tokens.append(successors[tokens[-1], rng.integers(0, 2, 16)])
        return np.stack(tokens, 1).astype(np.int32)

    batches = [draw_text() for _ in range(120)]

    def loss(looked_up, rest, tokens):
        hidden = model.hidden_states({**rest, "table": looked_up}, tokens[:, :-1], shape, lambda rows, _: rows)
        return jaxops.linear_cross_entropy(hidden, rest["head"], tokens[:, 1:])

    def train(is_sparse):
        make = jaxops.ema_adam_rows if is_sparse else jaxops.ema_adam
        optimizer = make(1e-2, b2=0.99, weight_decay=0.0, ema_decay=0.9)

        @jax.jit
        def step(params, state, tokens):
            rest = {name: value for name, value in params.items() if name != "table"}
            looked_up, pull_back = jax.vjp(lambda table: jaxops.embedding(table, tokens[:, :-1]), params["table"])
            value, (grad, grads) = jax.value_and_grad(loss, (0, 1))(looked_up, rest, tokens)
            if is_sparse:
                touched = embedding_row_gradients(grad, tokens[:, :-1], num_weights=shape.vocabulary)
            else:
                (touched,) = pull_back(grad)
            return *jaxops.fused_apply(optimizer, {**grads, "table": touched}, state, params), value

        params = model.init(jax.random.key(0), shape)
        params["head"] = params["table"]
        state, losses = optimizer.init(params), []
        for tokens in batches:
            params, state, value = step(params, state, tokens)
            losses.append(float(value))
        return np.mean(losses[:5]), np.mean(losses[-20:])

    (start, of_rows), (_, of_dense) = train(True), train(False)
    # Every token has two successors, and no model does better than to know them.
    assert of_dense < 0.5 * start
    assert abs(of_rows - of_dense) < 0.02 * of_dense


def operands(rng):
    return rng.normal(size=(8, 2, WIDTH)).astype(np.float32), rng.integers(0, 5, size=(8, 2)).astype(np.int32)


CASES = [
    contract.Case(
        "rows",
        lambda grad, ids: tuple(embedding_row_gradients(grad, ids, num_weights=5, scale_grad_by_freq=True)),
        operands,
        differentiable=(0,),
        batched=(0, 0),
        operator="embedding_rows",
        backward="embedding",
    )
]


@pytest.mark.parametrize("promise", contract.PROMISES, ids=contract.promise_name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_row_gradients_keep_promise(case, promise):
    promise(case)


def test_ema_adam_rows_takes_injected_hyperparameters(rng):
    grad, indices = draw(rng)
    params = {"table": jnp.asarray(rng.normal(size=(V, WIDTH)), jnp.float32)}
    grads = {"table": embedding_row_gradients(grad, indices, num_weights=V)}
    plain = jaxops.ema_adam_rows(1e-2, b1=0.8)
    injected = optax.inject_hyperparams(jaxops.ema_adam_rows)(1e-2, b1=0.8)
    expected, actual = (
        jaxops.fused_apply(optimizer, grads, optimizer.init(params), params)[0] for optimizer in (plain, injected)
    )
    np.testing.assert_allclose(actual["table"], expected["table"], rtol=1e-6)
