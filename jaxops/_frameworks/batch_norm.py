"""Batch norm as Flax and Equinox mean it: momentum is the weight of the old statistics, and variances are biased."""

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxops._checks.arguments import as_array, require
from jaxops._checks.dtypes import check_floating
from jaxops.activation.modes import IDENTITY
from jaxops.batch_norm import api
from jaxops.batch_norm.layouts import View, view_of

CHANNELS_FIRST = {2: "NC", 3: "NCL", 4: "NCHW", 5: "NCDHW"}  # by rank
CHANNELS_LAST = {2: "NC", 3: "NLC", 4: "NHWC", 5: "NDHWC"}


class Statistics(NamedTuple):
    """Mean and biased variance of each channel."""

    mean: jax.Array
    var: jax.Array


class Layer(NamedTuple):
    """Batch norm of a module: what its calls share.

    Attributes:
      name: the module, for messages.
      layouts: the layout of images, by rank.
      epsilon: added to the variance.
      scale: (C,), or None for ones.
      bias: (C,), or None for zeros.
    """

    name: str
    layouts: Mapping[int, str]
    epsilon: float
    scale: Any
    bias: Any

    def train(
        self, x: jax.Array, running: Statistics, *, momentum: float, axis_name: Hashable = None, mask: Any = None
    ) -> tuple[jax.Array, Statistics]:
        """Normalizes a batch by its own statistics; also returns the running ones, updated with them."""
        view, (scale, bias, *old) = self._operands(x, running)
        shared: dict[str, Any] = {"axis_name": axis_name, "mask": api.checked_mask(self.name, x, mask)}
        y, of_batch = api.train(self.name, view, x, scale, bias, None, IDENTITY, epsilon=self.epsilon, **shared)
        return y, Statistics(*api.updated_statistics(view, old, of_batch, momentum=1 - momentum, unbiased=False))

    def infer(self, x: jax.Array, running: Statistics) -> jax.Array:
        """Normalizes by the running statistics."""
        view, params = self._operands(x, running)
        return api.infer(view, x, params, None, IDENTITY, epsilon=self.epsilon)

    def _operands(self, x: jax.Array, running: Statistics) -> tuple[View, list[jax.Array]]:
        """Returns the view of the images, and scale, bias and running statistics, checked."""
        layout, (channels,) = self.layouts[x.ndim], running.mean.shape
        axis = layout.index("C")
        require(x.shape[axis] == channels, self.name, "x", f"have {channels} channels on axis {axis}", x)
        scale = jnp.ones_like(running.mean) if self.scale is None else self.scale
        bias = jnp.zeros_like(running.mean) if self.bias is None else self.bias
        view = view_of(self.name, x, layout, "spatial")
        return view, api.parameters(self.name, view, scale=scale, bias=bias, mean=running.mean, var=running.var)


def images(name: str, x: Any) -> jax.Array:
    """Returns a batch as an array of floating point and of a rank that has a layout."""
    x = as_array(name, "x", x)
    check_floating(name, x=x)
    require(x.ndim in CHANNELS_LAST, name, "x", "have rank 2 to 5", x)
    return x
