"""Refusals of images that are split over a mesh, by kernels of whole images."""

import math
from typing import Any


def refusal(x: Any) -> str | None:
    """Says why no kernel takes images of four axes, split over devices like x; None if kernels may."""
    if math.prod(x.shape) == 0:
        return "there is nothing to compute"
    spec = tuple(getattr(getattr(x, "sharding", None), "spec", ()))
    if any(axis is not None for axis in spec[max(0, len(x.shape) - 4) :]):
        return f"the kernels take whole images, and would gather x, which is split over a mesh as {spec}"
    return None
