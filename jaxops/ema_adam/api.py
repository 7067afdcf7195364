"""The public functions `ema_adam` and `ema_params`."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxops._checks.arguments import (
    PARAM_INVALID,
    BadParamError,
    OperatorError,
    as_array,
    is_bool,
    require,
    require_bool,
    require_choice,
    require_floating_dtype,
    require_present,
    require_real,
    require_tree,
)
from jaxops._checks.dtypes import accumulation_dtype
from jaxops._primitive.results import exportable
from jaxops.ema_adam.fused_apply import OnePass, require_shapes, rows_of
from jaxops.ema_adam.operator import APPLY_FUSED_EMA_ADAM, MODES, Number, require_wide_decay, step_coefficients
from jaxops.embedding.embedding_row_gradients import RowGradients
from lowering.describe import first_line
from lowering.pytrees import flattening_fault

# Signatures quote this and `Number`, whose parts would fill a screen of help().
Schedule = Callable[[jax.Array], jax.typing.ArrayLike]


_NAME = "ema_adam"
_RESTORE = "restore a checkpoint with `optimizer.init(params)` as the target"
_FROM_OPTAX = "help(jaxops.ema_adam) shows how to continue from a state of `optax.adamw`"
_MASK_RULE = "be a tree of bools, or a function of the parameters that returns one"


@exportable
class EmaParamsState(NamedTuple):
    """The exponential moving average of the parameters."""

    ema: Any


def ema_adam(
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
    """Returns Adam or AdamW that also averages the parameters exponentially, in one operator.

        g  = grad + weight_decay * params   ("l2")  |  grad   ("adamw")
        mu = b1 * mu + (1 - b1) * g
        nu = b2 * nu + (1 - b2) * g^2
        u  = (mu / c1) / (sqrt(nu / c2) + eps)   [+ weight_decay * params, in "adamw"]
        params = params - learning_rate * u
        ema    = ema_decay * ema + (1 - ema_decay) * params

    with c1 = 1 - b1^t and c2 = 1 - b2^t at step t = 1, 2, ... This equals `optax.adamw` ("adamw"), or `optax.adam`
    after `optax.add_decayed_weights` ("l2"), followed by an average of the parameters. `ema_params` reads the average.
    `fused_apply` takes a step without writing the updates to memory.

    The average follows the parameters that this transform's own update leads to, so put the transform last in a chain.
    After `optax.chain(ema_adam(...), optax.scale(0.1))` it would follow steps ten times as long as those of the
    parameters. `fused_apply`, which sees the whole transform, warns of that; `update` cannot know what follows it.

    Complex parameters count as two real ones under `optax.contrib.split_real_and_imaginary(ema_adam(...))`.

    Under `optax.inject_hyperparams`, numbers become arrays in the widest dtype of the parameters. If that has 16 bits,
    in which 0.999 is 1, use `inject_hyperparams(ema_adam, hyperparam_dtype=jnp.float32)`.

    To continue from a checkpoint of `optax.adamw`, whose state is `adamw_state`:

        fresh = optimizer.init(params)
        moments = jax.tree.map(lambda new, old: old.astype(new.dtype), fresh[0], adamw_state[0])
        opt_state = (moments, fresh[1])

    Args:
      learning_rate: a number, or a schedule: a function of the number of steps already taken.
      b1: the decay of the first moment.
      b2: the decay of the second moment.
      eps: added to the square root, after bias correction.
      weight_decay: the strength of the weight decay.
      mode: "adamw" decays the parameters directly, "l2" through the gradient.
      bias_correction: False takes c1 = c2 = 1.
      ema_decay: the decay of the average; a number or a schedule.
      mu_dtype: the dtype of the first moment. By default float32 for parameters of 16 bits or fewer, else the dtype of
        the parameters.
      nu_dtype: the dtype of the second moment, with the same default. At b2 = 0.999 a bfloat16 moment would stop
        halfway.
      ema_dtype: the dtype of the average, with the same default. At 0.9999 a bfloat16 average would never move.
      mask: which parameters decay: a tree of bools (or a prefix of the parameters' tree), or a function of the
        parameters that returns one. By default all.

    Returns:
      A transform. Its `update` requires `params` and returns updates in their dtype. Its state is the tuple
      `(optax.ScaleByAdamState(count, mu, nu), EmaParamsState(ema))`. The average starts equal to the parameters, in
      buffers of its own. If the parameters are `jax.ShapeDtypeStruct`s, so is the state. State and results keep the
      sharding of the parameters. If a gradient is None, its parameter and state stay as they are.

    Raises:
      BadParamError: if the mode is unknown, a dtype is not floating, b1 or b2 is outside [0, 1), ema_decay is outside
        [0, 1], eps or weight_decay is negative, or a decay is a 16-bit array; by `init` and `update` if a parameter is
        complex or an integer, or if the mask does not fit the parameters; and by `update` if `params` is missing or a
        gradient has another shape.

    Numerics:
      Everything is computed in float32 (float64 for float64 parameters) without intermediate rounding, whatever the
      dtypes of gradients, parameters and state. So the average follows 16-bit parameters as they are before they are
      rounded. Decays given as Python numbers lose nothing in 1 - b. Differentiable in gradients, parameters, state and
      those coefficients that are arrays, in both modes and to any order.

    Example:
      >>> optimizer = jaxops.ema_adam(0.1, ema_decay=0.5)
      >>> params = {"w": jnp.array([1.0, -1.0])}
      >>> state = optimizer.init(params)
      >>> updates, state = optimizer.update({"w": jnp.array([2.0, -5.0])}, state, params)
      >>> # The first step has the size of the learning rate.
      >>> print(np.asarray(updates["w"]).round(3))
      [-0.1  0.1]
      >>> print(np.asarray(jaxops.ema_params(state)["w"]).round(3))  # 0.5 * 1 + 0.5 * 0.9
      [ 0.95 -0.95]

    Source: CANN `aclnnApplyFusedEmaAdam`; Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.
    """
    mode = require_choice(_NAME, "mode", mode, MODES)
    _check_dtypes(mu_dtype=mu_dtype, nu_dtype=nu_dtype, ema_dtype=ema_dtype)
    b1, b2 = _checked_decay("b1", b1, below_one=True), _checked_decay("b2", b2, below_one=True)
    eps, weight_decay = _checked_size("eps", eps), _checked_size("weight_decay", weight_decay)
    learning_rate = learning_rate if _is_schedule(learning_rate) else _checked_number("learning_rate", learning_rate)
    ema_decay = ema_decay if _is_schedule(ema_decay) else _checked_decay("ema_decay", ema_decay, below_one=False)
    bias_correction = require_bool(_NAME, "bias_correction", bias_correction)
    if not _is_function(mask):
        _check_mask(mask)
    constants: dict[str, Any] = {"beta1": b1, "beta2": b2, "eps": eps, "bias_correction": bias_correction}

    def init(params: Any) -> Any:
        mu, nu = (_like(params, dtype, jnp.zeros_like) for dtype in (mu_dtype, nu_dtype))
        _decay_mask(mask, params)  # refuses one that does not fit before any step is taken
        adam = optax.ScaleByAdamState(count=jnp.zeros([], jnp.int32), mu=mu, nu=nu)
        return adam, EmaParamsState(_like(params, ema_dtype, functools.partial(jnp.array, copy=True)))

    def update(
        grads: Any, state: Any, params: Any = None, *, one_pass: OnePass | None = None, **extra_args: Any
    ) -> Any:
        del extra_args
        require_present(_NAME, {"params": params})
        require_tree(_NAME, "params", params)
        is_plan = one_pass is None or isinstance(one_pass, OnePass)
        require(is_plan, _NAME, "one_pass", "be what fused_apply passes", one_pass)
        adam, average = checked_state(_NAME, state)
        count = optax.safe_increment(adam.count)

        @functools.cache
        def coefficients(dtype: Any, decays: bool) -> jax.Array:
            return step_coefficients(
                count,
                dtype,
                learning_rate=_scheduled("learning_rate", learning_rate, adam.count),
                ema_decay=_scheduled("ema_decay", ema_decay, adam.count),
                weight_decay=weight_decay if decays else 0.0,
                **constants,
            )

        decays = _decay_mask(mask, params)
        trees = {"grads": grads, "params": params, "mu": adam.mu, "nu": adam.nu, "ema": average.ema, "mask": decays}
        rows, structure = rows_of(_NAME, **trees)
        require_shapes(_NAME, params, grads=grads, mu=adam.mu, nu=adam.nu, ema=average.ema)
        results = [_step(*row, coefficients=coefficients, mode=mode, one_pass=one_pass) for row in rows]
        updates, mu, nu, ema = (structure.unflatten(result[i] for result in results) for i in range(4))
        return updates, (optax.ScaleByAdamState(count, mu, nu), EmaParamsState(ema))

    return optax.GradientTransformationExtraArgs(init, update)


def _step(
    grad: Any,
    var: Any,
    m: Any,
    v: Any,
    s: Any,
    decays: bool,
    *,
    coefficients: Callable[[Any, bool], jax.Array],
    mode: str,
    one_pass: OnePass | None,
) -> tuple[Any, ...]:
    """Computes the update (or new parameters, where `one_pass` plans them) and new state of one array."""
    if grad is None:
        return None, m, v, s
    require(var is not None, _NAME, "params", "have an array where grads has one", None)
    is_array = not isinstance(grad, RowGradients)
    require(is_array, _NAME, "grads", "hold arrays (ema_adam_rows takes the others)", type(grad).__name__)
    named = zip(("grads", "params", "mu", "nu", "ema"), (grad, var, m, v, s), strict=True)
    operands = [as_array(_NAME, argument, x) for argument, x in named]
    _check_floating(operands[1])
    vector = coefficients(accumulation_dtype(operands[1].dtype), decays)
    operator = functools.partial(APPLY_FUSED_EMA_ADAM, *operands, vector, mode=mode)
    return operator(output="update") if one_pass is None else one_pass.step(operator, var)


def ema_params(opt_state: Any, params: Any = None) -> Any:
    """Reads the average of the parameters that `ema_adam` keeps, from any optax state that contains it.

    Looks inside `optax.chain`, `inject_hyperparams`, `MultiSteps`, `masked`, `multi_transform` and every other state
    that is a pytree, and joins the parts of complex parameters. If several `ema_adam`s share the parameters between
    them, their averages are merged.

    It is the average of the parameters only if the updates of `ema_adam` were applied as they are, so that no transform
    came after it in a chain.

    Under `optax.flatten` it is one vector, as the parameters are that `ema_adam` was given.
    `jax.flatten_util.ravel_pytree(params)[1]` parts it again.

    Args:
      opt_state: the optimizer state.
      params: what to return for parameters that no `ema_adam` averages. By default their places hold
        `optax.MaskedNode()`.

    Returns:
      A tree with the structure of the parameters that `ema_adam` was given, in the dtypes of the averages (see
      `ema_dtype`). The arrays are those of the state, not copies.

    Raises:
      BadParamError: if there is no average, or more than one for the same parameter.

    Example:
      >>> import optax
      >>> optimizer = optax.chain(optax.clip_by_global_norm(1.0), jaxops.ema_adam(1e-3))
      >>> jaxops.ema_params(optimizer.init({"w": jnp.array([1.0, 2.0])}))
      {'w': Array([1., 2.], dtype=float32)}
    """
    require_tree("ema_params", "opt_state", opt_state)
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, EmaParamsState))
    averages = [node.ema for node in nodes if isinstance(node, EmaParamsState)]
    averages = [jax.tree.map(_joined, average, is_leaf=_is_split) for average in averages]
    rule = f"hold the state of an ema_adam as its init returned it; {_RESTORE}"
    require(bool(averages), "ema_params", "opt_state", rule, opt_state)
    try:
        merged = functools.reduce(_merged, averages)
    except (TypeError, ValueError) as error:
        is_ours = isinstance(error, OperatorError)
        require(is_ours, "ema_params", "opt_state", "hold averages of one tree of parameters only", averages)
        raise
    if params is None:
        return merged
    require_tree("ema_params", "params", params)
    try:
        return jax.tree.map(lambda ema, rest: rest if _is_masked(ema) else ema, merged, params, is_leaf=_is_masked)
    except (TypeError, ValueError):
        require(False, "ema_params", "params", "have the structure of the parameters that opt_state averages", params)
        raise


def _merged(left: Any, right: Any) -> Any:
    """Merges two trees that are masked in different places; a masked place may stand for a whole subtree."""
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


def _is_split(x: Any) -> bool:
    """Tells whether `optax.contrib.split_real_and_imaginary` holds a complex parameter in two parts."""
    return getattr(x, "_fields", None) == ("real", "imaginary")


def _joined(x: Any) -> Any:
    return x.real + 1j * x.imaginary if _is_split(x) else x


def _like(params: Any, dtype: Any, make: Callable[..., jax.Array]) -> Any:
    """Calls `make(x, dtype=...)` for every parameter; for a `ShapeDtypeStruct`, returns only the result's type."""

    def like(path: Any, x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            x = as_array(_NAME, "params", x)
        own = x.dtype
        _check_floating(x, f" at {jax.tree_util.keystr(path)}" if path else "")
        narrow = jnp.issubdtype(own, jnp.floating) and own.itemsize < 4
        wanted = jax.dtypes.canonicalize_dtype(dtype or (jnp.float32 if narrow else own))
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, wanted, sharding=x.sharding)
        return make(x, dtype=wanted)

    require_tree(_NAME, "params", params)
    return jax.tree_util.tree_map_with_path(like, params)


def _check_floating(x: Any, where: str = "") -> None:
    is_floating = bool(jnp.issubdtype(x.dtype, jnp.floating))
    is_complex = bool(jnp.issubdtype(x.dtype, jnp.complexfloating))
    way = "contrib.split_real_and_imaginary takes complex ones" if is_complex else "masked leaves the others alone"
    require(is_floating, _NAME, "params", f"have a floating dtype{where} (optax.{way})", x)


def checked_state(operator: str, state: Any) -> tuple[optax.ScaleByAdamState, EmaParamsState]:
    """Returns the two parts of an `ema_adam` state; raises BadParamError for any other state."""
    is_pair = isinstance(state, tuple | list) and len(state) == 2
    is_own = is_pair and isinstance(state[0], optax.ScaleByAdamState) and isinstance(state[1], EmaParamsState)
    is_of_optax = isinstance(state, tuple) and any(isinstance(x, optax.ScaleByAdamState) for x in state)
    rule = f"be what the init of this transform returned; {_FROM_OPTAX if is_of_optax else _RESTORE}"
    require(is_own, operator, "state", rule, state)
    count = as_array(operator, "state", state[0].count)
    is_count = count.shape == () and bool(jnp.issubdtype(count.dtype, jnp.integer))
    require(is_count, operator, "state", "have a 0-d integer as its count", count)
    return state[0], state[1]


def _decay_mask(mask: Any, params: Any) -> Any:
    """Returns a bool for every parameter: whether it decays."""
    chosen = True if mask is None else mask
    if _is_function(mask):
        chosen = _called("mask", _MASK_RULE, mask, params)
    _check_mask(chosen)
    try:
        return jax.tree.broadcast(jax.tree.map(bool, chosen), params)
    except (TypeError, ValueError):
        require(False, _NAME, "mask", "have the structure of params, or a prefix of it", chosen)
        raise


def _check_dtypes(**dtypes: Any) -> None:
    for name, dtype in dtypes.items():
        if dtype is not None:
            require_floating_dtype(_NAME, name, dtype)


def _check_mask(mask: Any) -> None:
    """Refuses masks whose leaves are not all bools."""
    require_tree(_NAME, "mask", mask)
    for leaf in jax.tree.leaves(mask):
        is_array = isinstance(leaf, np.ndarray | jax.Array) and not isinstance(leaf, jax.core.Tracer)
        fits = is_bool(leaf) or (is_array and leaf.shape == () and leaf.dtype == jnp.bool_)
        require(fits, _NAME, "mask", _MASK_RULE, leaf)


def _is_function(mask: Any) -> bool:
    # A callable module may still be a tree of bools.
    if not callable(mask) or isinstance(mask, type):
        return False
    return flattening_fault(mask) is None and jax.tree_util.all_leaves([mask])


def _is_schedule(number: Any) -> bool:
    return callable(number) and not isinstance(number, type)


def _scheduled(name: str, number: Any, count: jax.Array) -> Any:
    if not _is_schedule(number):
        return number
    rule = "be a schedule that takes a 0-d array and returns a finite number or a 0-d array of one"
    return require_real(_NAME, name, _called(name, rule, number, count), rule, traced=True)


def _called(name: str, rule: str, function: Callable[[Any], Any], argument: Any) -> Any:
    """Calls a user's function; its exception becomes the cause of ours, which names the argument."""
    try:
        return function(argument)
    except Exception as error:
        message = f"{_NAME}: {name} must {rule}; got one that raises {first_line(error)}"
        raise BadParamError(message, PARAM_INVALID) from error


def _checked_number(name: str, number: Any) -> Any:
    rule = "be a finite number or a 0-d array of one"
    if name in ("learning_rate", "ema_decay"):
        rule += ", or a schedule"
    elif _is_schedule(number):
        rule += " (optax.inject_hyperparams takes schedules of it)"
    return require_real(_NAME, name, number, rule, traced=True)


def _checked_size(name: str, size: Any) -> Any:
    number = _checked_number(name, size)
    return require_real(_NAME, name, number, "be at least 0", least=0, traced=True)


def _checked_decay(name: str, decay: Any, *, below_one: bool) -> Any:
    number = _checked_number(name, decay)
    require_wide_decay(_NAME, name, decay, " (optax.inject_hyperparams has hyperparam_dtype)")
    if isinstance(number, float):
        below = 1.0 if below_one else None
        require_real(
            _NAME, name, decay, f"lie in [0, 1{')' if below_one else ']'}", least=0, most=1, below=below, traced=True
        )
    return number
