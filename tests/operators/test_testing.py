"""`check_operator`: a sound function keeps every promise, and each promise catches a function that breaks it."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops import BadParamError
from jaxops.testing import PROMISES, Report, check_operator

ROWS, WIDTH = 8, 6
X = np.random.default_rng(3).standard_normal((ROWS, WIDTH)).astype(np.float32)
W = np.random.default_rng(4).standard_normal(WIDTH).astype(np.float32)


def good(x: jax.Array, w: jax.Array) -> jax.Array:
    # Products alone: a sum may be fused with one in vectors of elements, and not in those that are left over.
    return x * x * w[None, :]


@pytest.mark.slow
def test_sound_function_keeps_every_promise() -> None:
    report = check_operator(good, (X, W), batched=(0, None), reference=lambda x, w: x * x * w[None, :])
    report.raise_if_broken()
    assert (report.kept, report.skipped) == (PROMISES, ())


def raises(x: jax.Array) -> jax.Array:
    raise RuntimeError("out of paper\nand of ink")


def draws(x: jax.Array) -> jax.Array:
    rng = np.random.default_rng()
    noise = jax.pure_callback(
        lambda: rng.standard_normal(WIDTH).astype(np.float32), jax.ShapeDtypeStruct((WIDTH,), x.dtype)
    )
    return x + jax.lax.stop_gradient(noise)[None, :]


def asks_whether_it_is_traced(x: jax.Array) -> jax.Array:
    return 2.0 * x if isinstance(x, jax.core.Tracer) else x


@jax.custom_batching.custom_vmap
def wrongly_batched(x: jax.Array) -> jax.Array:
    return x


@wrongly_batched.def_vmap
def _(size: int, is_batched: Any, x: jax.Array) -> tuple[jax.Array, bool]:
    return x[::-1], True


def calls_python(x: jax.Array) -> jax.Array:
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@jax.custom_vjp
def only_reverse(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


only_reverse.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (jnp.cos(x) * ct,))


@jax.custom_jvp
def wrong_gradient(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


wrong_gradient.defjvps(lambda dot, y, x: 1.01 * jnp.cos(x) * dot)


@jax.custom_jvp
def constant_slope(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


constant_slope.defjvps(lambda dot, y, x: jax.lax.stop_gradient(jnp.cos(x)) * dot)


@jax.custom_vjp
def forgets_cotangent(x: jax.Array) -> jax.Array:
    return jnp.sum(x * x)


forgets_cotangent.defvjp(lambda x: (jnp.sum(x * x), x), lambda x, ct: (2.0 * x,))


@jax.custom_vjp
def backward_in_python(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


backward_in_python.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (calls_python(x + jnp.float32(np.pi / 2)) * ct,))


def adds_to_a_list(seen: list[Any], x: jax.Array) -> jax.Array:
    seen.append(jnp.sum(x))
    return x * seen[-2] if len(seen) > 1 else x


def reports(x: jax.Array) -> jax.Array:
    jax.experimental.io_callback(lambda _: None, None, jax.lax.stop_gradient(x))
    return jnp.sin(x)


def sums_in_its_dtype(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 600, lambda _, total: total + x, x)


def squares_in_its_dtype(x: jax.Array) -> jax.Array:
    return jnp.sqrt((256 * x) * (256 * x)) / 256


def normalized_by_all_rows(x: jax.Array) -> jax.Array:
    return x / jnp.max(jnp.abs(x))


def in_another_order(x: jax.Array) -> jax.Array:
    return x[:, 0] + (x[:, 1] + x[:, 2]) if x.shape[0] > ROWS // 2 else (x[:, 0] + x[:, 1]) + x[:, 2]


def carries_zeros(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, WIDTH, lambda i, total: total + x[:, i], jnp.zeros(x.shape[0], x.dtype))


def gathers(x: jax.Array) -> jax.Array:
    return x @ x.T


def folds_rows(x: jax.Array) -> jax.Array:
    return x.reshape(2, x.shape[0] // 2, WIDTH)


BROKEN: dict[str, tuple[Callable[..., Any], str]] = {
    "runs": (raises, "called outside jit, it raises RuntimeError: out of paper"),
    "reference": (lambda x: 2.0 * x, "the result differs from the reference's: "),
    "deterministic": (draws, "a second result differs from the first: "),
    "jit": (asks_whether_it_is_traced, "the result under jax.jit differs from the result outside it: "),
    "disable_jit": (jax.jit(asks_whether_it_is_traced), "the result under jax.disable_jit differs"),
    "vmap": (wrongly_batched, "the result of jax.vmap over operand 0 differs from a loop's: "),
    "export": (calls_python, "when the result is exported for cpu, cuda, tpu, it raises "),
    "jvp": (only_reverse, "under jax.jvp, it raises TypeError: can't apply forward-mode"),
    "derivative": (wrong_gradient, "the gradient by operand 0 gives "),
    "second_order": (constant_slope, "the second derivative by operand 0 gives "),
    "cotangent_scaling": (forgets_cotangent, "by operand 0 does not follow the cotangent: for one 16 times smaller"),
    "vmap_of_gradient": (backward_in_python, "under jax.vmap of jax.grad, it raises "),
    "gradient_of_vmap": (backward_in_python, "under jax.grad of jax.vmap over operand 0, it raises "),
    "scan": (functools.partial(adds_to_a_list, []), "inside jax.lax.scan, it raises UnexpectedTracerError"),
    "checkpoint": (reports, "under jax.checkpoint, it raises NotImplementedError: Effects not supported"),
    "bfloat16_accuracy": (sums_in_its_dtype, "the result of bfloat16 operands differs from the one in float64: "),
    "float16_accuracy": (squares_in_its_dtype, "the result of float16 operands differs from the one in float64: inf"),
    "nan_in_padding": (normalized_by_all_rows, "with NaN in all rows from 6 on, the result of an earlier row differs"),
    "batch_invariance": (in_another_order, "on the first half alone, the result of a row differs"),
    "shard_map": (carries_zeros, "in jax.shard_map over 8 devices, it raises "),
    "auto_mesh": (gathers, "on a mesh of 8 devices with auto axes, the result gathers 48 elements"),
    "explicit_mesh": (folds_rows, "on a mesh of 8 devices with explicit axes, it raises "),
}


def test_each_promise_has_a_function_that_breaks_it() -> None:
    assert tuple(BROKEN) == PROMISES


@pytest.mark.sampled
@pytest.mark.parametrize("name", BROKEN)
def test_promise_catches_what_breaks_it(name: str) -> None:
    fn, evidence = BROKEN[name]
    x = np.abs(X) + 1 if name == "float16_accuracy" else X
    reference = jnp.positive if name == "reference" else None
    report = check_operator(fn, [x], batched=[0], promises=[name], reference=reference)
    ((promise, found),) = report.broken
    assert promise == name
    assert evidence in found
    assert "\n" not in found
    with pytest.raises(AssertionError, match=f"breaks 1 promise:\n  {name}: "):
        report.raise_if_broken()


LABELS = np.array([0, 1, 2, -100, 4, 5, 6, 30], np.int32)
TABLE = np.random.default_rng(5).standard_normal((32, WIDTH)).astype(np.float32)


def cross_entropy(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    return jaxops.linear_cross_entropy(x, w, labels, reduction="none")


def invariant_cross_entropy(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    return jaxops.linear_cross_entropy(x, w, labels, reduction="none", batch_invariant=True)


def losses_in_jnp(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    log_probs = jax.nn.log_softmax(x @ w.T)
    picked = jnp.take_along_axis(log_probs, jnp.clip(labels, 0)[:, None], 1)[:, 0]
    return jnp.where(labels == -100, 0.0, -picked)


OURS: dict[str, tuple[Callable[..., Any], tuple[np.ndarray, ...], tuple[int | None, ...], Callable[..., Any]]] = {
    "linear_cross_entropy": (cross_entropy, (X, TABLE, LABELS), (0, None, 0), losses_in_jnp),
    "softmax": (jaxops.softmax, (X,), (0,), jax.nn.softmax),
    "embedding": (jaxops.embedding, (TABLE, np.abs(LABELS) % 32), (None, 0), lambda table, ids: table.at[ids].get()),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", PROMISES)
@pytest.mark.parametrize("operator", OURS)
def test_our_operators_keep_every_promise(operator: str, name: str) -> None:
    fn, operands, batched, reference = OURS[operator]
    if (operator, name) == ("linear_cross_entropy", "batch_invariance"):
        fn = invariant_cross_entropy  # which is what this option is for
    report = check_operator(fn, operands, batched=batched, promises=[name], reference=reference)
    assert report.kept == (name,), str(report)


def test_promises_that_cannot_be_checked_are_skipped_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    promises = ["reference", "vmap", "nan_in_padding", "shard_map"]
    report = check_operator(good, (X, W), promises=promises)
    assert report.kept == ("vmap",)
    assert [name for name, _ in report.skipped] == ["reference", "nan_in_padding", "shard_map"]
    reasons = {
        "no operand is differentiable": {"differentiable": ()},
        "no result has an axis of rows: rows are combined in all of them": {"batched": (0,)},
        "operands have 1 rows; two are needed": {"batched": (0,), "operands": [X[:1]]},
    }
    for reason, given in reasons.items():
        arguments = {"operands": [X], "promises": ["jvp" if "differentiable" in given else "batch_invariance"], **given}
        (skipped,) = check_operator(jnp.sum, **arguments).skipped
        assert skipped.reason == reason
    (skipped,) = check_operator(jnp.tanh, [np.ones(11)], batched=[0], promises=["auto_mesh"]).skipped
    assert skipped.reason == "11 rows cannot be split evenly over two to 8 devices"
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    (skipped,) = check_operator(jnp.tanh, [X], batched=[0], promises=["shard_map"]).skipped
    assert "XLA_FLAGS=--xla_force_host_platform_device_count=8" in skipped.reason
    with jaxops.use("emulate:tpu-v5e"):
        report = check_operator(jnp.tanh, [X], batched=[0], promises=["jit", "export", "float16_accuracy", "auto_mesh"])
    assert {each.promise for each in report.skipped} == {"export", "float16_accuracy", "auto_mesh"}
    assert report.kept == ("jit",)


def test_operands_that_no_kernel_takes_are_skipped_where_kernels_are_asked_for() -> None:
    with jaxops.use("interpret"):
        report = check_operator(jaxops.softmax, [X], batched=[0], promises=["bfloat16_accuracy", "float16_accuracy"])
    assert (report.kept, report.broken) == (("bfloat16_accuracy",), ())
    ((name, reason),) = report.skipped
    assert name == "float16_accuracy"
    assert "the kernel that `use` asks for refuses float16 operands: softmax: implementation must be one that" in reason


def test_function_that_does_not_run_breaks_that_promise_alone() -> None:
    report = check_operator(raises, [X], promises=["jit", "vmap"])
    assert [name for name, _ in report.broken] == ["runs"]
    assert [name for name, _ in report.skipped] == ["jit", "vmap"]


def test_report_prints_what_broke_first() -> None:
    report = check_operator(wrong_gradient, [X], promises=["jit", "derivative"])
    lines = str(report).splitlines()
    assert lines[0].strip() == "wrong_gradient: 1 broken, 1 kept, 0 skipped"
    assert ["derivative" in lines[4], "broken" in lines[4]] == [True, True]
    Report("f", ("jit",), (), ()).raise_if_broken()


def test_report_names_an_operator_and_what_is_called_with_options() -> None:
    operator = next(each for each in jaxops.operators() if each.name == "softmax")
    for fn in (operator, functools.partial(operator, axis=-1, algorithm="accurate")):
        report = check_operator(fn, [np.ones((2, 3), np.float32)], promises=["runs"])
        assert report.function == "softmax"


def test_page_lists_the_promises() -> None:
    table = (Path(__file__).parents[2] / "docs" / "testing.md").read_text().split("| promise |")[1].split("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    assert {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} == {*PROMISES}


def test_tolerance_is_by_dtype() -> None:
    nearly = functools.partial(jnp.multiply, jnp.float32(1.001))
    for tolerance, kept in ((None, ()), ({"float32": 1e-2}, ("reference",)), ({jnp.bfloat16: 1e-2}, ())):
        report = check_operator(nearly, [X], promises=["reference"], reference=jnp.positive, tolerance=tolerance)
        assert report.kept == kept


def test_results_are_pytrees_of_any_dtypes() -> None:
    def fn(x: jax.Array, ids: jax.Array) -> dict[str, Any]:
        return {"sum": jnp.sum(x), "more": (ids + 1, x > 0)}

    promises = ["runs", "jit", "vmap", "jvp", "derivative", "cotangent_scaling", "shard_map"]
    report = check_operator(fn, (X, LABELS), batched=(0, 0), promises=promises)
    assert report.kept == tuple(promises), str(report)


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "no operands": ({"operands": []}, "operands must be a list or tuple of arrays; got []"),
    "an array": ({"operands": X}, "operands must be a list or tuple of arrays; got float32[8, 6]"),
    "text": ({"operands": ["x"]}, "operands[0] must be an array of JAX or NumPy, or numbers; got 'x'"),
    "a key": ({"operands": [jax.random.key(0)]}, "operands[0] must be an array of numbers (of a key, its jax.random"),
    "integers": ({"operands": [LABELS], "differentiable": [0]}, "differentiable must be a list or tuple of different "),
    "twice": ({"differentiable": [0, 0]}, "of floating-point operands, of [0]; got [0, 0]"),
    "too many axes": ({"batched": (0, 0)}, "batched must have an axis or None for each of the 1 operands; got (0, 0)"),
    "no axis": ({"batched": (2,)}, "batched must be in [-2, 2) for an operand of rank 2; got 2"),
    "no rows": ({"batched": (None,)}, "batched must name axes of one size, and one at least; got []"),
    "sizes": (
        {"operands": [X, W], "batched": (0, 0)},
        "batched must name axes of one size, and one at least; got [6, 8]",
    ),
    "promise": ({"promises": ["speed"]}, "promises must be among runs, reference, "),
    "promises": ({"promises": "jit"}, "promises must be a list or tuple of names; got 'jit'"),
    "dtype": ({"tolerance": {"int8": 1.0}}, "tolerance must be for float64, float32, bfloat16, float16; got 'int8'"),
    "tolerance": ({"tolerance": 1e-3}, "tolerance must map names of dtypes to numbers; got 0.001"),
    "negative": ({"tolerance": {"float32": -1}}, "tolerance of float32 must be a finite number, 0 or more; got -1"),
}


def test_a_derivative_that_raises_is_found_by_what_compares_gradients() -> None:
    @jax.custom_vjp
    def twice(x):
        return 2 * x

    def backward(_, grad):
        raise RuntimeError("no derivative today")

    twice.defvjp(lambda x: (2 * x, None), backward)
    report = check_operator(twice, [X], promises=["reference", "export", "jit"], reference=lambda x: 2 * x)
    assert [each.promise for each in report.broken] == ["reference", "export"]
    assert all("no derivative today" in each.found for each in report.broken)
    # What is about values and gradients does not count as kept for its values alone.
    of_both = ["deterministic", "bfloat16_accuracy", "float16_accuracy", "shard_map", "auto_mesh", "explicit_mesh"]
    report = check_operator(twice, [X], batched=[0], promises=of_both)
    assert (report.kept, report.broken) == ((), ())
    assert [name for name, _ in report.skipped] == of_both
    assert {reason for _, reason in report.skipped} == {
        "values keep it; the gradient raises, which `reference` or `derivative` shows"
    }


@pytest.mark.parametrize("name", REFUSALS)
def test_bad_argument_gets_one_sentence(name: str) -> None:
    given, sentence = REFUSALS[name]
    with pytest.raises(BadParamError) as refusal:
        check_operator(jnp.tanh, **{"operands": [X], **given})
    assert str(refusal.value).startswith("check_operator: ")
    assert sentence in str(refusal.value)


@pytest.mark.parametrize("argument", ["fn", "reference"])
def test_what_is_no_function_is_refused(argument: str) -> None:
    with pytest.raises(TypeError, match=f"^check_operator: {argument} must be a function or an operator; got 3$"):
        check_operator(**{"fn": jnp.tanh, "operands": [X], argument: 3})
