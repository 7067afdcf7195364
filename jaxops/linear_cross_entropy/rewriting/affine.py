"""Follows what is affine in the statistics of rows, with coefficients that do not read the logits.

The loss of a row follows from numbers relative to the row's maximum m: log sum exp(z - m), the label's z - m, and a
weighted sum of z - m. On the way these may be exponents, as in log(softmax). If a sum of losses is affine in them, its
gradients can be computed together with the logits, as it is known beforehand how it depends on these.

`summed_cross_entropy` computes sums that do not change when all logits of a row rise alike. So for each value two
slopes are followed: with such a rise, in rows that have a label, and with m. A slope is a formal sum of linear maps;
equal maps cancel. Squares of log sum exp may be added, which the operator takes apart.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from jaxops.linear_cross_entropy.rewriting.reading import ELEMENTWISE, RESHAPES
from jaxops.linear_cross_entropy.rewriting.rows import identity, keeps_numbers, only_number
from lowering.rewriting.graph import SAME, Value, opened

# Of each linear map, by its number, how often it is taken.
Slope = dict[int, float]


@dataclasses.dataclass(frozen=True)
class Slopes:
    """Slopes by which a value varies.

    Attributes:
      rise: with a rise of all logits of a row, in rows that have a label.
      maximum: with the row's maximum, where everything relative stays the same.
      beside: with what is no log sum exp; here nothing cancels.
    """

    rise: Slope = dataclasses.field(default_factory=dict)
    maximum: Slope = dataclasses.field(default_factory=dict)
    beside: Slope = dataclasses.field(default_factory=dict)

    def plus(self, other: "Slopes", sign: float = 1.0) -> "Slopes":
        """Adds two slopes."""
        rise, maximum = _added(self.rise, other.rise, sign), _added(self.maximum, other.maximum, sign)
        return Slopes(rise, maximum, _added(self.beside, other.beside, sign))

    def each(self, change: Callable[[Slope], Slope]) -> "Slopes":
        """Applies a change to all three slopes."""
        return Slopes(change(self.rise), change(self.maximum), change(self.beside))


@dataclasses.dataclass(frozen=True, eq=False)
class Form:
    """Known facts about a value.

    Attributes:
      key: equal for values that are computed alike, in whichever shape.
      number: what all its elements are, if that is written in the code.
      varies: whether it varies with relative statistics: it is affine in them.
      is_factor: whether it is instead a constant times the exponential of what the slopes describe.
      is_pure: whether that constant, or what is added, is known to be nothing.
      reads: whether it reads maxima or predictions in ways that the slopes do not describe.
      slopes: how it varies.
    """

    key: int
    number: Any = None
    varies: bool = False
    is_factor: bool = False
    is_pure: bool = False
    reads: bool = False
    slopes: Slopes = dataclasses.field(default_factory=Slopes)

    @property
    def is_carrying(self) -> bool:
        """Tells whether its slopes say something."""
        return self.varies or bool(self.slopes.maximum)

    @property
    def is_plain(self) -> bool:
        """Tells whether it has nothing to do with the logits."""
        return not (self.is_carrying or self.reads)

    @property
    def is_known_sum(self) -> bool:
        """Tells whether it is a sum of cross entropies with known weights, plus something without a derivative."""
        return self.varies and not self.is_factor and not self.slopes.rise


# What becomes of a value in an equation; None if it is not known.
Result = Form | None


class Forms:
    """The forms of values, equation by equation."""

    def __init__(self) -> None:
        """Begins with none."""
        self._numbers: dict[Any, int] = {}
        # The map that changes nothing, and those that treat each row for itself and keep rows where they are.
        self._unit: Slope = {self._number("rows"): 1.0}
        self._of_each_row = set(self._unit)
        # Says in which rows the label is a class; only these rise.
        self._has_label: int | None = None

    def of_statistic(self, name: str, total: Form | None = None) -> Result:
        """Returns the form of a statistic, by its name in `RowStatistics`; `total` is that of the targets' sum."""
        key, unit, apart = self._number(name), self._unit, {self._number(name): 1.0}
        match name:
            case "max_logit":
                return Form(key, is_pure=True, slopes=Slopes(maximum=unit))
            case "prediction":
                return Form(key, reads=True)
            case "log_sum_exp":
                return Form(key, varies=True, is_pure=True, slopes=Slopes(rise=unit))
            case "label_logit":
                return Form(key, varies=True, slopes=Slopes(rise=unit, beside=apart))
            case "target_logit" if total is not None and total.is_plain:
                return Form(key, varies=True, slopes=Slopes(rise=self._times(unit, total), beside=apart))
        return None

    def of_square(self, equation: Any, operands: Sequence[Result]) -> Result:
        """Returns the form of the square of log sum exp, which is one more statistic; None for anything else."""
        name, form = equation.primitive.name, operands[0] if operands else None
        is_square = name == "square" or (name == "integer_pow" and equation.params["y"] == 2)
        if form is None or form.is_factor or not (is_square or (name == "mul" and operands[1] is form)):
            return None
        is_log_sum_exp = form.is_pure and form.slopes == Slopes(self._unit, self._unit)
        return Form(self._number("square", form.key), varies=True) if is_log_sum_exp else None

    def of_constant(self, value: Value) -> Form:
        """Returns the form of a value that does not depend on the logits."""
        number = only_number(value)
        return Form(self._number("value", identity(value)), number, is_pure=number == 0)

    def set_label(self, has_label: Form) -> None:
        """Says what tells whether a row has a label."""
        self._has_label = has_label.key

    def of_jaxpr(self, closed: Any, inputs: Sequence[Result]) -> list[Result]:
        """Returns the forms of a jaxpr's results."""
        jaxpr, constants = opened(closed)
        known: dict[Any, Result] = dict(zip(jaxpr.invars, inputs, strict=True))
        for variable, array in zip(jaxpr.constvars, constants, strict=True):
            known[variable] = self._of_array(array, variable.aval)

        def read(atom: Any) -> Result:
            return self._of_array(atom.val, atom.aval) if hasattr(atom, "val") else known[atom]

        for equation in jaxpr.eqns:
            results = self.after(equation, [read(atom) for atom in equation.invars])
            known.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def after(self, equation: Any, inputs: Sequence[Result]) -> Sequence[Result]:
        """Returns the forms of an equation's results."""
        operands = [x for x in inputs if x is not None]
        if equation.effects or len(operands) < len(inputs):
            return [None for _ in equation.outvars]
        if equation.primitive.name in ("jit", "pjit", "closed_call"):
            return self.of_jaxpr(equation.params.get("jaxpr", equation.params.get("call_jaxpr")), operands)
        if equation.primitive.name in SAME:
            return operands[: len(equation.outvars)]
        return [self._result(equation, position, operands) for position in range(len(equation.outvars))]

    def _result(self, equation: Any, position: int, operands: Sequence[Form]) -> Result:
        shapes = tuple(tuple(atom.aval.shape) for atom in equation.invars)
        size = math.prod(getattr(equation.outvars[position].aval, "shape", ()))
        name, params = equation.primitive.name, _written(equation.params)
        is_elementwise = name in ELEMENTWISE and all(math.prod(shape) in (1, size) for shape in shapes)
        where = () if is_elementwise else (shapes, position)
        key = self._number(name, params, tuple(x.key for x in operands), where)
        if name in ELEMENTWISE:
            shape = tuple(equation.outvars[0].aval.shape)
            operands = [self._spread(x, before, shape) for x, before in zip(operands, shapes, strict=True)]
        found = None
        if name in RESHAPES or (
            name == "broadcast_in_dim" and (operands[0].number is not None or math.prod(shapes[0]) == size)
        ):
            return operands[0]
        if any(x.is_carrying for x in operands):
            rule = _RULES.get(name)
            found = rule(self, equation, operands) if rule else self._linear(equation, operands, position)
        elif name == "convert_element_type":
            if _is_floating(equation):
                return operands[0]
            number = operands[0].number if keeps_numbers(equation) else None
            return dataclasses.replace(operands[0], key=key, number=number)
        else:
            found = Form(key, reads=any(x.reads for x in operands))
        if found is None:
            return None if any(x.varies for x in operands) else Form(key, reads=True)
        return found if found in operands else dataclasses.replace(found, key=key)

    def _spread(self, form: Form, before: tuple[int, ...], after: tuple[int, ...]) -> Form:
        """Repeats an operand along axes of length 1."""
        if form.number is not None or math.prod(before) == math.prod(after):
            return form
        slopes = form.slopes.each(functools.partial(self._mapped, told=("spread", before, after)))
        return dataclasses.replace(form, key=self._number("spread", form.key, before, after), slopes=slopes)

    def _linear(self, equation: Any, operands: Sequence[Form], position: int = 0) -> Result:
        """Follows an equation that is linear in one operand, or joins several."""
        name = equation.primitive.name
        carrying = [i for i, x in enumerate(operands) if x.is_carrying]
        others = [x for i, x in enumerate(operands) if i not in carrying]
        is_known = name in _LAYOUTS or (name in _LINEAR and not any(operands[i].is_factor for i in carrying))
        if not is_known or any(not x.is_plain for x in others) or (len(carrying) > 1 and name != "concatenate"):
            return None
        shapes = tuple(tuple(atom.aval.shape) for atom in equation.invars)
        told = name, _written(equation.params), tuple(x.key for x in others), shapes, position
        slopes = Slopes()
        for i in carrying:
            slopes = slopes.plus(operands[i].slopes.each(functools.partial(self._mapped, told=(*told, i))))
        return _joined(operands, slopes, is_factor=operands[carrying[0]].is_factor)

    def _number(self, *parts: Any) -> int:
        return self._numbers.setdefault(parts, len(self._numbers))

    def _of_array(self, array: Any, aval: Any) -> Form:
        value = Value(aval, constant=array, is_constant=True)
        return self.of_constant(value)

    def _mapped(self, slope: Slope, told: Any) -> Slope:
        return {self._number("map", told, chain): factor for chain, factor in slope.items()}

    def _times(self, slope: Slope, by: Form, name: str = "mul") -> Slope:
        """Multiplies (or divides) a slope by a constant."""
        if by.number is not None:
            factor = float(by.number) if name == "mul" else 1 / float(by.number)
            return {chain: factor * old for chain, old in slope.items() if factor}
        return self._of_rows(slope, name, by.key)

    def _of_rows(self, slope: Slope, *told: Any) -> Slope:
        """Takes a slope through a map of each row for itself."""
        found = {}
        for chain, factor in slope.items():
            after = self._number("map", told, chain)
            found[after] = factor
            if chain in self._of_each_row:
                self._of_each_row.add(after)
        return found

    def _add(self, equation: Any, operands: Sequence[Form]) -> Result:
        a, b = operands
        if a.is_factor or b.is_factor:
            return None
        slopes = a.slopes.plus(b.slopes, -1.0 if equation.primitive.name == "sub" else 1.0)
        return _joined(operands, slopes, is_pure=a.is_pure and b.is_pure)

    def _multiply(self, equation: Any, operands: Sequence[Form]) -> Result:
        a, b = operands
        name = equation.primitive.name
        if a.is_factor or b.is_factor:
            if any(x.is_carrying and not x.is_factor for x in operands):
                return None
            return _joined(operands, a.slopes.plus(b.slopes, -1.0 if name == "div" else 1.0), is_factor=True)
        if name == "mul" and a.is_plain:
            a, b = b, a
        if not b.is_plain or (name == "div" and b.number == 0):
            return None
        return dataclasses.replace(a, number=None, slopes=a.slopes.each(lambda slope: self._times(slope, b, name)))

    def _negate(self, equation: Any, operands: Sequence[Form]) -> Result:
        (x,) = operands
        if x.is_factor:
            return dataclasses.replace(x, is_pure=False)
        return dataclasses.replace(x, slopes=Slopes().plus(x.slopes, -1.0))

    def _exponential(self, equation: Any, operands: Sequence[Form]) -> Result:
        (x,) = operands
        return None if x.is_factor else dataclasses.replace(x, is_factor=True)

    def _logarithm(self, equation: Any, operands: Sequence[Form]) -> Result:
        (x,) = operands
        return dataclasses.replace(x, is_factor=False) if x.is_factor else None

    def _absolute(self, equation: Any, operands: Sequence[Form]) -> Result:
        return dataclasses.replace(operands[0]) if operands[0].is_factor else None

    def _stopped(self, equation: Any, operands: Sequence[Form]) -> Result:
        return None if operands[0].varies else operands[0]

    def _convert(self, equation: Any, operands: Sequence[Form]) -> Result:
        return operands[0] if _is_floating(equation) else None

    def _larger(self, equation: Any, operands: Sequence[Form]) -> Result:
        a, b = operands
        return b if a.number == -math.inf else a if b.number == -math.inf else None

    def _select(self, equation: Any, operands: Sequence[Form]) -> Result:
        condition, *cases = operands
        # A maximum that is not finite is replaced by 0: then the loss is not finite, whatever it is.
        if len(cases) == 2 and cases[0].number == 0 and condition.key == self._finite(cases[1]):
            return cases[1]
        if not condition.is_plain or any(x.is_factor for x in cases):
            return None
        rise = self._either(condition, [x.slopes.rise for x in cases])
        maximum = self._either(condition, [x.slopes.maximum for x in cases])
        beside = self._either(condition, [x.slopes.beside for x in cases])
        if condition.key == self._has_label:
            if all(x.slopes.rise.keys() <= self._of_each_row for x in cases):
                rise = cases[1].slopes.rise  # only rows with a label rise, and they take the last case
            if math.isnan(cases[0].number or 0):
                maximum = cases[1].slopes.maximum  # the others are not numbers, whatever the maximum
        return _joined(operands, Slopes(rise, maximum, beside))

    def _either(self, condition: Form, slopes: Sequence[Slope]) -> Slope:
        total: Slope = {}
        for i, slope in enumerate(slopes):
            total = _added(total, self._of_rows(slope, "case", condition.key, i))
        return total

    def _finite(self, form: Form) -> int:
        return self._number("is_finite", _written({}), (form.key,), ())

    def _pick(self, equation: Any, operands: Sequence[Form]) -> Result:
        """Follows a gather; one that takes everything, like that of the only column, changes nothing but the shape."""
        is_whole = tuple(equation.params["slice_sizes"]) == tuple(equation.invars[0].aval.shape)
        return operands[0] if is_whole and operands[1].is_plain else self._linear(equation, operands)


def _joined(operands: Sequence[Form], slopes: Slopes, *, is_factor: bool = False, is_pure: bool = False) -> Form:
    varies, reads = any(x.varies for x in operands), any(x.reads for x in operands)
    return Form(0, None, varies, is_factor, is_pure, reads, slopes)


def _added(a: Slope, b: Slope, sign: float = 1.0) -> Slope:
    total = dict(a)
    for chain, factor in b.items():
        before = total.pop(chain, 0.0)
        after = before + sign * factor
        if abs(after) > 1e-9 * (abs(before) + abs(factor)):
            total[chain] = after
    return total


def _written(params: dict[str, Any]) -> str:
    return str(sorted((name, str(value)) for name, value in params.items()))


def _is_floating(equation: Any) -> bool:
    """Tells whether both the operand and the result of a conversion have derivatives."""
    return all(jnp.issubdtype(atom.aval.dtype, jnp.floating) for atom in (equation.invars[0], equation.outvars[0]))


_LAYOUTS = frozenset({"broadcast_in_dim", "transpose", "slice", "split", "rev", "gather", "dynamic_slice"})
_LINEAR = _LAYOUTS | {"reduce_sum", "dot_general", "concatenate", "cumsum"}
_RULES: dict[str, Any] = {
    "add": Forms._add,
    "add_any": Forms._add,
    "sub": Forms._add,
    "mul": Forms._multiply,
    "div": Forms._multiply,
    "neg": Forms._negate,
    "exp": Forms._exponential,
    "log": Forms._logarithm,
    "abs": Forms._absolute,
    "stop_gradient": Forms._stopped,
    "convert_element_type": Forms._convert,
    "max": Forms._larger,
    "select_n": Forms._select,
    "gather": Forms._pick,
}
