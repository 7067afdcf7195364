"""What the tools of `lowering` refuse of their own arguments, in one sentence each."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
import lowering
from lowering.describe import show
from lowering.measuring.bench import bench
from pallas_kernels.kernel import Kernel

KERNEL = Kernel("mine", "cpu", run=lambda *operands, **params: None, refuses=lambda *_, **params: None)
SOFTMAX = next(operator for operator in jaxops.operators() if operator.name == "softmax")
FN = "fn must be a function or an operator; got 'fn'"
TARGET = r"target must be one of cpu, .*; got"
REFUSALS: dict[str, tuple[Any, type[Exception], str]] = {
    "explain-fn": (lambda: lowering.explain("fn", 1.0), TypeError, FN),
    "compile-fn": (lambda: lowering.compile("fn", 1.0, target="cpu"), TypeError, FN),
    "export-fn": (lambda: lowering.export("fn", 1.0), TypeError, FN),
    "tune-fn": (lambda: lowering.tune("fn", 1.0), TypeError, FN),
    "explain-target": (lambda: lowering.explain(jnp.sin, 1.0, target=3), ValueError, f"{TARGET} 3"),
    "compile-target": (lambda: lowering.compile(jnp.sin, 1.0, target=["cpu"]), ValueError, rf"{TARGET} \['cpu'\]"),
    "near-target": (
        lambda: lowering.explain(jnp.sin, 1.0, target="tpu-v6"),
        ValueError,
        r"'tpu-v6', did you mean tpu-v6e\?",
    ),
    "two-near-targets": (
        lambda: lowering.explain(jnp.sin, 1.0, target="tpu-v5"),
        ValueError,
        r"'tpu-v5', did you mean tpu-v5e or tpu-v5p\?$",
    ),
    "other-chip": (lambda: lowering.explain(jnp.sin, 1.0, target="tpu-v99"), ValueError, "'tpu-v99'$"),
    "other-emulated-chip": (lambda: jaxops.use("emulate:tpu-v5p"), ValueError, "'emulate:tpu-v5p'$"),
    "chip-alone": (
        lambda: lowering.explain(jnp.sin, 1.0, target="H100"),
        ValueError,
        r"'H100', did you mean cuda-h100\?$",
    ),
    "near-implementation": (lambda: jaxops.use("palas"), ValueError, "got 'palas', did you mean pallas?"),
    "near-operator": (
        lambda: jaxops.use(softmaxx="pallas"),
        ValueError,
        r"^use: operator must be one of \d+ names; got 'softmaxx', did you mean softmax\?$",
    ),
    "platforms": (lambda: lowering.export(jnp.sin, 1.0, platforms=3), lowering.ArtifactError, "platforms must be .* 3"),
    "repeats": (lambda: lowering.tune(jnp.sin, 1.0, repeats=0.5), lowering.TuningError, "repeats must be .* got 0.5"),
    "budget": (
        lambda: lowering.tune(jnp.sin, 1.0, budget_seconds="x"),
        lowering.TuningError,
        "budget_seconds must be a positive number; got 'x'",
    ),
    "no-budget": (lambda: lowering.tune(jnp.sin, 1.0, budget_seconds=True), lowering.TuningError, "number; got True"),
    "huge-budget": (lambda: lowering.tune(jnp.sin, 1.0, budget_seconds=10**400), lowering.TuningError, "of 1329 bits"),
    "true-repeats": (lambda: lowering.tune(jnp.sin, 1.0, repeats=True), lowering.TuningError, "integer; got True"),
    "progress": (lambda: lowering.tune(jnp.sin, 1.0, progress="no"), lowering.TuningError, "bool or None; got 'no'"),
    "again": (lambda: lowering.tune(jnp.sin, 1.0, again=1), lowering.TuningError, "again must be a bool; got 1"),
    "tune-path": (lambda: lowering.tune(jnp.sin, 1.0, path=3), lowering.TuningError, "path must be a string.*; got 3"),
    "by": (
        lambda: lowering.tune(jnp.sin, 1.0, by=np.ones(2)),
        lowering.TuningError,
        r"by must be .*; got float64\[2\]",
    ),
    "schedule": (
        lambda: lowering.compile(jnp.sin, 1.0, target="cpu", schedule=1),
        lowering.CompileError,
        "bool; got 1",
    ),
    "trip_counts": (
        lambda: lowering.compile(jnp.sin, 1.0, target="cpu", trip_counts=np.ones(2)),
        lowering.CompileError,
        r"trip_counts must be a mapping; got float64\[2\]",
    ),
    "topology": (lambda: lowering.explain(jnp.sin, 1.0, target=f"tpu-v5e:{'9' * 5000}"), ValueError, "9{39}'$"),
    "save-long": (lambda: lowering.TuningResult().save("z" * 5000), lowering.TuningError, "got File name too long"),
    "save-nul": (lambda: lowering.TuningResult().save("a\0b"), lowering.TuningError, "got ValueError: .*null"),
    "save-artifact": (
        lambda: lowering.export(jnp.sin, 1.0).save("no folder/file"),
        lowering.ArtifactError,
        "save: path must name a file that can be written; got 'no folder/file': No such file or directory",
    ),
    "huge-number": (lambda: lowering.compile(abs, 10**400, target="cpu"), TypeError, "integer of 1329 bits"),
    "objects": (lambda: lowering.export(jnp.sin, np.ones(2, object)), TypeError, r"args must hold .*; got object\[2\]"),
    "compiler": (lambda: lowering.compilers.interpreter("rocm"), ValueError, "platform must be .*; got 'rocm'"),
    "install": (lambda: lowering.compilers.install(["tpu"]), ValueError, r"platform must be .*; got \['tpu'\]"),
    "note": (lambda: lowering.note(3), TypeError, "note: text must be a string; got 3"),
    "long-implementation": (lambda: lowering.use("z" * 10**5), ValueError, "got 'z{119}[.]{3}z{39}'$"),
    "long-target": (lambda: lowering.explain(jnp.sin, 1.0, target="z" * 10**5), ValueError, "[.]{3}z{39}'$"),
    "long-platform": (lambda: lowering.export(jnp.sin, 1.0, platforms=["z" * 10**5]), lowering.ArtifactError, "z{40}$"),
    "load": (lambda: lowering.load(3), lowering.ArtifactError, "load: path must be a string or a path; got 3"),
    "load-tuned": (lambda: lowering.TuningResult.load(3), lowering.TuningError, "load: '3' must be a file"),
    "using": (lambda: lowering.using(3).__enter__(), TypeError, "using: selection must be .*; got 3"),
    "availability": (lambda: lowering.availability("cpu"), TypeError, "availability: hardware must be .* got 'cpu'"),
    "register": (lambda: lowering.register(3), TypeError, "register: operator must be .*; got 3"),
    "add_kernel": (lambda: lowering.add_kernel(3, KERNEL), TypeError, "add_kernel: operator must be .*; got 3"),
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


async def waiting(x: Any) -> Any:
    return x


def yielding(x: Any) -> Any:
    yield x


async def streaming(x: Any) -> Any:
    yield x


class Waiting:
    """A model whose call is async."""

    async def __call__(self, x: Any) -> Any:
        return x


def deep() -> Any:
    tree: Any = 1.0
    for _ in range(10**5):
        tree = [tree]
    return tree


class Broken:
    """A node that cannot be flattened."""


def fail(node: Broken) -> Any:
    raise KeyError("line\nline")


jax.tree_util.register_pytree_node(Broken, fail, lambda *_: Broken())

LOOP: list[Any] = []
LOOP.append({"a": (LOOP, 1)})
DOORS: dict[str, Any] = {
    "explain": lowering.explain,
    "compile": functools.partial(lowering.compile, target="cpu"),
    "compare": functools.partial(lowering.compare, target="tpu-v5e"),
    "export": lowering.export,
    "tune": lowering.tune,
    "bench": bench,
}
TRACEABLE = "must be a function that JAX can trace; got"
FUNCTIONS: dict[str, tuple[Any, str]] = {
    "async": (waiting, "must be a plain function; got an async function, waiting"),
    "generator": (yielding, "must be a plain function; got a generator function"),
    "async-generator": (streaming, "must be a plain function; got an async generator function"),
    "partial-async": (functools.partial(waiting), "must be a plain function; got an async function"),
    "jitted-async": (jax.jit(waiting), "must be a plain function; got an async function"),
    "async-object": (Waiting(), "must be a plain function; got an async function"),
    "ufunc": (np.sin, rf"{TRACEABLE} <ufunc 'sin'>: TracerArrayConversionError"),
    "partial-ufunc": (functools.partial(np.sin), rf"{TRACEABLE} functools.partial\(<ufunc 'sin'>\): Tracer"),
    "vectorized": (np.vectorize(float), f"{TRACEABLE} <numpy.vectorize object>: TracerArrayConversionError"),
    "builtin": (max, f"{TRACEABLE} <built-in function max>: "),
    "class": (object, f"{TRACEABLE} <class 'object'>: TypeError"),
}
TREES: dict[str, tuple[Any, str]] = {
    "keys": ([{1: 1.0, "a": 2.0}], "a dict whose keys cannot be sorted"),
    "loop": (LOOP, "contains itself, or is nested too deeply"),
    "deep": (deep(), "contains itself, or is nested too deeply"),
    "broken": (Broken(), r"a node that fails: KeyError: 'line\\nline'"),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("fn", "words"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_tools_refuse_what_cannot_be_traced(door: str, fn: Any, words: str) -> None:
    for _ in range(2):  # JAX itself would crash at the second ufunc
        with pytest.raises(TypeError, match=f"^lowering: fn {words}") as refusal:
            DOORS[door](fn, jnp.ones(3))
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("tree", "words"), TREES.values(), ids=TREES)
def test_tools_refuse_what_is_no_pytree(door: str, tree: Any, words: str) -> None:
    with pytest.raises(TypeError, match=f"^lowering: args must be pytrees; got one .*{words}"):
        DOORS[door](lambda tree: 1.0, tree)


class Unhashable:
    """A callable that is neither hashable nor weakly referable."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, x: Any) -> Any:
        return 2 * x


@pytest.mark.parametrize(
    "fn", [Unhashable(), np.sum, abs, jnp.float32, jnp.sin], ids=["unhashable", "numpy", "builtin", "class", "jitted"]
)
def test_tools_take_whatever_can_be_traced(fn: Any) -> None:
    x = jnp.arange(3.0)
    np.testing.assert_allclose(lowering.compile(fn, x, target="cpu").call(x), fn(x))
    np.testing.assert_allclose(lowering.export(fn, x, platforms="cpu").call(x), fn(x))
    assert lowering.explain(fn, x).rows == ()


def test_values_are_shown_on_one_short_line() -> None:
    """Whatever they are: containers that contain themselves, long ones, and objects that show tracers."""

    class Holder:
        def __init__(self, value: Any) -> None:
            self.value = value

        def __repr__(self) -> str:
            return f"Holder({self.value!r})"

    shown: list[str] = []
    jax.eval_shape(lambda x: shown.append(show([Holder(x), x])), 1.0)
    wide: Any = []
    wide += 200 * [wide]
    for value in (LOOP, deep(), wide, {i: i for i in range(10**5)}, "a\nb" * 10**5, {"k" * 10**5: 1}, object()):
        shown.append(show(value))
    assert shown[0] == "[a value of type test_values_are_shown_on_one_short_line.<locals>.Holder, float32[]]"
    assert all(len(text) < 170 and "\n" not in text and "0x" not in text for text in shown)


def test_what_a_function_changes_in_its_arguments_is_a_result():
    """A step may update a module of NNX in place; its gradient must not become dead code."""

    def step(params, x):
        loss, params["w"] = jax.value_and_grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(params["w"])
        return loss

    x, params = jnp.ones((4, 8)), {"w": jnp.ones((8, 16))}
    assert lowering.compile(step, params, x, target="cpu").memory.outputs >= 4 * (1 + 8 * 16)
    # The product of the value, and that of its gradient.
    assert lowering.explain(step, params, x, target="cpu").total_flops >= 4 * 4 * 8 * 16
    (row,) = bench(step, params, x, implementations=["auto"], repeats=2).rows
    assert row.median_ms > 0
