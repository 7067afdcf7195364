"""The summed cross entropy of rows: its value, and the operator of its value with gradients from the same pass.

Differentiating the sum computes its gradients in the forward pass, three matrix products in all. The tangent is their
inner product with the tangents of the operands, and reverse mode multiplies them by the loss's cotangent.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

import lowering
from jaxops._primitive.operator import Operator
from jaxops._primitive.sharding import laid_out_as
from jaxops.linear_cross_entropy import prior_shift
from jaxops.linear_cross_entropy.by_rows import summed_by_rows
from jaxops.linear_cross_entropy.chunk_sizes import rows_of_exponentials
from jaxops.linear_cross_entropy.operands import Columns, Needs, Rows, RowStatistics, RowWeights, axes
from jaxops.linear_cross_entropy.operator import linear_row_statistics
from jaxops.linear_cross_entropy.row_statistics import loss_terms, row_losses, skipped_as_zeros
from lowering.operators import EVERYWHERE, Form, Place, fields
from pallas_kernels.gpu.linear_cross_entropy import exponentials as gpu_exponentials
from pallas_kernels.kernel import Kernel
from pallas_kernels.linear_cross_entropy_kinds import kind_of_sum as kind
from pallas_kernels.tpu.linear_cross_entropy import exponentials as tpu_exponentials


def summed_cross_entropy(
    rows: Rows, columns: Columns, weights: RowWeights, *, weight_grad_dtype: Any = None, **params: Any
) -> tuple[jax.Array, RowStatistics]:
    """Computes the sum of `row_losses`, and the statistics of rows, which have no derivative here.

    The other parameters are those of `linear_row_statistics`.

    The x of a `SKIPPED` row may hold anything. Gradients are kept before the loss's own cotangent is known. A cotangent
    of 1 costs nothing, which is what a mean leaves if the weights have its divisor already.
    """
    selection = lowering.current_selection()

    @jax.custom_jvp
    def summed(rows: Rows, columns: Columns, weights: RowWeights) -> tuple[jax.Array, RowStatistics]:
        statistics = linear_row_statistics(skipped_as_zeros(rows), columns, **params)
        return jnp.sum(row_losses(statistics, weights)), statistics

    def jvp(operands: Any, tangents: Any) -> Any:
        active = jax.tree.map(lambda dot: not isinstance(dot, SymbolicZero), tangents)
        # JAX may run this after the user's `lowering.use` has ended.
        with lowering.using(selection):
            loss, statistics, of_rows, of_columns = _SUM_WITH_GRADIENTS(
                *operands, needs=Needs.of(*active[:2]), weight_grad_dtype=weight_grad_dtype, **params
            )
        # The terms of rows are the gradients of their weights.
        gradients = of_rows, of_columns, loss_terms(statistics)
        none = jax.tree.map(lambda x: SymbolicZero(jax.typeof(x).to_tangent_aval()), statistics)
        pairs = zip(fields(gradients), fields(tangents), strict=True)
        products = [inner_product(x, dot, loss.dtype) for x, dot in pairs if not isinstance(dot, SymbolicZero | None)]
        return (loss, statistics), (sum(products[1:], products[0]), none)

    summed.defjvp(jvp, symbolic_zeros=True)
    return summed(rows, columns, weights)


# A checkpoint, so that a gradient in 16 bits waits for the loss's cotangent as it is.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def inner_product(gradient: jax.Array, tangent: jax.Array, dtype: Any) -> jax.Array:
    """Sums the products of a gradient and a tangent of one operand."""
    # On an explicit mesh, the two can only be multiplied if they are split alike.
    gradient = laid_out_as(gradient, jax.typeof(tangent).sharding)
    # In 16 bits a sum of V H products would soon be too large for the next product to change it, and a gradient that is
    # multiplied by a cotangent before it is rounded need not fit the range of float16 itself.
    return jnp.sum(gradient.astype(dtype) * tangent.astype(dtype))


def _exponentiating(launcher: Any, name: str, platform: str) -> Kernel:
    """Returns the kernel of gradients by a prior shift, with exponentials from a launcher of theirs."""

    def run(
        rows: Rows, columns: Columns, weights: RowWeights, *, config: Any, interpret: Any = False, **params: Any
    ) -> Any:
        blocks = {name: value for name, value in config.items() if name != "chunk_rows"}
        # A value of its own, so that its layout can be the kernel's, once for all chunks.
        own_weight = jax.lax.optimization_barrier(columns.weight)

        def exponentials(x: jax.Array, labels: jax.Array, shift: jax.Array) -> prior_shift.Exponentials:
            results = launcher.exponentials(
                x.reshape(-1, x.shape[-1]),
                own_weight,
                columns.bias,
                None if columns.class_targets is None else columns.class_targets.astype(jnp.float32),
                labels.reshape(-1),
                shift.reshape(-1),
                softcap=params["softcap"],
                most_excess=prior_shift.MOST_EXCESS,
                config=blocks,
                interpret=interpret,
            )
            return prior_shift.Exponentials(*(x.reshape(*labels.shape, *x.shape[1:]) for x in results))

        # A kernel sees one device's part.
        params |= {"place": Place("cpu" if interpret else platform), "chunk_rows": config["chunk_rows"]}
        return prior_shift.summed_by_prior_shift(rows, columns, weights, exponentiating=exponentials, **params)

    def refuses(
        hardware: Any, rows: Any, columns: Any, weights: Any, *, metrics: bool, softcap: Any, needs: Needs, **_: Any
    ) -> str | None:
        if metrics:
            return "what `return_aux` returns needs the logits themselves, column by column"
        reason = prior_shift.refusal(None, rows, columns, softcap=softcap, needs=needs)
        return reason or launcher.refusal(hardware, rows.x, columns.weight)

    def configs(hardware: Any, rows: Any, columns: Any, *_: Any, chunk_rows: int | None, **__: Any) -> Any:
        size = chunk_rows or rows_of_exponentials(*columns.weight.shape)
        offered = launcher.configs(hardware, rows.x, columns.weight, size)
        return [config | {"chunk_rows": size} for config in offered]

    is_pure = platform == "tpu"
    return Kernel(name, platform, run, refuses, configs, kind=kind, interpreter_is_pure=is_pure, takes=_OF_LABELS)


_OF_LABELS = frozenset({"x", "labels", "weight", "bias", "class_targets", *RowWeights._fields})

_SUM_WITH_GRADIENTS = Operator(
    name="linear_cross_entropy_sum_with_gradients",
    signature=f"{axes(Rows, Columns, RowWeights)} -> , {axes(RowStatistics, Rows, Columns)}",
    check=None,
    reference=summed_by_rows,
    kernels=(
        _exponentiating(tpu_exponentials, "mosaic_tpu", "tpu"),
        _exponentiating(gpu_exponentials, "mosaic_gpu", "cuda"),
    ),
    forms=(
        # On TPUs, XLA fuses the exponentials into the product that makes the logits.
        Form("xla_prior_shift", frozenset({"tpu"}), prior_shift.summed_by_prior_shift, prior_shift.refusal),
        Form("xla_by_rows", EVERYWHERE, summed_by_rows),
    ),
)
