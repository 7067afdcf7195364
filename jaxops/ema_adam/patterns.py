"""A step of Adam, after which the new parameters are averaged."""

from collections.abc import Iterable, Iterator

from jaxops.ema_adam.polynomials import Expansion, Monomial, Polynomial, is_square, only
from lowering.patterns import RESHAPES, Finding, Graph, Operation, Pattern, Value, forward

_SUMS = frozenset({"add", "add_any", "sub", "select_n"})


def _find(graph: Graph) -> Iterator[Finding]:
    """Roots of a second moment whose direction updates parameters that are then averaged."""
    roots = {direction: root for root in graph.named("sqrt", "rsqrt", "pow") for direction in _directions(root)}
    # A factor that depends on the direction itself, such as LAMB's ratio of norms, makes another optimizer of it.
    varying = forward(roots, lambda *_: True)
    updated: dict[Value, list[Value]] = {}
    for value in _sums(graph, roots):
        directions = _directions_of_update(Expansion(value.size, roots, varying).apart(value), roots)
        if directions:
            updated[value] = directions
    found = set()
    for average in _sums(graph, updated):
        for new in _averaged(Expansion(average.size, updated, varying).apart(average), updated):
            for root in dict.fromkeys(roots[direction] for direction in updated[new]):
                if root not in found:
                    found.add(root)
                    yield Finding(root, _detail(average))


def _detail(average: Value) -> str:
    averaged_on = f" on {average.producer.source}" if average.producer is not None else ""
    return f"Adam on an array of parameters that are averaged afterwards{averaged_on}"


def _directions(root: Operation) -> Iterator[Value]:
    """The quotients of a first moment and this root, if it is one of a second moment of the same gradient."""
    if root.name == "pow" and root.inputs[1].number != 0.5:
        return
    moment = Expansion(root.outputs[0].size).terms(root.inputs[0])
    gradients = {monomial[0] for monomial in moment if is_square(monomial)}
    old = [monomial for monomial in moment if not is_square(monomial)]
    if gradients and (not old or only(old)):
        for numerator, quotient in _quotients(root):
            if _is_first_moment(numerator, gradients, only(old)):
                yield quotient


def _quotients(root: Operation) -> Iterator[tuple[Value, Value]]:
    """Each numerator that the root, eps added, divides, and the quotient."""
    (output,) = root.outputs
    is_number = Expansion(output.size).is_number
    waiting, seen = [(output, root.name == "rsqrt")], {output}
    while waiting:
        value, is_inverse = waiting.pop()
        for user in value.users:
            if not user.outputs:
                continue
            result = user.outputs[0]
            arrays = [x for x in user.inputs if x is not value and not is_number(x)]
            is_divisor = user.name == "div" and user.inputs[1] is value
            if len(arrays) == 1 and ((user.name == "mul" and is_inverse) or (is_divisor and not is_inverse)):
                yield arrays[0], result
            elif result not in seen and (user.name == "select_n" or _is_scaling(user, arrays)):
                seen.add(result)
                waiting.append((result, is_inverse != is_divisor))


def _is_scaling(operation: Operation, other_arrays: list[Value]) -> bool:
    return not other_arrays and operation.name in RESHAPES | {"add", "mul", "div"}


def _is_first_moment(value: Value, gradients: set[Value], second_moment: Value | None) -> bool:
    """Whether this averages the gradients with one other array, or with none where both moments start from 0."""
    expansion = Expansion(value.size, gradients)
    terms = expansion.terms(value)
    averaged: set[Monomial] = {(gradient,) for gradient in gradients}
    old = only(terms.keys() - averaged)
    if not terms.keys() >= averaged or len(terms) != len(averaged) + (second_moment is not None):
        return False
    if second_moment is not None and (old is None or old is second_moment):
        return False
    # Nesterov's variant adds the gradient a second time, to a moment that has it already.
    last = expansion.unscaled(value).producer
    if last is None or last.name not in _SUMS:
        return False
    parts = [expansion.terms(x).keys() for x in last.inputs]
    return not any(all(monomial in part for part in parts) for monomial in averaged)


def _directions_of_update(terms: Polynomial, directions: Iterable[Value]) -> list[Value]:
    """The directions in which a sum moves one array, if it does nothing else."""
    used = [x for x in directions if (x,) in terms]
    old = only(monomial for monomial in terms if monomial[0] not in used)
    return used if old is not None else []


def _averaged(terms: Polynomial, updated: Iterable[Value]) -> list[Value]:
    """The new parameters of which a sum is an average with one other array."""
    new = [x for x in updated if (x,) in terms]
    old = only(monomial for monomial in terms if monomial[0] not in new)
    if not new or old is None:
        return []
    weights = [weight for weight in terms.values() if weight is not None]
    if len(weights) < len(terms):
        return new if all(0 < weight < 1 for weight in weights) else []
    # In 16 bits 0.9999 is 1.
    return new if all(weight > 0 for weight in weights) and abs(sum(weights) - 1) < 0.01 else []


def _sums(graph: Graph, values: Iterable[Value]) -> list[Value]:
    """What these values are added to, scaled or not, in the order of the graph."""
    reached = forward(values, lambda operation, _: operation.name in _SUMS | RESHAPES | {"mul", "div", "neg"})
    return [x for operation in graph.operations if operation.name in _SUMS for x in operation.outputs if x in reached]


ADAM_AND_AVERAGE = Pattern("Adam and an average of the parameters", "jaxops.ema_adam", _find)
