"""Options of the loss in the calls of loss heads."""

from collections.abc import Mapping
from typing import Any

from jaxops._checks.arguments import require


def check_loss_options(name: str, options: Mapping[str, Any]) -> None:
    """Refuses options of `linear_cross_entropy` that the layer decides."""
    for argument in ("bias", "transpose_weight"):
        require(argument not in options, name, argument, "be left out, as the layer decides it", options.get(argument))
