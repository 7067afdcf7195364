"""The gradient of softmax on NVIDIA GPUs from Hopper on; thread blocks have the groups of the forward kernel.

dx = y (grad - sum(y grad)),   and for log-softmax   dx = grad - exp(y) sum(grad)
"""

import jax.numpy as jnp

from pallas_kernels.gpu.softmax import configs, launch, refuses
from pallas_kernels.kernel import Kernel


def _gradients(part, y_gmem, grad_gmem, dx_gmem, log):
    def load(step):
        return part.load(y_gmem, step), part.load(grad_gmem, step)

    def term(step, pair):
        y, grad = pair
        return part.new(step, grad if log else y * grad)

    def store(step, pair, total):
        y, grad = pair
        part.store(dx_gmem, step, grad - jnp.exp(y) * total if log else y * (grad - total))

    # Two operands are held, so a group may be half as long as in the forward kernel.
    if part.tiling.is_held:
        steps = range(part.tiling.steps)
        held = list(map(load, steps))
        total = part.total(sum(map(term, steps, held)))
        for step in steps:
            store(step, held[step], total)
        return

    (totals,) = part.accumulated(lambda step, sums: (sums[0] + term(step, load(step)),), 0.0)
    total = part.total(totals)
    part.each(lambda step: store(step, load(step), total))


def run(y, grad, *, log, groups, config, interpret=False):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    return launch(_gradients, "softmax_backward", [y, grad], log, groups, config, interpret)


KERNEL = Kernel(
    name="mosaic_gpu", platform="cuda", run=run, refuses=refuses, configs=configs, interpreter_is_pure=False
)
