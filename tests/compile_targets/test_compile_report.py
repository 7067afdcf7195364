"""`lowering.compile` for chips that are not here: in a process of its own, with kernels, memory and refusals whole."""

import functools
import os
import subprocess

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxops
import lowering
from jaxops._primitive.operator import Operator
from lowering.compiling import compilers, process
from lowering.measurements import Entry, Key, Measurement
from lowering.targets import named
from pallas_kernels.ema_adam_update import COEFFICIENTS
from pallas_kernels.kernel import Kernel

SIZES = (256, 512)
TUPLE_TABLE_BYTES = 2048  # at most


def train_step(optimizer):
    def step(params, opt_state, x, labels):
        loss, grads = jax.value_and_grad(lambda w: jaxops.linear_cross_entropy(x, w, labels))(params)
        return *jaxops.fused_apply(optimizer, grads, opt_state, params), loss

    return jax.jit(step, donate_argnums=(0, 1))


def test_train_step_compiles_with_the_kernels_that_explain_names(chip):
    optimizer = jaxops.ema_adam(1e-3)
    params = jax.ShapeDtypeStruct(SIZES, jnp.float32)
    args = params, jax.eval_shape(optimizer.init, params), jax.ShapeDtypeStruct((64, SIZES[1]), jnp.float32)
    args = *args, jax.ShapeDtypeStruct((64,), jnp.int32)
    step = train_step(optimizer)
    weight_bytes = 4 * SIZES[0] * SIZES[1]
    form = "xla_prior_shift" if chip.startswith("tpu") else "xla_by_rows"
    assert [row.implementation for row in lowering.explain(step, *args, target=chip).rows] == [form, "reference"]
    with lowering.use("reference", apply_fused_ema_adam="pallas"):  # the memory below is the update's
        report = lowering.compile(step, *args, target=chip)
        explained = [row.implementation for row in lowering.explain(step, *args, target=chip).rows]
    assert sum(name.startswith("mosaic") for name in explained) == 1
    assert report.kernels == {"ema_adam": 1}
    assert report.hlo.count("tpu_custom_call") + report.hlo.count("mosaic_gpu_v2") >= 1
    assert 0 <= report.memory.aliased - 4 * weight_bytes <= TUPLE_TABLE_BYTES
    assert report.memory.temporaries < 2 * weight_bytes
    assert (report.memory.at_once is not None) == chip.startswith("tpu")
    assert report.call is None
    if chip.startswith("cuda"):
        (resources,) = report.gpu_resources
        assert resources.spilled_bytes == 0
        assert resources.registers <= 128


def test_what_was_tuned_for_a_chip_is_compiled_for_it_in_its_configuration(chip):
    optimizer = jaxops.ema_adam(1e-3)
    params = jax.ShapeDtypeStruct(SIZES, jnp.float32)
    state = jax.eval_shape(optimizer.init, params)
    step = jax.jit(lambda *args: jaxops.fused_apply(optimizer, *args), donate_argnums=(1, 2))
    (operator,) = (operator for operator in jaxops.operators() if operator.name == "apply_fused_ema_adam")
    (kernel,) = (kernel for kernel in operator.kernels if chip.startswith(kernel.platform))
    block_elements = 512 if chip.startswith("cuda") else 32768  # of neither kernel the first configuration
    times = Measurement("reference", (), 9.0), Measurement(kernel.name, (("block_elements", block_elements),), 8.0)
    operands = [*[params] * 5, jax.ShapeDtypeStruct((len(COEFFICIENTS),), jnp.float32)]
    key = Key.of(operator.name, named(chip), operands, {"mode": "adamw", "output": "params"})
    with lowering.TuningResult((Entry(key, times, repeats=3),)):
        (row,) = lowering.explain(step, params, state, params, target=chip).rows
        tuned = lowering.compile(step, params, state, params, target=chip)
    with lowering.use("pallas"):
        untuned = lowering.compile(step, params, state, params, target=chip)
    assert row.implementation == f"{kernel.name} (tuned: block_elements={block_elements})"
    assert tuned.kernels == untuned.kernels == {"ema_adam": 1}
    assert tuned.stablehlo != untuned.stablehlo
    assert lowering.compile(step, params, state, params, target=chip).kernels == {}


@pytest.mark.parametrize(
    ("chip", "axis_sizes"),
    [
        pytest.param("tpu-v5e:4x4", (4, 4), marks=pytest.mark.tpu_compile),
        pytest.param("tpu-v5p:8x8x8", (64, 8), marks=pytest.mark.tpu_compile),
        pytest.param("tpu-v7x:2x2x1", (4, 2), marks=pytest.mark.tpu_compile),
        pytest.param("cuda-h100:8", (8, 1), marks=pytest.mark.cuda_compile),
    ],
    indirect=["chip"],
)
def test_slice_compiles_with_its_collectives(chip, axis_sizes):
    mesh = AbstractMesh(axis_sizes, ("data", "model"), (AxisType.Explicit,) * 2)

    def placed(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    x, labels = placed((128, 16, 256), jnp.bfloat16, "data"), placed((128, 16), jnp.int32, "data")
    weight = placed((1024, 256), jnp.bfloat16)
    # All rows at once, as what is summed in a loop is counted once.
    loss = functools.partial(jaxops.linear_cross_entropy, strategy="recompute", chunk_rows=128 * 16)
    report = lowering.compile(jax.value_and_grad(loss, (0, 1)), x, weight, labels, target=chip)
    local_bytes = (2 * 128 * 16 * 256 + 4 * 128 * 16) // axis_sizes[0] + 2 * 1024 * 256
    assert local_bytes <= report.memory.arguments <= 1.05 * local_bytes
    # The gradient of the weight, summed over rows, and the loss; nothing is gathered.
    (all_reduce,) = report.collectives
    assert all_reduce.kind == "all-reduce"
    assert 2 * 1024 * 256 <= all_reduce.bytes <= 4 * 1024 * 256 + 1024


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "chip",
    [
        pytest.param("tpu-v5e:2x2", marks=pytest.mark.tpu_compile),
        pytest.param("cuda-h100:4", marks=pytest.mark.cuda_compile),
    ],
    indirect=True,
)
def test_kernels_compile_for_a_slice_whose_mesh_the_function_names(chip, axis_type):
    mesh = AbstractMesh((4,), ("data",), (axis_type,))
    step = functools.partial(jaxops.fused_apply, jaxops.ema_adam(1e-3))

    def placed(x):
        spec = P("data") if x.ndim else P()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    params = placed(jax.ShapeDtypeStruct((1024, 128), jnp.float32))
    state = jax.tree.map(placed, jax.eval_shape(jaxops.ema_adam(1e-3).init, params))
    specs = jax.tree.map(lambda x: x.sharding.spec, (params, state, params))
    in_shard_map = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs[:2])
    functions = [in_shard_map] if axis_type is AxisType.Auto else [in_shard_map, step]
    for fn in functions:
        with jaxops.use("pallas"):
            report = lowering.compile(fn, params, state, params, target=chip)
        assert report.kernels == {"ema_adam": 1}
        assert not report.collectives


def test_function_without_arguments_compiles(chip):
    report = lowering.compile(lambda: jnp.arange(1024, dtype=jnp.float32), target=chip)
    assert report.memory.outputs == 4096


@pytest.mark.tpu_compile
@pytest.mark.parametrize("tpu", ["tpu-v5e"], indirect=True)
def test_kernel_that_does_not_compile_is_named_in_one_screen(tpu):
    def run(x, *, config, interpret):
        def too_large(x_ref, y_ref):
            y_ref[...] = 2 * x_ref[...]

        # All of it at once is more than a TensorCore's memory.
        return (pl.pallas_call(too_large, name="too_large", out_shape=jax.typeof(x), interpret=interpret)(x),)

    kernel = Kernel("whole", "tpu", run, lambda *operands: None)
    operator = Operator("doubled", "... -> ...", lambda x: None, lambda x: (2 * x,), kernels=(kernel,))

    def doubled(x):
        return operator(x)[0]

    x = jax.ShapeDtypeStruct((65536, 1024), jnp.float32)
    with (
        lowering.use("pallas"),
        pytest.raises(lowering.CompileError, match=f"{tpu}'s compiler refuses doubled") as refusal,
    ):
        lowering.compile(functools.partial(doubled), x, target=tpu)
    assert len(str(refusal.value).splitlines()) <= 30


@pytest.mark.cuda_compile
def test_process_is_kept_until_a_kernel_is_compiled_again(h100):
    def compiled(size):
        params = jax.ShapeDtypeStruct((size,), jnp.float32)
        optimizer = jaxops.ema_adam(1e-3)
        args = params, jax.eval_shape(optimizer.init, params), params
        with lowering.use("pallas"):
            report = lowering.compile(functools.partial(jaxops.fused_apply, optimizer), *args, target=h100)
        (resources,) = report.gpu_resources
        assert 0 < resources.registers <= 128
        return process._running["cuda"]

    first = compiled(4096)
    assert compiled(8192) is first
    assert compiled(4096) is not first


@pytest.mark.parametrize(
    "chip",
    [
        pytest.param("tpu-v5e", marks=pytest.mark.tpu_compile),
        pytest.param("cuda-h100", marks=pytest.mark.cuda_compile),
    ],
    indirect=True,
)
def test_process_with_a_compiler_beside_it_starts_without_a_word(chip):
    """Where the compiler shares the environment, as the extras install it."""
    code = "import jaxops, jax.numpy as jnp; print(jnp.ones(3) * 2)"
    python = compilers.interpreter(named(chip).platform)
    variables = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    done = subprocess.run(
        [python, "-c", code], env=compilers.with_this_path(variables), capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("[2. 2. 2.]\n", "")
