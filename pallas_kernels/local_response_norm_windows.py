"""What the kernels of local response normalization share: the windows, and what no dialect takes."""

from typing import Any

from pallas_kernels import whole_images


def reach(n: int, channels: int) -> tuple[int, int]:
    """How many channels a window of n holds before and after its centre, of as many as there are."""
    before = (n - 1) // 2
    return min(before, channels - 1), min(n - 1 - before, channels - 1)


def refusal(x: Any, *, alpha: float, k: float) -> str | None:
    """Why no kernel normalizes x, seen as (..., c, d, h, w), with these attributes; None if nothing is in its way."""
    if alpha < 0 or k <= 0:
        return f"the kernels take logarithms, of what alpha {alpha} and k {k} may let be negative or 0"
    return whole_images.refusal(x)
