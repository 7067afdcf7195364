"""Evaluates the bodies of loops, branches, checkpoints and shard_maps again, by the public functions that made them.

A checkpoint in a backward pass is made by none: its equation is bound again, with another body.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Jaxpr

from lowering.rewriting.graph import CHECKPOINTS, Node, equations, opened

# Evaluates a body: `run(*arrays)` returns the list of its results.
Run = Callable[..., list[Any]]


def bodies_of(node: Node) -> list[Any]:
    """Returns the jaxprs of a node that `evaluate` can run in another form; empty if it has none."""
    params = node.params
    match node.name:
        case "scan" | "shard_map" | "pjit" | "jit":
            return [params["jaxpr"]]
        case name if name in CHECKPOINTS:
            return [params["jaxpr"]]
        case "cond":
            return list(params["branches"])
        case "while":
            return [params["body_jaxpr"]]
    return []


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
    with node.equation.ctx.manager:
        if node.params.get("differentiated"):
            return _computed_again(node, runs[0], operands)
        return _EVALUATED[node.name](node.params, runs, operands)


def _scan(params: dict[str, Any], runs: Sequence[Run], operands: Sequence[Any]) -> Sequence[Any]:
    constants, carries = _scan_counts(params, len(operands))
    carried = constants + carries
    shared = operands[:constants]

    def step(carry: Any, xs: Any) -> Any:
        results = runs[0](*shared, *carry, *xs)
        return tuple(results[:carries]), tuple(results[carries:])

    options = {name: params[name] for name in ("length", "reverse", "unroll", "_split_transpose") if name in params}
    carry, stacked = lax.scan(step, tuple(operands[constants:carried]), tuple(operands[carried:]), **options)
    return (*carry, *stacked)


def _scan_counts(params: dict[str, Any], operands: int) -> tuple[int, int]:
    """Counts the operands of a scan that are constants, and those that are carried."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    # From JAX 0.12 on, a tree with a leaf for each operand.
    groups = params["ft_in"].update(range(operands)).unpack()
    constants, carries, _ = (len(list(group)) for group in groups)
    return constants, carries


def _while(params: dict[str, Any], runs: Sequence[Run], operands: Sequence[Any]) -> Sequence[Any]:
    of_cond, of_body = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    condition, constants = opened(params["cond_jaxpr"])

    def goes_on(carry: Any) -> Any:
        return jax.core.eval_jaxpr(condition, constants, *operands[:of_cond], *carry)[0]

    def step(carry: Any) -> Any:
        return tuple(runs[0](*operands[of_cond:of_body], *carry))

    return lax.while_loop(goes_on, step, tuple(operands[of_body:]))


def _cond(params: dict[str, Any], runs: Sequence[Run], operands: Sequence[Any]) -> Sequence[Any]:
    def branch(run: Run) -> Callable[..., Any]:
        return lambda *arrays: tuple(run(*arrays))

    index, *rest = operands
    return lax.switch(index, [branch(run) for run in runs], *rest)


def _checkpoint(params: dict[str, Any], runs: Sequence[Run], operands: Sequence[Any]) -> Sequence[Any]:
    def body(*arrays: Any) -> Any:
        return tuple(runs[0](*arrays))

    return jax.checkpoint(body, prevent_cse=params["prevent_cse"], policy=params["policy"])(*operands)


def _computed_again(node: Node, run: Run, operands: Sequence[Any]) -> Sequence[Any]:
    """Computes what a checkpoint computes in a backward pass, which compilers must not merge with the forward one."""
    closed = jax.make_jaxpr(run)(*operands)
    names = closed.jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    invars = [*closed.jaxpr.constvars, *closed.jaxpr.invars]
    body = closed.jaxpr.replace(constvars=[], invars=invars, debug_info=names)
    return node.equation.primitive.bind(*closed.consts, *operands, **{**node.params, "jaxpr": body})


def _shard_map(params: dict[str, Any], runs: Sequence[Run], operands: Sequence[Any]) -> Sequence[Any]:
    def body(*arrays: Any) -> Any:
        return tuple(runs[0](*arrays))

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


def _jit(params: dict[str, Any], runs: Sequence[Run], operands: Sequence[Any]) -> Sequence[Any]:
    def placed(arrays: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
        pairs = zip(arrays, shardings, strict=True)
        return [lax.with_sharding_constraint(x, s) if isinstance(s, jax.sharding.Sharding) else x for x, s in pairs]

    return placed(runs[0](*placed(operands, params["in_shardings"])), params["out_shardings"])


_EVALUATED: dict[str, Callable[..., Sequence[Any]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    **dict.fromkeys(CHECKPOINTS, _checkpoint),
    "shard_map": _shard_map,
    "jit": _jit,
    "pjit": _jit,
}
