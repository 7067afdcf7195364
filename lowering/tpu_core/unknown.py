"""Values that come from data, and what has been decided about them."""

import itertools
from typing import Any

_MOST_WAITING = 64  # questions; what a branch skips is decided soon after, and most others never are
_SERIALS = itertools.count()


class Unknown:
    """A value that comes from data: whatever is computed of it is unknown as well, and it decides nothing by itself.

    Attributes:
      question: whose answer says whether the value is true. Two comparisons of the same value with the same number ask
        the same, so that one decision answers both.
      negated: whether the value is true where the answer is no.
    """

    __slots__ = ("_serial", "negated", "question")

    def __init__(self, question: tuple[Any, ...] | None = None, *, negated: bool = False) -> None:
        """Makes a new one; without a question, the value is true if it is not 0."""
        self._serial = next(_SERIALS)
        self.question = (self._serial, "eq", 0) if question is None else question
        self.negated = question is None or negated

    def _new(self, *_: Any) -> "Unknown":
        return Unknown()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = _new
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _new
    __hash__ = object.__hash__

    def _compared(self, relation: str, other: Any, *, negated: bool = False) -> "Unknown":
        if isinstance(other, Unknown):
            other = "value", other._serial
        return Unknown((self._serial, relation, other), negated=negated)

    def __lt__(self, other: Any) -> Any:
        return self._compared("lt", other)

    def __ge__(self, other: Any) -> Any:
        return self._compared("lt", other, negated=True)

    def __le__(self, other: Any) -> Any:
        return self._compared("le", other)

    def __gt__(self, other: Any) -> Any:
        return self._compared("le", other, negated=True)

    def __eq__(self, other: Any) -> Any:
        return self._opposite() if _is(other, 0) else self._compared("eq", other)

    def __ne__(self, other: Any) -> Any:
        return self if _is(other, 0) else self._compared("eq", other, negated=True)

    def _opposite(self) -> "Unknown":
        return Unknown(self.question, negated=not self.negated)

    def __and__(self, other: Any) -> Any:
        if _is(other, 0):
            return other  # a false predicate, or a mask of nothing
        return self if other is True or (_is(other, 255) and self._is_truth()) else Unknown()

    def __or__(self, other: Any) -> Any:
        return other if other is True else self if _is(other, 0) else Unknown()

    def __xor__(self, other: Any) -> Any:
        return self._opposite() if other is True else self if _is(other, 0) else Unknown()

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def _is_truth(self) -> bool:
        """Tells whether it is 0 or 1 because it answers a question about another value."""
        return self.question[0] != self._serial

    def __bool__(self) -> bool:
        raise TypeError("an unknown value decides nothing")


def selected(condition: Any, on_true: Any, on_false: Any) -> Any:
    """Selects one of two values; 1 and 0 are the condition itself, as a number."""
    if isinstance(condition, Unknown):
        return condition if _is(on_true, 1) and _is(on_false, 0) else Unknown()
    return on_true if condition else on_false


def _is(value: Any, number: int) -> bool:
    return isinstance(value, int) and value == number


class Answers:
    """Decisions made about unknown values, and the values that wait for one."""

    def __init__(self, held: list[Any]) -> None:
        """Takes the values of a program, by their places."""
        self._held = held
        self._given: dict[tuple[Any, ...], bool] = {}
        self._waiting: dict[tuple[Any, ...], list[tuple[int, Unknown, Any, Any]]] = {}

    def known(self, value: Unknown) -> bool | None:
        """Tells whether a value is true; None if nothing was decided about it."""
        answer = self._given.get(value.question)
        return None if answer is None else answer != value.negated

    def give(self, value: Unknown, *, is_true: bool) -> None:
        """Decides that a value is true or not."""
        answer = self._given[value.question] = is_true != value.negated
        for place, waiting, if_yes, if_no in self._waiting.pop(value.question, ()):
            if self._held[place] is waiting:
                self._held[place] = if_yes if answer else if_no

    def wait(self, value: Unknown, place: int, if_true: Any, if_false: Any) -> None:
        """Leaves it open which of two values a place holds until it is decided whether another value is true."""
        waiting = self._held[place] = Unknown()
        either = (if_false, if_true) if value.negated else (if_true, if_false)
        self._waiting.setdefault(value.question, []).append((place, waiting, *either))
        if len(self._waiting) > _MOST_WAITING:
            del self._waiting[next(iter(self._waiting))]
