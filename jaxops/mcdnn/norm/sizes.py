"""The documented size queries of norm calls, in bytes. They take arrays or `jax.ShapeDtypeStruct`s.

No call needs a workspace. The reserve space of the ops that activate has one bit for each element of x.
"""

import math
from typing import Any

from jaxops.mcdnn import reserve_space
from jaxops.mcdnn.checks import DTYPES
from jaxops.mcdnn.descriptors import ActivationDescriptor
from jaxops.mcdnn.enums import BatchNormMode, BatchNormOps, NormAlgo, NormMode, NormOps
from jaxops.mcdnn.norm.checks import NormCall, batch_norm_call, check_group_count, norm_call


def get_batch_normalization_forward_training_ex_workspace_size(
    mode: BatchNormMode | str | int,
    bn_ops: BatchNormOps | str | int,
    x: Any,
    z: Any,
    y: Any,
    scale: Any,
    activation: ActivationDescriptor | None,
    *,
    layout: str | None = None,
) -> int:
    """Returns the bytes of workspace that `batch_normalization_forward_training_ex` needs: 0.

    Arguments shared by all norm calls are described in `jaxops.mcdnn.norm`.

    Example:
      >>> x, scale = (
      ...     jax.ShapeDtypeStruct(shape, jnp.float32)
      ...     for shape in ((2, 3, 4, 4), (1, 3, 1, 1))
      ... )
      >>> size = jaxops.mcdnn.get_batch_normalization_forward_training_ex_workspace_size
      >>> size("SPATIAL", "OPS_BN", x, None, x, scale, None)
      0

    Source: mcDNN `mcdnnGetBatchNormalizationForwardTrainingExWorkspaceSize`.
    """
    call = batch_norm_call("get_batch_normalization_forward_training_ex_workspace_size", mode, bn_ops, activation)
    return _forward_workspace(call, x, z, y, layout, scale=scale)


def get_batch_normalization_backward_ex_workspace_size(
    mode: BatchNormMode | str | int,
    bn_ops: BatchNormOps | str | int,
    x: Any,
    y: Any,
    dy: Any,
    dz: Any,
    dx: Any,
    scale: Any,
    activation: ActivationDescriptor | None,
    *,
    layout: str | None = None,
) -> int:
    """Returns the bytes of workspace that `batch_normalization_backward_ex` needs: 0.

    Arguments shared by all norm calls are described in `jaxops.mcdnn.norm`.

    Example:
      >>> x, scale = (
      ...     jax.ShapeDtypeStruct(shape, jnp.float32)
      ...     for shape in ((2, 3, 4, 4), (1, 3, 1, 1))
      ... )
      >>> size = jaxops.mcdnn.get_batch_normalization_backward_ex_workspace_size
      >>> size("SPATIAL", "OPS_BN", x, None, x, None, x, scale, None)
      0

    Source: mcDNN `mcdnnGetBatchNormalizationBackwardExWorkspaceSize`.
    """
    call = batch_norm_call("get_batch_normalization_backward_ex_workspace_size", mode, bn_ops, activation)
    return _backward_workspace(call, x, y, dy, dz, dx, layout, scale=scale)


def get_batch_normalization_training_ex_reserve_space_size(
    mode: BatchNormMode | str | int,
    bn_ops: BatchNormOps | str | int,
    activation: ActivationDescriptor | None,
    x: Any,
) -> int:
    """Returns the bytes of reserve space of `batch_normalization_forward_training_ex`: 0 without an activation.

    Arguments shared by all norm calls are described in `jaxops.mcdnn.norm`.

    Example:
      >>> x, relu = (
      ...     jax.ShapeDtypeStruct((2, 3, 4, 4), jnp.float32),
      ...     jaxops.mcdnn.ActivationDescriptor("RELU"),
      ... )
      >>> size = jaxops.mcdnn.get_batch_normalization_training_ex_reserve_space_size
      >>> size("SPATIAL", "OPS_BN_ACTIVATION", relu, x)
      12

    Source: mcDNN `mcdnnGetBatchNormalizationTrainingExReserveSpaceSize`.
    """
    name = "get_batch_normalization_training_ex_reserve_space_size"
    return _reserve_space(batch_norm_call(name, mode, bn_ops, activation), x)


def get_normalization_forward_training_workspace_size(
    mode: NormMode | str | int,
    norm_ops: NormOps | str | int,
    algo: NormAlgo | str | int,
    x: Any,
    z: Any,
    y: Any,
    scale: Any,
    activation: ActivationDescriptor | None,
    mean_var: Any,
    *,
    group_cnt: int = 1,
    layout: str | None = None,
) -> int:
    """Returns the bytes of workspace that `normalization_forward_training` needs: 0.

    Arguments shared by all norm calls are described in `jaxops.mcdnn.norm`.

    Example:
      >>> x, scale = (
      ...     jax.ShapeDtypeStruct(shape, jnp.float32)
      ...     for shape in ((2, 3, 4, 4), (1, 3, 1, 1))
      ... )
      >>> size = jaxops.mcdnn.get_normalization_forward_training_workspace_size
      >>> size("PER_CHANNEL", "NORM", "STANDARD", x, None, x, scale, None, scale)
      0

    Source: mcDNN `mcdnnGetNormalizationForwardTrainingWorkspaceSize`.
    """
    name = "get_normalization_forward_training_workspace_size"
    call = norm_call(name, mode, norm_ops, algo, activation, strict=False)
    check_group_count(call, group_cnt)
    return _forward_workspace(call, x, z, y, layout, scale=scale, mean_var=mean_var)


def get_normalization_backward_workspace_size(
    mode: NormMode | str | int,
    norm_ops: NormOps | str | int,
    algo: NormAlgo | str | int,
    x: Any,
    y: Any,
    dy: Any,
    dz: Any,
    dx: Any,
    scale: Any,
    activation: ActivationDescriptor | None,
    mean_var: Any,
    *,
    group_cnt: int = 1,
    layout: str | None = None,
) -> int:
    """Returns the bytes of workspace that `normalization_backward` needs: 0.

    Arguments shared by all norm calls are described in `jaxops.mcdnn.norm`.

    Example:
      >>> x, scale = (
      ...     jax.ShapeDtypeStruct(shape, jnp.float32)
      ...     for shape in ((2, 3, 4, 4), (1, 3, 1, 1))
      ... )
      >>> size = jaxops.mcdnn.get_normalization_backward_workspace_size
      >>> size("PER_CHANNEL", "NORM", "STANDARD", x, None, x, None, x, scale, None, scale)
      0

    Source: mcDNN `mcdnnGetNormalizationBackwardWorkspaceSize`.
    """
    name = "get_normalization_backward_workspace_size"
    call = norm_call(name, mode, norm_ops, algo, activation, strict=False)
    check_group_count(call, group_cnt)
    return _backward_workspace(call, x, y, dy, dz, dx, layout, scale=scale, mean_var=mean_var)


def get_normalization_training_reserve_space_size(
    mode: NormMode | str | int,
    norm_ops: NormOps | str | int,
    algo: NormAlgo | str | int,
    activation: ActivationDescriptor | None,
    x: Any,
    *,
    group_cnt: int = 1,
) -> int:
    """Returns the bytes of reserve space that `normalization_forward_training` returns: 0 without an activation.

    Arguments shared by all norm calls are described in `jaxops.mcdnn.norm`.

    Example:
      >>> x, relu = (
      ...     jax.ShapeDtypeStruct((2, 3, 4, 4), jnp.float32),
      ...     jaxops.mcdnn.ActivationDescriptor("RELU"),
      ... )
      >>> size = jaxops.mcdnn.get_normalization_training_reserve_space_size
      >>> size("PER_CHANNEL", "NORM_ACTIVATION", "STANDARD", relu, x)
      12

    Source: mcDNN `mcdnnGetNormalizationTrainingReserveSpaceSize`.
    """
    name = "get_normalization_training_reserve_space_size"
    call = norm_call(name, mode, norm_ops, algo, activation, strict=False)
    check_group_count(call, group_cnt)
    return _reserve_space(call, x)


def _forward_workspace(call: NormCall, x: Any, z: Any, y: Any, layout: str | None, **parameters: Any) -> int:
    call.present(x=x, y=y, **parameters)
    if call.adds:
        call.present(z=z)
    x, y, z = call.shapes(x=x, y=y, z=z if call.adds else None)
    parameters = dict(zip(parameters, call.shapes(**parameters), strict=True))
    view = call.view(x, layout)
    call.like_x(x, y=y, z=z)
    call.parameters(view, **parameters)
    call.dtypes(x, DTYPES, **parameters)
    return 0


def _backward_workspace(
    call: NormCall, x: Any, y: Any, dy: Any, dz: Any, dx: Any, layout: str | None, **parameters: Any
) -> int:
    call.present(x=x, dy=dy, dx=dx, **parameters)
    x, y, dy, dz, dx = call.shapes(x=x, y=y, dy=dy, dz=dz, dx=dx)
    parameters = dict(zip(parameters, call.shapes(**parameters), strict=True))
    view = call.view(x, layout)
    call.like_x(x, dy=dy, dx=dx, y=y, dz=dz)
    call.parameters(view, **parameters)
    call.dtypes(x, DTYPES, **parameters)
    return 0


def _reserve_space(call: NormCall, x: Any) -> int:
    call.present(x=x)
    (x,) = call.shapes(x=x)
    call.require(len(x.shape) in (4, 5), "x", "have rank 4 or 5", x)
    return 0 if call.activation is None else reserve_space.size_bytes(math.prod(x.shape))
