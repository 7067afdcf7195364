"""Evaluates loops, branches, checkpoints and shard_maps again, with other bodies."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Jaxpr

from lowering import _jax_private
from lowering.rewriting.graph import CHECKPOINTS, Node, equations, opened

# Evaluates a body: `run(*arrays)` returns the list of its results.
Run = Callable[..., list[Any]]


def bodies_of(node: Node) -> list[Any]:
    """Returns the jaxprs of a node that `evaluate` can run in another form; empty if it has none."""
    found = node.params[_BODIES[node.name]] if node.name in _BODIES else []
    return list(found) if isinstance(found, tuple) else [found] if found else []


def keeps_each(node: Node, is_outside: bool) -> bool:
    """Tells whether bodies run in a loop whose backward pass keeps values of each step; `is_outside` for the node."""
    if node.name in CHECKPOINTS:
        return False
    return is_outside or (node.name == "scan" and node.params["length"] > 1)


def draws_again(jaxpr: Jaxpr) -> bool:
    """Tells whether a backward pass in it computes something again, with random bits."""
    again = (x for x in equations(jaxpr) if x.primitive.name in CHECKPOINTS and x.params["differentiated"])
    return any(inner.primitive.name == "random_bits" for x in again for inner in equations(x.params["jaxpr"]))


def closed_because(node: Node) -> str:
    """Says why the body of a node cannot be rewritten; empty if there is nothing to be said about it."""
    if node.name.startswith("custom_"):
        return "it is inside a function with a derivative of its own, which would be lost"
    return ""


def evaluate(node: Node, runs: Sequence[Run], operands: Sequence[Any]) -> Sequence[Any]:
    """Computes the results of a node, with `runs` in place of its bodies."""
    if node.name in _CALLED:
        with node.equation.ctx.manager:
            return _CALLED[node.name](node.params, runs[0], operands)
    traced = [_traced(run, body) for run, body in zip(runs, bodies_of(node), strict=True)]
    constants: Sequence[Any] = ()
    bodies: Any = tuple(traced) if node.name == "cond" else traced[0]
    if node.name in CHECKPOINTS:
        jaxpr, constants = opened(bodies)
        names = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
        bodies = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars], debug_info=names)
    equation = node.equation.replace(params={**node.params, _BODIES[node.name]: bodies})
    return _jax_private.evaluate(equation, [*constants, *operands], node.site.users.traceback)


def _traced(run: Run, body: Any) -> Any:
    return jax.make_jaxpr(run)(*(x.aval for x in opened(body)[0].invars))


def _shard_map(params: dict[str, Any], run: Run, operands: Sequence[Any]) -> Sequence[Any]:
    def body(*arrays: Any) -> Any:
        return tuple(run(*arrays))

    # Called inside another shard_map, it takes the mesh from there, with the axes that are manual already.
    is_nested = not jax.sharding.get_abstract_mesh().empty and bool(jax.sharding.get_abstract_mesh().manual_axes)
    return jax.shard_map(
        body,
        mesh=None if is_nested else params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        check_vma=params["check_vma"],
        axis_names=set(params["newly_manual_axes"] if "newly_manual_axes" in params else params["manual_axes"]),
    )(*operands)


def _jit(params: dict[str, Any], run: Run, operands: Sequence[Any]) -> Sequence[Any]:
    def placed(arrays: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
        pairs = zip(arrays, shardings, strict=True)
        return [lax.with_sharding_constraint(x, s) if isinstance(s, jax.sharding.Sharding) else x for x, s in pairs]

    return placed(run(*placed(operands, params["in_shardings"])), params["out_shardings"])


# The parameters that hold bodies.
_BODIES = {
    **dict.fromkeys(("scan", "shard_map", "pjit", "jit", *CHECKPOINTS), "jaxpr"),
    "cond": "branches",
    "while": "body_jaxpr",
}
# What becomes a call of the public function again, or is inlined.
_CALLED = {"shard_map": _shard_map, "jit": _jit, "pjit": _jit}
