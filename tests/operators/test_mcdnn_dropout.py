"""The mcDNN calls of dropout: the reserve space bit by bit, and statuses."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxops import dropout
from jaxops._checks.arguments import BadParamError, NotSupportedError
from jaxops.mcdnn import DropoutDescriptor, dropout_backward, dropout_forward, dropout_get_reserve_space_size

KEY = jax.random.key(3)
HALF = DropoutDescriptor(0.5)
SHAPES = [(7,), (1000,), (2, 3, 4, 5), (2, 4, 8, 8), (), (0, 4)]


@pytest.mark.sampled
@pytest.mark.parametrize(("elements", "size"), [(1000, 128), (7, 4), (0, 0), (32, 4), (33, 8)])
def test_dropout_takes_the_documented_reserve_space(elements, size):
    x = jnp.ones(elements)
    assert dropout_get_reserve_space_size(x) == size
    assert dropout_get_reserve_space_size(jax.ShapeDtypeStruct((elements, 1), "float16")) == size
    assert dropout_forward(HALF, KEY, x)[1].shape == (size,)


@pytest.mark.sampled
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dropout_reserve_space_has_a_bit_for_each_element(shape, rng):
    x = jnp.asarray(rng.uniform(1, 2, size=shape), jnp.float32)
    y, reserve_space = dropout_forward(DropoutDescriptor(0.4), KEY, x)
    assert reserve_space.dtype == jnp.uint8
    flat = np.ravel(y)
    for i in range(8 * reserve_space.size):
        bit = int(reserve_space[i // 8]) >> (i % 8) & 1
        assert bit == (i < flat.size and flat[i] != 0)


def test_dropout_backward_reads_nothing_but_the_bits(rng):
    """A mask that no key has drawn."""
    bits = rng.integers(0, 2, 75)
    reserve_space = np.zeros(12 + 4, np.uint8)  # more than is needed will do
    for i, bit in enumerate(bits):
        reserve_space[i // 8] |= bit << (i % 8)
    reserve_space[12:] = 255
    dy = jnp.asarray(np.where(bits, rng.normal(size=75), np.nan), jnp.float32).reshape(3, 25)
    dx = dropout_backward(DropoutDescriptor(0.75), dy, reserve_space)
    np.testing.assert_array_equal(dx, np.where(bits.reshape(3, 25), 4 * np.asarray(dy), 0))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", contract.first_in_every_run(["bfloat16", "float16", "float32"]))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dropout_backward_takes_the_mask_of_forward(shape, dtype, rng):
    desc = DropoutDescriptor(0.3)
    x, dy = (jnp.asarray(rng.uniform(1, 2, size=shape), dtype) for _ in range(2))
    y, reserve_space = dropout_forward(desc, KEY, x)
    np.testing.assert_array_equal(y, dropout(KEY, x, float(np.float32(0.3))))
    dx = dropout_backward(desc, dy, reserve_space)
    assert dx.dtype == dtype
    exact = np.asarray(dy).astype(np.float32) * (np.float32(1) / (np.float32(1) - np.float32(0.3)))
    np.testing.assert_array_equal(dx, np.where(np.asarray(y) != 0, np.asarray(jnp.asarray(exact, dtype)), 0))
    of_y = jax.grad(lambda x: jnp.sum((dropout_forward(desc, KEY, x)[0] * dy).astype(jnp.float32)))(x)
    np.testing.assert_array_equal(of_y, dx)


def test_dropout_scales_float64_by_the_float32_rate(rng):
    with jax.enable_x64(True):
        x = rng.uniform(1, 2, size=100)
        desc = DropoutDescriptor(0.3)
        y, reserve_space = dropout_forward(desc, KEY, x)
        scale = 1 / (1 - np.float64(np.float32(0.3)))
        np.testing.assert_array_equal(y, np.where(np.asarray(y) != 0, x * scale, 0))
        np.testing.assert_array_equal(dropout_backward(desc, x, reserve_space), y)


def test_dropout_of_none_and_of_all_is_exact():
    x = jnp.asarray([1.0, jnp.nan, jnp.inf] * 20, jnp.float32)
    for rate, byte, expected in ((0, 255, x), (1, 0, jnp.zeros(60))):
        y, reserve_space = dropout_forward(DropoutDescriptor(rate), KEY, x)
        np.testing.assert_array_equal(y, expected)
        np.testing.assert_array_equal(reserve_space[:7], byte)
        np.testing.assert_array_equal(dropout_backward(DropoutDescriptor(rate), x, reserve_space), expected)


BAD, UNSUPPORTED = "MCDNN_STATUS_BAD_PARAM", "MCDNN_STATUS_NOT_SUPPORTED"
X = np.zeros((3, 11), np.float32)
SPACE = np.zeros(8, np.uint8)
FORWARD = {
    "desc": ({"desc": None}, BAD, "desc"),
    "rate": ({"desc": 0.5}, BAD, "desc"),
    "key": ({"key": None}, BAD, "key"),
    "keys": ({"key": jax.random.split(KEY, 2)}, BAD, "key"),
    "x": ({"x": None}, BAD, "x"),
    "integers": ({"x": np.int32(X)}, UNSUPPORTED, "x"),
}
BACKWARD = {
    "desc": ({"desc": None}, BAD, "desc"),
    "dy": ({"dy": None}, BAD, "dy"),
    "integers": ({"dy": np.int32(X)}, UNSUPPORTED, "dy"),
    "space": ({"reserve_space": None}, BAD, "reserve_space"),
    "space-short": ({"reserve_space": SPACE[:7]}, BAD, "reserve_space"),
    "space-dtype": ({"reserve_space": SPACE.astype(np.int8)}, BAD, "reserve_space"),
    "space-axes": ({"reserve_space": SPACE[None]}, BAD, "reserve_space"),
}


def assert_refused(call, arguments, status, argument):
    error = BadParamError if status == BAD else NotSupportedError
    with pytest.raises(error, match=f"^{call.__name__}: {argument} must ") as refusal:
        call(**arguments)
    assert refusal.value.status == status


@pytest.mark.parametrize(("change", "status", "argument"), FORWARD.values(), ids=FORWARD)
def test_dropout_forward_refuses(change, status, argument):
    assert_refused(dropout_forward, {"desc": HALF, "key": KEY, "x": X, **change}, status, argument)


@pytest.mark.parametrize(("change", "status", "argument"), BACKWARD.values(), ids=BACKWARD)
def test_dropout_backward_refuses(change, status, argument):
    assert_refused(dropout_backward, {"desc": HALF, "dy": X, "reserve_space": SPACE, **change}, status, argument)


@pytest.mark.parametrize("x", [None, 5], ids=str)
def test_dropout_reserve_space_size_refuses_what_has_no_shape(x):
    assert_refused(dropout_get_reserve_space_size, {"x": x}, BAD, "x")


@pytest.mark.long
@pytest.mark.parametrize("shape", contract.first_in_every_run([(4, 4, 8, 8), (4, 4, 32), (8, 32), (4, 33)]), ids=str)
@pytest.mark.parametrize("spec", [P("m"), P(None, "m")], ids=str)
def test_dropout_has_the_same_reserve_space_on_an_explicit_mesh(spec, shape, rng):
    if spec != P("m") and shape[1] % 4:
        pytest.skip("the mesh does not split this axis")
    x = rng.normal(size=shape).astype(np.float32)
    y, reserve_space = dropout_forward(HALF, KEY, x)
    mesh = jax.make_mesh((4,), ("m",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    split = jax.device_put(x, jax.NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        split_y, split_space = jax.jit(lambda x: dropout_forward(HALF, KEY, x))(split)
        split_dx = jax.jit(lambda dy, space: dropout_backward(HALF, dy, space))(split, split_space)
    for result in (split_y, split_dx):
        assert result.sharding.is_equivalent_to(split.sharding, x.ndim)
    for actual, expected in (
        (split_y, y),
        (split_space, reserve_space),
        (split_dx, dropout_backward(HALF, x, reserve_space)),
    ):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("rate", [-0.1, 1.5, float("nan"), None, "0.5", True], ids=str)
def test_dropout_descriptor_refuses(rate):
    with pytest.raises(BadParamError, match=r"^DropoutDescriptor: dropout must ") as refusal:
        DropoutDescriptor(rate)
    assert refusal.value.status == BAD
