"""The operators of batch normalization in inference: with statistics that are given."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._primitive.derivative import Arrays
from jaxops._primitive.operator import Operator
from jaxops.activation.modes import Activation, activated
from jaxops.batch_norm.statistics import check_images, check_like_images, check_statistics, spread


def _check(x: Any, scale: Any, bias: Any, mean: Any, variance: Any, *residual: Any, name: str, **_: Any) -> None:
    check_images(name, x)
    check_statistics(name, x, scale=scale, bias=bias, mean=mean, variance=variance)
    for array in residual:
        check_like_images(name, x, residual=array)


def _inference(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    mean: jax.Array,
    variance: jax.Array,
    *residual: jax.Array,
    epsilon: float,
    activation: Activation,
) -> Arrays:
    factor = scale / jnp.sqrt(variance + epsilon)
    u = (x.astype(mean.dtype) - spread(mean)) * spread(factor) + spread(bias)
    for array in residual:
        u = u + array.astype(u.dtype)
    return (activated(activation, u).astype(x.dtype),)


BATCH_NORM_INFERENCE = Operator(
    "batch_norm_inference",
    "... n a c b, ... c, ... c, ... c, ... c -> ... n a c b",
    functools.partial(_check, name="batch_norm_inference"),
    _inference,
)
BATCH_NORM_ADD_INFERENCE = Operator(
    "batch_norm_add_inference",
    "... n a c b, ... c, ... c, ... c, ... c, ... n a c b -> ... n a c b",
    functools.partial(_check, name="batch_norm_add_inference"),
    _inference,
)
