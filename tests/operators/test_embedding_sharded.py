"""Embeddings whose table is split over devices by rows or columns, and whose batch is: nothing gathers the table."""

import functools
import re

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxops
from jaxops import BadParamError, embedding, embedding_row_gradients
from jaxops.testing.meshes import gathered_sizes

V, WIDTH, ROWS = 64, 16, 32
OPTIONS = {"padding": {"padding_idx": -3}, "scaled": {"padding_idx": 5, "scale_grad_by_freq": True}}


def draw(rng):
    indices = np.minimum(rng.zipf(1.2, (ROWS, 2)) - 1, V - 1).astype(np.int32)
    return rng.normal(size=(V, WIDTH)).astype(np.float32), indices


def loss(table, indices, **options):
    return jnp.sum(jnp.sin(embedding(table, indices, **options)))


def mesh_of(axis_type=AxisType.Auto):
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(axis_type,) * 2)


@pytest.mark.sampled
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_embedding_over_a_split_vocabulary_equals_one_device(options, rng):
    table, indices = draw(rng)
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    lookup = functools.partial(embedding, vocab_axis="model", **options)
    split = jax.shard_map(lookup, mesh=mesh, in_specs=(P("model"), P()), out_specs=P())
    one = functools.partial(embedding, **options)
    np.testing.assert_array_equal(jax.jit(split)(table, indices), one(table, indices))
    gradient = jax.jit(jax.grad(lambda table: jnp.sum(jnp.sin(split(table, indices)))))
    contract.assert_close(gradient(table), jax.grad(loss)(table, indices, **options))
    tangents = jnp.cos(table)
    actual = jax.jit(lambda table: jax.jvp(lambda table: split(table, indices), (table,), (tangents,))[1])(table)
    contract.assert_close(actual, jax.jvp(lambda table: one(table, indices), (table,), (tangents,))[1])


def test_a_table_that_is_not_split_over_the_vocabulary_axis_is_refused(rng):
    table, _ = draw(rng)

    def look_up(spec):
        lookup = functools.partial(embedding, vocab_axis="model")
        return jax.jit(jax.shard_map(lookup, mesh=mesh_of(), in_specs=(spec, P()), out_specs=P()))(table, np.array([V]))

    assert np.isnan(look_up(P("model"))).all()  # every device holding all rows, the id would find one
    with pytest.raises(BadParamError, match="embedding: table must be split over mesh axis 'model' by the in_specs of"):
        look_up(P())


def test_embedding_over_a_split_vocabulary_exchanges_the_rows_it_looks_up(rng):
    table, indices = draw(rng)
    lookup = functools.partial(embedding, vocab_axis="model")
    specs = {"in_specs": (P("model"), P("data")), "out_specs": P("data")}
    split = jax.shard_map(lookup, mesh=mesh_of(), **specs)
    step = jax.jit(jax.value_and_grad(lambda table, indices: jnp.sum(jnp.sin(split(table, indices)))))
    compiled = step.lower(table, indices).compile()
    contract.assert_close(compiled(table, indices), jax.value_and_grad(loss)(table, indices))
    text = compiled.as_text()
    assert "all-gather" not in text
    reduced = [shape for types in re.findall(r"= (.*?) all-reduce(?:-start)?\(", text) for shape in types.split(" ")]
    sizes = {
        int(np.prod([int(n) for n in dims.split(",") if n])) for s in reduced for dims in re.findall(r"\[(.*?)\]", s)
    }
    # The rows of a device's part of the batch; its part of the table, between the halves of the batch; and the loss.
    assert max(sizes) == max(ROWS * 2 * WIDTH // 2, V * WIDTH // 4)


def test_embedding_over_a_split_vocabulary_gives_nan_for_ids_out_of_range(rng):
    table, _ = draw(rng)
    indices = np.array([0, -1, V, V - 1, -(2**31), 2**31 - 1])
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    lookup = functools.partial(embedding, vocab_axis="model")
    split = jax.jit(jax.shard_map(lookup, mesh=mesh, in_specs=(P("model"), P()), out_specs=P()))
    np.testing.assert_array_equal(np.isnan(split(table, indices)[:, 0]), [False, True, True, False, True, True])
    with pytest.raises(BadParamError, match=r"padding_idx must be in \[-64, 64\); got 64"):
        jax.shard_map(functools.partial(lookup, padding_idx=V), mesh=mesh, in_specs=(P("model"), P()), out_specs=P())(
            table, indices
        )


LAYOUTS = {
    "rows": (P("model", None), P()),
    "rows, batch": (P("model", None), P("data")),
    "columns": (P(None, "model"), P()),
    "columns, batch": (P(None, "model"), P("data")),
    "rows and batch over the same devices": (P("data", None), P("data")),
    "both": (P("data", "model"), P()),
}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("axis_type", "options"), [(AxisType.Auto, OPTIONS["scaled"]), (AxisType.Explicit, {})], ids=str
)
@pytest.mark.parametrize("specs", LAYOUTS.values(), ids=LAYOUTS)
def test_embedding_leaves_a_split_table_split_under_jit(specs, axis_type, options, rng):
    table, indices = draw(rng)
    placed = [
        jax.device_put(x, NamedSharding(mesh_of(axis_type), s)) for x, s in zip((table, indices), specs, strict=True)
    ]
    step = jax.value_and_grad(functools.partial(loss, **options))
    compiled = jax.jit(step).lower(*placed).compile()
    contract.assert_close(compiled(*placed), step(table, indices))
    # What is gathered are ids, or rows that were looked up and cotangents: fewer than there are in a part of the table.
    gathered = [size for size in gathered_sizes(compiled.as_text()) if size >= table.size // 4]
    assert gathered == []


def test_row_gradients_of_a_split_table_are_those_of_the_owner(rng):
    grad, (_, indices) = jnp.asarray(rng.normal(size=(ROWS, 2, WIDTH)), jnp.float32), draw(rng)
    attributes = {"num_weights": V, **OPTIONS["scaled"]}
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))

    def dense(rows, grad, indices):
        touched = embedding_row_gradients(grad, indices, vocab_axis="model", **attributes)
        return rows.at[touched.rows].set(touched.values, mode="drop")

    split = jax.jit(jax.shard_map(dense, mesh=mesh, in_specs=(P("model"), P(), P()), out_specs=P("model")))
    touched = embedding_row_gradients(grad, indices, **attributes)
    expected = jnp.zeros((V, WIDTH)).at[touched.rows].set(touched.values, mode="drop")
    contract.assert_close(split(jnp.zeros((V, WIDTH)), grad, indices), expected)


def test_row_gradients_of_a_split_batch_are_exchanged_and_summed_again(rng):
    grad, (_, indices) = jnp.asarray(rng.normal(size=(ROWS, 2, WIDTH)), jnp.float32), draw(rng)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def summed(grad, indices):
        touched = embedding_row_gradients(grad, indices, num_weights=V)
        rows, values = (jax.lax.all_gather(x, "data", tiled=True) for x in touched)
        touched = embedding_row_gradients(values, rows, num_weights=V)
        return jax.tree.map(lambda x: x[None], touched)

    every = jax.jit(jax.shard_map(summed, mesh=mesh, in_specs=P("data"), out_specs=P("data")))(grad, indices)
    expected = embedding_row_gradients(grad, indices, num_weights=V)
    for device in range(8):
        contract.assert_close(jax.tree.map(lambda x, at=device: x[at], every), expected)


@pytest.mark.sampled
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("spec", [P("model", None), P(None, "model")], ids=str)
def test_ema_adam_rows_leaves_a_split_table_split(spec, axis_type, rng):
    table, indices = draw(rng)
    touched = embedding_row_gradients(
        rng.normal(size=(4, WIDTH)).astype(np.float32), indices[:2].ravel(), num_weights=V
    )
    optimizer = jaxops.ema_adam_rows(1e-2, weight_decay=0.1)
    expected = jaxops.fused_apply(optimizer, touched, optimizer.init(table), table)
    sharding = NamedSharding(mesh_of(axis_type), spec)
    placed = jax.device_put(table, sharding)
    state = jax.jit(optimizer.init)(placed)
    touched = jax.device_put(touched, NamedSharding(mesh_of(axis_type), P()))
    compiled = jax.jit(functools.partial(jaxops.fused_apply, optimizer)).lower(touched, state, placed).compile()
    found = compiled(touched, state, placed)
    contract.assert_close(found, expected)
    assert found[0].sharding.is_equivalent_to(sharding, 2)
    assert [size for size in gathered_sizes(compiled.as_text()) if size >= table.size // 4] == []


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embedding_gradient_takes_every_form_inside_shard_map(dtype, rng):
    """One that runs here, and those of other platforms as far as they can be lowered."""
    table, indices = draw(rng)
    table = jnp.asarray(np.concatenate([table, table]), dtype)  # of more rows than a device has positions
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def total(table, indices):
        rows = embedding(table, indices, scale_grad_by_freq=True)
        return jax.lax.psum(jnp.sum(jnp.sin(rows.astype(jnp.float32))), "data")

    gradient = jax.jit(jax.grad(jax.shard_map(total, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())))
    parts = np.split(indices, 8)
    expected = sum(
        np.asarray(jax.grad(loss)(table.astype(jnp.float32), part, scale_grad_by_freq=True)) for part in parts
    )
    tolerance = 2e-2 if dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(gradient(table, indices).astype(jnp.float32), expected, rtol=tolerance, atol=tolerance)
    for platform in ("cuda", "tpu"):
        assert (
            "func.func public @main" in gradient.trace(table, indices).lower(lowering_platforms=(platform,)).as_text()
        )
