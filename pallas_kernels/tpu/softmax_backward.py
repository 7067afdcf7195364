"""The gradient of softmax on TPU: one read of the result and of its gradient.

    dx = y (grad - sum(y grad)),   and for log-softmax   dx = grad - exp(y) sum(grad)

Blocks, pieces and VMEM are those of the forward kernel.
"""

import functools

import jax.numpy as jnp

from pallas_kernels.kernel import Kernel
from pallas_kernels.tpu.softmax import blocks_of, configs, kind, launch, refuses, view_of


def _whole_kernel(y_ref, grad_ref, dx_ref, *, blocks, log):
    y, grad = y_ref[...].astype(jnp.float32), grad_ref[...].astype(jnp.float32)
    dx_ref[...] = _gradient(y, grad, blocks.sum(_term(y, grad, log)), log).astype(dx_ref.dtype)


def _kernel(y_ref, grad_ref, dx_ref, *, blocks, log):
    def add(place, total):
        y, grad = y_ref[place].astype(jnp.float32), grad_ref[place].astype(jnp.float32)
        return total + blocks.sum(_term(y, grad, log))

    total = blocks.fold(add, blocks.statistic(0.0))

    def write(place, carry):
        y, grad = y_ref[place].astype(jnp.float32), grad_ref[place].astype(jnp.float32)
        dx_ref[place] = _gradient(y, grad, total, log).astype(dx_ref.dtype)
        return carry

    blocks.fold(write, 0)


def _term(y, grad, log):
    """Returns the values to sum over a group."""
    return grad if log else y * grad


def _gradient(y, grad, total, log):
    return grad - jnp.exp(y) * total if log else y * (grad - total)


def run(y, grad, *, log, groups, config, interpret=False):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    blocks = blocks_of(view_of(groups, grad.shape), [y.dtype, grad.dtype], config["block_elements"])
    body = _whole_kernel if blocks.piece == blocks.view.size else _kernel
    body = functools.partial(body, blocks=blocks, log=log)
    return (launch(body, "softmax_backward", blocks, [y, grad], interpret),)


KERNEL = Kernel(name="mosaic_tpu", platform="tpu", run=run, refuses=refuses, configs=configs, kind=kind)
