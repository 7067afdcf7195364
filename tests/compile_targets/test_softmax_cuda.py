"""The softmax kernels compiled by the real NVIDIA compilers; run with `-m cuda_compile`."""

import functools

import jax
import jax.numpy as jnp
import pytest
from compile_targets.sass import machine_code

import lowering
from jaxops import softmax as softmax_layer
from lowering.targets import named
from pallas_kernels.gpu import softmax, softmax_backward
from pallas_kernels.softmax_groups import Groups

pytestmark = pytest.mark.cuda_compile

TUPLE_TABLE_BYTES = 32
# Rows of a classifier, of attention and of a vocabulary, long and odd ones; channels of images, few and many, first and
# last, and whole images; groups parted by other axes.
ARRAYS = [
    *[((1024, 1000), (1,)), ((8, 16, 512, 512), (3,)), ((512, 50257), (1,)), ((3, 2**21 + 1), (1,)), ((7, 129), (1,))],
    *[((16, 64, 56, 56), (1,)), ((2, 21, 512, 513), (1,)), ((2, 7000, 40, 40), (1,)), ((16, 14, 14, 256), (3,))],
    *[((16, 3, 224, 224), (1, 2, 3)), ((8, 12, 16, 20), (1, 3))],
]


def compile_both(target, shape, axes, dtypes, log, config_index=0):
    groups, reports = Groups.along(shape, axes), []
    y, grad = (jax.eval_shape(groups.of, jax.ShapeDtypeStruct(shape, dtype)) for dtype in dtypes)
    for name, kernel, operands in (("softmax", softmax, [grad]), ("softmax_backward", softmax_backward, [y, grad])):
        params = {"log": log, "groups": groups}
        assert kernel.KERNEL.refuses(named(target), *operands, **params) is None
        config = kernel.KERNEL.configs(named(target), *operands, **params)[config_index]
        run = functools.partial(kernel.run, config=config, **params)
        report = lowering.compile(jax.jit(run), *operands, target=target)
        assert report.kernels == {name: 1}
        (resources,) = report.gpu_resources
        assert resources.spilled_bytes == 0
        reports.append(report)
    return reports


@pytest.mark.in_turns("dtypes", "shape")
@pytest.mark.parametrize("dtypes", [("float32",) * 2, ("bfloat16",) * 2, ("float16", "float32")], ids=str)
@pytest.mark.parametrize(("shape", "axes"), ARRAYS, ids=str)
def test_softmax_compiles_in_registers(h100, shape, axes, dtypes):
    compile_both(h100, shape, axes, dtypes, log=dtypes[0] == "bfloat16")


@pytest.mark.parametrize("config_index", [1, 2])
@pytest.mark.parametrize(("shape", "axes"), [ARRAYS[2], ARRAYS[5]], ids=str)
def test_softmax_compiles_in_every_configuration(h100, shape, axes, config_index):
    compile_both(h100, shape, axes, ("float32",) * 2, True, config_index)


@pytest.mark.parametrize("axis", [1, (1, 2, 3)], ids=str)
def test_softmax_moves_nothing_outside_its_kernels(h100, axis):
    images = jax.ShapeDtypeStruct((16, 64, 56, 56), jnp.float32)

    def step(x, grad):
        y, pull_back = jax.vjp(lambda x: softmax_layer(x, axis=axis), x)
        return y, pull_back(grad)[0]

    with lowering.use("pallas"):
        report = lowering.compile(jax.jit(step), images, images, target=h100)
    assert report.kernels == {"softmax": 1, "softmax_backward": 1}
    assert report.memory.temporaries <= TUPLE_TABLE_BYTES


# 32000 float32 fill half of the registers; of two operands the rest is in shared memory, as is most of a vocabulary in
# bfloat16. Rows that four elements do not divide take accesses of one.
LONG_ROWS = [(32000, "float32", 16), (32000, "bfloat16", 8), (31999, "float32", 4), (56000, "bfloat16", 8)]


@pytest.mark.parametrize("log", [False, True], ids=["softmax", "log"])
@pytest.mark.parametrize(("size", "dtype", "access_bytes"), LONG_ROWS, ids=str)
def test_softmax_reads_long_rows_once(h100, size, dtype, access_bytes, log):
    for report in compile_both(h100, (512, size), (1,), (dtype, dtype), log):
        (code,) = machine_code(report)
        # Whatever is loaded is loaded before warpgroups wait for each other's part of the maximum or the sum.
        opcodes = [each.opcode for each in code.instructions]
        meeting = next(i for i, opcode in enumerate(opcodes) if opcode.startswith("SYNCS.PHASECHK"))
        assert not any(each.is_a("LDG") for each in code.instructions[meeting:])
        assert {*code.access_bytes("LDG")} == {*code.access_bytes("STG")} == {access_bytes}
        assert code.bytes_in_flight() >= 8 * access_bytes
        assert code.count("LDL") + code.count("STL") == 0


def test_softmax_holds_long_rows_in_registers(h100):
    forward, _ = compile_both(h100, (512, 32000), (1,), ("float32", "float32"), log=False)
    (code,) = machine_code(forward)
    # Four warpgroups have 8000 elements each, 62.5 a thread.
    assert code.access_bytes("LDG") == code.access_bytes("STG") == {16: 16}
    assert code.bytes_in_flight() == 256


def test_softmax_has_four_loads_in_flight_for_rows_that_no_multiprocessor_holds(h100):
    forward, _ = compile_both(h100, (512, 2**17), (1,), ("float32", "float32"), log=False)
    (code,) = machine_code(forward)
    assert {*code.access_bytes("LDG")} == {16}
    assert code.bytes_in_flight() >= 64
