"""The operands that batch-norm kernels take and those that none supports, whatever its dialect."""

import math
from typing import Any

FORWARD_FIELDS = frozenset({"x", "scale", "bias", "residual"})
BACKWARD_FIELDS = frozenset({"grad", "x", "scale", "mean", "inv_std", "grad_mean", "grad_variance", "gate"})
_ACTIVATIONS = ("identity", "relu")


def refusal(x: Any, axis_name: Any, activation: tuple[str, float, bool]) -> str | None:
    """Says why no kernel normalizes x (..., n, a, c, b) with these attributes; None if kernels may."""
    if activation[0] not in _ACTIVATIONS:
        return f"the kernels fuse relu, not {activation[0]}"
    if axis_name is not None:
        return f"the kernels take the statistics of one device; these are shared over {axis_name!r}"
    spec = tuple(getattr(getattr(x, "sharding", None), "spec", ()))
    if any(axis is not None for axis in spec[max(0, len(x.shape) - 4) :]):
        return f"the kernels take the statistics of one device; x is split over a mesh as {spec}"
    if math.prod(x.shape) == 0:
        return "there is nothing to normalize"
    return None
