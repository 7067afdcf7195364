"""Planted patterns and models of other people are rewritten to the same values and gradients."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import pytest
import rewrite_checks
from patterns_clean import CLEAN
from patterns_planted import PLANTED
from rewrite_checks import arrays_like, assert_alike
from rewritten_models import LABELS, MODELS
from rewritten_models import X as INPUTS

import lowering

users_promotion = pytest.fixture(autouse=True)(rewrite_checks.users_promotion)
few_logits_count = pytest.fixture(rewrite_checks.few_logits_count)


# What `jax.grad` has made of a loss is only rewritten where all of it can be computed in chunks.
ALREADY_DIFFERENTIATED = {
    "gradient_of_scan": 0,
    "flax_linen_head_in_lifted_transforms": 0,
}


# A pooling and its gradient.
TWO = {name: 2 for name, (_, _, replacement, _) in PLANTED.items() if replacement == "jaxops.max_pool"}


# Dropout draws other bits, so it is rewritten only on demand.
DROPOUTS = {name: 0 for name, (_, _, replacement, _) in PLANTED.items() if replacement == "jaxops.dropout"}


COUNTS = dict.fromkeys(PLANTED, 1) | ALREADY_DIFFERENTIATED | TWO | DROPOUTS


# The forward pass of a pooling alone, and what takes a log sum exp of all logits and becomes a number for each row: no
# operator replaces that, but its rows can be taken in chunks.
CHUNKED = (
    "entropy",
    "connectionist_temporal_classification",
    "entropy_of_two_softmaxes",
    "log_of_the_probability_of_a_fixed_class",
    "mixture_of_likelihoods",
    "policy_that_samples_its_actions",
    "probability_of_one_class",
)
CLEAN_COUNTS = dict.fromkeys(CLEAN, 0) | dict.fromkeys(("pooling_without_a_gradient", *CHUNKED), 1)


@pytest.mark.sampled
@pytest.mark.parametrize("name", COUNTS)
def test_as_many_patterns_as_were_planted_are_rewritten(name: str, few_logits_count) -> None:
    few_logits_count(0)
    fn, args = PLANTED[name][:2]
    report = lowering.rewrite(fn).report(*args)
    assert len(report.applied) == COUNTS[name], report


@pytest.mark.sampled
@pytest.mark.parametrize("name", CLEAN_COUNTS)
def test_clean_functions_are_left_alone(name: str, few_logits_count) -> None:
    few_logits_count(0)
    fn, args = CLEAN[name]
    assert len(lowering.rewrite(fn).report(*args).applied) == CLEAN_COUNTS[name]


@pytest.mark.sampled
@pytest.mark.parametrize("name", CHUNKED)
def test_what_becomes_a_number_for_each_row_is_chunked_to_the_same(name: str, few_logits_count) -> None:
    few_logits_count(0)
    fn, args = CLEAN[name][0], arrays_like(CLEAN[name][1])
    assert_alike(jax.jit(lowering.rewrite(fn))(*args), fn(*args), tolerance=2e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("name", [name for name, count in COUNTS.items() if count])
def test_what_was_planted_is_rewritten_to_the_same(name: str, few_logits_count) -> None:
    few_logits_count(0)
    fn, args = PLANTED[name][0], arrays_like(PLANTED[name][1])
    # Plain JAX rounds logits to 16 bits, which the operators do not.
    tolerance = 1e-3 if name == "sixteen_bits" else 2e-5
    assert_alike(jax.jit(lowering.rewrite(fn))(*args), jax.jit(fn)(*args), tolerance)


@pytest.mark.sampled
@pytest.mark.parametrize("name", MODELS)
def test_models_of_other_people_are_rewritten(name: str, few_logits_count) -> None:
    few_logits_count(95)
    fn, params, rule = MODELS[name]
    assert [one.pattern for one in lowering.rewrite(fn).report(params, INPUTS, LABELS).applied] == [rule]


@pytest.mark.sampled
@pytest.mark.parametrize("name", MODELS)
def test_models_of_other_people_learn_the_same(name: str, few_logits_count) -> None:
    few_logits_count(95)
    fn, params, _ = MODELS[name]
    moving, static = eqx.partition(params, eqx.is_inexact_array)

    def gradients(fn: Callable[..., Any]) -> Any:
        def loss(moving: Any, x: Any) -> Any:
            results = fn(eqx.combine(moving, static), x, LABELS)
            return results if isinstance(results, tuple) else (results, None)

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(moving, INPUTS)

    assert_alike(gradients(lowering.rewrite(fn)), gradients(fn))
