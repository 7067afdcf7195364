"""Measurements on the device at hand: `jaxops tune` with a function, and `jaxops bench`."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import typer

import lowering
from jaxops_command import device
from jaxops_command.options import IMPLEMENTATIONS, require
from jaxops_command.output import show, show_text, tuned_by
from jaxops_command.user_function import load, load_another, require_operators, run_user_code
from lowering.measuring.bench import compare
from lowering.measuring.timing import INTERRUPTED


def tune(function: str, arg: Sequence[str] | None, how: Mapping[str, Any], as_json: bool) -> None:
    """Measures the operators of a function; `how` are the other arguments of `lowering.tune`."""
    fn, args = load(function, arg or ())
    rule = "be traceable and its operators run here"
    result = run_user_code(function, rule, lambda: lowering.tune(fn, *args, **how))
    if as_json:
        print(result.to_json())
    elif result.entries or result.stopped:
        show(result.table())
    else:
        print(f"{function} has none of this library's operators: there is nothing to tune")
    if result.stopped == INTERRUPTED:
        kept = "" if how["path"] is None else f", which {how['path']} keeps"
        print(f"jaxops: interrupted after {len(result.entries)} of the function's operators{kept}", file=sys.stderr)
        raise typer.Exit(device.INTERRUPTED_STATUS)


def bench(
    functions: Sequence[str],
    arg: Sequence[str] | None,
    names: Sequence[str],
    by_operator: Mapping[str, str],
    rewrite: bool,
    gradients: bool,
    tuned: Path | None,
    repeats: int,
    output: Path | None,
    as_json: bool,
) -> None:
    """Times two functions, a function and its rewrite, or a function under several implementations."""
    first, *others = functions
    fn, args = load(first, arg or ())
    require_operators(by_operator)
    taking = {first: (fn, args), **{other: load_another(other, args, may_have_own=not arg) for other in others}}
    if rewrite:
        taking[f"{first}, rewritten"] = lowering.rewrite(fn), args
    if gradients:
        taking = {
            name: (jax.value_and_grad(one, _positions_of_floats(name, own)), own) for name, (one, own) in taking.items()
        }
    compared = {name: one for name, (one, _) in taking.items()}
    if len(compared) == 1:
        compared = {"": next(iter(compared.values()))}
    elif any(_types(own) != _types(args) for _, own in taking.values()):
        args = tuple(own for _, own in taking.values())
        compared = {name: _of_its_own(one, position) for position, (name, one) in enumerate(compared.items())}
    names = names or (IMPLEMENTATIONS if len(compared) == 1 else ["auto"])
    with tuned_by(tuned):
        result = run_user_code(
            first,
            "run here with these arguments",
            lambda: compare(compared, *args, implementations=names, by_operator=by_operator, repeats=repeats),
        )
    if output is not None:
        output.write_text(result.to_json() + "\n")
    if as_json:
        print(result.to_json())
        return
    show(result.table())
    if result.compares_nothing:
        another = "" if len(compared) > 1 else ": name a second function, or pass --rewrite"
        show_text(f"these are one program on {result.device}, so there is nothing to compare{another}")


def _types(args: Sequence[Any]) -> tuple[Any, ...]:
    """Returns what arguments have in common that the same function can take."""
    leaves, structure = jax.tree.flatten(list(args))
    return structure, *((jnp.shape(leaf), jnp.result_type(leaf)) if hasattr(leaf, "dtype") else leaf for leaf in leaves)


def _of_its_own(fn: Callable[..., Any], position: int) -> Callable[..., Any]:
    """Returns a function of the arguments of all functions, which takes those at its position."""
    return lambda *of_all: fn(*of_all[position])


def _positions_of_floats(function: str, args: Sequence[Any]) -> tuple[int, ...]:
    """Returns the positions of the arguments that have a gradient: those with floating-point leaves alone."""
    leaves = map(jax.tree.leaves, args)
    kinds = ({jnp.issubdtype(jnp.result_type(leaf), jnp.floating) for leaf in of_one} for of_one in leaves)
    positions = tuple(position for position, kind in enumerate(kinds) if kind == {True})
    require(bool(positions), "--gradients", f"be given where {function} has floating-point arguments", "none")
    return positions
