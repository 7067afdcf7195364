"""Linear cross entropy on several devices: a vocabulary that is split, and rows that are."""

import functools

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxops import BadParamError
from jaxops.aclnn import linear_cross_entropy as aclnn
from jaxops.linear_cross_entropy import linear_cross_entropy, linear_log_probs
from jaxops.testing.meshes import gathered_sizes

CLASSES, HIDDEN, ROWS = 16, 6, 13
OPTIONS = {"label_smoothing": 0.1, "z_loss": 0.02, "softcap": 4.0, "ignore_index": 3, "chunk_rows": 4}


def vocabulary_mesh(shards):
    return jax.make_mesh((shards,), ("vocab",), axis_types=(AxisType.Auto,), devices=jax.devices()[:shards])


def draw(rng, kind):
    x, weight = rng.normal(size=(ROWS, HIDDEN)), rng.normal(size=(CLASSES, HIDDEN))
    labels = rng.integers(0, CLASSES, size=ROWS).astype(np.int32)
    if kind == "probabilities":
        labels = rng.dirichlet(np.ones(CLASSES), size=ROWS).astype(np.float32)
    vectors = rng.normal(size=CLASSES), rng.uniform(0.2, 2, size=CLASSES)
    return *(v.astype(np.float32) for v in (x, weight, *vectors)), labels


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", ["auto", "grad_in_forward", "recompute"])
@pytest.mark.parametrize("kind", ["labels", "probabilities"])
@pytest.mark.parametrize("shards", contract.first_in_every_run([2, 8]))
def test_linear_cross_entropy_over_a_split_vocabulary_equals_one_device(shards, kind, strategy, rng):
    *operands, labels = draw(rng, kind)

    def loss(x, weight, bias, class_weight, labels, vocab_axis):
        options = {**OPTIONS, "strategy": strategy, "vocab_axis": vocab_axis, "return_aux": True}
        value, aux = linear_cross_entropy(x, weight, labels, bias=bias, class_weight=class_weight, **options)
        return value + 0.1 * jnp.sum(aux.lse + aux.entropy), aux

    labels_spec = P(None, "vocab") if kind == "probabilities" else P()
    in_specs = (P(), P("vocab"), P("vocab"), P("vocab"), labels_spec)
    split = jax.shard_map(
        functools.partial(loss, vocab_axis="vocab"), mesh=vocabulary_mesh(shards), in_specs=in_specs, out_specs=P()
    )
    whole = functools.partial(loss, vocab_axis=None)
    of_split, of_whole = (jax.jit(jax.value_and_grad(fn, (0, 1, 2, 3), has_aux=True)) for fn in (split, whole))
    contract.assert_close(of_split(*operands, labels), of_whole(*operands, labels))


@pytest.mark.parametrize("shards", [2, 8])
def test_linear_cross_entropy_over_a_split_vocabulary_predicts_the_first_of_equal_logits(shards):
    x, weight, labels = jnp.ones((2, 1)), jnp.zeros((CLASSES, 1)).at[jnp.array([5, 9, 15])].set(1), np.array([5, 9])
    call = functools.partial(linear_cross_entropy, vocab_axis="vocab", return_aux=True)
    split = jax.shard_map(call, mesh=vocabulary_mesh(shards), in_specs=(P(), P("vocab"), P()), out_specs=P())
    aux = jax.jit(split)(x, weight, labels)[1]
    assert aux.prediction.tolist() == [5, 5]
    assert aux.accuracy.tolist() == [1, 0]


def call_on(shards, fn, weight_spec, **options):
    """`fn` of one row of ones, a weight of zeros (CLASSES, 1) and the label 3, on a mesh with a second axis."""
    mesh = jax.make_mesh(
        (2, shards), ("data", "vocab"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[: 2 * shards]
    )
    split = jax.shard_map(fn, mesh=mesh, in_specs=(P(), weight_spec, P()), out_specs=P(), **options)
    return jax.jit(split)(jnp.ones((1, 1)), jnp.zeros((CLASSES, 1)), jnp.array([3]))


LOSSES = {
    "loss": linear_cross_entropy,
    "log_probs": lambda *operands, **options: -linear_log_probs(*operands, **options)[0],
    "gradient": lambda *operands, **options: jax.grad(
        lambda scale: linear_cross_entropy(operands[0], scale * operands[1], operands[2], **options)
    )(1.0),
    "vmap": lambda *operands, **options: jax.vmap(
        lambda weight: linear_cross_entropy(operands[0], weight, operands[2], **options)
    )(operands[1][None])[0],
}


@pytest.mark.sampled
@pytest.mark.parametrize("kind", LOSSES)
def test_a_weight_that_is_not_split_over_the_vocabulary_axis_is_refused(kind):
    fn = functools.partial(LOSSES[kind], vocab_axis="vocab")
    words = (
        f"weight must be split over mesh axis 'vocab' by the in_specs of shard_map, .*; got float32\\[{CLASSES}, 1\\]"
    )
    for spec in (P(), P("data")):
        with pytest.raises(BadParamError, match=words if spec == P() else "split over mesh axis 'vocab'"):
            call_on(2, fn, spec)
    # All logits are 0, so the loss is the logarithm of the number of classes, whatever the weight's factor.
    true = 0.0 if kind == "gradient" else np.log(CLASSES)
    np.testing.assert_allclose(call_on(2, fn, P("vocab")), true, rtol=1e-6)
    np.testing.assert_allclose(call_on(1, fn, P()), true, rtol=1e-6)  # one device has all of it
    np.testing.assert_allclose(call_on(2, fn, P("vocab"), check_vma=False), true, rtol=1e-6)


def test_a_documented_part_of_the_vocabulary_must_be_a_part():
    def log_sum(x, weight, target):
        start = jax.lax.axis_index("vocab") * CLASSES // 2
        x, weight = x.astype(jnp.float16), weight.astype(jnp.float16)
        part = aclnn.fused_linear_online_max_sum(
            x, weight, target, vocab_start_index=start, vocab_end_index=start + CLASSES // 2
        )
        return jnp.log(jax.lax.psum(part.sum_exp_logits_local, "vocab"))  # every maximum is 0

    np.testing.assert_allclose(call_on(2, log_sum, P("vocab")), np.log([CLASSES]), rtol=1e-6)
    with pytest.raises(BadParamError, match="fused_linear_online_max_sum: weight must be split over mesh axis 'vocab'"):
        call_on(2, log_sum, P())


def test_the_vocabulary_axis_must_be_one_of_those_there_are():
    with pytest.raises(BadParamError, match="of the surrounding shard_map, one of 'data', 'vocab'; got 'model'"):
        call_on(2, functools.partial(linear_cross_entropy, vocab_axis="model"), P("vocab"))


@pytest.mark.slow
def test_linear_cross_entropy_over_a_split_vocabulary_allows_a_part_without_classes(rng):
    x, weight, bias, _, labels = draw(rng, "labels")
    bias[4:8] = -np.inf
    labels %= 4
    call = functools.partial(linear_cross_entropy, strategy="recompute")
    split = jax.shard_map(
        lambda x, weight, bias: call(x, weight, labels, bias=bias, vocab_axis="vocab"),
        mesh=vocabulary_mesh(4),
        in_specs=(P(), P("vocab"), P("vocab")),
        out_specs=P(),
    )
    whole = jax.value_and_grad(lambda x, weight: call(x, weight, labels, bias=bias), (0, 1))
    contract.assert_close(jax.jit(jax.value_and_grad(split, (0, 1)))(x, weight, bias), whole(x, weight))


@pytest.mark.sampled
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("strategy", ["grad_in_forward", "recompute"])
def test_linear_cross_entropy_gathers_neither_rows_nor_logits(strategy, axis_type, rng):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    x, weight = (
        rng.normal(size=(8, 32, HIDDEN)).astype(np.float32),
        rng.normal(size=(CLASSES, HIDDEN)).astype(np.float32),
    )
    labels = rng.integers(0, CLASSES, size=(8, 32)).astype(np.int32)
    fn = jax.value_and_grad(functools.partial(linear_cross_entropy, strategy=strategy, chunk_rows=64), (0, 1))
    placed = [
        jax.device_put(v, NamedSharding(mesh, spec)) for v, spec in ((x, P("data")), (weight, P()), (labels, P("data")))
    ]
    compiled = jax.jit(fn).lower(*placed).compile()
    contract.assert_close(compiled(*placed), fn(x, weight, labels))
    assert list(gathered_sizes(compiled.as_text())) == []
    assert compiled(*placed)[1][0].sharding.spec[0] == "data"


def test_linear_cross_entropy_leaves_a_split_weight_split(rng):
    mesh = jax.make_mesh((2, 4), ("data", "vocab"), axis_types=(AxisType.Auto,) * 2)
    x, weight, _, _, labels = draw(rng, "labels")
    x, labels = np.resize(x, (16, HIDDEN)), np.resize(labels, 16)
    placed = [
        jax.device_put(v, NamedSharding(mesh, spec))
        for v, spec in ((x, P("data")), (weight, P("vocab")), (labels, P("data")))
    ]
    fn = jax.value_and_grad(functools.partial(linear_cross_entropy, strategy="grad_in_forward"), (0, 1))
    compiled = jax.jit(fn).lower(*placed).compile()
    contract.assert_close(compiled(*placed), fn(x, weight, labels))
    gathered = [size for size in gathered_sizes(compiled.as_text()) if size >= weight.size]
    assert gathered == []


def documented_protocol(x, weight, target, grad, softmax_given):
    """The four steps of the documents, on the device of one part of the vocabulary."""
    columns = weight.shape[0]
    start = jax.lax.axis_index("vocab") * columns
    part = aclnn.fused_linear_online_max_sum(
        x, weight, target, vocab_start_index=start, vocab_end_index=start + columns, return_logits=softmax_given
    )
    maximum = jax.lax.pmax(part.logits_max_local, "vocab")
    shift = part.logits_max_local - maximum
    in_range = (target >= start) & (target < start + columns)
    total = jax.lax.psum(part.sum_exp_logits_local * jnp.exp(shift), "vocab")
    predicted = jax.lax.psum(jnp.where(in_range, part.predicted_logits_local + shift, 0), "vocab")
    loss, softmax = aclnn.fused_cross_entropy_loss_with_max_sum(
        maximum, total, predicted, vocab_parallel_logits=part.vocab_parallel_logits
    )
    statistics = {"softmax": softmax} if softmax_given else {"logits_max": maximum, "sum_exp_logits": total}
    x_grad, weight_grad = aclnn.fused_linear_cross_entropy_loss_grad(
        grad, x, weight, part.target_mask, part.masked_target, **statistics
    )
    return loss, jax.lax.psum(x_grad.astype(jnp.float32), "vocab"), weight_grad


@pytest.mark.sampled
@pytest.mark.parametrize("softmax_given", [True, False], ids=["softmax", "memory-friendly"])
@pytest.mark.parametrize("shards", [2, 8])
def test_documented_steps_over_a_split_vocabulary_equal_float64(shards, softmax_given, rng):
    classes = 128 * shards
    x = jnp.asarray(rng.normal(size=(11, HIDDEN)), jnp.bfloat16)
    # Parts differ in scale, so that their maxima do: statistics that are not rebased would be far off.
    scale = np.repeat(rng.uniform(0.1, 1.5, size=shards), 128)[:, None]
    weight = jnp.asarray(scale * rng.normal(size=(classes, HIDDEN)), jnp.bfloat16)
    target = rng.integers(0, classes, size=11).astype(np.int32)
    target[4] = -100
    grad = rng.normal(size=11).astype(np.float32)
    in_specs, out_specs = (P(), P("vocab"), P(), P()), (P(), P(), P("vocab"))
    protocol = functools.partial(documented_protocol, softmax_given=softmax_given)
    run = jax.jit(jax.shard_map(protocol, mesh=vocabulary_mesh(shards), in_specs=in_specs, out_specs=out_specs))
    loss, x_grad, weight_grad = run(x, weight, target, grad)

    wide_x, wide_weight = (np.asarray(v).astype(np.float64) for v in (x, weight))
    logits = wide_x @ wide_weight.T
    lse = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    one_hot = np.arange(classes) == target[:, None]
    # A target on no part counts as a logit of the maximum: its loss is log Z.
    np.testing.assert_allclose(loss, lse - np.where(target >= 0, (one_hot * logits).sum(-1), logits.max(-1)), rtol=1e-4)
    pull = (np.exp(logits - lse[:, None]) - one_hot) * grad[:, None]
    # Logits that are returned, and the softmax from them, are bfloat16.
    tolerance = 3e-2 if softmax_given else 1e-2
    for actual, true in ((x_grad, pull @ wide_weight), (weight_grad, pull.T @ wide_x)):
        actual = np.asarray(actual).astype(np.float64)
        np.testing.assert_allclose(actual, true, rtol=tolerance, atol=tolerance * np.abs(true).max())


def closed_over(x, weight, labels, by_row):
    return jax.jit(lambda x, weight: linear_cross_entropy(x, weight, labels, row_weight=by_row))(x, weight)


def of_arguments(x, weight, labels, by_row):
    call = jax.jit(lambda x, weight, labels, by_row: linear_cross_entropy(x, weight, labels, row_weight=by_row))
    return call(x, weight, labels, by_row)


def of_log_probs(x, weight, labels, by_row):
    def loss(x, weight):
        return -jnp.sum(by_row * linear_log_probs(x, weight, labels, temperature=np.ones(labels.shape, np.float32)))

    return jax.jit(loss)(x, weight) / by_row.sum()


@pytest.mark.parametrize("in_numpy", [(), ("weights",), ("labels", "weights")], ids=str)
@pytest.mark.parametrize("loss", [closed_over, of_arguments, of_log_probs])
def test_explicit_meshes_take_labels_and_weights_of_rows_from_anywhere(loss, in_numpy, rng):
    """Those that a jitted function closes over are split but not traced, and arrays of NumPy lie on no mesh."""
    x, weight, *_ = draw(rng, "labels")
    x, labels, by_row = np.tile(x[:8], (2, 1)), np.arange(16).astype(np.int32), (np.arange(16) % 3).astype(np.float32)
    logits = x.astype(np.float64) @ weight.astype(np.float64).T
    of_rows = np.log(np.exp(logits).sum(1)) - logits[np.arange(16), labels]
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        split = functools.partial(jax.device_put, device=NamedSharding(mesh, P("rows")))
        given = [x if name in in_numpy else split(x) for name, x in (("labels", labels), ("weights", by_row))]
        value, gradient = jax.value_and_grad(lambda x: loss(x, weight, *given))(split(x))
    np.testing.assert_allclose(value, (by_row * of_rows).sum() / by_row.sum(), rtol=1e-5)
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    cotangents = (probabilities - np.eye(CLASSES)[labels]) * (by_row / by_row.sum())[:, None]
    np.testing.assert_allclose(gradient, cotangents @ weight, atol=1e-6)
