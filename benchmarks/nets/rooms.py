"""How many files, functions and changes of file a call of the loss enters, and how large its package is."""

import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import jaxops
from benchmarks.nets import compiled, programs
from benchmarks.nets.net import Cases

ROOT = Path(jaxops.__file__).parents[1]
OURS = tuple(f"{ROOT / package}{os.sep}" for package in ("jaxops", "lowering", "pallas_kernels"))
LOSS = ROOT / "jaxops" / "linear_cross_entropy"
APART = ("rewriting", "rewrites.py")


def counts() -> Cases:
    """Yields the counts; each is found in a process of its own, in which nothing is cached."""
    for target in ("cpu", "tpu-v5e"):
        yield f"value_and_grad traced and lowered for {target}", lambda target=target: _afresh(entered, target)
    yield "lines of the loss's package, without rewriting", lines
    yield "operators of the loss", operators


def _afresh(fn: Callable[..., Any], *args: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(fn, *args).result()


def entered(target: str) -> dict[str, int]:
    """Counts what lowering the loss and its gradients calls."""
    ((_, fn, args),) = compiled.losses([(4096, 1024, 32768, "bfloat16", {})])
    functions: set[Any] = set()
    path: list[str] = []

    def enter(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(OURS):
            functions.add((code.co_filename, code.co_firstlineno))
            path.append(code.co_filename)

    sys.setprofile(enter)
    try:
        programs.lowered(fn, args, target, "auto")
    finally:
        sys.setprofile(None)
    changes = sum(one != other for one, other in itertools.pairwise(path))
    return {"files": len(set(path)), "functions": len(functions), "changes of file": changes}


def lines() -> int:
    """Counts lines of source."""
    files = [file for file in LOSS.rglob("*.py") if file.relative_to(LOSS).parts[0] not in APART]
    return sum(len(file.read_text().splitlines()) for file in files)


def operators() -> int:
    """Counts primitives whose checks or references the package defines."""
    package = LOSS.relative_to(ROOT).as_posix().replace("/", ".")
    functions = ("check", "reference", "meaning")
    return sum(
        any(getattr(getattr(operator, name, None), "__module__", "").startswith(package) for name in functions)
        for operator in jaxops.operators()
    )
