"""What the public functions on a linear layer's logits share: their checks, and how their operands are prepared."""

from typing import Any

import jax
import jax.export
import jax.numpy as jnp

from jaxops._checks.attributes import INT32_MAX, require_floating_dtype, require_integer, require_real
from jaxops._checks.dtypes import accumulation_dtype
from jaxops._checks.errors import require
from jaxops.linear_cross_entropy.column_tiles import default_tile_logits
from jaxops.linear_cross_entropy.logits import RowStatistics, Targets
from jaxops.linear_cross_entropy.operator import check_linear, linear_row_statistics
from jaxops.linear_cross_entropy.row_chunks import SMALL_LOGITS
from jaxops.linear_cross_entropy.vocabulary import Vocabulary


def by_class(operator: str, x: jax.Array, weight: jax.Array, transposed: bool) -> jax.Array:
    """The weight as (V, H). Refuses one that would fit the other way round, as the kernels of flax do by default."""
    require(weight.ndim == 2 or not transposed, operator, "weight", "have shape (H, V)", weight)
    if weight.ndim == 2 and x.ndim:
        features = x.shape[-1]
        shape = f"({features}, V)" if transposed else f"(V, {features})"
        remedy = "without transpose_weight" if transposed else "with transpose_weight=True"
        rule = f"have shape {shape}, as x has features"
        rule += f", or be given {remedy}" if weight.shape[transposed] == features else ""
        require(weight.shape[1 - transposed] == features, operator, "weight", rule, weight)
    return weight.T if transposed else weight


def check_layer(operator: str, x: Any, weight: Any, **by_class: Any) -> None:
    """Checks a linear layer, and vectors with a number for each class, which may be None."""
    check_linear(x, weight, operator)
    require(jnp.finfo(x.dtype).bits >= 8, operator, "x", "have a dtype of at least 8 bits", x)
    require(weight.dtype == x.dtype, operator, "weight", f"have x's dtype {x.dtype}", weight)
    classes = weight.shape[0]
    is_countable = jax.export.is_symbolic_dim(classes) or classes <= INT32_MAX
    require(is_countable, operator, "weight", f"have at most {INT32_MAX} classes", weight)
    for argument, value in by_class.items():
        valid = value is None or (value.shape == (classes,) and is_floating(value))
        require(valid, operator, argument, f"be a floating-point array of shape [{classes}]", value)


def check_softcap(operator: str, softcap: Any) -> float | None:
    """The bound of the logits as a float, or None."""
    rule = "be a positive number that float32 can hold"
    return None if softcap is None else float(require_real(operator, "softcap", softcap, rule, above=0))


def check_chunk_rows(operator: str, chunk_rows: Any) -> int | None:
    """The number of rows in a chunk as an int, or None."""
    rule = f"be a positive integer up to {INT32_MAX}"
    if chunk_rows is None:
        return None
    return require_integer(operator, "chunk_rows", chunk_rows, rule, least=1, most=INT32_MAX)


def check_weight_grad_dtype(operator: str, value: Any, weight: jax.Array) -> Any:
    """The dtype in which the weight's gradient is added up."""
    default = accumulation_dtype(weight.dtype)
    if value is None:
        return default
    dtype = require_floating_dtype(operator, "weight_grad_dtype", value)
    choices = {default, jnp.dtype(weight.dtype)} if weight.dtype == jnp.bfloat16 else {default}
    rule = f"be None or {' or '.join(sorted(map(str, choices)))}, as the weight is {weight.dtype}"
    require(dtype in choices, operator, "weight_grad_dtype", rule, value)
    return dtype


def is_floating(value: Any) -> bool:
    """Whether an array is floating point."""
    return bool(jnp.issubdtype(value.dtype, jnp.floating))


@jax.jit
def nan_unless(valid: jax.Array, x: jax.Array) -> jax.Array:
    """`x` where valid, else NaN. Jitted even outside jit, so that `jax.debug_nans` only sees NaN in the result."""
    return jnp.where(valid, x, jnp.nan)


@jax.jit
def nan_added_unless(valid: jax.Array, x: jax.Array) -> jax.Array:
    """The same, with a derivative of 1 that compilers can see."""
    return x + jnp.where(valid, 0, jnp.nan).astype(x.dtype)


def strategy_for(logits_size: Any) -> tuple[str, str]:
    """The best strategy and why, from the number of logits alone; a symbolic size may have any value."""
    if jax.export.is_symbolic_dim(logits_size):
        return "full", f"as {logits_size} logits may be few"
    if logits_size <= SMALL_LOGITS:
        return "full", f"as {logits_size:,} logits are at most {SMALL_LOGITS:,}"
    return "grad_in_forward", f"as {logits_size:,} logits are more than {SMALL_LOGITS:,}"


def merged_statistics(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    targets: Targets,
    vocabulary: Vocabulary,
    *,
    softcap: float | None,
    keep_logits: bool,
    chunk_rows: int | None,
    metrics: bool,
    scale: jax.Array | None = None,
) -> RowStatistics:
    """The statistics of rows over the whole vocabulary; see `operator.linear_row_statistics`."""
    tile_logits = None if keep_logits else _tile_logits(targets.labels.size, weight.shape, chunk_rows)
    if vocabulary.axis is not None and x.dtype == jnp.float16:
        # Every part of the vocabulary contributes a share of x's gradient. For a mean these are too small for float16,
        # so they are added in float32.
        x = x.astype(jnp.float32)
    rows = linear_row_statistics(
        x,
        weight,
        bias,
        targets,
        softcap=softcap,
        tile_logits=tile_logits,
        keep_logits=keep_logits,
        metrics=metrics,
        scale=scale,
    )
    return vocabulary.merge(rows, targets, metrics=metrics)


def _tile_logits(rows: Any, weight_shape: tuple[int, ...], chunk_rows: int | None) -> int | None:
    """How many logits exist at a time: those of as many whole rows as the user says. A symbolic vocabulary: all."""
    vocabulary, features = weight_shape
    if jax.export.is_symbolic_dim(vocabulary):
        return None
    return default_tile_logits(rows, features) if chunk_rows is None else chunk_rows * vocabulary
