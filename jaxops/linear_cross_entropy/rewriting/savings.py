"""Estimates of the memory that a cross entropy saves which does not keep the logits of a linear layer.

They are about the temporaries of a loss and its gradients, and were fitted to what XLA reports for CPUs. There a
function of plain JAX keeps the logits and their cotangent in float32, whatever the operands are. The operator keeps a
chunk of logits, a weight that it has to transpose, the sum of the gradient of a 16-bit weight, and what rows have.

Where the gradient of the weight is at least as large as the float32 logits, XLA may keep an array of them there, in a
result. For a 16-bit weight this depends on the order of gradients, which is not known when a loss is traced: what is
said is for that of the weight first, and nothing may be lost in the other order.
"""

import math
from typing import Any, NamedTuple

import jax.export

from jaxops._checks.dtypes import accumulation_dtype
from jaxops.linear_cross_entropy import chunk_sizes

_ARRAYS, _LEAST_SHARE = 2, 0.2  # the logits, and their cotangent; a fifth
# XLA was seen to keep the last array but one in a gradient from so many rows on; with H >= V, in that of x as well.
_MANY_ROWS = 4096
# Before JAX 0.11, XLA's code for CPUs kept 16-bit operands of products in float32 as well, and what a program rounds.
KEEPS_ROUNDED = jax.__version_info__ < (0, 11)


class Saving(NamedTuple):
    """Bytes of temporaries: what plain JAX needs, what the operator saves (-1 if not known), and what at least."""

    plain_bytes: int
    saved_bytes: int
    least_bytes: int = 0

    @property
    def is_worthwhile(self) -> bool:
        """Tells whether a fifth of the temporaries is saved, and none are lost in any order of gradients."""
        return self.saved_bytes >= _LEAST_SHARE * self.plain_bytes and self.least_bytes >= 0


def saving(
    logits: Any,
    weight: Any,
    classes: int,
    *,
    is_transposed: bool,
    is_cast: bool = False,
    keeps_rows: bool = False,
    is_cone: bool = False,
) -> Saving:
    """Estimates what the operator saves: nothing of so few logits that it keeps them as well.

    Args:
      logits: their shape and dtype, (..., V).
      weight: its shape and dtype, with V H elements.
      classes: the number of classes, V.
      is_transposed: whether the weight has its features first, (H, V), or is copied for another reason.
      is_cast: whether the weight is rounded from an array that is wider, which plain JAX reads as it is.
      keeps_rows: whether all rows are taken at a time, and some of the columns.
      is_cone: whether chunks are differentiated by JAX, not by the operator.
    """
    size, weight_size = math.prod(logits.shape), math.prod(weight.shape)
    if jax.export.is_symbolic_dim(weight_size):
        return Saving(0, -1)
    rows, features, itemsize = size // classes, weight_size // classes, accumulation_dtype(logits.dtype).itemsize
    is_narrow = weight.dtype.itemsize < itemsize
    is_accumulated = logits.dtype.itemsize == itemsize  # the product's dtype is that of its sums
    widened = weight_size if is_narrow and not is_cast and (KEEPS_ROUNDED or is_accumulated) else 0
    # The gradient of a weight that is rounded has the dtype of what it is rounded from.
    fits = weight_size * (itemsize if is_cast else weight.dtype.itemsize) >= size * itemsize
    has_axes_of_rows = len(logits.shape) > 2
    arrays = _ARRAYS
    if is_narrow:
        arrays -= fits and has_axes_of_rows and not KEEPS_ROUNDED
    else:
        arrays -= features >= classes or (fits and rows >= _MANY_ROWS)
    plain = arrays * size + widened
    # Nor is it known where rows have several axes, or for functions of their own derivative.
    least = (_ARRAYS - 1) * size + widened if fits and (is_narrow or has_axes_of_rows or is_cone) else plain
    if keeps_rows:
        # Rows are taken in another order, and so are their gradients, in two places.
        tile = rows * (chunk_sizes.columns_of_tile(rows, rows, (classes, features), None) or classes)
        copies = _weights_of_statistics(is_transposed, is_narrow, classes, math.ceil(size / tile))
        # Tiles of logits, row gradients, and tiles of the weight and its gradient, as they are and transposed.
        taken = 2 * tile + 4 * rows * features + 4 * math.ceil(tile / rows) * features + copies * weight_size
    else:
        chunks = math.ceil(rows / (chunk_sizes.rows_of_logits(classes, features, 1) or rows))
        # A cone's loop has the gradient of the weight beside its sum.
        copies = _weights_of_sum(is_transposed or is_cone, is_narrow, is_cast)
        copies += is_cone and is_narrow and not is_cast and KEEPS_ROUNDED
        taken = math.ceil(rows / chunks) * classes + rows * features + copies * weight_size
        # Since JAX 0.11, a transposed float32 weight exists while its gradient is transposed as well.
        if is_transposed and not is_narrow and not KEEPS_ROUNDED:
            taken = max(taken, 2 * weight_size + rows * features)
    saved = max(0, int(itemsize * (plain - taken))) if size > chunk_sizes.SIZES.logits else 0
    return Saving(int(itemsize * plain), saved, int(itemsize * (least - taken)))


def _weights_of_sum(is_transposed: bool, is_narrow: bool, is_cast: bool) -> float:
    """Counts float32 arrays of a weight's size: its transpose, the sum of a 16-bit gradient, or a rounded weight."""
    if is_cast:
        return (1 if KEEPS_ROUNDED else 0.5) if is_narrow else 0
    return 1 + 0.5 * is_transposed if is_narrow else is_transposed


def _weights_of_statistics(is_transposed: bool, is_narrow: bool, classes: int, tiles: int) -> float:
    """Counts the same beside statistics: a float32 copy and a rounded one, or a transpose, twice with uneven tiles."""
    if is_narrow:
        return 1.5 if KEEPS_ROUNDED else is_transposed
    is_even = KEEPS_ROUNDED and any(classes % count == 0 for count in range(tiles, 2 * tiles))
    return is_transposed * (1 if is_even else 2)  # since JAX 0.11 always twice
