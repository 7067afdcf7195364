"""Modules for Equinox: batch norm, dropout, a loss head and pooling, computed by the operators of this library.

Modules take the arguments of their namesakes in `equinox.nn` and have the same leaves and state, so that either can
take the other's place in a model, and its checkpoints. `BatchNorm` takes whole batches as well as the examples of a
vmap, and `LossHead` whole batches.
Import it by name, as `import jaxops` does not import Equinox.
"""

from collections.abc import Hashable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp

from jaxops._checks.arguments import BadParamError, NotSupportedError, require
from jaxops._frameworks import batch_norm
from jaxops._frameworks.loss_options import check_loss_options
from jaxops.batch_norm.api import is_of_vmap
from jaxops.dropout import dropout
from jaxops.linear_cross_entropy import linear_cross_entropy
from jaxops.pooling import avg_pool, max_pool

_NORM, _DROPOUT, _HEAD = "jaxops.equinox.BatchNorm", "jaxops.equinox.Dropout", "jaxops.equinox.LossHead"

__all__ = ["AvgPool2d", "BatchNorm", "Dropout", "LossHead", "MaxPool2d"]


class BatchNorm(eqx.nn.BatchNorm):
    """Batch norm of whole batches by `jaxops.batch_norm`: `y = weight * (x - mean) / sqrt(var + eps) + bias`.

    x is one example (C, ...) inside a `jax.vmap` with this axis name, as in Equinox, or else a batch (N, C, ...). Of a
    batch, kernels and the operator's own gradient can take part: map the layers around this one.
    Mean and biased variance are those of x over all axes but C. In training the running statistics move towards them,
    and in inference they are divided by what they still lack, as in Equinox with `mode="batch"`; after n batches:

        running = momentum * running + (1 - momentum) * (mean, or biased variance)
        inference goes by running / (1 - momentum^n)

    Args:
      input_size: C, the number of channels.
      axis_name: the axis of the vmap; or inside `jax.shard_map`, the mesh axis over which the batch is split.
      eps: added to the variance.
      channelwise_affine: whether there are a weight and a bias.
      momentum: the weight of the old statistics.
      inference: whether to normalize by the running statistics. `equinox.nn.inference_mode` and an argument of the call
        change it.
      dtype: the dtype of weight, bias and running statistics. None means float32 (float64 with `jax_enable_x64`).
      mode: must be "batch". Equinox's default, "ema", normalizes by running statistics in training, too.

    Raises:
      NotSupportedError: for another mode.
      BadParamError: if x is not floating point with rank 2 to 5 and C channels on its second axis.

    Numerics:
      Everything is computed in float32 (float64 for float64) and rounded once, to the dtype that x, weight and bias
      promote to. Equinox computes the statistics of 16-bit x in 16 bits.

    Example:
      >>> import equinox as eqx
      >>> layer, state = eqx.nn.make_with_state(jaxops.equinox.BatchNorm)(2, momentum=0.9)
      >>> y, state = layer(jnp.array([[1.0, 10.0], [3.0, 10.0]]), state)
      >>> print(y.round(2))
      [[-1.  0.]
       [ 1.  0.]]
      >>> y, _ = layer(jnp.array([[2.0, 10.0]]), state, inference=True)
      >>> print(abs(y).round(2))
      [[0. 0.]]
    """

    def __init__(
        self,
        input_size: int,
        axis_name: Hashable = None,
        eps: float = 1e-5,
        channelwise_affine: bool = True,
        momentum: float = 0.99,
        inference: bool = False,
        dtype: Any = None,
        mode: Literal["batch"] = "batch",
    ) -> None:
        """Takes the arguments of `equinox.nn.BatchNorm`."""
        require(mode == "batch", _NORM, "mode", "be 'batch'", mode, error=NotSupportedError)
        super().__init__(input_size, axis_name, eps, channelwise_affine, momentum, inference, dtype, mode)

    def __call__(
        self, x: jax.Array, state: eqx.nn.State, *, key: jax.Array | None = None, inference: bool | None = None
    ) -> tuple[jax.Array, eqx.nn.State]:
        """Normalizes a batch, or an example of one; returns it with the new state. `key` is not used."""
        is_example = self.axis_name is not None and is_of_vmap(self.axis_name)
        x = batch_norm.images(_NORM, jnp.asarray(x)[None] if is_example else x)
        affine = (self.weight, self.bias) if self.channelwise_affine else ()
        x = x.astype(jnp.result_type(x, *affine))
        layer = batch_norm.Layer(_NORM, batch_norm.CHANNELS_FIRST, self.eps, self.weight, self.bias)
        assert self.batch_counter is not None
        assert self.batch_state_index is not None
        count, running = state.get(self.batch_counter), batch_norm.Statistics(*state.get(self.batch_state_index))
        if self.inference if inference is None else inference:
            part = jnp.where(count == 0, 1, 1 - self.momentum**count).astype(running.mean.dtype)
            y = layer.infer(x, batch_norm.Statistics(running.mean / part, running.var / part))
            return y[0] if is_example else y, state
        y, updated = layer.train(x, running, momentum=self.momentum, axis_name=self.axis_name)
        return y[0] if is_example else y, state.set(self.batch_counter, count + 1).set(
            self.batch_state_index, (updated.mean, updated.var)
        )


class Dropout(eqx.nn.Dropout):
    """Dropout by `jaxops.dropout`: `y = x / (1 - p)` where an element is kept, else 0.

    The same key keeps other elements than in Equinox, with the same probability. The backward pass keeps one bit an
    element. The call does not take Equinox's deprecated `deterministic`.

    Args:
      p: the probability of dropping an element, in [0, 1].
      inference: whether to return x as it is. `equinox.nn.inference_mode` and an argument of the call change it.

    Raises:
      BadParamError: if a call that drops elements is not given a key.

    Example:
      >>> layer = jaxops.equinox.Dropout(0.75)
      >>> # Dropped, or 1 / (1 - 0.75).
      >>> sorted({float(value) for value in layer(jnp.ones(1000), key=jax.random.key(0))})
      [0.0, 4.0]
      >>> layer(jnp.ones(2), inference=True).tolist()
      [1.0, 1.0]
    """

    def __call__(  # type: ignore[override]  # not what is deprecated
        self, x: jax.Array, *, key: jax.Array | None = None, inference: bool | None = None
    ) -> jax.Array:
        """Drops elements of x, of any shape."""
        is_never = isinstance(self.p, int | float) and self.p == 0
        if is_never or (self.inference if inference is None else inference):
            return x
        if key is None:
            raise BadParamError(f"{_DROPOUT}: key must be given, except in inference; got None")
        return dropout(key, x, self.p)


class LossHead(eqx.Module):
    """Cross entropy of a last layer by `jaxops.linear_cross_entropy`, without the layer's logits.

    The loss is that of `optax.softmax_cross_entropy_with_integer_labels(jax.vmap(layer)(x), labels)`, averaged over the
    rows whose label is not -100. Gradients go to the leaves of the layer itself.

    A model's leaves stay where they are if the head is made where the loss is computed:
    `jaxops.equinox.LossHead(model.output)(x, labels)`. So does a table that the model also looks words up in.

    Args:
      layer: the `equinox.nn.Linear` that computes the logits, or an `equinox.nn.Embedding` whose table does.

    Raises:
      NotSupportedError: for another layer.

    Numerics:
      x and the parameters are promoted as the layer promotes them, but logits are float32 whatever their dtype, and in
      the loss never rounded to 16 bits.

    Example:
      >>> import equinox as eqx
      >>> layer = eqx.nn.Embedding(weight=jnp.zeros((4, 2)))
      >>> head = jaxops.equinox.LossHead(layer)
      >>> x = jnp.array([[1.0, 0.0], [0.0, 1.0]])
      >>> # All four classes are equally likely.
      >>> print(head(x, jnp.array([3, -100])).round(3), np.log(4).round(3))
      1.386 1.386
      >>> head.logits(x).shape
      (2, 4)
    """

    layer: eqx.nn.Linear | eqx.nn.Embedding

    def __check_init__(self) -> None:
        """Refuses other layers."""
        rule = "be an equinox.nn.Linear or an equinox.nn.Embedding"
        layer = self.layer
        is_known = isinstance(layer, eqx.nn.Linear | eqx.nn.Embedding)
        require(is_known, _HEAD, "layer", rule, type(layer).__name__, error=NotSupportedError)

    def __call__(self, x: jax.Array, labels: jax.Array, **options: Any) -> Any:
        """Computes the loss of features x (..., H) and labels (...), with the options of `linear_cross_entropy`."""
        check_loss_options(_HEAD, options)
        weight = self.layer.weight
        dtype = jnp.result_type(x, weight)
        bias = self.layer.bias if isinstance(self.layer, eqx.nn.Linear) else None
        return linear_cross_entropy(x.astype(dtype), weight.astype(dtype), labels, bias=bias, **options)

    def logits(self, x: jax.Array) -> jax.Array:
        """Computes the layer's own logits of x (..., H), (..., V), for evaluation and sampling."""
        if isinstance(self.layer, eqx.nn.Embedding):
            return x @ self.layer.weight.T
        logits: jax.Array = jnp.vectorize(self.layer, signature="(h)->(v)")(x)
        return logits


class MaxPool2d(eqx.nn.MaxPool2d):
    """Maximum of each window, by `jaxops.max_pool`.

    Args:
      kernel_size: the extents of the windows: one number, or one for each of height and width.
      stride: the steps between windows, likewise; 1 unless given.
      padding: how far windows reach beyond x, less than the window: a number, one for each axis, or pairs.
      use_ceil: whether the last windows reach beyond the padding, so that each pixel is in a window.

    Example:
      >>> layer = jaxops.equinox.MaxPool2d((1, 2))
      >>> layer(jnp.array([[[1.0, 5.0, 2.0, 3.0]]])).tolist()  # (C, H, W)
      [[[5.0, 5.0, 3.0]]]
    """

    def __init__(self, kernel_size: Any, stride: Any = 1, padding: Any = 0, use_ceil: bool = False) -> None:
        """Takes the arguments of `equinox.nn.MaxPool2d`."""
        super().__init__(kernel_size, stride, padding, use_ceil)

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """Pools an image (C, H, W), or a batch (N, C, H, W). `key` is not used."""
        return max_pool(x, self.kernel_size, stride=self.stride, padding=_padding(self, x), layout="NCHW")


class AvgPool2d(eqx.nn.AvgPool2d):
    """Mean of each window, with zeros around x, by `jaxops.avg_pool`.

    Args:
      kernel_size: the extents of the windows: one number, or one for each of height and width.
      stride: the steps between windows, likewise; 1 unless given.
      padding: how far windows reach beyond x, less than the window: a number, one for each axis, or pairs.
      use_ceil: whether the last windows reach beyond the padding, so that each pixel is in a window.

    Example:
      >>> layer = jaxops.equinox.AvgPool2d(2, stride=2)
      >>> layer(jnp.arange(8.0).reshape(1, 2, 4)).tolist()  # (C, H, W)
      [[[2.5, 4.5]]]
    """

    def __init__(self, kernel_size: Any, stride: Any = 1, padding: Any = 0, use_ceil: bool = False) -> None:
        """Takes the arguments of `equinox.nn.AvgPool2d`."""
        super().__init__(kernel_size, stride, padding, use_ceil)

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """Pools an image (C, H, W), or a batch (N, C, H, W). `key` is not used."""
        return avg_pool(x, self.kernel_size, stride=self.stride, padding=_padding(self, x), layout="NCHW")


def _padding(pool: eqx.nn.Pool, x: jax.Array) -> Any:
    """Returns the padding of a pool, with `use_ceil` as far as its last windows reach."""
    if not pool.use_ceil:
        return pool.padding
    axes = zip(x.shape[-2:], pool.padding, pool.kernel_size, pool.stride, strict=True)
    return [(before, after - (size + before + after - width) % -step) for size, (before, after), width, step in axes]
