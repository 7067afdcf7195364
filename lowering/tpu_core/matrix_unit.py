"""Matrix units: weights are pushed in, rows stream through, and sums are popped.

A unit multiplies rows by a matrix of 128 x 128, or 256 x 256 since v6e. Its operands are bfloat16 or have 8 bits;
of float32 it takes what rounding to bfloat16 leaves. Sums are float32. In which order a unit adds up is not known.
"""

import collections
from typing import Any

import numpy as np

from lowering.tpu_core.faults import MachineFaultError, UnknownFormError
from lowering.tpu_core.packing import FLOATS_OF_8_BITS, from_8_bits
from lowering.tpu_core.vector_unit import selected
from lowering.tpu_core.vectors import LANES, SUBLANES, rounded_to_bfloat16, rows_of_words, whole

_BITS = {"f32": 32, "bf16": 16, "s8": 8, "u8": 8, **dict.fromkeys(FLOATS_OF_8_BITS, 8)}
TYPES = frozenset(_BITS)
LATCHED = "lmr"


def operand_rows(x: Any, dtype: str) -> np.ndarray:
    """Returns the rows of an operand as float32, one for each number that its words hold."""
    if dtype == "f32":
        return rounded_to_bfloat16(whole(x)).view(np.float32)
    rows = rows_of_words(x, _BITS[dtype])
    if dtype == "bf16":
        return (rows << np.uint32(16)).view(np.float32)
    if dtype in FLOATS_OF_8_BITS:
        return from_8_bits(rows, FLOATS_OF_8_BITS[dtype])
    return rows.astype(np.int8 if dtype == "s8" else np.uint8).astype(np.float32)


def masked(mask: Any, x: Any) -> Any:
    """Returns an operand with zeros where its mask does not hold."""
    return selected(mask, whole(x), np.zeros((SUBLANES, LANES), np.uint32))


class MatrixUnit:
    """One unit.

    Attributes:
      results: sums that wait to be popped, in order.
      buffer: sums by their address, since v7x: float32, or int32.
    """

    def __init__(self, *, starts_with_last: bool) -> None:
        """Starts without weights; until v6e, the last rows of a matrix are pushed first."""
        self._starts_with_last = starts_with_last
        self._pushed: dict[str, list[tuple[int, bool, np.ndarray, np.ndarray | None]]] = collections.defaultdict(list)
        self._weights: dict[str, tuple[np.ndarray, ...]] = {}
        self._beside: np.ndarray | None = None
        self._second: np.ndarray | None = None
        self._latched: collections.deque[np.ndarray] = collections.deque()
        self.results: collections.deque[Any] = collections.deque()
        self.buffer: dict[int, Any] = {}

    def prepare(self, register: str, x: Any, dtype: str) -> None:
        """Holds what goes with the next operand: more columns of weights ("subr"), or the second half of rows."""
        if register == "subr":
            self._beside = operand_rows(x, dtype)
        else:
            self._second = operand_rows(x, dtype)

    def push(self, register: str, x: Any, dtype: str, kind: int, *, is_transposed: bool) -> None:
        """Pushes rows of weights.

        Args:
          register: "msra" or "msrb", or `LATCHED` for rows that are multiplied themselves, as a v5e can.
          x: the rows.
          dtype: of these.
          kind: 0 where a unit has 128 rows; 1 for the first 128 rows of 256, 2 for the others; 3 for the rows of two
            matrices, the second from `prepare`, whose products are summed apart.
          is_transposed: whether rows of weights are columns.
        """
        self._pushed[register].append((kind, is_transposed, operand_rows(x, dtype), self._beside))
        self._beside = None

    def latch(self, count: int) -> None:
        """Turns what was pushed in order to be multiplied itself, and holds that many times eight rows of it."""
        (matrix,) = self._matrices(self._pushed.pop(LATCHED, []))
        self._latched = collections.deque(np.split(np.ascontiguousarray(matrix.T[: SUBLANES * count]), count))

    def multiply(self, x: Any, dtype: str, loaded: str, weights: str, address: int | None) -> None:
        """Multiplies rows by the weights in a register ("gmra"), to which those pushed to another are loaded first.

        Without rows, the next eight that are latched are taken, in a circle.
        """
        if x is None and not self._latched:
            raise MachineFaultError("rows are multiplied that nobody has latched")
        rows = self._latched[0] if x is None else operand_rows(x, dtype)
        if x is None:
            self._latched.rotate(-1)
        if loaded:
            self._weights[weights] = self._matrices(self._pushed.pop(loaded, []))
        if weights not in self._weights:
            raise MachineFaultError("rows are multiplied before weights are loaded")
        second, self._second = self._second, None
        matrices = self._weights[weights]
        if len(matrices) == 2:
            if second is None:
                raise MachineFaultError("rows of two matrices have no second half")
            sums = np.concatenate([rows @ matrices[0], second @ matrices[1]], 1)
        else:
            (matrix,) = matrices
            if len(matrix) > LANES:
                rows = np.concatenate([rows, np.zeros_like(rows) if second is None else second], 1)
            elif second is not None and second.any():
                raise MachineFaultError("the second half of rows meets no weights")
            sums = rows @ matrix
        results = [
            np.ascontiguousarray(sums[row : row + SUBLANES, column : column + LANES])
            for row in range(0, len(sums), SUBLANES)
            for column in range(0, sums.shape[1], LANES)
        ]
        if dtype in ("s8", "u8"):
            results = [x.astype(np.int32) for x in results]
        if address is None:
            self.results.extend(x.view(np.uint32) for x in results)
            return
        for at, sums in enumerate(results, address):
            # Until they are popped, further products are added.
            self.buffer[at] = self.buffer[at] + sums if at in self.buffer else sums

    def pop(self, address: int) -> np.ndarray:
        """Takes sums from the buffer."""
        if address not in self.buffer:
            raise MachineFaultError(f"sums are popped from mrb[{address}], where nobody has put any")
        return self.buffer.pop(address).view(np.uint32)

    def _matrices(self, pushed: list[tuple[int, bool, np.ndarray, np.ndarray | None]]) -> tuple[np.ndarray, ...]:
        """Returns the matrix that was pushed, padded with zeros; or two."""
        if not pushed:
            raise MachineFaultError("weights are loaded that nobody has pushed")
        kinds = sorted({kind for kind, *_ in pushed})
        if kinds not in ([0], [1], [1, 2], [3]):
            raise UnknownFormError(f"weights of the kinds {kinds}")
        is_transposed = pushed[0][1]
        in_order = pushed[::-1] if self._starts_with_last else pushed

        def turned(matrix: np.ndarray, least: int = LANES) -> np.ndarray:
            """Turns a matrix if it was pushed so, and pads it with zeros to what a unit holds."""
            matrix = np.ascontiguousarray(matrix.T) if is_transposed else matrix
            rows, columns = (-(-size // LANES) * LANES for size in matrix.shape)
            return np.pad(matrix, ((0, rows - len(matrix)), (0, max(least, columns) - matrix.shape[1])))

        if kinds == [3]:
            halves = [np.concatenate([np.asarray(one[side]) for one in in_order]) for side in (2, 3)]
            return tuple(map(turned, halves))
        groups = [
            np.concatenate(
                [x if beside is None else np.concatenate([x, beside], 1) for k, _, x, beside in in_order if k == kind]
            )
            for kind in kinds
        ]
        # The second half begins at row 128, also where the first is not full.
        groups[:-1] = [np.pad(group, ((0, LANES - len(group)), (0, 0))) for group in groups[:-1]]
        return (turned(np.concatenate(groups), 2 * LANES if kinds[0] else LANES),)
