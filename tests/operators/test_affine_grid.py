"""`affine_grid`: values and gradients against loops in NumPy float64 and PyTorch."""

import contract
import grid_sample_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxops import affine_grid
from jaxops._checks.arguments import BadParamError

THETA = np.array([[[1, 0, 0], [0, 1, 0]], [[0.5, -0.25, 1], [2, 0.125, -1]]], np.float32)
SIZE = (2, 3, 4, 5)


@pytest.mark.parametrize("align_corners", [True, False], ids=["centres", "edges"])
@pytest.mark.parametrize("extents", [(4, 5), (1, 3), (3, 1), (1, 1), (2, 2), (0, 3), (2, 3, 4), (3, 1, 2)], ids=str)
def test_affine_grid_equals_loops_in_float64(extents, align_corners, rng):
    rank = len(extents)
    theta = THETA if rank == 2 else rng.normal(size=(2, 3, 4)).astype(np.float32)
    dgrid = rng.normal(size=(2, *extents, rank)).astype(np.float32)
    fn = jax.jit(lambda theta: affine_grid(theta, (2, 3, *extents), align_corners=align_corners))
    grid, pull_back = jax.vjp(fn, theta)
    np.testing.assert_allclose(grid, oracle.affine_grid(theta, extents, align_corners), rtol=1e-6, atol=1e-6)
    gradient = oracle.affine_grid_gradient(dgrid, align_corners)
    np.testing.assert_allclose(pull_back(jnp.asarray(dgrid))[0], gradient, rtol=1e-5, atol=1e-5)


def test_affine_grid_gives_worked_points():
    grid = affine_grid(THETA[:1], (1, 1, 2, 3))
    np.testing.assert_array_equal(grid[0], [[[-1, -1], [0, -1], [1, -1]], [[-1, 1], [0, 1], [1, 1]]])
    np.testing.assert_array_equal(affine_grid(THETA, (2, 1, 1, 1))[:, 0, 0], [[0, 0], [1, -1]])  # the base is 0


def test_affine_grid_of_volumes_gives_worked_points():
    swapped = jnp.asarray([[[0, 0, 1, 0], [0, 1, 0, 0], [1, 0, 0, 5]]], jnp.float32)  # (z, y, x + 5)
    grid = affine_grid(swapped, (1, 1, 2, 1, 2), align_corners=False)
    np.testing.assert_array_equal(grid[0, :, 0], [[[-0.5, 0, 4.5], [-0.5, 0, 5.5]], [[0.5, 0, 4.5], [0.5, 0, 5.5]]])


def test_affine_grid_adds_many_bfloat16_gradients_in_float32():
    theta = jnp.zeros((1, 2, 3), jnp.bfloat16)
    grad = jax.grad(lambda theta: jnp.sum(affine_grid(theta, (1, 1, 64, 64)).astype(jnp.float32)))(theta)
    np.testing.assert_array_equal(grad[0, :, 2].astype(np.float32), 4096)


def test_affine_grid_keeps_nothing_for_its_gradient():
    pull_back = jax.vjp(lambda theta: affine_grid(theta, (2, 1, 3, 3)), THETA)[1]
    assert jax.tree.leaves(pull_back) == []


@pytest.mark.parametrize("align_corners", [True, False], ids=["centres", "edges"])
def test_affine_grid_of_volumes_equals_torch(align_corners, rng):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    theta, dgrid = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 3, 4), (2, 2, 3, 4, 3)))
    size = (2, 1, 2, 3, 4)
    grid, pull_back = jax.vjp(lambda theta: affine_grid(theta, size, align_corners=align_corners), theta)
    their_theta = torch.from_numpy(theta).requires_grad_()
    their_grid = torch.nn.functional.affine_grid(their_theta, size, align_corners=align_corners)
    their_grid.backward(torch.from_numpy(dgrid))
    np.testing.assert_allclose(grid, their_grid.detach().numpy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(pull_back(jnp.asarray(dgrid))[0], their_theta.grad.numpy(), rtol=1e-5, atol=1e-5)


REFUSALS = {
    "theta": (lambda: affine_grid(None, SIZE), "affine_grid: theta must be given; got None"),
    "theta-rank": (lambda: affine_grid(THETA[0], SIZE), "affine_grid: theta must have shape (N, 2, 3) or (N"),
    "theta-shape": (lambda: affine_grid(THETA[:, :, :2], SIZE), "affine_grid: theta must have shape (..., 2, 3)"),
    "theta-dtype": (lambda: affine_grid(np.int32(THETA), SIZE), "affine_grid: theta must be floating point; got"),
    "size": (
        lambda: affine_grid(THETA, (2, 3, 4)),
        "affine_grid: size must be a tuple of four sizes, (N, C, H, W); got (2, 3,",
    ),
    "size-float": (
        lambda: affine_grid(THETA, (2, 3, 4, 5.0)),
        "affine_grid: size must be a tuple of four sizes, (N, C, H, W);",
    ),
    "size-of-volumes": (
        lambda: affine_grid(np.zeros((2, 3, 4), np.float32), SIZE),
        "affine_grid: size must be a tuple of five sizes, (N, C, D, H, W); got (2, 3, 4, 5)",
    ),
    "theta-align-corners": (
        lambda: affine_grid(THETA, SIZE, align_corners=None),
        "affine_grid: align_corners must be a bool; got None",
    ),
    "size-batch": (lambda: affine_grid(THETA, (3, 3, 4, 5)), "affine_grid: size must begin with theta's 2; got (3, 3"),
}


@pytest.mark.parametrize(("call", "words"), REFUSALS.values(), ids=REFUSALS)
def test_affine_grid_refuses_bad_input(call, words):
    with pytest.raises(BadParamError) as refusal:
        call()
    assert str(refusal.value).startswith(words)
    assert refusal.value.status == "MCDNN_STATUS_BAD_PARAM"


CASES = [
    contract.Case(
        "affine-grid",
        lambda theta: affine_grid(theta, (theta.shape[0], 1, 3, 2)),
        lambda rng: (rng.normal(size=(8, 2, 3)).astype(np.float32),),
        differentiable=(0,),
        batched=(0,),
        operator="affine_grid",
        backward="affine_grid_backward",
    ),
    contract.Case(
        "affine-grid-volumes",
        lambda theta: affine_grid(theta, (theta.shape[0], 1, 3, 2, 2), align_corners=False),
        lambda rng: (rng.normal(size=(8, 3, 4)).astype(np.float32),),
        differentiable=(0,),
        batched=(0,),
        operator="affine_grid_3d",
        backward="affine_grid_3d_backward",
    ),
]


@pytest.mark.parametrize("promise", contract.PROMISES, ids=contract.promise_name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_affine_grid_keeps_promise(case, promise):
    promise(case)
