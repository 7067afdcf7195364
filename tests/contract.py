"""The promises that every operator keeps, and the table row (`Case`) from which each of them is checked.

Most are those of `jaxops.testing`, which users try on operators of their own. They prove consistency: that a
transformation of an operator means what the operator means. That the meaning is right is for the oracles in the
operator's own test file.
"""

import dataclasses
import functools
import importlib
import importlib.util
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np
import pytest
import splits
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxops
import lowering
from jaxops import NotSupportedError, Operator
from jaxops._suite import families
from jaxops.testing import calls, derivatives, meshes
from jaxops.testing.compare import DEFAULTS, Tolerance
from jaxops.testing.report import Broken, Skipped
from jaxops.testing.trial import SEED, Trial, replaced, two_of


@dataclasses.dataclass(frozen=True)
class Case:
    """One operator with its attributes bound and operands to try it on.

    Attributes:
      name: for the test's id.
      fn: takes arrays and returns an array or a tuple of arrays.
      operands: draws them: float32 and int32 NumPy arrays.
      differentiable: the positions of operands to differentiate.
      batched: for each operand, 0 if its leading axis is the batch axis (a multiple of 8 long), None if it is shared.
      operator: the primitive that `fn` must bind.
      backward: the primitive that its gradient must bind; None if the gradient is JAX's own.
      exact_derivative: False where the documented gradient deliberately is not the derivative of the forward function.
      implementation: under which `lowering.use` the promises are kept.
    """

    name: str
    fn: Callable[..., Any]
    operands: Callable[[np.random.Generator], tuple[np.ndarray, ...]]
    differentiable: tuple[int, ...]
    batched: tuple[int | None, ...]
    operator: str
    backward: str | None = None
    exact_derivative: bool = True
    implementation: str = "auto"

    def __str__(self) -> str:
        return self.name if self.implementation == "auto" else f"{self.name}-{self.implementation}"

    @functools.cached_property
    def trial(self) -> Trial:
        """The same for all promises, which need it at the same shapes: it is traced and compiled once."""
        operands = self.operands(np.random.default_rng(SEED))
        trial = Trial(self.fn, operands, self.differentiable, self.batched, None, Tolerance(DEFAULTS))
        assert trial.results is not None  # computed here, outside of any transformation
        return trial


Check = Callable[[Case], None]


def with_kernels() -> list[Operator]:
    """The operators of this library that have kernels; tests make others."""
    return [x for x in jaxops.operators() if any(k.run.__module__.startswith("pallas_kernels.") for k in x.kernels)]


@functools.cache
def cases_of(family: str) -> tuple[Case, ...]:
    """The `CASES` of a family's test module: `test_<family>`, or `test_<family>_promises`."""
    names = (f"test_{family}{suffix}" for suffix in ("_promises", ""))
    name = next((name for name in names if importlib.util.find_spec(name)), None)
    assert name is not None, f"test_{family}.py must be there, with CASES"
    return tuple(importlib.import_module(name).CASES)


def representatives(covered: Collection[str] = ()) -> dict[str, Case]:
    """The first case of each operator and its gradient, by a name for tests; none of operators that are covered."""
    found: dict[str, Case] = {}
    for family in families():
        for case in cases_of(family):
            if case.implementation == "auto" and case.operator not in covered:
                is_known = case.operator in found and found[case.operator].backward != case.backward
                found.setdefault(f"{case.operator}, {case.backward}" if is_known else case.operator, case)
    return found


def first_in_every_run(cases: Sequence[Any]) -> list[Any]:
    """The cases, all but the first as slow tests, which CI runs and `make test` does not."""
    return [*cases[:1], *(pytest.param(case, marks=pytest.mark.slow) for case in cases[1:])]


def promise_name(check: Check) -> str:
    """For pytest's ids."""
    return check.__name__


def of_any_function(promise: Any) -> Check:
    """Makes a promise of `jaxops.testing` one of cases."""

    def check(case: Case) -> None:
        if promise.name in ("derivative", "second_order") and not case.exact_derivative:
            pytest.skip("the documented gradient is another function than the derivative")
        match promise.outcome(case.trial):
            case Skipped() as skipped:
                pytest.skip(skipped.reason)
            case Broken() as broken:
                pytest.fail(broken.found)

    check.__name__ = promise.name
    return check


def binds_its_primitive(case: Case) -> None:
    assert case.operator in primitives(case.fn, *case.trial.operands)


def gradient_binds_the_backward_operator(case: Case) -> None:
    if case.backward is None:
        pytest.skip("its gradient is JAX's own")
    assert case.backward in primitives(case.trial.gradient, *case.trial.operands)
    assert case.backward in primitives(jax.vmap(case.trial.gradient), *map(two_of, case.trial.operands))


def jacobians_and_hessians_agree_in_both_modes(case: Case) -> None:
    if not case.differentiable:
        pytest.skip("no operand is differentiable")
    trial = case.trial
    assert_close(jax.jit(jax.jacfwd(trial.loss, case.differentiable))(*trial.operands), trial.gradient(*trial.operands))
    # Of one operand, all columns of the second derivative come out at once.
    smallest = min(case.differentiable, key=lambda position: trial.operands[position].size)

    def loss(x: Any) -> jax.Array:
        return trial.loss(*replaced(trial.operands, smallest, x))

    x = trial.operands[smallest]
    assert_close(jax.jit(jax.hessian(loss))(x), jax.jit(jax.jacrev(jax.jacrev(loss)))(x))


def crossed_splits_equal_one_device(case: Case) -> None:
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        assert_equal_when_split(case, splits.crossed(case.trial.operands), axis_type)


def every_split_equals_one_device(case: Case) -> None:
    """Explicit and automatic axes take turns; `explicit_mesh_takes_every_split` asks the types of all splits."""
    types = itertools.cycle((AxisType.Explicit, AxisType.Auto))
    for specs, axis_type in zip(splits.of(case.trial.operands, together=1), types, strict=False):
        assert_equal_when_split(case, specs, axis_type)


def explicit_mesh_takes_every_split(case: Case) -> None:
    """Splits that do not fit each other are found in the types, without compiling."""
    splits.check(case.fn, case.trial.operands)
    if case.differentiable:
        splits.check(jax.grad(case.trial.loss, case.differentiable), case.trial.operands, case.differentiable)


def promise(check: Check) -> Check:
    """Makes a check a parameter of tests."""

    @functools.wraps(check)
    def run(case: Case) -> None:
        with lowering.use(case.implementation):
            check(case)

    return run


OURS = (
    binds_its_primitive,
    gradient_binds_the_backward_operator,
    jacobians_and_hessians_agree_in_both_modes,
    crossed_splits_equal_one_device,
    explicit_mesh_takes_every_split,
    every_split_equals_one_device,
)
BY_NAME = {
    one.name: promise(of_any_function(one))
    for one in (*calls.PROMISES, *derivatives.PROMISES, *meshes.PROMISES)
    if one.name not in ("runs", "reference")
} | {check.__name__: promise(check) for check in OURS}
SLOW = ("every_split_equals_one_device",)
# Each a parameter of pytest.
PROMISES = [pytest.param(run, marks=pytest.mark.slow if name in SLOW else ()) for name, run in BY_NAME.items()]


def assert_equal_when_split(case: Case, specs: Sequence[P], axis_type: AxisType) -> None:
    """Of the gradient, in which the values are: the loss is not linear in them."""
    fn, operands = case.trial.gradient if case.differentiable else case.trial.jitted, case.trial.operands
    try:
        assert_close(splits.results(fn, operands, specs, axis_type), fn(*operands))
    except NotSupportedError as refusal:
        # A kernel that was asked for may refuse to gather an axis that it mixes over.
        if case.implementation == "auto" or "is split over a mesh as" not in str(refusal):
            raise


def primitives(fn: Callable[..., Any], *operands: Any) -> set[str]:
    """The names of all primitives in a function's jaxpr, at any depth."""
    names: set[str] = set()
    todo = [jax.make_jaxpr(fn)(*operands).jaxpr]
    while todo:
        for equation in todo.pop().eqns:
            names.add(equation.primitive.name)
            todo.extend(lowering.cost.inner_jaxprs(equation))
    return names


def assert_close(actual: Any, expected: Any) -> None:
    """Equal to float32 rounding of sums of the sizes used here; NaN equals NaN."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-4, atol=2e-5)
