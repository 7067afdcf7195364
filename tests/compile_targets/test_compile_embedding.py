"""The gradient of an embedding, compiled for chips that are not here: its kernels, its memory, and no atomics."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lowering
from jaxops import embedding
from lowering.targets import named
from pallas_kernels.gpu import embedding as gpu_kernel
from pallas_kernels.tpu import embedding as tpu_kernel

# Rows and width of the table, and positions: of language models, of recommenders, wide, and odd.
TABLES = [(50257, 768, 8192), (1_000_000, 128, 65536), (32000, 14336, 2048), (1000, 131, 777)]


CHIPS = [
    *(pytest.param(name, marks=pytest.mark.tpu_compile) for name in ("tpu-v5e", "tpu-v6e")),
    pytest.param("cuda-h100", marks=pytest.mark.cuda_compile),
]


def in_each_configuration(kernel, tables, *more):
    """All tables in bfloat16 and the first configuration for it, and the first table in float32 in each."""
    first = next(config for config in kernel._CONFIGS if not config.get("resident"))
    first_cases = [(table, first, "bfloat16") for table in tables]
    cases = [*first_cases, *((tables[0], config, "float32") for config in kernel._CONFIGS), *more]
    return pytest.mark.parametrize(("table", "config", "dtype"), cases, ids=str)


# Tables of which each tile goes straight to HBM, with all of the gradient in VMEM and without.
IN_PLACE = [((32000, 1024, 8192), config, "float32") for config in tpu_kernel._CONFIGS[:2]]


def compile_kernel(kernel, target, table, dtype, config, **params):
    num_weights, width, positions = table
    operands = jax.ShapeDtypeStruct((positions, width), dtype), jax.ShapeDtypeStruct((positions,), jnp.int32)
    params = {"num_weights": num_weights, "padding_idx": 0, "scale_grad_by_freq": False} | params
    assert kernel.refuses(named(target), *operands, **params) is None
    assert config in kernel.configs(named(target), *operands, **params)
    return lowering.compile(jax.jit(functools.partial(kernel.run, config=config, **params)), *operands, target=target)


@pytest.mark.tpu_compile
@in_each_configuration(tpu_kernel, TABLES, *IN_PLACE)
def test_embedding_kernel_compiles_for_tpus(tpu, table, config, dtype):
    report = compile_kernel(tpu_kernel, tpu, table, dtype, config, scale_grad_by_freq=dtype == "bfloat16")
    assert report.kernels == {"embedding_dense_backward": 1}
    # The gradient's rows in order, and what moves them there.
    padded_width = -(-table[1] // 128) * 128
    assert report.memory.temporaries <= 1.1 * table[2] * padded_width * jnp.dtype(dtype).itemsize + 2**22


@pytest.mark.cuda_compile
@in_each_configuration(gpu_kernel, TABLES)
def test_embedding_kernel_compiles_for_h100_in_registers(h100, table, config, dtype):
    report = compile_kernel(gpu_kernel, h100, table, dtype, config, scale_grad_by_freq=dtype == "bfloat16")
    assert report.kernels["embedding_dense_backward"] > 1
    # Partial sums, of at most two rows a chunk in float32; neither gradient nor table is copied.
    assert report.memory.temporaries <= 1.2 * 8 * table[1] * table[2] / config["chunk_rows"] + 64 * table[2] + 2**20
    for resources in report.gpu_resources:
        assert (resources.spilled_bytes, resources.shared_bytes) == (0, 0)
        # With 64 registers, eight thread blocks fit a multiprocessor.
        assert resources.registers <= 64


@pytest.mark.parametrize("chip", CHIPS, indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embedding_gradient_compiles_without_a_float32_table(chip, dtype):
    """And on GPUs no two positions write the same place, which would take atomics."""
    table, indices = jax.ShapeDtypeStruct((50257, 768), dtype), jax.ShapeDtypeStruct((16, 512), jnp.int32)
    gradient = jax.grad(lambda table, indices: jnp.sum(embedding(table, indices).astype(jnp.float32) ** 2))
    report = lowering.compile(gradient, table, indices, target=chip)
    taken = {row.implementation for row in lowering.explain(gradient, table, indices, target=chip).rows}
    # On GPUs, runs of positions are summed by levels, with a launch for each.
    launches = 1 if "mosaic_tpu" in taken else 3 if "mosaic_gpu" in taken else 0
    assert report.kernels == ({"embedding_dense_backward": launches} if launches else {})
    if dtype == "bfloat16":
        assert report.memory.temporaries < 50257 * 768 * 4
    if chip.startswith("cuda"):
        scatters = [line for line in report.hlo.splitlines() if re.search(r"= .* scatter\(", line)]
        assert all("unique_indices=true" in line for line in scatters)


SLICES = (
    pytest.param("cuda-h100:4", marks=pytest.mark.cuda_compile),
    pytest.param("tpu-v5e:2x2", marks=pytest.mark.tpu_compile),
)
ROWS, WIDTH, POSITIONS = 65536, 256, 1024


@pytest.mark.parametrize("chip", SLICES, indirect=True)
@pytest.mark.parametrize("in_shard_map", [False, True], ids=["jit", "shard_map"])
def test_embedding_leaves_a_table_split_by_rows_where_it_is(chip, in_shard_map):
    mesh = AbstractMesh((4,), ("chips",), axis_types=(AxisType.Auto,))
    lookup = embedding
    if in_shard_map:
        lookup = functools.partial(embedding, vocab_axis="chips")
        lookup = jax.shard_map(lookup, mesh=mesh, in_specs=(P("chips"), P()), out_specs=P())
    table, indices = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in (((ROWS, WIDTH), jnp.float32, P("chips")), ((POSITIONS,), jnp.int32, P()))
    )

    def step(table, indices):
        return table - 0.1 * jax.grad(lambda table: jnp.sum(jnp.sin(lookup(table, indices))))(table)

    report = lowering.compile(step, table, indices, target=chip)
    # Chips exchange the rows that were looked up; of the gradient, each has the rows of its part.
    assert {collective.kind for collective in report.collectives} == {"all-reduce"}
    assert sum(collective.bytes for collective in report.collectives) <= 4 * POSITIONS * WIDTH + 4096
    assert report.memory.outputs + report.memory.temporaries <= 2 * 4 * ROWS * WIDTH // 4 + 2**22
