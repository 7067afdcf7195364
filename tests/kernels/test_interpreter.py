"""Pallas' interpreter of TPU kernels finds a planted race, so that it would find one of ours."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def copied(x, waits_first):
    """Copies x by way of VMEM, and reads it there before or after the transfer has ended."""

    def kernel(x_ref, y_ref, scratch, semaphore):
        transfer = pltpu.make_async_copy(x_ref, scratch, semaphore)
        transfer.start()
        if waits_first:
            transfer.wait()
        y_ref[...] = scratch[...]
        if not waits_first:
            transfer.wait()

    return pl.pallas_call(
        kernel,
        out_shape=jax.typeof(x),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA],
        interpret=pltpu.InterpretParams(detect_races=True),
    )(x)


def test_a_read_that_waits_for_no_transfer_is_a_race(capfd):
    x = jnp.arange(8 * 128.0).reshape(8, 128)
    np.testing.assert_array_equal(copied(x, waits_first=True), x)
    assert "RACE DETECTED" not in capfd.readouterr().out
    try:
        jax.block_until_ready(copied(x, waits_first=False))
        found = capfd.readouterr().out
    except jax.errors.JaxRuntimeError as error:  # the newest JAX raises what the oldest prints
        found = str(error)
    assert "RACE DETECTED" in found
