"""Compiled kernels executed on the CPU: `jaxops emulate`."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from rich.table import Table

import lowering
from jaxops_command.options import CommandError
from jaxops_command.output import show, show_text
from jaxops_command.user_function import chosen_by, load, run_user_code
from lowering.compiling.progress import said_if_long, shown
from lowering.describe import counted, opening
from lowering.emulation.faults import KernelFaultError
from lowering.emulation.interpreting import interpret
from lowering.emulation.report import NOTHING
from lowering.measuring.inputs import made_up

_FOUND, _NOTHING_RUNS = 1, 2
_AT_MOST = 0.1  # of the largest element: more than operands that are rounded to bfloat16 explain, even in long sums


def emulate(
    function: str,
    arg: Sequence[str] | None,
    chosen: tuple[str, Mapping[str, str]],
    operands: Path | None,
    at_most: float | None,
    options: Mapping[str, Any],
    as_json: bool,
) -> None:
    """Executes a function's kernels, and compares its results with the interpreter's."""
    fn, args = load(function, arg or ())
    args, remark = _with_values(args, operands)
    target, rule = options["target"], "be traceable and run with these arguments"

    def emulated() -> lowering.Emulation | KernelFaultError:
        with chosen_by(chosen):
            try:
                return lowering.emulate(fn, *args, **options)
            except KernelFaultError as fault:
                return fault

    def interpreted() -> Any:
        with chosen_by(chosen):
            return interpret(fn, *args, target=target)

    doing = f"executing what is compiled for {target}"
    with said_if_long(doing), shown(doing):
        emulation = run_user_code(function, rule, emulated)
        if isinstance(emulation, KernelFaultError):
            print(f"jaxops: {emulation}", file=sys.stderr)
            raise typer.Exit(_FOUND)
        fails, expected = "", jax.tree.leaves(emulation.results)
        try:
            expected = jax.tree.leaves(interpreted())
        except Exception as error:  # of any kind: the interpreter runs the user's code
            fails = _reason(error)
    pairs = zip(jax.tree_util.tree_leaves_with_path(emulation.results), expected, strict=True)
    compared = [
        {"result": jax.tree_util.keystr(path) or "result", **_compared(found, wanted)}
        for (path, found), wanted in pairs
        if not fails
    ]
    too_far = _too_far(compared, at_most)
    if as_json:
        more = {"against the interpreter": compared or fails, "too far": too_far, "arguments": remark}
        print(json.dumps({**json.loads(emulation.to_json()), **more}, indent=2))
    else:
        _show(emulation, compared, fails, is_wrong=bool(fails or too_far))
        if remark:
            show_text(remark)
    if too_far:
        print(f"jaxops: {too_far}", file=sys.stderr)
    if emulation.findings or fails or too_far:
        raise typer.Exit(_FOUND)
    if not emulation.kernels:
        raise typer.Exit(_NOTHING_RUNS)


def _show(emulation: lowering.Emulation, compared: Sequence[Mapping[str, Any]], fails: str, *, is_wrong: bool) -> None:
    """Prints what was executed and found, and how results compare with the interpreter's, or why it fails."""
    for table in emulation.tables():
        if isinstance(table, Table):
            show(table)
        elif not (is_wrong and table.plain.startswith(NOTHING)):  # the comparison has found something
            show_text(table.plain.replace('wrap the call in jaxops.use("pallas")', "give --implementation pallas"))
    if fails:
        show_text(f"Pallas' interpreter refuses it: {fails}")
    elif emulation.kernels:
        against = "JAX and Pallas' interpreter" if emulation.is_whole_program else "Pallas' interpreter"
        show(_table(compared, against))


def _too_far(compared: Sequence[Mapping[str, Any]], at_most: float | None) -> str:
    """Says which results are further from the interpreter's than they may be; "" for none."""
    apart = {one["result"]: one for one in compared if not one["same bits"]}
    nan = [name for name, one in apart.items() if one["NaN on one side"]]
    if nan:
        return f"NaN here or there, but not in both: {', '.join(nan)}"
    limit = _AT_MOST if at_most is None else at_most
    far = [name for name, one in apart.items() if not _is_within(one, limit)]
    advice = " (--at-most gives another limit)" if at_most is None else ""
    words = f"further from the interpreter's than {limit:g} of the largest element{advice}: {', '.join(far)}"
    return words if far else ""


def _is_within(one: Mapping[str, Any], at_most: float) -> bool:
    """Tells whether a result is near enough; infinities, which JSON cannot hold, are not unless they are the same."""
    difference, relative = one["difference"], one["of largest"]
    return difference == 0 or (relative is not None and relative <= at_most)


def _reason(error: Exception) -> str:
    """Returns what an interpreter says; what it raises within a callback comes behind a traceback."""
    *_, last = str(error).strip().splitlines() or [""]
    is_of_callback = "CpuCallback error" in str(error)
    return opening(last if is_of_callback else f"{type(error).__name__}: {error}", "the interpreter")


def _with_values(args: tuple[Any, ...], path: Path | None) -> tuple[tuple[Any, ...], str]:
    """Returns the arguments with arrays from a file, or random ones, in place of shapes; and a remark on these."""
    leaves, structure = jax.tree.flatten(args)
    if path is None:
        missing = [isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves]
        drawn = made_up([leaf for leaf, is_missing in zip(leaves, missing, strict=True) if is_missing])
        made = iter(drawn)
        given = [next(made) if is_missing else leaf for leaf, is_missing in zip(leaves, missing, strict=True)]
        most = max((int(x.max()) for x in drawn if jnp.issubdtype(x.dtype, jnp.integer) and x.size), default=None)
        remark = f"integer arguments were drawn from 0 to {most}: --operands FILE.npz gives others"
        return tuple(jax.tree.unflatten(structure, given)), "" if most is None else remark
    try:
        with np.load(path) as file:
            arrays = [file[name] for name in file.files]
    except (OSError, ValueError) as error:
        raise CommandError(f"--operands must be a file that numpy.savez has written; got {path}: {error}") from None
    if len(arrays) != len(leaves):
        raise CommandError(f"--operands must have {counted(len(leaves), 'array')}; got {len(arrays)}")
    types = [jnp.asarray(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf for leaf in leaves]
    for array, wanted in zip(arrays, types, strict=True):
        if array.shape != wanted.shape:
            raise CommandError(f"--operands must have shape {list(wanted.shape)}; got {list(array.shape)}")
    values = [jnp.asarray(array, wanted.dtype) for array, wanted in zip(arrays, types, strict=True)]
    return tuple(jax.tree.unflatten(structure, values)), ""


def _compared(found: Any, expected: Any) -> dict[str, Any]:
    """Returns how far results are from those of the interpreter."""
    a, b = (np.asarray(x) for x in (found, expected))
    with np.errstate(all="ignore"):
        wide = a.astype(np.float64), b.astype(np.float64)
        differs = ~((wide[0] == wide[1]) | (np.isnan(wide[0]) & np.isnan(wide[1])))
        difference = float(np.max(np.abs(wide[0] - wide[1]), where=differs, initial=0.0))
        largest = float(np.max(np.abs(wide[1]), where=np.isfinite(wide[1]), initial=0.0))
        nans = [int(np.isnan(x).sum()) for x in wide]
        one_sided = int(np.sum(np.isnan(wide[0]) != np.isnan(wide[1])))
    relative = difference / largest if largest else math.inf if difference else 0.0
    found = {"type": f"{a.dtype}{list(a.shape)}", "difference": difference, "of largest": relative}
    found["same bits"] = a.tobytes() == b.tobytes()
    found = {name: value if _is_json(value) else None for name, value in found.items()}
    return found | {"NaN": nans, "NaN on one side": one_sided}


def _is_json(value: Any) -> bool:
    """Tells whether a number is one of JSON, which has no NaN and no infinity."""
    return not isinstance(value, float) or math.isfinite(value)


def _table(compared: Sequence[Mapping[str, Any]], against: str) -> Table:
    table = Table(title=f"against {against}", title_justify="left")
    for name in ("result", "type"):
        table.add_column(name, overflow="fold")
    for name in ("difference", "of the largest"):
        table.add_column(name, justify="right")
    for one in compared:
        shown = (one["difference"], "{:.2g}"), (one["of largest"], "{:.1g}")
        numbers = ["-" if value is None else text.format(value) for value, text in shown]
        nans = f"\nNaN: {one['NaN'][0]:,} here, {one['NaN'][1]:,} there" if any(one["NaN"]) else ""
        table.add_row(one["result"], one["type"] + nans, *(["none", ""] if one["same bits"] else numbers))
    return table
