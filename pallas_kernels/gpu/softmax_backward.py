"""The gradient of softmax on NVIDIA GPUs from Hopper on; thread blocks have the groups of the forward kernel.

dx = y (grad - sum(y grad)),   and for log-softmax   dx = grad - exp(y) sum(grad)
"""

import jax.numpy as jnp

from pallas_kernels.gpu.softmax import configs, kind, launch, refuses
from pallas_kernels.kernel import Kernel


def _gradients(part, y_gmem, grad_gmem, dx_gmem, log):
    arrays = y_gmem, grad_gmem

    def term(step, y, grad):
        return part.new(step, grad if log else y * grad)

    # Two operands are held, so a group may be half as long as in the forward kernel.
    held = part.held(arrays)
    counted = part.accumulated(arrays, lambda step, loaded, sums: (sums[0] + term(step, *loaded),), 0.0)
    terms = [term(step, *accesses) for step, accesses in enumerate(held)]
    total = part.total(sum([*terms, *(sums for (sums,) in counted)]))

    def write(step, y, grad):
        part.store(dx_gmem, step, grad - jnp.exp(y) * total if log else y * (grad - total))

    part.each(arrays, held, write)


def run(y, grad, *, log, groups, config, interpret=False):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    return launch(_gradients, "softmax_backward", [y, grad], log, groups, config, interpret)


KERNEL = Kernel(
    name="mosaic_gpu", platform="cuda", run=run, refuses=refuses, configs=configs, kind=kind, interpreter_is_pure=False
)
