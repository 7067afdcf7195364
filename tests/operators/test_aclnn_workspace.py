"""`get_workspace_size`: it validates and plans now, its executor runs later and computes what the plain call does."""

import functools

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxops import aclnn
from jaxops._checks.arguments import BadParamError


def make_nll(rng):
    x = jax.nn.log_softmax(jnp.asarray(rng.normal(size=(6, 5)), jnp.float32))
    return x, jnp.asarray(rng.integers(0, 5, size=6), jnp.int32), jnp.asarray(rng.uniform(1, 2, size=5), jnp.float32)


def test_executor_computes_what_the_call_does(rng):
    operands = make_nll(rng)
    attributes = {"reduction": 1, "ignore_index": 2}
    workspace_bytes, executor = aclnn.get_workspace_size(aclnn.nll_loss, *operands, **attributes)
    assert isinstance(workspace_bytes, int)
    assert workspace_bytes >= 0
    contract.assert_close(executor(*operands), aclnn.nll_loss(*operands, **attributes))


def test_plan_needs_no_data(rng):
    operands = make_nll(rng)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    _, executor = aclnn.get_workspace_size(aclnn.nll_loss, *shapes, reduction=np.int64(2), ignore_index=-100)
    contract.assert_close(executor(*operands), aclnn.nll_loss(*operands, reduction=2, ignore_index=-100))


def test_plan_tells_what_the_compiled_call_takes():
    """A gradient from recomputed logits needs them somewhere: (BT, V) float32 at least."""
    rows, hidden, classes = 64, 16, 512
    row, x = jnp.ones(rows), jnp.ones((rows, hidden), jnp.bfloat16)
    operands = (
        row,
        x,
        jnp.ones((classes, hidden), jnp.bfloat16),
        jnp.zeros(rows // 8, jnp.uint8),
        jnp.zeros(rows, jnp.int32),
    )
    workspace_bytes, _ = aclnn.get_workspace_size(
        aclnn.fused_linear_cross_entropy_loss_grad, *operands, logits_max=row, sum_exp_logits=row
    )
    assert workspace_bytes >= rows * classes * 4


@pytest.mark.parametrize("planned_with_data", [True, False])
def test_tensors_among_the_attributes_are_arguments_of_the_executor(planned_with_data, rng):
    row = jnp.asarray(rng.uniform(1, 2, size=4), jnp.float32)
    logits = jnp.asarray(rng.normal(size=(4, 6)), jnp.float32)
    call = functools.partial(aclnn.fused_cross_entropy_loss_with_max_sum, row, row, row)
    planned = logits if planned_with_data else jax.ShapeDtypeStruct(logits.shape, logits.dtype)
    _, executor = aclnn.get_workspace_size(
        aclnn.fused_cross_entropy_loss_with_max_sum, row, row, row, vocab_parallel_logits=planned
    )
    contract.assert_close(
        executor(row, row, row, vocab_parallel_logits=2 * logits), call(vocab_parallel_logits=2 * logits)
    )
    if planned_with_data:
        contract.assert_close(executor(row, row, row), call(vocab_parallel_logits=logits))


def test_scalars_of_the_update_are_planned_as_constants(rng):
    var, grad = (jnp.asarray(rng.normal(size=7), jnp.float32) for _ in range(2))
    zeros = jnp.zeros(7)
    attributes = {"lr": 1e-2, "ema_decay": 0.9, "beta1": 0.9, "beta2": np.float32(0.99), "eps": 1e-8}
    operands = grad, var, zeros, zeros, zeros, jnp.ones(1, jnp.int32)
    _, executor = aclnn.get_workspace_size(aclnn.apply_fused_ema_adam, *operands, **attributes)
    contract.assert_close(executor(*operands), aclnn.apply_fused_ema_adam(*operands, **attributes))


@pytest.mark.parametrize(
    ("target", "status", "words"),
    [(None, 161001, "target must be given; got None"), (np.zeros(6), 161002, "target must be")],
    ids=["None", "dtype"],
)
def test_refusal_comes_with_the_plan(target, status, words, rng):
    x, _, weight = make_nll(rng)
    with pytest.raises(BadParamError, match=f"nll_loss: {words}") as refusal:
        aclnn.get_workspace_size(aclnn.nll_loss, x, target, weight, reduction=1, ignore_index=-100)
    assert refusal.value.status == status


def test_executor_refuses_what_was_not_planned(rng):
    x, target, weight = make_nll(rng)
    _, executor = aclnn.get_workspace_size(aclnn.nll_loss, x, target, weight, reduction=1, ignore_index=-100)
    for call, words in (
        (lambda: executor(x[:2], target, weight), "x must be float32[6, 5], as it was planned; got float32[2, 5]"),
        (lambda: executor(x, target), "weight must be given; got None"),
        (lambda: executor(x, target, weight, x=x, y=1), "tensors must be none, as none was planned; got ['x', 'y']"),
        (lambda: executor(x, target, weight, 1), "args must be x, target, weight; got"),
        (lambda: jax.jit(executor)(x, target, weight), "x must hold data: under jit, call the operator instead of its"),
    ):
        with pytest.raises(BadParamError) as refusal:
            call()
        assert str(refusal.value).startswith(f"nll_loss: {words}")
