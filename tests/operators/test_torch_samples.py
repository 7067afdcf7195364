"""PyTorch's own sample inputs, values and gradients in float64: where PyTorch and expecttest are installed.

What a sample asks for that the operator here does not have (dilation, bicubic sampling, images without a batch) leaves
the sample out; each operator says how many samples remain.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops

torch = pytest.importorskip("torch")
pytest.importorskip("expecttest")  # the database of samples imports it
database = pytest.importorskip("torch.testing._internal.common_methods_invocations")


class LeftOutError(Exception):
    """The operator here has no such option."""


LAYOUTS = {2: "NC", 3: "NCL", 4: "NCHW", 5: "NCDHW"}


def only(condition):
    if not condition:
        raise LeftOutError


def max_pool(rank, x, *, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False):
    only(not return_indices and x.ndim == rank)
    options = {"stride": stride, "padding": padding, "dilation": dilation, "ceil_mode": ceil_mode}
    return jaxops.max_pool(x, kernel_size, **options, layout=LAYOUTS[rank])


def avg_pool(
    rank, x, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None
):
    only(divisor_override is None and x.ndim == rank)
    options = {"stride": stride, "padding": padding, "ceil_mode": ceil_mode, "count_include_pad": count_include_pad}
    return jaxops.avg_pool(x, kernel_size, **options, layout=LAYOUTS[rank])


def batch_norm(x, mean, var, scale, bias, *, training=False, momentum=0.1, eps=1e-5):
    only(x.ndim > 1 and 0 <= momentum <= 1)
    if not training:
        return jaxops.batch_norm_inference(
            x, *with_defaults(x, scale, bias), mean, var, epsilon=eps, layout=LAYOUTS[x.ndim]
        )
    return jaxops.batch_norm(
        x, *with_defaults(x, scale, bias), mean, var, momentum=momentum, epsilon=eps, layout=LAYOUTS[x.ndim]
    ).y


def with_defaults(x, scale, bias):
    channels = x.shape[1]
    return jnp.ones(channels) if scale is None else scale, jnp.zeros(channels) if bias is None else bias


def local_response_norm(x, size, alpha=1e-4, beta=0.75, k=1.0):
    # PyTorch's even windows look back: ahead, of channels in reverse.
    images = jnp.flip(x, 1)[..., None]
    return jnp.flip(
        jaxops.local_response_norm(images, n=size, alpha=alpha, beta=beta, k=k, layout=LAYOUTS[images.ndim])[..., 0], 1
    )


# Where PyTorch's batch norm takes its running statistics, which neither library differentiates.
RUNNING = (1, 2)


def hardtanh(x, min_val=-1.0, max_val=1.0):
    only(min_val == 0)
    return jaxops.activation(x, "clipped_relu", coef=max_val)


def grid_sample(x, grid, *, mode, **options):
    only(mode != "bicubic")
    return jaxops.grid_sample(x, grid, mode=mode, **options)


def embedding(table, indices, *, max_norm=None, norm_type=2.0, sparse=False, **attributes):
    only(max_norm is None and not sparse)
    return jaxops.embedding(table, indices, **attributes)


def nll_loss(log_probs, labels, *, weight=None, **attributes):
    return jaxops.nll_loss(log_probs, labels, weight, axis=min(1, log_probs.ndim - 1), **attributes)


# The operators, and how many samples each runs at least.
OPERATORS = [
    pytest.param("nn.functional.max_pool2d", functools.partial(max_pool, 4), 60, marks=pytest.mark.slow),
    pytest.param("nn.functional.max_pool3d", functools.partial(max_pool, 5), 40, marks=pytest.mark.slow),
    ("nn.functional.avg_pool2d", functools.partial(avg_pool, 4), 1),
    ("nn.functional.avg_pool3d", functools.partial(avg_pool, 5), 1),
    ("nn.functional.batch_norm", batch_norm, 6),
    *(
        (name, functools.partial(jaxops.activation, mode=mode), 1)
        for name, mode in (
            ("sigmoid", "sigmoid"),
            ("tanh", "tanh"),
            ("nn.functional.relu", "relu"),
            ("nn.functional.elu", "elu"),
            ("nn.functional.silu", "swish"),
        )
    ),
    ("nn.functional.hardtanh", hardtanh, 1),
    ("softmax", lambda x, axis: jaxops.softmax(x, axis=axis), 7),
    ("log_softmax", lambda x, axis: jaxops.softmax(x, axis=axis, algorithm="log"), 7),
    ("nn.functional.grid_sample", grid_sample, 24),
    ("nn.functional.embedding", embedding, 5),
    ("nn.functional.nll_loss", nll_loss, 40),
    ("nn.functional.local_response_norm", local_response_norm, 11),
]


@pytest.mark.parametrize(("name", "ours", "least"), OPERATORS)
def test_samples_agree(name, ours, least):
    (operator,) = (one for one in database.op_db if one.name == name and not one.variant_test_name)
    ran, seen = 0, set()
    torch.manual_seed(0)
    for sample in operator.sample_inputs("cpu", torch.float64, requires_grad=False):
        description = repr((sample.input.shape, sample.args, sample.kwargs))
        if description not in seen:
            seen.add(description)
            ran += agrees(operator.op, ours, (sample.input, *sample.args), sample.kwargs)
    assert ran >= least, ran


def agrees(theirs, ours, operands, attributes):
    """Whether the sample could run here; fails where values or gradients differ."""
    arrays = [index for index, operand in enumerate(operands) if torch.is_tensor(operand)]
    active = [i for i in arrays if operands[i].is_floating_point() and not (ours is batch_norm and i in RUNNING)]

    def call(*moving):
        given = [operand.numpy() if torch.is_tensor(operand) else operand for operand in operands]
        for index, value in zip(active, moving, strict=True):
            given[index] = value
        named = {name: value.numpy() if torch.is_tensor(value) else value for name, value in attributes.items()}
        return ours(*given, **named)

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        try:
            y, pull_back = jax.vjp(call, *(jnp.asarray(operands[index].numpy()) for index in active))
        except LeftOutError:
            return False
        grad = np.random.default_rng(0).normal(size=y.shape)
        grads = pull_back(jnp.asarray(grad))
    moving = {index: operands[index].clone().requires_grad_() for index in active}
    with torch.enable_grad():
        expected = theirs(*(moving.get(i, x) for i, x in enumerate(operands)), **attributes)
    np.testing.assert_allclose(y, expected.detach().numpy(), rtol=1e-9, atol=1e-9)
    expected_grads = torch.autograd.grad(
        expected, list(moving.values()), torch.from_numpy(grad), allow_unused=True, materialize_grads=True
    )
    for actual, truth in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(actual, truth.numpy(), rtol=1e-8, atol=1e-8)
    return True
