"""The public function `ema_adam_rows`: EMA-Adam on the touched rows of embedding tables."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

from jaxops._checks.arguments import as_array, require, require_present
from jaxops._checks.dtypes import accumulation_dtype
from jaxops.ema_adam.api import EmaParamsState, Schedule, checked_state, ema_adam
from jaxops.ema_adam.fused_apply import rows_of
from jaxops.ema_adam.operator import Number
from jaxops.embedding.embedding_row_gradients import RowGradients, rows_at, with_rows

_NAME = "ema_adam_rows"
_ARGUMENTS = ("params", "mu", "nu", "ema")


def ema_adam_rows(
    learning_rate: "Number | Schedule",
    *,
    b1: "Number" = 0.9,
    b2: "Number" = 0.999,
    eps: "Number" = 1e-8,
    weight_decay: "Number" = 0.0,
    mode: str = "adamw",
    bias_correction: bool = True,
    ema_decay: "Number | Schedule" = 0.9999,
    mu_dtype: Any | None = None,
    nu_dtype: Any | None = None,
    ema_dtype: Any | None = None,
    mask: Any | Callable[[Any], Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Returns an `ema_adam` for embedding tables whose gradients hold only the touched rows.

    Wherever the tree of gradients holds `RowGradients`, made by `embedding_row_gradients`, only these rows of the
    table, of its moments and of its average are read and written. Ordinary arrays are updated as by `ema_adam`:

        optimizer = jaxops.ema_adam_rows(1e-3)
        words = params["table"].shape[0]
        touched = jaxops.embedding_row_gradients(grad, tokens, num_weights=words)
        grads = {"table": touched, "head": grad_of_head}
        params, opt_state = jaxops.fused_apply(optimizer, grads, opt_state, params)

    A step touches a row if the row's id is in `RowGradients.rows`: if it was looked up, even if its gradient is zero. A
    touched row takes exactly the step that `ema_adam` takes for this gradient: its weights decay once, its moments
    decay once, its average moves once, and bias is corrected by the number of all steps.

    Nothing happens to the other rows, and nothing is made up for later: no weight decay, no momentum, no decay of the
    moments, no change of the average. So weights and averages depend on how often a row is looked up. Elsewhere this is
    called lazy Adam. With `weight_decay`, rare rows decay less. With `ema_decay`, the average of a row looks back over
    the steps that touched it.

    Args:
      learning_rate: as in `ema_adam`, like all other arguments.
      b1: the decay of the first moment.
      b2: the decay of the second moment.
      eps: added to the square root of the second moment.
      weight_decay: the strength of the weight decay.
      mode: "adamw" or "l2".
      bias_correction: whether moments are corrected.
      ema_decay: the decay of the average.
      mu_dtype: the dtype of the first moment.
      nu_dtype: the dtype of the second moment.
      ema_dtype: the dtype of the average.
      mask: which parameters decay.

    Returns:
      A transform with the state of `ema_adam`, so that either can continue from the other and `ema_params` reads the
      average. Where the gradients hold `RowGradients`, so do the updates; their values are the changes of the rows, in
      float32 for 16-bit tables. `fused_apply` applies them. Other transforms do not know `RowGradients`, so clip or
      scale gradients before `embedding_row_gradients`, not in a chain.

    Raises:
      BadParamError: as `ema_adam`; by `update` also if the table does not have rows as wide as these gradients.

    Numerics:
      As in `ema_adam`. With donated parameters and state, memory is proportional to the number of touched rows. XLA's
      CPU compiler copies bfloat16 tables when rows are written to them.

    Example:
      >>> optimizer = jaxops.ema_adam_rows(0.1)
      >>> params = {"table": jnp.ones((4, 2))}
      >>> touched = jaxops.embedding_row_gradients(
      ...     jnp.ones((1, 2)), jnp.array([2]), num_weights=4
      ... )
      >>> params, state = jaxops.fused_apply(
      ...     optimizer, {"table": touched}, optimizer.init(params), params
      ... )
      >>> print(np.asarray(params["table"][:, 0]).round(3))  # only row 2 has changed
      [1.  1.  0.9 1. ]
    """
    dense = ema_adam(
        learning_rate,
        b1=b1,
        b2=b2,
        eps=eps,
        weight_decay=weight_decay,
        mode=mode,
        bias_correction=bias_correction,
        ema_decay=ema_decay,
        mu_dtype=mu_dtype,
        nu_dtype=nu_dtype,
        ema_dtype=ema_dtype,
        mask=mask,
    )

    def update(grads: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        require_present(_NAME, {"params": params})
        adam, average = checked_state(_NAME, state)
        rows, structure = rows_of(_NAME, grads=grads, params=params, mu=adam.mu, nu=adam.nu, ema=average.ema)
        # The touched rows take the step of a table that consists of them alone.
        operands = [_touched(*row) if isinstance(row[0], RowGradients) else row for row in rows]
        small = [structure.unflatten(column) for column in zip(*operands, strict=True)] if rows else [grads] * 5
        small_state = adam._replace(mu=small[2], nu=small[3]), EmaParamsState(small[4])
        updates, (new_adam, new_average) = dense.update(small[0], small_state, small[1], **extra_args)
        results, _ = rows_of(_NAME, updates=updates, mu=new_adam.mu, nu=new_adam.nu, ema=new_average.ema)
        merged = [_merged(*row, *result) for row, result in zip(rows, results, strict=True)]
        updates, mu, nu, ema = (structure.unflatten(one[i] for one in merged) for i in range(4))
        return updates, (new_adam._replace(mu=mu, nu=nu), EmaParamsState(ema))

    return optax.GradientTransformationExtraArgs(dense.init, update)


def _touched(grad: RowGradients, table: Any, *state: Any) -> tuple[Any, ...]:
    """Returns the gradient, parameters and state of the touched rows; parameters in the dtype of their update."""
    rows, values = as_array(_NAME, "grads", grad.rows), as_array(_NAME, "grads", grad.values)
    is_pair = rows.ndim == 1 and values.ndim == 2 and values.shape[0] == rows.size
    is_pair = is_pair and bool(jnp.issubdtype(rows.dtype, jnp.integer) and jnp.issubdtype(values.dtype, jnp.floating))
    require(is_pair, _NAME, "grads", "hold RowGradients of integer rows (K,) and floating-point values (K, D)", grad)
    table, *moments = (as_array(_NAME, argument, x) for argument, x in zip(_ARGUMENTS, (table, *state), strict=True))
    fits = table.ndim == 2 and table.shape[1] == values.shape[-1]
    require(fits, _NAME, "params", f"have a table (V, {values.shape[-1]}) for RowGradients", table)
    dtype = accumulation_dtype(table.dtype)
    return values, rows_at(table, rows, dtype), *(rows_at(x, rows, x.dtype) for x in moments)


def _merged(grad: Any, table: Any, m: Any, v: Any, s: Any, *results: Any) -> tuple[Any, ...]:
    """Returns the update, and the state with the results in the touched rows."""
    if not isinstance(grad, RowGradients):
        return results
    update, *new_rows = results
    old = (as_array(_NAME, "state", x) for x in (m, v, s))
    state = (with_rows(x, grad.rows, rows) for x, rows in zip(old, new_rows, strict=True))
    return RowGradients(grad.rows, update), *state
