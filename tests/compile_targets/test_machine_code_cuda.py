"""What the machine code of the streaming kernels says of their accesses; run with `-m cuda_compile`."""

import functools

import jax
import pytest
from compile_targets.sass import _code_of, machine_code
from compile_targets.test_compile_cuda import BF16, F32, compile_ema_adam

import lowering
from jaxops.batch_norm.backward import BackwardOperands
from jaxops.batch_norm.operator import TrainingOperands
from pallas_kernels.gpu import batch_norm, batch_norm_backward, dropout, ema_adam

SASS = """
.text.copy_mosaic_gpu_kernel:
   -:-:-:Y:01        /*0000*/                   LDC R1, c[0x0][0x28]
.L_x_0:
   -:-:2:Y:01        /*0010*/                   LDG.E.128 R4, desc[UR6][R2.64]
   -:-:3:Y:01        /*0020*/                   LD.E.U16 R8, desc[UR6][R2.64+0x800]
   3:-:-:Y:01        /*0030*/                   FADD R9, R8, R7
   -:-:3:Y:01        /*0040*/              @!P1 LDG.E R10, desc[UR6][R2.64]
   -:0:-:Y:01        /*0050*/                   STG.E.64 desc[UR6][R2.64], R4
   -:-:-:Y:05        /*0060*/               @P0 BRA `(.L_x_0)
   -:-:-:Y:05        /*0070*/                   EXIT
"""


def test_machine_code_is_read():
    code = _code_of("copy", SASS)
    assert len(code.instructions) == 8
    assert code.access_bytes("LDG") == {16: 1, 4: 1}
    assert code.access_bytes("LD") == {2: 1}
    assert code.opcodes("STG") == {"STG.E.64": 1}
    assert code.bytes_in_flight() == 18
    (loop,) = code.loops()
    assert [each.opcode for each in loop.instructions][::5] == ["LDG.E.128", "BRA"]


@pytest.mark.cuda_compile
@pytest.mark.parametrize(("dtype", "access_bytes"), [(F32, 16), (BF16, 8)])
def test_ema_adam_loads_two_accesses_of_all_operands_before_it_uses_one(h100, dtype, access_bytes):
    report = compile_ema_adam(h100, (4096, 4096), (dtype,) * 5, config=ema_adam._CONFIGS[0])
    (code,) = machine_code(report)
    assert code.access_bytes("LDG")[access_bytes] >= 10
    assert code.access_bytes("STG") == {access_bytes: 8}
    assert code.bytes_in_flight() >= 10 * access_bytes
    assert code.count("LDL") + code.count("STL") == 0


@pytest.mark.cuda_compile
@pytest.mark.parametrize(("columns", "dtype"), [(4096, F32), (4096, BF16), (4160, BF16)])
def test_dropout_moves_16_bytes_a_thread_and_loads_four_ahead(h100, columns, dtype):
    x = jax.ShapeDtypeStruct((1024, columns), dtype)
    streams, words = (jax.ShapeDtypeStruct((1024, last), "uint32") for last in (3, columns // 32))
    keep = jax.ShapeDtypeStruct((2,), F32)
    for run, operands in ((dropout.run, (streams, x, keep)), (dropout.run_backward, (x, words, keep))):
        report = lowering.compile(jax.jit(functools.partial(run, config={})), *operands, target=h100)
        (code,) = machine_code(report)
        assert {*code.access_bytes("LD")} == {*code.access_bytes("ST")} == {16}
        assert {*code.access_bytes("LDG"), *code.access_bytes("STG")} == {4}  # words of the mask and scalars
        assert code.bytes_in_flight() >= 64
        assert code.count("LDL") + code.count("STL") == 0


# Channels first and last. In flight are the accesses of each image, 2048 elements of it for 128 threads.
@pytest.mark.cuda_compile
@pytest.mark.parametrize("shape", [(32, 1, 256, 3136), (32, 3136, 64, 1)], ids=["first", "last"])
@pytest.mark.parametrize(("dtype", "access_bytes"), [(F32, 16), (BF16, 8)])
def test_batch_norm_loads_several_accesses_of_each_image_before_it_uses_one(h100, shape, dtype, access_bytes):
    image, statistic = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[2:3], F32)
    relu = {"axis_name": None, "activation": ("relu", 0.0, True)}
    loaded_images = {"batch_norm_statistics": 1, "batch_norm": 2, "batch_norm_sums": 3, "batch_norm_backward": 3}
    for kernel, operands, params in (
        (batch_norm, TrainingOperands(image, statistic, statistic, image), {"epsilon": 0.0}),
        (batch_norm_backward, BackwardOperands(image, image, *[statistic] * 5, image), {"residual_grad": True}),
    ):
        run = functools.partial(kernel.run, config=batch_norm._CONFIGS[0], **relu, **params)
        report = lowering.compile(jax.jit(run), operands, target=h100)
        for code in machine_code(report):
            ahead = 4 * loaded_images.pop(code.kernel)
            assert code.access_bytes("LDG")[access_bytes] >= ahead
            assert code.bytes_in_flight() >= ahead * access_bytes
            assert code.count("LDL") + code.count("STL") == 0
    assert not loaded_images
