"""The rewrite of logits that are read only through row statistics."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._primitive.sharding import laid_out_as
from jaxops.linear_cross_entropy import row_chunks
from jaxops.linear_cross_entropy.patterns import logits_bytes_saved
from jaxops.linear_cross_entropy.rewriting.head import Head, Statistics, heads_of
from jaxops.linear_cross_entropy.rewriting.maxima import cancels
from jaxops.linear_cross_entropy.rewriting.reading import Reading
from jaxops.linear_cross_entropy.rewriting.rows import Row
from jaxops.linear_cross_entropy.rewriting.sinks import SINKS, reduced
from jaxops.linear_cross_entropy.rewriting.totals import Asked
from lowering.rewriting.graph import Level, Node
from lowering.rewriting.rules import Found, Missed, Refusal, Rule, described
from lowering.rewriting.schedule import Step, needed


class _Unlike(Exception):
    """A matrix product whose result is no logits of a cross entropy."""


def _find(level: Level, steps: tuple[Step, ...]) -> Iterator[Found | Missed]:
    taken = list(steps)
    for node in level.named("dot_general"):
        if node.outputs[0].size <= row_chunks.SMALL_LOGITS or node not in needed(level, taken):
            continue
        refusal = None
        for head, axis in heads_of(node):
            saved = logits_bytes_saved(node, head.classes)
            try:
                found = _statistics_of(level, taken, head, axis) if saved != 0 else ()
            except _Unlike:
                continue
            except Refusal as error:
                refusal = refusal or str(error)
                continue
            if found:
                taken += found
                yield Found(node, f"logits {described(node.outputs[0])}, read by row statistics", saved or 0, found)
                break
        else:
            if refusal is not None:
                yield Missed(node, f"logits {described(node.outputs[0])}", refusal)


def _statistics_of(level: Level, taken: list[Step], head: Head, axis: int) -> tuple[Step, ...]:
    """The steps that replace all readers of these logits."""
    alike = [node for node in level.named(head.node.name) if _is_alike(node, head.node)]
    reading, asked = Reading(head, axis, alike), Asked(head.classes, head.dtype)
    wanted = needed(level, taken)
    sinks: list[Node] = []
    others: dict[Node, str] = {}
    for node in level.nodes:
        if any(x in reading.axes for x in node.inputs) and not reading.follow(node) and node in wanted:
            if node.name in SINKS:
                sinks.append(node)
            else:
                others[node] = f"the logits are also read by {node.name} on {node.source}"
    rows: dict[Node, Row] = {}
    for _ in range(2):  # The first time collects what is asked for, on which the answers depend.
        for node in sinks:
            try:
                rows[node] = reduced(node, reading, asked)
            except Refusal as error:
                others[node] = str(error)
    used = [one for one in asked.of_heads.values() if one.scale is not None]
    if not (used and asked.picks_by_label):
        if not (used or asked.picks_by_label) or not others:
            raise _Unlike
        raise Refusal(" and ".join(dict.fromkeys(others.values())))
    if len(asked.of_heads) > 1:
        raise Refusal("the logits are read in two ways, such as with and without a bias, or of other rows")
    steps = (_step(used[0]), *(_exit(node, row) for node, row in rows.items()))
    if needed(level, [*taken, *steps]) & set(alike):
        raise Refusal(_escape(level, reading, [*taken, *steps], others))
    for node in sinks:
        if node.name == "reduce_max" and not cancels(level, node.outputs[0]):
            raise Refusal(f"the maximum of the logits is itself used and differentiated, from {node.source} on")
    return steps


def _is_alike(node: Node, other: Node) -> bool:
    """Whether two nodes compute the same, which XLA merges into one."""
    same = [a is b or (a.number is not None and a.number == b.number) for a, b in zip(node.inputs, other.inputs)]
    return node is other or (all(same) and str(node.params) == str(other.params))


def _escape(level: Level, reading: Reading, steps: list[Step], others: dict[Node, str]) -> str:
    """Why logits are still needed."""
    if any(value in reading.axes for value in level.results):
        return "the logits, or as many numbers computed from them, are returned"
    wanted = needed(level, steps)
    reasons = [reason for node, reason in others.items() if node in wanted]
    return " and ".join(dict.fromkeys(reasons)) or "the logits are used elsewhere"


def _step(statistics: Statistics) -> Step:
    operands = statistics.operands()

    def run(*arrays: Any) -> Any:
        return statistics.run(dict(zip(operands, arrays, strict=True)).__getitem__)

    return Step(operands, statistics.answers(), run)


def _exit(node: Node, row: Row) -> Step:
    values = tuple(row.values)
    aval = node.outputs[0].aval

    def run(*arrays: Any) -> Any:
        array = jnp.asarray(row.compute(dict(zip(values, arrays, strict=True)).__getitem__))
        array = array.astype(aval.dtype)
        array = jnp.broadcast_to(array, aval.shape) if array.ndim == 0 else jax.lax.reshape(array, aval.shape)
        return (laid_out_as(array, aval.sharding),)

    return Step(values, node.outputs, run)


CROSS_ENTROPY = Rule("cross_entropy", _find, lambda: row_chunks.SMALL_LOGITS)
