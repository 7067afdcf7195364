"""The documented calls of normalization: batch normalization under the names of its second generation.

What `jaxops.mcdnn.batch_normalization` says of all its calls holds here. PER_CHANNEL is its SPATIAL, the ops map one to
one, and the algorithm changes nothing. groupCnt is 1; another one is MCDNN_STATUS_NOT_SUPPORTED.
"""

import jax

from jaxops._checks.errors import BAD_PARAM
from jaxops.mcdnn.descriptors import ActivationDescriptor
from jaxops.mcdnn.enums import NormAlgo, NormMode, NormOps
from jaxops.mcdnn.norm import calls
from jaxops.mcdnn.norm.calls import BatchNormTrainingEx
from jaxops.mcdnn.norm.checks import check_group_count, norm_call


def normalization_forward_training(
    mode: NormMode | str | int,
    norm_ops: NormOps | str | int,
    algo: NormAlgo | str | int,
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
    group_cnt: int = 1,
    strict: bool = False,
) -> BatchNormTrainingEx:
    """Normalizes a batch, and activates it, and adds z before: `alpha * act(normalized + z) + beta * y`.

    Args:
      mode: a `NormMode`: what the statistics reduce.
      norm_ops: a `NormOps`: NORM, NORM_ACTIVATION or NORM_ADD_ACTIVATION.
      algo: a `NormAlgo`; changes nothing.
      x: the images.
      scale: the factor of each channel or activation: (1, C, 1, 1[, 1]), or (1, C[, D], H, W) for PER_ACTIVATION,
        whatever the layout; float32, or float64 where x is. All other parameters and statistics are like it.
      bias: what is added to each, like scale.
      z: the residual, like x; read by NORM_ADD_ACTIVATION only.
      activation: read by the two ops that activate.
      exponential_average_factor: the weight of this batch in the running statistics, in [0, 1]: a Python or NumPy
        number, or a traced scalar, whose value is not checked.
      running_mean: the moved average so far, or None together with running_variance.
      running_variance: of unbiased variances.
      epsilon: 0 or more.
      alpha: factor of the result: a Python or NumPy number, or a traced scalar.
      beta: factor of the prior, likewise; a traced one needs a prior.
      y: the prior, like x.
      layout: "NCHW", "NHWC", "NCDHW" or "NDHWC".
      group_cnt: 1.
      strict: whether to keep to what the documents support.

    Returns:
      BatchNormTrainingEx. Its reserve space, of the size that `get_normalization_training_reserve_space_size` tells, is
      for `normalization_backward`.

    Raises:
      BadParamError: status MCDNN_STATUS_BAD_PARAM if x, scale, bias, alpha or beta, a prior that beta needs, or z or
        activation where `norm_ops` reads it, is None; the rank is not 4 or 5; parameters have not the shape of the
        mode; one running statistic comes alone; epsilon is negative or NaN; or z or the prior is unlike x.
      NotSupportedError: status MCDNN_STATUS_NOT_SUPPORTED for another dtype of x, or of the parameters, or for groups.

    Source: mcDNN `mcdnnNormalizationForwardTraining`.
    """
    call = norm_call("normalization_forward_training", mode, norm_ops, algo, activation, strict)
    check_group_count(call, group_cnt)
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
    )


def normalization_forward_inference(
    mode: NormMode | str | int,
    norm_ops: NormOps | str | int,
    algo: NormAlgo | str | int,
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    estimated_mean: jax.Array,
    estimated_variance: jax.Array,
    *,
    z: jax.Array | None = None,
    activation: ActivationDescriptor | None = None,
    epsilon: float = 1e-5,
    alpha: float | jax.Array = 1.0,
    beta: float | jax.Array = 0.0,
    y: jax.Array | None = None,
    layout: str | None = None,
    group_cnt: int = 1,
    strict: bool = False,
) -> jax.Array:
    """Normalizes by given statistics, and activates, and adds z before: `alpha * act(normalized + z) + beta * y`.

    Args:
      mode: a `NormMode`.
      norm_ops: a `NormOps`.
      algo: a `NormAlgo`; changes nothing.
      x: the images.
      scale: the factor of each channel or activation: (1, C, 1, 1[, 1]), or (1, C[, D], H, W) for PER_ACTIVATION,
        whatever the layout; float32, or float64 where x is. All other parameters and statistics are like it.
      bias: what is added to each, like scale.
      estimated_mean: such as the running one.
      estimated_variance: a variance, and not its inverse.
      z: the residual, like x; read by NORM_ADD_ACTIVATION only.
      activation: read by the two ops that activate.
      epsilon: 0 or more.
      alpha: factor of the result: a Python or NumPy number, or a traced scalar.
      beta: factor of the prior, likewise; a traced one needs a prior.
      y: the prior, like x.
      layout: "NCHW", "NHWC", "NCDHW" or "NDHWC".
      group_cnt: 1.
      strict: whether to keep to what the documents support.

    Returns:
      An array like x.

    Raises:
      BadParamError: status MCDNN_STATUS_BAD_PARAM if an array that is read, alpha or beta is None; the rank is not 4 or
        5; parameters have not the shape of the mode; epsilon is negative or NaN; or z or the prior is unlike x.
      NotSupportedError: status MCDNN_STATUS_NOT_SUPPORTED for another dtype of x, or of the parameters, or for groups.

    Source: mcDNN `mcdnnNormalizationForwardInference`.
    """
    call = norm_call("normalization_forward_inference", mode, norm_ops, algo, activation, strict)
    check_group_count(call, group_cnt)
    statistics = (estimated_mean, estimated_variance)
    factors = {"alpha": alpha, "beta": beta}
    return calls.forward_inference(call, x, scale, bias, *statistics, z, epsilon=epsilon, **factors, y=y, layout=layout)


def normalization_backward(
    mode: NormMode | str | int,
    norm_ops: NormOps | str | int,
    algo: NormAlgo | str | int,
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
    group_cnt: int = 1,
    strict: bool = False,
) -> tuple[jax.Array, jax.Array | None, jax.Array, jax.Array]:
    """The gradient of `normalization_forward_training`: of x, z, scale and bias.

    As `batch_normalization_backward_ex`, which says where the activation's slope is taken from.

    Args:
      mode: a `NormMode`.
      norm_ops: a `NormOps`, as it was in the forward call.
      algo: a `NormAlgo`; changes nothing.
      x: the images that were normalized.
      dy: the gradient of the result, like x.
      scale: as it was in the forward call.
      y: the result of the forward call, like x.
      bias: as it was in the forward call; for an activation.
      activation: as it was in the forward call; read by the two ops that activate. SWISH has no fused gradient.
      reserve_space: as the forward call returned it.
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
      group_cnt: 1.
      strict: whether to keep to what the documents support.

    Returns:
      (dx, dz, dscale, dbias); dz is None unless z was added.

    Raises:
      BadParamError: status MCDNN_STATUS_BAD_PARAM if x, dy, scale or a factor is None, or a prior that its factor
        needs, or activation where `norm_ops` reads it; nothing tells the activation's slope; the rank is not 4 or 5; x,
        dy and y differ in shape or dtype; parameters or saved statistics have not the shape of the mode, or not the
        dtype that goes with x; one saved statistic comes alone; epsilon is negative or NaN; a prior is unlike its
        output; or reserve_space is smaller than `get_normalization_training_reserve_space_size` tells.
      NotSupportedError: status MCDNN_STATUS_NOT_SUPPORTED for another dtype of x, for groups, and for SWISH.

    Source: mcDNN `mcdnnNormalizationBackward`.
    """
    call = norm_call("normalization_backward", mode, norm_ops, algo, activation, strict, parameter_status=BAD_PARAM)
    check_group_count(call, group_cnt)
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
    )
