"""Kernels of other people, and examples with planted faults, executed as they are compiled for TPUs."""

import functools
import re
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compile_targets import emulation_truths
from compile_targets.emulation_truths import normal, rounded, softmax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import matmul
from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention
from jax.experimental.pallas.ops.tpu.megablox import gmm
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

import jaxops
import lowering
from lowering.emulation.faults import EmulationError
from lowering.emulation.interpreting import interpret
from lowering.measuring.inputs import made_up
from lowering.select import EMULATED

pytestmark = pytest.mark.tpu_compile

ROOT = Path(__file__).parents[2]


users_promotion = pytest.fixture(autouse=True)(emulation_truths.users_promotion)


def assert_near(found, truth, of_largest):
    truth = np.asarray(truth, np.float64)
    assert np.max(np.abs(np.asarray(found).astype(np.float64) - truth)) <= of_largest * np.max(np.abs(truth))


@pytest.mark.parametrize("chip", EMULATED)
def test_flash_attention_and_its_gradients_agree_with_float64(chip, rng):
    q, k, v = (normal(rng, 1, 1, 256, 128) for _ in range(3))
    sizes = BlockSizes.get_default(1, 1, 256, 256, 128)

    def attended(q, k, v):
        return flash_attention(q, k, v, causal=True, sm_scale=0.1, block_sizes=sizes)

    def loss(q, k, v):
        return jnp.sum(attended(q, k, v)), attended(q, k, v)

    emulation = lowering.emulate(jax.grad(loss, argnums=(0, 1, 2), has_aux=True), q, k, v, target=chip)
    assert emulation.findings == ()
    names = [one.name.partition("_block")[0] for one in emulation.kernels]
    assert names == ["flash_attention.1", "flash_mha_bwd_dkv", "flash_mha_bwd_dq"]
    (dq, dk, dv), attention = emulation.results
    mask = np.where(np.tril(np.ones((256, 256), bool)), 0, -np.inf)
    p = softmax(0.1 * rounded(q)[0, 0] @ rounded(k)[0, 0].T + mask)
    assert_near(attention[0, 0], p @ rounded(v)[0, 0], 5e-3)
    of_p = np.ones((256, 128)) @ rounded(v)[0, 0].T
    of_scores = 0.1 * p * (of_p - (p * of_p).sum(-1, keepdims=True))
    assert_near(dv[0, 0], p.T @ np.ones((256, 128)), 1e-2)
    assert_near(dq[0, 0], of_scores @ rounded(k)[0, 0], 1e-2)
    assert_near(dk[0, 0], of_scores.T @ rounded(q)[0, 0], 1e-2)


@pytest.mark.parametrize("chip", EMULATED)
def test_paged_attention_agrees_with_float64(chip, rng):
    q, keys, values = normal(rng, 2, 4, 128), normal(rng, 2, 8, 16, 128), normal(rng, 2, 8, 16, 128)
    lengths, pages = jnp.array([20, 50], jnp.int32), jnp.arange(8, dtype=jnp.int32).reshape(2, 4)

    def attended(*arrays):
        return paged_attention(*arrays, pages_per_compute_block=2)

    emulation = lowering.emulate(attended, q, keys, values, lengths, pages, target=chip)
    assert emulation.findings == ()
    (kernel,) = emulation.kernels
    assert kernel.name == "paged_attention.1"
    assert re.fullmatch(r"test_emulation_tpu\.py:\d+ \(attended\)", kernel.source)
    for row, (length, own) in enumerate(zip((20, 50), np.asarray(pages), strict=True)):
        for head in range(4):
            k, v = (rounded(x)[head // 2, own].reshape(64, 128)[:length] for x in (keys, values))
            assert_near(emulation.results[row, head], softmax(k @ rounded(q)[row, head]) @ v, 5e-3)


@pytest.mark.parametrize("chip", EMULATED)
def test_splash_attention_agrees_with_float64(chip, rng):
    q, k, v = (normal(rng, 2, 256, 128) for _ in range(3))
    attended = splash.make_splash_mha_single_device(masks.MultiHeadMask([masks.CausalMask((256, 256))] * 2))
    emulation = lowering.emulate(lambda q, k, v: attended(q, k, v), q, k, v, target=chip)
    assert emulation.findings == ()
    mask = np.where(np.tril(np.ones((256, 256), bool)), 0, -np.inf)
    for head in range(2):
        p = softmax(rounded(q)[head] @ rounded(k)[head].T + mask)
        assert_near(emulation.results[head], p @ rounded(v)[head], 1e-2)


@pytest.mark.parametrize("chip", EMULATED)
def test_products_agree_with_float64(chip, rng):
    x, y = (normal(rng, *shape, dtype=jnp.bfloat16) for shape in ((256, 512), (512, 256)))
    product = lowering.emulate(lambda x, y: matmul.matmul(x, y, block_shape=(128, 128), block_k=256), x, y, target=chip)
    assert_near(product.results, rounded(x) @ rounded(y), 5e-3)
    groups, weights = jnp.array([64, 100, 20, 72], jnp.int32), normal(rng, 4, 512, 256, dtype=jnp.bfloat16)
    grouped = lowering.emulate(lambda x, w, sizes: gmm(x, w, sizes, jnp.float32), x, weights, groups, target=chip)
    of_rows = np.repeat(np.arange(4), np.asarray(groups))
    assert_near(grouped.results, np.einsum("mk,mkn->mn", rounded(x), rounded(weights)[of_rows]), 1e-5)
    assert product.findings == grouped.findings == ()


def example(name, fn):
    names = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))
    return names[fn], made_up(names["example_args"])


@pytest.mark.parametrize("chip", EMULATED)
def test_a_store_that_may_still_read_is_found(chip):
    double, (x,) = example("double_buffered", "double")
    emulation = lowering.emulate(double, x, target=chip)
    np.testing.assert_array_equal(emulation.results, 2 * x)
    (finding,) = emulation.findings
    # By themselves, the stores are what differs.
    lines = (ROOT / "examples" / "double_buffered.py").read_text().splitlines()
    (start,) = [number for number, line in enumerate(lines, 1) if "store(chunk, slot).start()" in line]
    used = "starts a transfer whose memory is used before the wait for it: result 0 (from element (0, 0) on) depends"
    assert finding.what.endswith(f"(double_buffered.py:{start}) {used} on when that happens")
    assert finding.source.startswith("double_buffered.py:")


@pytest.mark.parametrize("chip", EMULATED)
def test_a_wait_that_comes_too_late_is_one_finding(chip, rng):
    """Results differ in both of the later orders."""

    def body(x, y, buffer, semaphore):
        copy = pltpu.make_async_copy(x, buffer, semaphore)
        copy.start()
        y[...] = 2 * buffer[...]
        copy.wait()

    x = normal(rng, 256, 256)
    (finding,) = lowering.emulate(
        pl.pallas_call(
            body,
            in_specs=[pl.BlockSpec(memory_space=pltpu.MemorySpace.HBM)],
            out_shape=x,
            scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA],
        ),
        x,
        target=chip,
    ).findings
    assert re.match(r"bundle 0x\w+ \(test_emulation_tpu.py:\d+\) starts a transfer whose memory is used", finding.what)


@pytest.mark.parametrize("chip", EMULATED)
def test_rounded_operands_show_beside_the_interpreter(chip):
    distances, (x, y) = example("nearest", "squared_distances")
    truth = ((np.asarray(x, np.float64)[:, None] - np.asarray(y, np.float64)[None]) ** 2).sum(-1)
    np.testing.assert_allclose(interpret(distances, x, y, target=chip), truth, atol=1e-4)
    emulation = lowering.emulate(distances, x, y, target=chip)
    assert 1e-2 < np.max(np.abs(emulation.results - truth)) < 0.5


@pytest.mark.parametrize("chip", EMULATED)
def test_a_block_beyond_a_small_operand_is_a_fault(chip, rng):
    """The same on all chips, though XLA would bring these operands to VMEM on a v7x."""

    def gathered(at, table):
        def body(at, table, y):
            y[...] = table[...]

        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(3,),
            in_specs=[pl.BlockSpec((8, 256), lambda step, at: (at[step], 0))],
            out_specs=pl.BlockSpec((8, 256), lambda step, at: (step, 0)),
        )
        return pl.pallas_call(body, grid_spec=spec, out_shape=jax.ShapeDtypeStruct((24, 256), jnp.float32))(at, table)

    table = normal(rng, 80, 256)
    kept = lowering.emulate(gathered, jnp.array([9, 0, 4], jnp.int32), table, target=chip)
    np.testing.assert_array_equal(kept.results, np.asarray(table).reshape(10, 8, 256)[[9, 0, 4]].reshape(24, 256))
    with pytest.raises(lowering.EmulationError, match=r"reads beyond (operand 1|its operand in hbm)"):
        lowering.emulate(gathered, jnp.array([9, 10, 4], jnp.int32), table, target=chip)


def test_arguments_that_are_traced_are_refused(rng):
    def inside(x):
        return lowering.emulate(lambda x: 2 * x, x, target="tpu-v5e").results

    with pytest.raises(lowering.EmulationError, match=r"args must have values: call it outside of jit .* got a traced"):
        jax.jit(inside)(normal(rng, 8, 128))


def test_unwritten_memory_is_found(rng):
    def body(x, y, scratch):
        scratch[:8] = x[...]
        y[...] = scratch[...]

    def partly(x):
        shape = jax.ShapeDtypeStruct((16, 128), jnp.float32)
        return pl.pallas_call(body, out_shape=shape, scratch_shapes=[pltpu.VMEM((16, 128), jnp.float32)])(x)

    emulation = lowering.emulate(partly, normal(rng, 8, 128), target="tpu-v5e")
    (finding,) = emulation.findings
    assert "result 0 (from element (8, 0) on) depends on memory that nothing has written" in finding.what
    assert "is the first to load it" in finding.what
    # What nobody reads is nobody's fault.
    assert lowering.emulate(lambda x: partly(x)[:8], normal(rng, 8, 128), target="tpu-v5e").findings == ()


def test_an_unwritten_scalar_is_found_where_it_is_loaded():
    def body(x, y, scratch):
        @pl.when(x[0, 0] > 5)
        def _():
            scratch[0] = 3.0

        y[...] = x[...] * scratch[0]

    call = pl.pallas_call(
        body, out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32), scratch_shapes=[pltpu.SMEM((1,), jnp.float32)]
    )
    (finding,) = lowering.emulate(call, np.ones((8, 128), np.float32), target="tpu-v5e").findings
    assert re.search(
        r"nothing has written, .*: bundle \w+ \(test_emulation_tpu.py:\d+\) is the first to load it", finding.what
    )
    assert lowering.emulate(call, np.full((8, 128), 6, np.float32), target="tpu-v5e").findings == ()


def test_what_a_longer_transfer_has_left_is_found(rng):
    """The last block of a ragged operand is shorter than those before, whose rows are still behind it."""

    def body(count, x, y):
        @pl.when(pl.program_id(0) == 0)
        def _():
            y[...] = jnp.zeros_like(y)

        rows = pl.program_id(0) * 256 + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
        y[...] += jnp.sum(jnp.where(rows < count, x[...], 0), axis=0, keepdims=True)

    x = normal(rng, 1000, 256)

    def sums(count, x):
        blocks = {
            "in_specs": [pl.BlockSpec((256, 256), lambda i: (i, 0))],
            "out_specs": pl.BlockSpec((1, 256), lambda i: (0, 0)),
        }
        shape = jax.ShapeDtypeStruct((1, 256), x.dtype)
        return pl.pallas_call(functools.partial(body, count), grid=(4,), out_shape=shape, **blocks)(x)

    (finding,) = lowering.emulate(functools.partial(sums, 1024), x, target="tpu-v6e").findings
    assert "rows behind an array's last" in finding.what
    emulation = lowering.emulate(functools.partial(sums, 1000), x, target="tpu-v6e")
    assert emulation.findings == ()
    assert_near(emulation.results, np.asarray(x, np.float64).sum(0, keepdims=True), 1e-5)


def in_blocks(x, body, at, count):
    """Calls a kernel for each of the eight blocks of x; at(i) of `count` is the block of its result."""
    blocks = {
        "in_specs": [pl.BlockSpec((16, 256), lambda i: (i, 0))],
        "out_specs": pl.BlockSpec((16, 256), lambda i: (at(i), 0)),
    }
    shape = jax.ShapeDtypeStruct((16 * count, 256), x.dtype)
    return pl.pallas_call(body, grid=(8,), out_shape=shape, **blocks)(x)


def but_one(x_ref, y_ref):
    @pl.when(pl.program_id(0) != 3)
    def _():
        y_ref[...] = 2 * x_ref[...]


def added(is_first):
    def body(x_ref, y_ref):
        @pl.when(is_first(pl.program_id(0)))
        def _():
            y_ref[...] = jnp.zeros_like(y_ref)

        y_ref[...] += x_ref[...]

    return body


@pytest.mark.parametrize("chip", EMULATED)
@pytest.mark.parametrize("whole_program", [False, True])
def test_a_block_of_an_output_that_is_not_written_is_found(whole_program, chip, rng):
    """What is sent in its place is the result of another step, which is still in that memory."""
    written = functools.partial(in_blocks, body=but_one, at=lambda i: i, count=8)
    x = normal(rng, 128, 256)
    (finding,) = lowering.emulate(written, x, target=chip, whole_program=whole_program).findings
    assert "result 0 (from element (48, 0) on) depends on memory that nothing has written" in finding.what
    assert whole_program or finding.what.endswith(" is the first to copy it to HBM")
    # What nobody reads is nobody's fault.
    assert lowering.emulate(lambda x: written(x)[:48], x, target=chip, whole_program=whole_program).findings == ()


@pytest.mark.parametrize("chip", EMULATED)
@pytest.mark.parametrize("period", [2, 3])
def test_a_block_of_an_output_that_is_visited_again_is_found(period, chip, rng):
    """It has been sent, and the memory where it was may hold another."""
    summed = functools.partial(in_blocks, body=added(lambda i: i < period), at=lambda i: i % period, count=period)
    (finding,) = lowering.emulate(summed, normal(rng, 128, 256), target=chip).findings
    assert re.search(r"bundle 0x\w+ \(test_emulation_tpu.py:\d+\) is the first to load it", finding.what)


@pytest.mark.parametrize("chip", EMULATED)
@pytest.mark.parametrize("steps", [2, 8])
def test_a_block_of_an_output_may_be_visited_several_times_in_a_row(steps, chip, rng):
    x = normal(rng, 128, 256)
    summed = functools.partial(
        in_blocks, body=added(lambda i: i % steps == 0), at=lambda i: i // steps, count=8 // steps
    )
    emulation = lowering.emulate(summed, x, target=chip)
    assert emulation.findings == ()
    truth = np.asarray(x, np.float64).reshape(-1, steps, 16, 256).sum(1)
    assert_near(emulation.results, truth.reshape(-1, 256), 1e-6)


@pytest.mark.parametrize("chip", EMULATED)
@pytest.mark.parametrize("first", [0, 128])
def test_transfers_within_hbm_are_executed(chip, first, rng):
    """With strides, and of one piece."""
    hbm = pl.BlockSpec(memory_space=pltpu.MemorySpace.HBM)
    x = normal(rng, 96, 384)
    shape = jax.ShapeDtypeStruct((96, 384 - first), x.dtype)

    def copied(x):
        def body(x, y):
            pltpu.sync_copy(x.at[:, first:], y)

        return pl.pallas_call(body, in_specs=[hbm], out_specs=hbm, out_shape=shape)(x)

    emulation = lowering.emulate(copied, x, target=chip)
    assert emulation.findings == ()
    np.testing.assert_array_equal(emulation.results, x[:, first:])


def test_a_kernel_has_the_name_and_the_line_that_schedules_give_it(rng):
    def body(x_ref, y_ref):
        y_ref[...] = 2 * x_ref[...]

    @jax.jit
    def doubled(x):
        return pl.pallas_call(body, out_shape=x)(x)

    x = normal(rng, 128, 256)
    emulation = lowering.emulate(lambda x: doubled(x) + 1, x, target="tpu-v6e")
    report = lowering.compile(lambda x: doubled(x) + 1, x, target="tpu-v6e", schedule=True)
    (kernel,) = emulation.kernels
    assert kernel.name == "doubled.1"
    assert (kernel.name, kernel.source) in [(one.name, one.source) for one in report.schedule.kernels]


def test_a_kernel_that_is_called_bare_has_its_own_name_and_line(rng):
    def double(x, y):
        y[...] = 2 * x[...]

    x = normal(rng, 8, 128)
    (kernel,) = lowering.emulate(pl.pallas_call(double, out_shape=x), x, target="tpu-v6e").kernels
    assert (kernel.name, kernel.source) == (
        "double.1",
        f"{Path(__file__).name}:{double.__code__.co_firstlineno} (double)",
    )


def test_what_a_kernel_returns_must_be_numbers(rng):
    semaphore = pl.BlockSpec(memory_space=pltpu.MemorySpace.SEMAPHORE)
    options = {"out_shape": pltpu.SemaphoreType.DMA(()), "out_specs": semaphore}

    def called(x, **options):
        return pl.pallas_call(lambda *_: None, **options)(x)

    x = normal(rng, 8, 128)
    with pytest.raises(
        EmulationError, match=r"^a pallas_call on .*\(called\): result 0 is of dma_sem, and no memory of"
    ):
        lowering.emulate(lambda x: called(x, **options), x, target="tpu-v5e")
    emulation = lowering.emulate(lambda x: (called(x, out_shape=()), x), x, target="tpu-v5e")
    np.testing.assert_array_equal(emulation.results[1], x)
    assert emulation.kernels == ()
    assert re.search(r"\(called\) returns nothing", str(emulation))


def test_kernels_in_loops_and_derivatives_are_executed(rng):
    x, grad = normal(rng, 40, 300), normal(rng, 40, 300)

    def fn(x, grad):
        def step(x, _):
            return jax.vjp(jaxops.softmax, x)[1](grad)[0], None

        return jax.lax.scan(step, x, length=3)[0]

    with jaxops.use("pallas"):
        emulation = lowering.emulate(fn, x, grad, target="tpu-v6e")
    assert {kernel.name: kernel.calls for kernel in emulation.kernels} == {"softmax.1": 3, "softmax_backward.1": 3}
    truth = np.asarray(x, np.float64)
    for _ in range(3):
        y = softmax(truth)
        truth = y * (grad - (y * grad).sum(-1, keepdims=True))
    assert_near(emulation.results, truth, 1e-5)
    assert emulation.coverage == 1


@pytest.mark.parametrize("chip", EMULATED)
def test_operators_run_as_a_chip_would(chip, rng):
    x, weight, labels = normal(rng, 40, 256), 0.1 * normal(rng, 300, 256), jnp.asarray(rng.integers(0, 300, 40))

    def fn(x, weight):
        scores = jax.vmap(jaxops.softmax)(x)
        log_probs = jaxops.linear_log_probs(x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16), labels)
        return jnp.sum(scores * jnp.arange(256.0)) + jnp.sum(log_probs)

    loss = jax.value_and_grad(fn, argnums=(0, 1))
    with jaxops.use(f"emulate:{chip}"):
        shown = lowering.explain(fn, x, weight, target="cpu")
        value, (of_x, of_weight) = jax.jit(loss)(x, weight)
    assert {row.implementation for row in shown.rows} == {f"mosaic_tpu (emulated, {chip})"}
    logits = rounded(x) @ rounded(weight).T
    p = softmax(np.asarray(x, np.float64))
    ranks = np.arange(256.0)
    q = softmax(logits)
    assert_near(value, (p * ranks).sum() + np.log(q[np.arange(40), labels]).sum(), 1e-5)
    of_logits = np.eye(300)[np.asarray(labels)] - q
    assert_near(of_weight, of_logits.T @ rounded(x), 1e-2)
    assert_near(of_x, p * (ranks - (p * ranks).sum(-1, keepdims=True)) + of_logits @ rounded(weight), 1e-2)


def test_what_is_no_tpu_cannot_be_emulated():
    for name in ("emulate:cuda-h100", "emulate:", "emulate"):
        with pytest.raises(ValueError, match="emulate:tpu-v5e"):
            jaxops.use(name)


def test_an_error_of_the_transcendental_unit_shows(rng):
    x = normal(rng, 40, 300)
    with jaxops.use("pallas"):
        exact, perturbed = (
            lowering.emulate(jaxops.softmax, x, target="tpu-v6e", eup_error=error).results for error in (0.0, 2.0**-10)
        )
    assert 2.0**-13 < np.max(np.abs(perturbed / exact - 1)) < 2.0**-8
