"""The documented calls of batch normalization. The package's docstring describes what they share."""

from typing import NamedTuple

import jax

from jaxops._primitive.results import exportable
from jaxops.mcdnn.checks import DTYPES
from jaxops.mcdnn.descriptors import ActivationDescriptor
from jaxops.mcdnn.enums import BatchNormMode, BatchNormOps
from jaxops.mcdnn.norm import calls
from jaxops.mcdnn.norm.calls import BatchNormTrainingEx
from jaxops.mcdnn.norm.checks import batch_norm_call

_WITHOUT_BFLOAT16 = tuple(dtype for dtype in DTYPES if dtype != "bfloat16")


@exportable
class BatchNormTraining(NamedTuple):
    """Results of `batch_normalization_forward_training`: `BatchNormTrainingEx` without the reserve space."""

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

    Arguments shared by all norm calls are described in `jaxops.mcdnn.norm`.

    Example:
      >>> x, ones = jnp.array([1.0, 3.0]).reshape(2, 1, 1, 1), jnp.ones((1, 1, 1, 1))
      >>> out = jaxops.mcdnn.batch_normalization_forward_training(
      ...     "SPATIAL", x, ones, 0 * ones, exponential_average_factor=1.0
      ... )
      >>> out.y.ravel().round(3).tolist(), out.saved_mean.item()
      ([-1.0, 1.0], 2.0)

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
    """Normalizes a batch, adds z and applies an activation: `alpha * act(normalized + z) + beta * y`.

    Arguments shared by all norm calls are described in `jaxops.mcdnn.norm`.

    Example:
      >>> x, ones = jnp.array([1.0, 3.0]).reshape(2, 1, 1, 1), jnp.ones((1, 1, 1, 1))
      >>> out = jaxops.mcdnn.batch_normalization_forward_training_ex(
      ...     "SPATIAL",
      ...     "OPS_BN_ACTIVATION",
      ...     x,
      ...     ones,
      ...     0 * ones,
      ...     activation=jaxops.mcdnn.ActivationDescriptor("RELU"),
      ...     exponential_average_factor=1.0,
      ... )
      >>> out.y.ravel().round(3).tolist(), out.reserve_space.tolist()
      ([0.0, 1.0], [2, 0, 0, 0])

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

    Arguments shared by all norm calls are described in `jaxops.mcdnn.norm`.

    Example:
      >>> x, ones = jnp.array([1.0, 3.0]).reshape(2, 1, 1, 1), jnp.ones((1, 1, 1, 1))
      >>> statistics = 2 * ones, ones
      >>> y = jaxops.mcdnn.batch_normalization_forward_inference(
      ...     "SPATIAL", x, ones, 0 * ones, *statistics
      ... )
      >>> y.ravel().round(3).tolist()
      [-1.0, 1.0]

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
    """Computes gradients of `batch_normalization_forward_training`: (dx, dscale, dbias), each blended with its prior.

        dbias = sum(dy);  dscale = sum(dy * xhat)
        dx = scale * inv_variance * (dy - dbias / M - xhat * dscale / M)

    where xhat = (x - mean) * inv_variance and M is the number of elements that a statistic reduces.

    Arguments shared by all norm calls are described in `jaxops.mcdnn.norm`.

    Example:
      >>> x, dy = (
      ...     jnp.array(values).reshape(4, 1, 1, 1)
      ...     for values in ([1.0, 1.0, 3.0, 3.0], [1.0, 0.0, 0.0, 0.0])
      ... )
      >>> results = jaxops.mcdnn.batch_normalization_backward(
      ...     "SPATIAL", x, dy, jnp.ones((1, 1, 1, 1))
      ... )
      >>> [result.ravel()[:2].round(3).tolist() for result in results]
      [[0.5, -0.5], [-1.0], [1.0]]

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
    """Computes the gradients of `batch_normalization_forward_training_ex`: (dx, dz, dscale, dbias).

    As in `batch_normalization_backward`, with `d = dy * act'(u)` in place of dy. dz is d, not blended; None if z was
    not added. The slope comes from the first that is available: reserve_space (for RELU and CLIPPED_RELU); x and bias
    (if z was not added); y, the result of the forward call (wrong if that call blended it).

    Arguments shared by all norm calls are described in `jaxops.mcdnn.norm`.

    Example:
      >>> x, ones = (
      ...     jnp.array([1.0, 1.0, 3.0, 3.0]).reshape(4, 1, 1, 1),
      ...     jnp.ones((1, 1, 1, 1)),
      ... )
      >>> ops, dy = ("SPATIAL", "OPS_BN_ACTIVATION"), jnp.ones(x.shape)
      >>> fused = {"bias": 0 * ones, "activation": jaxops.mcdnn.ActivationDescriptor("RELU")}
      >>> dx, dz, dscale, dbias = jaxops.mcdnn.batch_normalization_backward_ex(
      ...     *ops, x, dy, ones, **fused
      ... )
      >>> dscale.round(3).item(), dbias.item()
      (2.0, 2.0)

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
