"""The rewrite of window maxima and their gradients."""

import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from jaxops.pooling.max_pool import MAX_POOL, MAX_POOL_AT, MAX_POOL_BACKWARD
from jaxops.pooling.patterns import SAVED_BYTES_PER_ELEMENT, SELECT_AND_SCATTER
from lowering.rewriting.graph import Level, Node, Value
from lowering.rewriting.rules import Found, Missed, RefusalError, Rule, described
from lowering.rewriting.schedule import Step
from lowering.targets import here

_NAMES = frozenset({"reduce_window_max", "select_and_scatter_add", "select_and_gather_add"})
_SPATIAL_AXES = 3


def _find(level: Level, steps: tuple[Step, ...]) -> Iterator[Found | Missed]:
    for node in level.named(*_NAMES):
        if node.name != "reduce_window_max" and str(node.params["select_prim"]) != "ge":
            continue
        # Of a gradient, the image is the second operand.
        image = node.inputs[node.name != "reduce_window_max"]
        detail = f"the maxima of windows in {described(image)}"
        try:
            step = _step(node, image)
        except RefusalError as refusal:
            yield Missed(node, detail, str(refusal))
            continue
        yield Found(node, detail, SAVED_BYTES_PER_ELEMENT * image.size, (step,))


def _step(node: Node, image: Value) -> Step:
    if here().platform not in (SELECT_AND_SCATTER.platforms or ()):
        raise RefusalError("the compiler for this platform keeps nothing for the gradient")
    attributes, first, last = _windows(node, image)

    def to_volume(x: Any) -> Any:
        """Reshapes to (..., D, H, W, C)."""
        spatial = (*(1 for _ in range(_SPATIAL_AXES - (last - first))), *x.shape[first:last])
        return x.reshape(*x.shape[:first], *spatial, math.prod(x.shape[last:]))

    def run(*arrays: Any) -> Any:
        volumes = map(to_volume, arrays)
        if node.name == "reduce_window_max":
            (y,) = MAX_POOL(*volumes, **attributes, propagate_nan=True)
        else:
            grad, x = volumes
            compute = MAX_POOL_BACKWARD if node.name == "select_and_scatter_add" else MAX_POOL_AT
            (y,) = compute(x, grad, **attributes, propagate_nan=True)
        return (y.reshape(node.outputs[0].shape),)

    return Step(node.inputs, node.outputs, run)


def _windows(node: Node, image: Value) -> tuple[dict[str, Any], int, int]:
    """Returns the operator's attributes, the first axis with windows, and the one behind the last."""
    params = node.params
    if not jnp.issubdtype(image.dtype, jnp.floating) or image.size == 0:
        raise RefusalError("only floating-point images of known size are pooled")
    dilations = (*params.get("base_dilation", ()), *params.get("window_dilation", ()))
    if any(step != 1 for step in dilations):
        raise RefusalError("the windows have holes")
    along = [*zip(params["window_dimensions"], params["window_strides"], params["padding"], strict=True)]
    axes = [axis for axis, (size, stride, sides) in enumerate(along) if (size, stride, tuple(sides)) != (1, 1, (0, 0))]
    first, last = (axes[0], axes[-1] + 1) if axes else (0, 1)
    if last - first > _SPATIAL_AXES:
        raise RefusalError("the windows have more than three axes")
    spatial = along[first:last]
    if any(not 0 <= side < size for size, _, sides in spatial for side in sides):
        raise RefusalError("a window may lie in padding alone")
    if any(image.shape[first + i] + sum(sides) < size for i, (size, _, sides) in enumerate(spatial)):
        raise RefusalError("a window is larger than the image")
    spatial = [*((1, 1, (0, 0)) for _ in range(_SPATIAL_AXES - len(spatial))), *spatial]
    sizes, strides, paddings = zip(*spatial, strict=True)
    pairs = tuple((int(low), int(high)) for low, high in paddings)
    return {"window": tuple(map(int, sizes)), "stride": tuple(map(int, strides)), "padding": pairs}, first, last


WINDOW_MAXIMA = Rule(
    "max_pool",
    _find,
    # Windows are recognised by their primitives, at any size.
    lambda: 2**62,
    primitives=_NAMES,
)
