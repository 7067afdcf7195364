"""Modules for Flax Linen: batch norm, dropout, a loss head and pooling, computed by the operators of this library.

Modules take the arguments of their namesakes in `flax.linen` and have the same variables under the same names, so that
either can take the other's place in a model, and its checkpoints. Import it by name, as `import jaxops` does not import
Flax.
"""

import numbers
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import dtypes

from jaxops._checks.arguments import NotSupportedError, require
from jaxops._frameworks import batch_norm, flax_arguments
from jaxops._frameworks.loss_options import check_loss_options
from jaxops._frameworks.pooling import avg_pool as avg_pool
from jaxops._frameworks.pooling import max_pool as max_pool
from jaxops.dropout import dropout
from jaxops.linear_cross_entropy import linear_cross_entropy

_NORM, _DROPOUT, _HEAD = "jaxops.linen.BatchNorm", "jaxops.linen.Dropout", "jaxops.linen.LossHead"
_TIED = "jaxops.linen.tied_loss"

__all__ = ["BatchNorm", "Dropout", "LossHead", "avg_pool", "max_pool", "tied_loss"]


class BatchNorm(nn.BatchNorm):
    """Batch norm by `jaxops.batch_norm`: `y = scale * (x - mean) / sqrt(var + epsilon) + bias`.

    Mean and biased variance are those of x over all axes but the last. In training the running statistics move
    towards them, as those of Flax do:

        running = momentum * running + (1 - momentum) * (mean, or biased variance)

    `jaxops.batch_norm` by itself counts momentum the other way round and averages unbiased variances, as PyTorch does.
    The collections are "params" with `scale` and `bias`, and "batch_stats" with `mean` and `var`.

    Args:
      use_running_average: whether to normalize by the running statistics instead; here or in the call.
      momentum: the weight of the old statistics.
      epsilon: added to the variance.
      dtype: the dtype of the result. None means what x and the parameters promote to.
      param_dtype: the dtype of scale and bias.
      use_bias: whether there is a bias.
      use_scale: whether there is a scale.
      bias_init: the initializer of the bias.
      scale_init: the initializer of the scale.
      axis_name: inside `jax.shard_map`, the mesh axis over which the batch is split; or the axis of a vmap.
      axis: must be -1.
      axis_index_groups: must be None.
      use_fast_variance: has no effect, because the variance always takes a second pass over x, so that a large mean
        costs it no digits.
      force_float32_reductions: must be True.

    Raises:
      NotSupportedError: for another axis, for `axis_index_groups`, and without `force_float32_reductions`.
      BadParamError: if x is not floating point with rank 2 to 5.

    Numerics:
      Everything is computed in float32 (float64 for float64) and rounded once.

    Example:
      >>> layer = jaxops.linen.BatchNorm(use_running_average=False, momentum=0.5)
      >>> x = jnp.array([[1.0, 10.0], [3.0, 10.0]])
      >>> variables = layer.init(jax.random.key(0), x)
      >>> y, updated = layer.apply(variables, x, mutable=["batch_stats"])
      >>> updated["batch_stats"]["mean"].tolist()  # half of the way from 0 to (2, 10)
      [1.0, 5.0]
    """

    def __post_init__(self) -> None:
        """Refuses some values of the arguments."""
        flax_arguments.check_batch_norm(_NORM, axis=self.axis, axis_index_groups=self.axis_index_groups)
        forced, rule = self.force_float32_reductions, "be True, as all sums are in float32"
        require(bool(forced), _NORM, "force_float32_reductions", rule, forced, error=NotSupportedError)
        super().__post_init__()

    @nn.compact
    def __call__(self, x: jax.Array, use_running_average: bool | None = None, *, mask: Any = None) -> jax.Array:
        """Normalizes a batch (N, ..., C); in training, where a mask may say what counts, updates running statistics."""
        average = nn.merge_param("use_running_average", self.use_running_average, use_running_average)
        x = batch_norm.images(_NORM, x)
        shape = x.shape[-1:]
        mean = self.variable("batch_stats", "mean", jnp.zeros, shape, jnp.float32)
        var = self.variable("batch_stats", "var", jnp.ones, shape, jnp.float32)
        scale = self.param("scale", self.scale_init, shape, self.param_dtype) if self.use_scale else None
        bias = self.param("bias", self.bias_init, shape, self.param_dtype) if self.use_bias else None
        dtype = dtypes.canonicalize_dtype(x, scale, bias, dtype=self.dtype)
        x = x.astype(jnp.promote_types(x.dtype, dtype))
        layer = batch_norm.Layer(_NORM, batch_norm.CHANNELS_LAST, self.epsilon, scale, bias)
        running = batch_norm.Statistics(mean.value, var.value)
        if average:
            return layer.infer(x, running).astype(dtype)
        axis_name = None if self.is_initializing() else self.axis_name
        y, updated = layer.train(x, running, momentum=self.momentum, axis_name=axis_name, mask=mask)
        if not self.is_initializing():
            mean.value, var.value = updated
        return y.astype(dtype)


class Dropout(nn.Dropout):
    """Dropout by `jaxops.dropout`: `y = x / (1 - rate)` where an element is kept, else 0.

    The same key keeps other elements than in Flax, with the same probability. The backward pass keeps one bit an
    element.

    Args:
      rate: the probability of dropping an element, in [0, 1].
      broadcast_dims: must be empty.
      deterministic: whether to return x as it is; here or in the call.
      rng_collection: the name of the key in the `rngs` of `apply`.

    Raises:
      NotSupportedError: if `broadcast_dims` is not empty.

    Example:
      >>> layer = jaxops.linen.Dropout(0.75, deterministic=False)
      >>> y = layer.apply({}, jnp.ones(1000), rngs={"dropout": jax.random.key(0)})
      >>> sorted({float(value) for value in y})  # dropped, or 1 / (1 - 0.75)
      [0.0, 4.0]
    """

    def __post_init__(self) -> None:
        """Refuses `broadcast_dims`."""
        flax_arguments.check_dropout(_DROPOUT, self.broadcast_dims)
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs: jax.Array, deterministic: bool | None = None, rng: jax.Array | None = None) -> jax.Array:
        """Drops elements of inputs by the key `rng`, or else one of `rng_collection`."""
        if nn.merge_param("deterministic", self.deterministic, deterministic) or self.rate == 0:
            return inputs
        if self.rate == 1:  # without a key, as in Flax
            return jnp.zeros_like(inputs)
        return dropout(self.make_rng(self.rng_collection) if rng is None else rng, inputs, self.rate)


class LossHead(nn.Dense):
    """Cross entropy of a last `nn.Dense` by `jaxops.linear_cross_entropy`, without the layer's logits.

    The loss is that of `optax.softmax_cross_entropy_with_integer_labels(dense(x), labels)`, averaged over the rows
    whose label is not -100. The parameters are those of `nn.Dense`: `kernel`, (H, V), and `bias`, (V,). With the name
    of the layer that it replaces, which is "Dense_0" for the first without one, the head loads that layer's checkpoint.
    Where the table of an `nn.Embed` is the last layer, use `tied_loss`.

    Args:
      features: V, the number of classes.
      use_bias: whether there is a bias.
      dtype: the dtype to which x and parameters are rounded. None means what they promote to.
      param_dtype: the dtype of the parameters.
      precision: that of the products in `logits`; the loss goes by `jax.default_matmul_precision`.
      kernel_init: the initializer of the kernel.
      bias_init: the initializer of the bias.
      promote_dtype: as in `nn.Dense`.
      dot_general: must be None.
      dot_general_cls: must be None.

    Raises:
      NotSupportedError: for a `dot_general` or `dot_general_cls`.

    Numerics:
      Logits are float32 whatever the dtype, and in the loss never rounded to 16 bits.

    Example:
      >>> head = jaxops.linen.LossHead(4, kernel_init=jax.nn.initializers.zeros)
      >>> x, labels = jnp.array([[1.0, 0.0], [0.0, 1.0]]), jnp.array([3, -100])
      >>> variables = head.init(jax.random.key(0), x, labels)
      >>> # All classes are equally likely.
      >>> print(head.apply(variables, x, labels).round(3), np.log(4).round(3))
      1.386 1.386
      >>> head.apply(variables, x, method="logits").shape
      (2, 4)
    """

    def __post_init__(self) -> None:
        """Refuses features that count nothing, and custom products, which the loss would not use."""
        is_count = isinstance(self.features, numbers.Integral) and self.features > 0
        require(is_count, _HEAD, "features", "be a positive integer", self.features)
        for argument in ("dot_general", "dot_general_cls"):
            flax_arguments.check_product(_HEAD, argument, getattr(self, argument), None)
        super().__post_init__()

    def __call__(self, x: jax.Array, labels: jax.Array, **options: Any) -> Any:  # type: ignore[override]  # labels, too
        """Computes the loss of features x (..., H) and labels (...), with the options of `linear_cross_entropy`."""
        check_loss_options(_HEAD, options)
        operands: Any = self.promote_dtype(x, *self._parameters(x.shape[-1]), dtype=self.dtype)
        x, kernel, bias = operands
        return linear_cross_entropy(x, kernel, labels, bias=bias, transpose_weight=True, **options)

    def logits(self, x: jax.Array) -> jax.Array:
        """Computes what `nn.Dense` does, (..., V), for evaluation and sampling."""
        return super().__call__(x)

    @nn.compact
    def _parameters(self, width: int) -> tuple[jax.Array, jax.Array | None]:
        """Makes the kernel and the bias as `nn.Dense` does."""
        kernel = self.param("kernel", self.kernel_init, (width, self.features), self.param_dtype)
        bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype) if self.use_bias else None
        return kernel, bias


def tied_loss(embed: nn.Embed, x: jax.Array, labels: jax.Array, **options: Any) -> Any:
    """Computes the cross entropy of `embed.attend(x)` by `jaxops.linear_cross_entropy`, without these logits.

    Call it inside a module that holds the table of words, which then gets the gradients of both of its uses. For
    evaluation there is `embed.attend`.

    Args:
      embed: the `nn.Embed` of V words with H features each, as a module's own submodule.
      x: (..., H), floating point.
      labels: as in `jaxops.linear_cross_entropy`.
      **options: the options of `jaxops.linear_cross_entropy`.

    Returns:
      What `jaxops.linear_cross_entropy` returns.

    Raises:
      NotSupportedError: if `embed` is no `nn.Embed`.

    Example:
      >>> from flax import linen as nn
      >>> class Model(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, tokens, labels):
      ...         embed = nn.Embed(4, 2, embedding_init=nn.initializers.zeros)
      ...         return jaxops.linen.tied_loss(embed, embed(tokens), labels)
      >>> loss, _ = Model().init_with_output(
      ...     jax.random.key(0), jnp.array([0, 1]), jnp.array([1, 2])
      ... )
      >>> print(loss.round(3), np.log(4).round(3))  # all classes are equally likely
      1.386 1.386
    """
    rule = "be an nn.Embed"
    require(isinstance(embed, nn.Embed), _TIED, "embed", rule, embed, error=NotSupportedError)
    check_loss_options(_TIED, options)
    operands: Any = embed.promote_dtype(x, embed.embedding, dtype=embed.dtype)
    x, table = operands
    return linear_cross_entropy(x, table, labels, **options)
