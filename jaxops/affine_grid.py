"""Affine grids: the points at which an affine map samples an image, and the gradient of the map."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._checks import layouts
from jaxops._checks.dtypes import accumulation_dtype, check_floating
from jaxops._checks.mcdnn import as_array, require
from jaxops._primitive.derivative import Active, Arrays, Derivative
from jaxops._primitive.operator import Operator


def affine_grid(theta: jax.Array, size: Sequence[int]) -> jax.Array:
    """Applies an affine map to every output pixel: `grid[n, h, w] = theta[n] @ (bx[w], by[h], 1)`.

    The base points are `bx[w] = -1 + 2 * w / (W - 1)` and `by[h] = -1 + 2 * h / (H - 1)`. So -1 and 1 are the centres
    of the first and last pixels ("align corners"). Along an axis of one pixel, the base point is 0. The gradient is

        grad_theta[n, i, k] = sum over h and w of grad_grid[n, h, w, i] * (bx[w], by[h], 1)[k]

    Args:
      theta: (N, 2, 3), floating point. The first row gives x, the second y.
      size: (N, C, H, W), the shape that `grid_sample` will return. C has no effect.

    Returns:
      (N, H, W, 2), with the dtype of theta: the x and y of each point to sample, ready for `grid_sample`.

    Raises:
      BadParamError: if theta is not (N, 2, 3) and floating point, or size is not four sizes that begin with N.

    Numerics:
      Products and sums are computed in float32 (float64 for float64) and rounded once. The map is linear, so
      derivatives of all modes and orders exist and nothing is kept for them. On every platform it runs as XLA's
      elementwise operations and sums.

    Example:
      >>> identity = jnp.array([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]])
      >>> jaxops.affine_grid(identity, (1, 1, 1, 3))[0, 0].tolist()
      [[-1.0, 0.0], [0.0, 0.0], [1.0, 0.0]]

    Source: mcDNN `mcdnnSpatialTfGridGeneratorForward` and `mcdnnSpatialTfGridGeneratorBackward`; PyTorch
    `torch.nn.functional.affine_grid(align_corners=True)`.
    """
    name = "affine_grid"
    theta = as_array(name, "theta", theta)
    require(theta.ndim == 3, name, "theta", "have shape (N, 2, 3)", theta)
    sizes = layouts.sizes(size) or ()
    require(len(sizes) == 4, name, "size", "be four sizes, (N, C, H, W)", size)
    batch, _, *extents = sizes
    require(batch == theta.shape[0], name, "size", f"begin with theta's {theta.shape[0]}", size)
    return AFFINE_GRID(theta, extents=tuple(extents))[0]


def _check(theta: Any, *, extents: tuple[int, int]) -> None:
    is_map = len(theta.shape) >= 2 and theta.shape[-2:] == (2, 3)
    require(is_map, "affine_grid", "theta", "have shape (..., 2, 3)", theta)
    check_floating("affine_grid", theta=theta)


def _check_backward(grad: Any, *, extents: tuple[int, int]) -> None:
    name, shape = "affine_grid_backward", (*extents, 2)
    is_grid = len(grad.shape) >= 3 and grad.shape[-3:] == shape
    require(is_grid, name, "grad", f"have shape {('...', *shape)}", grad)
    check_floating(name, grad=grad)


def _grid(theta: jax.Array, *, extents: tuple[int, int]) -> Arrays:
    by, bx = _base_points(extents, theta.dtype)
    of_x, of_y, constant = (theta.astype(bx.dtype)[..., None, None, :, k] for k in range(3))
    shape = (*theta.shape[:-2], *extents, 2)
    bx, by = (jax.lax.broadcast_in_dim(b, shape, (len(shape) - 4 + axis,)) for b, axis in ((bx, 2), (by, 1)))
    return ((of_x * bx + of_y * by + constant).astype(theta.dtype),)


def _backward(grad: jax.Array, *, extents: tuple[int, int]) -> Arrays:
    by, bx = _base_points(extents, grad.dtype)
    columns = jnp.sum(grad.astype(bx.dtype), axis=-3)
    rows = jnp.sum(grad.astype(by.dtype), axis=-2)
    of_x, of_y = (
        jnp.sum(sums * jax.lax.broadcast_in_dim(base, sums.shape, (sums.ndim - 2,)), axis=-2)
        for sums, base in ((columns, bx), (rows, by))
    )
    return (jnp.stack([of_x, of_y, jnp.sum(rows, axis=-2)], axis=-1).astype(grad.dtype),)


def _base_points(extents: tuple[int, int], dtype: Any) -> list[jax.Array]:
    """Computes the base points of rows and of columns, in float64 unless their number is symbolic."""
    return [_base_points_along(extent, accumulation_dtype(dtype)) for extent in extents]


def _base_points_along(extent: int, dtype: Any) -> jax.Array:
    if not jax.export.is_symbolic_dim(extent):
        return jnp.asarray((2 * np.arange(extent) - (extent - 1)) / max(extent - 1, 1), dtype)
    last = jnp.asarray(extent - 1, dtype)
    return (2 * jnp.arange(extent, dtype=dtype) - last) / jnp.maximum(last, 1)


# Both operators are linear, and each is the other's transpose, so their derivatives keep nothing.


def _linearize(operands: Sequence[jax.Array], active: Active, **params: Any) -> tuple[Arrays, Arrays]:
    return AFFINE_GRID(*operands, **params), ()


def _linearize_backward(operands: Sequence[jax.Array], active: Active, **params: Any) -> tuple[Arrays, Arrays]:
    return AFFINE_GRID_BACKWARD(*operands, **params), ()


def _apply(residuals: Arrays, linear: Arrays, active: Active, **params: Any) -> Arrays:
    return AFFINE_GRID(*linear, **params)


def _transpose(residuals: Arrays, linear: Arrays, active: Active, **params: Any) -> Arrays:
    return AFFINE_GRID_BACKWARD(*linear, **params)


AFFINE_GRID = Operator("affine_grid", "... i k -> ... h w i", _check, _grid, Derivative(_transpose, _apply, _linearize))
AFFINE_GRID_BACKWARD = Operator(
    "affine_grid_backward",
    "... h w i -> ... i k",
    _check_backward,
    _backward,
    Derivative(_apply, _transpose, _linearize_backward),
)
