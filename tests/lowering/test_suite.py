"""What `jaxops tune` verifies and times: every kernel, and loops of enough steps."""

import functools

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowering
from jaxops._suite import SUITE
from lowering.explain import operator_uses
from lowering.measuring.agreement import fault_of, truth_in_float64
from lowering.measuring.problems import problems
from lowering.operators import Place, on_arrays, unpacked
from lowering.static_leaves import jaxpr_of, of_arrays
from lowering.targets import here, named

H100 = named("cuda-h100")


def problems_of(case, size):
    """The operators of a case at a size, each with operands and attributes, without computing anything."""
    args = jax.eval_shape(lambda: case.arguments(*size))
    uses = operator_uses(jaxpr_of(*of_arrays(case.fn, args)), args, H100)
    found = {(use.operator.name, str(use.operands), str(use.params)): use for use in uses}
    return [(use.operator, use.operands, use.params) for use in found.values()]


@pytest.mark.slow
def test_suite_has_every_kernel():
    """At the sizes that are rehearsed; nothing is computed."""
    used = set()
    for case in SUITE:
        for size in case.rehearsed_at:
            args = jax.eval_shape(lambda case=case, size=size: case.arguments(*size))
            rows = lowering.explain(case.fn, *args, target="cuda-h100").rows
            used |= {row.operator for row in rows}
    assert {operator.name for operator in contract.with_kernels()} <= used
    assert len({case.name for case in SUITE}) == len(SUITE)


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("size", [(257, 64, 600, "bfloat16"), (2100, 32, 300, "float32")], ids=str)
@pytest.mark.parametrize("name", ["linear cross entropy", "linear cross entropy, gradients in the forward pass"])
def test_each_form_has_the_results_that_a_campaign_compares(name, size):
    """All of them, of skipped rows as well, whole chunks of them, and where no maximum is among the first columns."""
    (case,) = (case for case in SUITE if case.name == name)
    x, weight, labels = case.arguments(*size)
    labels = jnp.where(jnp.arange(labels.size) % 3 == 0, labels, -100)
    for problem in problems(case.fn, (x, weight, labels), here()):
        expected = jax.jit(problem.meaning)(*problem.operands)
        truth = truth_in_float64(problem.meaning, problem.operands)
        assert problem.operator.forms
        for form in problem.operator.forms:
            run = on_arrays(functools.partial(form.run, place=Place("cpu")), problem.params)
            found = tuple(jax.jit(run)(*problem.operands))
            assert fault_of(found, expected, truth, problem.operands) == "", form.name


def looped():
    """Each operator that runs in loops, at each size that it is verified at, with its configurations and labels."""
    for case in SUITE:
        for size in case.verified_at if case.loops else ():
            _, weight, labels = case.arguments(*size)
            for operator, operands, params in problems_of(case, size):
                if operator.name in case.loops:
                    (kernel,) = (each for each in operator.kernels if each.platform == "cuda")
                    structured, attributes = unpacked(operands, params)
                    configs = case.overridden(kernel.configs(H100, *structured, **attributes))
                    yield operator.name, configs, np.asarray(labels), len(weight)


@pytest.mark.long
def test_kernels_in_loops_are_verified_over_three_chunks_and_a_rest():
    """Of an H100's configurations; of rows only those count that have a label."""
    found = set()
    for name, configs, labels, classes in looped():
        found.add(name)
        for config in configs:
            taken = classes if "chunk_columns" in config else int(np.sum(labels != -100))
            chunk = config.get("chunk_columns") or config["chunk_rows"]
            assert taken // chunk >= 3
            assert taken % chunk > 0
    assert found == {"linear_cross_entropy_backward", "linear_cross_entropy_sum_with_gradients"}


def test_what_other_cases_time_is_not_timed_again():
    for case in SUITE:
        assert case.timed_at
        assert [case.sizes(stage, rehearse=False) for stage in ("time", "tune")] == 2 * [case.timed_at * case.is_timed]
    assert [case.name for case in SUITE if not case.is_timed] == [case.name for case in SUITE if case.loops]


@pytest.mark.parametrize("size", [(3, 4096, "bfloat16"), (2, 4128, "bfloat16"), (2, 8192, "float16")], ids=str)
def test_dropout_is_verified_where_its_gpu_kernels_take_it(size):
    case = next(case for case in SUITE if case.name == "dropout")
    assert size in case.verified_at
    args = jax.eval_shape(lambda: case.arguments(*size))
    with lowering.use("pallas"):
        rows = lowering.explain(case.fn, *args, target="cuda-h100").rows
    assert {(row.operator, row.implementation) for row in rows} == {
        ("dropout", "mosaic_gpu"),
        ("dropout_backward", "mosaic_gpu"),
    }
