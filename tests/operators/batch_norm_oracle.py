"""Batch normalization in NumPy float64, with the channels of x on axis 1: the truth for several test files."""

import numpy as np

# The value of each activation, and its slope, at u.
ACTIVATIONS = {
    "identity": (lambda u, _: u, lambda u, _: np.ones_like(u)),
    "relu": (lambda u, _: np.maximum(u, 0), lambda u, _: (u > 0) * 1.0),
    "clipped_relu": (lambda u, c: np.clip(u, 0, c), lambda u, c: ((u > 0) & (u < c)) * 1.0),
    "elu": (lambda u, c: np.where(u > 0, u, c * np.expm1(u)), lambda u, c: np.where(u > 0, 1, c * np.exp(u))),
    "tanh": (lambda u, _: np.tanh(u), lambda u, _: 1 / np.cosh(u) ** 2),
    "sigmoid": (lambda u, _: sigmoid(u), lambda u, _: sigmoid(u) * (1 - sigmoid(u))),
    "swish": (
        lambda u, c: u * sigmoid(c * u),
        lambda u, c: sigmoid(c * u) + c * u * sigmoid(c * u) * (1 - sigmoid(c * u)),
    ),
}


def sigmoid(u):
    return 1 / (1 + np.exp(-u))


def axes_and_shape(x, mode):
    """What is reduced, and the shape of parameters that broadcast against x."""
    if mode == "per_activation":
        return (0,), (1, *x.shape[1:])
    return (0, *range(2, x.ndim)), (1, x.shape[1], *(1,) * (x.ndim - 2))


def normalized(x, mode, epsilon):
    """x - mean over the standard deviation, the mean, the biased variance and the number of elements of each."""
    axes, _ = axes_and_shape(x, mode)
    mean = x.mean(axes, keepdims=True)
    variance = ((x - mean) ** 2).mean(axes, keepdims=True)
    elements = np.prod([x.shape[axis] for axis in axes])
    return (x - mean) / np.sqrt(variance + epsilon), mean, variance, elements


def training(x, scale, bias, residual=None, *, mode="spatial", epsilon=1e-5, activation=("identity", 0.0)):
    """y, mean, biased variance, unbiased variance and inverse standard deviation, these shaped as parameters are."""
    x, scale, bias = (np.asarray(a).astype(np.float64) for a in (x, scale, bias))
    _, shape = axes_and_shape(x, mode)
    xhat, mean, variance, elements = normalized(x, mode, epsilon)
    u = scale.reshape(shape) * xhat + bias.reshape(shape)
    if residual is not None:
        u = u + np.asarray(residual).astype(np.float64)
    y = ACTIVATIONS[activation[0]][0](u, activation[1])
    unbiased = variance * elements / max(elements - 1, 1)
    inverse = 1 / np.sqrt(variance + epsilon)
    return (y, *(s.reshape(scale.shape) for s in (mean, variance, unbiased, inverse)))


def backward(grad, x, scale, bias, residual=None, *, mode="spatial", epsilon=1e-5, activation=("identity", 0.0)):
    """The gradients of x, scale, bias and residual."""
    grad, x, scale, bias = (np.asarray(a).astype(np.float64) for a in (grad, x, scale, bias))
    axes, shape = axes_and_shape(x, mode)
    xhat, _, variance, elements = normalized(x, mode, epsilon)
    u = scale.reshape(shape) * xhat + bias.reshape(shape)
    if residual is not None:
        u = u + np.asarray(residual).astype(np.float64)
    d = grad * ACTIVATIONS[activation[0]][1](u, activation[1])
    grad_bias, grad_scale = d.sum(axes, keepdims=True), (d * xhat).sum(axes, keepdims=True)
    factor = scale.reshape(shape) / np.sqrt(variance + epsilon)
    grad_x = factor * (d - grad_bias / elements - xhat * grad_scale / elements)
    return grad_x, grad_scale.reshape(scale.shape), grad_bias.reshape(scale.shape), d
