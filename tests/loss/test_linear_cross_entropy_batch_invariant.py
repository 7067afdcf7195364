"""`batch_invariant`: a row's bits are the same in every batch and on every mesh, and what they should be."""

import functools

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from linear_cross_entropy_oracle import assert_equals_float64, make_case, value_and_gradients
from test_linear_log_probs import assert_near, results_and_gradients
from test_linear_log_probs import expected as expected_log_probs

import jaxops
import lowering
from jaxops import BadParamError, linear_cross_entropy, linear_log_probs

# Three blocks of rows on one device, the last of which is not full, and two on others; parts of three columns.
ROWS, HIDDEN, CLASSES = 136, 6, 48
RESULTS = ("first result", "second result", "third result", "gradient of x")


def entropy_and_loss(row, x, weight, bias, class_weight, **options):
    """With everything that the losses take; the labels of a row are ids."""
    options |= {"label_smoothing": 0.1, "z_loss": 0.02, "softcap": 4.0, "return_aux": True}
    options |= {"bias": bias, "class_weight": class_weight, "row_weight": row["weight"], "reduction": "none"}
    loss, aux = linear_cross_entropy(x, weight, row["label"], batch_invariant=True, **options)
    return loss, aux.lse, aux.entropy


def losses_of_transposed_weight(row, x, weight, bias, class_weight, **options):
    options |= {"transpose_weight": True, "reduction": "none", "batch_invariant": True}
    loss = linear_cross_entropy(x, weight.T, row["label"], bias=bias, **options)
    return loss, loss, loss


def losses_of_probabilities(row, x, weight, bias, class_weight, **options):
    options |= {"class_weight": class_weight, "reduction": "none", "row_weight": row["weight"], "label_smoothing": 0.1}
    loss = linear_cross_entropy(x, weight, row["probabilities"], bias=bias, batch_invariant=True, **options)
    return loss, loss, loss


def log_probs_and_entropy(row, x, weight, bias, class_weight, **options):
    options |= {"temperature": row["weight"], "softcap": 5.0, "return_entropy": True, "batch_invariant": True}
    log_probs, entropy = linear_log_probs(x, weight, row["label"], bias=bias, **options)
    return log_probs, entropy, log_probs


FUNCTIONS = (entropy_and_loss, log_probs_and_entropy, losses_of_probabilities, losses_of_transposed_weight)


def draw(dtype, classes=CLASSES):
    """The rows, as a dictionary of arrays, and the parameters."""
    rng = np.random.default_rng(20260)
    labels = rng.integers(0, classes, size=ROWS).astype(np.int32)
    labels[3] = -100
    rows = {
        "x": np.asarray(jnp.asarray(rng.normal(size=(ROWS, HIDDEN)), dtype)),
        "label": labels,
        "probabilities": rng.dirichlet(np.ones(classes), size=ROWS).astype(np.float32),
        "weight": rng.uniform(0.5, 2, size=ROWS).astype(np.float32),
        "cotangents": rng.normal(size=(ROWS, 3)).astype(np.float32),
    }
    weight, bias = (np.asarray(jnp.asarray(rng.normal(size=shape), dtype)) for shape in ((classes, HIDDEN), (classes,)))
    return rows, (weight, bias, rng.uniform(0.5, 2, size=classes).astype(np.float32))


def results(fn, rows, *parameters, **options):
    """The results for each row, and the gradient of x for given cotangents."""
    of_rows, pull = jax.vjp(lambda x: fn(rows, x, *parameters, **options), rows["x"])
    return *of_rows, *pull(tuple(jnp.moveaxis(rows["cotangents"], -1, 0)))


@functools.cache
def compiled(fn):
    return jax.jit(functools.partial(results, fn))


@functools.cache
def alone(fn, dtype):
    """The bits of each row, on one device, from a batch in reverse."""
    rows, parameters = draw(dtype)
    backwards = compiled(fn)(take(rows, np.s_[::-1]), *parameters)
    return tuple(np.asarray(x)[::-1] for x in backwards)


def mesh_of(axis_type=AxisType.Auto, **axes):
    count = int(np.prod([*axes.values()]))
    return jax.make_mesh(
        (*axes.values(),), (*axes,), axis_types=(axis_type,) * len(axes), devices=jax.devices()[:count]
    )


def take(rows, index):
    return {name: x[index] for name, x in rows.items()}


def of_batch(index):
    return lambda fn, rows, parameters: (compiled(fn)(take(rows, index), *parameters), index)


def with_chunk_rows(fn, rows, parameters):
    return jax.jit(functools.partial(results, fn, chunk_rows=7))(rows, *parameters), slice(None)


def in_two_axes(fn, rows, parameters):
    rows = {name: x.reshape(2, ROWS // 2, *x.shape[1:]) for name, x in rows.items()}
    return compiled(fn)(rows, *parameters), slice(None)


def under_vmap(fn, rows, parameters):
    rows = {name: x.reshape(2, ROWS // 2, *x.shape[1:]) for name, x in rows.items()}
    mapped = jax.vmap(functools.partial(results, fn), in_axes=(0, None, None, None))
    return jax.jit(mapped)(rows, *parameters), slice(None)


def without_jit(fn, rows, parameters):
    return results(fn, rows, *parameters), slice(None)


def with_all_gradients(fn, rows, parameters):
    def run(rows, *parameters):
        def all_varying(x, weight, row_weight, probabilities, *others):
            varying = {"weight": row_weight, "probabilities": probabilities}
            return fn(rows | varying, x, weight, *others)

        weight, *others = parameters
        primals = (rows["x"], weight, rows["weight"], rows["probabilities"], *others)
        of_rows, pull = jax.vjp(all_varying, *primals)
        return *of_rows, pull(tuple(jnp.moveaxis(rows["cotangents"], -1, 0)))

    *of_rows, gradients = jax.jit(run)(rows, *parameters)
    return (*of_rows, gradients[0]), slice(None)


def rows_split_by_hand(devices):
    def run(fn, rows, parameters):
        specs = ({name: P("rows") for name in rows}, *(P(),) * len(parameters))
        split = jax.shard_map(
            functools.partial(results, fn), mesh=mesh_of(rows=devices), in_specs=specs, out_specs=P("rows")
        )
        return jax.jit(split)(rows, *parameters), slice(None)

    return run


def split_by_jit(
    axis_type, of_rows, of_weight, in_context, split=("x", "label", "weight", "probabilities", "cotangents")
):
    def run(fn, rows, parameters):
        mesh = mesh_of(axis_type, rows=4, others=2)
        specs = {name: P(of_rows if name in split else None) for name in rows}
        rows = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in rows.items()}
        parameters = [jax.device_put(x, NamedSharding(mesh, P(of_weight))) for x in parameters]
        call = jax.jit(functools.partial(results, fn))
        if in_context:
            with jax.set_mesh(mesh):
                return call(rows, *parameters), slice(None)
        return call(rows, *parameters), slice(None)

    return run


def split_by_hand_and_by_jit(fn, rows, parameters):
    mesh = mesh_of(rows=2, others=4)
    specs = ({name: P("rows") for name in rows}, *(P(),) * len(parameters))
    split = jax.shard_map(
        functools.partial(results, fn), mesh=mesh, in_specs=specs, out_specs=P("rows"), axis_names={"rows"}
    )
    parameters = [jax.device_put(x, NamedSharding(mesh, P("others"))) for x in parameters]
    return jax.jit(split)(rows, *parameters), slice(None)


PLACES = {
    "shuffled": of_batch(np.random.default_rng(1).permutation(ROWS)),
    "automatic": split_by_jit(AxisType.Auto, "rows", None, in_context=False),
    "one-row": of_batch(np.arange(ROWS - 1, ROWS)),
    "explicit": split_by_jit(AxisType.Explicit, "rows", None, in_context=True),
    "rows-8": rows_split_by_hand(8),
    "gradients": with_all_gradients,
    "65-rows": of_batch(np.arange(20, 85)),
    "chunks": with_chunk_rows,
    "two-axes": in_two_axes,
    "vmap": under_vmap,
    "no-jit": without_jit,
    "by-hand-and-by-jit": split_by_hand_and_by_jit,
    "automatic-context": split_by_jit(AxisType.Auto, ("rows", "others"), None, in_context=True),
    "automatic-weight": split_by_jit(AxisType.Auto, "rows", "others", in_context=False),
    "explicit-x": split_by_jit(AxisType.Explicit, "rows", None, in_context=True, split=("x", "cotangents")),
    "explicit-weight": split_by_jit(AxisType.Explicit, None, "others", in_context=True),
}


IN_EVERY_RUN = {
    (entropy_and_loss, "float32"): ("shuffled", "automatic"),
    (log_probs_and_entropy, "bfloat16"): ("65-rows",),
}
# Each place has two of the functions, one in each dtype, and each function half of the places.
CASES = [
    pytest.param(
        fn,
        dtype := ("float32", "bfloat16")[(i // 2 + j // 2) % 2],
        place,
        id=f"{fn.__name__}-{dtype}-{name}",
        marks=() if name in IN_EVERY_RUN.get((fn, dtype), ()) else pytest.mark.slow,
    )
    for j, (name, place) in enumerate(PLACES.items())
    for i, fn in enumerate(FUNCTIONS)
    if (i + j) % 2 == 0
]


@pytest.mark.parametrize(("fn", "dtype", "place"), CASES)
def test_a_row_has_the_same_bits(fn, dtype, place):
    rows, parameters = draw(dtype)
    actual, index = place(fn, rows, parameters)
    for name, result, true in zip(RESULTS, actual, alone(fn, dtype), strict=True):
        true = true[index]
        assert np.asarray(result).reshape(true.shape).tobytes() == true.tobytes(), name


@pytest.mark.parametrize("classes", contract.first_in_every_run([64, 7]))
def test_losses_and_gradients_equal_float64(classes, rng):
    x, weight, labels = make_case(rng, rows=(13,), classes=classes)
    vectors = rng.normal(size=classes).astype(np.float32), rng.uniform(0.2, 2, size=classes).astype(np.float32)
    options = {"label_smoothing": 0.2, "z_loss": 0.02, "softcap": 2.0, "class_weight": vectors[1]}
    actual = value_and_gradients(x, weight, labels, bias=vectors[0], batch_invariant=True, **options)
    assert_equals_float64(actual, (x, weight, labels), options | {"bias": vectors[0]}, rtol=5e-5)


@pytest.mark.parametrize("dtype", contract.first_in_every_run(["float32", "bfloat16", "float16"]))
def test_log_probs_entropy_and_gradients_equal_float64(dtype, rng):
    rows, (weight, bias, _) = draw(dtype)
    operands, cotangents = (rows["x"], weight, rows["label"]), rows["cotangents"][:, :2].T
    options = {"bias": bias.astype(np.float32), "temperature": rows["weight"]}
    actual = results_and_gradients(*operands, cotangents, softcap=3.0, batch_invariant=True, **options)
    truth = expected_log_probs(*operands, cotangents, softcap=3.0, **options)
    for result, true in zip(actual, truth, strict=True):
        assert_near(result, true, rtol=1e-4 if dtype == "float32" else 2e-2)


@pytest.mark.slow
def test_bias_that_forbids_parts_of_the_vocabulary_and_all_classes(rng):
    x, weight, labels = make_case(rng, rows=(5,), classes=32, ignored=0)
    for first, last in ((0, 8), (3, 32)):
        labels %= last - first
        bias = np.full(32, -np.inf, np.float32)
        bias[first:last] = rng.normal(size=last - first)
        actual = value_and_gradients(x, weight, labels + first, bias=bias, batch_invariant=True)
        known = value_and_gradients(x, weight[first:last], labels, bias=bias[first:last])
        contract.assert_close(actual[:2], known[:2])
        assert not np.any(np.delete(np.asarray(actual[2]), np.s_[first:last], axis=0))
    loss, x_grad, *_ = value_and_gradients(
        x, weight, labels, bias=np.full(32, -np.inf, np.float32), batch_invariant=True
    )
    assert np.isnan(loss) or np.isposinf(loss)
    assert np.all(np.isfinite(x_grad))


def test_labels_that_are_skipped_and_labels_that_are_no_class(rng):
    x, weight, _ = make_case(rng, rows=(4,), classes=7)
    labels = np.array([0, 3, 7, -1], np.int32)
    call = functools.partial(linear_cross_entropy, ignore_index=3, reduction="none", batch_invariant=True)
    total = jax.jit(jax.grad(lambda x: (jnp.sum(losses := call(x, weight, labels)), losses), has_aux=True))
    x_grad, losses = total(x.at[1].set(jnp.nan))
    assert np.isnan(losses).tolist() == [False, False, True, True]
    assert losses[1] == 0
    assert not np.any(x_grad[1])


def test_of_equal_logits_the_first_is_predicted(rng):
    x, weight = jnp.ones((2, 1)), jnp.zeros((CLASSES, 1)).at[jnp.array([5, 9, 15])].set(1)
    aux = jax.jit(functools.partial(linear_cross_entropy, batch_invariant=True, return_aux=True))(
        x, weight, np.array([5, 9])
    )[1]
    assert aux.prediction.tolist() == [5, 5]
    assert aux.accuracy.tolist() == [1, 0]


def promised(x, weight, labels, bias):
    options = {"ignore_index": -1, "label_smoothing": 0.1, "z_loss": 0.1, "bias": bias, "batch_invariant": True}
    log_probs = linear_log_probs(x, weight, labels, ignore_index=-1, return_entropy=True, batch_invariant=True)
    return linear_cross_entropy(x, weight, labels, **options), *map(jnp.sum, log_probs)


def draw_promised(rng):
    labels = rng.integers(-1, 6, size=16).astype(np.int32)
    return *(rng.normal(size=size).astype(np.float32) for size in ((16, 3), (6, 3))), labels, np.ones(6, np.float32)


PROMISED = contract.Case(
    name="batch_invariant",
    fn=promised,
    operands=draw_promised,
    differentiable=(0, 1, 3),
    batched=(0, None, 0, None),
    operator="batch_invariant_losses",
    backward="batch_invariant_losses_backward",
)


@pytest.mark.slow
@pytest.mark.parametrize("promise", contract.PROMISES, ids=contract.promise_name)
def test_batch_invariant_keeps_promise(promise):
    promise(PROMISED)


def test_no_logits_are_kept():
    x, weight = jax.ShapeDtypeStruct((4096, 8), jnp.float32), jax.ShapeDtypeStruct((4096, 8), jnp.float32)
    labels = jax.ShapeDtypeStruct((4096,), jnp.int32)
    loss = functools.partial(linear_cross_entropy, batch_invariant=True)
    compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(x, weight, labels).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4096 * 4096 * 4 / 16


def test_kernels_have_no_part(rng):
    operands = make_case(rng, dtype="bfloat16")
    with lowering.use("interpret"):
        names = contract.primitives(functools.partial(linear_cross_entropy, batch_invariant=True), *operands)
    assert "linear_cross_entropy" not in names
    assert all(not one.kernels for one in jaxops.operators() if one.name in names)


def test_what_cannot_be_batch_invariant_is_refused_in_one_sentence(rng):
    x, weight, labels = make_case(rng, classes=24)
    with pytest.raises(
        BadParamError, match=r"^linear_cross_entropy: strategy must be one of auto, recompute; got 'grad_in_forward'$"
    ):
        linear_cross_entropy(x, weight, labels, strategy="grad_in_forward", batch_invariant=True)
    with pytest.raises(BadParamError, match=r"^linear_log_probs: batch_invariant must be a bool; got 1$"):
        linear_log_probs(x, weight, labels, batch_invariant=1)
    call = functools.partial(linear_log_probs, vocab_axis="vocab", batch_invariant=True)
    split = jax.shard_map(call, mesh=mesh_of(vocab=3), in_specs=(P(), P("vocab"), P()), out_specs=P())
    with pytest.raises(
        BadParamError, match=r"^linear_log_probs: batch_invariant must be False with vocab_axis; got True"
    ):
        split(x, weight, labels)
    (rows,) = jax.export.symbolic_shape("n")
    with pytest.raises(
        BadParamError, match=r"^linear_log_probs: batch_invariant must be False where sizes are symbolic; got True"
    ):
        jax.eval_shape(
            functools.partial(linear_log_probs, batch_invariant=True),
            jax.ShapeDtypeStruct((rows, 6), jnp.float32),
            jax.ShapeDtypeStruct((24, 6), jnp.float32),
            jax.ShapeDtypeStruct((rows,), jnp.int32),
        )
