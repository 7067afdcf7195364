"""The promises that every operator keeps, and the table row (`Case`) from which each of them is checked.

They prove consistency: that a transformation of an operator means what the operator means. That the meaning is right is
for the oracles in the operator's own test file.
"""

import contextlib
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
import splits
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lowering
from jaxops import NotSupportedError

DEVICES = 8
NOT_DIFFERENTIABLE = "not differentiable in any operand"


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

    def loss(self, *operands: Any) -> jax.Array:
        """A scalar that depends on every floating-point result, and not linearly."""
        return sum(jnp.sum(jnp.sin(result)) for result in floating(self.fn(*operands)))

    # Kept with the case, as each promise needs them at the same shapes: they are traced and compiled once.

    @functools.cached_property
    def jitted(self) -> Callable[..., Any]:
        return jax.jit(self.fn)

    @functools.cached_property
    def jitted_loss(self) -> Callable[..., Any]:
        return jax.jit(self.loss)

    @functools.cached_property
    def gradient(self) -> Callable[..., Any]:
        """Of the loss, by all differentiable operands."""
        return jax.jit(jax.grad(self.loss, self.differentiable))

    @functools.cached_property
    def partial_gradients(self) -> dict[int, Callable[..., Any]]:
        """Of the loss, by each differentiable operand."""
        return {position: jax.jit(jax.grad(self.loss, position)) for position in self.differentiable}


Promise = Callable[[Case, np.random.Generator], None]
PROMISES: list[Any] = []  # each a parameter of pytest


def first_in_every_run(cases: Sequence[Any]) -> list[Any]:
    """The cases, all but the first as slow tests, which CI runs and `make test` does not."""
    return [*cases[:1], *(pytest.param(case, marks=pytest.mark.slow) for case in cases[1:])]


def promise_name(promise: Promise) -> str:
    """For pytest's ids."""
    return promise.__name__


def promise(check: Callable[[Case, tuple[np.ndarray, ...]], None], marks: Any = ()) -> Promise:
    """Adds a check to PROMISES, with marks of pytest; it gets the case and operands drawn for it."""

    @functools.wraps(check)
    def run(case: Case, rng: np.random.Generator) -> None:
        with lowering.use(case.implementation):
            check(case, case.operands(rng))

    PROMISES.append(pytest.param(run, marks=marks))
    return run


@promise
def jit_equals_eager(case: Case, operands: tuple[np.ndarray, ...]) -> None:
    assert_close(case.jitted(*operands), case.fn(*operands))


@promise
def runs_with_jit_disabled(case: Case, operands: tuple[np.ndarray, ...]) -> None:
    with jax.disable_jit():
        results = case.fn(*operands)
    assert_close(results, case.jitted(*operands))


@promise
def binds_its_primitive(case: Case, operands: tuple[np.ndarray, ...]) -> None:
    assert case.operator in primitives(case.fn, *operands)


@promise
def gradient_binds_the_backward_operator(case: Case, operands: tuple[np.ndarray, ...]) -> None:
    applies(case.backward is not None, "its gradient is JAX's own")
    assert case.backward in primitives(case.gradient, *operands)
    assert case.backward in primitives(jax.vmap(case.gradient), *map(two_of, operands))


@promise
def vmap_over_each_operand_equals_a_loop(case: Case, operands: tuple[np.ndarray, ...]) -> None:
    for position in range(len(operands)):
        mapped = replaced(operands, position, two_of(operands[position]))
        in_axes = replaced((None,) * len(operands), position, 0)
        loop = [case.jitted(*replaced(operands, position, part)) for part in mapped[position]]
        assert_close(jax.jit(jax.vmap(case.fn, in_axes))(*mapped), stacked(loop))


@promise
def vmap_over_all_operands_on_other_axes_equals_a_loop(case: Case, operands: tuple[np.ndarray, ...]) -> None:
    mapped = [np.stack([x, x], axis=-1) for x in operands]
    assert_close(jax.vmap(case.fn, -1)(*mapped), stacked([case.jitted(*operands)] * 2))


@promise
def derivatives_equal_finite_differences_in_float64(case: Case, operands: tuple[np.ndarray, ...]) -> None:
    applies(case.differentiable, NOT_DIFFERENTIABLE)
    applies(case.exact_derivative, "the documented gradient is another function than the derivative")
    with jax.enable_x64(True):
        wide = [x.astype(np.float64) if x.dtype == np.float32 else x for x in operands]
        of_differentiable, primals = at_differentiable(case, wide)
        jax.test_util.check_grads(jax.jit(of_differentiable), primals, order=2, atol=1e-4, rtol=1e-4)


@promise
def jvp_is_the_transpose_of_vjp(case: Case, operands: tuple[np.ndarray, ...]) -> None:
    applies(case.differentiable, NOT_DIFFERENTIABLE)
    of_differentiable, primals = at_differentiable(case, operands)
    tangents = [np.cos(np.arange(x.size, dtype=x.dtype)).reshape(x.shape) for x in primals]
    of_differentiable = jax.jit(of_differentiable)
    results, result_tangents = jax.jvp(of_differentiable, primals, tangents)
    cotangents = [jnp.cos(1.0 + jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape) for x in results]
    pulled_back = jax.vjp(of_differentiable, *primals)[1](cotangents)
    assert_close(inner(result_tangents, cotangents), inner(pulled_back, tangents))
    assert_close(jax.linearize(of_differentiable, *primals)[1](*tangents), result_tangents)


@promise
def jacobians_and_hessians_agree_in_both_modes(case: Case, operands: tuple[np.ndarray, ...]) -> None:
    applies(case.differentiable, NOT_DIFFERENTIABLE)
    for position in case.differentiable:
        loss = functools.partial(at_position, case.loss, operands, position)
        x = operands[position]
        assert_close(jax.jit(jax.jacfwd(loss))(x), jax.jit(jax.grad(loss))(x))
    # Finite differences have checked all second derivatives; here, of one operand, that all columns come out at once.
    smallest = min(case.differentiable, key=lambda position: operands[position].size)
    loss = functools.partial(at_position, case.loss, operands, smallest)
    assert_close(
        jax.jit(jax.hessian(loss))(operands[smallest]), jax.jit(jax.jacrev(jax.jacrev(loss)))(operands[smallest])
    )


@promise
def checkpoint_keeps_the_gradient(case: Case, operands: tuple[np.ndarray, ...]) -> None:
    applies(case.differentiable, NOT_DIFFERENTIABLE)
    wrapped = jax.grad(jax.checkpoint(case.loss), case.differentiable)
    assert_close(jax.jit(wrapped)(*operands), case.gradient(*operands))


@promise
def vmap_of_gradient_equals_a_loop(case: Case, operands: tuple[np.ndarray, ...]) -> None:
    applies(case.differentiable, NOT_DIFFERENTIABLE)
    mapped = [two_of(x) for x in operands]
    loop = [case.gradient(*parts) for parts in zip(*mapped, strict=True)]
    assert_close(jax.jit(jax.vmap(case.gradient))(*mapped), stacked(loop))


@promise
def gradient_of_vmap_equals_a_loop(case: Case, operands: tuple[np.ndarray, ...]) -> None:
    applies(case.differentiable, NOT_DIFFERENTIABLE)
    for position in case.differentiable:
        in_axes = replaced((None,) * len(operands), position, 0)
        mapped = replaced(operands, position, two_of(operands[position]))
        total = jax.grad(lambda *xs, axes=in_axes: jnp.sum(jax.vmap(case.loss, axes)(*xs)), position)
        grad = case.partial_gradients[position]
        loop = [grad(*replaced(operands, position, part)) for part in mapped[position]]
        assert_close(jax.jit(total)(*mapped), stacked(loop))


@promise
def scan_equals_a_loop(case: Case, operands: tuple[np.ndarray, ...]) -> None:
    mapped = [two_of(x) for x in operands]

    def total(*xs: Any) -> jax.Array:
        return jax.lax.scan(lambda carry, x: (carry + case.loss(*x), None), jnp.float32(0), xs)[0]

    assert_close(jax.jit(total)(*mapped), sum(map(case.jitted_loss, *mapped)))
    if case.differentiable:
        loop = [case.gradient(*parts) for parts in zip(*mapped, strict=True)]
        assert_close(jax.jit(jax.grad(total, case.differentiable))(*mapped), stacked(loop))


@promise
def exports_to_every_platform_and_back(case: Case, operands: tuple[np.ndarray, ...]) -> None:
    exported = jax.export.export(case.jitted, platforms=["cpu", "cuda", "tpu"])(*operands)
    restored = jax.export.deserialize(exported.serialize())
    assert_close(jax.jit(restored.call)(*operands), case.fn(*operands))


@promise
def shard_map_equals_each_part_on_its_own(case: Case, operands: tuple[np.ndarray, ...]) -> None:
    specs = batch_specs(case)
    parts = [
        [x if axis is None else np.split(x, DEVICES)[device] for x, axis in zip(operands, case.batched, strict=True)]
        for device in range(DEVICES)
    ]
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))

    def each(*local: Any) -> Any:
        return jax.tree.map(lambda x: vary(x)[None], case.fn(*local))

    sharded = jax.jit(jax.shard_map(each, mesh=mesh, in_specs=specs, out_specs=P("data")))
    assert_close(sharded(*operands), stacked([case.jitted(*part) for part in parts]))

    def total(*local: Any) -> jax.Array:
        return jax.lax.psum(vary(case.loss(*local)), "data")

    if case.differentiable:
        sharded_total = jax.shard_map(total, mesh=mesh, in_specs=specs, out_specs=P())
        grads = jax.jit(jax.grad(sharded_total, case.differentiable))(*operands)
        for position, grad in zip(case.differentiable, grads, strict=True):
            per_part = [*map(case.partial_gradients[position], *zip(*parts, strict=True))]
            assert_close(grad, sum(per_part) if case.batched[position] is None else jnp.concatenate(per_part))


@promise
def automatic_mesh_equals_one_device(case: Case, operands: tuple[np.ndarray, ...]) -> None:
    check_mesh(case, operands, AxisType.Auto)


@promise
def explicit_mesh_equals_one_device(case: Case, operands: tuple[np.ndarray, ...]) -> None:
    check_mesh(case, operands, AxisType.Explicit)


def check_mesh(case: Case, operands: tuple[np.ndarray, ...], axis_type: AxisType) -> None:
    """Under jit with the batch axes sharded, results are those of one device and no large operand is gathered.

    The mesh is known from the operands alone, and then is the current one as well.
    """
    functions = [case.jitted, case.gradient] if case.differentiable else [case.jitted]
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(axis_type,))
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(operands, batch_specs(case), strict=True)]
    for fn, enter in itertools.product(functions, (contextlib.nullcontext, functools.partial(jax.set_mesh, mesh))):
        expected = fn(*operands)
        with enter():
            compiled = fn.lower(*placed).compile()
            assert_close(compiled(*placed), expected)
        largest = max(x.size for x in operands)
        gathered = [size for size in gathered_sizes(compiled.as_text()) if size >= largest]
        assert not gathered, f"gathers {gathered} elements; the largest operand has {largest}"
    assert_case_equal_when_split(case, operands, splits.crossed(operands), axis_type)


@functools.partial(promise, marks=pytest.mark.slow)
def every_split_equals_one_device(case: Case, operands: tuple[np.ndarray, ...]) -> None:
    for specs, axis_type in itertools.product(splits.of(operands, together=1), (AxisType.Auto, AxisType.Explicit)):
        assert_case_equal_when_split(case, operands, specs, axis_type)


def assert_case_equal_when_split(
    case: Case, operands: tuple[np.ndarray, ...], specs: Sequence[P], axis_type: AxisType
) -> None:
    """Of the gradient, in which the values are: the loss is not linear in them."""
    fn = case.gradient if case.differentiable else case.jitted
    try:
        assert_close(splits.results(fn, operands, specs, axis_type), fn(*operands))
    except NotSupportedError as refusal:
        # A kernel that was asked for may refuse to gather an axis that it mixes over.
        if case.implementation == "auto" or "is split over a mesh as" not in str(refusal):
            raise


@promise
def explicit_mesh_takes_every_split(case: Case, operands: tuple[np.ndarray, ...]) -> None:
    """Splits that do not fit each other are found in the types, without compiling."""
    splits.check(case.fn, operands)
    if case.differentiable:
        splits.check(jax.grad(case.loss, case.differentiable), operands, case.differentiable)


def gathered_sizes(compiled_text: str) -> Iterator[int]:
    """The number of elements of every result of an all-gather in an optimised program."""
    for result in re.findall(r"= (.*) all-gather(?:-start)?\(", compiled_text):
        for shape in re.findall(r"\w+\[([\d,]*)\]", result):
            yield int(np.prod([int(size) for size in shape.split(",") if size]))


def applies(condition: object, otherwise: str) -> None:
    """Skips a promise that cannot apply to a case, with the reason."""
    if not condition:
        pytest.skip(otherwise)


def batch_specs(case: Case) -> tuple[P, ...]:
    return tuple(P() if axis is None else P("data") for axis in case.batched)


def primitives(fn: Callable[..., Any], *operands: Any) -> set[str]:
    """The names of all primitives in a function's jaxpr, at any depth."""
    names: set[str] = set()
    todo = [jax.make_jaxpr(fn)(*operands).jaxpr]
    while todo:
        for equation in todo.pop().eqns:
            names.add(equation.primitive.name)
            todo.extend(lowering.cost.inner_jaxprs(equation))
    return names


def at_differentiable(case: Case, operands: Any) -> tuple[Callable[..., Any], list[Any]]:
    """The case's floating-point results as a function of its differentiable operands alone, and those."""

    def of_differentiable(*primals: Any) -> list[jax.Array]:
        full = list(operands)
        for position, primal in zip(case.differentiable, primals, strict=True):
            full[position] = primal
        return floating(case.fn(*full))

    return of_differentiable, [operands[position] for position in case.differentiable]


def at_position(fn: Callable[..., Any], operands: Any, position: int, x: Any) -> Any:
    return fn(*replaced(operands, position, x))


def replaced(items: Any, position: int, item: Any) -> tuple[Any, ...]:
    return (*items[:position], item, *items[position + 1 :])


def two_of(x: np.ndarray) -> np.ndarray:
    """The operand and a different one of the same values, stacked."""
    return np.stack([x, np.roll(x, 1, axis=0) if x.ndim else x])


def vary(x: Any) -> Any:
    """Lets a value that is the same on all devices count as one that differs, so that it can be split over them."""
    return x if "data" in jax.typeof(x).manual_axis_type.varying else jax.lax.pcast(x, "data", to="varying")


def floating(results: Any) -> list[jax.Array]:
    return [x for x in jax.tree.leaves(results) if jnp.issubdtype(x.dtype, jnp.inexact)]


def inner(left: Any, right: Any) -> jax.Array:
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return sum(jnp.sum(jnp.asarray(a) * jnp.asarray(b)) for a, b in pairs)


def stacked(results: Any) -> Any:
    return jax.tree.map(lambda *xs: np.stack([np.asarray(x) for x in xs]), *results)


def assert_close(actual: Any, expected: Any) -> None:
    """Equal to float32 rounding of sums of the sizes used here; NaN equals NaN."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-4, atol=2e-5)
