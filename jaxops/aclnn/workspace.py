"""The first of the two phases of every aclnn call: check and plan now, run later."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxops._checks.arguments import as_array, require
from jaxops.aclnn.ema_adam import apply_fused_ema_adam
from jaxops.aclnn.embedding import embedding_dense_backward
from jaxops.aclnn.linear_cross_entropy import (
    fused_cross_entropy_loss_with_max_sum,
    fused_linear_cross_entropy_loss_grad,
    fused_linear_online_max_sum,
)
from jaxops.aclnn.nll_loss import nll_loss, nll_loss2d, nll_loss2d_backward, nll_loss_backward

_OPERATIONS = (
    apply_fused_ema_adam,
    embedding_dense_backward,
    fused_cross_entropy_loss_with_max_sum,
    fused_linear_cross_entropy_loss_grad,
    fused_linear_online_max_sum,
    nll_loss,
    nll_loss2d,
    nll_loss2d_backward,
    nll_loss_backward,
)
_TENSORS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)


def get_workspace_size(operation: Callable[..., Any], *args: Any, **attributes: Any) -> tuple[int, Callable[..., Any]]:
    """Checks a call of one of this layer's functions and compiles it, without running it.

    Args:
      operation: the function, such as `aclnn.nll_loss`.
      *args: its tensors: arrays, or `jax.ShapeDtypeStruct`s where there is no data yet.
      **attributes: its attributes. Attributes that are tensors (`softmax=...`) are arguments of the executor too.

    Returns:
      The bytes of temporary device memory that the compiled call takes, and the executor. `executor(*args)` runs the
      call on tensors of the same shapes and dtypes, and returns what `operation` returns. Pass tensor attributes to the
      executor by name; those that were planned with data may be left out.

    Raises:
      BadParamError: whatever `operation` raises for these arguments, with its status; with status 161002 if `operation`
        is not one of this layer's functions.

    Example:
      >>> x, target = (
      ...     jax.ShapeDtypeStruct((2, 3), jnp.float32),
      ...     jax.ShapeDtypeStruct((2,), jnp.int32),
      ... )
      >>> workspace_bytes, executor = jaxops.aclnn.get_workspace_size(
      ...     jaxops.aclnn.nll_loss, x, target, jnp.ones(3), reduction=2, ignore_index=-100
      ... )
      >>> executor(-jnp.ones((2, 3)), jnp.array([0, 2], jnp.int32), jnp.ones(3))[0]
      Array(2., dtype=float32)

    Source: CANN's two-phase calls, `aclnn<Operator>GetWorkspaceSize(..., &workspaceSize, &executor)`.
    """
    is_known = any(operation is one for one in _OPERATIONS)
    require(is_known, "get_workspace_size", "operation", "be one of the other functions of jaxops.aclnn", operation)
    names = inspect.signature(operation).bind(*args, **attributes).arguments
    operands = [_planned(operation.__name__, name, value) for name, value in zip(names, args, strict=False)]
    tensors = {
        name: _planned(operation.__name__, name, value)
        for name, value in attributes.items()
        if isinstance(value, _TENSORS)
    }
    constants = {name: value for name, value in attributes.items() if name not in tensors}
    compiled = jax.jit(functools.partial(operation, **constants)).lower(*operands, **tensors).compile()
    planned = {name: value for name, value in tensors.items() if not isinstance(value, jax.ShapeDtypeStruct)}
    memory = compiled.memory_analysis()
    workspace_bytes = 0 if memory is None else memory.temp_size_in_bytes
    return workspace_bytes, lambda *run_args, **run_tensors: compiled(*run_args, **{**planned, **run_tensors})


def _planned(operator: str, argument: str, value: Any) -> Any:
    """Returns an operand to plan with. None passes, because the operation refuses it with the right status."""
    return value if value is None or isinstance(value, jax.ShapeDtypeStruct) else as_array(operator, argument, value)
