"""What `lowering.explain` says of cost: against the compiler's own counts, and against rooflines worked by hand."""

import builtins
import dataclasses
import io
import json

import flax.linen as nn
import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxops
import lowering
from lowering import cost

ROWS, FEATURES, CLASSES = 16384, 4096, 128256


def of(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


def output_layer(dtype):
    return of(dtype, ROWS, FEATURES), of(dtype, CLASSES, FEATURES), of("int32", ROWS)


def loss(x, weight, labels):
    return jaxops.linear_cross_entropy(x, weight, labels)


class Convolutions(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(8, (3, 3), strides=2, feature_group_count=2)(x)
        x = nn.ConvTranspose(4, (3, 3))(nn.gelu(x))
        return nn.Dense(10)(x.reshape(x.shape[0], -1))


IMAGES = of("float32", 2, 16, 16, 4)
VARIABLES = jax.eval_shape(Convolutions().init, jax.random.key(0), IMAGES)


def attention(x):
    scores = jnp.einsum("bqhd,bkhd->bhqk", x, x)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), x)


@pytest.mark.parametrize(
    ("fn", "operands"),
    [
        pytest.param(lambda x, y: x @ y, (of("float32", 31, 65), of("float32", 65, 17)), id="matmul"),
        pytest.param(attention, (of("float32", 2, 24, 3, 16),), id="attention"),
        pytest.param(jax.grad(lambda x: jnp.sum(attention(x))), (of("float32", 2, 24, 3, 16),), id="its gradient"),
        pytest.param(Convolutions().apply, (VARIABLES, IMAGES), id="convolutions"),
    ],
)
def test_products_are_counted_as_the_compiler_counts_them(fn, operands):
    ours = cost.matmul_flops(jax.make_jaxpr(fn)(*operands).jaxpr, "cpu")
    # XLA's count holds what is not a product as well, and drops products with padding.
    theirs = jax.jit(fn).lower(*operands).compile().cost_analysis()["flops"]
    assert set(ours) == {"float32"}
    assert 0.7 * theirs <= ours["float32"] <= 1.25 * theirs


def test_loops_count_as_often_as_they_run():
    def looped(x):
        return jax.lax.scan(lambda y, _: (y @ x, None), x, length=7)[0]

    assert cost.matmul_flops(jax.make_jaxpr(looped)(of("float32", 8, 8)).jaxpr, "cpu") == {"float32": 7 * 2 * 8**3}


def test_of_branches_by_platform_one_counts():
    def either(x):
        return jax.lax.platform_dependent(x, cpu=lambda x: x @ x, default=lambda x: x @ x @ x @ x)

    jaxpr = jax.make_jaxpr(either)(of("float32", 8, 8)).jaxpr
    assert cost.matmul_flops(jaxpr, "cpu") == {"float32": 2 * 8**3}
    assert cost.matmul_flops(jaxpr, "cuda") == {"float32": 3 * 2 * 8**3}


@pytest.mark.parametrize(
    ("target", "dtype", "flops_per_s"),
    [
        ("cuda-h100", "bfloat16", 989.4e12),
        ("cuda-h100", "float32", 494.7e12),
        ("cuda-a100", "float16", 312e12),
        ("cuda-b200", "bfloat16", 2.25e15),
        ("tpu-v5e", "bfloat16", 197e12),
        ("tpu-v6e", "float32", 918e12),
        ("tpu-v7x", "bfloat16", 2307e12 / 2),
    ],
)
def test_roofline_of_matrix_products(target, dtype, flops_per_s):
    (row,) = lowering.explain(loss, *output_layer(dtype), target=target).rows
    products = 2 * ROWS * FEATURES * CLASSES
    assert dict(row.matmul_flops) == {dtype: products}
    assert row.bound == "matmul"
    assert row.seconds == pytest.approx(products / flops_per_s)


def test_roofline_knows_the_precision_that_is_asked_for():
    with jax.default_matmul_precision("highest"):
        (row,) = lowering.explain(loss, *output_layer("float32"), target="tpu-v5e").rows
    # Six passes of bfloat16 products make one of float32.
    assert row.seconds == pytest.approx(6 * 2 * ROWS * FEATURES * CLASSES / 197e12)


def test_roofline_of_memory():
    optimizer = jaxops.ema_adam(1e-3)
    params = of("float32", 4096, 4096)
    state = jax.eval_shape(optimizer.init, params)
    explanation = lowering.explain(
        lambda p, s: jaxops.fused_apply(optimizer, p, s, p), params, state, target="cuda-h100"
    )
    (row,) = explanation.rows
    # Five arrays are read and four written.
    assert row.bound == "memory"
    assert row.seconds == pytest.approx(9 * 4 * 4096**2 / 3.35e12, rel=1e-4)
    assert explanation.seconds == row.seconds
    assert explanation.bytes == row.bytes


def test_lookups_read_only_their_rows():
    table, indices = of("float32", 50257, 768), of("int32", 100)
    (row,) = lowering.explain(lambda t, i: jaxops.embedding(t, i), table, indices, target="tpu-v5e").rows
    assert row.bytes == 2 * (4 * 100 * 768) + 4 * 100


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_roofline_of_a_slice_is_that_of_one_chip(kind):
    mesh = AbstractMesh((8,), ("data",), (kind,))
    x, weight, labels = output_layer("bfloat16")
    x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P("data")))
    labels = jax.ShapeDtypeStruct(labels.shape, labels.dtype, sharding=NamedSharding(mesh, P("data")))
    weight = jax.ShapeDtypeStruct(weight.shape, weight.dtype, sharding=NamedSharding(mesh, P()))
    (row,) = lowering.explain(loss, x, weight, labels, target="cuda-h100:8").rows
    assert row.seconds == pytest.approx(2 * ROWS * FEATURES * CLASSES / 989.4e12 / 8)


def test_roofline_of_this_cpu_is_measured():
    explanation = lowering.explain(loss, of("float32", 512, 256), of("float32", 2000, 256), of("int32", 512))
    (row,) = explanation.rows
    # Between a thousandth and ten times what a core of today does.
    assert 2 * 512 * 256 * 2000 / 1e13 < row.seconds < 2 * 512 * 256 * 2000 / 1e8
    assert row.bound in ("matmul", "memory")


@pytest.mark.parametrize("target", ["tpu", "cuda"])
def test_no_roofline_for_an_unknown_chip(target):
    explanation = lowering.explain(loss, *output_layer("bfloat16"), target=target)
    assert explanation.rows[0].seconds is None
    assert explanation.seconds is None
    assert "at best" in str(explanation)


def test_total_share_and_json():
    def model(x, w1, w2, labels):
        return loss(x @ w1, w2, labels)

    x, w1, w2, labels = of("float32", 32, 64), of("float32", 64, 64), of("float32", 192, 64), of("int32", 32)
    explanation = lowering.explain(model, x, w1, w2, labels, target="tpu-v6e")
    # Two products, of which the second has three times the columns and the row statistics.
    assert 0.75 < explanation.share < 0.78
    record = json.loads(explanation.to_json())
    assert record["seconds"] == explanation.seconds
    assert record["rows"][0]["bound"] == "memory"
    assert record["flops"] == explanation.rows[0].flops


def test_symbolic_sizes_are_explained_without_a_roofline():
    (rows,) = jax.export.symbolic_shape("rows")
    args = of("float32", rows, 64), of("float32", 192, 64), of("int32", rows)
    explanation = lowering.explain(loss, *args, target="tpu-v5e")
    assert explanation.rows[0].seconds is None
    assert "rows,64" in str(explanation)


def test_function_without_operators_is_one_line():
    explanation = lowering.explain(lambda x: x @ x, of("float32", 10, 10), target="tpu-v5e")
    assert str(explanation) == "tpu-v5e: none of 2 kflop in operators of this library"


def test_kernels_of_users_are_named_with_their_line():
    def double(x_ref, o_ref):
        o_ref[...] = 2 * x_ref[...]

    def fn(x):
        return pl.pallas_call(double, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    explanation = lowering.explain(jax.jit(fn), of("float32", 8, 128), target="tpu-v5e")
    (note,) = explanation.notes
    assert note.startswith("test_explain.py:")
    assert "(fn): a Pallas kernel of the function's own" in note


@pytest.mark.parametrize("topology", ["banana", "0x4", "4x"])
def test_explain_refuses_what_is_no_topology(topology):
    with pytest.raises(ValueError, match=f"must have a topology such as 16x16 or 8; got '{topology}'"):
        lowering.explain(jnp.sin, jnp.ones(3), target=f"tpu-v5e:{topology}")


def test_text_is_the_same_in_a_notebook(monkeypatch):
    explanation = lowering.explain(loss, *output_layer("bfloat16"), target="tpu-v5e")
    elsewhere = str(explanation)
    # By this name rich knows that it runs in a notebook, where it would display the table instead of writing it.
    monkeypatch.setattr(builtins, "get_ipython", type("ZMQInteractiveShell", (), {}), raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as ipykernel does
    assert "at best" in elsewhere
    assert str(explanation) == elsewhere


def test_text_is_as_wide_as_the_terminal_if_there_is_one(monkeypatch):
    explanation = lowering.explain(loss, *output_layer("bfloat16"), target="tpu-v5e")
    lines = str(explanation).splitlines()
    assert max(map(len, lines)) > 100
    assert lines == [line.rstrip() for line in lines]
    with monkeypatch.context() as narrow:
        narrow.setenv("COLUMNS", "88")
        assert 80 < max(map(len, str(explanation).splitlines())) <= 88
    with monkeypatch.context() as notebook:
        notebook.setattr("sys.stdout", type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})())
        remark = "a remark that is longer than the widest line of this table " * 3
        shown = str(dataclasses.replace(explanation, notes=(remark,))).splitlines()
        assert 80 < max(map(len, shown)) <= 88
        assert " ".join(shown).endswith(remark.strip())
    monkeypatch.setattr("sys.stdout", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    monkeypatch.setenv("COLUMNS", "80")
    table, remarks = str(explanation).splitlines(), explanation.remarks
    assert max(map(len, table[: -len(remarks)] if remarks else table)) <= 80
