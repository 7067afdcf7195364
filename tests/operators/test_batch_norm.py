"""`batch_norm`: values and gradients against NumPy float64, layouts, statistics, and the usual promises."""

import functools

import batch_norm_oracle as oracle
import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowering
from jaxops import BadParamError, batch_norm, batch_norm_inference
from jaxops.activation.modes import RELU
from jaxops.batch_norm.backward import BATCH_NORM_BACKWARD, BackwardOperands

# Each layout as a permutation of the one with the channels on axis 1, and a shape of that one.
LAYOUTS = {
    "NCHW": ((0, 1, 2, 3), (3, 4, 5, 2)),
    "NHWC": ((0, 2, 3, 1), (3, 4, 5, 2)),
    "NCDHW": ((0, 1, 2, 3, 4), (3, 4, 2, 3, 2)),
    "NDHWC": ((0, 2, 3, 4, 1), (3, 4, 2, 3, 2)),
    "NC": ((0, 1), (6, 4)),
    "NCL": ((0, 1, 2), (3, 4, 5)),
    "NLC": ((0, 2, 1), (3, 4, 5)),
}
COEFFICIENTS = {"clipped_relu": 0.8, "elu": 0.6, "swish": 1.25}


def draw(rng, shape=(3, 4, 5, 2), mode="spatial", dtype="float32"):
    """x, scale, bias, a residual and a cotangent, rounded to the dtype; float64 in NumPy."""
    parameters = shape[1:] if mode == "per_activation" else shape[1:2]
    x, residual, grad = (rng.normal(1.5, 2, shape) for _ in range(3))
    scale, bias = rng.uniform(0.5, 2, parameters), rng.normal(size=parameters)
    x, residual, grad = (np.asarray(jnp.asarray(a, dtype)) for a in (x, residual, grad))
    return x, scale.astype(np.float32), bias.astype(np.float32), residual, grad


def assert_close(actual, truth, dtype="float32", scale=1.0):
    tolerance = scale * max(2e-6, 0.51 * float(jnp.finfo(dtype).eps))
    size = max(1.0, np.abs(truth).max(initial=0.0))
    np.testing.assert_allclose(np.asarray(actual).astype(np.float64), truth, rtol=tolerance, atol=tolerance * size / 4)


def forward_and_gradients(x, scale, bias, residual, grad, *running, **attributes):
    """The output of `batch_norm`, and the gradients of x, scale, bias and the residual if there is one."""

    attributes = {"layout": "NCHW" if x.ndim == 4 else None} | attributes

    def forward(x, scale, bias, residual):
        out = batch_norm(x, scale, bias, *running, residual=residual, **attributes)
        return out.y, out

    @jax.jit
    def step(*operands):
        _, pull_back, out = jax.vjp(forward, *operands, has_aux=True)
        return out, pull_back(grad)

    out, grads = step(x, scale, bias, residual)
    return out, jax.tree.leaves(grads)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("layout", "mode"),
    [*((layout, "spatial") for layout in LAYOUTS), *((layout, "per_activation") for layout in ("NCHW", "NDHWC", "NC"))],
)
def test_batch_norm_equals_float64_in_every_layout(layout, mode, rng):
    order, shape = LAYOUTS[layout]
    x, scale, bias, residual, grad = draw(rng, shape, mode)
    attributes = {"mode": mode, "activation": ("relu", 0.0), "epsilon": 1e-3}
    y, mean, _, unbiased, inverse = oracle.training(x, scale, bias, residual, **attributes)
    truth = oracle.backward(grad, x, scale, bias, residual, **attributes)
    old = np.full(scale.shape, 0.5, np.float32), np.full(scale.shape, 2, np.float32)
    attributes |= {"layout": layout, "activation": "relu"}
    x, residual, grad, y = (a.transpose(order) for a in (x, residual, grad, y))
    out, grads = forward_and_gradients(x, scale, bias, residual, grad, *old, momentum=0.25, **attributes)
    assert_close(out.y, y)
    assert_close(out.saved_mean, mean)
    assert_close(out.saved_inv_var, inverse)
    assert_close(out.running_mean, 0.75 * 0.5 + 0.25 * mean)
    assert_close(out.running_var, 0.75 * 2 + 0.25 * unbiased)
    truth = (truth[0].transpose(order), *truth[1:3], truth[3].transpose(order))
    for actual, true in zip(grads, truth, strict=True):
        assert_close(actual, true, scale=4)


@pytest.mark.sampled
@pytest.mark.parametrize("mode", oracle.ACTIVATIONS)
def test_batch_norm_fuses_every_activation(mode, rng):
    x, scale, bias, residual, grad = draw(rng)
    activation = (mode, COEFFICIENTS.get(mode, 0.0))
    for extra in (None, residual)[mode == "relu" :]:
        out, grads = forward_and_gradients(x, scale, bias, extra, grad, activation=activation)
        assert_close(out.y, oracle.training(x, scale, bias, extra, activation=activation)[0])
        truth = oracle.backward(grad, x, scale, bias, extra, activation=activation)[: 3 if extra is None else 4]
        for result, true in zip(grads, truth, strict=True):
            assert_close(result, true, scale=4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_batch_norm_rounds_once(dtype, rng):
    x, scale, bias, residual, grad = draw(rng, dtype=dtype)
    out, actual = forward_and_gradients(x, scale, bias, residual, grad, activation="tanh")
    assert (out.y.dtype, out.saved_mean.dtype) == (jnp.dtype(dtype), jnp.float32)
    activation = ("tanh", 0.0)
    y, mean, *_ = oracle.training(x, scale, bias, residual, activation=activation)
    assert_close(out.y, y, dtype)
    assert_close(out.saved_mean, mean)
    truth = oracle.backward(grad, x, scale, bias, residual, activation=activation)
    for result, true, expected in zip(actual, truth, (dtype, "float32", "float32", dtype), strict=True):
        assert result.dtype == expected
        assert_close(result, true, expected, scale=4 if expected == "float32" else 1)


def test_batch_norm_backward_has_each_gradient_in_the_dtype_of_its_operand():
    """As kernels have it: a derivative would round it later, but a call that chooses between them could not."""
    images, of_channels = jax.ShapeDtypeStruct((2, 3, 4, 1), "bfloat16"), jax.ShapeDtypeStruct((4,), "float32")
    operands = BackwardOperands(images, images, *[of_channels] * 5, gate=images)
    attributes = {"axis_name": None, "activation": RELU, "residual_grad": True}
    found = jax.eval_shape(functools.partial(BATCH_NORM_BACKWARD, **attributes), operands)
    assert found == (images, of_channels, of_channels, images)


def test_batch_norm_keeps_float64(rng):
    with jax.enable_x64(True):
        x, scale, bias, *_ = draw(rng, dtype="float64")
        out = batch_norm(x, scale, bias, layout="NCHW")
        assert (out.y.dtype, out.saved_mean.dtype) == (jnp.float64, jnp.float64)
        np.testing.assert_allclose(out.y, oracle.training(x, scale, bias)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_batch_norm_keeps_the_digits_of_a_variance_beside_a_large_mean(layout, rng):
    x = (1e4 + rng.normal(size=(16, 3, 56, 56))).astype(np.float32)
    y, _, variance, unbiased, _ = oracle.training(x, np.ones(3), np.zeros(3))
    order = LAYOUTS[layout][0]
    out = jax.jit(functools.partial(batch_norm, momentum=1.0, layout=layout))(
        x.transpose(order), *np.eye(2, dtype=np.float32)[:, :1].repeat(3, 1), *np.ones((2, 3), np.float32)
    )
    np.testing.assert_allclose(out.running_var, unbiased, rtol=1e-5)
    np.testing.assert_allclose(1 / np.square(out.saved_inv_var) - 1e-5, variance, rtol=1e-5)
    np.testing.assert_allclose(out.y, y.transpose(order), atol=2e-3)  # x itself has no more digits


def test_batch_norm_equals_worked_values():
    x = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    out = batch_norm(x, np.ones(2), np.zeros(2), np.zeros(2), np.ones(2), epsilon=0.0)
    # Channel 0 holds 0, 1, 2, 6, 7, 8: mean 4, squares of deviations 58; channel 1 the same and 3 more.
    np.testing.assert_allclose(out.saved_mean, [4, 7])
    np.testing.assert_allclose(out.saved_inv_var, np.full(2, (58 / 6) ** -0.5), rtol=1e-6)
    np.testing.assert_allclose(out.running_mean, [0.4, 0.7], rtol=1e-6)
    np.testing.assert_allclose(out.running_var, np.full(2, 0.9 + 0.1 * 58 / 5), rtol=1e-6)
    np.testing.assert_allclose(out.y[0, 0], np.array([-4, -3, -2]) * (58 / 6) ** -0.5, rtol=1e-6)


def test_batch_norm_averages_running_statistics_cumulatively(rng):
    batches = rng.normal(size=(4, 3, 2, 5)).astype(np.float32)
    mean = var = np.full(2, np.nan, np.float32)  # the first call does not read them
    for call, x in enumerate(batches):
        _, mean, var, *_ = batch_norm(x, np.ones(2), np.zeros(2), mean, var, momentum=1 / (call + 1))
    truth = [oracle.training(x, np.ones(2), np.zeros(2)) for x in batches]
    assert_close(mean, np.mean([t[1] for t in truth], axis=0))
    assert_close(var, np.mean([t[3] for t in truth], axis=0))
    still = batch_norm(batches[0], np.ones(2), np.zeros(2), mean, var, momentum=0)
    np.testing.assert_array_equal(still.running_var, var)


def test_batch_norm_of_one_element_and_of_none():
    ones, zeros = np.ones(2, np.float32), np.zeros(2, np.float32)
    out = batch_norm(np.full((1, 2), 5, np.float32), ones, ones, ones, ones, momentum=0.5)
    np.testing.assert_array_equal(out.y, [[1, 1]])
    np.testing.assert_array_equal(out.running_mean, [3, 3])
    np.testing.assert_array_equal(out.running_var, [0.5, 0.5])
    for shape in ((0, 2), (0, 2, 3, 3), (2, 2, 0, 3)):
        nothing = np.zeros(shape, np.float32)
        out, grads = forward_and_gradients(nothing, ones, zeros, None, nothing, ones, ones)
        assert out.y.shape == grads[0].shape == shape
        np.testing.assert_array_equal([out.running_mean, out.running_var], np.ones((2, 2)))
        np.testing.assert_array_equal(grads[1], zeros)
    assert batch_norm(np.zeros((3, 0, 2), np.float32), ones[:0], ones[:0]).y.shape == (3, 0, 2)


def test_batch_norm_statistics_carry_no_gradient(rng):
    x, scale, bias, *_ = draw(rng)

    def statistics(x, mean, var):
        return sum(map(jnp.sum, batch_norm(x, scale, bias, mean, var, layout="NCHW")[1:]))

    for grad in jax.grad(statistics, (0, 1, 2))(x, np.zeros(4, np.float32), np.ones(4, np.float32)):
        assert not np.any(grad)


def test_batch_norm_gradient_skips_what_relu_stops():
    x = np.array([[-1.0], [1.0]], np.float32)
    grad = np.array([[np.nan], [2.0]], np.float32)
    _, pull_back = jax.vjp(lambda *xs: batch_norm(*xs, activation="relu").y, x, np.ones(1), np.zeros(1))
    for result in pull_back(grad):
        assert np.all(np.isfinite(result))


@pytest.mark.sampled
@pytest.mark.parametrize("mode", ["spatial", "per_activation"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "NCDHW", "NDHWC"])
def test_batch_norm_transposes_no_image(layout, mode, rng):
    order, shape = LAYOUTS[layout]
    x, scale, bias, residual, grad = draw(rng, shape, mode)
    x, residual, grad = (a.transpose(order) for a in (x, residual, grad))

    def step(x, scale, bias, residual):
        y, pull_back = jax.vjp(
            lambda *xs: batch_norm(*xs[:3], residual=xs[3], mode=mode, layout=layout, activation="relu").y,
            *(x, scale, bias, residual),
        )
        return y, pull_back(grad)

    text = jax.jit(step).lower(x, scale, bias, residual).compile().as_text()
    moved = [
        line for line in text.splitlines() if (" transpose(" in line or " copy(" in line) and line.count(",") >= x.ndim
    ]
    assert not [line for line in moved if contract_size(line) >= x.size]


def contract_size(line):
    """The number of elements of what a line of HLO computes."""
    shape = line.split("[", 1)[1].split("]", 1)[0]
    return int(np.prod([int(size) for size in shape.split(",") if size]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_batch_norm_stores_no_other_image_on_a_cpu(layout, dtype, rng):
    """Neither deviations from the mean nor conversions to float32: each sum computes its own."""
    x, grad = (np.asarray(jnp.asarray(rng.normal(size=(8, 16, 16, 16)), dtype)) for _ in range(2))
    scale, bias = (rng.normal(size=16).astype(np.float32) for _ in range(2))

    def step(x, scale, bias, grad):
        y, pull_back = jax.vjp(lambda *operands: batch_norm(*operands, layout=layout).y, x, scale, bias)
        return y, pull_back(grad)

    compiled = jax.jit(step).lower(x, scale, bias, grad).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < x.size
    order = (0, 3, 1, 2) if layout == "NHWC" else (0, 1, 2, 3)
    wide = [array.astype(np.float64).transpose(order) for array in (grad, x)]
    truth = oracle.backward(*wide, scale, bias)
    _, (dx, *of_parameters) = compiled(x, scale, bias, grad)
    assert_close(np.asarray(dx).transpose(order), truth[0], dtype, scale=4)
    for actual, exact in zip(of_parameters, truth[1:3], strict=True):
        np.testing.assert_allclose(actual, exact, rtol=1e-5, atol=1e-4)


def test_batch_norm_needs_one_temporary_activation_at_most():
    x = jax.ShapeDtypeStruct((8, 16, 14, 14), jnp.float32)
    p = jax.ShapeDtypeStruct((16,), jnp.float32)

    def step(x, scale, bias, residual, grad):
        y, pull_back = jax.vjp(
            lambda x, s, b, r: batch_norm(x, s, b, activation="relu", residual=r, layout="NCHW").y,
            x,
            scale,
            bias,
            residual,
        )
        return y, pull_back(grad)

    memory = jax.jit(step).lower(x, p, p, x, x).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= 1.05 * 4 * x.size


def test_batch_norm_keeps_a_gate_for_its_gradient_only_where_an_activation_has_a_slope(rng):
    x, scale, bias, residual, _ = draw(rng, (4, 4, 3, 3))
    for activation, images in ((None, 1), ("identity", 1), ("relu", 2), ("swish", 2)):
        _, pull_back = jax.vjp(
            lambda x, r: batch_norm(x, scale, bias, activation=activation, residual=r, layout="NCHW").y,  # noqa: B023
            x,
            residual,
        )
        assert sum(leaf.size == x.size for leaf in jax.tree.leaves(pull_back)) == images


def test_batch_norm_inference_equals_float64(rng):
    for layout, (order, shape) in LAYOUTS.items():
        x, scale, bias, residual, _ = draw(rng, shape)
        mean, var = rng.normal(size=4).astype(np.float32), rng.uniform(0.5, 2, 4).astype(np.float32)
        s, b, m, v = (
            a.astype(np.float64).reshape(oracle.axes_and_shape(x, "spatial")[1]) for a in (scale, bias, mean, var)
        )
        u = s * (x - m) / np.sqrt(v + 1e-3) + b
        infer = jax.jit(functools.partial(batch_norm_inference, epsilon=1e-3, layout=layout, activation="relu"))
        fused = infer(x.transpose(order), scale, bias, mean, var, residual=residual.transpose(order))
        assert_close(fused, np.maximum(u + residual, 0).transpose(order))


def test_batch_norm_without_parameters_equals_float64(rng):
    x, _, bias, *_ = draw(rng, (4, 4, 5, 6))
    across, shape = oracle.axes_and_shape(x, "spatial")
    wide = x.astype(np.float64)
    normalized = (wide - wide.mean(across, keepdims=True)) / np.sqrt(wide.var(across, keepdims=True) + 1e-5)
    assert_close(batch_norm(x, layout="NCHW").y, normalized)
    assert_close(batch_norm(x, bias=bias, layout="NCHW").y, normalized + bias.reshape(shape))
    mean, var = (of(across).astype(np.float32) for of in (wide.mean, wide.var))
    assert_close(batch_norm_inference(x, None, None, mean, var, layout="NCHW"), normalized)


X, ONE = np.zeros((2, 3, 4, 4), np.float32), np.ones(3, np.float32)
REFUSALS = {
    "dtype": ((X.astype(np.int32), ONE, ONE), {}, "x must be floating point; got int32[2, 3, 4, 4]"),
    "rank": ((X[0, 0, 0], ONE, ONE), {"layout": None}, "x must have rank 2 to 5; got float32[4]"),
    "none": ((None, ONE, ONE), {}, "x must be given; got None"),
    "scale": ((X, ONE[:2], ONE), {}, "scale must have shape (3,), the channels of NCHW; got float32[2]"),
    "bias-dtype": ((X, ONE, ONE.astype(np.int32)), {}, "bias must be floating point; got int32[3]"),
    "one-running": (
        (X, ONE, ONE, ONE),
        {},
        "running_mean must be given with running_var, or neither; got float32[3]",
    ),
    "per-activation": (
        (X, ONE, ONE),
        {"mode": "per_activation", "layout": "NHWC"},
        "scale must have shape (4, 3, 4), an image of NHWC with channels first; got float32[3]",
    ),
    "mode": ((X, ONE, ONE), {"mode": "batch"}, "mode must be one of spatial, per_activation; got 'batch'"),
    "layout-missing": (
        (X, ONE, ONE),
        {"layout": None},
        "layout must be NCHW or NHWC, as x has 4 axes and there is no default; got None",
    ),
    "volume-layout-missing": (
        (X[None], ONE, ONE),
        {"layout": None},
        "layout must be NCDHW or NDHWC, as x has 5 axes and there is no default; got None",
    ),
    "layout": (
        (X, ONE, ONE),
        {"layout": "CHWN"},
        "layout must be one of NCHW, NHWC, NCDHW, NDHWC, NC, NCL, NLC; got 'CHWN', did you mean NCHW?",
    ),
    "layout-rank": (
        (X, ONE, ONE),
        {"layout": "NDHWC"},
        "x must have 5 axes, as layout NDHWC says; got float32[2, 3, 4, 4]",
    ),
    "epsilon": ((X, ONE, ONE), {"epsilon": -1e-9}, "epsilon must be a finite number of 0.0 or more; got -1e-09"),
    "epsilon-nan": ((X, ONE, ONE), {"epsilon": np.nan}, "epsilon must be a finite number of 0.0 or more; got nan"),
    "momentum": ((X, ONE, ONE), {"momentum": 1.1}, "momentum must be a number in [0, 1]; got 1.1"),
    "activation": (
        (X, ONE, ONE),
        {"activation": "gelu"},
        "activation must be one of sigmoid, relu, tanh, clipped_relu, elu, identity, swish; got 'gelu'",
    ),
    "ceiling": (
        (X, ONE, ONE),
        {"activation": "clipped_relu"},
        "activation must have a number as its coefficient; got 'clipped_relu'",
    ),
    "residual": (
        (X, ONE, ONE),
        {"residual": X[:1]},
        "residual must be like x, float32[2, 3, 4, 4]; got float32[1, 3, 4, 4]",
    ),
    "axis-name": ((X, ONE, ONE), {"axis_name": 0}, "axis_name must be a mesh axis or a tuple of them; got 0"),
}


@pytest.mark.parametrize(("operands", "attributes", "words"), REFUSALS.values(), ids=REFUSALS)
def test_batch_norm_refuses_bad_input(operands, attributes, words):
    def call(*operands):
        return batch_norm(*operands, **{"layout": "NCHW"} | attributes)

    for ask in (call, jax.jit(call), lambda *operands: lowering.explain(call, *operands)):
        with pytest.raises(BadParamError) as refusal:
            ask(*operands)
        assert str(refusal.value) == f"batch_norm: {words}"
        assert refusal.value.status == "MCDNN_STATUS_BAD_PARAM"


def images(rng, shape=(16, 2, 1, 2), residual=False):
    x, scale, bias, extra, _ = draw(rng, shape)
    return (x, scale, bias, extra) if residual else (x, scale, bias)


def fused(x, scale, bias, residual):
    return batch_norm(x, scale, bias, residual=residual, activation=("elu", 0.5), layout="NCHW").y


CASES = [
    contract.Case(
        "plain",
        lambda *operands: batch_norm(*operands, layout="NCHW").y,
        images,
        (0, 1, 2),
        (0, None, None),
        "batch_norm",
        "batch_norm_backward",
    ),
    contract.Case(
        "activation-channels-last",
        lambda *operands: batch_norm(*operands, layout="NHWC", activation="relu").y,
        images,
        (0, 1, 2),
        (0, None, None),
        "batch_norm",
        "batch_norm_backward",
    ),
    contract.Case(
        "residual",
        fused,
        functools.partial(images, residual=True),
        (0, 1, 2, 3),
        (0, None, None, 0),
        "batch_norm",
        "batch_norm_backward",
    ),
    # Elementwise, with JAX's own derivative: what could break here breaks in the others.
    contract.Case(
        "inference",
        lambda x, scale, bias, mean: batch_norm_inference(
            x, scale, bias, mean, scale, activation="tanh", layout="NCHW"
        ),
        lambda rng: (*images(rng), np.zeros(2, np.float32)),
        (0, 1, 2, 3),
        (0, None, None, None),
        "batch_norm_inference",
    ),
]


@pytest.mark.parametrize("promise", contract.PROMISES, ids=contract.promise_name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_batch_norm_keeps_promise(case, promise):
    promise(case)
