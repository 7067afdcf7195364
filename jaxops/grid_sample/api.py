"""The public function `grid_sample`."""

import jax

from jaxops._checks.mcdnn import as_arrays, require, require_bool, require_choice
from jaxops.grid_sample.operator import AXES, GRID_SAMPLE, GRID_SAMPLE_3D
from pallas_kernels.grid_sample_points import MODES, PADDING_MODES, Sampling


def grid_sample(
    x: jax.Array,
    grid: jax.Array,
    *,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool = True,
) -> jax.Array:
    """Interpolates images or volumes at the points of a grid.

    The point (gx, gy) lies at column `px` and, likewise, at row py:

        px = (gx + 1) / 2 * (W_in - 1)      -1 and 1 are the outer pixels' centres (align_corners)
        px = ((gx + 1) * W_in - 1) / 2      -1 and 1 are their outer edges

    With `x0 = floor(px)` and `a = px - x0`, and y0 and b likewise,

        y = x[y0, x0] (1-a)(1-b) + x[y0, x0+1] a (1-b) + x[y0+1, x0] (1-a) b + x[y0+1, x0+1] a b

    where pixels outside the image count as 0. The gradient of a pixel is the sum of grad_y times the weights that the
    pixel had. The gradient of gx is

        dpx/dgx * sum over c of grad_y ((x[y0, x0+1] - x[y0, x0]) (1-b)
                                        + (x[y0+1, x0+1] - x[y0+1, x0]) b)

    and that of gy likewise. In volumes, a point (gx, gy, gz) lies between eight pixels.

    Args:
      x: (N, C, H_in, W_in) or (N, C, D_in, H_in, W_in), floating point.
      grid: (N, H, W, 2), floating point: the gx and gy of each output pixel. For volumes (N, D, H, W, 3): gx, gy, gz.
      mode: "bilinear" as above, for volumes trilinear; or "nearest", the pixel whose centre is nearest. Halfway between
        two it is the one with the even number.
      padding_mode: what lies outside the image. "zeros": pixels that are 0. "border": the nearest pixel of the image,
        so px is limited to 0 ... W_in - 1. "reflection": the image itself, reflected as often as need be at the centres
        of its first and last pixels (align_corners) or at their outer edges; then px is limited likewise.
      align_corners: where -1 and 1 are, as above. PyTorch's default is False.

    Returns:
      (N, C, H, W) or (N, C, D, H, W), with the dtype of x.

    Raises:
      BadParamError: if a shape or an option differs from the above, an operand is not floating point, x has no pixels,
        or one of its images has 2**31 elements or more.

    Numerics:
      Computed in float32 (float64 where an operand is float64) and rounded once. Gradients are summed in the same
      dtype; on a CPU always in the same order.

      Points that are not finite give 0. Their gradient is ignored, and the image is not read for them. But with padding
      by "border", infinity is a coordinate far outside. (With padding by "border" or "reflection", PyTorch reads a
      pixel for NaN.)

      At the centre of a pixel, the gradient of the grid is the right-hand one. With padding by "border" or "reflection"
      it is 0 where px is limited, at the centres of the first and last pixels as well; and reflections turn its sign.
      With "nearest" it is 0.

      Derivatives of all modes exist up to second order. The floor counts as constant.

      This runs as XLA's gathers and scatters unless kernels are chosen. On a CPU it avoids temporaries that hold every
      product of images with few channels (`xla_few_channels`), and computes the gradient of x two images at a time
      (`xla_image_pairs`). Volumes have an operator of their own, `grid_sample_3d`, which has no kernels.

      On TPUs there are kernels for bilinear sampling of images that fit into VMEM, in float32 and bfloat16. They keep
      an image with a border of zeros there, and each point reads two pairs of neighbouring pixels, or adds to them. By
      the compiler's schedules for TPU v5e, values of float32 images (16, 64, 56, 56) at as many points take 132 us
      instead of XLA's 1217 us, and both gradients 331 us; values of images (16, 256, 28, 28) 93 us instead of 410 us,
      and both gradients 199 us. (How long XLA's scatter takes, the schedules do not say.) Channels are padded to 128,
      with copies in HBM, but even values of images (64, 3, 224, 224) take 12 ms instead of 71 ms. The gradient of x is
      added in the order of the points, so it is the same in each run. GPUs have no kernel: pixels come through the
      cache anyway.

      On NVIDIA GPUs a scatter adds with atomics, so the last bits of its sums differ from run to run. There, what the
      pixels get is sorted by pixel and then added in that order (`xla_sorted_runs`), so the gradient of x is the same
      in each run. XLA's temporaries are 2 to 8 times the size of grad_y, with a scatter 1 to 2 times. The time has not
      been measured on a GPU. `jaxops.use(grid_sample_backward="reference")` scatters.

    Example:
      >>> x = jnp.array([[[[0.0, 10.0], [20.0, 30.0]]]])
      >>> # The first pixel, the middle, the right edge.
      >>> grid = jnp.array([[[[-1.0, -1.0], [0.0, 0.0], [1.0, 0.0]]]])
      >>> jaxops.grid_sample(x, grid).tolist()
      [[[[0.0, 15.0, 20.0]]]]
      >>> jaxops.grid_sample(x, 2 * grid, padding_mode="border", align_corners=False).tolist()
      [[[[0.0, 15.0, 20.0]]]]

    Source: mcDNN `mcdnnSpatialTfSamplerForward` and `mcdnnSpatialTfSamplerBackward`, which have the defaults alone;
    PyTorch `torch.nn.functional.grid_sample`.
    """
    name = "grid_sample"
    x, grid = as_arrays(name, {"x": x, "grid": grid})
    sampling = Sampling(
        require_choice(name, "mode", mode, MODES),
        require_choice(name, "padding_mode", padding_mode, PADDING_MODES),
        require_bool(name, "align_corners", align_corners),
    )
    is_stack = x.ndim in (4, 5)
    require(is_stack, name, "x", "have shape (N, C, H_in, W_in) or (N, C, D_in, H_in, W_in)", x)
    rank = x.ndim - 2
    require(grid.ndim == x.ndim, name, "grid", f"have shape (N, {', '.join(AXES[-rank:])}, {rank})", grid)
    operator = GRID_SAMPLE if rank == 2 else GRID_SAMPLE_3D
    return operator(x, grid, sampling=sampling)[0]
