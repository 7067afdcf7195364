"""A kernel that copies its operand through VMEM in two buffers, and forgets to wait before it writes one again."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

ROWS, CHUNKS = 16, 8


def kernel(x, y, loaded, doubled, loads, stores):
    """Doubles the rows of x, a chunk at a time, while the next chunk is loaded."""

    def load(chunk, slot):
        return pltpu.make_async_copy(x.at[pl.ds(chunk * ROWS, ROWS)], loaded.at[slot], loads.at[slot])

    def store(chunk, slot):
        return pltpu.make_async_copy(doubled.at[slot], y.at[pl.ds(chunk * ROWS, ROWS)], stores.at[slot])

    load(0, 0).start()

    @pl.loop(0, CHUNKS)
    def _(chunk):
        slot = jax.lax.rem(chunk, 2)

        @pl.when(chunk + 1 < CHUNKS)
        def _():
            load(chunk + 1, 1 - slot).start()

        load(chunk, slot).wait()
        doubled[slot] = 2 * loaded[slot]  # the store that was started two chunks ago may still read this
        store(chunk, slot).start()

        @pl.when(chunk >= 2)
        def _():
            store(chunk - 2, slot).wait()

    for chunk in (CHUNKS - 2, CHUNKS - 1):
        store(chunk, chunk % 2).wait()


def double(x):
    """Doubles (128, 256)."""
    anywhere = pl.BlockSpec(memory_space=pltpu.MemorySpace.HBM)
    buffers = pltpu.VMEM((2, ROWS, 256), jnp.float32)
    semaphores = pltpu.SemaphoreType.DMA((2,))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((CHUNKS * ROWS, 256), jnp.float32),
        in_specs=[anywhere],
        out_specs=anywhere,
        scratch_shapes=[buffers, buffers, semaphores, semaphores],
    )(x)


example_args = (jax.ShapeDtypeStruct((CHUNKS * ROWS, 256), jnp.float32),)
