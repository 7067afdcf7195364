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
      executor by name; those that were planned with data may be left out. The executor is compiled, so nothing can
      transform it: under `jax.jit`, call `operation` itself.

    Raises:
      BadParamError: whatever `operation` raises for these arguments, with its status; with status 161002 if `operation`
        is not one of this layer's functions, and if the executor is given other tensors than were planned.

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

    def executor(*run_args: Any, **run_tensors: Any) -> Any:
        given, expected = dict(zip(names, run_args, strict=False)), dict(zip(names, operands, strict=False))
        require(len(run_args) <= len(operands), operation.__name__, "args", f"be {', '.join(expected)}", run_args)
        require(run_tensors.keys() <= tensors.keys(), operation.__name__, "tensors", _named(tensors), list(run_tensors))
        given |= planned | run_tensors
        for name, like in (expected | tensors).items():
            given[name] = _as_planned(operation.__name__, name, given.get(name), like)
        return compiled(*(given[name] for name in expected), **{name: given[name] for name in tensors})

    return 0 if memory is None else memory.temp_size_in_bytes, executor


def _named(tensors: dict[str, Any]) -> str:
    return f"be planned with the executor, as {', '.join(tensors)}" if tensors else "be none, as none was planned"


def _as_planned(operator: str, argument: str, value: Any, planned: Any) -> Any:
    """Returns an operand of the executor, which is compiled for one shape and dtype."""
    if planned is None:
        require(value is None, operator, argument, "be None, as it was planned", value)
        return None
    is_traced = isinstance(value, jax.core.Tracer)
    require(not is_traced, operator, argument, "hold data: under jit, call the operator instead of its executor", value)
    array = as_array(operator, argument, value)
    rule = f"be {planned.dtype}{list(planned.shape)}, as it was planned"
    require((array.shape, array.dtype) == (planned.shape, planned.dtype), operator, argument, rule, array)
    return array


def _planned(operator: str, argument: str, value: Any) -> Any:
    """Returns an operand to plan with. None passes, because the operation refuses it with the right status."""
    return value if value is None or isinstance(value, jax.ShapeDtypeStruct) else as_array(operator, argument, value)
