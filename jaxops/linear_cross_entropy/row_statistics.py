"""The logits of rows, their statistics and losses, and the gradients behind them: the algebra that forms share.

With the logits z of a row, their maximum m, lse = m + l and p = softmax(z) = exp(z - m - l), weights t of the columns
with T = sum t, and row weights a, b, q and r, the loss of a row with label y is

    L = a (lse - z_y) + b tau + q lse^2 + r l       where tau = sum_c t_c (lse - z_c)
      = a (l - (z_y - m)) + b tau + q (m + l)^2 + r l     = T l - sum_c t_c (z_c - m)

As d lse / dz_c = p_c, the cotangents of the logits and of the column weights are

    dL / dz_c = (a + b T + 2 q lse + r) p_c - a [c = y] - b t_c        dL / dt_c = b (l - (z_c - m))

The statistics l, z_y - m, tau and mu = sum p (z - m) may also be differentiated themselves. m is a constant, since it
cancels, and d mu / dz_c = p_c (1 + (z_c - m) - mu). With cotangents g of the four, dz_c is

    (g_l + g_tau T + g_mu (1 - mu)) p_c + g_mu (z_c - m) p_c + g_y [c = y] - g_tau t_c

So both are `CotangentTerms`: softmax, slope, label and target. The bounded logits u = softcap tanh(z0 / softcap) of
z0 = x weight^T + bias have du / dz0 = 1 - (u / softcap)^2. A row's scale s gives z = s u, and

    dL / ds = sum_c dz_c u_c = (sum_c dz_c (z_c - m) + m sum_c dz_c) / s

where the second sum is known: the terms with g_l, g_mu and g_y add up to these, the others to 0. A margin shifts z_y by
a constant, in rows without a scale.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxops._checks.dtypes import accumulation_dtype
from jaxops._primitive.sharding import laid_out_as
from jaxops.linear_cross_entropy.gradient_products import Adding, Factors, added, rounded_products
from jaxops.linear_cross_entropy.operands import (
    SKIPPED,
    Columns,
    CotangentTerms,
    Needs,
    Rows,
    RowStatistics,
    RowWeights,
)


def over_rows(values: Any, like: jax.Array) -> Any:
    """Broadcasts values of columns, which all rows may share, to the shape and dtype of `like`; None stays None."""
    return None if values is None else jnp.broadcast_to(values.astype(like.dtype), like.shape)


def capped(logits: jax.Array, softcap: float | None) -> jax.Array:
    """Bounds logits by a softcap."""
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def softcap_slope(bounded: jax.Array, softcap: float | None) -> Any:
    """Computes the derivative of the softcap, from what it gives."""
    return 1 if softcap is None else 1 - jnp.square(bounded / softcap)


def is_label(labels: jax.Array, logits: jax.Array) -> jax.Array:
    """Returns where columns of the logits (..., V) are the label of their row."""
    # A comparison of columns fuses and leaves a split vocabulary split; a scatter does neither.
    return jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1) == labels[..., None]


def targets_of(rows: Rows, columns: Columns) -> jax.Array | None:
    """Returns the weights t of the columns, for each row (..., V) or for all (V,); None without."""
    return columns.class_targets if rows.probabilities is None else rows.probabilities


def target_total(rows: Rows, columns: Columns, like: jax.Array) -> jax.Array | None:
    """Computes the sum T of each row's weights of the columns, in the shape and dtype of `like`; None without."""
    targets = targets_of(rows, columns)
    return None if targets is None else over_rows(jnp.sum(targets.astype(like.dtype), axis=-1), like)


class RowSums(NamedTuple):
    """The sums behind `RowStatistics`, over some of the columns; sums over disjoint columns can be merged.

    Attributes:
      max_logit: m, 0 if no logit is finite; in `prior_shift`, the shift in its place.
      less_one: sum exp(z - m) - 1, which is -1 if no logit is finite. Beside the 1 of the maximum, small sums of
        further tiles or devices would be lost, and with them the loss of a confident row.
      label_logit: z[label] - m; 0 if the label is not among these columns.
      has_label: 1 if it is, else 0.
      target_logit: sum t (z - m).
      target_total: sum t.
      weighted_logit: sum exp(z - m) (z - m), a metric.
      prediction: argmax z, a metric.
    """

    max_logit: jax.Array
    less_one: jax.Array
    label_logit: jax.Array | None = None
    has_label: jax.Array | None = None
    target_logit: jax.Array | None = None
    target_total: jax.Array | None = None
    weighted_logit: jax.Array | None = None
    prediction: jax.Array | None = None

    @property
    def sum_exp(self) -> jax.Array:
        """The sum of exp(z - m); 0 if no logit is finite."""
        return 1 + self.less_one

    @property
    def divisor(self) -> jax.Array:
        """The same, but 1 if no logit is finite: then all exponentials are 0."""
        return jnp.where(self.sum_exp == 0, jnp.ones_like(self.less_one), self.sum_exp)

    @property
    def statistics(self) -> RowStatistics:
        """The statistics of rows that consist of these columns alone."""
        mean_logit = None if self.weighted_logit is None else self.weighted_logit / self.divisor
        log_sum_exp, target_loss = jnp.log1p(self.less_one), None
        # Differences are relative to the row's maximum, so a large common offset of the logits costs no digits.
        if self.target_logit is not None and self.target_total is not None:
            target_loss = self.target_total * log_sum_exp - self.target_logit
        return RowStatistics(self.max_logit, log_sum_exp, self.label_logit, target_loss, mean_logit, self.prediction)


def own_statistics(sums: RowSums, rows: Rows, metrics: bool) -> RowStatistics:
    """Computes statistics relative to the log sum exp, as different m are taken; without metrics, 0 if `SKIPPED`."""
    max_logit, lse, label_logit, target_loss, mean_logit, prediction = sums.statistics
    if label_logit is not None and sums.has_label is not None:
        label_logit = jnp.where(sums.has_label.astype(bool), label_logit - lse, 0)
    mean_logit = None if mean_logit is None else mean_logit - lse
    found = RowStatistics(max_logit + lse, jnp.zeros_like(lse), label_logit, target_loss, mean_logit, prediction)
    is_skipped = not metrics and rows.labels is not None and rows.labels == SKIPPED
    return jax.tree.map(lambda x: jnp.where(is_skipped, 0, x), found)


def loss_terms(rows: RowStatistics) -> RowWeights:
    """Computes the terms of a row's loss before they are weighted."""
    by_label = None if rows.label_logit is None else rows.log_sum_exp - rows.label_logit
    return RowWeights(by_label, rows.target_loss, jnp.square(rows.max_logit + rows.log_sum_exp), rows.log_sum_exp)


def row_losses(statistics: RowStatistics, weights: RowWeights) -> jax.Array:
    """Computes the loss of each row from the statistics of its logits."""
    pairs = zip(weights, loss_terms(statistics), strict=True)
    return functools.reduce(jnp.add, (a * b for a, b in pairs if a is not None and b is not None))


def softmax_coefficient(weights: RowWeights, sums: RowSums) -> jax.Array:
    """Computes a + b T + 2 q lse + r, the coefficient of softmax(z) in the cotangent of the logits of summed losses."""
    coefficient = jnp.zeros_like(sums.max_logit) if weights.label is None else weights.label
    if weights.target is not None and sums.target_total is not None:
        coefficient = coefficient + weights.target * sums.target_total
    if weights.square is not None:
        coefficient = coefficient + 2 * weights.square * (sums.max_logit + sums.statistics.log_sum_exp)
    return coefficient if weights.log_sum_exp is None else coefficient + weights.log_sum_exp


def cotangent_terms(weights: RowWeights, sums: RowSums) -> CotangentTerms:
    """Computes the cotangent of the logits of rows whose weighted losses are summed.

    Divided by the sum itself, an exponential keeps the digits that exp(z - m - l) loses to the size of l, which show
    where targets nearly cancel it.
    """
    softmax, shift = softmax_coefficient(weights, sums) / sums.divisor, sums.statistics.log_sum_exp
    label, target = (None if weight is None else -weight for weight in (weights.label, weights.target))
    return CotangentTerms(softmax, sums.max_logit, jnp.zeros_like(softmax), label, target, target_shift=shift)


def statistics_terms(
    cotangents: RowStatistics, statistics: RowStatistics, rows: Rows, columns: Columns
) -> CotangentTerms:
    """Computes the cotangent of the logits of rows whose statistics have these cotangents."""
    # A row without a finite logit has no probabilities: exp(-inf - 0) = 0.
    log_sum_exp, target = finite(statistics.log_sum_exp), None
    softmax, slope = cotangents.log_sum_exp, cotangents.mean_logit
    if slope is not None and statistics.mean_logit is not None:
        softmax = softmax + slope * (1 - statistics.mean_logit)
    total = target_total(rows, columns, softmax)
    if total is not None and cotangents.target_loss is not None:
        softmax, target = softmax + total * cotangents.target_loss, -cotangents.target_loss
    return CotangentTerms(softmax, statistics.max_logit, log_sum_exp, cotangents.label_logit, target, slope)


def with_scale(
    of_rows: Rows, cotangents: RowStatistics, statistics: RowStatistics, rows: Rows, columns: Columns
) -> Rows:
    """Completes the gradient of the scale that `Logits.gradients` computes, given the cotangents of the statistics.

    The maximum is added apart, times the known sum of the logits' cotangent: if that is zero, a large common offset of
    the logits costs no digits.
    """
    if of_rows.scale is None:
        return of_rows
    total, label = cotangents.log_sum_exp, cotangents.label_logit
    if cotangents.mean_logit is not None:
        total = total + cotangents.mean_logit
    if label is not None and rows.labels is not None:
        is_column = (rows.labels >= 0) & (rows.labels < columns.weight.shape[0])
        total = total + is_column.astype(label.dtype) * label
    return of_rows._replace(scale=(of_rows.scale + statistics.max_logit * total) / jnp.asarray(rows.scale))


class Logits(NamedTuple):
    """The logits (..., V) of rows, and what they are made of.

    Attributes:
      rows: with x in the weight's dtype.
      columns: what each column has.
      softcap: the bound of the logits.
      bounded: x weight^T + bias, bounded: the logits before scales and margins.
    """

    rows: Rows
    columns: Columns
    softcap: float | None
    bounded: jax.Array

    @classmethod
    def of(cls, rows: Rows, columns: Columns, softcap: float | None) -> "Logits":
        """Computes the logits, in the dtype of losses; x is rounded to that of the weight."""
        weight, x = columns.weight, rows.x.astype(columns.weight.dtype)
        bounded = jnp.einsum("...h,vh->...v", x, weight, preferred_element_type=accumulation_dtype(weight.dtype))
        if columns.bias is not None:
            bounded = bounded + over_rows(columns.bias, bounded)
        return cls(rows._replace(x=x), columns, softcap, capped(bounded, softcap))

    @property
    def scaled(self) -> jax.Array:
        """The logits with scales and margins."""
        logits, rows = self.bounded, self.rows
        if rows.scale is not None:
            # A forbidden column stays one; in forward mode, the scale's tangent times -inf would be NaN.
            logits = jnp.where(logits == -jnp.inf, logits, rows.scale[..., None] * logits)
        if rows.margin is not None and rows.labels is not None:
            logits = logits - jnp.where(is_label(rows.labels, logits), rows.margin[..., None], 0)
        return logits

    def sums(self, *, metrics: bool, fused: bool = False) -> RowSums:
        """Computes the sums of rows; `metrics` asks for the last two.

        With `fused`, columns are compared with the label's and the maximum's. A TPU does so while it computes logits;
        a gather and an argmax take it several times as long. CPUs pass over stored logits for each sum.
        """
        rows, columns, logits = self.rows, self.columns, self.scaled
        # 0 if all logits are -inf, because z - m would be NaN.
        largest = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
        maximum = finite(largest)
        shifted = logits - maximum[..., None]
        exp = jnp.exp(shifted)
        sums = RowSums(maximum, jnp.sum(exp, axis=-1) - 1)
        if rows.labels is not None:
            count = logits.shape[-1]
            # Picked before the maximum is subtracted: with two uses, the difference would be one more array of logits.
            if fused:
                picked = jnp.sum(jnp.where(is_label(rows.labels, logits), logits, 0), axis=-1) - maximum
            else:
                at = jnp.clip(rows.labels, 0, count - 1)[..., None]
                picked = jnp.take_along_axis(logits, at, axis=-1)[..., 0] - maximum
            has_label = (rows.labels >= 0) & (rows.labels < count)
            label_logit = jnp.where(has_label, picked, jnp.zeros_like(picked))
            sums = sums._replace(label_logit=label_logit, has_label=has_label.astype(picked.dtype))
        targets = over_rows(targets_of(rows, columns), shifted)
        if targets is not None:
            total = target_total(rows, columns, maximum)
            sums = sums._replace(target_logit=jnp.sum(targets * shifted, axis=-1), target_total=total)
        if metrics:
            weighted = jnp.sum(exp * finite(shifted), axis=-1)
            if fused:
                is_largest = (logits == largest[..., None]) | jnp.isnan(logits)
                at = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
                prediction = jnp.min(jnp.where(is_largest, at, logits.shape[-1] - 1), axis=-1)
            else:
                prediction = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            sums = sums._replace(weighted_logit=weighted, prediction=prediction)
        return sums

    def gradients(
        self, terms: CotangentTerms, needs: Needs, sums: Columns, add: Adding = added
    ) -> tuple[Rows, Columns]:
        """Computes the gradients of rows, and adds those of columns to their sums, from the cotangent of the logits.

        The gradient of the scale is the sum over columns of the logits' cotangent times (logits - maximum), without the
        rest that is derived above. `add` adds the gradient of the weight.

        The cotangent is rounded to the weight's dtype before the matrix products, as in the documented operators, so
        that 16-bit inputs run on 16-bit matrix units. The sum for the bias is taken before.
        """
        rows, columns, logits = self.rows, self.columns, self.scaled
        batch, shifted = tuple(range(rows.x.ndim - 1)), logits - terms.maximum[..., None]
        cotangent = _cotangent(terms, rows, columns, shifted)
        of_scale = jnp.sum(cotangent * finite(shifted), axis=-1) if needs.scale else None
        if rows.scale is not None:
            cotangent = rows.scale[..., None] * cotangent
        cotangent = softcap_slope(self.bounded, self.softcap) * cotangent
        bound = functools.partial(_cotangent_bound, terms, rows, columns)
        factors = Factors(cotangent, rows.x, columns.weight if needs.x else None, sums.weight)
        x_grad, weight_sum = rounded_products(factors, bound, add)
        of_rows, sums = Rows(x_grad, scale=of_scale), sums._replace(weight=weight_sum)
        if sums.bias is not None:
            sums = sums._replace(bias=sums.bias + jnp.sum(cotangent, axis=batch))
        if terms.target is not None and (needs.probabilities or sums.class_targets is not None):
            log_sum_exp = terms.log_sum_exp if terms.target_shift is None else terms.target_shift
            of_targets = terms.target[..., None] * (shifted - log_sum_exp[..., None])
            if sums.class_targets is not None:
                sums = sums._replace(class_targets=sums.class_targets + jnp.sum(of_targets, axis=batch))
            if needs.probabilities:
                of_rows = of_rows._replace(probabilities=of_targets)
        return of_rows, sums


def _cotangent(terms: CotangentTerms, rows: Rows, columns: Columns, shifted: jax.Array) -> jax.Array:
    factor = terms.softmax[..., None]
    if terms.slope is not None:
        factor = factor + terms.slope[..., None] * finite(shifted)
    cotangent = factor * jnp.exp(shifted - terms.log_sum_exp[..., None])
    if terms.label is not None and rows.labels is not None:
        at_label = jnp.where(is_label(rows.labels, shifted), terms.label[..., None], jnp.zeros_like(shifted))
        cotangent = cotangent + at_label
    targets = over_rows(targets_of(rows, columns), shifted)
    return cotangent if terms.target is None or targets is None else cotangent + terms.target[..., None] * targets


def _cotangent_bound(terms: CotangentTerms, rows: Rows, columns: Columns) -> jax.Array:
    """Returns an upper bound for the cotangent of each row of logits, within a small factor."""
    # exp(-d) d is below 1, so the slope itself bounds its term.
    parts = (terms.softmax, terms.slope, terms.label)
    bound = functools.reduce(jnp.add, (jnp.abs(part) for part in parts if part is not None))
    targets = targets_of(rows, columns)
    if terms.target is not None and targets is not None:
        bound = bound + jnp.abs(terms.target) * jnp.max(jnp.abs(targets), axis=-1).astype(bound.dtype)
    return bound if rows.scale is None else jnp.abs(rows.scale) * bound


def finite(x: jax.Array) -> jax.Array:
    """Returns `x` with 0 for -inf: a column of probability 0 has no part in a mean, and a row of these no maximum."""
    return jnp.where(x == -jnp.inf, jnp.zeros_like(x), x)


def zero_unless(live: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the rows of x (..., H) that are live, and zeros for the others."""
    is_live = live[..., None]
    if is_live.shape == x.shape:  # a single feature: nothing is broadcast, so an explicit mesh wants one layout
        is_live = laid_out_as(is_live, jax.typeof(x).sharding)
    return jnp.where(is_live, x, jnp.zeros_like(x))


def skipped_as_zeros(rows: Rows) -> Rows:
    """Returns the rows with zeros for the x of those that are `SKIPPED`.

    It may hold NaN, and a cotangent of 0 times NaN would be NaN in the gradient of the weight.
    """
    return rows if rows.labels is None else rows._replace(x=zero_unless(rows.labels != SKIPPED, rows.x))
