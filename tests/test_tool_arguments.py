"""What the tools of `lowering` refuse of their own arguments, in one sentence each."""

from typing import Any

import jax.numpy as jnp
import pytest

import jaxops
import lowering
from pallas_kernels.kernel import Kernel

KERNEL = Kernel("mine", "cpu", run=lambda *operands, **params: None, refuses=lambda *_, **params: None)
SOFTMAX = next(operator for operator in jaxops.operators() if operator.name == "softmax")
FN = "fn must be a function or an operator; got a value of type str"
TARGET = r"target must be one of cpu, .*; got"
REFUSALS: dict[str, tuple[Any, type[Exception], str]] = {
    "explain-fn": (lambda: lowering.explain("fn", 1.0), TypeError, FN),
    "compile-fn": (lambda: lowering.compile("fn", 1.0, target="cpu"), TypeError, FN),
    "export-fn": (lambda: lowering.export("fn", 1.0), TypeError, FN),
    "tune-fn": (lambda: lowering.tune("fn", 1.0), TypeError, FN),
    "explain-target": (lambda: lowering.explain(jnp.sin, 1.0, target=3), ValueError, f"{TARGET} 3"),
    "compile-target": (lambda: lowering.compile(jnp.sin, 1.0, target=["cpu"]), ValueError, rf"{TARGET} \['cpu'\]"),
    "platforms": (lambda: lowering.export(jnp.sin, 1.0, platforms=3), lowering.ArtifactError, "platforms must be .* 3"),
    "repeats": (lambda: lowering.tune(jnp.sin, 1.0, repeats=0.5), lowering.TuningError, "repeats must be .* got 0.5"),
    "budget": (
        lambda: lowering.tune(jnp.sin, 1.0, budget_seconds="x"),
        lowering.TuningError,
        "budget_seconds must be a positive number; got 'x'",
    ),
    "load": (lambda: lowering.load(3), lowering.ArtifactError, "load: path must be a string or a path; got 3"),
    "load-tuned": (lambda: lowering.TuningResult.load(3), lowering.TuningError, "load: '3' must be a file"),
    "using": (lambda: lowering.using(3).__enter__(), TypeError, "using: selection must be .* a value of type int"),
    "availability": (lambda: lowering.availability("cpu"), TypeError, "availability: hardware must be .* got 'cpu'"),
    "register": (lambda: lowering.register(3), TypeError, "register: operator must be .* got a value of type int"),
    "add_kernel": (lambda: lowering.add_kernel(3, KERNEL), TypeError, "add_kernel: operator must be .* type int"),
    "remove_kernel": (
        lambda: lowering.remove_kernel(SOFTMAX, KERNEL),
        ValueError,
        "remove_kernel: kernel must be one that was added to softmax",
    ),
}


@pytest.mark.parametrize(("call", "error", "words"), REFUSALS.values(), ids=REFUSALS)
def test_tools_refuse_bad_arguments_in_one_sentence(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as refusal:
        call()
    assert "\n" not in str(refusal.value)
