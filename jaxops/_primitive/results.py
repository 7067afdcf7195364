"""Results with named parts."""

from typing import Any, TypeVar

import jax.export

_Result = TypeVar("_Result", bound=type[tuple[Any, ...]])


def exportable(result: _Result) -> _Result:
    """Lets `jax.export` store functions that take or return a named tuple; a decorator. It is read by its name."""
    jax.export.register_namedtuple_serialization(result, serialized_name=f"jaxops.{result.__name__}")
    return result
