"""Checks and preparation of operands that the public functions on a linear layer's logits share."""

from typing import Any, TypedDict

import jax
import jax.export
import jax.numpy as jnp

import lowering
from jaxops._checks import arguments
from jaxops._checks.arguments import INT32_MAX, is_floating, require
from jaxops._checks.dtypes import accumulation_dtype
from jaxops._primitive.sharding import agreeing


class LayerOptions(TypedDict, total=False):
    """The options of all public functions whose values do not change the type of the result."""

    bias: jax.Array | None
    softcap: float | None
    ignore_index: int
    transpose_weight: bool
    vocab_axis: str | None
    chunk_rows: int | None
    batch_invariant: bool


def checked_layer(operator: str, x: jax.Array, weight: jax.Array, transposed: bool, **by_class: Any) -> jax.Array:
    """Returns the weight of a linear layer as (V, H); checks vectors with a number for each class, which may be None.

    Refuses a weight that would fit the other way round, as flax's kernels do by default.
    """
    require(x.ndim >= 1 and is_floating(x), operator, "x", "be a floating-point array of shape (..., H)", x)
    features = x.shape[-1]
    rule = f"have shape {f'({features}, V)' if transposed else f'(V, {features})'}, as x has {features} features"
    require(weight.ndim == 2, operator, "weight", rule, weight)
    if weight.shape[transposed] == features:
        rule += f", or be given {'without transpose_weight' if transposed else 'with transpose_weight=True'}"
    require(weight.shape[1 - transposed] == features, operator, "weight", rule, weight)
    weight = weight.T if transposed else weight
    classes = weight.shape[0]
    require(classes > 0, operator, "weight", "have a vocabulary of at least 1", weight)
    require(jnp.finfo(x.dtype).bits >= 8, operator, "x", "have a dtype of at least 8 bits", x)
    floating = is_floating(weight) and jnp.finfo(weight.dtype).bits >= 8
    require(floating, operator, "weight", "have a floating-point dtype of at least 8 bits", weight)
    is_countable = jax.export.is_symbolic_dim(classes) or classes <= INT32_MAX
    require(is_countable, operator, "weight", f"have at most {INT32_MAX} classes", weight)
    check_floats(operator, (classes,), **by_class)
    if jnp.finfo(x.dtype).bits > jnp.finfo(weight.dtype).bits:
        lowering.note(f"{operator}: x, {x.dtype}, is rounded to the weight's dtype, {weight.dtype}")
    return weight


def check_floats(operator: str, shape: tuple[Any, ...], **arrays: Any) -> None:
    """Checks floating-point arrays of a shape, which may be None."""
    for argument, value in arrays.items():
        if value is not None:
            fits, rule = value.shape == shape, f"be a floating-point array of shape {list(shape)}"
            require(fits and is_floating(value), operator, argument, rule, value)


def check_row_weight(operator: str, rows: tuple[Any, ...], value: jax.Array | None) -> jax.Array | None:
    """Checks a number for each row, or a mask, and returns numbers."""
    if value is None:
        return None
    rule = f"be a floating-point array or a mask of shape {list(rows)}"
    require(value.shape == rows and (is_floating(value) or value.dtype == bool), operator, "row_weight", rule, value)
    return value.astype(jnp.float32) if value.dtype == bool else value


def check_labels(operator: str, rows: tuple[Any, ...], labels: jax.Array, classes: Any = None) -> None:
    """Checks integers, one for each row; given the number of classes, they may be probabilities."""
    if classes is not None and is_floating(labels):
        rule = f"be integers, or have shape {[*rows, classes]} as probabilities"
        require(labels.shape == (*rows, classes), operator, "labels", rule, labels)
        return
    rule = "be integers" if classes is None else "be integers, or floating-point probabilities"
    require(bool(jnp.issubdtype(labels.dtype, jnp.integer)), operator, "labels", rule, labels)
    rule = f"have shape {list(rows)}, as x without its last axis"
    if labels.ndim > len(rows) and labels.shape == (*rows, classes):
        rule += ", or be floating-point probabilities"
    require(labels.shape == rows, operator, "labels", rule, labels)


def number_or_floats(operator: str, argument: str, value: Any, shape: tuple[Any, ...], rule: str, **limits: Any) -> Any:
    """Returns a number, or an array with one for each class or row."""
    is_array = isinstance(value, list | tuple) or hasattr(value, "__jax_array__")
    if not is_array and getattr(value, "shape", ()) == ():
        return arguments.require_real(operator, argument, value, rule, traced=True, **limits)
    array = arguments.as_array(operator, argument, value)
    require(array.shape in ((), shape) and is_floating(array), operator, argument, rule, array)
    return array


def checked_margin(operator: str, margin: Any, labels: jax.Array, classes: Any) -> Any:
    """Returns the margin as a number or an array; None for 0 and for none."""
    if margin is None:
        return None
    require(not is_floating(labels), operator, "margin", "be None where labels are probabilities", margin)
    rule = f"be a finite number, or a floating-point array of shape [{classes}]"
    margin = number_or_floats(operator, "margin", margin, (classes,), rule)
    return None if isinstance(margin, float) and margin == 0 else margin


def check_softcap(operator: str, softcap: Any) -> float | None:
    """Returns the bound of the logits as a float, or None."""
    rule = "be a positive number that float32 can hold"
    return None if softcap is None else float(arguments.require_real(operator, "softcap", softcap, rule, above=0))


def check_chunk_rows(operator: str, chunk_rows: Any) -> int | None:
    """Returns the number of rows in a chunk as an int, or None."""
    limits: Any = {"rule": f"be a positive integer up to {INT32_MAX}", "least": 1, "most": INT32_MAX}
    return None if chunk_rows is None else arguments.require_integer(operator, "chunk_rows", chunk_rows, **limits)


def check_batch_invariant(operator: str, x: jax.Array, weight: jax.Array, vocab_axis: str | None) -> None:
    """Checks that rows' bits need not depend on other rows."""
    is_known = not any(map(jax.export.is_symbolic_dim, (*x.shape, *weight.shape)))
    # Symbolic sizes leave the number of blocks open; parts of a split vocabulary are added as the mesh has them.
    require(is_known, operator, "batch_invariant", "be False where sizes are symbolic", True)
    require(vocab_axis is None, operator, "batch_invariant", "be False with vocab_axis", True)
    lowering.note(f"{operator}: strategy recompute, in blocks of rows, as batch_invariant is set")


def check_weight_grad_dtype(operator: str, value: Any, weight: jax.Array) -> Any:
    """Returns the dtype in which the weight's gradient is added up; None for that of losses."""
    if value is None:
        return None
    dtype = arguments.require_floating_dtype(operator, "weight_grad_dtype", value)
    default = accumulation_dtype(weight.dtype)
    choices = {default, jnp.dtype(weight.dtype)} if weight.dtype == jnp.bfloat16 else {default}
    rule = f"be None or {' or '.join(sorted(map(str, choices)))}, as the weight is {weight.dtype}"
    require(dtype in choices, operator, "weight_grad_dtype", rule, value)
    return dtype


def agreeing_rows(x: jax.Array, labels: jax.Array, by_row: Any) -> tuple[jax.Array, jax.Array, Any]:
    """Returns `sharding.agreeing` rows: x, labels, and one more value for each, which may be a number or None."""
    of_labels = "... v" if is_floating(labels) else "..."
    if by_row is not None and jnp.ndim(by_row):
        return tuple(agreeing(f"... h, {of_labels}, ... ->", x, labels, by_row))
    return *agreeing(f"... h, {of_labels} ->", x, labels), by_row
