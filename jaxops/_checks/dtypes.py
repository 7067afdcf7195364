"""The dtypes that floating-point operators take and compute in, and ids in whichever integer dtype users keep them."""

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jaxops._checks.arguments import BAD_PARAM, require


def accumulation_dtype(*dtypes: Any) -> Any:
    """Returns the dtype to compute and sum data of these dtypes in: float64 if one of them is, else float32."""
    return jnp.dtype(jnp.float64 if jnp.dtype(jnp.float64) in dtypes else jnp.float32)


def check_floating(operator: str, **operands: Any) -> None:
    """Refuses operands that are not floating point."""
    for argument, x in operands.items():
        require(jnp.issubdtype(x.dtype, jnp.floating), operator, argument, "be floating point", x, status=BAD_PARAM)


def wide_dtype(dtype: Any) -> Any:
    """Returns the dtype of `wide_ids` for ids of this dtype."""
    return jnp.dtype(jnp.int64 if dtype.itemsize == 8 else jnp.int32)


def wide_ids(ids: jax.Array) -> jax.Array:
    """Casts ids to a signed dtype. Values that do not fit become negative, and so out of range."""
    return ids.astype(wide_dtype(ids.dtype))


def require_numbered(operator: str, argument: str, x: Any, size: int, ids: Any) -> None:
    """Refuses more rows or classes than ids, once they are signed, can number."""
    most = jnp.iinfo(wide_dtype(ids.dtype)).max
    fits = jax.export.is_symbolic_dim(size) or size <= most
    require(fits, operator, argument, f"have at most {most} rows or classes, as {wide_dtype(ids.dtype)} ids do", x)


def differ_from(ids: jax.Array, one: int) -> jax.Array:
    """Marks the ids that differ from `one`, which their dtype may be unable to hold."""
    limits = jnp.iinfo(ids.dtype)
    if not limits.min <= one <= limits.max:
        return jnp.ones_like(ids, dtype=bool)
    # In the ids' own dtype: JAX would give a Python number a signed dtype, which may not hold it.
    return ids != np.asarray(one, ids.dtype)


def ids_of_part(ids: jax.Array, size: int, axis_name: str) -> tuple[jax.Array, jax.Array]:
    """Returns local ids (-1 if another device owns them) and the ownership mask; every device owns `size` ids."""
    ids = wide_ids(ids)
    start = (jax.lax.axis_index(axis_name) * size).astype(ids.dtype)
    is_here = (ids >= start) & (ids < start + size)
    return jnp.where(is_here, ids - start, -jnp.ones_like(ids)), is_here
