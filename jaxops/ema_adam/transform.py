"""EMA-Adam as an optax transform."""

import functools
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxops._errors import require, require_bool, require_number, require_present
from jaxops.ema_adam.one_pass import OnePass, rows_of
from jaxops.ema_adam.operator import APPLY_FUSED_EMA_ADAM, MODES, Number, compute_dtype, step_coefficients
from jaxops.embedding.row_gradients import RowGradients

Schedule = Callable[[jax.Array], jax.typing.ArrayLike]


class EmaParamsState(NamedTuple):
    """The exponential moving average of the parameters."""

    ema: Any


def ema_adam(
    learning_rate: Number | Schedule,
    *,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    weight_decay: Number = 0.0,
    mode: str = "adamw",
    bias_correction: bool = True,
    ema_decay: Number | Schedule = 0.9999,
    mu_dtype: Any | None = None,
    nu_dtype: Any | None = None,
    ema_dtype: Any | None = None,
    mask: Any | Callable[[Any], Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Adam or AdamW that keeps an exponential moving average of the parameters, in one pass over memory.

        g  = grad + weight_decay * params   ("l2")  |  grad   ("adamw")
        mu = b1 * mu + (1 - b1) * g
        nu = b2 * nu + (1 - b2) * g^2
        u  = (mu / c1) / (sqrt(nu / c2) + eps)   [+ weight_decay * params, in "adamw"]
        params = params - learning_rate * u
        ema    = ema_decay * ema + (1 - ema_decay) * params

    with c1 = 1 - b1^t and c2 = 1 - b2^t at step t = 1, 2, ... It equals `optax.adamw` ("adamw"), or `optax.adam` after
    `optax.add_decayed_weights` ("l2"), followed by an average of the parameters. `ema_params` reads the average, and
    `fused_apply` takes a step without materialising updates.

    The average is that of the parameters which the update of this transform gives: let it be the last of a chain.

    Args:
      learning_rate: a number or a schedule: a function of the count of steps already taken.
      b1: the decay of the first moment.
      b2: the decay of the second moment.
      eps: added to the square root, after bias correction.
      weight_decay: strength of the decay.
      mode: "adamw" decays parameters beside the moments, "l2" through the gradient.
      bias_correction: False takes c1 = c2 = 1.
      ema_decay: the decay of the average; a number or a schedule.
      mu_dtype: of the first moment. By default float32 for parameters of 16 bits or fewer, else the parameters' own.
      nu_dtype: of the second moment, with the same default: at b2 = 0.999 a bfloat16 one would stop halfway.
      ema_dtype: of the average, with the same default: at 0.9999 a bfloat16 one would never move.
      mask: which parameters decay: a tree of bools (a prefix of the parameters' tree), or a function of the
        parameters that returns one. By default all.

    Returns:
      A transform whose `update` requires `params` and returns updates in their dtype. Its state is the tuple
      `(optax.ScaleByAdamState(count, mu, nu), EmaParamsState(ema))`. The average starts equal to the parameters, in
      buffers of its own. For parameters that are `jax.ShapeDtypeStruct`s, so are the state's. State and results keep
      the parameters' sharding. A gradient of None leaves its parameter and state as they are.

    Raises:
      BadParamError: for an unknown mode, a dtype that is not floating, b1 or b2 outside of [0, 1), ema_decay outside
        of [0, 1], decays given as 16-bit arrays, and by `update` without `params`.

    Numerics:
      Everything is computed in float32 (float64 for float64 parameters) without intermediate rounding, whatever the
      dtypes of gradients, parameters and state. Decays given as Python numbers lose nothing in 1 - b. Differentiable
      in gradients, parameters, state and those coefficients that are arrays, in both modes and to any order.

    Example:
      Under `optax.inject_hyperparams` numbers become arrays in the widest dtype of the parameters. If that has 16
      bits, where 0.999 is 1, `inject_hyperparams(ema_adam, hyperparam_dtype=jnp.float32)` is needed.

      A checkpoint of `optax.adamw` continues as

        fresh = optimizer.init(params)
        moments = jax.tree.map(lambda new, old: old.astype(new.dtype), fresh[0], adamw_state[0])
        opt_state = (moments, fresh[1])

    Source: CANN `aclnnApplyFusedEmaAdam`; Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.
    """
    require(mode in MODES, "ema_adam", "mode", f"be one of {', '.join(MODES)}", mode)
    for name, dtype in {"mu_dtype": mu_dtype, "nu_dtype": nu_dtype, "ema_dtype": ema_dtype}.items():
        require(dtype is None or _is_floating(dtype), "ema_adam", name, "be a floating dtype", dtype)
    numbers = {"b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay}
    schedules = {"learning_rate": learning_rate, "ema_decay": ema_decay}
    for name, number in (numbers | {name: value for name, value in schedules.items() if not callable(value)}).items():
        require_number("ema_adam", name, number)
    require_bool("ema_adam", "bias_correction", bias_correction)
    require(not isinstance(mask, str), "ema_adam", "mask", "be a tree of bools, or a function that returns one", mask)
    _check_decay("b1", b1, below_one=True)
    _check_decay("b2", b2, below_one=True)
    _check_decay("ema_decay", ema_decay, below_one=False)

    def init(params: Any) -> Any:
        mu = _like(params, mu_dtype, jnp.zeros_like)
        nu = _like(params, nu_dtype, jnp.zeros_like)
        adam = optax.ScaleByAdamState(count=jnp.zeros([], jnp.int32), mu=mu, nu=nu)
        return adam, EmaParamsState(_like(params, ema_dtype, functools.partial(jnp.array, copy=True)))

    def update(
        grads: Any, state: Any, params: Any = None, *, one_pass: OnePass | None = None, **extra_args: Any
    ) -> Any:
        del extra_args
        require_present("ema_adam", params=params)
        adam, average = state
        count = optax.safe_increment(adam.count)

        @functools.cache
        def coefficients(dtype: Any, decays: bool) -> jax.Array:
            return step_coefficients(
                count,
                dtype,
                learning_rate=_scheduled(learning_rate, adam.count),
                ema_decay=_scheduled(ema_decay, adam.count),
                beta1=b1,
                beta2=b2,
                eps=eps,
                weight_decay=weight_decay if decays else 0.0,
                bias_correction=bias_correction,
            )

        def step(grad: Any, var: Any, m: Any, v: Any, s: Any, decays: bool) -> tuple[Any, ...]:
            if grad is None:
                return None, m, v, s
            require(var is not None, "ema_adam", "params", "have an array where grads has one", None)
            is_array = not isinstance(grad, RowGradients)
            require(is_array, "ema_adam", "grads", "hold arrays (ema_adam_rows takes the others)", type(grad).__name__)
            operands = [jnp.asarray(x) for x in (grad, var, m, v, s)]
            vector = coefficients(compute_dtype(operands[1].dtype), decays)
            operator = functools.partial(APPLY_FUSED_EMA_ADAM, *operands, vector, mode=mode)
            return operator(output="update") if one_pass is None else one_pass.step(operator, var)

        rows, structure = rows_of(grads, params, adam.mu, adam.nu, average.ema, _decay_mask(mask, params))
        results = [step(*row) for row in rows]
        updates, mu, nu, ema = (structure.unflatten(result[i] for result in results) for i in range(4))
        return updates, (optax.ScaleByAdamState(count, mu, nu), EmaParamsState(ema))

    return optax.GradientTransformationExtraArgs(init, update)


def ema_params(opt_state: Any, params: Any = None) -> Any:
    """The average of the parameters that `ema_adam` keeps, from any optax state that holds it.

    Looks into `optax.chain`, `inject_hyperparams`, `MultiSteps`, `masked`, `multi_transform` and every other state
    that is a pytree. Where several `ema_adam`s share the parameters between them, their averages are merged.

    Args:
      opt_state: the state.
      params: what to return for parameters that no `ema_adam` averages. By default their places hold
      `optax.MaskedNode()`.

    Returns:
      A tree of the parameters' structure, in the dtypes of the averages (see `ema_dtype`): the arrays of the state,
      not copies.

    Raises:
      BadParamError: if no average is found, or more than one of some parameter.
    """
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, EmaParamsState))
    averages = [node.ema for node in nodes if isinstance(node, EmaParamsState)]
    require(bool(averages), "ema_params", "opt_state", "hold the state of an ema_adam", type(opt_state).__name__)
    merged = functools.reduce(_merged, averages)
    if params is None:
        return merged
    return jax.tree.map(lambda ema, rest: rest if _is_masked(ema) else ema, merged, params, is_leaf=_is_masked)


def _merged(left: Any, right: Any) -> Any:
    """One tree of two that are masked in different places; a masked place may stand for a whole subtree."""
    if _is_masked(left):
        return right
    if _is_masked(right):
        return left
    one_level: Any = jax.tree.structure(left, is_leaf=lambda x: x is not left)
    is_leaf = jax.tree_util.treedef_is_leaf(one_level)
    require(not is_leaf, "ema_params", "opt_state", "hold no more than one average of a parameter", left)
    return one_level.unflatten(map(_merged, *map(one_level.flatten_up_to, (left, right))))


def _is_masked(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)


def _like(params: Any, dtype: Any, make: Callable[..., jax.Array]) -> Any:
    """`make(x, dtype=...)` of every parameter, or the type of that for parameters of which only the type is known."""

    def like(x: Any) -> Any:
        own = jnp.result_type(x)
        narrow = jnp.issubdtype(own, jnp.floating) and own.itemsize < 4
        wanted = jax.dtypes.canonicalize_dtype(dtype or (jnp.float32 if narrow else own))
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, wanted, sharding=x.sharding)
        return make(x, dtype=wanted)

    return jax.tree.map(like, params)


def _decay_mask(mask: Any, params: Any) -> Any:
    """A bool for every parameter: whether it decays."""
    is_function = callable(mask) and jax.tree_util.all_leaves([mask])
    chosen = mask(params) if is_function else True if mask is None else mask
    return jax.tree.broadcast(jax.tree.map(bool, chosen), params)


def _scheduled(number: Any, count: jax.Array) -> Any:
    return number(count) if callable(number) else number


def _check_decay(name: str, decay: Any, *, below_one: bool) -> None:
    if hasattr(decay, "dtype"):
        rule = "be at least float32: in 16 bits a decay near 1 is 1 (optax.inject_hyperparams has hyperparam_dtype)"
        require(jnp.dtype(decay.dtype).itemsize >= 4, "ema_adam", name, rule, decay)
    if isinstance(decay, Real):
        within = 0 <= float(decay) < 1 if below_one else 0 <= float(decay) <= 1
        require(within, "ema_adam", name, f"lie in [0, 1{')' if below_one else ']'}", decay)


def _is_floating(dtype: Any) -> bool:
    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:
        return False
