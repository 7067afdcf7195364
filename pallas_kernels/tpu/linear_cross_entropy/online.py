"""Statistics of rows of logits after some of their classes, on TPU: more are folded in, sublanes are merged."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.tpu.linear_cross_entropy.tiles import SUBLANES, masked

_LOG2_E = math.log2(math.e)
_LEAST_SCALE = float(jnp.finfo(jnp.float32).tiny)


class OnlineStatistics(NamedTuple):
    """Statistics of each row (R,) after some classes, or refs to them; m is the maximum, or 0 if that is -inf.

    Inside the kernel each sublane has a row of it, for its classes, and a seventh vector: the sum of t so far. There z
    is not scaled yet: exponents are, which costs nothing, as they have a factor anyway to become those of two.

    Attributes:
      maximum: max z.
      less_one: sum exp(z - m) - 1. Added to the 1 of the maximum, the small terms of a confident row would be lost.
      label_logit: z[label] - m, or 0 if the label is not a class; inside the kernel without - m.
      target_logit: sum t (z - m).
      weighted_total: sum exp(z - m) (z - m).
      prediction: int32, the first argmax z; inside the kernel float32, which holds these integers exactly.
    """

    maximum: jax.Array
    less_one: jax.Array
    label_logit: jax.Array
    target_logit: jax.Array
    weighted_total: jax.Array
    prediction: jax.Array


class Rows(NamedTuple):
    """Refs to some rows inside the kernel, which lie along lanes.

    Attributes:
      labels: (1, R).
      scale: (1, R), or None for 1.
      known: what each sublane knows of its classes.
      target_total: the sum of t so far, of each sublane as well.
    """

    labels: Any
    scale: Any
    known: OnlineStatistics
    target_total: Any

    def at(self, lanes: slice) -> "Rows":
        """Returns some of the rows."""
        known: list[Any] = [ref.at[:, lanes] for ref in self.known]
        scale = None if self.scale is None else self.scale.at[:, lanes]
        return Rows(self.labels.at[:, lanes], scale, OnlineStatistics(*known), self.target_total.at[:, lanes])

    def start(self, classes: int, is_live: Any) -> None:
        """Stores what is known before the first class. A skipped block ends as it starts: all of its logits are 0."""
        known = self.known
        known.maximum[...] = jnp.full(known.maximum.shape, jnp.where(is_live, -jnp.inf, 0.0), jnp.float32)
        less_one = jnp.where(is_live, -1.0, classes / SUBLANES - 1)
        known.less_one[...] = jnp.full(known.less_one.shape, less_one, jnp.float32)
        for ref in (*known[2:], self.target_total):
            ref[...] = jnp.zeros(ref.shape, ref.dtype)

    def fold(self, logits: Any, target: Any, first_class: Any, valid_classes: Any, *, metrics: bool) -> None:
        """Folds in logits (classes, R) with weights t (classes, 1) or None, of classes that follow one another."""
        known, class_index = self.known, jax.lax.broadcasted_iota(jnp.int32, logits.shape, 0)
        logits = _by_sublane(logits)
        known.label_logit[...] += _label_logit(logits, self.labels[...] - first_class)
        chunk_max, old = jnp.max(logits, axis=0), known.maximum[...]
        new = jnp.maximum(old, chunk_max)
        shift, shifted = finite(old) - finite(new), logits - finite(new)[None]
        correction, exponentials = self._exponential(old - finite(new)), self._exponential(shifted)
        if target is not None:
            products = masked(target * shifted.reshape(class_index.shape), 0, valid_classes)
            # A new maximum moves sum t (z - m) by the sum of t so far times the change of m.
            known.target_logit[...] += self.target_total[...] * shift + jnp.sum(_by_sublane(products), axis=0)
            self.target_total[...] += jnp.sum(_by_sublane(target), axis=0)
        if metrics:
            products = jnp.sum(exponentials * finite(shifted), axis=0)
            weighted_total = known.weighted_total[...] + (1 + known.less_one[...]) * shift
            known.weighted_total[...] = weighted_total * correction + products
            # Small integers, which float32 holds exactly: not every TPU has a minimum of integers.
            class_index = _by_sublane(class_index.astype(jnp.float32))
            first = jnp.min(jnp.where(logits == chunk_max[None], class_index, jnp.inf), axis=0)
            first += jnp.asarray(first_class, jnp.float32)
            known.prediction[...] = jnp.where(chunk_max > old, first, known.prediction[...])
        # Without a new maximum the correction is 1, and a small sum keeps its digits.
        known.less_one[...] = known.less_one[...] * correction + (jnp.sum(exponentials, axis=0) + (correction - 1))
        known.maximum[...] = new

    def merge(self, results: OnlineStatistics, *, weighted: bool, metrics: bool) -> None:
        """Stores what is known about the rows in `results`, from what each sublane knows of its classes."""
        maximum, less_one, scale = self.known.maximum[...], self.known.less_one[...], self._scale()
        row_max = jnp.max(maximum, axis=0, keepdims=True)
        shift, correction = finite(maximum) - finite(row_max), self._exponential(maximum - finite(row_max))

        def store(ref: Any, terms: Any, scale: Any = scale) -> None:
            ref[...] = scale * jnp.sum(terms, axis=0, keepdims=True)

        results.maximum[...] = scale * row_max
        # One of the sublanes that have the maximum counts without the 1 that this adds.
        sublane = jax.lax.broadcasted_iota(jnp.int32, maximum.shape, 0).astype(jnp.float32)
        first = jnp.min(jnp.where(maximum == row_max, sublane, SUBLANES), axis=0, keepdims=True)
        total = 1 + less_one
        store(results.less_one, jnp.where(sublane == first, less_one, total * correction), 1.0)
        store(results.label_logit, self.known.label_logit[...])
        target_logit, weighted_total = self.known.target_logit[...], self.known.weighted_total[...]
        store(results.target_logit, target_logit + self.target_total[...] * shift if weighted else target_logit)
        store(results.weighted_total, (weighted_total + total * shift) * correction if metrics else weighted_total)
        # Where no sublane has the maximum, it is NaN.
        prediction = jnp.where(maximum == row_max, self.known.prediction[...], jnp.inf)
        prediction = jnp.min(prediction, axis=0, keepdims=True)
        results.prediction[...] = jnp.where(prediction == jnp.inf, 0.0, prediction).astype(jnp.int32)

    def _scale(self) -> Any:
        # A class that is forbidden keeps its logit of -inf, which 0 would turn into NaN.
        return 1.0 if self.scale is None else jnp.maximum(self.scale[...], _LEAST_SCALE)

    def _exponential(self, z: Any) -> Any:
        """Computes exp(scale z)."""
        return jnp.exp2(z * jnp.broadcast_to(_LOG2_E * self._scale(), z.shape))


def _label_logit(logits: Any, labels: Any) -> Any:
    """Picks logits (registers, sublanes, R) at labels (1, R), each in its sublane; 0 in the others.

    A bit of the label chooses between two registers: one operation a register, where comparing, selecting and adding
    would be three.
    """
    sublane, registers = jax.lax.broadcasted_iota(jnp.int32, logits.shape[1:], 0), len(logits)
    for bit in range(registers.bit_length() - 1):
        pairs = logits.reshape(-1, 2, *logits.shape[1:])
        logits = jnp.where((labels & (SUBLANES << bit)) != 0, pairs[:, 1], pairs[:, 0])
    is_label = (labels & ~(SUBLANES * (registers - 1))) == sublane
    return jnp.where(is_label, logits[0], 0.0)


def _by_sublane(columns: Any) -> Any:
    """Reshapes (classes, R) to (registers, sublanes, R)."""
    return columns.reshape(-1, SUBLANES, columns.shape[1])


def finite(logits: Any) -> Any:
    """Puts 0 in place of -inf, whose difference with -inf would be NaN."""
    return jnp.where(logits == -jnp.inf, 0.0, logits)
