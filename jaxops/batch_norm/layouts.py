"""Views of images in every layout as the operators see them, (n, a, c, b), and of parameters as (c,), without copies.

spatial         NCHW: (N, 1, C, H * W)    NHWC: (N, H * W, C, 1)    parameters (C,)
per_activation  (N, 1, C * H * W, 1), in the order of x; parameters (C, H, W), whatever the layout
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxops._checks import layouts
from jaxops._checks.mcdnn import require_choice
from jaxops._primitive import sharding

MODES = ("spatial", "per_activation")
LAYOUTS = (*layouts.IMAGES, "NC", "NCL", "NLC")
_DEFAULTS = {2: "NC", 3: "NCL"}  # images and volumes have none


class View(NamedTuple):
    """View of images of one shape, layout and mode."""

    shape: tuple[int, ...]
    layout: str
    per_activation: bool

    @property
    def channels_last(self) -> bool:
        """Tells whether other axes than the batch come before the channels."""
        return self.layout.endswith("C") and self.layout != "NC"

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        """The shape of users' parameters and statistics: (C,), or (C, ...) with the extents of the image."""
        channels = self.shape[-1] if self.channels_last else self.shape[1]
        return (channels, *self._extents) if self.per_activation else (channels,)

    @property
    def parameter_rule(self) -> str:
        """Says in a message's words which shape parameters must have, and why."""
        what = (
            f"an image of {self.layout} with channels first"
            if self.per_activation
            else f"the channels of {self.layout}"
        )
        return f"have shape {self.parameter_shape}, {what}"

    @property
    def elements(self) -> int:
        """The number of elements that each statistic reduces."""
        return math.prod(self.shape) // max(1, math.prod(self.parameter_shape))

    def images(self, x: jax.Array) -> jax.Array:
        """Images as (n, a, c, b)."""
        return jnp.expand_dims(sharding.reshaped(x, self._merged), self._added)

    def images_back(self, y: jax.Array, x: jax.Array) -> jax.Array:
        """Inverts `images`, with the layout of the images x."""
        return sharding.reshaped(jnp.squeeze(y, self._added), self.shape, sharding=jax.typeof(x).sharding)

    def parameters(self, values: jax.Array) -> jax.Array:
        """Parameters as (c,)."""
        values = sharding.reshaped(values, self.parameter_shape)
        if self.per_activation and self.channels_last:
            values = jnp.moveaxis(values, 0, -1)
        return sharding.reshaped(values, (math.prod(self.parameter_shape),))

    def parameters_back(self, values: jax.Array, like: jax.Array) -> jax.Array:
        """Inverts `parameters`, with the layout and the axes of size 1 of the parameters `like`."""
        if self.per_activation and self.channels_last:
            values = jnp.moveaxis(sharding.reshaped(values, self.shape[1:]), -1, 0)
        return sharding.reshaped(values, like.shape, sharding=jax.typeof(like).sharding)

    @property
    def _merged(self) -> tuple[int, ...]:
        channels, size = math.prod(self.parameter_shape), math.prod(self._extents)
        if self.per_activation:
            return (self.shape[0], channels)
        return (self.shape[0], size, channels) if self.channels_last else (self.shape[0], channels, size)

    @property
    def _added(self) -> tuple[int, ...]:
        return (1, 3) if self.per_activation else (3,) if self.channels_last else (1,)

    @property
    def _extents(self) -> tuple[int, ...]:
        return self.shape[1:-1] if self.channels_last else self.shape[2:]


def view_of(operator: str, x: Any, layout: str | None, mode: str) -> View:
    """Returns the view of images like x, after checking layout and mode."""
    layout = layouts.resolved(operator, x, layout, LAYOUTS, defaults=_DEFAULTS)
    mode = require_choice(operator, "mode", mode, MODES)
    return View(tuple(x.shape), layout, mode == "per_activation")
