"""A whole function under each implementation: timed where programs differ, on copies of what they overwrite."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxops._primitive.operator import Operator
from lowering.measuring.bench import bench
from lowering.measuring.inputs import made_up
from pallas_kernels.kernel import Kernel

X = np.ones((4, 8), np.float32)

toy_twice = Operator(
    "toy_timed",
    "... -> ...",
    lambda x: None,
    lambda x: (x + x,),
    kernels=(
        Kernel(
            "cpu_kernel",
            "cpu",
            lambda x, *, config, interpret: (2 * x,),
            lambda hardware, x: "takes matrices only" if len(x.shape) != 2 else None,
        ),
    ),
)


def twice(x):
    return toy_twice(x)[0]


def test_programs_that_differ_are_timed_and_equal_ones_once():
    result = bench(twice, X, repeats=3)
    rows = {row.implementation: row for row in result.rows}
    assert rows["pallas"].taken == {"toy_timed": ["cpu_kernel"]}
    assert (rows["pallas"].same_as, rows["pallas"].repeats) == ("", 3)
    assert rows["reference"].same_as == "auto"
    assert rows["reference"].median_ms == rows["auto"].median_ms > 0
    assert [row["implementation"] for row in json.loads(result.to_json())["rows"]] == ["auto", "reference", "pallas"]


def test_an_implementation_that_is_refused_is_reported_beside_the_others():
    rows = bench(twice, X[0], repeats=2).rows
    assert rows[0].median_ms is not None
    assert rows[2].median_ms is None
    assert "cpu_kernel: takes matrices only" in rows[2].refused


def test_donated_arguments_are_given_as_copies():
    x = jnp.asarray(X)
    step = jax.jit(lambda state, x: {"sum": state["sum"] + twice(x)}, donate_argnums=0)
    state = {"sum": jnp.asarray(X)}
    assert bench(step, state, x, repeats=2).rows[0].repeats == 2
    np.testing.assert_array_equal(state["sum"], X)


def test_shapes_are_filled_and_temporaries_counted():
    types = {"x": jax.ShapeDtypeStruct((64, 64), "float32"), "scale": 2.0}
    (row,) = bench(lambda d: jnp.exp(d["x"]) @ jnp.sin(d["x"]) * d["scale"], types, implementations=["auto"]).rows
    assert row.temporary_bytes >= 64 * 64 * 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool"])
def test_made_up_values_are_valid_and_always_the_same(dtype):
    types = [jax.ShapeDtypeStruct((3, 50), jnp.dtype(dtype)), jax.ShapeDtypeStruct((2, 1, 0), jnp.dtype("float32"))]
    first, second = (made_up(types, [7, -100, True, "mean"]) for _ in range(2))
    np.testing.assert_array_equal(first[0], second[0])
    assert [(x.shape, x.dtype) for x in first] == [(x.shape, x.dtype) for x in types]
    low, high = (0.1, 1) if "float" in dtype else (0, 1)
    values = np.asarray(first[0], np.float64)
    assert low - 1e-3 <= values.min() < values.max() <= high


def test_made_up_keys_are_keys():
    (key,) = made_up([jax.ShapeDtypeStruct((), jax.random.key(0).dtype)])
    assert jax.random.uniform(key).shape == ()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("shapes", "attributes", "bound"),
    [([(99,)], [5], 5), ([(64,), (64, 7)], [], 7), ([(8,), (8, 64)], [], 8), ([(4, 16), (4, 16, 32)], [50], 32)],
    ids=["an attribute", "classes", "a table as long as the indices", "an axis that is not shared"],
)
def test_made_up_indices_are_below_every_size_that_they_may_index(shapes, attributes, bound):
    dtypes = ["int32", *["float32"] * (len(shapes) - 1)]
    types = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)]
    indices = np.asarray(made_up(types, attributes)[0])
    assert 0 <= indices.min() < indices.max() < bound
    assert indices.max() >= bound // 2
