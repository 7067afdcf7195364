"""The modules for Flax and Equinox, beside the frameworks' own: values, gradients, state, checkpoints and refusals."""

import functools
import inspect

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxops
import jaxops.equinox
import jaxops.linen
import jaxops.nnx
import lowering

CHANNELS, FEATURES, CLASSES = 3, 5, 7
NEAR = {"rtol": 2e-5, "atol": 2e-5}
KEY = jax.random.key(0)


def close(ours, theirs, **tolerance):
    """Same structure, names, shapes and dtypes, and values that are near."""
    assert jax.tree.map(jnp.shape, ours) == jax.tree.map(jnp.shape, theirs)
    assert jax.tree.map(lambda x: jnp.result_type(x), ours) == jax.tree.map(lambda x: jnp.result_type(x), theirs)
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(np.asarray(mine, np.float64), np.asarray(other, np.float64), **{**NEAR, **tolerance})


@pytest.fixture(autouse=True)
def promotion():
    """What users have: the frameworks' own modules rely on it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def batches(rng):
    return jnp.asarray(rng.normal(3, 2, (3, 4, 5, 6, CHANNELS)), jnp.float32)


def rows(rng, *shape, dtype=jnp.float32):
    return jnp.asarray(rng.normal(size=(*shape, FEATURES)), dtype)


# ---- batch norm of Flax: NNX


def nnx_norm(library, **options):
    return library.BatchNorm(CHANNELS, rngs=nnx.Rngs(0), momentum=0.8, **options)


def nnx_steps(layer, batches, weights):
    """Losses and gradients of several steps, the state after them, and what evaluation gives."""

    @nnx.jit
    def step(layer, x):
        def loss(layer, x):
            return jnp.sum(layer(x) * weights)

        return nnx.value_and_grad(loss, argnums=(0, 1))(layer, x)

    found = [step(layer, x) for x in batches]
    layer.eval()
    before = nnx.to_pure_dict(nnx.state(layer))
    found.append(layer(batches[0]))
    close(nnx.to_pure_dict(nnx.state(layer)), before)  # which evaluation leaves as it is
    layer.train()
    return [nnx.to_pure_dict(each) if isinstance(each, nnx.State) else each for each in jax.tree.leaves(found)]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_bias": False, "epsilon": 1e-3},
        {"use_scale": False},
        {"scale_init": nnx.initializers.normal(), "bias_init": nnx.initializers.normal(), "use_fast_variance": False},
    ],
    ids=lambda options: "-".join(options) or "defaults",
)
def test_nnx_batch_norm_trains_and_evaluates_as_flax(options, batches, rng):
    weights = jnp.asarray(rng.normal(size=batches.shape[1:]), jnp.float32)
    ours, theirs = nnx_norm(jaxops.nnx, **options), nnx_norm(nnx, **options)
    close(nnx_steps(ours, batches, weights), nnx_steps(theirs, batches, weights), atol=2e-4)
    close(nnx.to_pure_dict(nnx.state(ours)), nnx.to_pure_dict(nnx.state(theirs)))


@pytest.mark.sampled
@pytest.mark.parametrize("shape", [(8, 3), (4, 5, 3), (2, 3, 4, 2, 3)], ids=str)
def test_flax_batch_norms_take_every_rank(shape, rng):
    x = jnp.asarray(rng.normal(size=shape), jnp.float32)
    close(nnx_norm(jaxops.nnx)(x), nnx_norm(nnx)(x))
    ours, theirs = (library.BatchNorm(use_running_average=False) for library in (jaxops.linen, nn))
    variables = theirs.init(KEY, x)
    close(*(layer.apply(variables, x, mutable="batch_stats") for layer in (ours, theirs)))


def test_nnx_batch_norm_exchanges_state_with_flax(batches):
    ours, theirs = nnx_norm(jaxops.nnx), nnx_norm(nnx)
    ours(batches[0])
    nnx.update(theirs, nnx.state(ours))
    close(theirs(batches[1], use_running_average=True), ours(batches[1], use_running_average=True))
    theirs(batches[2])
    nnx.update(ours, nnx.state(theirs))
    close(ours(batches[1], use_running_average=True), theirs(batches[1], use_running_average=True))
    graph, params, statistics = nnx.split(ours, nnx.Param, nnx.BatchStat)
    assert ({*params}, {*statistics}) == ({"scale", "bias"}, {"mean", "var"})
    merged = nnx.merge(graph, params, statistics)
    assert isinstance(merged, jaxops.nnx.BatchNorm)
    close(merged(batches[0]), ours(batches[0]))


@pytest.mark.sampled
@pytest.mark.parametrize("input_dtype", [jnp.float32, jnp.bfloat16], ids=["float32_x", "bfloat16_x"])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16], ids=["no_dtype", "bfloat16"])
@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16], ids=["float32_params", "bfloat16_params"])
def test_flax_batch_norms_have_the_dtypes_of_flax(input_dtype, dtype, param_dtype, batches):
    x, options = batches[0].astype(input_dtype), {"dtype": dtype, "param_dtype": param_dtype}
    near = {"rtol": 0.02, "atol": 0.03}
    ours, theirs = nnx_norm(jaxops.nnx, **options), nnx_norm(nnx, **options)
    close(ours(x), theirs(x), **near)
    close(nnx.to_pure_dict(nnx.state(ours)), nnx.to_pure_dict(nnx.state(theirs)), **near)
    close(ours(x, use_running_average=True), theirs(x, use_running_average=True), **near)
    ours, theirs = (library.BatchNorm(momentum=0.8, **options) for library in (jaxops.linen, nn))
    variables = theirs.init(KEY, x, use_running_average=True)
    close(ours.init(KEY, x, use_running_average=True), variables)
    updated = [layer.apply(variables, x, False, mutable="batch_stats") for layer in (ours, theirs)]
    close(*updated, **near)
    close(*(layer.apply(variables, x, True) for layer in (ours, theirs)), **near)


def test_batch_norms_keep_the_digits_of_data_far_from_zero(rng):
    """Flax's own have no correct digit here, unless `use_fast_variance` is off."""
    x = jnp.asarray(rng.normal(1e4, 1, (64, CHANNELS)), jnp.float32)
    ours = jaxops.nnx.BatchNorm(CHANNELS, momentum=0, rngs=nnx.Rngs(0))
    ours(x)
    np.testing.assert_allclose(ours.var[...], np.var(np.asarray(x, np.float64), axis=0), rtol=1e-5)


def test_nnx_modules_are_constructed_and_viewed_like_flax():
    for name in ("BatchNorm", "Dropout"):
        ours, theirs = getattr(jaxops.nnx, name), getattr(nnx, name)
        assert inspect.signature(ours) == inspect.signature(theirs)
    layer = nnx_norm(jaxops.nnx, use_running_average=None)
    with pytest.raises(ValueError, match=r"^jaxops\.nnx\.BatchNorm: use_running_average must be given to the constr"):
        layer(jnp.ones((2, CHANNELS)))
    view = nnx.view(layer, use_running_average=True)
    np.testing.assert_allclose(view(jnp.ones((2, CHANNELS))), 1, rtol=1e-4)
    assert layer.use_running_average is None


# ---- batch norm of Flax: Linen


class Norms(nn.Module):
    """A model that knows its library only by the layers that it is given."""

    library: object

    @nn.compact
    def __call__(self, x, train):
        for _ in range(2):
            x = nn.Dense(CHANNELS)(x)
            x = self.library.BatchNorm(use_running_average=not train, momentum=0.8)(x)
        return x


def linen_steps(model, variables, batches, weights):
    @jax.jit
    def step(variables, x):
        def loss(params):
            y, updated = model.apply({**variables, "params": params}, x, train=True, mutable="batch_stats")
            return jnp.sum(y * weights), updated

        (value, updated), grads = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        params = jax.tree.map(lambda p, g: p - 0.01 * g, variables["params"], grads)
        return {"params": params, **updated}, (value, grads)

    found = []
    for x in batches:
        variables, result = step(variables, x)
        found.append(result)
    return found, variables, model.apply(variables, batches[0], train=False)


def test_linen_batch_norm_trains_and_evaluates_as_flax_from_its_checkpoint(batches, rng):
    weights = jnp.asarray(rng.normal(size=batches.shape[1:]), jnp.float32)
    ours, theirs = Norms(jaxops.linen), Norms(nn)
    variables = theirs.init(KEY, batches[0], train=True)
    close(ours.init(KEY, batches[0], train=True), variables)
    tolerance = {"rtol": 1e-3, "atol": 1e-3}  # of 3 steps in float32, whose gradients are sums that nearly cancel
    found = linen_steps(ours, variables, batches, weights)
    close(found, linen_steps(theirs, variables, batches, weights), **tolerance)
    close(theirs.apply(found[1], batches[0], train=False), found[2])  # and the reverse


def test_batch_norms_share_statistics_over_a_mesh(batches):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    alone, split = (jaxops.linen.BatchNorm(use_running_average=False, axis_name=axis) for axis in (None, "data"))
    variables = alone.init(KEY, batches[0])

    def train(layer, x):
        return layer.apply(variables, x, mutable="batch_stats")

    apply = jax.shard_map(
        lambda x: train(split, x), mesh=mesh, in_specs=spec, out_specs=(spec, jax.sharding.PartitionSpec())
    )
    close(jax.jit(apply)(batches[0]), train(alone, batches[0]))
    theirs = nn.BatchNorm(use_running_average=False, axis_name="data")
    mapped = (jax.vmap(functools.partial(train, layer), axis_name="data") for layer in (split, theirs))
    close(*(fn(batches) for fn in mapped))
    with pytest.raises(ValueError, match=r"^jaxops\.linen\.BatchNorm: axis_name must name an axis of a surrounding sh"):
        train(split, batches[0])


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("shape", [(4, 5, 6, CHANNELS), (4, 5, 6, 1), (6, 1)], ids=str)
def test_batch_norms_count_what_a_mask_says_as_flax(shape, batches, rng):
    x, mask = batches[0], jnp.asarray(rng.random(shape) < 0.6)
    weights = jnp.asarray(rng.normal(size=x.shape), jnp.float32)
    found = []
    for library in (jaxops.linen, nn):
        layer = library.BatchNorm(use_running_average=False, momentum=0.8)
        variables = layer.init(KEY, x)

        def loss(x, layer=layer, variables=variables):
            y, updated = layer.apply(variables, x, mask=mask, mutable="batch_stats")
            return jnp.sum(y * weights), (y, updated)

        found.append(jax.value_and_grad(loss, has_aux=True)(x))
    close(*found, rtol=1e-4, atol=1e-5)
    ours, theirs = nnx_norm(jaxops.nnx), nnx_norm(nnx)
    close(ours(x, mask=mask), theirs(x, mask=mask), atol=1e-5)
    close(ours.var[...], theirs.var[...])


# ---- batch norm of Equinox


def equinox_norms(axis_name=None, **options):
    """Our layer and Equinox's, each as a function of a batch and its state, with the first state."""
    ours = eqx.nn.make_with_state(jaxops.equinox.BatchNorm)(CHANNELS, axis_name, momentum=0.8, **options)
    theirs = eqx.nn.make_with_state(eqx.nn.BatchNorm)(CHANNELS, "batch", momentum=0.8, mode="batch", **options)
    return (*ours, mapped if axis_name else lambda layer: layer), (*theirs, mapped)


def mapped(layer):
    return jax.vmap(layer, in_axes=(0, None), out_axes=(0, None), axis_name="batch")


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("axis_name", [None, "batch"], ids=["whole", "in a vmap"])
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_equinox_batch_norm_trains_and_infers_as_equinox(affine, axis_name, batches, rng):
    images = jnp.moveaxis(batches, -1, 2)
    weights = jnp.asarray(rng.normal(size=images.shape[1:]), jnp.float32)
    results = []
    for layer, state, on_batch in equinox_norms(axis_name, channelwise_affine=affine):

        @eqx.filter_jit
        @eqx.filter_value_and_grad(has_aux=True)
        def loss(differentiated, state, on_batch=on_batch):
            layer, x = differentiated
            y, state = on_batch(layer)(x, state)
            return jnp.sum(y * weights), state

        found = []
        for x in images:
            (value, state), grads = loss((layer, x), state)
            found.append((value, jax.tree.leaves(grads), jax.tree.leaves(state)))
        y, same = on_batch(eqx.nn.inference_mode(layer))(images[0], state)
        results.append((found, y, jax.tree.leaves(same)))
    close(*results, atol=2e-4)


def test_equinox_batch_norm_exchanges_leaves_with_equinox(batches, tmp_path):
    x = jnp.moveaxis(batches[0], -1, 1)
    (ours, our_state, _), (theirs, their_state, on_batch) = equinox_norms()
    _, updated = on_batch(theirs)(x, their_state)
    eqx.tree_serialise_leaves(tmp_path / "theirs", (theirs, updated))
    layer, state = eqx.tree_deserialise_leaves(tmp_path / "theirs", (ours, our_state))
    y, state = layer(x, state, inference=True)
    close(y, on_batch(eqx.nn.inference_mode(theirs))(x, updated)[0])
    eqx.tree_serialise_leaves(tmp_path / "ours", (layer, state))
    back = eqx.tree_deserialise_leaves(tmp_path / "ours", (theirs, updated))
    close(*(jax.tree.leaves(eqx.filter(each, eqx.is_array)) for each in (back, (theirs, updated))))


def test_equinox_batch_norm_is_a_stateful_layer_of_any_floating_dtype(batches):
    x = jnp.moveaxis(batches[0], -1, 1)
    layer, state = eqx.nn.make_with_state(jaxops.equinox.BatchNorm)(CHANNELS)
    model = eqx.nn.Sequential([layer, eqx.nn.Lambda(jax.nn.relu)])
    y, updated = model(x, state)
    wide, updated = layer(x.astype(jnp.bfloat16), updated)
    close(y, jax.nn.relu(wide), atol=0.02)
    assert wide.dtype == jnp.float32  # as of weight and bias
    assert {leaf.dtype for leaf in jax.tree.leaves(updated)} == {jnp.dtype("float32"), jnp.dtype("int32")}
    half, state = eqx.nn.make_with_state(jaxops.equinox.BatchNorm)(CHANNELS, dtype=jnp.bfloat16)
    assert half(x.astype(jnp.bfloat16), state)[0].dtype == jnp.bfloat16


# ---- dropout


def nnx_dropout(**options):
    return lambda x: jaxops.nnx.Dropout(rngs=nnx.Rngs(dropout=0, other=1), **options)(x)


def linen_dropout(**options):
    layer = jaxops.linen.Dropout(**{"deterministic": False, **options})
    keys = {"dropout": jax.random.key(0), "other": jax.random.key(1)}
    return lambda x, **call: layer.apply({}, x, rngs=keys, **call)


def equinox_dropout(rate):
    layer = jaxops.equinox.Dropout(rate)
    return lambda x: layer(x, key=KEY)


@pytest.mark.parametrize("dropout", [nnx_dropout, linen_dropout, equinox_dropout])
def test_dropout_keeps_at_its_rate_and_has_its_gradient(dropout):
    x = jnp.full((64, 64), 3, jnp.bfloat16)
    layer = dropout(rate=0.25)
    y, pull = jax.vjp(layer, x)
    (grad,) = pull(jnp.ones_like(y))
    assert y.dtype == jnp.bfloat16
    assert 0.7 < float(jnp.mean(y != 0)) < 0.8
    np.testing.assert_array_equal(jnp.unique(y), [0, 4])
    np.testing.assert_allclose(grad, jnp.where(y != 0, 1 / 0.75, 0), rtol=0.01)
    np.testing.assert_array_equal(dropout(rate=0)(x), x)
    np.testing.assert_array_equal(dropout(rate=1)(x), jnp.zeros_like(x))


def test_dropout_draws_from_the_streams_of_flax():
    x = jnp.ones(64)
    layer = jaxops.nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=3))
    key = nnx.Rngs(dropout=3)["dropout"].fork()()
    close(layer(x), jaxops.dropout(key, x, 0.5))
    assert (layer(x) != layer(x)).any()  # each call takes the next key
    close(layer(x, rngs=KEY), jaxops.dropout(KEY, x, 0.5))
    stream = nnx.Rngs(dropout=5)
    key = nnx.Rngs(dropout=5).dropout()
    close(layer(x, rngs=stream), jaxops.dropout(key, x, 0.5))
    other = linen_dropout(rate=0.5, rng_collection="other")(x)
    assert (other != linen_dropout(rate=0.5)(x)).any()
    close(jaxops.linen.Dropout(0.5).apply({}, x, False, rng=KEY), jaxops.dropout(KEY, x, 0.5))

    @nnx.jit
    def drop(layer, x):
        return layer(x)

    assert (drop(layer, x) != drop(layer, x)).any()  # and its count leaves the jitted function


def test_dropout_is_off_in_evaluation():
    x = jnp.ones(64)
    layer = jaxops.nnx.Dropout(0.5)
    layer.eval()
    for same in (
        layer(x),
        jaxops.nnx.Dropout(0.5)(x, deterministic=True),
        nnx.view(jaxops.nnx.Dropout(0.5), deterministic=True)(x),
        linen_dropout(rate=0.5, deterministic=None)(x, deterministic=True),
        eqx.nn.inference_mode(jaxops.equinox.Dropout(0.5))(x),
        jaxops.equinox.Dropout(0.5)(x, inference=True),
    ):
        np.testing.assert_array_equal(same, x)


# ---- loss heads


def expected_loss(logits, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
    return jnp.mean(losses)


def labels_like(x, rng):
    return jnp.asarray(rng.integers(0, CLASSES, x.shape[:-1]))


def nnx_layers(**options):
    return (
        nnx.Linear(FEATURES, CLASSES, rngs=nnx.Rngs(0), bias_init=nnx.initializers.normal(), **options),
        nnx.Linear(FEATURES, CLASSES, rngs=nnx.Rngs(0), use_bias=False, **options),
        nnx.Embed(CLASSES, FEATURES, rngs=nnx.Rngs(0), **options),
    )


@pytest.mark.sampled
@pytest.mark.parametrize("layer", nnx_layers(), ids=["biased", "unbiased", "tied"])
def test_nnx_loss_head_is_the_cross_entropy_of_the_layers_logits(layer, rng):
    x = rows(rng, 2, 4)
    labels = labels_like(x, rng)
    head = jaxops.nnx.LossHead(layer)
    plain = layer.attend if isinstance(layer, nnx.Embed) else layer
    close(head.logits(x), plain(x))

    @nnx.jit
    @nnx.value_and_grad(argnums=(0, 1))
    def ours(layer, x):
        return jaxops.nnx.LossHead(layer)(x, labels)

    @nnx.value_and_grad(argnums=(0, 1))
    def theirs(layer, x):
        return expected_loss(layer.attend(x) if isinstance(layer, nnx.Embed) else layer(x), labels)

    found, expected = ours(layer, x), theirs(layer, x)
    assert {*found[1][0]} == {*expected[1][0]} == {*nnx.state(layer)}
    close(jax.tree.leaves(found), jax.tree.leaves(expected))


@pytest.mark.long
def test_nnx_loss_head_ties_the_table_of_a_model(rng):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(CLASSES, FEATURES, rngs=rngs)
            self.head = jaxops.nnx.LossHead(self.embed)

    tokens = labels_like(rows(rng, 8), rng)
    model = Model(nnx.Rngs(0))
    graph, params = nnx.split(model, nnx.Param)
    assert len(jax.tree.leaves(params)) == 1
    grads = nnx.grad(lambda model: model.head(model.embed(tokens), tokens))(nnx.merge(graph, params))
    expected = jax.grad(lambda table: expected_loss(table[tokens] @ table.T, tokens))(model.embed.embedding[...])
    close(jax.tree.leaves(grads), [expected])


def test_linen_loss_head_is_the_cross_entropy_of_the_logits_of_dense(rng):
    x = rows(rng, 2, 4)
    labels = labels_like(x, rng)
    for use_bias in (True, False):
        options = {"use_bias": use_bias, "bias_init": nn.initializers.normal()}
        head, dense = jaxops.linen.LossHead(CLASSES, **options), nn.Dense(CLASSES, **options)
        variables = dense.init(KEY, x)
        close(head.init(KEY, x, labels), variables)
        close(head.init(KEY, x, method="logits"), variables)
        close(head.apply(variables, x, method="logits"), dense.apply(variables, x))
        ours = jax.jit(jax.value_and_grad(lambda v, x, head=head: head.apply(v, x, labels), argnums=(0, 1)))
        theirs = jax.value_and_grad(lambda v, x, dense=dense: expected_loss(dense.apply(v, x), labels), argnums=(0, 1))
        close(ours(variables, x), theirs(variables, x))


class LinenClassifier(nn.Module):
    """Both losses of one head, in one call, beside another layer."""

    is_ours: bool

    @nn.compact
    def __call__(self, x, labels):
        x = nn.Dense(FEATURES)(x)
        if not self.is_ours:
            logits = nn.Dense(CLASSES)(x)
            return expected_loss(logits, labels), logits
        head = jaxops.linen.LossHead(CLASSES, name="Dense_1")
        return head(x, labels), head.logits(x)


class LinenTied(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(CLASSES, FEATURES)
        x = embed(tokens)
        return jaxops.linen.tied_loss(embed, x, tokens), expected_loss(embed.attend(x), tokens)


@pytest.mark.long
def test_linen_loss_heads_load_the_checkpoint_of_a_model(rng):
    x = rows(rng, 8)
    labels = labels_like(x, rng)
    ours, theirs = LinenClassifier(True), LinenClassifier(False)
    variables = theirs.init(KEY, x, labels)
    close(ours.init(KEY, x, labels), variables)
    close(ours.apply(variables, x, labels), theirs.apply(variables, x, labels))
    tied = LinenTied()
    variables = tied.init(KEY, labels)
    ours, theirs = (jax.value_and_grad(lambda v, i=i: tied.apply(v, labels)[i])(variables) for i in range(2))
    close(ours, theirs)


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("layer", ["biased", "unbiased", "tied"])
def test_equinox_loss_head_is_the_cross_entropy_of_the_layers_logits(layer, rng):
    if layer == "tied":
        layer = eqx.nn.Embedding(CLASSES, FEATURES, key=KEY)
    else:
        layer = eqx.nn.Linear(FEATURES, CLASSES, use_bias=layer == "biased", key=KEY)
    x = rows(rng, 2, 4)
    labels = labels_like(x, rng)

    def plain(layer, x):
        if isinstance(layer, eqx.nn.Embedding):
            return x @ layer.weight.T
        return jax.vmap(jax.vmap(layer))(x)

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def ours(layer):
        return jaxops.equinox.LossHead(layer)(x, labels)

    close(jaxops.equinox.LossHead(layer).logits(x), plain(layer, x))
    close(jaxops.equinox.LossHead(layer).logits(x[0, 0]), plain(layer, x)[0, 0])
    theirs = eqx.filter_value_and_grad(lambda layer: expected_loss(plain(layer, x), labels))
    close(jax.tree.leaves(ours(layer)), jax.tree.leaves(theirs(layer)))
    each = jax.vmap(lambda x, label: jaxops.equinox.LossHead(layer)(x, label))(x[0], labels[0])
    close(each.mean(), expected_loss(plain(layer, x)[0], labels[0]))


def test_loss_heads_pass_their_options_on(rng):
    x = rows(rng, 4)
    labels = labels_like(x, rng).at[1].set(-100)
    layer = nnx_layers()[0]
    kernel, bias = layer.kernel[...], layer.bias[...]
    options = {"reduction": "none", "label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 5.0, "return_aux": True}
    expected = jaxops.linear_cross_entropy(x, kernel, labels, bias=bias, transpose_weight=True, **options)
    close(jaxops.nnx.LossHead(layer)(x, labels, **options), expected)
    variables = {"params": {"kernel": kernel, "bias": bias}}
    close(jaxops.linen.LossHead(CLASSES).apply(variables, x, labels, **options), expected)
    linear = eqx.nn.Linear(FEATURES, CLASSES, key=KEY)
    linear = eqx.tree_at(lambda layer: (layer.weight, layer.bias), linear, (kernel.T, bias))
    close(jaxops.equinox.LossHead(linear)(x, labels, **options), expected)


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("input_dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16_x", "float32_x"])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16], ids=["no_dtype", "bfloat16"])
def test_loss_heads_promote_as_their_layers(input_dtype, dtype, rng):
    x = rows(rng, 16, dtype=input_dtype)
    labels = labels_like(x, rng)
    near = {"rtol": 0.02, "atol": 0.02}
    for layer in nnx_layers(dtype=dtype):
        logits = layer.attend(x) if isinstance(layer, nnx.Embed) else layer(x)
        head = jaxops.nnx.LossHead(layer)
        close(head(x, labels), expected_loss(logits, labels), **near)
        assert head.logits(x).dtype == logits.dtype
        assert jax.grad(lambda x, head=head: head(x, labels))(x).dtype == input_dtype
    head, dense = (cls(CLASSES, dtype=dtype) for cls in (jaxops.linen.LossHead, nn.Dense))
    variables = dense.init(KEY, x)
    close(head.apply(variables, x, labels), expected_loss(dense.apply(variables, x), labels), **near)
    linear = eqx.nn.Linear(FEATURES, CLASSES, dtype=dtype, key=KEY)
    close(jaxops.equinox.LossHead(linear)(x, labels), expected_loss(jax.vmap(linear)(x), labels), **near)


# ---- pooling

# Shapes without their channels; Flax pads explicitly with one batch axis alone.
POOLS = [
    ((2, 3, 7, 6), (3, 2), (2, 1), "SAME"),
    ((7, 6), (2, 2), None, "VALID"),
    ((2, 7, 6), (3, 3), (2, 2), ((1, 1), (0, 2))),
    ((7,), (2,), (2,), "SAME"),
    ((2, 7), (3,), None, ((1, 2),)),
    ((2, 3, 5, 4, 5), (2, 1, 2), (1, 2, 1), "VALID"),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("shape", "window", "strides", "padding"), POOLS, ids=str)
def test_flax_pools_are_those_of_flax(shape, window, strides, padding, rng):
    assert (jaxops.nnx.max_pool, jaxops.nnx.avg_pool) == (jaxops.linen.max_pool, jaxops.linen.avg_pool)
    x = jnp.asarray(rng.normal(size=(*shape, CHANNELS)), jnp.float32)
    for name, options in (("max_pool", {}), ("avg_pool", {}), ("avg_pool", {"count_include_pad": False})):

        def pooled(x, library, name=name, options=options):
            return getattr(library, name)(x, window, strides, padding, **options)

        ours, pull = jax.vjp(lambda x: pooled(x, jaxops.linen), x)
        theirs, their_pull = jax.vjp(lambda x: pooled(x, nn), x)
        close(ours, theirs)
        close(pull(theirs), their_pull(theirs))


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["MaxPool2d", "AvgPool2d"])
@pytest.mark.parametrize(
    "arguments",
    [(2,), ((3, 2), (2, 1), 1), (3, 2, (1, 0)), (3, 2, ((1, 2), (0, 1))), (2, 2, 0, True), (4, 3, (1, 0), True)],
    ids=str,
)
def test_equinox_pools_are_those_of_equinox(name, arguments, rng):
    x = jnp.asarray(rng.normal(size=(4, CHANNELS, 7, 6)), jnp.float32)
    ours, theirs = (getattr(library, name)(*arguments) for library in (jaxops.equinox, eqx.nn))
    y, pull = jax.vjp(jax.vmap(ours), x)
    expected, their_pull = jax.vjp(jax.vmap(theirs), x)
    close(y, expected)
    close(pull(expected), their_pull(expected))
    close(eqx.filter_jit(ours)(x[0]), theirs(x[0]))


# ---- refusals

IMAGES = jnp.ones((2, 4, 4, CHANNELS))


class OwnLinear(nnx.Linear):
    def __call__(self, x):
        return -super().__call__(x)


REFUSALS = {
    "jaxops.nnx.BatchNorm: axis must be -1; got 1": lambda: nnx_norm(jaxops.nnx, axis=1),
    "jaxops.nnx.BatchNorm: axis_index_groups must be None, as statistics are shared over whole mesh axes; got [[0]]": (
        lambda: nnx_norm(jaxops.nnx, axis_index_groups=[[0]])
    ),
    "jaxops.nnx.BatchNorm: mask must be booleans that broadcast to the shape of x, [2, 4, 4, 3]": (
        lambda: nnx_norm(jaxops.nnx)(IMAGES, mask=IMAGES)
    ),
    "jaxops.nnx.BatchNorm: x must have 3 channels on axis 3; got float32[2, 4, 4, 5]": (
        lambda: nnx_norm(jaxops.nnx)(jnp.ones((2, 4, 4, 5)))
    ),
    "jaxops.nnx.BatchNorm: x must have rank 2 to 5; got float32[3]": lambda: nnx_norm(jaxops.nnx)(jnp.ones(3)),
    "jaxops.nnx.Dropout: broadcast_dims must be empty, as each element is drawn by itself; got (0,)": (
        lambda: jaxops.nnx.Dropout(0.5, broadcast_dims=(0,))
    ),
    "jaxops.nnx.Dropout: rngs must be given to the constructor or in the call; got None": (
        lambda: jaxops.nnx.Dropout(0.5)(IMAGES)
    ),
    "jaxops.nnx.LossHead: layer must be an nnx.Linear or an nnx.Embed; got 'Conv'": (
        lambda: jaxops.nnx.LossHead(nnx.Conv(2, 2, 1, rngs=nnx.Rngs(0)))
    ),
    "jaxops.nnx.LossHead: layer must be an nnx.Linear or an nnx.Embed; got 'OwnLinear'": (
        lambda: jaxops.nnx.LossHead(OwnLinear(2, 2, rngs=nnx.Rngs(0)))
    ),
    "jaxops.nnx.LossHead: layer.dot_general must be the default, as the loss has products of its own; got": (
        lambda: jaxops.nnx.LossHead(nnx.Linear(2, 2, dot_general=lambda *args, **_: None, rngs=nnx.Rngs(0)))
    ),
    "jaxops.nnx.LossHead: bias must be left out, as the layer decides it; got None": (
        lambda: jaxops.nnx.LossHead(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))(jnp.ones((3, 2)), jnp.zeros(3, int), bias=None)
    ),
    "jaxops.linen.tied_loss: embed must be an nn.Embed; got float32[4, 2]": (
        lambda: jaxops.linen.tied_loss(jnp.ones((4, 2)), jnp.ones((3, 2)), jnp.zeros(3, int))
    ),
    "jaxops.linen.BatchNorm: axis must be -1; got (0, 1)": lambda: jaxops.linen.BatchNorm(axis=(0, 1)),
    "jaxops.linen.BatchNorm: force_float32_reductions must be True, as all sums are in float32; got False": (
        lambda: jaxops.linen.BatchNorm(force_float32_reductions=False)
    ),
    "jaxops.linen.BatchNorm: x must be floating point; got int32[2, 3]": (
        lambda: jaxops.linen.BatchNorm(True).init(KEY, jnp.ones((2, 3), jnp.int32))
    ),
    "jaxops.linen.Dropout: broadcast_dims must be empty, as each element is drawn by itself; got [-1]": (
        lambda: jaxops.linen.Dropout(0.5, [-1])
    ),
    "jaxops.linen.LossHead: dot_general must be the default, as the loss has products of its own; got": (
        lambda: jaxops.linen.LossHead(2, dot_general=jax.lax.dot_general)
    ),
    "jaxops.linen.LossHead: features must be a positive integer; got '7'": lambda: jaxops.linen.LossHead("7"),
    "jaxops.equinox.BatchNorm: mode must be 'batch'; got 'ema'": lambda: jaxops.equinox.BatchNorm(3, mode="ema"),
    "jaxops.equinox.BatchNorm: x must have 3 channels on axis 1; got float32[2, 4, 4, 3]": (
        lambda: eqx.nn.make_with_state(jaxops.equinox.BatchNorm)(3)[0](
            IMAGES, eqx.nn.make_with_state(jaxops.equinox.BatchNorm)(3)[1]
        )
    ),
    "jaxops.equinox.BatchNorm: axis_name must name an axis of a surrounding shard_map or vmap, and none here has": (
        lambda: equinox_norms("batch")[0][0](jnp.ones((2, CHANNELS)), equinox_norms("batch")[0][1])
    ),
    "jaxops.equinox.Dropout: key must be given, except in inference; got None": (
        lambda: jaxops.equinox.Dropout()(IMAGES)
    ),
    "jaxops.equinox.LossHead: layer must be an equinox.nn.Linear or an equinox.nn.Embedding; got 'Identity'": (
        lambda: jaxops.equinox.LossHead(eqx.nn.Identity())
    ),
    "max_pool: window_shape must have 1, 2 or 3 extents; got": lambda: jaxops.linen.max_pool(IMAGES, (1, 1, 1, 1)),
    "avg_pool: inputs must have 3 spatial axes and channels; got float32[3, 3, 3]": (
        lambda: jaxops.nnx.avg_pool(jnp.ones((3, 3, 3)), (1, 1, 1))
    ),
}


@pytest.mark.parametrize("sentence", REFUSALS)
def test_modules_refuse_in_one_sentence(sentence):
    with pytest.raises(ValueError) as refusal:  # noqa: PT011  all of it is compared
        REFUSALS[sentence]()
    assert str(refusal.value).startswith(sentence)
    assert "\n" not in str(refusal.value)


def test_explain_looks_into_what_nnx_has_jitted(rng):
    layer = jaxops.nnx.BatchNorm(FEATURES, rngs=nnx.Rngs(0))
    rows_explained = lowering.explain(nnx.jit(lambda layer, x: layer(x)), layer, rows(rng, 4), target="cpu").rows
    assert [row.operator for row in rows_explained] == ["batch_norm"]
