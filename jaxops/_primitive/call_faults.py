"""Faults of a call of an operator, in one sentence; they are sought only after the call has failed."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lowering.describe import is_like_array, meant, show
from lowering.operators import fields


def call_fault(
    functions: Sequence[Callable[..., Any] | None], operands: Sequence[Any], params: Mapping[str, Any], error: Exception
) -> str | None:
    """Returns the fault of a call that failed with `error`; None if its operands and attributes are not at fault.

    Args:
      functions: the check and the reference of the operator.
      operands: as they were given.
      params: the attributes, as they were given.
      error: what the call raised. Numbers are operands too, unless a check has looked for their shapes.
    """
    is_number_fine = not isinstance(error, AttributeError)
    faults = [_operand_fault(index, operand, is_number_fine) for index, operand in enumerate(operands)]
    faults += [_attribute_fault(function, len(operands), params) for function in functions if function is not None]
    faults += [_hash_fault(name, value) for name, value in params.items()]
    return next(filter(None, faults), None)


def _operand_fault(index: int, operand: Any, is_number_fine: bool) -> str | None:
    for field in fields(operand):
        is_absent = field is None and operand is not None
        is_number = is_number_fine and isinstance(field, bool | int | float | complex)
        if not (is_absent or is_number or is_like_array(field) or isinstance(field, np.generic)):
            return f"operand {index} must {'be an array' if field is operand else 'hold arrays'}; got {show(field)}"
    return None


def _attribute_fault(function: Callable[..., Any], operand_count: int, params: Mapping[str, Any]) -> str | None:
    """Names an attribute that a function needs but was not given, or does not take."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # not written in Python
        return None
    places = [each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD][operand_count:]
    by_name = [each for each in parameters if each.kind is each.KEYWORD_ONLY]
    attributes = {each.name: each for each in (*places, *by_name)}
    for name, each in attributes.items():
        if each.default is each.empty and name not in params:
            return f"{name} must be given, as it is an attribute without a default; got {_joined(params)}"
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    for name, value in params.items():
        if name not in attributes and not takes_any:
            got = f"{name}={show(value)}{meant(name, attributes)}"
            return f"{name} must be one of the operator's attributes, {_joined(attributes)}; got {got}"
    return None


def _joined(names: Mapping[str, Any]) -> str:
    return ", ".join(names) or "none"


def _hash_fault(name: str, value: Any) -> str | None:
    try:
        hash(value)
    except TypeError:
        return f"{name} must be hashable, as it is a part of the program; got {show(value)}"
    return None
