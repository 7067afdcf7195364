"""Cross-lane units: reductions, permutations, rotations and transpositions, whose results wait to be popped."""

import collections
from collections.abc import Callable
from typing import Any

import numpy as np

from lowering.tpu_core.faults import MachineFaultError
from lowering.tpu_core.vector_unit import on_bfloat16
from lowering.tpu_core.vectors import LANE, LANES, SUBLANES, rows_of_words, whole, words_of_rows


def _reduced(function: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """Returns what reduces float32 over the lanes of each row; all lanes get the result. Halves are joined first."""

    def reduce(x: Any) -> Any:
        x, width = whole(x).view(np.float32), LANES
        while width > 1:
            width //= 2
            x = function(x[:, :width], x[:, width : 2 * width])
        return np.repeat(x, LANES, 1).view(np.uint32)

    return reduce


def _place_of(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """Returns what finds the lane of each row's largest or smallest float32: the first of several."""
    return lambda x: np.repeat(function(whole(x).view(np.float32), 1)[:, None], LANES, 1).astype(np.uint32)


REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    "vadd.xlane.f32": _reduced(np.add),
    "vmax.xlane.f32": _reduced(np.maximum),
    "vmin.xlane.f32": _reduced(np.minimum),
    "vmax.xlane.bf16": on_bfloat16(_reduced(np.maximum)),
    "vmin.xlane.bf16": on_bfloat16(_reduced(np.minimum)),
    "vmax.index.xlane.f32": _place_of(np.argmax),
    "vmin.index.xlane.f32": _place_of(np.argmin),
}


class CrossLaneUnit:
    """One unit.

    Attributes:
      results: what waits to be popped, by what it is popped as: "xlane", "permute" or "trf", each with its name.
    """

    def __init__(self) -> None:
        """Starts idle."""
        self.results: dict[str, collections.deque[Any]] = collections.defaultdict(collections.deque)
        self._pattern: Any = None
        self._transposed: list[Any] = []

    def set_pattern(self, pattern: Any) -> None:
        """Sets the lanes from which `permuted` takes."""
        self._pattern = whole(pattern) % LANES

    def permuted(self, x: Any) -> Any:
        """Takes of each row the lanes that the pattern says."""
        if self._pattern is None:
            raise MachineFaultError("lanes are permuted without a pattern")
        return np.take_along_axis(whole(x), self._pattern, 1)

    def transposed(self, kind: str, x: Any, width: int, bits: int = 32) -> None:
        """Takes more rows of what is to be transposed; `kind` says which are the first and the last.

        Of two matrices, whose vectors come together as a list, the results alternate.
        """
        if "start" in kind:
            self._transposed.clear()
        self._transposed.append(np.stack([rows_of_words(one, bits) for one in (x if isinstance(x, list) else [x])]))
        if "end" not in kind:
            return
        rows = np.concatenate(self._transposed, 1)
        # Lanes beyond the last row hold finite numbers: XLA has them meet weights that are 0, without a mask.
        turned = np.full((len(rows), LANES, LANES), 0x7F7F1234, np.uint32)
        turned[:, :, : rows.shape[1]] = rows.transpose(0, 2, 1)
        count = SUBLANES * 32 // bits
        for first in range(0, width, count):
            for matrix in turned:
                self.results["trf"].append(words_of_rows(matrix[first : first + count], bits))


def rotated(x: Any, by: Any) -> Any:
    """Moves lanes up, in a circle: by the low seven bits, plus the bits from the eighth on for each sublane."""
    return np.take_along_axis(whole(x), (LANE - _of_sublanes(by if np.ndim(by) == 0 else by[0, 0])) % LANES, 1)


def one_lane(x: Any, number: Any) -> Any:
    """Repeats one lane of each row: that of the low seven bits, plus the bits from the eighth on for each sublane."""
    return np.repeat(np.take_along_axis(whole(x), _of_sublanes(number), 1), LANES, 1)


def _of_sublanes(number: Any) -> np.ndarray:
    """Returns what an operand says for each sublane, as a column."""
    return ((int(number) & 127) + (int(number) >> 8) * np.arange(SUBLANES)[:, None]) % LANES
