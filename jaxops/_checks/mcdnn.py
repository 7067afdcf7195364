"""Checks for the operators that mcDNN documents: refusals carry mcDNN's status for a bad parameter."""

import functools

from jaxops._checks import attributes, errors, operands
from jaxops._checks.errors import BAD_PARAM

as_array = functools.partial(operands.as_array, status=BAD_PARAM)
as_arrays = functools.partial(operands.as_arrays, status=BAD_PARAM)
as_key = functools.partial(operands.as_key, status=BAD_PARAM)
as_optional = functools.partial(operands.as_optional, status=BAD_PARAM)
as_shape = functools.partial(operands.as_shape, status=BAD_PARAM)
require = functools.partial(errors.require, status=BAD_PARAM)
require_axis_names = functools.partial(attributes.require_axis_names, status=BAD_PARAM)
require_bool = functools.partial(attributes.require_bool, status=BAD_PARAM)
require_choice = functools.partial(attributes.require_choice, status=BAD_PARAM)
require_integer = functools.partial(attributes.require_integer, status=BAD_PARAM)
require_present = functools.partial(errors.require_present, status=BAD_PARAM)
require_real = functools.partial(attributes.require_real, status=BAD_PARAM)
