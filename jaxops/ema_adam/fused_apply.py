"""The public function `fused_apply`: `ema_adam` in one operator, whatever transforms stand around it."""

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import jax
import optax

from jaxops._checks.arguments import (
    PARAM_INVALID,
    BadParamError,
    OperatorError,
    as_array,
    require,
    require_present,
    require_tree,
)
from jaxops.ema_adam.drift import drifts
from jaxops.embedding.embedding_row_gradients import RowGradients, rows_at, with_rows
from lowering.describe import is_like_array, show

Step = Callable[..., tuple[jax.Array, ...]]

_NAME = "fused_apply"
_DRIFT = (
    "fused_apply: what follows ema_adam in the transform may change its updates, but its average follows the "
    "parameters that its own updates lead to: wherever they change, it drifts away; put ema_adam last in the chain"
)
# What updates the transforms that a user has been warned of.
_told: weakref.WeakSet[Any] = weakref.WeakSet()


def fused_apply(
    transform: optax.GradientTransformation, grads: Any, opt_state: Any, params: Any, **extra_args: Any
) -> tuple[Any, Any]:
    """Takes one optimizer step, `transform.update` and then `optax.apply_updates`, in one operator.

    A kernel needs one pass over memory for it. XLA's code for a CPU has a loop for each result, as for optax.

    Where the whole transform returns an update just as `ema_adam` made it, the operator writes the new parameters
    itself. This holds for `ema_adam` alone, and inside `optax.chain` after clipping, `inject_hyperparams`,
    `multi_transform` and `masked`. Updates that something else reads or changes afterwards, or that other transforms
    make, are added to the parameters as usual. The results are those of the two calls, except that parameters of 16
    bits which are written directly are rounded once instead of twice.

    Donate the buffers, so that parameters and state are updated in place:

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def train_step(params, opt_state, batch):
            grads = jax.grad(loss)(params, batch)
            return jaxops.fused_apply(optimizer, grads, opt_state, params)

    Pass donated parameters before a donated state, in the order of the results. JAX pairs buffers of the same type in
    the order in which it meets them; if they are paired otherwise, every array is copied.

    Args:
      transform: any optax transform.
      grads: gradients with the structure of `params`. If a leaf is None, its parameter stays as it is. With
        `ema_adam_rows`, tables may have `RowGradients`.
      opt_state: what `transform.init` or the last step returned.
      params: the parameters.
      **extra_args: passed on to `transform.update`.

    Returns:
      The new parameters, with the dtypes of `params`, and the new state.

    Warns:
      UserWarning: once for each transform that returns other updates than those of the `ema_adam` in it, as
        `optax.chain(ema_adam(...), optax.scale(0.1))` does: the average would not be that of the parameters. Steps may
        be skipped, if the average then stays as it is. Under `optax.flatten` it warns needlessly, as updates that are
        joined and parted cannot be told from others.

    Raises:
      BadParamError: if `transform` is not a transform, `params` is None, a tree holds something other than arrays, or
        the trees do not match each other.

    Example:
      >>> optimizer = jaxops.ema_adam(0.5)
      >>> params = {"w": jnp.array([1.0, 2.0])}
      >>> grads = {"w": jnp.array([4.0, -4.0])}
      >>> params, state = jaxops.fused_apply(optimizer, grads, optimizer.init(params), params)
      >>> # The first step of Adam has the size of the learning rate.
      >>> print(np.asarray(params["w"]).round(3))
      [0.5 2.5]
    """
    is_transform = callable(getattr(transform, "init", None)) and callable(getattr(transform, "update", None))
    require(is_transform, _NAME, "transform", "be a transform of optax", transform)
    require_present(_NAME, {"params": params})
    rows_of(_NAME, grads=grads, params=params)  # before leaves are looked at
    require_tree(_NAME, "opt_state", opt_state)
    grads = jax.tree.map(functools.partial(as_array, _NAME, "grads"), grads)
    params = jax.tree.map(functools.partial(as_array, _NAME, "params"), params)
    require_shapes(_NAME, params, grads=grads)
    extended = optax.with_extra_args_support(transform)
    try:
        outputs, is_written, is_changed = _survey(extended, grads, opt_state, params, extra_args)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if not isinstance(error, OperatorError):
            _require_own_state(transform, opt_state, params)
            _require_arrays(grads, error)
        raise
    if is_changed and _is_told_first(transform):
        warnings.warn(_DRIFT, stacklevel=2)
    updates, opt_state = extended.update(grads, opt_state, params, one_pass=_Plan(outputs), **extra_args)
    rows, structure = rows_of(_NAME, params=params, updates=updates)
    new_params = [x if done else _applied(old, x) for (old, x), done in zip(rows, is_written, strict=True)]
    return structure.unflatten(new_params), opt_state


def _require_arrays(grads: Any, error: Exception) -> None:
    """Refuses rows of gradients where a transform has failed, as most do that change gradients before the update."""
    has_rows = any(isinstance(x, RowGradients) for x in jax.tree.leaves(grads, is_leaf=_is_leaf))
    rule = f"be arrays for every transform but ema_adam_rows, and this one raises {type(error).__name__}"
    if has_rows:
        raise BadParamError(f"{_NAME}: grads must {rule}; got RowGradients", PARAM_INVALID) from error


def require_shapes(operator: str, params: Any, /, **trees: Any) -> None:
    """Refuses arrays that are not as large as their parameters, by their paths in the first tree."""
    rows, _ = rows_of(operator, **trees, params=params)
    first = next(iter(trees.values()))
    paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(first, is_leaf=_is_leaf))
    for path, (*arrays, param) in zip(paths, rows, strict=True):
        for argument, array in zip(trees, arrays, strict=True):
            if is_like_array(array) and is_like_array(param):
                rule = f"have its parameter's shape {list(param.shape)}"
                where = f"{argument}{jax.tree_util.keystr(path)}"
                require(array.shape == param.shape, operator, where, rule, array)


def rows_of(operator: str, /, **trees: Any) -> tuple[list[tuple[Any, ...]], Any]:
    """Returns the first tree's leaves (None is a leaf), each with its counterparts in others; and its structure."""
    first = next(iter(trees))
    require_tree(operator, first, trees[first])
    structure: Any = jax.tree.structure(trees[first], is_leaf=_is_leaf)
    columns = []
    for argument, tree in trees.items():
        try:
            columns.append(structure.flatten_up_to(tree))
        except Exception:  # JAX's message shows a leaf, whose repr may fail
            message = (
                f"{operator}: {argument} must have the structure of {first}, {show(trees[first])}; got {show(tree)}"
            )
            raise BadParamError(message, PARAM_INVALID) from None
    return list(zip(*columns, strict=True)), structure


class OnePass:
    """Extra argument `one_pass` that `fused_apply` passes to every `ema_adam` inside a transform.

    It decides for each array whether to return the update or the new parameters. It has no leaves and equals only
    itself, so transforms that jit their update trace again for each instance.
    """

    def step(self, step: Step, var: jax.Array) -> tuple[jax.Array, ...]:
        """Runs `step(output="params")` or `step(output="update")` for the parameters `var`."""
        raise NotImplementedError


@jax.tree_util.register_static
class _Survey(OnePass):
    """Record of the identity of each step's parameters and update, which keeps no tracers alive."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, weakref.ref[jax.Array]]] = []

    def step(self, step: Step, var: jax.Array) -> tuple[jax.Array, ...]:
        results = step(output="update")
        self.steps.append((id(var), weakref.ref(results[0])))
        return results


@jax.tree_util.register_static
class _Plan(OnePass):
    """Plan that hands out what the survey found, in the same order."""

    def __init__(self, outputs: Iterable[str]) -> None:
        self._outputs = iter(outputs)

    def step(self, step: Step, var: jax.Array) -> tuple[jax.Array, ...]:
        return step(output=next(self._outputs))


def _survey(
    transform: Any, grads: Any, opt_state: Any, params: Any, extra_args: Any
) -> tuple[list[str], list[bool], bool]:
    """Finds what each step inside the transform may return, which leaves of `params` that writes, and drift.

    The transform is traced once, and nothing is computed. An update is untouched if, at the place of its own
    parameters, it is the very tracer that its step returned. It is unread if no equation and no state uses it.
    """
    survey = _Survey()
    steps: list[tuple[int, int]] = []
    places: list[tuple[int, int]] = []
    untouched: list[tuple[int, int]] = []
    of_params: list[int] = []

    def trace(grads: Any, opt_state: Any, params: Any) -> Any:
        updates, new_state = transform.update(grads, opt_state, params, one_pass=survey, **extra_args)
        steps.extend((var_id, id(update())) for var_id, update in survey.steps)
        alive = {step: update() for step, (_, update) in zip(steps, survey.steps, strict=True) if update() is not None}
        rows, _ = rows_of(_NAME, params=params, updates=updates)
        places.extend((id(leaf), id(update)) for leaf, update in rows)
        untouched.extend(place for place in places if place in alive)
        given = [update for leaf, update in rows if leaf is not None]
        others = [(n, leaf) for n, update in enumerate(given) for leaf in jax.tree.leaves(update)]
        others = [(n, leaf) for n, leaf in others if id(leaf) not in {update_id for _, update_id in untouched}]
        of_params.extend(n for n, _ in others)
        return [alive[place] for place in untouched], [leaf for _, leaf in others], new_state

    jaxpr = jax.make_jaxpr(trace)(grads, opt_state, params).jaxpr
    readers = [*(equation.invars for equation in jaxpr.eqns), jaxpr.outvars[len(untouched) :]]
    others, new_state = readers[-1][: len(of_params)], readers[-1][len(of_params) :]
    of_leaves = jaxpr.invars[len(jaxpr.invars) - len(jax.tree.leaves(params)) :]
    is_changed = drifts(jaxpr, of_leaves, zip(of_params, others, strict=True), new_state)
    read = {id(variable) for variables in readers for variable in variables}
    # The first outputs of the jaxpr are the untouched updates.
    free = {step for step, variable in zip(untouched, jaxpr.outvars, strict=False) if id(variable) not in read}
    outputs = ["params" if step in free else "update" for step in steps]
    return outputs, [place in free for place in places], is_changed


def _is_told_first(transform: Any) -> bool:
    """Tells whether nobody has been warned of this transform yet: an eager loop comes by at every step."""
    update = getattr(transform.update, "__self__", transform.update)
    try:
        is_new = update not in _told
        _told.add(update)
    except TypeError:  # it has no hash or takes no weak references
        return True
    return is_new


def _require_own_state(transform: optax.GradientTransformation, opt_state: Any, params: Any) -> None:
    """Refuses a state that does not belong to this transform, once the transform has failed on it."""
    try:
        own = jax.eval_shape(transform.init, params)
    except (AttributeError, LookupError, TypeError, ValueError):
        return  # the state was not at fault
    structures: list[Any] = [jax.tree.structure(state) for state in (own, opt_state)]
    is_own = bool(structures[0] == structures[1])
    require(is_own, _NAME, "opt_state", "be what transform.init returned for these params", opt_state)


def _applied(leaf: Any, update: Any) -> Any:
    if isinstance(update, RowGradients):
        leaf = as_array(_NAME, "params", leaf)
        return with_rows(leaf, update.rows, rows_at(leaf, update.rows, update.values.dtype) + update.values)
    return leaf if update is None else optax.apply_updates(leaf, update)


def _is_leaf(x: Any) -> bool:
    return x is None or isinstance(x, RowGradients)
