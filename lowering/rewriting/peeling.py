"""Takes the last product out of a checkpoint that returns logits, so that it is read together with what follows."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, Literal

CHECKPOINTS = frozenset({"remat2", "checkpoint", "remat"})
PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})


class Peeled(NamedTuple):
    """A checkpoint in two parts.

    Attributes:
      equation: the checkpoint of what comes before; None if nothing does.
      tail: what follows, as a jaxpr of the checkpoint's operands and of the results of `equation`.
    """

    equation: Any
    tail: Jaxpr


def peeled(equation: Any, is_large: Callable[[Any], bool]) -> Peeled | None:
    """Returns the two parts of a checkpoint that returns the result of a large product; None for anything else."""
    if equation.primitive.name not in CHECKPOINTS or equation.params["differentiated"]:
        return None
    body = equation.params["jaxpr"]
    body = getattr(body, "jaxpr", body)
    dependent: set[Any] = set()
    before, behind = [], []
    for inner in body.eqns:
        starts = inner.primitive.name in PRODUCTS and any(is_large(x.aval) for x in inner.outvars)
        if starts or any(not isinstance(x, Literal) and x in dependent for x in inner.invars):
            dependent.update(inner.outvars)
            behind.append(inner)
        else:
            before.append(inner)
    returned = [x for x in body.outvars if not isinstance(x, Literal)]
    if not any(x in dependent and is_large(x.aval) for x in returned) or any(inner.effects for inner in behind):
        return None
    read = {x for inner in behind for x in inner.invars if not isinstance(x, Literal)} | set(returned)
    outvars = [x for inner in before for x in inner.outvars if x in read]
    names = body.debug_info._replace(arg_names=None, result_paths=None)
    tail = body.replace(eqns=behind, constvars=[], invars=[*body.invars, *outvars], debug_info=names)
    if not outvars:
        return Peeled(None, tail)
    kept = body.replace(eqns=before, outvars=outvars, debug_info=names)
    return Peeled(equation.replace(params={**equation.params, "jaxpr": kept}, outvars=outvars), tail)
