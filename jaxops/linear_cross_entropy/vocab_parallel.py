"""The documented operators for cross entropy over a vocabulary that is split between devices; `aclnn` has their calls.

The calls check operands, and give the operators arrays.

Each device runs step 1 on its rows of the weight, and steps 3 and 4 on the statistics that step 2 combines over
devices:

    1  max, sum, predicted, mask, ... = fused_linear_online_max_sum(...)
    2  M = pmax(max);  Z = psum(sum exp(max - M));  P = psum(0 where mask, else predicted + max - M)
    3  loss = log Z - P = fused_cross_entropy_loss_with_max_sum(M, Z, P)
    4  fused_linear_cross_entropy_loss_grad(..., logits_max=M, sum_exp_logits=Z); psum of its input gradient
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxops._checks.dtypes import accumulation_dtype, wide_ids
from jaxops._primitive.operator import Operator
from jaxops._primitive.results import exportable
from jaxops.linear_cross_entropy.chunk_sizes import rows_of_logits
from jaxops.linear_cross_entropy.fold_rows import fold_rows
from jaxops.linear_cross_entropy.gradient_products import Factors, rounded_products
from jaxops.linear_cross_entropy.operands import Columns, CotangentTerms, Needs, Rows
from jaxops.linear_cross_entropy.row_statistics import Logits, is_label
from lowering.operators import EVERYWHERE, Form, Place
from pallas_kernels.gpu.linear_cross_entropy import vocab_parallel as gpu
from pallas_kernels.tpu.linear_cross_entropy import vocab_parallel as tpu


@exportable
class OnlineMaxSum(NamedTuple):
    """Statistics of each row over one part of the vocabulary.

    Attributes:
      logits_max_local: (...) float32, the maximum.
      sum_exp_logits_local: (...) float32, the sum of exp(logits - maximum).
      predicted_logits_local: (...) float32, the target's logit - maximum; 0 if the target belongs to another part.
      target_mask: uint8, one bit per row, the first row in the lowest bit: 1 if the target belongs to another part.
      masked_target: (...), the target's column; 0 if the target belongs to another part.
      vocab_parallel_logits: (..., V) in the input's dtype, or None.
    """

    logits_max_local: jax.Array
    sum_exp_logits_local: jax.Array
    predicted_logits_local: jax.Array
    target_mask: jax.Array
    masked_target: jax.Array
    vocab_parallel_logits: jax.Array | None


def _max_sum(
    x: jax.Array,
    weight: jax.Array,
    target: jax.Array,
    start: jax.Array,
    end: jax.Array,
    *,
    return_logits: bool,
    place: Place | None = None,
) -> OnlineMaxSum:
    mask = (target < start) | (target >= end)
    masked_target = jnp.where(mask, jnp.zeros_like(target), target - start)
    columns = Columns(weight)

    def chunk(_: None, rows: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[OnlineMaxSum, None]:
        x, mask, masked_target = rows
        logits = Logits.of(Rows(x), columns, None)
        labeled = Rows(x, jnp.where(mask, -1, wide_ids(masked_target)))
        sums: Any = logits._replace(rows=labeled).sums(metrics=False)
        # Here the maximum is a result, which is differentiated as well. There it is a constant.
        maximum = jnp.max(logits.bounded, axis=-1)
        above = sums.max_logit - maximum
        predicted = jnp.where(sums.has_label > 0, sums.label_logit + above, 0)
        local = maximum, jnp.exp(above) * sums.sum_exp, predicted, mask, masked_target
        return OnlineMaxSum(*local, logits.bounded.astype(x.dtype) if return_logits else None), None

    chunk_rows = None if return_logits else rows_of_logits(*weight.shape)
    return fold_rows(chunk, None, (x, mask, masked_target), target.shape, chunk_rows, place)[0]


def _pack(mask: jax.Array, beyond: jax.Array) -> jax.Array:
    bits = jnp.concatenate([mask.reshape(-1), jnp.broadcast_to(beyond, (-mask.size % 8,))])
    return jnp.packbits(bits, bitorder="little")


def _unpack(packed: jax.Array, like: jax.Array) -> jax.Array:
    return jnp.unpackbits(packed, count=like.size, bitorder="little").astype(bool).reshape(like.shape)


def _loss(
    logits_max: jax.Array, sum_exp_logits: jax.Array, predicted_logits: jax.Array, logits: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    loss = jnp.log(sum_exp_logits) - predicted_logits
    if logits is None:
        return loss, None
    shifted = logits.astype(logits_max.dtype) - logits_max[..., None]
    return loss, jnp.exp(shifted) * (1 / sum_exp_logits)[..., None]


def _grad(
    grad: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    mask: jax.Array,
    masked_target: jax.Array,
    logits_max: Any,
    sum_exp_logits: Any,
    softmax: jax.Array | None,
    *,
    place: Place | None = None,
) -> tuple[jax.Array, jax.Array]:
    labels, dtype = jnp.where(mask, -1, wide_ids(masked_target)), accumulation_dtype(x.dtype)
    start = jnp.zeros(weight.shape, dtype)
    if softmax is not None:
        cotangent = (softmax - is_label(labels, softmax).astype(softmax.dtype)) * grad[..., None]
        factors = Factors(cotangent.astype(dtype), x, weight, start)
        x_grad, weight_grad = rounded_products(factors, lambda: jnp.abs(grad))
        return x_grad.astype(x.dtype), weight_grad.astype(weight.dtype)

    def chunk(weight_sum: jax.Array, chunk: tuple[CotangentTerms, Rows]) -> tuple[Any, Any]:
        terms, rows = chunk
        logits = Logits.of(rows, Columns(weight), None)
        of_rows, of_columns = logits.gradients(terms, Needs(x=True), Columns(weight_sum))
        return of_rows.x.astype(x.dtype), of_columns.weight

    # The sum divides the coefficient: see `cotangent_terms`.
    chunks = CotangentTerms(grad / sum_exp_logits, logits_max, jnp.zeros_like(logits_max), -grad), Rows(x, labels)
    x_grad, weight_grad = fold_rows(chunk, start, chunks, grad.shape, rows_of_logits(*weight.shape), place)
    return x_grad, weight_grad.astype(weight.dtype)


ONLINE_MAX_SUM = Operator(
    name="fused_linear_online_max_sum",
    signature="... h, v h, ..., , -> ..., ..., ..., ..., ..., ... v",
    check=None,
    reference=_max_sum,
    forms=(Form("xla_by_rows", EVERYWHERE, _max_sum),),
    kernels=(tpu.MAX_SUM_KERNEL, gpu.MAX_SUM_KERNEL),
)

# These are operators so that rows on different devices of an explicit mesh can share a byte.
PACK = Operator("packed_target_mask", "..., -> bytes", None, _pack)
UNPACK = Operator("unpacked_target_mask", "bytes, ... -> ...", None, _unpack)

LOSS = Operator(
    name="fused_cross_entropy_loss_with_max_sum",
    signature="..., ..., ..., ... v -> ..., ... v",
    check=None,
    reference=_loss,
    no_kernel="XLA reads the logits once",
)

LOSS_GRAD = Operator(
    name="fused_linear_cross_entropy_loss_grad",
    signature="..., ... h, v h, ..., ..., ..., ..., ... v -> ... h, v h",
    check=None,
    reference=_grad,
    forms=(Form("xla_by_rows", EVERYWHERE, _grad),),
    kernels=(tpu.GRAD_KERNEL, gpu.GRAD_KERNEL),
)
