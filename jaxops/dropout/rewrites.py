"""Dropout by a random number for each element. The operator draws other bits, so its rewrite has to be asked for."""

import functools
from collections.abc import Iterator
from typing import Any

import jax

from jaxops.dropout.api import dropout
from jaxops.dropout.masks import Dropout, uses_of_all
from lowering.rewriting.graph import Level, Value, described
from lowering.rewriting.ordering import Step, needed
from lowering.rewriting.rules import Found, Missed, Rule, Suggestion

# XLA's CPU code keeps this much more per element. Its compilers for TPUs and NVIDIA GPUs report that they keep nothing.
_SAVED_BYTES_PER_ELEMENT = 6
_REMARK = "with other random bits"
_AGAIN = "a checkpoint draws random numbers again for a gradient: rewrite the function before it is differentiated"


def _find(level: Level, steps: tuple[Step, ...]) -> Iterator[Found | Missed]:
    wanted = needed(level, steps)
    read_elsewhere = {*level.results, *(value for step in steps for value in step.inputs)}
    draws = [bits for bits in level.named("random_bits") if bits in wanted]
    for bits, uses in uses_of_all(draws, read_elsewhere, wanted.__contains__):
        if uses.node is None:
            continue
        detail = f"dropout of {described(uses.node.outputs[0])}"
        key, drawn = bits.inputs[0], bits.outputs[0]
        reason = uses.reason or (_AGAIN if level.draws_again() else "")
        if key.shape and any(one.y.shape != drawn.shape for one in uses.dropouts):
            reason = reason or "each of several keys draws a mask that is reshaped"
        if reason:
            yield Missed(uses.node, detail, reason)
        else:
            saved = _SAVED_BYTES_PER_ELEMENT * uses.node.outputs[0].size
            yield Found(uses.node, detail, saved, tuple(_step(key, one) for one in uses.dropouts))


def _step(key: Value, one: Dropout) -> Step:
    def run(key: Any, x: Any) -> Any:
        drop = functools.partial(dropout, rate=1 - one.kept_rate)
        for _ in key.shape:  # each key draws for a part of x, as under vmap
            drop = jax.vmap(drop)
        return (drop(key, x).astype(one.y.dtype),)

    return Step((key, one.x), (one.y,), run)


def _suggest(level: Level) -> Iterator[Suggestion]:
    for _, uses in uses_of_all(level.named("random_bits"), level.results):
        if uses.node is not None and not uses.reason:
            (x,) = uses.node.outputs
            detail = f"dropout of {described(x)} by a random number for each element"
            yield Suggestion(uses.node, detail, _SAVED_BYTES_PER_ELEMENT * x.symbolic_size, remark=_REMARK)


DROPOUT_MASKS = Rule(
    "dropout",
    # Calls that hold one of these are inlined: `jnp.where` is a call of its own.
    frozenset({"random_bits", "select_n"}),
    _find,
    asked=True,
    remark=_REMARK,
    suggest=_suggest,
    replacement="jaxops.dropout",
    platforms=frozenset({"cpu"}),
)
