"""Values and gradients of random losses and of rewritten models, as numbers that show any change beyond roundings."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import heads
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rewrite_checks
import rewritten_models
import test_rewrite_random_losses as random_losses

import lowering
from benchmarks.nets.net import Cases, OffError
from jaxops import linear_cross_entropy, linear_log_probs

SEED, LOSSES, NUMBERS = 20261124, 100, 24
# Roundings by which sums in another order may differ, relative to the largest element or the norm of an array. Results
# are computed in float32, while gradients go through logits' gradients that are rounded to the operands' dtype.
# The algorithms of today differ by a third of this.
ROUNDINGS = {"float64": 16, "float32": 16, "bfloat16": 1, "float16": 1}
MODELS = (
    "lm1b_of_flax",
    "gemma",
    "maxtext_without_its_own_gradient",
    "levanter",
    "simply",
    "big_vision_sigmoid",
    "nanogpt_of_flax",
    "big_vision",
    "padded_vocabulary",
    "poly_loss",
    "scanned_microbatches",
    "convolution_of_one_pixel",
    "hand_written_log_sum_exp",
)
FORMS = (
    "widened",
    "tied",
    "widened_before_the_bias",
    "widened_behind_the_cap",
    "masked",
    "smoothed",
    "of_rows",
    "focal",
    "attend_of_linen",
    "own_derivative_of_maxtext",
)
RANDOM_REWRITES = 16
# Values count to the last bit; compiled code need not be fast.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
MORE_QUICKLY = {**QUICKLY, "xla_cpu_use_fusion_emitters": False}


def cases() -> Cases:
    """Yields random losses, then models, heads and random losses that are rewritten."""
    for index in range(LOSSES):
        run, operands, name = drawn(index)
        yield f"loss {index:02}: {name}", functools.partial(numbers_of_loss, run, operands)
    for name in MODELS:
        yield f"model: {name}", functools.partial(numbers_of_model, name)
    for name in FORMS:
        for dtype in ("float32", "bfloat16"):
            yield f"head: {name} {dtype}", functools.partial(numbers_of_head, name, dtype)
    for index in range(RANDOM_REWRITES):
        yield f"rewritten random loss {index:02}", functools.partial(numbers_of_random_rewrite, index)


def compare(recorded: Any, found: Any) -> None:
    """Compares numbers; the second row of the record says by how much they may differ."""
    if isinstance(found, str) or found.shape != recorded.shape:
        raise OffError(
            found if isinstance(found, str) else f"recorded {recorded.shape[1]}, found {found.shape[1]} numbers"
        )
    distance = np.abs(found[0] - recorded[0])
    off = ~(distance <= recorded[1])
    if off.any():
        worst = int(np.argmax(np.where(off, distance / np.maximum(recorded[1], 1e-300), 0)))
        raise OffError(
            f"{off.sum()} of {off.size} numbers are off; the worst: recorded {recorded[0, worst]:.9g}, "
            f"found {found[0, worst]:.9g}, allowed {recorded[1, worst]:.2g}"
        )


def numbers(tree: Any, dtype: str) -> np.ndarray:
    """Few numbers that stand for all elements of arrays, in the first row; in the second, how exact they are.

    A small array stands for itself. Of others there are sums with random signs, which any element changes.
    """
    rows = []
    for leaf in jax.tree.leaves(tree):
        array = np.asarray(leaf)
        is_exact = not jnp.issubdtype(array.dtype, jnp.floating)
        flat = np.asarray(array, np.float64).reshape(-1)
        finite = np.nan_to_num(flat, nan=0, posinf=0, neginf=0)
        least = max(jnp.finfo(dtype).eps, 0 if is_exact else jnp.finfo(array.dtype).eps)
        allowed = 0 if is_exact else ROUNDINGS[dtype] * float(least)
        if flat.size <= NUMBERS:
            found, size = finite, np.max(np.abs(finite), initial=0)
        else:
            signs = np.random.default_rng(flat.size).choice([-1.0, 1.0], (NUMBERS, flat.size))
            found, size = signs @ finite, np.linalg.norm(finite)
        rows.append(np.stack([found, np.full(found.shape, allowed * size + 1e-30)]))
        rows.append(np.array([[np.sum(~np.isfinite(flat))], [0]]))
    return np.concatenate(rows, axis=1)


def drawn(index: int) -> tuple[Callable[..., Any], dict[str, Any], str]:
    """A random loss, what it is differentiated in, and its name."""
    rng = np.random.default_rng([SEED, index])

    def one_of(*options: Any) -> Any:
        return options[rng.integers(len(options))]

    dtype, rows = (
        one_of("float32", "bfloat16", "float16"),
        one_of(*[(n,) for n in (1, 9, 21, 43, 61)], (3, 11), (2, 1, 5)),
    )
    hidden, classes = int(rng.integers(1, 45)), int(rng.integers(2, 260))
    is_scored, ignore_index = index % 5 == 4, one_of(-100, -7, 1)

    def normal(*shape: int, dtype: str = "float32", scale: float = 1.0) -> Any:
        return np.asarray(scale * rng.normal(size=shape), jnp.dtype(dtype))

    transposed = bool(one_of(True, False))
    labels = np.where(rng.random(rows) < one_of(0, 0.3), ignore_index, rng.integers(0, classes, rows)).astype(np.int32)
    ignored = (labels == ignore_index)[..., None]
    operands = {
        "x": np.where(ignored, np.asarray(np.nan, jnp.dtype(dtype)), normal(*rows, hidden, dtype=dtype)),
        "weight": normal(
            *((hidden, classes) if transposed else (classes, hidden)), dtype=dtype, scale=hidden**-0.5 * 2
        ),
        "bias": one_of(None, normal(classes, dtype=one_of(dtype, "float32"))),
    }
    options: dict[str, Any] = {"transpose_weight": transposed, "ignore_index": ignore_index}
    options |= {"softcap": one_of(None, None, 4.0, 30.0), "chunk_rows": one_of(None, None, 1, 7, 16)}
    options["batch_invariant"] = one_of(False, False, False, True)
    positive = np.where(ignored[..., 0], np.float32(np.nan), np.exp(normal(*rows)))
    if is_scored:
        operands["temperature"] = one_of(1.0, 0.7, positive)
        options["return_entropy"] = one_of(True, False)
        fn = functools.partial(linear_log_probs, labels=labels, **options)
    else:
        operands["labels"] = labels
        if one_of(True, False, False, False, False):
            operands["labels"] = rng.dirichlet(np.ones(classes), rows).astype(np.float32)
            operands["x"] = np.where(ignored, np.ones_like(operands["x"]), operands["x"])
            positive = np.nan_to_num(positive, nan=1.0)
        operands["class_weight"] = one_of(None, None, np.exp(normal(classes)))
        operands["row_weight"] = one_of(None, None, positive)
        options |= {"label_smoothing": one_of(0.0, 0.0, 0.13), "z_loss": one_of(0.0, 0.0, 0.05)}
        options |= {"reduction": one_of("mean", "sum", "none"), "return_aux": one_of(False, False, True)}
        strategies = ("auto", "recompute", *(() if options["batch_invariant"] else ("full", "grad_in_forward")))
        options |= {"strategy": one_of(*strategies)}
        options |= {"weight_grad_dtype": one_of(None, None, None, "float32")}
        now = {"strategy": "auto"} if options["strategy"] == "full" else {}
        fn = functools.partial(linear_cross_entropy, **options | now)
    said = [f"{key}={value}" for key, value in options.items() if value not in (None, False, 0.0, "auto")]
    said += [key for key, value in operands.items() if value is not None and key not in ("x", "weight")]
    return fn, operands, f"{dtype} {'x'.join(map(str, (*rows, hidden, classes)))} {' '.join(said)}"


def numbers_of_loss(fn: Callable[..., Any], operands: dict[str, Any]) -> np.ndarray:
    """Returns the numbers of results and aux, and of the gradients of all operands that have one."""
    dtype = operands["x"].dtype.name
    is_differentiable = {
        key: jnp.issubdtype(jnp.result_type(value), jnp.floating) and hasattr(value, "shape")
        for key, value in operands.items()
        if value is not None
    }
    fixed = {key: value for key, value in operands.items() if not is_differentiable.get(key, False)}

    def total(differentiated: dict[str, Any]) -> Any:
        results = fn(**fixed, **differentiated)
        # A pair is a loss and its aux, or log-probabilities and entropies.
        is_aux = isinstance(results, tuple) and isinstance(results[1], tuple)
        summed = jax.tree.leaves(results[0] if is_aux else results)
        return sum(jnp.sum(each * jnp.cos(jnp.arange(each.size)).reshape(each.shape)) for each in summed), results

    differentiated = {key: value for key, value in operands.items() if is_differentiable.get(key)}
    (_, results), gradients = run(jax.value_and_grad(total, has_aux=True), differentiated)
    return np.concatenate([numbers(results, "float32"), numbers(gradients, dtype)], axis=1)


def run(fn: Callable[..., Any], *args: Any) -> Any:
    """Compiles a function and returns its results."""
    return jax.jit(fn).lower(*args).compile(compiler_options=MORE_QUICKLY)(*args)


def numbers_of_rewrite(fn: Callable[..., Any], dtype: str, *args: Any, argnums: Any = (0, 1)) -> np.ndarray:
    """Returns how many parts of a function are rewritten, then the numbers of its value and its gradients."""

    def first(*args: Any) -> Any:
        result = fn(*args)
        return jnp.sum(result[0] if isinstance(result, tuple) else result)

    with pytest.MonkeyPatch.context() as patch:
        rewrite_checks.let_few_logits_count(patch, 20)
        fast = lowering.rewrite(first)
        found = numbers(run(jax.value_and_grad(fast, argnums, allow_int=True), *args), dtype)
        return np.concatenate([[[len(fast.report(*args).applied)], [0]], found], axis=1)


def numbers_of_model(name: str) -> np.ndarray:
    """Returns the numbers of a model that is written as public training code has it."""
    fn, params, _ = rewritten_models.MODELS[name]
    return numbers_of_rewrite(fn, "float32", params, rewritten_models.X, rewritten_models.LABELS)


def numbers_of_head(name: str, dtype: str) -> np.ndarray:
    """Returns the numbers of a language model's head in a dtype."""
    rng = np.random.default_rng(0)
    params, x, _ = heads.arguments(name, jnp.dtype(dtype), 24, 16, 40)
    params, x = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), (params, x))
    return numbers_of_rewrite(heads.FORMS[name][0], dtype, params, x, jnp.asarray(rng.integers(0, 40, 24), jnp.int32))


def numbers_of_random_rewrite(index: int) -> np.ndarray:
    """Returns the numbers of a randomly composed loss, computed in float64."""
    rng = np.random.default_rng([SEED, index])
    tables = {"loss": "LOSSES", "term": "TERMS", "reduction": "REDUCTIONS", "pick": "PICKS"}
    made_of: dict[str, Any] = {key: rng.choice([*getattr(random_losses, table)]) for key, table in tables.items()}
    made_of["changes"] = [*rng.choice([*random_losses.CHANGES], rng.integers(0, 4), replace=False)]
    made_of |= {"is_flat": rng.random() < 0.5, "is_checkpointed": rng.random() < 0.5}
    rows, features, classes = random_losses.ROWS, random_losses.FEATURES, random_losses.CLASSES
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.enable_x64())
        soft = rng.random((*rows, classes))
        arrays = {
            "labels": jnp.asarray(rng.integers(0, classes - 1, rows)),
            "bias": jnp.asarray(rng.normal(size=classes)),
            "row": jnp.asarray(rng.random(rows) + 0.5),
            "temperature": jnp.asarray(1.7),
            "soft": jnp.asarray(soft / soft.sum(-1, keepdims=True)),
        }
        weight, x = jnp.asarray(rng.normal(size=(features, classes))), jnp.asarray(rng.normal(size=(*rows, features)))
        dtype = "float32" if "casts" in made_of["changes"] else "float64"
        return numbers_of_rewrite(random_losses.built(made_of), dtype, weight, x, arrays)
