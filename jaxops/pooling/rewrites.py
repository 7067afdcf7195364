"""Window maxima and their gradients in plain JAX, which searches every window again for its maximum."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from jaxops._checks.layouts import IMAGES
from jaxops.pooling.max_pool import MAX_POOL, MAX_POOL_AT, MAX_POOL_BACKWARD
from lowering.rewriting.graph import Level, Node, Value, described
from lowering.rewriting.ordering import Step
from lowering.rewriting.rules import Found, Missed, RefusalError, Rule, Suggestion
from lowering.targets import here

# XLA's select-and-scatter, and its transpose in forward mode.
_GRADIENTS = frozenset({"select_and_scatter_add", "select_and_gather_add"})
_NAMES = _GRADIENTS | {"reduce_window_max"}
# As on an NVIDIA GPU, the least: XLA's CPU code keeps 16 and more. Its TPU code keeps nothing.
_SAVED_BYTES_PER_ELEMENT = 2
_PLATFORMS = frozenset({"cpu", "cuda"})
_SPATIAL_AXES = 3


def _find(level: Level, steps: tuple[Step, ...]) -> Iterator[Found | Missed]:
    for node, image in _maxima(level):
        detail = f"the maxima of windows in {described(image)}"
        try:
            step = _step(node, image)
        except RefusalError as refusal:
            yield Missed(node, detail, str(refusal))
            continue
        yield Found(node, detail, _SAVED_BYTES_PER_ELEMENT * image.size, (step,))


def _suggest(level: Level) -> Iterator[Suggestion]:
    for node, image in _maxima(level):
        with contextlib.suppress(RefusalError):
            _windows(node)
            if node.name in _GRADIENTS:
                detail = f"the gradient of a max pooling of {described(image)} by {node.name}"
                saved = _SAVED_BYTES_PER_ELEMENT * image.symbolic_size
                yield Suggestion(node, detail, saved, arguments=_layout(node))


def _maxima(level: Level) -> Iterator[tuple[Node, Value]]:
    """Yields the nodes that take maxima in windows or their gradients, with their images; those of minima are left."""
    for node in level.named(*_NAMES):
        if node.name == "reduce_window_max":
            yield node, node.inputs[0]
        elif str(node.params["select_prim"]) == "ge":
            yield node, node.inputs[1]


def _layout(node: Node) -> str:
    """Returns the layout that a call must name, as its argument; empty where the windows do not say."""
    sizes = node.params["window_dimensions"]
    axes = [axis for axis, size in enumerate(sizes) if size != 1]
    fits = [name for name in IMAGES if len(name) == len(sizes) and axes and {name[axis] for axis in axes} <= {*"DHW"}]
    return f'layout="{fits[0]}"' if len(fits) == 1 else ""


def _step(node: Node, image: Value) -> Step:
    if here().platform not in _PLATFORMS:
        raise RefusalError("the compiler for this platform keeps nothing for the gradient")
    if not jnp.issubdtype(image.dtype, jnp.floating) or image.size == 0:
        raise RefusalError("only floating-point images of known size are pooled")
    attributes, first, last = _windows(node)
    along = zip(image.shape, node.params["window_dimensions"], node.params["padding"], strict=True)
    if any(size + sum(sides) < window for size, window, sides in along):
        raise RefusalError("a window is larger than the image")

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


def _windows(node: Node) -> tuple[dict[str, Any], int, int]:
    """Returns the operator's attributes, the first axis with windows, and the one behind the last."""
    params = node.params
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
    spatial = [*((1, 1, (0, 0)) for _ in range(_SPATIAL_AXES - len(spatial))), *spatial]
    sizes, strides, paddings = zip(*spatial, strict=True)
    pairs = tuple((int(low), int(high)) for low, high in paddings)
    return {"window": tuple(map(int, sizes)), "stride": tuple(map(int, strides)), "padding": pairs}, first, last


WINDOW_MAXIMA = Rule("max_pool", _NAMES, _find, suggest=_suggest, replacement="jaxops.max_pool", platforms=_PLATFORMS)
