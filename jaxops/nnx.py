"""Modules for Flax NNX: batch norm, dropout, a loss head and pooling, computed by the operators of this library.

Modules take the arguments of their namesakes in `flax.nnx` and have the same state under the same names, so that either
can take the other's place in a model, and its checkpoints. `max_pool` and `avg_pool` are those of `jaxops.linen`.
Import it by name, as `import jaxops` does not import Flax.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx as flax_nnx

from jaxops._checks.arguments import NotSupportedError, require
from jaxops._frameworks import batch_norm, flax_arguments
from jaxops._frameworks.loss_options import check_loss_options
from jaxops._frameworks.pooling import avg_pool as avg_pool
from jaxops._frameworks.pooling import max_pool as max_pool
from jaxops.dropout import dropout
from jaxops.linear_cross_entropy import linear_cross_entropy

_NORM, _DROPOUT, _HEAD = "jaxops.nnx.BatchNorm", "jaxops.nnx.Dropout", "jaxops.nnx.LossHead"

__all__ = ["BatchNorm", "Dropout", "LossHead", "avg_pool", "max_pool"]


class BatchNorm(flax_nnx.BatchNorm):
    """Batch norm by `jaxops.batch_norm`: `y = scale * (x - mean) / sqrt(var + epsilon) + bias`.

    Mean and biased variance are those of x over all axes but the last. In training the running statistics move
    towards them, as those of Flax do:

        running = momentum * running + (1 - momentum) * (mean, or biased variance)

    `jaxops.batch_norm` by itself counts momentum the other way round and averages unbiased variances, as PyTorch does.

    Args:
      num_features: C, the number of channels.
      use_running_average: whether to normalize by the running statistics instead. `train()`, `eval()`, `nnx.view` and
        an argument of the call change it.
      momentum: the weight of the old statistics.
      epsilon: added to the variance.
      dtype: the dtype of the result. None means what x, parameters and statistics promote to.
      param_dtype: the dtype of scale and bias.
      use_bias: whether there is a bias.
      use_scale: whether there is a scale.
      bias_init: the initializer of the bias.
      scale_init: the initializer of the scale.
      axis_name: inside `jax.shard_map`, the mesh axis over which the batch is split; or the axis of a vmap.
      rngs: the keys of the initializers.
      **options: Flax's others: `bias_metadata`, `scale_metadata` and `promote_dtype` work as there. `axis` must be -1
        and `axis_index_groups` None. `use_fast_variance` has no effect, because the variance always takes a second pass
        over x, so that a large mean costs it no digits.

    Raises:
      NotSupportedError: for another axis, and for `axis_index_groups`.
      BadParamError: if x is not floating point with rank 2 to 5 and C channels.

    Numerics:
      With a 16-bit dtype, x is rounded to it, as in Flax, but parameters and statistics are not. Everything is computed
      in float32 and rounded once.

    Example:
      >>> from flax import nnx
      >>> layer = jaxops.nnx.BatchNorm(2, momentum=0.5, rngs=nnx.Rngs(0))
      >>> y = layer(jnp.array([[1.0, 10.0], [3.0, 10.0]]))
      >>> layer.mean[...].tolist()  # half of the way from 0 to (2, 10)
      [1.0, 5.0]
      >>> layer.eval()
      >>> layer(jnp.zeros((1, 2))).shape
      (1, 2)
    """

    @flax_arguments.with_signature_of(flax_nnx.BatchNorm.__init__)
    def __init__(self, *args: Any, **options: Any) -> None:
        """Takes the arguments of `flax.nnx.BatchNorm`, and refuses some of their values."""
        super().__init__(*args, **options)
        flax_arguments.check_batch_norm(_NORM, axis=self.axis, axis_index_groups=self.axis_index_groups)

    def __call__(self, x: jax.Array, use_running_average: bool | None = None, *, mask: Any = None) -> jax.Array:
        """Normalizes a batch (N, ..., C); in training, where a mask may say what counts, updates running statistics."""
        given = use_running_average, self.use_running_average
        average = flax_arguments.first_present(_NORM, "use_running_average", *given)
        scale = None if self.scale is None else self.scale[...]
        bias = None if self.bias is None else self.bias[...]
        running = batch_norm.Statistics(self.mean[...], self.var[...])
        # Only x: the statistics and parameters stay in float32.
        x, *_ = self.promote_dtype((x, *running, scale, bias), dtype=self.dtype)
        x = batch_norm.images(_NORM, x)
        layer = batch_norm.Layer(_NORM, batch_norm.CHANNELS_LAST, self.epsilon, scale, bias)
        if average:
            return layer.infer(x, running)
        y, updated = layer.train(x, running, momentum=self.momentum, axis_name=self.axis_name, mask=mask)
        self.mean[...], self.var[...] = updated
        return y


class Dropout(flax_nnx.Dropout):
    """Dropout by `jaxops.dropout`: `y = x / (1 - rate)` where an element is kept, else 0.

    The same key keeps other elements than in Flax, with the same probability. The backward pass keeps one bit an
    element.

    Args:
      rate: the probability of dropping an element, in [0, 1].
      deterministic: whether to return inputs as they are. `train()`, `eval()`, `nnx.view` and an argument of the call
        change it.
      rng_collection: the name of the stream in `rngs`.
      rngs: the keys, here or in the call.
      **options: `broadcast_dims`, which must be empty.

    Raises:
      NotSupportedError: if `broadcast_dims` is not empty.

    Example:
      >>> from flax import nnx
      >>> layer = jaxops.nnx.Dropout(0.75, rngs=nnx.Rngs(0))
      >>> # Dropped, or 1 / (1 - 0.75).
      >>> sorted({float(value) for value in layer(jnp.ones(1000))})
      [0.0, 4.0]
      >>> layer.eval()
      >>> layer(jnp.ones(2)).tolist()
      [1.0, 1.0]
    """

    @flax_arguments.with_signature_of(flax_nnx.Dropout.__init__)
    def __init__(self, *args: Any, **options: Any) -> None:
        """Takes the arguments of `flax.nnx.Dropout`, and refuses `broadcast_dims`."""
        super().__init__(*args, **options)
        flax_arguments.check_dropout(_DROPOUT, self.broadcast_dims)

    def __call__(self, inputs: jax.Array, *, deterministic: bool | None = None, rngs: Any = None) -> jax.Array:
        """Drops elements of inputs; `rngs` may be a key, a stream or `nnx.Rngs`, and comes before the constructor's."""
        if flax_arguments.first_present(_DROPOUT, "deterministic", deterministic, self.deterministic) or self.rate == 0:
            return inputs
        if self.rate == 1:  # without a key, as in Flax
            return jnp.zeros_like(inputs)
        source = flax_arguments.first_present(_DROPOUT, "rngs", rngs, self.rngs)
        if isinstance(source, flax_nnx.Rngs):
            source = source[self.rng_collection]
        return dropout(source() if isinstance(source, flax_nnx.RngStream) else source, inputs, self.rate)


class LossHead(flax_nnx.Module):
    """Cross entropy of a last layer by `jaxops.linear_cross_entropy`, without the layer's logits.

    The loss is that of `optax.softmax_cross_entropy_with_integer_labels(layer(x), labels)`, averaged over the rows
    whose label is not -100. Gradients go to the parameters of the layer itself.

    The names of a model's parameters do not change if the head is made where the loss is computed:
    `jaxops.nnx.LossHead(model.output)(x, labels)`. The layer may also be an `nnx.Embed` that the model uses elsewhere.

    Args:
      layer: the `nnx.Linear` that computes the logits, or an `nnx.Embed` whose `attend` does.

    Raises:
      NotSupportedError: for another layer, one with a `__call__` or `attend` of its own, or one with another
        `dot_general`.

    Numerics:
      x and the parameters are promoted as the layer promotes them, but logits are float32 whatever its dtype, and never
      rounded to 16 bits. The layer's `precision` and `preferred_element_type` count in `logits` alone.

    Example:
      >>> from flax import nnx
      >>> layer = nnx.Linear(2, 4, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(0))
      >>> head = jaxops.nnx.LossHead(layer)
      >>> x = jnp.array([[1.0, 0.0], [0.0, 1.0]])
      >>> # All four classes are equally likely.
      >>> print(head(x, jnp.array([3, -100])).round(3), np.log(4).round(3))
      1.386 1.386
      >>> head.logits(x).shape
      (2, 4)
    """

    def __init__(self, layer: flax_nnx.Linear | flax_nnx.Embed) -> None:
        """Takes the layer, which remains the owner of its parameters."""
        kind = type(layer)
        # A subclass that computes other logits would have another loss.
        is_linear = issubclass(kind, flax_nnx.Linear) and kind.__call__ is flax_nnx.Linear.__call__
        is_embed = issubclass(kind, flax_nnx.Embed) and kind.attend is flax_nnx.Embed.attend
        rule = "be an nnx.Linear or an nnx.Embed"
        require(is_linear or is_embed, _HEAD, "layer", rule, kind.__name__, error=NotSupportedError)
        if isinstance(layer, flax_nnx.Linear):
            flax_arguments.check_product(_HEAD, "layer.dot_general", layer.dot_general, jax.lax.dot_general)
        self.layer = layer

    def __call__(self, x: jax.Array, labels: jax.Array, **options: Any) -> Any:
        """Computes the loss of features x (..., H) and labels (...), with the options of `linear_cross_entropy`."""
        check_loss_options(_HEAD, options)
        layer = self.layer
        if isinstance(layer, flax_nnx.Embed):
            x, table = layer.promote_dtype((x, layer.embedding[...]), dtype=layer.dtype)
            return linear_cross_entropy(x, table, labels, **options)
        bias = None if layer.bias is None else layer.bias[...]
        x, kernel, bias = layer.promote_dtype((x, layer.kernel[...], bias), dtype=layer.dtype)
        return linear_cross_entropy(x, kernel, labels, bias=bias, transpose_weight=True, **options)

    def logits(self, x: jax.Array) -> jax.Array:
        """Computes the layer's own logits, (..., V), for evaluation and sampling."""
        return self.layer.attend(x) if isinstance(self.layer, flax_nnx.Embed) else self.layer(x)
