"""The forms in jnp beside the references: named by explain, asked for by name, refused with a reason."""

import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import pytest

import jaxops
import lowering
from jaxops import NotSupportedError


def loss(fn):
    return lambda *operands: jnp.sum(jnp.sin(fn(*operands).astype(jnp.float32)))


def of(shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


IDS = of((8, 32), "int32")
(N,) = jax.export.symbolic_shape("n")
IMAGES, GRID = of((3, 2, 8, 9)), of((3, 5, 6, 2))
of_table = jax.grad(loss(jaxops.embedding))
of_log_softmax = jax.grad(loss(functools.partial(jaxops.softmax, algorithm="log")))
of_normalized = jax.grad(loss(lambda x, scale: jaxops.batch_norm(x, scale, scale, layout="NHWC").y), (0, 1))
pooled = functools.partial(jaxops.max_pool, window=3, layout="NHWC")
# By form: where "auto" takes it, the operator, a function of operands that it takes, and one that it refuses, if any.
FORMS = {
    "xla_one_pass": (
        "tpu-v5e",
        "max_pool",
        pooled,
        [of((8, 28, 28, 128))],
        (functools.partial(pooled, window=5), [of((8, 28, 28, 128))]),
        "windows of at most 9 elements; these have 25",
    ),
    "xla_sorted_runs": (
        "cuda-h100",
        "embedding_dense_backward",
        of_table,
        [of((1000, 16)), IDS],
        (of_table, [of((1000, 16)), of((0,), "int32")]),
        "there are no rows to sum",
    ),
    "xla_row_owners": (
        "cpu",
        "embedding_dense_backward",
        of_table,
        [of((1000, 16), "bfloat16"), IDS],
        (of_table, [of((1000, 16)), IDS]),
        "a scatter sums float32 without a copy of another dtype",
    ),
    "xla_flat_scatter": (
        "tpu-v5e",
        "embedding_dense_backward",
        of_table,
        [of((1000, 16)), IDS],
        (of_table, [of((1000, 16)), of((256,), "int32")]),
        "the rows lie along one axis already",
    ),
    "xla_few_channels": (
        "cpu",
        "grid_sample",
        jaxops.grid_sample,
        [IMAGES, GRID],
        (jaxops.grid_sample, [of((3, 5, 8, 9)), GRID]),
        "samples 1 to 4 channels; x has 5",
    ),
    "xla_image_pairs": (
        "cpu",
        "grid_sample_backward",
        jax.grad(loss(jaxops.grid_sample), (0, 1)),
        [IMAGES, GRID],
        (
            jax.grad(loss(jaxops.grid_sample), (0, 1)),
            [of((N, 2, 8, 9)), of((N, 5, 6, 2))],
        ),
        "needs sizes that are numbers",
    ),
    "xla_separate_sums": (
        "cpu",
        "batch_norm_backward",
        of_normalized,
        [of((8, 6, 6, 16), "bfloat16"), of((16,))],
        None,
        "",
    ),
    "xla_sums_by_product": (
        "cpu",
        "softmax_backward",
        of_log_softmax,
        [of((4, 2000))],
        (of_log_softmax, [of((4, 511))]),
        "sums rows of 512 elements or more; these have 511",
    ),
}


def text(fn, operands, platform="cpu"):
    return jax.jit(lambda *operands: fn(*operands)).trace(*operands).lower(lowering_platforms=(platform,)).as_text()


def implementations(fn, operands, target):
    return {row.operator: row.implementation for row in lowering.explain(fn, *operands, target=target).rows}


@pytest.mark.sampled
@pytest.mark.parametrize("name", FORMS)
def test_explain_names_the_form_where_it_runs_and_reference_elsewhere(name):
    target, operator, fn, operands, refused, _ = FORMS[name]
    assert implementations(fn, operands, target)[operator] == name
    assert refused is None or implementations(*refused, target)[operator] != name
    with lowering.use("reference"):
        assert implementations(fn, operands, target)[operator] == "reference"


def test_explain_says_why_a_form_that_is_meant_for_the_platform_does_not_run():
    x, weight = (jax.ShapeDtypeStruct(shape, jnp.float16) for shape in ((64, 8), (96, 8)))
    labels = jax.ShapeDtypeStruct((64,), jnp.int32)
    step = jax.value_and_grad(jaxops.linear_cross_entropy, (0, 1))
    (row,) = lowering.explain(step, x, weight, labels, target="tpu-v5e").rows
    assert row.implementation == "xla_by_rows"
    reasons = {refusal.kernel: refusal.reason for refusal in row.refusals}
    assert reasons["xla_prior_shift"] == "float16 cannot hold exponentials above their reference"
    with lowering.use(linear_cross_entropy_sum_with_gradients="xla_by_rows"):
        (row,) = lowering.explain(step, x, weight, labels, target="tpu-v5e").rows
    assert row.refusals == ()


@pytest.mark.sampled
@pytest.mark.parametrize("name", FORMS)
def test_use_reference_runs_one_program_on_every_platform(name):
    target, _, fn, operands, *_ = FORMS[name]
    platform = target.partition("-")[0]
    with lowering.use("reference"):
        reference = text(fn, operands)
        assert text(fn, operands, "tpu") == text(fn, operands, "cuda") == reference
    assert text(fn, operands, platform) != reference


@pytest.mark.sampled
@pytest.mark.parametrize("name", FORMS)
def test_use_asks_for_a_form_by_name_on_any_platform(name):
    target, operator, fn, operands, refused, reason = FORMS[name]
    on_its_own = text(fn, operands, target.partition("-")[0])
    with lowering.use(**{operator: name}):
        for elsewhere in ("cpu", "tpu-v5e", "cuda-h100"):
            assert implementations(fn, operands, elsewhere)[operator] == name
        assert text(fn, operands, target.partition("-")[0]) == on_its_own
        if refused is not None:
            with pytest.raises(NotSupportedError, match=f"{name} was asked for, but .*{re.escape(reason)}"):
                text(*refused)


def test_averages_of_small_windows_take_one_pass_on_tpus_with_channels_last():
    for layout, shape, form in (("NHWC", (8, 28, 28, 128), "xla_one_pass"), ("NCHW", (8, 128, 28, 28), "reference")):
        step = jax.value_and_grad(loss(functools.partial(jaxops.avg_pool, window=3, layout=layout)))
        for target in ("tpu-v5e", "tpu-v6e"):
            found = implementations(step, [of(shape)], target)
            assert found == {"avg_pool": form, "avg_pool_backward": form}


GRADIENTS = {
    "embedding": (of_table, [of((1000, 16), "bfloat16"), IDS]),
    "embedding-averaged": (
        jax.grad(loss(functools.partial(jaxops.embedding, scale_grad_by_freq=True))),
        [of((1000, 16)), IDS],
    ),
    "grid_sample": (jax.grad(loss(jaxops.grid_sample), (0, 1)), [IMAGES, GRID]),
    "grid_sample-volumes": (jax.grad(loss(jaxops.grid_sample), (0, 1)), [of((3, 2, 4, 8, 9)), of((3, 5, 6, 7, 3))]),
    "max_pool": (jax.grad(loss(pooled)), [of((2, 9, 9, 8))]),
    "avg_pool": (jax.grad(loss(functools.partial(jaxops.avg_pool, window=3, layout="NHWC"))), [of((2, 9, 9, 8))]),
    "nll_loss": (jax.grad(jaxops.nll_loss), [of((8, 32)), of((8,), "int32")]),
    "linear_cross_entropy": (
        jax.grad(jaxops.linear_cross_entropy, (0, 1)),
        [of((64, 16), "bfloat16"), of((96, 16), "bfloat16"), of((64,), "int32")],
    ),
    "linear_log_probs": (
        jax.grad(loss(jaxops.linear_log_probs), (0, 1)),
        [of((64, 16)), of((96, 16)), of((64,), "int32")],
    ),
}


def shared_scatters(fn, operands):
    """The dtypes of what a program for GPUs scatters to places that positions may share."""
    pattern = r'"stablehlo.scatter"\(.*?unique_indices = (\w+).*?\) : \(tensor<(?:\w+x)*(\w+)>'
    found = re.findall(pattern, text(fn, operands, "cuda"), re.DOTALL)
    return [dtype for is_unique, dtype in found if is_unique == "false"]


@pytest.mark.sampled
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_on_gpus_scatter_each_float_to_a_place_of_its_own(name):
    """Their scatters add with atomics, in another order each time; counts do not depend on it."""
    fn, operands = GRADIENTS[name]
    assert set(shared_scatters(fn, operands)) <= {"i32"}
    assert "select_and_scatter" not in text(fn, operands, "cuda")


def test_a_plain_lookup_scatters_to_shared_places():
    """So the test above would see it."""
    assert shared_scatters(jax.grad(loss(lambda table, ids: table[ids])), [of((1000, 16)), IDS]) == ["f32"]


def test_forms_for_one_device_refuse_parts(rng):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = jax.device_put(rng.normal(size=(8, 600)).astype("float32"), jax.NamedSharding(mesh, jax.P("data")))
    with lowering.use(softmax_backward="xla_sums_by_product"), pytest.raises(NotSupportedError, match="over 8 devices"):
        jax.jit(of_log_softmax).lower(x)
