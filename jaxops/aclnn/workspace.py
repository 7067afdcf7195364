"""The first of the two phases of every aclnn call: validate and plan now, run later."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def get_workspace_size(operation: Callable[..., Any], *args: Any, **attributes: Any) -> tuple[int, Callable[..., Any]]:
    """Validates a call of one of this layer's functions and compiles it, without running it.

    Args:
      operation: the function, such as `aclnn.nll_loss`.
      *args: its tensors; arrays, or `jax.ShapeDtypeStruct`s where there is no data yet.
      **attributes: its attributes. Those that are tensors (`softmax=...`) are arguments of the executor too.

    Returns:
      The bytes of temporary device memory that the compiled call takes, and the executor: `executor(*args)` runs it on
      tensors of the same shapes and dtypes and returns what `operation` returns. Tensors among the attributes are
      passed to the executor by name; those that were planned with data may be left out.

    Raises:
      BadParamError: what `operation` raises for these arguments, with its status.

    Source: CANN's two-phase calls, `aclnn<Operator>GetWorkspaceSize(..., &workspaceSize, &executor)`.
    """
    attributes = {name: value.item() if isinstance(value, np.generic) else value for name, value in attributes.items()}
    tensors = {name: value for name, value in attributes.items() if hasattr(value, "shape")}
    constants = {name: value for name, value in attributes.items() if name not in tensors}
    compiled = jax.jit(functools.partial(operation, **constants)).lower(*args, **tensors).compile()
    planned = {name: value for name, value in tensors.items() if not isinstance(value, jax.ShapeDtypeStruct)}
    memory = compiled.memory_analysis()
    workspace_bytes = 0 if memory is None else memory.temp_size_in_bytes
    return workspace_bytes, lambda *run_args, **run_tensors: compiled(*run_args, **{**planned, **run_tensors})
