"""Values of a jaxpr as polynomials of arrays, so that formulas are recognised however they are written."""

import dataclasses
from collections.abc import Callable, Container, Iterable
from typing import Any

import jax.numpy as jnp

from lowering.patterns import RESHAPES, Value, unshaped

# An array or a product of two, and the coefficients of products: None where one is only known when it runs.
Monomial = tuple[Value, ...]
Polynomial = dict[Monomial, float | None]

# Longer sums than optimizers have are not followed to their end.
_DEPTH = 20


@dataclasses.dataclass(frozen=True)
class Expansion:
    """How values are taken apart into sums of products, without their constants.

    Attributes:
      size: of the arrays in question; what is broadcast to them are coefficients.
      atoms: values that are not taken apart.
      varying: values that are no coefficients.
    """

    size: Any
    atoms: Container[Value] = ()
    varying: Container[Value] = ()

    def terms(self, value: Value) -> Polynomial:
        """The value as a polynomial, be it that of an atom alone."""
        return _without_constant(self._terms(value, {}, _DEPTH))

    def apart(self, value: Value) -> Polynomial:
        """The same, taking apart the value itself even where it is an atom."""
        return _without_constant(self._apart(value, {}, _DEPTH))

    def is_number(self, value: Value) -> bool:
        """Whether a value is a coefficient: broadcast, or beside arrays of one element what a count gives."""
        number = unshaped(value)
        if number in self.varying:
            return False
        return bool(number.size != self.size) or number.is_counted

    def unscaled(self, value: Value) -> Value:
        """The value before numbers were multiplied to it."""
        while (operation := value.producer) is not None and value not in self.atoms:
            is_divided = operation.name in ("mul", "div") and self.is_number(operation.inputs[1])
            if is_divided or operation.name in RESHAPES or operation.name == "neg":
                value = operation.inputs[0]
            elif operation.name == "mul" and self.is_number(operation.inputs[0]):
                value = operation.inputs[1]
            else:
                break
        return value

    def _terms(self, value: Value, known: dict[Value, Polynomial], depth: int) -> Polynomial:
        if value in self.atoms:
            return {(value,): 1.0}
        if self.is_number(value):
            return {(): _coefficient(value)}
        if value not in known:
            known[value] = self._apart(value, known, depth) if depth else {(value,): 1.0}
        return known[value]

    def _apart(self, value: Value, known: dict[Value, Polynomial], depth: int) -> Polynomial:
        """The terms of what an operation made of its operands."""
        operation = value.producer
        if operation is None:
            return {(value,): 1.0}

        def terms(operand: Value) -> Polynomial:
            return self._terms(operand, known, depth - 1)

        inputs = operation.inputs
        match operation.name, operation.params.get("y"):
            case (("add" | "add_any"), _):
                return _sum(terms(inputs[0]), terms(inputs[1]))
            case "sub", _:
                return _sum(terms(inputs[0]), _scaled(terms(inputs[1]), -1.0))
            case "neg", _:
                return _scaled(terms(inputs[0]), -1.0)
            case "select_n", _:
                return _either([terms(case) for case in inputs[1:]])
            case ("square", _) | ("integer_pow", 2):
                return self._product(inputs[0], inputs[0], terms)
            case "mul", _:
                return self._product(inputs[0], inputs[1], terms)
            case "div", _ if self.is_number(inputs[1]):
                divisor = _coefficient(inputs[1])
                return _scaled(terms(inputs[0]), 1 / divisor if divisor else None)
        return terms(inputs[0]) if operation.name in RESHAPES else {(value,): 1.0}

    def _product(self, left: Value, right: Value, terms: Callable[[Value], Polynomial]) -> Polynomial:
        """Scales one factor by the other if that is a number; otherwise the factors are not taken apart."""
        for factor, other in ((left, right), (right, left)):
            if self.is_number(factor):
                return _scaled(terms(other), _coefficient(factor))
        factors = sorted((self.unscaled(left), self.unscaled(right)), key=id)
        return {tuple(factors): None}


def is_square(monomial: Monomial) -> bool:
    """Whether this is the square of one array."""
    return len(monomial) == 2 and monomial[0] is monomial[1]


def only(monomials: Iterable[Monomial]) -> Value | None:
    """The array that is the only term, if there is one, and it is no product."""
    terms = list(monomials)
    return terms[0][0] if len(terms) == 1 and len(terms[0]) == 1 else None


def _without_constant(terms: Polynomial) -> Polynomial:
    return {monomial: weight for monomial, weight in terms.items() if monomial}


def _coefficient(value: Value) -> float | None:
    number = unshaped(value)
    if number.number is None or jnp.issubdtype(number.aval.dtype, jnp.complexfloating):
        return None
    return float(number.number)


def _times(left: float | None, right: float | None) -> float | None:
    return None if left is None or right is None else left * right


def _scaled(terms: Polynomial, factor: float | None) -> Polynomial:
    return {monomial: _times(weight, factor) for monomial, weight in terms.items()}


def _sum(left: Polynomial, right: Polynomial) -> Polynomial:
    total = left | right
    for monomial in left.keys() & right.keys():
        weights = (left[monomial], right[monomial])
        total[monomial] = None if weights[0] is None or weights[1] is None else weights[0] + weights[1]
    return total


def _either(cases: list[Polynomial]) -> Polynomial:
    """What any of the cases has, with a weight only where they agree."""
    monomials = [monomial for case in cases for monomial in case]
    weights = {x: {case[x] for case in cases if x in case} for x in dict.fromkeys(monomials)}
    return {monomial: next(iter(known)) if len(known) == 1 else None for monomial, known in weights.items()}
