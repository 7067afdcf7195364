"""The rewrite of logits that are read only through row statistics."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from jaxops._primitive.sharding import laid_out_as
from jaxops.linear_cross_entropy import chunk_sizes
from jaxops.linear_cross_entropy.rewriting import savings
from jaxops.linear_cross_entropy.rewriting.cone import Cone, passes
from jaxops.linear_cross_entropy.rewriting.head import Head, Readers, heads_of
from jaxops.linear_cross_entropy.rewriting.likeness import (
    dependents,
    has_log_sum_exp,
    is_about,
    is_like_loss,
    read_at_labels,
    read_in_order,
    reduced_sizes,
)
from jaxops.linear_cross_entropy.rewriting.row_reading import returned
from jaxops.linear_cross_entropy.rewriting.row_wise import Part
from jaxops.linear_cross_entropy.rewriting.savings import Saving
from jaxops.linear_cross_entropy.rewriting.suggested import suggest
from jaxops.linear_cross_entropy.rewriting.summed import Sums
from lowering.rewriting.graph import PRODUCTS, RESHAPES, Level, Node, Value, described
from lowering.rewriting.ordering import Step, Task, needed
from lowering.rewriting.report import megabytes
from lowering.rewriting.rules import Found, Missed, RefusalError, Rule


class _UnlikeError(Exception):
    """A matrix product whose result is not the logits of a cross entropy."""


# Tries to replace everything that reads a product, whose result is read in a given way; None if nothing is saved.
_Attempt = Callable[[Level, list[Step], Any], Found | None]


def _find_sums(level: Level, steps: tuple[Step, ...]) -> Iterable[Found | Missed]:
    """Finds losses whose gradients can be computed together with the logits; others are for the next rule."""
    # What a loop keeps for its backward pass is kept for each step: gradients of the weight are too large for that.
    return () if level.keeps_each else _find(level, steps, heads_of, _by_sum)


def _find_cone_sums(level: Level, steps: tuple[Step, ...]) -> Iterable[Found | Missed]:
    """Finds losses of rows that are added up to a number: their gradients can be computed together with the logits."""
    found = () if level.keeps_each else _find(level, steps, _row_axes, functools.partial(_by_cones, to_number=True))
    return (x for x in found if isinstance(x, Found))


def _find_statistics(level: Level, steps: tuple[Step, ...]) -> Iterator[Found | Missed]:
    return _find(level, steps, heads_of, _by_statistics)


def _find_cones(level: Level, steps: tuple[Step, ...]) -> Iterator[Found | Missed]:
    found = _find(level, steps, _row_axes, _by_cones)
    return (x for x in found if isinstance(x, Found) or is_like_loss(x.node))


def _find(
    level: Level, steps: tuple[Step, ...], ways: Callable[[Node], Iterable[Any]], attempt: _Attempt
) -> Iterator[Found | Missed]:
    """Takes the first way to read each product that succeeds, or tells why the first did not."""
    taken = list(steps)
    for node in _products(level):
        if node not in needed(level, taken):
            continue
        found, refusal = None, ""
        for way in ways(node):
            try:
                found = attempt(level, taken, way)
            except _UnlikeError:
                continue
            except RefusalError as error:
                refusal = refusal or str(error)
            if found:
                break
        if found:
            taken += found.steps
            yield found
        elif refusal:
            yield Missed(node, f"logits {described(node.outputs[0])}", refusal)


def _found(node: Node, how: str, saved_bytes: int, steps: Sequence[Step]) -> Found:
    return Found(node, f"logits {described(node.outputs[0])}, {how}", saved_bytes, tuple(steps))


def _saving(head: Head, *, keeps_rows: bool) -> Saving:
    is_transposed, is_cast = _made_of_weight(head.weight)
    # Two transpositions cancel.
    is_transposed ^= head.layout.class_axis != 0
    options = {"keeps_rows": keeps_rows, "is_transposed": is_transposed, "is_cast": is_cast}
    return savings.saving(head.node.outputs[0], head.weight, head.classes, **options)


def _saving_of_cone(node: Node, class_axis: int) -> Saving:
    weight, classes = node.inputs[class_axis != 0], node.outputs[0].shape[class_axis]
    is_cast = _made_of_weight(weight)[1]
    return savings.saving(node.outputs[0], weight, classes, is_transposed=False, is_cast=is_cast, is_cone=True)


def _made_of_weight(weight: Value) -> tuple[bool, bool]:
    """Tells whether a weight is the transpose of an array, and whether it is rounded from a wider one."""
    before, is_transposed, is_cast = weight, False, False
    while before.producer is not None and before.producer.name in ("transpose", "convert_element_type"):
        is_transposed ^= before.producer.name == "transpose"
        before = before.producer.inputs[0]
        is_cast |= before.dtype.itemsize > weight.dtype.itemsize
    return is_transposed, is_cast


def _products(level: Level) -> list[Node]:
    """Lists the large matrix products, the last first, as a loss is behind a model's other layers."""
    nodes = level.named("dot_general", "conv_general_dilated")
    return [node for node in nodes if node.outputs[0].size > chunk_sizes.SIZES.logits][::-1]


def _by_sum(level: Level, taken: list[Step], head: Head) -> Found | None:
    """Returns the step that computes a sum of cross entropies and what else is known with it."""
    saved = _saving(head, keeps_rows=False)
    if not saved.is_worthwhile:
        return None
    try:
        readers = _readers(level, taken, head, is_promised=True)
        if not readers.can_scale_layer():
            return None
        layer, size = (head.x, head.weight), head.node.outputs[0].size
        others = (x for x in readers.inputs if x not in layer and 2 * x.size > size)
        if head.node.name == "dot_general" and not all(map(_is_given, others)):
            # Targets that are computed here, such as another model's probabilities, need not exist as a whole.
            return None
        sums = Sums(level, needed(level, taken), readers)
        # The last such number has the divisor of a mean in its weights, for which float16 lacks the range.
        found = next(sums.steps(taken, first=head.x.dtype == jnp.float16), None)
    except RefusalError as error:
        raise _UnlikeError from error
    return None if found is None else _found(head.node, "read by a sum of cross entropies", saved.saved_bytes, [found])


def _is_given(value: Value) -> bool:
    """Tells whether a value is an argument, or one in another shape or dtype."""
    while value.producer is not None and value.producer.name in RESHAPES | {"transpose", "convert_element_type"}:
        value = value.producer.inputs[0]
    return value.producer is None


def _by_statistics(level: Level, taken: list[Step], head: Head) -> Found | None:
    """Returns the step that computes statistics of rows, and all that reads logits from these."""
    saved = _saving(head, keeps_rows=True)
    if not saved.is_worthwhile:
        return None
    readers = _readers(level, taken, head, is_promised=False)

    def run(*arrays: Any) -> Sequence[Any]:
        given = dict(zip(readers.inputs, arrays, strict=True))
        results = readers.results(given, readers.statistics(given))
        return [laid_out_as(x, value.aval.sharding) for x, value in zip(results, readers.exits, strict=True)]

    step = Step(readers.inputs, readers.exits, run)
    if head.node in needed(level, [*taken, step]):
        raise RefusalError("the logits are used elsewhere")
    return _found(head.node, "read by row statistics", saved.saved_bytes, [step])


def _readers(level: Level, taken: list[Step], head: Head, *, is_promised: bool) -> Readers:
    """Finds all that reads these logits."""
    if not {"exp", "reduce_sum"} <= {node.name for node in dependents(head.node)[0]}:
        raise _UnlikeError
    readers = Readers(level, needed(level, taken), head, is_promised=is_promised)
    if not readers.found.picks_by_label:
        raise _UnlikeError
    return readers


def _features(node: Node) -> int:
    (axes, _), _ = node.params["dimension_numbers"]
    return math.prod(node.inputs[0].shape[axis] for axis in axes)


def _row_axes(node: Node) -> list[tuple[Node, int, int]]:
    """Lists a product's axes that may be split, the longest first, each with that of the classes, which are reduced."""
    if node.name != "dot_general":
        return []
    (contracted, batch), shape = node.params["dimension_numbers"], node.outputs[0].shape
    free = [len(node.inputs[side].shape) - len(contracted[side]) for side in (0, 1)]
    ends = [axis for axis, count in ((len(shape) - 1, free[1]), (0, free[0])) if count and not batch[0]]
    reduced = reduced_sizes(node)
    class_axes = [axis for axis in ends if shape[axis] in reduced]
    class_axes = class_axes or [axis for axis in ends if any(is_about(size, shape[axis]) for size in reduced)]
    longest_first = sorted((axis for axis, size in enumerate(shape) if size > 1), key=lambda axis: -shape[axis])
    return [(node, axis, classes) for classes in class_axes for axis in longest_first if axis != classes]


def _by_cones(level: Level, taken: list[Step], axes: tuple[Node, int, int], *, to_number: bool = False) -> Found | None:
    """Returns steps that compute what depends on logits in chunks of rows, one for each pass over all rows."""
    node, axis, class_axis = axes
    saved, shape, cones = _saving_of_cone(node, class_axis), node.outputs[0].shape, list[Cone]()
    rows = node.outputs[0].size // shape[class_axis]
    chunk_rows = chunk_sizes.rows_of_logits(shape[class_axis], _features(node), 2) or rows
    # With chunks of half of the rows, gradients beside the loss save less than gradients behind it.
    is_coarse = to_number and shape[axis] <= 2 and chunk_rows * shape[axis] < rows
    if is_coarse or not saved.is_worthwhile:
        return None
    split_rows = max(1, chunk_rows * shape[axis] // rows)

    def one_pass(wanted: frozenset[Task]) -> Step:
        cone = Cone(level, wanted, node, axis, shape[class_axis], to_number=to_number)
        if not cones:
            _require_loss(cone, class_axis, to_number)
        whole = [x for x in cone.exits if isinstance(cone.roles[x], Part) and cone.is_wide(x)]
        if not set(whole).isdisjoint(level.results):
            raise RefusalError(returned(level))
        if whole:
            raise RefusalError("as many numbers as there are logits are used as a whole")
        cone.check_users_rules(split_rows)
        cones.append(cone)
        return cone.step(split_rows)

    steps = passes(level, taken, node, one_pass)
    kept = [x for cone in cones for x in cone.kept]
    left = saved._replace(saved_bytes=saved.saved_bytes - sum(x.size * x.dtype.itemsize for x in kept))
    if not left.is_worthwhile:
        reason = "they are combined with arrays of their size that are not computed by rows"
        raise RefusalError(reason, found_at=kept[0].producer)
    how = "in chunks of rows with their gradients" if to_number else "in chunks of rows"
    how += f", {len(steps)} passes over them" if len(steps) > 1 else ""
    return _found(node, how, left.saved_bytes, steps)


def _require_loss(cone: Cone, class_axis: int, to_number: bool) -> None:
    """Raises _UnlikeError unless these are losses of rows, with a number that adds them up if that is asked for."""
    node, are_rows = cone.head, all(cone.is_row(x) or x in cone.samples for x in cone.exits)
    sums = [x for x in cone.all_nodes() if x.name == "reduce_sum" and cone.is_wide(x.inputs[0])]
    shape = node.outputs[0].shape
    adds_classes = any(is_about(x.inputs[0].shape[a], shape[class_axis]) for x in sums for a in x.params["axes"])
    # Attention adds up exponentials as well, but a row of its scores becomes more than a number, and nothing else.
    is_gradient = all(_is_of_gradient(cone, x) for x in cone.exits) and any(map(cone.is_row, cone.exits))
    is_of_rows = has_log_sum_exp(node) and (are_rows or is_gradient)
    if not (adds_classes and (is_of_rows or (cone.has_labels and is_like_loss(node)))):
        raise _UnlikeError
    if to_number and not (cone.number in cone.exits and are_rows):
        # No number has all rows in it, or the function is a gradient itself.
        raise _UnlikeError


def _is_of_gradient(cone: Cone, value: Value) -> bool:
    """Tells whether an exit is a sum over rows, a number of each, or a gradient of what made the rows."""
    is_product = value.producer is not None and value.producer.name == "dot_general"
    return isinstance(cone.roles[value], str) or cone.is_row(value) or is_product


def _overlooked(level: Level) -> Iterator[Missed]:
    """Says of each product whose result is read as logits are why nothing replaces it."""
    for node in level.named("dot_general", "conv_general_dilated"):
        if (why := _why_no_head(node)) and has_log_sum_exp(node):
            yield Missed(node, f"logits {described(node.outputs[0])}", why)
            continue
        heads = heads_of(node)
        is_large = node.outputs[0].size > chunk_sizes.SIZES.logits
        read, ordered = read_at_labels(node), read_in_order(node) if is_large else ""
        if not (heads or ordered or _row_axes(node)) or node.outputs[0].size == 0:
            continue
        is_loss = is_like_loss(node) or has_log_sum_exp(node)
        if not (read or ordered or is_loss):
            continue
        size, found = node.outputs[0].size, _saving(heads[0], keeps_rows=False) if heads else Saving(0, 0)
        if heads and found.is_worthwhile:
            # Nor is a loss that the operator does not have computed in chunks where those save nothing.
            cones = (_saving_of_cone(node, class_axis) for _, _, class_axis in _row_axes(node))
            found = next((one for one in cones if not one.is_worthwhile), found)
        if not is_loss and ordered:
            reason = f"this takes no log sum exp: {ordered} reads whole rows, for which there is no operator"
        elif read:
            reason = f"this takes no log sum exp: it is a loss of {read}, for which there is no operator"
        elif not is_large:
            reason = f"up to {chunk_sizes.SIZES.logits:,} logits are left alone, as they are few"
            reason += _IN_A_LOOP if level.keeps_each else _CALL
        elif not found.is_worthwhile and found.least_bytes < 0:
            reason = "the operator could need more temporaries, for copies or sums of a weight that is so large"
        elif not found.is_worthwhile:
            saved, plain = megabytes(found.saved_bytes), megabytes(found.plain_bytes)
            reason = f"the operator would save less than a fifth of the temporaries, about {saved} of {plain}"
        else:
            reason = "what reads them is not known to be a loss of rows"
        yield Missed(node, f"{size:,} logits {described(node.outputs[0])}", reason)


def _why_no_head(node: Node) -> str:
    """Says why the result of a large product cannot be the logits of one layer; "" if it can."""
    logits = node.outputs[0]
    if not isinstance(logits.symbolic_size, int):
        return "their number is symbolic: jaxops.linear_cross_entropy takes symbolic sizes"
    if logits.size <= chunk_sizes.SIZES.logits:
        return ""
    if node.name == "conv_general_dilated":
        return "" if heads_of(node) else "they come from a convolution that is more than one layer for each position"
    (_, batch) = node.params["dimension_numbers"]
    count = math.prod(logits.shape[: len(batch[0])])
    return f"{count} weights make them: rewrite the function inside of jax.vmap, for one weight" if batch[0] else ""


def _least_size() -> int:
    return chunk_sizes.SIZES.logits


_CALL = "; jaxops.linear_cross_entropy takes any number"
_IN_A_LOOP = (
    "; a gradient around the loop, not one inside of it, keeps those of all steps: then checkpoint its body, or call"
    " jaxops.linear_cross_entropy"
)
_REMARK = "if this takes the gradient of a loss, rewrite the loss itself: that saves more"
_OPERATOR = "jaxops.linear_cross_entropy"
ROW_CONE = Rule("row_cone", PRODUCTS, _find_cones, _least_size, remark=_REMARK, makes_loops=True, replacement=_OPERATOR)
ROW_CONE_SUM = Rule("row_cone_sum", PRODUCTS, _find_cone_sums, _least_size, makes_loops=True, replacement=_OPERATOR)
CROSS_ENTROPY = Rule(
    "cross_entropy",
    PRODUCTS,
    _find_statistics,
    _least_size,
    overlooked=_overlooked,
    suggest=suggest,
    replacement=_OPERATOR,
)
CROSS_ENTROPY_SUM = Rule(
    "cross_entropy_sum",
    PRODUCTS,
    _find_sums,
    _least_size,
    on_tpu="on a TPU up to 2^28 logits exist at a time: less is saved, and in 16 bits more memory may be needed",
    replacement=_OPERATOR,
)
