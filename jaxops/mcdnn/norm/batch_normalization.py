"""The documented calls of batch normalization.

In all of them:

* Images have rank 4 or 5 and the layout that `layout` names (None: channels first); parameters and statistics have
  shape (1, C, 1, 1[, 1]), or (1, C[, D], H, W) for PER_ACTIVATION whatever the layout. They are float32 for 16-bit and
  float32 data and float64 for float64. SPATIAL_PERSISTENT is SPATIAL.
* Everything is computed and blended in that dtype and rounded once. Priors are not read where beta is 0.
* `strict=True` refuses, with MCDNN_STATUS_NOT_SUPPORTED, what the documents do not offer and these calls do:
  activations in channels-first layouts, other fused activations than RELU (and SWISH, forward), z in other dtypes than
  float16, and bfloat16 where their tables leave it out.
* These documented conditions cannot arise: a handle, workspace or output that is NULL (there is neither handle nor
  workspace, and outputs are returned), strides that do not match (JAX's arrays are packed), an output of another shape
  or dtype than its input (it is made like it; a prior is checked), in training one saved statistic without the other
  (both are returned), RUNTIME_FP_OVERFLOW (of the vendor's persistent kernel) and EXECUTION_FAILED (a failing device
  raises JAX's own error).
"""

from typing import NamedTuple

import jax

from jaxops.mcdnn.checks import DTYPES
from jaxops.mcdnn.descriptors import ActivationDescriptor
from jaxops.mcdnn.enums import BatchNormMode, BatchNormOps
from jaxops.mcdnn.norm import calls
from jaxops.mcdnn.norm.calls import BatchNormTrainingEx
from jaxops.mcdnn.norm.checks import batch_norm_call

_WITHOUT_BFLOAT16 = tuple(dtype for dtype in DTYPES if dtype != "bfloat16")


class BatchNormTraining(NamedTuple):
    """What `batch_normalization_forward_training` returns: `BatchNormTrainingEx` without the reserve space."""

    y: jax.Array
    running_mean: jax.Array | None
    running_variance: jax.Array | None
    saved_mean: jax.Array
    saved_inv_variance: jax.Array


def batch_normalization_forward_training(
    mode: BatchNormMode | str | int,
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    *,
    exponential_average_factor: float | jax.Array,
    running_mean: jax.Array | None = None,
    running_variance: jax.Array | None = None,
    epsilon: float = 1e-5,
    alpha: float | jax.Array = 1.0,
    beta: float | jax.Array = 0.0,
    y: jax.Array | None = None,
    layout: str | None = None,
    strict: bool = False,
) -> BatchNormTraining:
    """Normalizes a batch by its own statistics: `alpha * (scale * (x - mean) / sqrt(var + epsilon) + bias) + beta * y`.

    Args:
      mode: a `BatchNormMode`: what the statistics reduce.
      x: the images.
      scale: the factor of each channel or activation: (1, C, 1, 1[, 1]), or (1, C[, D], H, W) for PER_ACTIVATION,
        whatever the layout; float32, or float64 where x is. All other parameters and statistics are like it.
      bias: what is added to each, like scale.
      exponential_average_factor: the weight of this batch in the running statistics, in [0, 1]: a Python or NumPy
        number, or a traced scalar, whose value is not checked. 1 / (1 + n) at call n, counted from 0, averages over all
        calls; at 1 the old ones are not read.
      running_mean: the moved average so far, or None together with running_variance.
      running_variance: of unbiased variances.
      epsilon: at least BN_MIN_EPSILON, 0.
      alpha: factor of the result: a Python or NumPy number, or a traced scalar.
      beta: factor of the prior, likewise; a traced one needs a prior.
      y: the prior, like x.
      layout: "NCHW", "NHWC", "NCDHW" or "NDHWC".
      strict: whether to keep to what the documents support.

    Returns:
      BatchNormTraining. saved_inv_variance is 1 / sqrt(biased variance + epsilon). With one element to reduce the
      running variance takes the biased one, 0.

    Raises:
      BadParamError: status MCDNN_STATUS_BAD_PARAM if x, scale, bias, alpha or beta, or a prior that beta needs, is
        None; the rank is not 4 or 5; parameters have not the shape of the mode; one running statistic comes alone;
        epsilon is too small or NaN; the prior is unlike x; or an enumeration, layout or factor is none of the above.
      NotSupportedError: status MCDNN_STATUS_NOT_SUPPORTED for another dtype of x, or of the parameters.

    Source: mcDNN `mcdnnBatchNormalizationForwardTraining`.
    """
    call = batch_norm_call("batch_normalization_forward_training", mode, strict=strict)
    out = calls.forward_training(
        call,
        x,
        scale,
        bias,
        None,
        exponential_average_factor=exponential_average_factor,
        running_mean=running_mean,
        running_variance=running_variance,
        epsilon=epsilon,
        alpha=alpha,
        beta=beta,
        y=y,
        layout=layout,
    )
    return BatchNormTraining(*out[:-1])


def batch_normalization_forward_training_ex(
    mode: BatchNormMode | str | int,
    bn_ops: BatchNormOps | str | int,
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    *,
    z: jax.Array | None = None,
    activation: ActivationDescriptor | None = None,
    exponential_average_factor: float | jax.Array,
    running_mean: jax.Array | None = None,
    running_variance: jax.Array | None = None,
    epsilon: float = 1e-5,
    alpha: float | jax.Array = 1.0,
    beta: float | jax.Array = 0.0,
    y: jax.Array | None = None,
    layout: str | None = None,
    strict: bool = False,
) -> BatchNormTrainingEx:
    """Normalizes a batch, and activates it, and adds z before: `alpha * act(normalized + z) + beta * y`.

    Args:
      mode: a `BatchNormMode`: what the statistics reduce.
      bn_ops: a `BatchNormOps`: OPS_BN, OPS_BN_ACTIVATION or OPS_BN_ADD_ACTIVATION.
      x: the images.
      scale: the factor of each channel or activation: (1, C, 1, 1[, 1]), or (1, C[, D], H, W) for PER_ACTIVATION,
        whatever the layout; float32, or float64 where x is. All other parameters and statistics are like it.
      bias: what is added to each, like scale.
      z: the residual, like x; read by OPS_BN_ADD_ACTIVATION only.
      activation: read by the two ops that activate.
      exponential_average_factor: as in `batch_normalization_forward_training`, and so are those that follow.
      running_mean: the moved average so far, or None together with running_variance.
      running_variance: of unbiased variances.
      epsilon: at least BN_MIN_EPSILON, 0.
      alpha: factor of the result: a Python or NumPy number, or a traced scalar.
      beta: factor of the prior, likewise; a traced one needs a prior.
      y: the prior, like x.
      layout: "NCHW", "NHWC", "NCDHW" or "NDHWC".
      strict: whether to keep to what the documents support.

    Returns:
      BatchNormTrainingEx. Its reserve space, of the size that
      `get_batch_normalization_training_ex_reserve_space_size` tells, is for `batch_normalization_backward_ex`.

    Raises:
      BadParamError: as `batch_normalization_forward_training`, and if z or activation is None where `bn_ops` reads it
        or z is unlike x.
      NotSupportedError: as `batch_normalization_forward_training`.

    Source: mcDNN `mcdnnBatchNormalizationForwardTrainingEx`.
    """
    call = batch_norm_call("batch_normalization_forward_training_ex", mode, bn_ops, activation, strict)
    return calls.forward_training(
        call,
        x,
        scale,
        bias,
        z,
        exponential_average_factor=exponential_average_factor,
        running_mean=running_mean,
        running_variance=running_variance,
        epsilon=epsilon,
        alpha=alpha,
        beta=beta,
        y=y,
        layout=layout,
        dtypes=_WITHOUT_BFLOAT16,
    )


def batch_normalization_forward_inference(
    mode: BatchNormMode | str | int,
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    estimated_mean: jax.Array,
    estimated_variance: jax.Array,
    *,
    epsilon: float = 1e-5,
    alpha: float | jax.Array = 1.0,
    beta: float | jax.Array = 0.0,
    y: jax.Array | None = None,
    layout: str | None = None,
) -> jax.Array:
    """Normalizes by given statistics: `alpha * (scale * (x - mean) / sqrt(variance + epsilon) + bias) + beta * y`.

    Args:
      mode: a `BatchNormMode`.
      x: the images.
      scale: the factor of each channel or activation: (1, C, 1, 1[, 1]), or (1, C[, D], H, W) for PER_ACTIVATION,
        whatever the layout; float32, or float64 where x is. All other parameters and statistics are like it.
      bias: what is added to each, like scale.
      estimated_mean: such as the running one.
      estimated_variance: a variance, and not its inverse.
      epsilon: at least BN_MIN_EPSILON, 0.
      alpha: factor of the result: a Python or NumPy number, or a traced scalar.
      beta: factor of the prior, likewise; a traced one needs a prior.
      y: the prior, like x.
      layout: "NCHW", "NHWC", "NCDHW" or "NDHWC".

    Returns:
      An array like x.

    Raises:
      BadParamError: status MCDNN_STATUS_BAD_PARAM if an array that is read, alpha or beta is None; the rank is not 4 or
        5; parameters have not the shape of the mode; epsilon is too small or NaN; or the prior is unlike x.
      NotSupportedError: status MCDNN_STATUS_NOT_SUPPORTED for another dtype of x, or of the parameters.

    Source: mcDNN `mcdnnBatchNormalizationForwardInference`.
    """
    call = batch_norm_call("batch_normalization_forward_inference", mode)
    statistics = (estimated_mean, estimated_variance)
    factors = {"alpha": alpha, "beta": beta}
    return calls.forward_inference(
        call, x, scale, bias, *statistics, None, epsilon=epsilon, **factors, y=y, layout=layout
    )


def batch_normalization_backward(
    mode: BatchNormMode | str | int,
    x: jax.Array,
    dy: jax.Array,
    scale: jax.Array,
    *,
    epsilon: float = 1e-5,
    saved_mean: jax.Array | None = None,
    saved_inv_variance: jax.Array | None = None,
    alpha_data_diff: float | jax.Array = 1.0,
    beta_data_diff: float | jax.Array = 0.0,
    alpha_param_diff: float | jax.Array = 1.0,
    beta_param_diff: float | jax.Array = 0.0,
    dx: jax.Array | None = None,
    dscale: jax.Array | None = None,
    dbias: jax.Array | None = None,
    layout: str | None = None,
    strict: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradient of `batch_normalization_forward_training`: of x, scale and bias, each blended with its prior.

    With xhat = (x - mean) * inv_variance over M elements:

        dbias = sum(dy);  dscale = sum(dy * xhat);  dx = scale * inv_variance * (dy - dbias / M - xhat * dscale / M)

    Args:
      mode: a `BatchNormMode`.
      x: the images that were normalized.
      dy: the gradient of the result, like x.
      scale: as it was in the forward call.
      epsilon: as it was; used only where the saved statistics are not given, and checked always.
      saved_mean: as the forward call returned it, or None together with saved_inv_variance: both are computed once
        more.
      saved_inv_variance: 1 / sqrt(variance + epsilon).
      alpha_data_diff: factor of dx: a Python or NumPy number, or a traced scalar.
      beta_data_diff: factor of dx's prior, likewise; a traced one needs a prior.
      alpha_param_diff: factor of dscale and dbias, likewise.
      beta_param_diff: factor of their priors, likewise.
      dx: the prior, like x.
      dscale: the prior, like scale.
      dbias: the prior, like scale.
      layout: "NCHW", "NHWC", "NCDHW" or "NDHWC".
      strict: whether to keep to what the documents support.

    Returns:
      (dx, dscale, dbias).

    Raises:
      BadParamError: status MCDNN_STATUS_BAD_PARAM if x, dy, scale or a factor is None, or a prior that its factor
        needs; the rank is not 4 or 5; x and dy differ in shape or dtype; parameters have not the shape of the mode; one
        saved statistic comes alone; epsilon is too small or NaN; or a prior is unlike its output.
      NotSupportedError: status MCDNN_STATUS_NOT_SUPPORTED for another dtype of x, or of the parameters.

    Source: mcDNN `mcdnnBatchNormalizationBackward`.
    """
    call = batch_norm_call("batch_normalization_backward", mode, strict=strict)
    factors = (alpha_data_diff, beta_data_diff, alpha_param_diff, beta_param_diff)
    blend = calls.GradientBlend(*factors, dx, dscale, dbias)
    result_dx, _, result_dscale, result_dbias = calls.backward(
        call,
        x,
        dy,
        scale,
        epsilon=epsilon,
        saved_mean=saved_mean,
        saved_inv_variance=saved_inv_variance,
        blend=blend,
        layout=layout,
        dtypes=_WITHOUT_BFLOAT16,
    )
    return result_dx, result_dscale, result_dbias


def batch_normalization_backward_ex(
    mode: BatchNormMode | str | int,
    bn_ops: BatchNormOps | str | int,
    x: jax.Array,
    dy: jax.Array,
    scale: jax.Array,
    *,
    y: jax.Array | None = None,
    bias: jax.Array | None = None,
    activation: ActivationDescriptor | None = None,
    reserve_space: jax.Array | None = None,
    epsilon: float = 1e-5,
    saved_mean: jax.Array | None = None,
    saved_inv_variance: jax.Array | None = None,
    alpha_data_diff: float | jax.Array = 1.0,
    beta_data_diff: float | jax.Array = 0.0,
    alpha_param_diff: float | jax.Array = 1.0,
    beta_param_diff: float | jax.Array = 0.0,
    dx: jax.Array | None = None,
    dscale: jax.Array | None = None,
    dbias: jax.Array | None = None,
    layout: str | None = None,
    strict: bool = False,
) -> tuple[jax.Array, jax.Array | None, jax.Array, jax.Array]:
    """The gradient of `batch_normalization_forward_training_ex`: of x, z, scale and bias.

    As that of `batch_normalization_backward`, from `d = dy * act'(u)` in place of dy; dz is d, and is not blended. The
    slope is taken, whichever is there first, from the reserve space (RELU and CLIPPED_RELU); from x and bias, where no
    z was added; from y, which is right unless the forward call blended it.

    Args:
      mode: a `BatchNormMode`.
      bn_ops: a `BatchNormOps`, as it was in the forward call.
      x: the images that were normalized.
      dy: the gradient of the result, like x.
      scale: as it was in the forward call.
      y: the result of the forward call, like x; for an activation, where nothing else tells its slope.
      bias: as it was in the forward call; for an activation.
      activation: as it was in the forward call; read by the two ops that activate. SWISH has no fused gradient.
      reserve_space: as the forward call returned it.
      epsilon: as in `batch_normalization_backward`, and so are those that follow.
      saved_mean: as the forward call returned it, or None together with saved_inv_variance.
      saved_inv_variance: 1 / sqrt(variance + epsilon).
      alpha_data_diff: factor of dx: a Python or NumPy number, or a traced scalar.
      beta_data_diff: factor of dx's prior, likewise; a traced one needs a prior.
      alpha_param_diff: factor of dscale and dbias, likewise.
      beta_param_diff: factor of their priors, likewise.
      dx: the prior, like x.
      dscale: the prior, like scale.
      dbias: the prior, like scale.
      layout: "NCHW", "NHWC", "NCDHW" or "NDHWC".
      strict: whether to keep to what the documents support.

    Returns:
      (dx, dz, dscale, dbias); dz is None unless z was added.

    Raises:
      BadParamError: as `batch_normalization_backward`, and if activation is None where `bn_ops` reads it, nothing tells
        its slope, y is unlike x, or reserve_space is smaller than
        `get_batch_normalization_training_ex_reserve_space_size` tells.
      NotSupportedError: as `batch_normalization_backward`, and for SWISH.

    Source: mcDNN `mcdnnBatchNormalizationBackwardEx`.
    """
    call = batch_norm_call("batch_normalization_backward_ex", mode, bn_ops, activation, strict)
    factors = (alpha_data_diff, beta_data_diff, alpha_param_diff, beta_param_diff)
    blend = calls.GradientBlend(*factors, dx, dscale, dbias)
    return calls.backward(
        call,
        x,
        dy,
        scale,
        y=y,
        bias=bias,
        reserve_space=reserve_space,
        epsilon=epsilon,
        saved_mean=saved_mean,
        saved_inv_variance=saved_inv_variance,
        blend=blend,
        layout=layout,
        dtypes=_WITHOUT_BFLOAT16,
    )
