"""The gradient of softmax on TPU: one read of the result and its gradient if groups fit into VMEM, else two.

    dx = y (grad - sum(y grad)),   and for log-softmax   dx = grad - exp(y) sum(grad)

Blocks, phases and VMEM are those of the forward kernel.
"""

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.kernel import Kernel
from pallas_kernels.tpu.softmax import blocks_of, configs, kind, launch, refuses, view_of


def _whole_kernel(y_ref, grad_ref, dx_ref, *, blocks, log):
    y, grad = y_ref[...].astype(jnp.float32), grad_ref[...].astype(jnp.float32)
    dx_ref[...] = _gradient(y, grad, blocks.sum(_term(y, grad, log)), log).astype(dx_ref.dtype)


def _kernel(y_ref, grad_ref, dx_ref, total_ref, *, blocks, log):
    phase, step = pl.program_id(4), pl.program_id(5)
    y, grad = y_ref[...].astype(jnp.float32), grad_ref[...].astype(jnp.float32)

    @pl.when((phase == 0) & (step == 0))
    def _():
        total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)

    @pl.when(phase == 0)
    def _():
        # The block at a group's end may reach beyond it, where its values are undefined, and NaN for all we know.
        total_ref[...] += blocks.sum(blocks.valid(_term(y, grad, log), step, 0.0))

    @pl.when(phase == 1)
    def _():
        dx_ref[...] = _gradient(y, grad, total_ref[...], log).astype(dx_ref.dtype)


def _term(y, grad, log):
    """Returns the values to sum over a group."""
    return grad if log else y * grad


def _gradient(y, grad, total, log):
    return grad - jnp.exp(y) * total if log else y * (grad - total)


def run(y, grad, *, log, groups, config, interpret=False):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    blocks = blocks_of(view_of(groups, grad.shape), [y.dtype, grad.dtype], config["block_elements"])
    body = _whole_kernel if blocks.steps == 1 else _kernel
    body = functools.partial(body, blocks=blocks, log=log)
    return (launch(body, "softmax_backward", blocks, [y, grad], 1, interpret),)


KERNEL = Kernel(name="mosaic_tpu", platform="tpu", run=run, refuses=refuses, configs=configs, kind=kind)
