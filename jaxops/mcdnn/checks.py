"""What calls of every kind refuse, with the documented status."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxops import _layouts
from jaxops._errors import BAD_PARAM, NOT_SUPPORTED, NotSupportedError, require

DTYPES = ("float16", "bfloat16", "float32", "float64")
MAX_RANK = 8  # of any tensor


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a documented function.

    Attributes:
      name: of the function, for its errors.
    """

    name: str

    def require(self, condition: bool, argument: str, rule: str, got: object) -> None:
        """Raises BadParamError unless the condition holds."""
        require(condition, self.name, argument, rule, got, status=BAD_PARAM)

    def support(self, condition: bool, argument: str, rule: str, got: object) -> None:
        """Raises NotSupportedError unless the condition holds."""
        require(condition, self.name, argument, rule, got, status=NOT_SUPPORTED, error=NotSupportedError)

    def present(self, **arguments: Any) -> None:
        """Refuses required arguments that are None."""
        for argument, value in arguments.items():
            self.require(value is not None, argument, "be given", None)

    def descriptor(self, kind: type, value: Any, argument: str = "desc") -> None:
        """Refuses anything but a descriptor of this kind."""
        self.require(isinstance(value, kind), argument, f"be of type {kind.__name__}", value)

    def supported_dtype(self, argument: str, array: Any, dtypes: Sequence[str] = DTYPES) -> None:
        """Refuses dtypes that are not documented."""
        self.support(array.dtype.name in dtypes, argument, f"have a dtype of {', '.join(dtypes)}", array)

    def layout(self, x: Any, layout: str | None) -> str:
        """The layout of images: the one that was asked for, or the first of x's rank."""
        self.support(len(x.shape) in (4, 5), "x", "have two or three spatial axes", x)
        self.support(layout != "NCHW_VECT_C", "layout", "not be vectorised", layout)
        return _layouts.resolved(self.name, x, layout)

    def channel_axis(self, x: Any, layout: str | None, argument: str = "x") -> int:
        """Where the channels of a tensor of four to eight axes are; with more than five the layout must be None."""
        rank = len(x.shape)
        self.require(4 <= rank <= MAX_RANK, argument, f"have rank 4 to {MAX_RANK}", x)
        if layout is None:
            return 1
        self.support(layout != "NCHW_VECT_C", "layout", "not be vectorised", layout)
        is_known = isinstance(layout, str) and layout in _layouts.IMAGES
        self.require(is_known, "layout", f"be one of {', '.join(_layouts.IMAGES)}", layout)
        self.require(rank == len(layout), argument, f"have {len(layout)} axes, as layout {layout} says", x)
        return layout.index("C")


def as_arrays(*arrays: Any) -> list[Any]:
    """JAX arrays of what is given."""
    return [None if array is None else jnp.asarray(array) for array in arrays]
