"""Cost that a kernel tells XLA, so that the scheduler can hide other copies behind it."""

import math
from collections.abc import Iterable
from typing import Any

from jax.experimental import pallas as pl


def streaming_cost(arrays: Iterable[Any], elements: int, *, flops: int, transcendentals: int = 0) -> pl.CostEstimate:
    """Estimates the cost of a kernel that passes over arrays in HBM.

    Args:
      arrays: what is read or written, with shapes and dtypes; one that passes twice appears twice.
      elements: how many elements are computed.
      flops: vector operations for each of them, integer ones included.
      transcendentals: exponentials, logarithms and roots for each of them.
    """
    return pl.CostEstimate(
        flops=flops * elements,
        transcendentals=transcendentals * elements,
        bytes_accessed=sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays),
    )
