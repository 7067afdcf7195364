"""The dropout kernels under the interpreters of both Pallas dialects, against NumPy."""

import functools
import types

import chex
import dropout_oracle as oracle
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lowering
from jaxops import dropout
from jaxops.dropout.api import probability_and_scale
from pallas_kernels._jax_private import interpret_gpu_params
from pallas_kernels.dropout_mask import RESOLUTION_BITS, decisive_digits, digit_pair, threshold
from pallas_kernels.gpu import dropout as gpu_dropout
from pallas_kernels.hardware import Hardware
from pallas_kernels.tpu import dropout as tpu_dropout
from pallas_kernels.tpu import dropout_columns
from pallas_kernels.tpu.dropout_words import decide_some

pytestmark = pytest.mark.emulated

KEY_WORDS = (0x9E3779B9, 0x7F4A7C15)
F32, BF16, F16 = "float32", "bfloat16", "float16"
# Blocks far smaller than the default let small arrays span several of them.
KERNELS = {
    "tpu": (tpu_dropout, {"block_elements": 8192}, pltpu.InterpretParams(detect_races=True), "tpu_custom_call"),
    "gpu": (gpu_dropout, {}, interpret_gpu_params(detect_races=True), "mosaic_gpu"),
}
CASES = [
    *[("tpu", shape, dtype, rate) for shape, dtype, rate in (((600, 32), F32, 0.25), ((3, 32), BF16, 0.5))],
    *[("tpu", shape, dtype, rate) for shape, dtype, rate in (((40, 768), F32, 0.25), ((2048,), F32, 0.875))],
    *[("tpu", shape, dtype, rate) for shape, dtype, rate in (((2, 3, 4160), F32, 0.75), ((20, 96), F32, 0.1))],
    *[("tpu", shape, dtype, rate) for shape, dtype, rate in (((100, 160), BF16, 0.3), ((17, 64), F32, 0.0))],
    ("tpu", (17, 64), F32, 1.0),
    *[("gpu", shape, dtype, rate) for shape, dtype, rate in (((2, 4096), F32, 0.25), ((4160,), BF16, 0.5))],
    *[("gpu", shape, dtype, rate) for shape, dtype, rate in (((2, 1, 4128), F16, 0.75), ((4096,), F32, 0.1))],
    *[("gpu", (4096,), F32, rate) for rate in (0.0, 1.0, 0.875, 2**-20)],
]


def draws_of(rate, shape, *, in_each_way, begins=0, lane=0):
    """Yields a rate with streams and a mask, or several, so that a TPU's kernel takes each of its ways.

    It draws up to four binary digits in one way and more in another. Words that lie at the same place of different
    registers can be equal; if 12 digits do not decide about one, a turn does not decide about all of them.

    Args:
      rate, shape: of the dropout.
      in_each_way: whether to yield several.
      begins: the lane in which the words of each row begin.
      lane: one with a word in all registers, counted from where the words of the first row begin.
    """
    for one in [rate, 0.5 if rate in (0.1, 0.3) else 0.1][: 1 + in_each_way]:
        yield one, make_streams(shape), oracle.kept(KEY_WORDS, int(np.prod(shape)), one, first=5).reshape(shape)
    if in_each_way:
        is_undecided = oracle.numbers(KEY_WORDS, 2**17, first=0) >> 12 == round(0.9 * 2**24) >> 12
        word = np.flatnonzero(is_undecided)[-1] // 32
        firsts = np.broadcast_to(word - lane + begins, shape[:-1])
        mask = np.stack([oracle.kept(KEY_WORDS, shape[-1], 0.1, first) for first in firsts.ravel()]).reshape(shape)
        yield 0.1, make_streams(shape).at[..., 2].set(firsts.astype(np.uint32)), mask


def make_streams(shape):
    rows, row_words = int(np.prod(shape[:-1])), shape[-1] // 32
    first = np.arange(rows) * row_words + 5
    streams = np.stack([np.full(rows, KEY_WORDS[0]), np.full(rows, KEY_WORDS[1]), first], axis=-1)
    return jnp.asarray(streams.reshape(*shape[:-1], 3).astype(np.uint32))


def make_keep(rate):
    return probability_and_scale(rate, F32)


def expected(x, mask, rate):
    scale = 0 if rate == 1 else np.float32(1) / (np.float32(1) - np.float32(rate))
    return np.where(mask, np.asarray(jnp.asarray(np.asarray(x).astype(np.float32) * scale, x.dtype)), 0)


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "shape", "dtype", "rate"), CASES, ids=str)
def test_dropout_kernels_draw_the_same_mask(name, shape, dtype, rate, rng, capfd, emulated):
    kernel, config, interpret, _ = KERNELS[name]
    options = {"config": config, "interpret": interpret}
    run, run_backward = (jax.jit(functools.partial(fn, **options)) for fn in (kernel.run, kernel.run_backward))
    x, grad = (jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2))
    for one, streams, mask in draws_of(rate, shape, in_each_way=emulated):
        y, words = run(streams, x, make_keep(one))
        np.testing.assert_array_equal(words, oracle.packed(mask))
        np.testing.assert_array_equal(y, expected(x, mask, one))
        (dx,) = run_backward(jnp.where(mask, grad, jnp.nan), words, make_keep(one))
        np.testing.assert_array_equal(dx, expected(grad, mask, one))
        assert (y.dtype, dx.dtype) == (dtype, dtype)
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("keep", "count"), [(0.5, 1), (0.25, 2), (0.875, 3), (1 - 2**-20, 20), (2**-24, 24), (0.0, 0), (1.0, 0)]
)
def test_dropout_draws_only_the_digits_that_decide(keep, count):
    """0.875 is 0.111 in binary digits. No digit decides at 0 and 1."""
    above = threshold(jnp.float32(keep))
    assert decisive_digits(above) == count
    pairs = [digit_pair(above, jnp.int32(pair)) for pair in range(RESOLUTION_BITS // 2)]
    written = format(int(keep * 2**24), "025b")[1:]
    assert "".join("1" if digit else "0" for pair in pairs for digit in pair) == written


@pytest.mark.long
@pytest.mark.parametrize(("words", "bands"), [(50, 5), (192, 2)])
def test_dropout_tpu_kernel_draws_words_of_several_rows_in_a_register(words, bands, rng, capfd, emulated):
    """Five rows of 50 words fill 250 lanes of 256; the third begins in one register and ends in another.

    Of those of 192 words the first 128 fill a register each, and the last 64 of two rows share one.
    """
    config, rows = {"block_elements": bands * 16 * 32 * words}, bands * 16 + 10
    blocks = tpu_dropout.blocks_of(rows, 32 * words, **config)
    assert (blocks.counts, blocks.places) == ((2, 1), (bands, 16, words))
    begins = words % 128 * (np.arange(rows) // 16 % bands) % 128
    options = {"in_each_way": emulated, "begins": begins, "lane": words // 128 * 128 + 30}
    assert_draws((rows, 32 * words), BF16, config, rng, **options)
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize(("shape", "dtype", "groups"), [((2, 400, 288), BF16, 4), ((384, 1312), F32, 3)], ids=str)
def test_dropout_tpu_kernel_draws_words_of_columns_in_sublanes(shape, dtype, groups, rng, capfd, emulated):
    """The first case has two images, and words that do not fill registers; the second has a shorter last block."""
    words = min(shape[-1] // 32, 24)
    config = {"block_elements": groups * words * 32 * 128}
    blocks = dropout_columns.blocks_of(dropout_columns.view_of(shape), shape[-1], **config)
    assert blocks == (words, groups)
    begins = np.arange(shape[-2]) // 128 * words % 8  # the sublane in which the words of a group of rows begin
    assert_draws(shape, dtype, config, rng, in_each_way=emulated, begins=begins - 8 * (begins > 0))
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.long
def test_dropout_tpu_kernel_stores_few_words_of_a_row_in_sublanes(rng, capfd, emulated):
    """Blocks have 128 rows, in four bands that lie side by side in a register. The last block has only 72 rows."""
    config, shape = {"block_elements": 2**17}, (200, 1024)
    blocks = tpu_dropout.blocks_of(*shape, **config)
    assert (blocks.counts, blocks.places, blocks.in_sublanes) == ((2, 1), (4, 32, 32), True)
    assert_draws(shape, BF16, config, rng, in_each_way=emulated)
    assert "RACE DETECTED" not in capfd.readouterr().out


def assert_draws(shape, dtype, config, rng, **options):
    """Asserts that the kernels for TPUs draw the expected masks, and apply them forward and backward."""
    parameters = {"config": config, "interpret": pltpu.InterpretParams(detect_races=True)}
    run, back = (jax.jit(functools.partial(fn, **parameters)) for fn in (tpu_dropout.run, tpu_dropout.run_backward))
    x = jnp.asarray(rng.normal(size=shape), dtype)
    for rate, streams, mask in draws_of(0.1, shape, **options):
        y, words = run(streams, x, make_keep(rate))
        np.testing.assert_array_equal(words, oracle.packed(mask))
        np.testing.assert_array_equal(y, expected(x, mask, rate))
    (dx,) = back(jnp.where(mask, x, jnp.nan), words, make_keep(rate))
    np.testing.assert_array_equal(dx, expected(x, mask, rate))


@pytest.mark.parametrize(
    ("shape", "stored"), [((8192, 544), (1, 544, 8192)), ((8, 1024, 544), (8, 544, 1024)), ((8192, 512), None)]
)
def test_dropout_tpu_kernel_takes_columns_as_they_lie(shape, stored):
    """XLA stores 544 columns in sublanes, where 128 lanes would pad them by a fifth; 512 fill four times the lanes."""
    view = dropout_columns.view_of(shape)
    x = jnp.arange(np.prod(shape, dtype=int), dtype=jnp.int32).reshape(shape)
    assert (view and view.taken(x).shape) == stored
    if view is not None:
        np.testing.assert_array_equal(view.taken(x)[0, 5, :3], np.arange(3) * shape[-1] + 5)
        np.testing.assert_array_equal(view.given_back(view.taken(x), shape), x)


@pytest.mark.parametrize("columns", [5120, 11008, 14336])
def test_dropout_tpu_kernel_fills_the_lanes_in_wide_rows(columns):
    """These rows have 1.25, 2.7 and 3.5 times the words of a register's lanes."""
    places = tpu_dropout.blocks_of(8192, columns, 2**20).places
    assert 128 * places.groups <= 1.03 * places.bands * places.words


def test_dropout_tpu_kernel_decides_words_that_share_a_place():
    """Four words at each place: a turn decides the last and the first that are undecided, as all digits at once do."""
    words = jnp.arange(32 * 128, dtype=jnp.uint32).reshape(32, 128)
    keys = tuple(jnp.full_like(words, word) for word in KEY_WORDS)
    undecided = jnp.full_like(words, 0xF0F0F0F0).at[0, 0].set(0)
    rest = [jnp.uint32(0xFFFFFFFF * (0x9A5 >> digit & 1)) for digit in reversed(range(12))]
    turn = functools.partial(decide_some, (*keys, words), jnp.uint32(0), rest)
    *first, is_left = turn((jnp.full_like(words, 1), undecided, True))
    assert is_left
    np.testing.assert_array_equal(first[1][8:24, 1:], undecided[8:24, 1:])  # the two in between
    assert (first[1][8, 0], first[1][16, 0]) == (0, undecided[16, 0])  # here the first word had been decided
    less, undecided_after, is_left = turn((*first, is_left))
    assert not is_left
    assert not np.any(undecided_after)
    numbers = oracle.numbers(KEY_WORDS, words.size * 32, first=0) % 2**12
    less_of_rest = oracle.packed((numbers < 0x9A5).reshape(*words.shape, 32))[..., 0]
    np.testing.assert_array_equal(less, 1 | (less_of_rest & undecided))


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.75, 2**-20, 1 / 3])
def test_dropout_reference_draws_the_same_mask(rate):
    key = jnp.asarray(KEY_WORDS, jnp.uint32)
    np.testing.assert_array_equal(dropout(key, jnp.ones(1001), rate) != 0, oracle.kept(KEY_WORDS, 1001, rate))


@pytest.mark.sampled
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("split", ["none", "shard_map", "explicit"])
def test_dropout_launches_a_kernel_each_way_for_each_devices_part(name, split):
    kernel, _, _, custom_call = KERNELS[name]
    x = jnp.ones((16, 4096))
    axis_type = AxisType.Explicit if split == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))

    def value_and_gradient(x):
        y, pull_back = jax.vjp(lambda x: dropout(jax.random.key(0), x, 0.25), x)
        return y, *pull_back(y)

    if split == "shard_map":
        value_and_gradient = jax.shard_map(value_and_gradient, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    elif split == "explicit":
        x = jax.device_put(x, NamedSharding(mesh, P("data")))
    with lowering.use("pallas"):
        text = jax.jit(value_and_gradient).trace(x).lower(lowering_platforms=(kernel.KERNEL.platform,)).as_text()
    assert text.count(f"stablehlo.custom_call @{custom_call}") == 2
    assert ("tensor<2x4096xf32>" in text) == (split != "none")


@pytest.mark.long
def test_dropout_runs_the_tpu_kernel_in_a_gradient(rng, emulated):
    """Interpreted as a user can ask for it, on every element of a model's activations."""
    x = jnp.asarray(rng.normal(size=(4, 8, 64)), F32)
    loss = jax.value_and_grad(lambda x, rate: jnp.sum(jnp.sin(dropout(jax.random.key(1), x, rate))))
    rates = [0.25, 0.1][: 1 + emulated]
    expected_of = [loss(x, rate) for rate in rates]
    with lowering.use("interpret"):
        found = [*map(functools.partial(jax.jit(loss), x), rates)]
        rows = lowering.explain(loss, x, 0.25).rows
    assert [row.implementation for row in rows] == ["mosaic_tpu (interpreted)"] * 2
    chex.assert_trees_all_close(found, expected_of, rtol=1e-6)


@pytest.mark.long
@pytest.mark.interpreted
def test_dropout_kernels_keep_the_same_elements_on_an_automatic_mesh(rng):
    x = jnp.asarray(rng.normal(size=(8, 3, 64)), F32)
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    split = jax.device_put(x, NamedSharding(mesh, P("a", None, "b")))
    loss = jax.value_and_grad(lambda x: jnp.sum(jnp.sin(dropout(jax.random.key(1), x, 0.25))))
    with lowering.use("interpret"):
        _, grad = jax.jit(loss)(split)
    np.testing.assert_allclose(grad, loss(x)[1], rtol=1e-6)


@pytest.mark.long
def test_dropout_exports_to_every_platform_with_its_own_kernel():
    def drop(x):
        return dropout(jax.random.key(2), x, 0.25)

    x = jnp.ones((2, 4096))
    kernels_call_custom = jax.export.DisabledSafetyCheck.custom_call
    checks = [kernels_call_custom(name) for name in ("tpu_custom_call", "mosaic_gpu", "mosaic_gpu_v2")]
    with lowering.use("pallas"):
        exported = jax.export.export(jax.jit(drop), platforms=["cpu", "cuda", "tpu"], disabled_checks=checks)(x)
    for _, _, _, custom_call in KERNELS.values():
        assert exported.mlir_module().count(f"stablehlo.custom_call @{custom_call}") == 1
    np.testing.assert_array_equal(jax.export.deserialize(exported.serialize()).call(x), drop(x))


def test_dropout_kernels_refuse_what_they_cannot_run():
    def reasons(kernel, hardware, shape, dtype=F32):
        x = types.SimpleNamespace(shape=shape, dtype=dtype)
        other = types.SimpleNamespace(shape=(), dtype="uint32")
        forward = kernel.KERNEL.refuses(hardware, other, x, other)
        assert kernel.BACKWARD_KERNEL.refuses(hardware, x, other, other) == forward
        return forward

    v5e = Hardware(name="tpu-v5e", platform="tpu")
    h100 = Hardware(name="cuda-h100", platform="cuda", compute_capability=(9, 0))
    a100 = Hardware(name="cuda-a100", platform="cuda", compute_capability=(8, 0))
    assert reasons(tpu_dropout, v5e, (3, 96), BF16) is None
    assert "float16" in reasons(tpu_dropout, v5e, (3, 96), F16)
    assert "a row has 97" in reasons(tpu_dropout, v5e, (3, 97))
    assert "nothing to drop" in reasons(tpu_dropout, v5e, (0, 96))
    assert reasons(gpu_dropout, h100, (3, 4096), F16) is None
    assert reasons(gpu_dropout, Hardware(name="cuda", platform="cuda"), (4096,)) is None
    assert "float64" in reasons(gpu_dropout, h100, (3, 4096), "float64")
    assert "a row has 4064" in reasons(gpu_dropout, h100, (3, 4064))
    assert "a row has 4100" in reasons(gpu_dropout, h100, (3, 4100))
    assert "nothing to drop" in reasons(gpu_dropout, h100, (0, 4096))
    assert "2147483648" in reasons(gpu_dropout, h100, (2**19, 2**12))
    assert "cuda-a100 has 8.0" in reasons(gpu_dropout, a100, (3, 4096))


@pytest.mark.slow
def test_dropout_tpu_kernel_configs_agree(rng):
    x = jnp.asarray(rng.normal(size=(300, 512)), F32)
    operands = make_streams(x.shape), x, make_keep(0.5)
    configs = tpu_dropout.KERNEL.configs(Hardware(name="tpu-v5e", platform="tpu"), *operands)
    assert len(configs) == len({tuple(config.items()) for config in configs})
    mask = oracle.kept(KEY_WORDS, x.size, 0.5, first=5).reshape(x.shape)
    for config in configs:
        run = functools.partial(tpu_dropout.run, config=config, interpret=True)
        y, words = jax.jit(run)(*operands)
        np.testing.assert_array_equal(words, oracle.packed(mask))
        np.testing.assert_array_equal(y, expected(x, mask, 0.5))
