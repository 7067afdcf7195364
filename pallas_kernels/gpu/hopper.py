"""Parts that kernels for NVIDIA GPUs from Hopper on have in common. Their thread blocks are one warpgroup, or a few.

Grids have a single axis. CUDA counts up to 2**31 - 1 thread blocks along x, but only 65535 along y and z; a launch
beyond that ends the process. So kernels whose thread blocks form a table number them, and divide to find the place.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

WARPGROUP = 128  # threads, so one access of a warpgroup touches at least as many elements
VECTOR = 4  # elements of one access of a thread: 16 bytes of float32, the most that an instruction moves
SHARED_BYTES = 227 * 2**10  # that one thread block may have
# Offsets are of 32 bits. That of an access is computed before it is moved back into the array, by an access at most.
MAX_ELEMENTS = 2**31 - 2**11
# Of the later chips, those of 12 have half of the shared memory, and nothing was compiled for any of them.
_MAJOR_CAPABILITIES = (9, 10)
DTYPES = ("float32", "bfloat16", "float16")


def refusal(hardware: Any, **operands: Any) -> str | None:
    """Says why a kernel cannot run on a chip with these operands: another GPU, another dtype, or too many elements."""
    if hardware.compute_capability is not None and hardware.compute_capability[0] not in _MAJOR_CAPABILITIES:
        major, minor = hardware.compute_capability
        return f"the kernel needs compute capability 9 or 10; {hardware.label} has {major}.{minor}"
    for name, operand in operands.items():
        dtype = jnp.dtype(operand.dtype).name
        if dtype not in DTYPES:
            return f"the kernel takes {', '.join(DTYPES)}; {name} is {dtype}"
        if math.prod(operand.shape) > MAX_ELEMENTS:
            return f"the kernel's 32-bit offsets reach {MAX_ELEMENTS} elements; {name} has {math.prod(operand.shape)}"
    return None


def grid(*extents: int) -> dict[str, Any]:
    """Returns the launch's grid for a table of thread blocks of these extents; the last one varies fastest."""
    return {"grid": (math.prod(extents),), "grid_names": ("block",)}


def place(extents: Sequence[int]) -> list[jax.Array]:
    """Finds the place of a thread block in the table of `grid`."""
    index = lax.axis_index("block")
    found = []
    for extent in reversed(extents[1:]):
        found.append(lax.rem(index, jnp.int32(extent)))
        index = lax.div(index, jnp.int32(extent))
    return [index, *reversed(found)]


def fold(
    first: int,
    last: int,
    ahead: int,
    load: Callable[[Any], Any],
    use: Callable[[Any, Any, Any], Any],
    carry: Any,
) -> Any:
    """Runs `carry = use(step, load(step), carry)` for steps from `first` to `last`, with `ahead` loads before a use.

    A thread block that waited for each access would reach about half of the bandwidth.
    """

    def group(start: Any, size: int, carry: Any) -> Any:
        loaded = [load(start + position) for position in range(size)]
        for position, values in enumerate(loaded):
            carry = use(start + position, values, carry)
        return carry

    groups, rest = divmod(last - first, ahead)
    carry = (
        lax.fori_loop(0, groups, lambda i, carry: group(first + i * ahead, ahead, carry), carry) if groups else carry
    )
    return group(last - rest, rest, carry)
