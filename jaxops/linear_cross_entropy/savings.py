"""Estimates of the memory that a cross entropy saves which does not keep the logits of a linear layer.

They are about the temporaries of a loss and its gradients, and were fitted to what XLA reports for CPUs. There a
function of plain JAX keeps the logits and their cotangent in float32, whatever the operands are, and a 16-bit weight in
float32 as well. The operator keeps a chunk of logits, a weight that it has to transpose, and the sum of a 16-bit
weight's gradient.
"""

import math
from typing import Any, NamedTuple

import jax.export

from jaxops._checks.dtypes import accumulation_dtype
from jaxops.linear_cross_entropy import row_chunks
from jaxops.linear_cross_entropy.column_tiles import default_tile_logits

# The logits, and their cotangent.
LEAST_ARRAYS = 2
_LEAST_SHARE = 0.2


class Saving(NamedTuple):
    """Bytes of temporaries: how many plain JAX needs, and how many of them the operator saves; -1 if not known."""

    plain_bytes: int
    saved_bytes: int

    @property
    def is_worthwhile(self) -> bool:
        """Tells whether a fifth of the temporaries is saved."""
        return self.saved_bytes >= _LEAST_SHARE * self.plain_bytes


def saving(
    logits: Any,
    weight: Any,
    classes: int,
    *,
    is_transposed: bool,
    is_cast: bool = False,
    keeps_rows: bool = False,
    arrays: float = LEAST_ARRAYS,
) -> Saving:
    """Estimates what the operator saves.

    Args:
      logits: their shape and dtype, (..., V).
      weight: its shape and dtype, with V H elements.
      classes: the number of classes, V.
      is_transposed: whether the weight has its features first, (H, V), or is copied for another reason.
      is_cast: whether the weight is rounded from an array that is wider, which plain JAX reads as it is.
      keeps_rows: whether all rows are taken at a time, and some of the columns.
      arrays: how many arrays of the logits' size plain JAX keeps.
    """
    size, weight_size = math.prod(logits.shape), math.prod(weight.shape)
    if jax.export.is_symbolic_dim(weight_size):
        return Saving(0, -1)
    rows, features = size // classes, weight_size // classes
    itemsize = accumulation_dtype(logits.dtype).itemsize
    is_narrow = weight.dtype.itemsize < itemsize
    chunks = math.ceil(rows / row_chunks.default_chunk_rows(classes, features))
    # A chunk exists once, or twice where a bias is added to columns that do not split evenly into tiles.
    chunk = 2 * default_tile_logits(rows, features) if keeps_rows else math.ceil(rows / chunks) * classes * 3 // 2
    copied_bytes = (weight.dtype.itemsize if keeps_rows else itemsize) * weight_size * (is_transposed or is_narrow)
    copied_bytes *= 2 if is_cast else 1
    kept_bytes = int(arrays * size * itemsize)
    saved_bytes = max(0, kept_bytes - itemsize * chunk - copied_bytes)
    is_small = size <= row_chunks.SMALL_LOGITS  # the operator keeps them as well
    return Saving(kept_bytes + itemsize * weight_size * (is_narrow and not is_cast), 0 if is_small else saved_bytes)
