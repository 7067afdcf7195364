"""What compilers make of the loss: temporaries on CPUs, peaks of memory on chips, and replayed times."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import heads
import jax
import jax.numpy as jnp
import tpu_schedules

import lowering
from benchmarks.nets.net import Cases, OffError
from benchmarks.nets.values import QUICKLY
from jaxops import linear_cross_entropy

# Rows, hidden size, classes, dtype, and options of the loss.
LOSSES: tuple[tuple[int, int, int, str, dict[str, Any]], ...] = (
    (1024, 768, 50257, "float32", {}),
    (1024, 768, 50257, "float32", {"strategy": "recompute"}),
    (1024, 768, 50257, "float32", {"chunk_rows": 128}),
    (1024, 768, 50257, "bfloat16", {}),
    (1024, 768, 50257, "float16", {}),
    (4096, 512, 32000, "float32", {}),
    (4096, 512, 32000, "bfloat16", {"strategy": "recompute"}),
    (4096, 512, 32000, "bfloat16", {"return_aux": True}),
    (4096, 512, 32000, "float32", {"reduction": "none"}),
    (4096, 512, 32000, "float32", {"label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 30.0}),
    (1000, 100, 2000, "float32", {}),
    (1000, 100, 2000, "float32", {"reduction": "none"}),
    (1000, 100, 2000, "bfloat16", {"batch_invariant": True}),
)
PEAKS = tuple(LOSSES[i] for i in (0, 3, 6, 7))
FORMS = (
    ("widened", "bfloat16", (2048, 512, 32000)),
    ("widened", "bfloat16", (8192, 4096, 128256)),
    ("as_they_are", "float32", (1537, 96, 20011)),
    ("tied", "float32", (512, 1024, 50257)),
    ("masked", "bfloat16", (2048, 512, 32000)),
    ("of_rows", "bfloat16", (2048, 512, 32000)),
    ("focal", "bfloat16", (2048, 512, 32000)),
    ("attend_of_linen", "bfloat16", (2048, 512, 32000)),
    ("own_derivative_of_maxtext", "bfloat16", (2048, 512, 50257)),
)
REPLAYED = 4096, 1024, 32768


def temporaries() -> Cases:
    """Yields XLA's temporaries on CPUs in bytes, of the loss and of rewritten heads, with gradients."""
    for name, fn, args in losses(LOSSES):
        yield f"loss {name}", functools.partial(temporary_bytes, fn, args)
    for form, dtype, sizes in FORMS:
        args = heads.arguments(form, jnp.dtype(dtype), *sizes)
        plain, name = heads.FORMS[form][0], f"{form} {dtype} {'x'.join(map(str, sizes))}"
        fast = heads.with_gradients(lowering.rewrite(plain))
        yield f"rewritten {name}", functools.partial(temporary_bytes, fast, args)
        if form in ("widened", "focal") and sizes[1] == 512:
            whole = lowering.rewrite(heads.with_gradients(plain))
            yield f"rewritten gradient of {name}", functools.partial(temporary_bytes, whole, args)


def losses(table: Any) -> Iterator[tuple[str, Callable[..., Any], Any]]:
    """Yields name, function and arguments of the loss with its gradients."""
    for rows, hidden, classes, dtype, options in table:
        x, weight = (jax.ShapeDtypeStruct((n, hidden), jnp.dtype(dtype)) for n in (rows, classes))
        args = x, weight, jax.ShapeDtypeStruct((rows,), jnp.int32)
        said = [f"{key}={value}" for key, value in options.items()]
        loss = functools.partial(linear_cross_entropy, **options)
        yield " ".join([f"{rows}x{hidden}x{classes} {dtype}", *said]), functools.partial(with_gradients, loss), args


def with_gradients(loss: Callable[..., Any], x: Any, weight: Any, labels: Any) -> Any:
    """The results and both gradients."""

    def total(x: Any, weight: Any) -> Any:
        results = loss(x, weight, labels)
        return jnp.sum(results[0] if isinstance(results, tuple) else results), results

    return jax.value_and_grad(total, (0, 1), has_aux=True)(x, weight)


def temporary_bytes(fn: Callable[..., Any], args: Any) -> int:
    """Returns the temporary memory of a function as XLA compiles it here."""
    compiled = jax.jit(fn).lower(*args).compile(compiler_options=QUICKLY)
    return int(compiled.memory_analysis().temp_size_in_bytes)


def peaks() -> Cases:
    """Yields peaks of memory in bytes on chips, of the loss with its gradients."""
    for target in ("tpu-v5e", "cuda-h100"):
        for name, fn, args in losses(PEAKS):
            yield f"{target}: {name}", functools.partial(peak_bytes, fn, args, target)


def peak_bytes(fn: Callable[..., Any], args: Any, target: str) -> int:
    """Returns the peak of memory of a function as the target's compiler makes it."""
    return lowering.compile(fn, *args, target=target).memory.peak


def replays() -> Cases:
    """Yields replayed times in microseconds, of XLA's program and of kernels."""
    x, weight = (jax.ShapeDtypeStruct((n, REPLAYED[1]), jnp.bfloat16) for n in (REPLAYED[0], REPLAYED[2]))
    args = x, weight, jax.ShapeDtypeStruct(REPLAYED[:1], jnp.int32)
    # How often what data decides happens, as XLA's programs ask for it: there are eight chunks of the rows that count,
    # and one with the gradients, in which no row overflows.
    for strategy, counts, implementations in (
        (None, (8,), ("xla", "pallas")),
        ("recompute", (8,), ("pallas",)),
        ("grad_in_forward", (0,), ("xla", "pallas")),
    ):
        loss = functools.partial(linear_cross_entropy, strategy=strategy or "auto")
        fn = jax.value_and_grad(loss, (0, 1)) if strategy else loss
        case = tpu_schedules.Case(f"{strategy or 'without'} gradients", fn, args, counts=counts)
        for implementation in implementations:
            find = functools.partial(replayed_us, case, "tpu-v5e", implementation)
            yield f"{case.name}, {implementation}", find


def replayed_us(case: Any, target: str, implementation: str) -> float:
    """Returns the replayed time of a case of `tpu_schedules`."""
    found = tpu_schedules.replayed(case, target, implementation)
    if "us" not in found:
        raise OffError(found["refused"])
    return float(found["us"])
