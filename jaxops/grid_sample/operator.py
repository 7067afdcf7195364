"""The operators of grid sampling and of its gradients, for images and for volumes."""

import functools
from typing import Any

import jax

from jaxops._checks.dtypes import check_floating
from jaxops._checks.mcdnn import require
from jaxops._primitive.derivative import Active, Arrays, Derivative
from jaxops._primitive.operator import Operator
from jaxops.grid_sample.gradients import gradients, gradients_by_run, gradients_in_pairs, refuses_runs
from jaxops.grid_sample.values import refuses_few_channels, refuses_stack, sampled, sampled_few_channels
from lowering.operators import Form
from pallas_kernels.grid_sample_points import Sampling
from pallas_kernels.kernel import Kernel
from pallas_kernels.tpu import grid_sample as tpu

AXES = ("D", "H", "W")


def _check(x: Any, grid: Any, *, rank: int, sampling: Sampling, name: str = "grid_sample") -> None:
    check_floating(name, x=x, grid=grid)
    axes = AXES[-rank:]
    has_pixels = len(x.shape) > rank and 0 not in x.shape[-rank:]
    expected = ", ".join(f"{axis}_in" for axis in axes)
    require(has_pixels, name, "x", f"have shape (..., C, {expected}) with at least one pixel", x)
    first, *others = x.shape[-rank:]
    elements = x.shape[-1 - rank] * (first + 3)  # of the gradient of an image, with its border
    for extent in others:
        elements *= extent + 2
    is_indexed = jax.export.is_symbolic_dim(elements) or elements < 2**31
    require(is_indexed, name, "x", "have images of less than 2**31 elements", x)
    batch = x.shape[: -1 - rank]
    is_grid = len(grid.shape) == len(x.shape) and grid.shape[: -1 - rank] == batch and grid.shape[-1] == rank
    require(is_grid, name, "grid", f"have shape ({', '.join(map(str, (*batch, *axes, rank)))})", grid)


def _check_backward(x: Any, grid: Any, grad: Any, *, rank: int, sampling: Sampling, name: str) -> None:
    _check(x, grid, rank=rank, sampling=sampling, name=name)
    check_floating(name, grad=grad)
    shape = (*x.shape[:-rank], *grid.shape[-1 - rank : -1])
    require(grad.shape == shape, name, "grad", f"have shape {shape}", grad)


def _operators(
    name: str,
    rank: int,
    pixels: str,
    points: str,
    kernels: tuple[Kernel, ...] = (),
    backward_kernels: tuple[Kernel, ...] = (),
    no_kernel: str = "",
) -> tuple[Operator, Operator]:
    """Makes the operators for images or volumes, whose spatial axes are `pixels` in x and `points` in the grid."""
    x, grid, y = f"... c {pixels}", f"... {points} coordinate", f"... c {points}"
    backward = Operator(
        f"{name}_backward",
        f"{x}, {grid}, {y} -> {x}, {grid}",
        functools.partial(_check_backward, rank=rank, name=f"{name}_backward"),
        gradients,
        forms=(
            Form("xla_image_pairs", frozenset({"cpu"}), gradients_in_pairs, refuses_stack),
            # A scatter of GPUs adds with atomics, in another order each time; before jaxlib 0.11.1 it is slow as well.
            Form("xla_sorted_runs", frozenset({"cuda"}), gradients_by_run, refuses_runs),
        ),
        kernels=backward_kernels,
        no_kernel=no_kernel,
    )

    def vjp(residuals: Arrays, cotangents: Arrays, active: Active, *, sampling: Sampling) -> Arrays:
        x, grid, _ = residuals
        return backward(x, grid, *cotangents, sampling=sampling)

    forward = Operator(
        name,
        f"{x}, {grid} -> {y}",
        functools.partial(_check, rank=rank),
        sampled,
        Derivative(vjp),
        forms=(Form("xla_few_channels", frozenset({"cpu"}), sampled_few_channels, refuses_few_channels),),
        kernels=kernels,
        no_kernel=no_kernel,
    )
    return forward, backward


GRID_SAMPLE, GRID_SAMPLE_BACKWARD = _operators(
    "grid_sample", 2, "h_in w_in", "h w", (tpu.KERNEL,), (tpu.BACKWARD_KERNEL,)
)
GRID_SAMPLE_3D, GRID_SAMPLE_3D_BACKWARD = _operators(
    "grid_sample_3d", 3, "d_in h_in w_in", "d h w", no_kernel="kernels are for flat images"
)
