"""The pattern of max-pooling gradients that search every window again for its maximum."""

from collections.abc import Iterator

from jaxops._checks.layouts import IMAGES
from lowering.patterns import Finding, Graph, Operation, Pattern, describe

# As on an NVIDIA GPU, the least: XLA's CPU code keeps 16 and more. Its TPU code keeps nothing.
SAVED_BYTES_PER_ELEMENT = 2


def _find(graph: Graph) -> Iterator[Finding]:
    """Finds XLA's select-and-scatter, and its transpose in forward mode; those of minima are left alone."""
    for operation in graph.named("select_and_scatter_add", "select_and_gather_add"):
        if str(operation.params["select_prim"]) == "ge" and _can_pool(operation):
            pooled = operation.inputs[1]
            saved = SAVED_BYTES_PER_ELEMENT * pooled.size if isinstance(pooled.size, int) else None
            detail = f"the gradient of a max pooling of {describe(pooled)} by {operation.name}"
            yield Finding(operation, detail, saved, arguments=_layout(operation))


def _layout(operation: Operation) -> str:
    """Returns the layout that a call must name, as its argument; empty where the windows do not say."""
    sizes = operation.params["window_dimensions"]
    axes = [axis for axis, size in enumerate(sizes) if size != 1]
    fits = [name for name in IMAGES if len(name) == len(sizes) and axes and {name[axis] for axis in axes} <= {*"DHW"}]
    return f'layout="{fits[0]}"' if len(fits) == 1 else ""


def _can_pool(operation: Operation) -> bool:
    """Tells whether the windows are those of images or volumes, without holes, and none lies in padding alone."""
    params = operation.params
    along = [*zip(params["window_dimensions"], params["window_strides"], params["padding"], strict=True)]
    axes = [axis for axis, numbers in enumerate(along) if numbers != (1, 1, (0, 0))]
    dilations = (*params.get("base_dilation", ()), *params.get("window_dilation", ()))
    fits = all(0 <= low < window and 0 <= high < window for window, _, (low, high) in along)
    return fits and all(step == 1 for step in dilations) and (not axes or axes[-1] - axes[0] < 3)


SELECT_AND_SCATTER = Pattern(
    "gradient of a max pooling by select-and-scatter", "jaxops.max_pool", _find, platforms=frozenset({"cpu", "cuda"})
)
