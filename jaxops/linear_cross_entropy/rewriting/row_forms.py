"""Numbers and forms: what a row has, alone and for each class, as far as it follows from the statistics.

A number is kept relative to the row's maximum: it is rest + level m + peak M, where m is the maximum that the
statistics are relative to, and M the user's own maximum of the logits, which is m as well. Mostly both cancel: log sum
exp(z - M) + M - z_y is l - (z_y - m), and no digit is lost to a large m. `slope` says by how much the number changes if
M is differentiated. As m is a constant here, that must have become 0 wherever the number is read.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._primitive.sharding import reshaped
from lowering.rewriting.graph import Node
from lowering.rewriting.rules import RefusalError


class Number(NamedTuple):
    """The number rest + level m + peak M; `rest` is a Python number where it is written in the code."""

    rest: Any
    level: float = 0.0
    peak: float = 0.0
    slope: float = 0.0

    @property
    def known(self) -> Any:
        """The number, if it is written in the code."""
        return self.rest if is_plain(self.rest) and not (self.level or self.peak) else None


class Factor(NamedTuple):
    """The number gain exp(power)."""

    power: Number
    gain: Number = Number(1.0)


@dataclasses.dataclass
class Maxima:
    """Both maxima, and what was found when numbers were read.

    Attributes:
      level: m.
      peak: M, if it is to be told from m.
      reads_peak: whether M itself was read.
      rises: whether a number was read that rises with all logits of a row.
    """

    level: Any
    peak: Any = None
    reads_peak: bool = False
    rises: bool = False

    def array(self, number: Number | Factor, *, is_differentiated: bool = True) -> Any:
        """Computes a number.

        Raises:
          RefusalError: if it changes with the user's maximum, which has no derivative here.
        """
        if isinstance(number, Factor):
            return together(jnp.multiply, jnp.exp(self.array(number.power)), self.array(number.gain))
        rest, level, peak, slope = number
        if slope and is_differentiated:
            raise RefusalError("the maximum of the logits is itself used and differentiated")
        self.rises |= level != 0 and is_differentiated
        self.reads_peak |= peak != 0
        if self.peak is None:
            level, peak = level + peak, 0.0
        for factor, maximum in ((level, self.level), (peak, self.peak)):
            if factor:
                rest = together(jnp.add, maximum if factor == 1 else factor * maximum, rest)
        return rest

    def plain(self, number: Number | Factor) -> Number:
        """Returns a number, computed if it is a factor."""
        return Number(self.array(number)) if isinstance(number, Factor) else number

    def plus(self, a: Any, b: Any, sign: float = 1.0) -> Number:
        """Computes a + b, or a - b."""
        a, b = self.plain(a), self.plain(b)
        if is_plain(a.rest) and is_plain(b.rest):
            rest = a.rest + sign * b.rest
        elif is_plain(b.rest) and b.rest == 0:
            rest = a.rest
        elif is_plain(a.rest) and a.rest == 0 and sign > 0:
            rest = b.rest
        else:
            rest = together(jnp.subtract if sign < 0 else jnp.add, a.rest, b.rest)
        pairs = ((x, sign * y) for x, y in zip(a[1:], b[1:], strict=True))
        # What cancels but for rounding does.
        return Number(rest, *(0.0 if abs(x + y) <= 1e-6 * max(abs(x), abs(y)) else x + y for x, y in pairs))

    def times(self, a: Any, b: Any) -> Any:
        """Computes a b."""
        if isinstance(a, Factor) and isinstance(b, Factor):
            return Factor(self.plus(a.power, b.power), self.times(a.gain, b.gain))
        if isinstance(b, Factor) or (a.known is not None if isinstance(a, Number) else False):
            a, b = b, a
        if isinstance(a, Factor):
            return a._replace(gain=self.times(a.gain, b))
        if b.known is None:
            return Number(together(jnp.multiply, self.array(a), self.array(b)))
        if b.known == 1:
            return a
        rest = a.rest * b.known if is_plain(a.rest) else together(jnp.multiply, a.rest, b.known)
        return Number(rest, *(x * float(b.known) for x in a[1:]))

    def over(self, a: Any, b: Any) -> Any:
        """Computes a / b."""
        if isinstance(b, Factor):
            return self.times(self.over(a, b.gain), Factor(self.times(b.power, Number(-1.0))))
        if isinstance(a, Factor):
            return a._replace(gain=self.over(a.gain, b))
        if b.known in (None, 0):
            return Number(together(jnp.divide, self.array(a), self.array(b)))
        if b.known == 1:
            return a
        rest = a.rest / b.known if is_plain(a.rest) else together(jnp.divide, a.rest, b.known)
        return Number(rest, *(x / float(b.known) for x in a[1:]))

    def logarithm(self, factor: Factor, dtype: Any) -> Number:
        """Computes the logarithm of a factor."""
        gain = factor.gain.known
        log = math.log(gain) if gain is not None and gain > 0 else jnp.log(jnp.asarray(self.array(factor.gain), dtype))
        return self.plus(factor.power, Number(log))

    def where(self, condition: Number, yes: Any, no: Any, *, is_label: bool = False) -> Any:
        """Chooses `yes` where the condition holds, and keeps what is relative to maxima as it is there.

        With `is_label`, the condition is that the row has a label: only such rows rise.
        """
        if condition.known is not None:
            return yes if condition.known else no
        is_nan = isinstance(no, Number) and no.known is not None and math.isnan(no.known)
        if isinstance(yes, Factor) and is_nan and yes.gain.known is not None:
            return yes._replace(power=self.where(condition, yes.power, no, is_label=is_label))
        yes, no = self.plain(yes), self.plain(no)
        other = no.rest
        if not is_nan and yes[1:] != no[1:]:
            if yes.slope != no.slope:
                raise RefusalError("the maximum of the logits is itself used and differentiated")
            self.reads_peak |= yes.peak != no.peak
            self.rises |= not is_label
            other = self.array(Number(other, no.level - yes.level, no.peak - yes.peak), is_differentiated=False)
        chosen = together(lambda a, b: jnp.where(condition.rest, a, b), yes.rest, other)
        return Number(chosen, *yes[1:])


def is_plain(value: Any) -> bool:
    """Tells whether a value is a Python number."""
    return isinstance(value, bool | int | float)


def together(operation: Callable[..., Any], a: Any, b: Any) -> Any:
    """Applies an operation to two numbers in the wider of their dtypes; plain numbers take that of the other."""
    if hasattr(a, "dtype") and hasattr(b, "dtype") and a.dtype != b.dtype:
        dtype = jnp.promote_types(a.dtype, b.dtype)
        a, b = a.astype(dtype), b.astype(dtype)
    return operation(a, b)


def is_same(a: Number, b: Number) -> bool:
    """Tells whether two numbers are known to be the same."""
    return a is b or a.rest is b.rest or (a.known is not None and a.known == b.known)


def stopped(number: Number, stop: Callable[[jax.Array], jax.Array]) -> Number:
    """Returns a number without its derivative."""
    return Number(number.rest if is_plain(number.rest) else stop(number.rest), number.level, number.peak)


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

    @property
    def is_dense(self) -> bool:
        """Tells whether rows that follow one another are read, so that labels can be `filled`."""
        return self.bounds is not None and set(self.bounds[2]) <= {1}

    def read(self, array: Any, behind: int = 0) -> Any:
        """Reads rows of an array, which has so many axes behind those of rows."""
        rest = array.shape[array.ndim - behind :]
        array = reshaped(array, (*self.before, *rest))
        if self.order is not None:
            return lax.transpose(array, (*self.order, *range(len(self.before), array.ndim)))
        assert self.bounds is not None
        whole = (0,) * len(rest), rest, (1,) * len(rest)
        return lax.slice(array, *((*of_rows, *more) for of_rows, more in zip(self.bounds, whole, strict=True)))

    def filled(self, label: Number, rows: tuple[int, ...]) -> Number:
        """Returns labels of all rows, in a shape of these, from those of the rows that are read; the others have 0."""
        if getattr(label.rest, "ndim", 0) == 0:
            return label
        assert self.bounds is not None
        first, last, _ = self.bounds
        sides = [(low, size - high) for low, high, size in zip(first, last, self.before, strict=True)]
        return label._replace(rest=jnp.pad(jnp.broadcast_to(label.rest, self.shape), sides).reshape(rows))


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
    """Result of a node that computes number by number from other forms; `reads_logits` tells whether from logits."""

    node: Node
    operands: tuple[Any, ...]
    reads_logits: bool


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


def counts(dtype: Any, classes: int) -> bool:
    """Tells whether a dtype is one of integers that has a number for each class."""
    return bool(jnp.issubdtype(dtype, jnp.integer)) and int(jnp.iinfo(dtype).max) >= classes - 1


def reads_logits(form: Any) -> bool:
    """Tells whether a form depends on logits, class by class."""
    return form.reads_logits if isinstance(form, Combined) else isinstance(form, Logits | Exponentials)


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
