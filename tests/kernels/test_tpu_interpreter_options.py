"""TPU kernels agree with their oracles whenever copies are made, in whatever order blocks are taken, and by which core.

JAX's interpreter makes a copy when somebody waits for it, unless told to make it at once, and takes blocks that may run
in parallel in their order, unless it has a seed. These are the kernels' own tests against float64, run again.
"""

import dataclasses
import functools
import types

import jax
import numpy as np
import pytest
import test_batch_norm_kernels as batch_norm
import test_dropout_kernels as dropout
import test_ema_adam_kernels as ema_adam
import test_embedding_kernels as embedding
import test_linear_cross_entropy_kernels_tpu as linear_cross_entropy
import test_local_response_norm_kernels as local_response_norm
import test_max_pool_16_bits as max_pool_16_bits
import test_max_pool_kernels as max_pool_backward
import test_max_pool_value_kernel as max_pool
import test_softmax_kernels as softmax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu.linear_cross_entropy import exponentials

OPTIONS = {
    "at once": {"dma_execution_mode": "eager", "random_seed": 1},
    "when waited for, by two cores": {"dma_execution_mode": "on_wait", "random_seed": 2, "num_cores_or_threads": 2},
}


def case_of(cases, name):
    """The arguments of a parameter of pytest."""
    return next(case.values for case in cases if case.id == name)


# A test with its module, which must be run with several blocks, and its arguments.
CASES = {
    "softmax": (softmax, "test_softmax_kernels_agree_with_float64", case_of(softmax.CASES, "tpu-channels-of-blocks")),
    "batch norm": (
        *(batch_norm, "test_batch_norm_kernels_agree_with_float64"),
        case_of(batch_norm.CASES, "tpu-channels-first"),
    ),
    "batch norm, nothing kept": (
        *(batch_norm, "test_batch_norm_kernels_on_tpu_agree_with_float64_whatever_vmem_keeps"),
        ((128, 4, 32, 1), 0),
    ),
    "local response norm": (
        *(local_response_norm, "test_local_response_norm_kernels_agree_with_float64"),
        case_of(local_response_norm.CASES, "tpu-channels-in-sublanes"),
    ),
    "embedding gradient": (embedding, "test_embedding_kernel_agrees_with_float64", ("tpu", 50, 128, 40, "float32")),
    "embedding gradient, rows in place": (
        *(embedding, "test_embedding_kernel_agrees_with_float64"),
        ("tpu-resident", 96, 256, 120, "float32"),
    ),
    "EMA-Adam": (ema_adam, "test_ema_adam_kernel_takes_any_shape", ("tpu", (257, 129))),
    "dropout": (dropout, "test_dropout_kernels_draw_the_same_mask", ("tpu", (40, 768), "float32", 0.25)),
    "max pool": (max_pool, "test_max_pool_value_kernel_agrees_with_float64", ("bands-of-rows", "float32")),
    "max pool, pixels outside": (
        max_pool,
        "test_max_pool_value_kernel_agrees_with_float64",
        ("pixels-outside", "float32"),
    ),
    "max pool, backward": (
        *(max_pool_backward, "test_max_pool_kernels_agree_with_float64"),
        case_of(max_pool_backward.CASES, "tpu-bands-with-gaps-and-rest"),
    ),
    "max pool, backward, pairs": (max_pool_16_bits, "test_max_pool_pairs_come_in_bands_of_rows", ()),
    "linear cross entropy": (
        *(linear_cross_entropy, "test_linear_cross_entropy_tpu_kernels_agree_with_float64"),
        (linear_cross_entropy.VARIANTS["all"],),
    ),
}


def changed(value, options):
    """What holds parameters of the interpreter, with these options in them."""
    if isinstance(value, pltpu.InterpretParams):
        return dataclasses.replace(value, **options)
    if isinstance(value, dict):
        return {key: changed(each, options) for key, each in value.items()}
    return tuple(changed(each, options) for each in value) if isinstance(value, tuple) else value


@pytest.mark.sampled
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_exponentials_on_tpus_do_not_depend_on_when_and_in_which_order(options, rng):
    x, weight = (rng.normal(size=(rows, 40)).astype(np.float32) for rows in (300, 200))
    labels, shift = rng.integers(0, 200, 300).astype(np.int32), np.zeros(300, np.float32)
    config = {"block_rows": 128, "block_vocab": 128, "block_hidden": 128}
    interpret = pltpu.InterpretParams(detect_races=True, **options)
    run = functools.partial(
        exponentials.exponentials, softcap=None, most_excess=60.0, config=config, interpret=interpret
    )
    off_label, rest, _ = jax.jit(run)(x, weight, None, None, labels, shift)
    truth = np.exp(x.astype(np.float64) @ weight.T.astype(np.float64))
    truth[np.arange(300), labels] = 0
    np.testing.assert_allclose(off_label, truth, rtol=1e-4)
    np.testing.assert_allclose(rest, truth.sum(-1), rtol=1e-4)


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_tpu_kernels_do_not_depend_on_when_and_in_which_order(options, name, request, monkeypatch):
    module, test, arguments = CASES[name]
    seen = []

    def params(**given):
        seen.append(options)
        return pltpu.InterpretParams(**given, **options)

    for attribute in ("KERNELS", "INTERPRET"):
        if hasattr(module, attribute):
            monkeypatch.setattr(module, attribute, changed(getattr(module, attribute), options))
            seen.append(options)
    monkeypatch.setattr(module, "pltpu", types.SimpleNamespace(InterpretParams=params))
    if module is linear_cross_entropy:
        module.compiled.cache_clear()
        request.addfinalizer(module.compiled.cache_clear)
    function = getattr(module, test)
    names = function.__code__.co_varnames[len(arguments) : function.__code__.co_argcount]
    function(*arguments, **{each: request.getfixturevalue(each) for each in names})
    assert seen
