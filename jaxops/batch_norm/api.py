"""The public functions `batch_norm` and `batch_norm_inference`."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxops._checks.dtypes import accumulation_dtype, check_floating
from jaxops._checks.mcdnn import as_array, as_arrays, as_optional, require, require_axis_names, require_real
from jaxops._primitive.results import exportable
from jaxops._primitive.sharding import axis_or_vmap_rule, laid_out_as
from jaxops.activation.modes import IDENTITY, Activation
from jaxops.batch_norm.fused_activation import requested
from jaxops.batch_norm.layouts import View, view_of
from jaxops.batch_norm.operator import (
    BATCH_NORM,
    BATCH_NORM_INFERENCE,
    InferenceOperands,
    TrainingOperands,
    inverse_std,
)
from jaxops.batch_norm.statistics import check_like_images, masked_statistics, mean_and_variance

BN_MIN_EPSILON = 0.0


@exportable
class BatchNormOutput(NamedTuple):
    """Results of training. Only `y` carries a gradient.

    Attributes:
      y: the normalized images; shape and dtype of x.
      running_mean: the updated average of means, or None.
      running_var: the updated average of unbiased variances, or None.
      saved_mean: the mean of this batch; float32 (float64 for float64).
      saved_inv_var: 1 / sqrt(biased variance + epsilon) of this batch, which the documents call the inverse variance.
    """

    y: jax.Array
    running_mean: jax.Array | None
    running_var: jax.Array | None
    saved_mean: jax.Array
    saved_inv_var: jax.Array


class BatchStatistics(NamedTuple):
    """Mean and biased variance of a batch, as the operators have them, (c,), and how many elements each is of."""

    mean: jax.Array
    variance: jax.Array
    elements: Any


def batch_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    running_mean: jax.Array | None = None,
    running_var: jax.Array | None = None,
    *,
    mode: str = "spatial",
    momentum: float | jax.Array = 0.1,
    epsilon: float = 1e-5,
    activation: str | tuple[str, float] | None = None,
    residual: jax.Array | None = None,
    layout: str | None = None,
    axis_name: Hashable = None,
    mask: jax.Array | None = None,
) -> BatchNormOutput:
    """Normalizes a batch: `y = act(scale * (x - mean) / sqrt(var + epsilon) + bias + residual)`.

    The mean and biased variance are those of x, over its batch and spatial axes ("spatial") or over its batch axis
    alone ("per_activation"). The running statistics move towards them:

        running = (1 - momentum) * running + momentum * (mean, or unbiased variance)

    Args:
      x: (N, C, H, W), or as `layout` says; floating point.
      scale: (C,), or (C, H, W) for "per_activation", whatever the layout; floating point. None counts as 1.
      bias: like scale. None counts as 0.
      running_mean: like scale, or None. Pass both running statistics or neither.
      running_var: like scale, or None.
      mode: "spatial" or "per_activation".
      momentum: the weight of the new statistics, in [0, 1]: a Python or NumPy number, or a traced scalar, whose value
        is not checked. A new value does not recompile. At 1 the old statistics are not read. 1 / (n + 1) at call n,
        counted from 0, averages over all calls.
      epsilon: 0 or more.
      activation: None, a mode, or (mode, coefficient). Modes are "sigmoid", "relu", "tanh", "clipped_relu" (the
        coefficient is its ceiling and must be given), "elu" (its factor, 1), "identity" and "swish" (its beta, 1).
      residual: like x; added before the activation.
      layout: "NCHW", "NHWC", "NCDHW", "NDHWC", "NC", "NCL" or "NLC". There is no default for images and
        volumes; None means "NC" for two axes and "NCL" for three.
      axis_name: inside shard_map, the mesh axis (or axes) over which the batch is split and the statistics are shared;
        or the axis of a vmap. Under jit a split batch needs no axis name: its statistics already cover all of it.
      mask: booleans that broadcast to x: the elements that the statistics count. All are normalized. None counts all.

    Returns:
      A `BatchNormOutput`: y, the running statistics (None if none were given), and the statistics of this batch.

    Raises:
      BadParamError: if a shape, dtype or attribute differs from the above, only one running statistic is given, or
        no surrounding shard_map or vmap has the axis `axis_name`.

    Numerics:
      Everything is computed in float32 (float64 for float64 x) and rounded once at the end. The variance takes a second
      pass over x, so a large mean costs it no digits. The mean comes from a float32 sum, and may be off by some
      of its last digits, and y by as much in standard deviations: a constant channel far from 0 need not give the bias.

      With one element per channel, the running variance takes the biased variance, 0. An empty batch, and a channel of
      which the mask counts nothing, leave the running statistics as they are.

      The gradient reads x and, with "relu", y. Derivatives of all modes and orders exist in x, scale, bias and
      residual; statistics carry no gradient. relu'(0) = 0 and elu'(0) = coef. Where relu is 0, no gradient passes, not
      even NaN.

      Kernels for TPUs and for NVIDIA GPUs from Hopper on fuse relu and residual. By default one runs on TPUs at the
      sizes where evidence favours it, and on GPUs where you have measured it. With a mask, and over the axis of a vmap,
      XLA computes the statistics and their derivatives, which keep more.

    Meshes:
      Any axis of any array may be split. If pixels ("per_activation": activations) are split along an axis behind their
      first, devices exchange elements so that the first is split instead, and exchange them back afterwards. Elements
      are gathered only if the first axis cannot be divided by that many devices.

      On an explicit mesh y is laid out like x, running statistics like those passed in, and saved statistics like
      scale. A residual that is split differently from x is resharded.

    Example:
      >>> x = jnp.array([[1.0, 10.0], [3.0, 10.0]])
      >>> out = jaxops.batch_norm(x, jnp.ones(2), jnp.array([0.0, 5.0]), layout="NC")
      >>> out.saved_mean.tolist()
      [2.0, 10.0]
      >>> print(np.asarray(out.y).round(3))
      [[-1.  5.]
       [ 1.  5.]]

    Source: mcDNN `mcdnnBatchNormalizationForwardTrainingEx` and `mcdnnBatchNormalizationBackwardEx`; PyTorch
      `torch.nn.functional.batch_norm`, whose running variance is unbiased as well.
    """
    name = "batch_norm"
    x, view = _images(name, x, layout, mode)
    scale, bias = _scale_and_bias(name, view, x, scale, bias)
    epsilon = checked_epsilon(name, epsilon)
    momentum = checked_momentum(name, "momentum", momentum)
    both = (running_mean is None) == (running_var is None)
    require(both, name, "running_mean", "be given with running_var, or neither", running_mean)
    fused = IDENTITY if activation is None else requested(name, activation)
    residual = _residual(name, x, residual)
    shared: dict[str, Any] = {"axis_name": axis_name, "mask": checked_mask(name, x, mask)}
    y, of_batch = train(name, view, x, scale, bias, residual, fused, epsilon=epsilon, **shared)
    running: tuple[jax.Array | None, jax.Array | None] = (None, None)
    if running_mean is not None:
        old = parameters(name, view, running_mean=running_mean, running_var=running_var)
        running = updated_statistics(view, old, of_batch, momentum=momentum)
    found = of_batch.mean, inverse_std(of_batch.variance, epsilon)
    saved = (view.parameters_back(values, scale) for values in found)
    return BatchNormOutput(y, *running, *saved)


def batch_norm_inference(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    mean: jax.Array,
    var: jax.Array,
    *,
    mode: str = "spatial",
    epsilon: float = 1e-5,
    activation: str | tuple[str, float] | None = None,
    residual: jax.Array | None = None,
    layout: str | None = None,
) -> jax.Array:
    """Normalizes by given statistics: `y = act(scale * (x - mean) / sqrt(var + epsilon) + bias + residual)`.

    Args:
      x: (N, C, H, W), or as `layout` says; floating point.
      scale: (C,), or (C, H, W) for "per_activation", whatever the layout; floating point. None counts as 1.
      bias: like scale. None counts as 0.
      mean: like scale.
      var: like scale; a variance, such as the running one.
      mode: "spatial" or "per_activation".
      epsilon: 0 or more.
      activation: as in `batch_norm`.
      residual: like x; added before the activation.
      layout: as in `batch_norm`.

    Returns:
      An array with the shape and dtype of x.

    Raises:
      BadParamError: if a shape, dtype or attribute differs from the above.

    Numerics:
      Computed in float32 (float64 for float64 x) and rounded once. Derivatives of all modes and orders exist in every
      array.

    Meshes:
      As in `batch_norm`.

    Example:
      >>> x = jnp.array([[1.0], [5.0]])
      >>> mean, var = jnp.array([3.0]), jnp.array([4.0])
      >>> jaxops.batch_norm_inference(
      ...     x, jnp.ones(1), jnp.zeros(1), mean, var, epsilon=0.0, layout="NC"
      ... ).tolist()
      [[-1.0], [1.0]]

    Source: mcDNN `mcdnnBatchNormalizationForwardInference`; PyTorch `torch.nn.functional.batch_norm` in evaluation
    mode.
    """
    name = "batch_norm_inference"
    x, view = _images(name, x, layout, mode)
    params = [*_scale_and_bias(name, view, x, scale, bias), *parameters(name, view, mean=mean, var=var)]
    epsilon = checked_epsilon(name, epsilon)
    fused = IDENTITY if activation is None else requested(name, activation)
    return infer(view, x, params, _residual(name, x, residual), fused, epsilon=epsilon)


def train(
    operator: str,
    view: View,
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    residual: jax.Array | None,
    activation: Activation,
    *,
    epsilon: float,
    axis_name: Hashable = None,
    mask: jax.Array | None = None,
) -> tuple[jax.Array, BatchStatistics]:
    """Computes the result y, and the statistics of the batch, which have no derivative, of checked arguments."""
    check_axis_name(operator, axis_name)
    images, dtype = view.images(x), accumulation_dtype(x.dtype)
    scale, bias = (view.parameters(values).astype(dtype) for values in (scale, bias))
    added = None if residual is None else view.images(residual)
    elements: Any = view.elements * (1 if axis_name is None else jax.lax.axis_size(axis_name))
    if mask is None and (axis_name is None or not is_of_vmap(axis_name)):
        operands = TrainingOperands(images, scale, bias, added)
        y, mean, variance = BATCH_NORM(operands, epsilon=epsilon, axis_name=axis_name, activation=activation)
    else:
        if mask is None:
            mean, variance = mean_and_variance(images, axis_name)
        else:
            mean, variance, elements = masked_statistics(images, view.images(mask), axis_name)
        known = InferenceOperands(images, scale, bias, mean, variance, added)
        (y,) = BATCH_NORM_INFERENCE(known, activation=activation, epsilon=epsilon)
    return view.images_back(y, x), BatchStatistics(*jax.lax.stop_gradient((mean, variance)), elements)


def infer(
    view: View,
    x: jax.Array,
    params: Sequence[jax.Array],
    residual: jax.Array | None,
    activation: Activation,
    *,
    epsilon: float,
) -> jax.Array:
    """Computes the result y of checked arguments; `params` are scale, bias, mean and variance."""
    images, dtype = view.images(x), accumulation_dtype(x.dtype)
    scale, bias, mean, variance = (view.parameters(values).astype(dtype) for values in params)
    added = None if residual is None else view.images(residual)
    operands = InferenceOperands(images, scale, bias, mean, variance, added)
    (y,) = BATCH_NORM_INFERENCE(operands, activation=activation, epsilon=epsilon)
    return view.images_back(y, x)


def updated_statistics(
    view: View,
    old: Sequence[jax.Array],
    of_batch: BatchStatistics,
    *,
    momentum: float | jax.Array,
    unbiased: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Computes the running mean and variance after a batch.

    With `unbiased` off, the running variance averages biased variances.
    """
    mean, variance, elements = of_batch
    is_array = isinstance(elements, jax.Array)
    if not is_array and elements == 0:
        momentum = 0.0
    old_mean, old_variance = jax.lax.stop_gradient(tuple(old))

    def updated(before: jax.Array, after: jax.Array) -> jax.Array:
        average = _weighted_average(before, view.parameters_back(after, before), momentum)
        return jnp.where(view.parameters_back(elements, before) > 0, average, before) if is_array else average

    return updated(old_mean, mean), updated(old_variance, variance * _unbiased(elements) if unbiased else variance)


def _weighted_average(before: jax.Array, after: jax.Array, momentum: float | jax.Array) -> jax.Array:
    """Computes the weighted average. At momentum 0 or 1 it is exactly one of the two, whatever the other holds."""
    new = after.astype(before.dtype)
    if not isinstance(momentum, jax.Array):
        if momentum in (0, 1):
            return new if momentum else before
        return ((1 - momentum) * before.astype(after.dtype) + momentum * after).astype(before.dtype)
    weight = jax.lax.stop_gradient(momentum).astype(after.dtype)
    average = (1 - weight) * before.astype(after.dtype) + weight * after
    return jnp.where(weight == 0, before, jnp.where(weight == 1, new, average.astype(before.dtype)))


def _unbiased(elements: Any) -> float | jax.Array:
    """Returns the factor that makes a biased variance of this many elements unbiased; 1 for a single element."""
    if isinstance(elements, jax.Array) or jax.export.is_symbolic_dim(elements):
        count = jnp.asarray(elements, jnp.float32)
        return jnp.where(count > 1, count / jnp.maximum(count - 1, 1), 1)
    return float(elements / (elements - 1)) if elements > 1 else 1.0


def parameters(operator: str, view: View, **arrays: Any) -> list[jax.Array]:
    """Parameters or statistics as arrays, checked."""
    checked = as_arrays(operator, arrays)
    for argument, value in zip(arrays, checked, strict=True):
        require(value.shape == view.parameter_shape, operator, argument, view.parameter_rule, value)
        floating = jnp.issubdtype(value.dtype, jnp.floating)
        require(floating, operator, argument, "be floating point", value)
    return checked


def _scale_and_bias(
    operator: str, view: View, x: jax.Array, scale: jax.Array | None, bias: jax.Array | None
) -> list[jax.Array]:
    """Returns the two parameters, checked; in the dtype of statistics if they are not given."""
    shape, dtype = view.parameter_shape, accumulation_dtype(x.dtype)
    scale = jnp.ones(shape, dtype) if scale is None else scale
    return parameters(operator, view, scale=scale, bias=jnp.zeros(shape, dtype) if bias is None else bias)


def is_of_vmap(axis_name: Hashable) -> bool:
    """Tells whether an axis is that of a surrounding vmap, and not of a mesh."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    try:
        jax.lax.axis_size(axis_name)
    except NameError:
        return False
    return not {*names} <= {*jax.sharding.get_abstract_mesh().manual_axes}


def check_axis_name(operator: str, axis_name: Hashable) -> None:
    """Refuses axes over which neither a surrounding shard_map nor a vmap splits the batch."""
    if axis_name is not None:
        axes = {*require_axis_names(operator, "axis_name", axis_name)}
        is_split = axes <= {*jax.sharding.get_abstract_mesh().manual_axes} or is_of_vmap(axis_name)
        require(is_split, operator, "axis_name", axis_or_vmap_rule(), axis_name)


def checked_mask(operator: str, x: jax.Array, mask: Any) -> jax.Array | None:
    """Returns a mask in the shape and layout of x; None stays None."""
    mask = as_optional(operator, "mask", mask)
    if mask is None:
        return None
    fits = mask.ndim <= x.ndim and all(a in (1, b) for a, b in zip(mask.shape[::-1], x.shape[::-1], strict=False))
    rule = f"be booleans that broadcast to the shape of x, {list(x.shape)}"
    require(mask.dtype == bool and fits, operator, "mask", rule, mask)
    return laid_out_as(jnp.broadcast_to(mask, x.shape), jax.typeof(x).sharding)


def checked_epsilon(operator: str, epsilon: Any) -> float:
    """Returns epsilon as a float; BadParamError unless it is a finite number of at least BN_MIN_EPSILON."""
    rule = f"be a finite number of {BN_MIN_EPSILON} or more"
    number: float = require_real(operator, "epsilon", epsilon, rule, least=BN_MIN_EPSILON)
    return number


def checked_momentum(operator: str, argument: str, momentum: Any) -> float | jax.Array:
    """Returns a momentum as a float or a traced scalar; BadParamError for a number outside [0, 1]."""
    rule = "be a number in [0, 1]"
    checked: float | jax.Array = require_real(operator, argument, momentum, rule, least=0, most=1, traced=True)
    return checked


def _images(operator: str, x: Any, layout: str | None, mode: str) -> tuple[jax.Array, View]:
    x = as_array(operator, "x", x)
    check_floating(operator, x=x)
    return x, view_of(operator, x, layout, mode)


def _residual(operator: str, x: jax.Array, residual: Any) -> jax.Array | None:
    residual = as_optional(operator, "residual", residual)
    if residual is not None:
        check_like_images(operator, x, residual=residual)
    return residual
