"""The documented calls of normalization: batch normalization under the names of its second generation."""

import jax

from jaxops._checks.arguments import BAD_PARAM
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
    """Normalizes a batch, adds z and applies an activation: `alpha * act(normalized + z) + beta * y`.

    Arguments shared by all norm calls are described in `jaxops.mcdnn.norm`.

    Example:
      >>> x, ones = jnp.array([1.0, 3.0]).reshape(2, 1, 1, 1), jnp.ones((1, 1, 1, 1))
      >>> ops = {"mode": "PER_CHANNEL", "norm_ops": "NORM", "algo": "STANDARD"}
      >>> out = jaxops.mcdnn.normalization_forward_training(
      ...     **ops, x=x, scale=ones, bias=0 * ones, exponential_average_factor=1.0
      ... )
      >>> out.y.ravel().round(3).tolist(), out.saved_mean.item()
      ([-1.0, 1.0], 2.0)

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
    """Normalizes by given statistics, adds z and applies an activation: `alpha * act(normalized + z) + beta * y`.

    Arguments shared by all norm calls are described in `jaxops.mcdnn.norm`.

    Example:
      >>> x, ones = jnp.array([1.0, 3.0]).reshape(2, 1, 1, 1), jnp.ones((1, 1, 1, 1))
      >>> ops, statistics = ("PER_CHANNEL", "NORM", "STANDARD"), (2 * ones, ones)
      >>> y = jaxops.mcdnn.normalization_forward_inference(
      ...     *ops, x, ones, 0 * ones, *statistics
      ... )
      >>> y.ravel().round(3).tolist()
      [-1.0, 1.0]

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
    """Computes the gradients of `normalization_forward_training`, as `batch_normalization_backward_ex` says.

    Arguments shared by all norm calls are described in `jaxops.mcdnn.norm`. Here a parameter or
    statistic whose dtype does not go with x raises BadParamError.

    Example:
      >>> x, dy = (
      ...     jnp.array(values).reshape(4, 1, 1, 1)
      ...     for values in ([1.0, 1.0, 3.0, 3.0], [1.0, 0.0, 0.0, 0.0])
      ... )
      >>> ops, scale = ("PER_CHANNEL", "NORM", "STANDARD"), jnp.ones((1, 1, 1, 1))
      >>> dx, dz, dscale, dbias = jaxops.mcdnn.normalization_backward(*ops, x, dy, scale)
      >>> dx.ravel()[:2].round(3).tolist(), dz, dscale.round(3).item(), dbias.item()
      ([0.5, -0.5], None, -1.0, 1.0)

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
