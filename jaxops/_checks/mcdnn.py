"""Checks for the operators that mcDNN documents: refusals carry mcDNN's status for a bad parameter."""

import functools

from jaxops._checks import arguments
from jaxops._checks.arguments import BAD_PARAM

as_array = functools.partial(arguments.as_array, status=BAD_PARAM)
as_arrays = functools.partial(arguments.as_arrays, status=BAD_PARAM)
as_key = functools.partial(arguments.as_key, status=BAD_PARAM)
as_optional = functools.partial(arguments.as_optional, status=BAD_PARAM)
as_shape = functools.partial(arguments.as_shape, status=BAD_PARAM)
require = functools.partial(arguments.require, status=BAD_PARAM)
require_axis_names = functools.partial(arguments.require_axis_names, status=BAD_PARAM)
require_bool = functools.partial(arguments.require_bool, status=BAD_PARAM)
require_choice = functools.partial(arguments.require_choice, status=BAD_PARAM)
require_integer = functools.partial(arguments.require_integer, status=BAD_PARAM)
require_present = functools.partial(arguments.require_present, status=BAD_PARAM)
require_real = functools.partial(arguments.require_real, status=BAD_PARAM)
