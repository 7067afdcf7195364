"""`linear_cross_entropy` over several chips, compiled for them: what they exchange, and how often."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lowering
from jaxops.linear_cross_entropy import linear_cross_entropy

ROWS, HIDDEN, CLASSES = 4096, 256, 8192
SLICES = (
    pytest.param("cuda-h100:4", marks=pytest.mark.cuda_compile),
    pytest.param("tpu-v5e:2x2", marks=pytest.mark.tpu_compile),
)


def compile_split(target, strategy, specs):
    """The loss and its gradients with x, weight and labels split over four chips as `specs` say."""
    mesh = AbstractMesh((4,), ("chips",), axis_types=(AxisType.Auto,))
    shapes = (((ROWS, HIDDEN), jnp.bfloat16), ((CLASSES, HIDDEN), jnp.bfloat16), ((ROWS,), jnp.int32))
    operands = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for (shape, dtype), spec in zip(shapes, specs, strict=True)
    ]
    loss = functools.partial(linear_cross_entropy, strategy=strategy, chunk_rows=512)
    return lowering.compile(jax.value_and_grad(loss, (0, 1)), *operands, target=target)


def largest_all_reduce_in_a_loop(hlo):
    """The number of elements of the largest array that is summed over chips in the body of a loop."""
    bodies = set(re.findall(r"body=%?([\w.\-]+)", hlo))
    computations = re.split(r"\n(?=%|ENTRY)", hlo)
    inside = [text for text in computations if re.match(r"%?([\w.\-]+)", text).group(1) in bodies]
    found = [shapes for text in inside for shapes in re.findall(r"= (.*?) all-reduce(?:-start)?\(", text)]
    sizes = [
        math.prod(map(int, filter(None, shape.split(",")))) for s in found for shape in re.findall(r"\[([\d,]*)\]", s)
    ]
    return max(sizes, default=0)


@pytest.mark.parametrize("target", SLICES)
def test_grad_in_forward_sums_the_weight_gradient_over_chips_once(target):
    report = compile_split(target, "grad_in_forward", (P("chips"), P(), P("chips")))
    assert largest_all_reduce_in_a_loop(report.hlo) < CLASSES
    assert {collective.kind for collective in report.collectives} == {"all-reduce"}
    assert f"[512,{CLASSES}]" in report.hlo  # each chip takes 512 rows at a time
    if target.startswith("tpu"):
        # One product gives the gradient of x, the other the logits of the first columns, from which references come.
        assert len(re.findall(r"f32\[512,256\]\S* convolution\(", report.hlo)) == 2


@pytest.mark.parametrize("target", SLICES)
def test_recompute_sums_each_tile_of_the_weight_gradient_over_chips_once(target):
    report = compile_split(target, "recompute", (P("chips"), P(), P("chips")))
    assert largest_all_reduce_in_a_loop(report.hlo) < CLASSES * HIDDEN // 4
    assert {collective.kind for collective in report.collectives} == {"all-reduce"}


@pytest.mark.parametrize("target", SLICES)
def test_recompute_over_a_split_vocabulary_sums_the_gradient_of_x_over_chips_once(target):
    report = compile_split(target, "recompute", (P(), P("chips"), P()))
    assert largest_all_reduce_in_a_loop(report.hlo) < ROWS * HIDDEN // 4
    assert {collective.kind for collective in report.collectives} == {"all-reduce"}
