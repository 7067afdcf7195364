"""The documented enumerations. Wherever one is an argument, a member, its name and its number will do."""

import enum
from typing import TypeVar

from jaxops._errors import BAD_PARAM, require


class PoolingMode(enum.IntEnum):
    """What becomes of a window."""

    MAX = 0
    AVERAGE_COUNT_INCLUDE_PADDING = 1
    AVERAGE_COUNT_EXCLUDE_PADDING = 2
    MAX_DETERMINISTIC = 3


class NanPropagation(enum.IntEnum):
    """Whether NaN counts, or is passed over as if it were minus infinity."""

    NOT_PROPAGATE_NAN = 0
    PROPAGATE_NAN = 1


Enumeration = TypeVar("Enumeration", bound=enum.IntEnum)


def member(operator: str, argument: str, enumeration: type[Enumeration], value: object) -> Enumeration:
    """The member that a value names; BadParamError if there is none."""
    names, numbers = isinstance(value, str), type(value) in (int, enumeration)
    named = [one for one in enumeration if (names and one.name == value) or (numbers and one == value)]
    rule = f"be one of {', '.join(one.name for one in enumeration)}"
    require(bool(named), operator, argument, rule, value, status=BAD_PARAM)
    return named[0]
