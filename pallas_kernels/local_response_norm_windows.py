"""Windows that the kernels of local response normalization share, and what none of them supports."""

from typing import Any

from pallas_kernels import whole_images


def reach(n: int, channels: int) -> tuple[int, int]:
    """Counts the channels in a window of n before and after its centre, at most all of them."""
    before = (n - 1) // 2
    return min(before, channels - 1), min(n - 1 - before, channels - 1)


def refusal(x: Any, *, alpha: float, k: float) -> str | None:
    """Says why no kernel normalizes x (..., c, d, h, w) with these attributes; None if kernels may."""
    if alpha < 0 or k <= 0:
        return f"the kernels take logarithms, of what alpha {alpha} and k {k} may let be negative or 0"
    return whole_images.refusal(x)
