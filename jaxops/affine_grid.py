"""Affine grids: the points at which an affine map samples an image or a volume, and the gradient of the map."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._checks import layouts
from jaxops._checks.dtypes import accumulation_dtype, check_floating
from jaxops._checks.mcdnn import as_array, require, require_bool
from jaxops._primitive.derivative import Active, Arrays, Derivative
from jaxops._primitive.operator import Operator

# By number of spatial axes.
_SIZES = {2: "a tuple of four sizes, (N, C, H, W)", 3: "a tuple of five sizes, (N, C, D, H, W)"}


def affine_grid(theta: jax.Array, size: Sequence[int], *, align_corners: bool = True) -> jax.Array:
    """Applies an affine map to every output pixel: `grid[n, h, w] = theta[n] @ (bx[w], by[h], 1)`.

    The base points along an axis of W pixels are

        bx[w] = -1 + 2 * w / (W - 1)   align_corners: -1 and 1 are the outer pixels' centres
        bx[w] = -1 + (2 * w + 1) / W   otherwise: -1 and 1 are their outer edges

    Along an axis of one pixel, the base point is 0. The gradient is

        grad_theta[n, i, k] = sum over h and w of grad_grid[n, h, w, i] * (bx[w], by[h], 1)[k]

    In volumes, `grid[n, d, h, w] = theta[n] @ (bx[w], by[h], bz[d], 1)`.

    Args:
      theta: (N, 2, 3), floating point. The first row gives x, the second y. For volumes (N, 3, 4), where the third
        gives z.
      size: (N, C, H, W) or (N, C, D, H, W), the shape that `grid_sample` will return. C has no effect.
      align_corners: where -1 and 1 are; the same as for `grid_sample`. PyTorch's default is False.

    Returns:
      (N, H, W, 2) or (N, D, H, W, 3), with the dtype of theta: the x, y and z of each point to sample, ready for
      `grid_sample`.

    Raises:
      BadParamError: if theta is neither (N, 2, 3) nor (N, 3, 4), or not floating point, size is not four or five sizes
        that begin with N, or align_corners is not a bool.

    Numerics:
      Products and sums are computed in float32 (float64 for float64) and rounded once. The map is linear, so
      derivatives of all modes and orders exist and nothing is kept for them. On every platform it runs as XLA's
      elementwise operations and sums. Volumes have an operator of their own, `affine_grid_3d`.

    Example:
      >>> identity = jnp.array([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]])
      >>> jaxops.affine_grid(identity, (1, 1, 1, 3))[0, 0].tolist()
      [[-1.0, 0.0], [0.0, 0.0], [1.0, 0.0]]
      >>> jaxops.affine_grid(identity, (1, 1, 1, 2), align_corners=False)[0, 0].tolist()
      [[-0.5, 0.0], [0.5, 0.0]]

    Source: mcDNN `mcdnnSpatialTfGridGeneratorForward` and `mcdnnSpatialTfGridGeneratorBackward`, which have the default
    alone; PyTorch `torch.nn.functional.affine_grid`.
    """
    name = "affine_grid"
    theta = as_array(name, "theta", theta)
    align_corners = require_bool(name, "align_corners", align_corners)
    require(theta.ndim == 3, name, "theta", "have shape (N, 2, 3) or (N, 3, 4)", theta)
    rank = 3 if theta.shape[1:] == (3, 4) else 2
    sizes = layouts.sizes(size) or ()
    require(len(sizes) == 2 + rank, name, "size", f"be {_SIZES[rank]}", size)
    batch, _, *extents = sizes
    require(batch == theta.shape[0], name, "size", f"begin with theta's {theta.shape[0]}", size)
    operator = AFFINE_GRID if rank == 2 else AFFINE_GRID_3D
    return operator(theta, extents=tuple(extents), align_corners=align_corners)[0]


def _check(theta: Any, *, rank: int, extents: tuple[int, ...], align_corners: bool) -> None:
    is_map = len(theta.shape) >= 2 and theta.shape[-2:] == (rank, rank + 1)
    require(is_map, "affine_grid", "theta", f"have shape (..., {rank}, {rank + 1})", theta)
    check_floating("affine_grid", theta=theta)


def _check_backward(grad: Any, *, rank: int, name: str, extents: tuple[int, ...], align_corners: bool) -> None:
    shape = (*extents, rank)
    is_grid = len(grad.shape) > rank and grad.shape[-1 - rank :] == shape
    require(is_grid, name, "grad", f"have shape {('...', *shape)}", grad)
    check_floating(name, grad=grad)


def _grid(theta: jax.Array, *, extents: tuple[int, ...], align_corners: bool) -> Arrays:
    rank = len(extents)
    bases = _base_points(extents, theta.dtype, align_corners)
    *maps, constant = (
        theta.astype(bases[0].dtype)[(..., *[None] * rank, slice(None), column)] for column in range(rank + 1)
    )
    shape = (*theta.shape[:-2], *extents, rank)
    bases = [jax.lax.broadcast_in_dim(base, shape, (len(shape) - 2 - axis,)) for axis, base in enumerate(bases)]
    terms = [column * base for column, base in zip(maps, bases, strict=True)]
    return (functools.reduce(jnp.add, [*terms, constant]).astype(theta.dtype),)


def _backward(grad: jax.Array, *, extents: tuple[int, ...], align_corners: bool) -> Arrays:
    rank = len(extents)
    bases = _base_points(extents, grad.dtype, align_corners)
    axes = range(-2, -2 - rank, -1)  # of x, y and z
    sums = [
        jnp.sum(grad.astype(base.dtype), axis=tuple({*axes} - {axis})) for axis, base in zip(axes, bases, strict=True)
    ]
    columns = [
        jnp.sum(along * jax.lax.broadcast_in_dim(base, along.shape, (along.ndim - 2,)), axis=-2)
        for along, base in zip(sums, bases, strict=True)
    ]
    return (jnp.stack([*columns, jnp.sum(sums[-1], axis=-2)], axis=-1).astype(grad.dtype),)


def _base_points(extents: tuple[int, ...], dtype: Any, align_corners: bool) -> list[jax.Array]:
    """Computes the base points of columns, of rows and of planes, in float64 unless their number is symbolic."""
    dtype = accumulation_dtype(dtype)
    return [_base_points_along(extent, dtype, align_corners) for extent in extents][::-1]


def _base_points_along(extent: int, dtype: Any, align_corners: bool) -> jax.Array:
    if not jax.export.is_symbolic_dim(extent):
        return jnp.asarray((2 * np.arange(extent) - (extent - 1)) / max(extent - align_corners, 1), dtype)
    last = jnp.asarray(extent - 1, dtype)
    return (2 * jnp.arange(extent, dtype=dtype) - last) / jnp.maximum(last if align_corners else last + 1, 1)


def _operators(name: str, rank: int, points: str) -> tuple[Operator, Operator]:
    """Makes the operators for images or volumes. Both are linear, each the other's transpose, and keep nothing."""

    def apply(residuals: Arrays, linear: Arrays, active: Active, **params: Any) -> Arrays:
        return forward(*linear, **params)

    def transpose(residuals: Arrays, linear: Arrays, active: Active, **params: Any) -> Arrays:
        return backward(*linear, **params)

    def linearize(operands: Sequence[jax.Array], active: Active, **params: Any) -> tuple[Arrays, Arrays]:
        return forward(*operands, **params), ()

    def linearize_backward(operands: Sequence[jax.Array], active: Active, **params: Any) -> tuple[Arrays, Arrays]:
        return backward(*operands, **params), ()

    small = "a grid is small beside the images"
    forward = Operator(
        name,
        f"... i k -> ... {points} i",
        functools.partial(_check, rank=rank),
        _grid,
        Derivative(transpose, apply, linearize),
        no_kernel=small,
    )
    backward = Operator(
        f"{name}_backward",
        f"... {points} i -> ... i k",
        functools.partial(_check_backward, rank=rank, name=f"{name}_backward"),
        _backward,
        Derivative(apply, transpose, linearize_backward),
        no_kernel=small,
    )
    return forward, backward


AFFINE_GRID, AFFINE_GRID_BACKWARD = _operators("affine_grid", 2, "h w")
AFFINE_GRID_3D, AFFINE_GRID_3D_BACKWARD = _operators("affine_grid_3d", 3, "d h w")
