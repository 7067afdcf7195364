"""What runs: explanations as text, and digests of lowered programs, for chips that need not be here."""

import functools
import hashlib
import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import process_operators

import lowering
from benchmarks.nets.net import Cases
from jaxops import linear_cross_entropy
from jaxops._suite import SUITE
from lowering.compiling.compile import _lowered_for
from lowering.targets import named

TARGETS = ("cpu", "tpu-v5e", "tpu-v6e", "cuda-h100", "cuda-b200")
LOSSES = ((37, 24, 130, "float32"), (1024, 768, 50257, "float32"), (4096, 1024, 32768, "bfloat16"))
SHOWN_IN: Path | None = None


def functions(*, is_small: bool) -> Iterator[tuple[str, Callable[..., Any], Any]]:
    """Yields name, function and arguments of each suite case, at a small size or not, and of other operators."""
    for case in SUITE:
        for size in (case.timed_at[0], case.verified_at[-1])[: 1 + is_small]:
            args = jax.eval_shape(functools.partial(case.arguments, *size))
            yield f"{case.name} {' '.join(map(str, size))}", case.fn, args
    for name, fn, operands, _, differentiable in process_operators.operators():
        args = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
        yield f"small {name}", jax.value_and_grad(functools.partial(process_operators.total, fn), differentiable), args


def losses() -> Iterator[tuple[str, Callable[..., Any], Any]]:
    """Yields the loss, with its defaults, alone and with gradients."""
    for rows, hidden, classes, dtype in LOSSES:
        x, weight = (jax.ShapeDtypeStruct((n, hidden), jnp.dtype(dtype)) for n in (rows, classes))
        args = x, weight, jax.ShapeDtypeStruct((rows,), jnp.int32)
        name = f"loss {rows}x{hidden}x{classes} {dtype}"
        yield name, linear_cross_entropy, args
        yield f"{name}, with gradients", jax.value_and_grad(linear_cross_entropy, (0, 1)), args


def implementations(target: str) -> tuple[str, ...]:
    """What is asked for: the default, and on one chip of each platform the kernels."""
    return ("auto", "pallas") if target in ("tpu-v5e", "cuda-h100") else ("auto",)


def explanations() -> Cases:
    """Yields what `lowering.explain` says for each target: as it is, and where kernels are asked for."""
    # Rates of this machine differ from run to run; without them an explanation has no times.
    explain = importlib.import_module("lowering.explain")
    explain.with_measured_rates = lambda hardware, _: hardware
    for target in TARGETS:
        for name, fn, args in functions(is_small=True):
            for implementation in implementations(target):
                find = functools.partial(explained, fn, args, target, implementation)
                yield f"{target}, {implementation}: {name}", find


def explained(fn: Callable[..., Any], args: Any, target: str, implementation: str) -> str:
    """The lines of an explanation, without the borders of its table."""
    try:
        with lowering.use(implementation):
            explanation = lowering.explain(fn, *args, target=target)
    except lowering.NotSupportedError as error:
        return str(error)
    lines = []
    for row in explanation.rows:
        lines += [f"{row.count} x {row.operator}: {row.implementation}", f"  {', '.join(row.operands)}"]
        lines += [f"  {refusal.kernel}: {refusal.reason}" for refusal in row.refusals]
        if implementation == "auto":
            time = "" if row.seconds is None else f", {1e6 * row.seconds:.4g} us, {row.bound}"
            lines.append(f"  {row.flops} flop, {row.bytes} bytes{time}")
    return "\n".join([*lines, *explanation.remarks]) if implementation == "auto" else "\n".join(lines)


def digests() -> Cases:
    """Yields digests of the lowered programs: as they are, and of the suite where kernels are asked for."""
    for target in TARGETS:
        for implementation in implementations(target):
            for name, fn, args in (*functions(is_small=False), *losses()):
                case = f"{target}, {implementation}: {name}"
                yield case, functools.partial(_digest, case, fn, args, target, implementation)


def _digest(case: str, fn: Callable[..., Any], args: Any, target: str, implementation: str) -> str:
    try:
        text = lowered(fn, args, target, implementation)
    except lowering.NotSupportedError:
        return "refused"
    if SHOWN_IN is not None:
        SHOWN_IN.mkdir(parents=True, exist_ok=True)
        (SHOWN_IN / f"{re.sub('[^a-z0-9]+', '-', case.lower())}.txt").write_text(text)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def lowered(fn: Callable[..., Any], args: Any, target: str, implementation: str) -> str:
    """The program as StableHLO, without what changes with lines of source or with names of functions."""
    limit = jax.config.jax_traceback_in_locations_limit
    jax.config.update("jax_traceback_in_locations_limit", 0)  # kernels hold their lines, too
    try:
        with lowering.use(implementation):
            jitted = jax.jit(lambda *args: fn(*args))  # traced and lowered afresh
            if target == "cpu":
                return anonymous(jitted.lower(*args).as_text())
            return anonymous(_lowered_for(jitted, args, named(target))[0].mlir_module())
    finally:
        jax.config.update("jax_traceback_in_locations_limit", limit)


def anonymous(text: str) -> str:
    """The text without locations, and with functions numbered in place of their names."""
    text = re.sub(r' loc\((?:[^()"]|"[^"]*"|\([^()]*\))*\)', "", text)
    text = re.sub(r"(?m)^#loc.*\n", "", text)
    names: dict[str, str] = {}
    return re.sub(r"@[\w.$]+", lambda found: names.setdefault(found[0], f"@f{len(names)}"), text)
