"""Whole programs, as XLA and Mosaic make them for TPUs: their fusions, copies, loops and kernels are executed."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compile_targets import emulation_truths
from compile_targets.emulation_truths import normal, rounded, softmax
from jax.scipy.special import erf
from scipy.special import erf as exact_erf
from typer.testing import CliRunner

import jaxops
import lowering
from jaxops_command.app import app
from lowering.emulation.faults import EmulationError
from lowering.select import EMULATED

pytestmark = pytest.mark.tpu_compile


users_promotion = pytest.fixture(autouse=True)(emulation_truths.users_promotion)


def integers(rng, most, *shape):
    return jnp.asarray(rng.integers(0, most, shape), jnp.int32)


# Programs, of a random generator: the function, its arguments, its results in float64, and how far each may be from
# that, as a part of the largest element; 0 for the same numbers.


def elements(rng):
    x, y, i, j = normal(rng, 13, 300), normal(rng, 13, 300), integers(rng, 999, 7, 200), integers(rng, 99, 7, 200)
    halves, flags = normal(rng, 40, 130, dtype=jnp.bfloat16), x > y
    wide = np.asarray(halves, np.float64)

    def fn(x, y, i, j, halves, flags):
        return jnp.where(flags, x / y, erf(x)), i * j - (i >> 2), halves * halves, jnp.sin(x) + jnp.log1p(y * y)

    a, b = np.asarray(x, np.float64), np.asarray(y, np.float64)
    p, q = np.asarray(i), np.asarray(j)
    truths = np.where(a > b, a / b, exact_erf(a)), p * q - (p >> 2), wide * wide, np.sin(a) + np.log1p(b * b)
    return fn, (x, y, i, j, halves, flags), truths, (1e-6, 0, 4e-3, 1e-6)


def moves(rng):
    x, y, at = normal(rng, 40, 300), normal(rng, 40, 77), jnp.int32(7)
    table = rng.normal(size=(40, 300)).astype(np.float32)

    def fn(x, y, at):
        rows = jax.lax.dynamic_update_slice(x, y[:5], (at, 3))
        return x.T, jnp.concatenate([x, y], 1), x[3:20:2, 5:250], rows[::-1], x.reshape(3, 40, 100), x + table

    a, b = np.asarray(x, np.float64), np.asarray(y, np.float64)
    rows = a.copy()
    rows[7:12, 3:80] = b[:5]
    truths = a.T, np.concatenate([a, b], 1), a[3:20:2, 5:250], rows[::-1], a.reshape(3, 40, 100), a + table
    return fn, (x, y, at), truths, (0, 0, 0, 0, 0, 1e-6)


def reductions(rng):
    x, counts = normal(rng, 301, 517), integers(rng, 999, 24, 256)

    def fn(x, counts):
        return x.sum(0), x.mean(1), x.max(0), jnp.argmin(x, 1), counts.sum(1), jnp.cumsum(counts, 0)

    a, c = np.asarray(x, np.float64), np.asarray(counts)
    return (
        fn,
        (x, counts),
        (a.sum(0), a.mean(1), a.max(0), a.argmin(1), c.sum(1), c.cumsum(0)),
        (1e-6, 1e-6, 0, 0, 0, 0),
    )


def normalizations(rng):
    x, scale, bias = normal(rng, 40, 300), normal(rng, 300), normal(rng, 300)

    def fn(x, scale, bias):
        centered = x - x.mean(-1, keepdims=True)
        return jax.nn.softmax(x), scale * centered * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) + bias

    a = np.asarray(x, np.float64)
    standard = (a - a.mean(-1, keepdims=True)) / np.sqrt(a.var(-1, keepdims=True) + 1e-5)
    return fn, (x, scale, bias), (softmax(a), np.asarray(scale) * standard + np.asarray(bias)), (1e-6, 1e-6)


def products(rng):
    x, y, z = normal(rng, 40, 300), normal(rng, 300, 200), normal(rng, 40, 70, dtype=jnp.bfloat16)

    def fn(x, y, z):
        return x @ y, x.T @ z.astype(x.dtype), z @ z.T, jnp.dot(x, y, precision="highest")

    a, b, c = map(rounded, (x, y, z))
    exact = np.asarray(x, np.float64) @ np.asarray(y, np.float64)
    return fn, (x, y, z), (a @ b, a.T @ c, c @ c.T, exact), (1e-6, 1e-6, 4e-3, 1e-6)


def convolutions(rng):
    x, kernel, of_y = (jnp.round(4 * normal(rng, *shape)) / 4 for shape in ((2, 8, 50), (16, 8, 3), (2, 16, 50)))

    def fn(x, kernel, of_y):
        y, transposed = jax.vjp(lambda x, kernel: jax.lax.conv_general_dilated(x, kernel, (1,), "SAME"), x, kernel)
        return y, *transposed(of_y)

    a, w, g = (np.asarray(array, np.float64) for array in (x, kernel, of_y))
    a, of_x = np.pad(a, ((0, 0), (0, 0), (1, 1))), np.zeros((2, 8, 52))
    windows = np.lib.stride_tricks.sliding_window_view(a, 3, axis=2)
    for at in range(3):
        of_x[:, :, at : at + 50] += np.einsum("not,oc->nct", g, w[:, :, at])
    truths = np.einsum("nctk,ock->not", windows, w), of_x[:, :, 1:-1], np.einsum("nctk,not->ock", windows, g)
    return fn, (x, kernel, of_y), truths, (1e-6, 1e-6, 1e-6)


def training_step(rng):
    """One step of Adam on the cross entropy of two layers; products round their operands."""
    x, labels, step = normal(rng, 32, 64), integers(rng, 10, 32), jnp.float32(3)
    weights = {"hidden": 0.1 * normal(rng, 64, 200), "out": 0.1 * normal(rng, 200, 10)}
    first, second = jax.tree.map(lambda w: 0.1 * w, weights), jax.tree.map(lambda w: 0.1 * w * w, weights)

    def loss(weights, x, labels):
        log_probs = jax.nn.log_softmax(jax.nn.relu(x @ weights["hidden"]) @ weights["out"])
        return -jnp.mean(jnp.take_along_axis(log_probs, labels[:, None], 1))

    def fn(weights, first, second, x, labels, step):
        value, grads = jax.value_and_grad(loss)(weights, x, labels)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, grads)
        of_step = (1 - 0.9**step), (1 - 0.999**step)
        moved = jax.tree.map(
            lambda w, m, v: w - 0.01 * (m / of_step[0]) / (jnp.sqrt(v / of_step[1]) + 1e-3), weights, first, second
        )
        return value, moved, first

    before = rounded(x) @ rounded(weights["hidden"])
    hidden = np.maximum(before, 0)
    probs = softmax(rounded(hidden) @ rounded(weights["out"]))
    of_logits = (probs - np.eye(10)[np.asarray(labels)]) / 32
    of_hidden = rounded(of_logits) @ rounded(weights["out"]).T * (before > 0)
    grads = {"hidden": rounded(x).T @ rounded(of_hidden), "out": rounded(hidden).T @ rounded(of_logits)}
    value, moved, moments = -np.mean(np.log(probs[np.arange(32), np.asarray(labels)])), {}, {}
    for name, grad in grads.items():
        w = np.asarray(weights[name], np.float64)
        moments[name] = 0.09 * w + 0.1 * grad
        variance = 0.0999 * w * w + 0.001 * grad * grad
        moved[name] = w - 0.01 * moments[name] / (1 - 0.9**3) / (np.sqrt(variance / (1 - 0.999**3)) + 1e-3)
    tolerances = (1e-6, 1e-6, 1e-6, 1e-6, 1e-6)
    return fn, (weights, first, second, x, labels, step), (value, moved, moments), tolerances


def lookups(rng):
    table, ids, updates = normal(rng, 100, 300), integers(rng, 100, 17), normal(rng, 17, 300)

    def fn(table, ids, updates):
        return table[ids], table.at[ids].add(updates), jax.nn.one_hot(ids, 100)

    a, at = np.asarray(table, np.float64), np.asarray(ids)
    added = a.copy()
    np.add.at(added, at, np.asarray(updates, np.float64))
    return fn, (table, ids, updates), (a[at], added, np.eye(100)[at]), (0, 1e-6, 0)


def loops(rng):
    """A loop that data end, around a branch; and one around a kernel."""
    x = normal(rng, 40, 256)

    def fn(x):
        def grow(x):
            return jax.lax.cond(x[0, 0] > 0, lambda x: x + jnp.abs(x), lambda x: x + 1, x)

        grown = jax.lax.while_loop(lambda x: x.sum() < 30_000, grow, x)
        return grown, jax.lax.fori_loop(0, 3, lambda _, x: jaxops.softmax(3 * x), x)

    grown = peaked = np.asarray(x, np.float64)
    while grown.sum() < 30_000:
        grown = grown + np.abs(grown) if grown[0, 0] > 0 else grown + 1
    for _ in range(3):
        peaked = softmax(3 * peaked)
    return fn, (x,), (grown, peaked), (1e-6, 1e-6)


PROGRAMS = (elements, moves, reductions, normalizations, products, convolutions, training_step, lookups, loops)


@pytest.mark.parametrize("chip", EMULATED)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_whole_programs_agree_with_float64(program, chip, rng):
    fn, args, truths, tolerances = program(rng)
    try:
        with jaxops.use("pallas"):
            emulation = lowering.emulate(fn, *args, target=chip, whole_program=True)
    except EmulationError as error:
        if program is lookups and chip == "tpu-v7x" and "SparseCore" in str(error):
            pytest.skip(str(error))  # later compilers give it additions to rows
        raise
    assert emulation.findings == ()
    triples = zip(*map(jax.tree.leaves, (emulation.results, truths)), tolerances, strict=True)
    for found, truth, of_largest in triples:
        truth = np.asarray(truth, np.float64)
        assert found.shape == truth.shape
        assert np.max(np.abs(np.asarray(found, np.float64) - truth)) <= of_largest * np.max(np.abs(truth))
    top, *parts = emulation.kernels
    assert top.name == "program"
    assert len(parts) >= 2
    assert all(part.calls and part.issued for part in parts)
    if program is loops:
        (kernel,) = (part for part in parts if part.name.startswith("softmax"))
        assert kernel.calls == 3


@pytest.mark.parametrize("chip", EMULATED)
def test_kernels_compute_the_same_within_a_program(chip, rng):
    x, grad = normal(rng, 40, 300), normal(rng, 40, 300)

    def fn(x, grad):
        return jax.vjp(jaxops.softmax, 2 * x)[1](grad)[0] + 1

    with jaxops.use("pallas"):
        whole, alone = (lowering.emulate(fn, x, grad, target=chip, whole_program=whole) for whole in (True, False))
    np.testing.assert_array_equal(whole.results, alone.results)
    names = {part.name.partition(".")[0] for part in whole.kernels}
    assert {"softmax", "softmax_backward"} <= names
    assert "the whole program, " in str(whole)


def test_what_nobody_has_settled_stops_by_name_and_line(rng):
    x = normal(rng, 40, 300, dtype=jnp.float16)
    with pytest.raises(EmulationError, match=r"test_whole_programs_tpu.py:\d+ .*, bundle 0x\w+: opcode '\S+hf16"):
        lowering.emulate(lambda x: x * x, x, target="tpu-v6e", whole_program=True)


def test_what_a_sparse_core_computes_is_refused(rng):
    def loss(logits, labels):
        return jnp.sum(jax.nn.log_softmax(logits)[jnp.arange(32), labels])

    with pytest.raises(EmulationError, match=r"\(test_whole_programs_tpu.py:\d+ \(loss\)\), which .* a SparseCore"):
        lowering.emulate(
            jax.grad(loss), normal(rng, 32, 10), integers(rng, 10, 32), target="tpu-v6e", whole_program=True
        )


def test_what_cannot_be_laid_out_is_refused(rng):
    with pytest.raises(EmulationError, match="bits must take and return arrays of numbers"):
        lowering.emulate(jax.random.bits, jax.random.key(0), target="tpu-v5e", whole_program=True)


def test_arrays_that_a_function_closes_over_are_told_apart(rng):
    x, first, second = rng.normal(size=(3, 40, 300)).astype(np.float32)
    emulation = lowering.emulate(lambda x: x * first - second, x, target="tpu-v5e", whole_program=True)
    np.testing.assert_allclose(emulation.results, x * first - second, atol=1e-6)


def test_options_are_checked(rng):
    with pytest.raises(EmulationError, match="whole_program must be a bool; got 1"):
        lowering.emulate(jnp.sin, normal(rng, 3), target="tpu-v5e", whole_program=1)
    with pytest.raises(EmulationError, match="fn must return an array; got none"):
        lowering.emulate(lambda x: (), np.ones(8, np.float32), target="tpu-v5e", whole_program=True)


def test_the_command_executes_whole_programs():
    example = Path(__file__).parents[2] / "examples" / "nearest.py"
    command = ["emulate", f"{example}:squared_distances", "--target", "tpu-v7x", "--whole-program"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0
    assert "tpu-v7x: the whole program, 2 parts, executed as compiled" in result.output
    assert "against JAX and Pallas' interpreter" in result.output
    result = CliRunner().invoke(app, [*command, "--json"])
    assert [part["name"] for part in json.loads(result.output)["kernels"]] == ["program", "squared_distances.1"]
