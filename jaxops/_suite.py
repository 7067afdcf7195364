"""Default suite of `jaxops tune`: the cases that stand beside each operator, with every kernel."""

import importlib
import importlib.util
from collections.abc import Sequence

from jaxops._primitive.operator import operators
from lowering.campaign.suite import Case


def families() -> list[str]:
    """Lists the files and folders of `jaxops` that operators are defined in, by name."""
    functions = [operator.reference for operator in operators()]
    modules = (getattr(fn, "func", fn).__module__.split(".") for fn in functions)
    return sorted({parts[1] for parts in modules if parts[0] == "jaxops"})


def _of(family: str) -> Sequence[Case]:
    """Returns `SUITE` of a family: from its module `suite` if it is a folder, or else from its only one."""
    module = importlib.import_module(f"jaxops.{family}")
    if hasattr(module, "__path__") and importlib.util.find_spec(f"jaxops.{family}.suite"):
        module = importlib.import_module(f"jaxops.{family}.suite")
    return getattr(module, "SUITE", ())


SUITE = tuple(case for family in families() for case in _of(family))
