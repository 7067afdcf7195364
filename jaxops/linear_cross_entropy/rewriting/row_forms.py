"""Forms: what a row has for each class, as far as its sums, maxima and picks follow from the statistics."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxops._primitive.sharding import reshaped
from jaxops.linear_cross_entropy.rewriting.row_numbers import Number
from lowering.rewriting.graph import Node
from lowering.rewriting.rules import RefusalError


class OneHot(NamedTuple):
    """A number at the label, and another elsewhere."""

    label: Number
    on: Any
    off: Any


class Vector(NamedTuple):
    """An array (V,), or (..., V) with one for each row; perhaps 0, 1, 2, ..."""

    array: Any
    counts: bool = False


class View(NamedTuple):
    """Rows that are read of all rows, which are first reshaped to `before`.

    Attributes:
      before: a shape of the rows.
      shape: the shape of those that are read.
      bounds: starts, limits and strides; None for all rows.
      order: the axes in another order; None if they keep theirs.
    """

    before: tuple[int, ...]
    shape: tuple[int, ...]
    bounds: tuple[tuple[int, ...], ...] | None = None
    order: tuple[int, ...] | None = None

    def read(self, array: Any, behind: int = 0) -> Any:
        """Reads rows of an array, which has so many axes behind those of rows."""
        rest = array.shape[array.ndim - behind :]
        array = reshaped(array, (*self.before, *rest))
        if self.order is not None:
            return lax.transpose(array, (*self.order, *range(len(self.before), array.ndim)))
        assert self.bounds is not None
        whole = (0,) * len(rest), rest, (1,) * len(rest)
        return lax.slice(array, *((*of_rows, *more) for of_rows, more in zip(self.bounds, whole, strict=True)))


class Layer(NamedTuple):
    """Steps behind a matrix product.

    Attributes:
      bias: of each class.
      softcap: c in c tanh(z / c).
      kept: the columns whose logit is not `fill`.
      fill: the logit of the others.
      views: which rows are read, one after the other.
    """

    bias: Any = None
    softcap: float | None = None
    kept: Any = None
    fill: float | None = None
    views: tuple[View, ...] = ()

    def is_same(self, other: "Layer") -> bool:
        """Tells whether two are the same."""
        return all(a is b or (not hasattr(a, "dtype") and a == b) for a, b in zip(self, other, strict=True))


class Logits(NamedTuple):
    """Logits scale z + shift of the logits z of a layer."""

    layer: Layer
    scale: Number = Number(1.0)
    shift: Number = Number(0.0)


class Exponentials(NamedTuple):
    """Exponentials of logits, times a number."""

    logits: Logits
    gain: Number = Number(1.0)


class Combined(NamedTuple):
    """Result of a node that computes number by number from other forms."""

    node: Node
    operands: tuple[Any, ...]


class Asked(NamedTuple):
    """Questions to the statistics; None for what is not asked.

    Attributes:
      layer: the `Layer` of the logits.
      scale: the `Number` that multiplies them.
      label: the `Number` of the class whose logit is wanted.
      target: the weights of columns, a `Vector` or "ones".
    """

    layer: Any = None
    scale: Any = None
    label: Any = None
    target: Any = None


def is_shared(form: Any) -> bool:
    """Tells whether all rows share a number or an array."""
    return getattr(form.array if isinstance(form, Vector) else form.rest, "ndim", 0) == isinstance(form, Vector)


def reads_logits(form: Any) -> bool:
    """Tells whether a form depends on logits, class by class."""
    if isinstance(form, Combined):
        return any(map(reads_logits, form.operands))
    return isinstance(form, Logits | Exponentials)


def check_terms(node: Node, operands: Sequence[Any]) -> None:
    """Refuses to add up the terms of a sum or difference apart, if one alone reads the logits.

    In a divergence, p (log p - z), both terms may be large and nearly equal.
    """
    if len({reads_logits(operand) for operand in operands}) > 1:
        raise RefusalError("compares the logits with other numbers, class by class", node)


def aligned(*arrays: Any) -> list[Any]:
    """Gives arrays as many axes, and repeats them along those of length 1."""
    rank = max(x.ndim for x in arrays)
    arrays = tuple(x.reshape((1,) * (rank - x.ndim) + x.shape) for x in arrays)
    shape = jnp.broadcast_shapes(*(x.shape for x in arrays))
    return [x if x.shape == shape else jnp.broadcast_to(x, shape) for x in arrays]


def widened(array: Any) -> Any:
    """Returns an array in float32 at least."""
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))
