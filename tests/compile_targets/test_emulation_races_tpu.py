"""Kernels whose transfers race with one another, as compiled for TPUs; waits come in the order of the starts."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compile_targets import emulation_truths
from compile_targets.emulation_truths import normal
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import lowering
from lowering.select import EMULATED

pytestmark = pytest.mark.tpu_compile

HBM = pl.BlockSpec(memory_space=pltpu.MemorySpace.HBM)
BUFFER = pltpu.VMEM((64, 256), jnp.float32)
SEMAPHORES = pltpu.SemaphoreType.DMA((2,))


users_promotion = pytest.fixture(autouse=True)(emulation_truths.users_promotion)


def run_together(semaphores, *ends):
    copies = [pltpu.make_async_copy(*pair, semaphores.at[at]) for at, pair in enumerate(ends)]
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.wait()


def called(body, x, rows, **options):
    shape = jax.ShapeDtypeStruct((rows, 256), jnp.float32)
    return pl.pallas_call(body, in_specs=[HBM], out_specs=HBM, out_shape=shape, **options)(x)


def of_two_stores(x, distance):
    """Two stores of 64 rows, the second of which begins some rows after the first."""

    def body(x, y, a, b, semaphores):
        pltpu.sync_copy(x.at[:64], a)
        b[...] = 2 * a[...]
        run_together(semaphores, (a, y.at[:64]), (b, y.at[pl.ds(distance, 64)]))

    return called(body, x, 64 + distance, scratch_shapes=[BUFFER, BUFFER, SEMAPHORES])


def of_columns(x, second):
    """Two strided stores of 128 columns each, which reach over one another."""

    def body(x, y, buffer, semaphores):
        pltpu.sync_copy(x.at[:64], buffer)
        left, right = buffer.at[:, :128], buffer.at[:, 128:]
        run_together(semaphores, (left, y.at[:, :128]), (right, y.at[:, second : second + 128]))
        pltpu.sync_copy(right, y.at[:, 128:])

    return called(body, x, 64, scratch_shapes=[BUFFER, SEMAPHORES])


def of_two_loads(x, distance):
    """Two loads into buffers that begin some rows apart."""

    def body(x, y, buffer, semaphores):
        to = buffer.at[pl.ds(0, 64)], buffer.at[pl.ds(distance, 64)]
        run_together(semaphores, (x.at[:64], to[0]), (x.at[64:128], to[1]))
        pltpu.sync_copy(buffer.at[:64], y)

    return called(body, x, 64, scratch_shapes=[pltpu.VMEM((128, 256), jnp.float32), SEMAPHORES])


def of_a_load_and_a_store(x, distance):
    """A load, and a store to rows of the same operand."""

    def body(x, y, a, b, semaphores):
        b[...] = jnp.full_like(b, 7.0)
        run_together(semaphores, (x.at[:64], a), (b, y.at[pl.ds(distance, 64)]))
        pltpu.sync_copy(a, y.at[128:192])

    options = {"scratch_shapes": [BUFFER, BUFFER, SEMAPHORES], "input_output_aliases": {0: 0}}
    return called(body, x, x.shape[0], **options)


def in_place(x, distance):
    """Doubles chunks in two buffers; with 0, the next load is started before the wait for the store from its buffer."""

    def body(x, y, buffers, loads, stores):
        def load(at):
            return pltpu.make_async_copy(x.at[pl.ds(64 * at, 64)], buffers.at[at % 2], loads.at[at % 2])

        def store(at):
            return pltpu.make_async_copy(buffers.at[at % 2], y.at[pl.ds(64 * at, 64)], stores.at[at % 2])

        load(0).start()
        load(1).start()
        for at in range(4):
            load(at).wait()
            buffers[at % 2] *= 2
            store(at).start()
            if at < 2 and distance == 0:
                load(at + 2).start()
                store(at).wait()
            elif at < 2:
                store(at).wait()
                load(at + 2).start()
        store(2).wait()
        store(3).wait()

    scratch = [pltpu.VMEM((2, 64, 256), jnp.float32), SEMAPHORES, SEMAPHORES]
    return called(body, x, 256, scratch_shapes=scratch)


def of_the_pipeline(x, distance):
    """Overwrites its operand, whose blocks it reads some steps after they were written."""

    def body(x, y):
        y[...] = 2 * x[...]

    block = functools.partial(pl.BlockSpec, (64, 256))
    return pl.pallas_call(
        body,
        grid=(4,),
        in_specs=[block(lambda i: (jnp.maximum(i - distance, 0), 0))],
        out_specs=block(lambda i: (i, 0)),
        out_shape=x,
        input_output_aliases={0: 0},
    )(x)


READS_THEN_WRITES = "the earlier one reads and the later one writes"
CASES = {
    "two stores": (of_two_stores, 32, 64, "both write the same 32,768 bytes of result 0"),
    "strided stores": (of_columns, 0, 128, "both write the same 32,768 bytes of result 0"),
    "two loads": (of_two_loads, 32, 64, "both write the same 32,768 bytes of vmem"),
    "a load and a store": (of_a_load_and_a_store, 0, 64, f"{READS_THEN_WRITES} the same 65,536 bytes of operand 0"),
    "in place": (in_place, 0, 1, f"{READS_THEN_WRITES} the same 65,536 bytes of vmem"),
    "the pipeline": (of_the_pipeline, 1, 0, f"{READS_THEN_WRITES} the same 65,536 bytes of operand 0"),
}


@pytest.mark.parametrize("chip", EMULATED)
@pytest.mark.parametrize("case", CASES)
def test_two_transfers_that_race_are_found(case, chip, rng):
    fn, racing, apart, said = CASES[case]
    x = normal(rng, 256, 256)
    found = lowering.emulate(lambda x: fn(x, racing), x, target=chip).findings
    assert [said in one.what for one in found] == [True] * len(found)
    line = "" if case == "the pipeline" else r" \(test_emulation_races_tpu.py:\d+\)"
    starts = rf"bundle 0x\w+{line} starts a transfer, and before the wait for it bundle 0x\w+{line} starts another: "
    assert re.fullmatch(
        rf"{starts}.*, and result 0 \(from element \(\d+, \d+\) on\) depends on which comes first", found[0].what
    )
    assert lowering.emulate(lambda x: fn(x, apart), x, target=chip).findings == ()


@pytest.mark.parametrize("distance", [32, 64])
def test_a_race_is_found_in_a_whole_program(distance, rng):
    x = normal(rng, 256, 256)
    emulation = lowering.emulate(lambda x: of_two_stores(x, distance), x, target="tpu-v6e", whole_program=True)
    whats = [one.what for one in emulation.findings if one.source.startswith("test_emulation_races_tpu.py")]
    assert ["both write the same 32,768 bytes of hbm" in what for what in whats] == [True] * (distance == 32)
    assert np.isfinite(emulation.results).all()


@pytest.mark.parametrize("taken", range(3))
def test_any_of_three_copies_on_one_semaphore_may_come_after_two_waits(taken):
    def body(x, out, buffer, semaphore):
        copies = [pltpu.make_async_copy(x.at[pl.ds(8 * at, 8)], buffer.at[at], semaphore) for at in range(3)]
        for copy in copies:
            copy.start()
        for copy in copies[:2]:
            copy.wait()
        out[...] = buffer[taken]
        copies[2].wait()

    def call(x):
        shape, scratch = jax.ShapeDtypeStruct((8, 256), x.dtype), [pltpu.VMEM((3, 8, 256), x.dtype)]
        scratch.append(pltpu.SemaphoreType.DMA)
        return pl.pallas_call(body, in_specs=[HBM], out_shape=shape, scratch_shapes=scratch)(x)

    (finding,) = lowering.emulate(
        call, np.arange(24 * 256, dtype=np.float32).reshape(24, 256), target="tpu-v5e"
    ).findings
    assert "starts a transfer whose memory is used before the wait for it" in finding.what


def test_a_copy_of_a_part_of_a_tile_of_int8_moves_the_tile():
    def body(x, out, semaphore):
        out[...] = jnp.zeros(out.shape, out.dtype)
        copy = pltpu.make_async_copy(x.at[:8], out.at[:8], semaphore)
        copy.start()
        copy.wait()

    def call(x):
        scratch = [pltpu.SemaphoreType.DMA]
        return pl.pallas_call(body, in_specs=[HBM], out_shape=x, scratch_shapes=scratch)(x)

    emulation = lowering.emulate(call, jnp.ones((64, 128), jnp.int8), target="tpu-v5e")
    assert emulation.findings == ()
    assert np.asarray(emulation.results).sum(1).tolist() == 32 * [128] + 32 * [0]
