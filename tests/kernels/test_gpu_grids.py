"""Grids of the GPU kernels at the largest shapes that they accept: CUDA launches no more along y and z than 65535."""

import jax
import pytest
from jax.experimental.mosaic.gpu import core

import jaxops
import lowering
from jaxops._suite import SUITE
from pallas_kernels.gpu.dropout import _BLOCK as DROPOUT_BLOCK
from pallas_kernels.gpu.hopper import MAX_ELEMENTS, WARPGROUP

F32, BF16 = "float32", "bfloat16"
MOST_BLOCKS = (2**31 - 1, 65535, 65535)  # along x, y and z: CUDA C++ Programming Guide, technical specifications
GROUPS = MAX_ELEMENTS // WARPGROUP
ROWS = 2**24  # of logits, which nothing limits; their hidden size is small


def shaped(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


CASES = {
    "softmax of rows": [shaped(GROUPS, WARPGROUP)],
    "softmax of channels": [shaped(GROUPS // 2, 2, WARPGROUP)],
    "batch norm": [shaped(GROUPS, 1, 1, WARPGROUP), shaped(1), shaped(1)],
    "batch norm, relu": [shaped(GROUPS // 2, 2, 1, WARPGROUP), shaped(2), shaped(2)],
    "batch norm, residual, relu": [shaped(GROUPS // 3, 3, 1, WARPGROUP, dtype=BF16), shaped(3), shaped(3)],
    "local response norm": [shaped(GROUPS, 1, 1, WARPGROUP)],
    "max pool": [shaped(GROUPS // 4, 2, 2, WARPGROUP)],
    "dropout": [
        jax.eval_shape(lambda: jax.random.key(0)),
        shaped(MAX_ELEMENTS // DROPOUT_BLOCK, DROPOUT_BLOCK, dtype=BF16),
    ],
    "embedding gradient": [shaped(10, WARPGROUP), shaped(GROUPS, dtype="int32"), shaped(GROUPS, WARPGROUP)],
    "EMA-Adam": [*[shaped(MAX_ELEMENTS)] * 5, shaped(1, dtype="int32")],
    **{
        case.name: [shaped(ROWS, 64, dtype=BF16), shaped(1000, 64, dtype=BF16), shaped(ROWS, dtype="int32")]
        for case in SUITE
        if "cross entropy" in case.name or "log-prob" in case.name
    },
}
FUNCTIONS = {case.name: case.fn for case in SUITE}


@pytest.fixture
def grids(monkeypatch):
    """The grid of each launch that is lowered, along x, y and z."""
    found, lower = [], core._lower_as_gpu_kernel

    def observed(body, *, grid, **options):
        found.append(grid)
        return lower(body, grid=grid, **options)

    monkeypatch.setattr(core, "_lower_as_gpu_kernel", observed)
    return found


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_grids_of_the_largest_shapes_fit_what_cuda_launches(name, grids):
    with lowering.use("pallas"):
        jax.jit(FUNCTIONS[name]).trace(*CASES[name]).lower(lowering_platforms=("cuda",))
    assert grids
    assert all(blocks <= most for grid in grids for blocks, most in zip(grid, MOST_BLOCKS, strict=True))


@pytest.mark.long
def test_grids_are_those_of_every_gpu_kernel():
    used = set()
    for name, operands in CASES.items():
        with lowering.use("pallas"):
            rows = lowering.explain(FUNCTIONS[name], *operands, target="cuda-h100").rows
        used |= {row.operator for row in rows if row.implementation == "mosaic_gpu"}
    have = {each.name for each in jaxops.operators() if any(kernel.platform == "cuda" for kernel in each.kernels)}
    assert have == used


@pytest.mark.parametrize("name", ["softmax of rows", "dropout", "EMA-Adam"])
def test_gpu_kernels_refuse_one_element_more_than_offsets_reach(name):
    """Rounded up to whole rows."""
    shapes = {
        "softmax of rows": [shaped(GROUPS + 1, WARPGROUP)],
        "dropout": [CASES["dropout"][0], shaped(MAX_ELEMENTS // DROPOUT_BLOCK + 1, DROPOUT_BLOCK, dtype=BF16)],
        "EMA-Adam": [*[shaped(MAX_ELEMENTS + 1)] * 5, shaped(1, dtype="int32")],
    }
    with lowering.use("pallas"), pytest.raises(lowering.NotSupportedError, match=f"reach {MAX_ELEMENTS} elements"):
        jax.jit(FUNCTIONS[name]).trace(*shapes[name]).lower(lowering_platforms=("cuda",))
