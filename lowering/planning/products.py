"""Counts the flops of the matrix products in an optimised program, with the turns of its loops."""

import math
import re
from collections.abc import Mapping
from itertools import product

from lowering.planning.hlo import Array, Instruction, Program

_WINDOW = re.compile(r"(\w+)=([\dx_-]+)")


def compiled_product_flops(program: Program) -> int:
    """Counts the flops of all `dot`s and convolutions that one chip runs: two for each product of two numbers.

    What data decides counts as if it did not run.
    """
    return program.least(lambda lines: sum(_flops(line, lines) for line in lines.values()))


def _flops(line: Instruction, lines: Mapping[str, Instruction]) -> int:
    if line.opcode == "dot":
        return _dot_flops(line, _operand(line, lines, 0))
    if line.opcode == "convolution":
        return _convolution_flops(line, _operand(line, lines, 0), _operand(line, lines, 1))
    if line.opcode == "custom-call" and "__cublas$" in line.rest:
        lhs = _operand(line, lines, 0)
        axes = line.attribute(r'"lhs_contracting_dimensions":\[([^\]]*)\]') or ""
        return 2 * line.arrays[0].size * math.prod(lhs.shape[int(axis)] for axis in re.findall(r"\d+", axes))
    return 0


def _operand(line: Instruction, lines: Mapping[str, Instruction], position: int) -> Array:
    return lines[line.operands[position]].arrays[0]


def _dot_flops(line: Instruction, lhs: Array) -> int:
    axes = line.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
    return 2 * line.arrays[0].size * math.prod(lhs.shape[int(axis)] for axis in axes.split(",") if axis)


def _convolution_flops(line: Instruction, lhs: Array, rhs: Array) -> int:
    """Counts the products whose left operand lies within the array, neither in its padding nor in a hole of a dilation.

    A TPU's compiler writes matrix products as convolutions, and their batch axes as windows with strides and holes.
    """
    labels = line.attribute(r"dim_labels=([\w>-]+)")
    assert labels is not None
    lhs_labels, rhs_labels, out_labels = re.split(r"_|->", labels)
    window = dict(_WINDOW.findall(line.attribute(r"window=\{([^}]*)\}") or ""))
    out = line.arrays[0]
    spatial = sorted(label for label in rhs_labels if label.isdigit())
    pairs = 1
    for position, label in enumerate(spatial):
        pairs *= _pairs(
            lhs.shape[lhs_labels.index(label)],
            rhs.shape[rhs_labels.index(label)],
            out.shape[out_labels.index(label)],
            {name: value.split("x")[position] for name, value in window.items()},
        )
    batch, features = out.shape[out_labels.index("b")], out.shape[out_labels.index("f")]
    groups = int(line.attribute(r"batch_group_count=(\d+)") or 1)
    return 2 * pairs * batch * features * rhs.shape[rhs_labels.index("i")] // groups


def _pairs(size: int, window_size: int, out_size: int, window: Mapping[str, str]) -> int:
    """Counts pairs of a result's and a window's place, along one axis, that meet an element."""
    stride, low = int(window.get("stride", 1)), int(window.get("pad", "0_0").split("_")[0])
    window_dilation, dilation = int(window.get("rhs_dilate", 1)), int(window.get("lhs_dilate", 1))
    last = (size - 1) * dilation
    places = (
        result * stride + tap * window_dilation - low for result, tap in product(range(out_size), range(window_size))
    )
    return sum(0 <= place <= last and place % dilation == 0 for place in places)
