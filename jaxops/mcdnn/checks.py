"""Refusals that all calls share, with the documented status."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxops._checks import layouts
from jaxops._checks.arguments import NOT_SUPPORTED, NotSupportedError
from jaxops._checks.mcdnn import as_optional, as_shape, require, require_choice, require_present

DTYPES = ("float16", "bfloat16", "float32", "float64")
MAX_RANK = 8  # of any tensor


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a documented function.

    Attributes:
      name: the function, for errors.
    """

    name: str

    def require(self, condition: bool, argument: str, rule: str, got: object) -> None:
        """Raises BadParamError unless the condition holds."""
        require(condition, self.name, argument, rule, got)

    def support(self, condition: bool, argument: str, rule: str, got: object) -> None:
        """Raises NotSupportedError unless the condition holds."""
        require(condition, self.name, argument, rule, got, status=NOT_SUPPORTED, error=NotSupportedError)

    def present(self, **arguments: Any) -> None:
        """Refuses required arguments that are None."""
        require_present(self.name, arguments)

    def arrays(self, **operands: Any) -> list[Any]:
        """Returns operands as arrays; None stays None."""
        return [as_optional(self.name, argument, value) for argument, value in operands.items()]

    def shapes(self, **operands: Any) -> list[Any]:
        """Returns shapes and dtypes of operands, which may be abstract or None."""
        return [None if value is None else as_shape(self.name, argument, value) for argument, value in operands.items()]

    def descriptor(self, kind: type, value: Any, argument: str = "desc") -> None:
        """Refuses anything but this kind of descriptor."""
        self.require(isinstance(value, kind), argument, f"be of type {kind.__name__}", value)

    def supported_dtype(self, argument: str, array: Any, dtypes: Sequence[str] = DTYPES) -> None:
        """Refuses undocumented dtypes."""
        self.support(array.dtype.name in dtypes, argument, f"have a dtype of {', '.join(dtypes)}", array)

    def layout(self, x: Any, layout: str | None) -> str:
        """Returns the layout of images: the requested one, or the one with channels first."""
        self.support(len(x.shape) in (4, 5), "x", "have two or three spatial axes", x)
        self._check_packed(layout)
        return layouts.resolved(self.name, x, layout, defaults=layouts.CHANNELS_FIRST)

    def channel_axis(self, x: Any, layout: str | None, argument: str = "x") -> int:
        """Returns the channel axis of a tensor with four to eight axes; with more than five the layout must be None."""
        rank = len(x.shape)
        self.require(4 <= rank <= MAX_RANK, argument, f"have rank 4 to {MAX_RANK}", x)
        if layout is None:
            return 1
        self._check_packed(layout)
        layout = require_choice(self.name, "layout", layout, layouts.IMAGES)
        self.require(rank == len(layout), argument, f"have {len(layout)} axes, as layout {layout} says", x)
        return layout.index("C")

    def _check_packed(self, layout: Any) -> None:
        is_vectorised = isinstance(layout, str) and layout == "NCHW_VECT_C"
        self.support(not is_vectorised, "layout", "not be vectorised", layout)
