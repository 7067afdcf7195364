"""Operators of Tokamax at operands for which its repository holds times that were measured on TPUs.

`tokamax/data/autotuning` has, for each kind of device, operator, operands and configuration, the sum of the times of
all operations in a profile, and the peak memory that the compiler reported. The programs are Tokamax's own.
"""

import functools
import json
import random
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

DEVICES = {"tpu-v5e": "tpu_v5_lite", "tpu-v5p": "tpu_v5", "tpu-v6e": "tpu_v6_lite", "tpu-v7x": "tpu7x"}
MOST_MS = 4.0  # a replay of a longer program takes minutes
_MIB = 1048576 / 1e6  # earlier files have MiB, later ones MB
# XLA computes products by groups with a kernel of its own or with a loop. Which, its versions decide differently.
_GROUPED_PRODUCTS = ("", "--xla_tpu_enable_ragged_dot_kernel=false")


def commit(checkout: Path) -> str:
    """What was checked out."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def days_of(checkout: Path, file: str) -> dict[float, str]:
    """When each measurement that a file of times has ever held was committed, by the time that its compilation took."""
    path = f"tokamax/data/autotuning/{file}"
    git = functools.partial(subprocess.run, cwd=checkout, capture_output=True, text=True, check=True)
    days: dict[float, str] = {}
    for line in git(["git", "log", "--reverse", "--format=%H %cs", "--", path]).stdout.splitlines():
        commit_id, day = line.split()
        try:
            held = json.loads(git(["git", "show", f"{commit_id}:{path}"]).stdout)
        except json.JSONDecodeError:
            continue  # a few commits hold no JSON
        for found in (found for timed in held.values() for found in timed.values()):
            days.setdefault(found["compile_time_ms"], day)
    return days


def operators() -> list[Any]:
    """All operators that have published times on a TPU."""
    from tokamax._src.ops.attention import base as attention
    from tokamax._src.ops.attention import pallas_mosaic_tpu as flash
    from tokamax._src.ops.attention import pallas_mosaic_tpu_vjp as flash_vjp
    from tokamax._src.ops.attention import xla_chunked
    from tokamax._src.ops.gated_linear_unit import base as gated
    from tokamax._src.ops.linear_softmax_cross_entropy_loss import base as loss
    from tokamax._src.ops.linear_softmax_cross_entropy_loss import chunked_xla
    from tokamax._src.ops.linear_softmax_cross_entropy_loss import pallas_mosaic_tpu as loss_kernels
    from tokamax._src.ops.normalization import base as normalization
    from tokamax._src.ops.ragged_dot import base as ragged
    from tokamax._src.ops.ragged_dot import pallas_mosaic_tpu as ragged_kernels
    from tokamax._src.ops.triangle_multiplication import base as triangle

    found = [
        attention.DotProductAttention,
        attention.DotProductAttentionVjp,
        flash.PallasMosaicTpuFlashAttention,
        flash_vjp.PallasMosaicTpuFlashAttentionVjp,
        xla_chunked.XlaChunkedDotProductAttention,
        gated.GatedLinearUnit,
        loss.LinearSoftmaxCrossEntropyLoss,
        loss.LinearSoftmaxCrossEntropyLossVjp,
        chunked_xla.ChunkedXlaLinearSoftmaxCrossEntropyLoss,
        loss_kernels.PallasMosaicTpuLinearSoftmaxCrossEntropyLoss,
        loss_kernels.PallasMosaicTpuLinearSoftmaxCrossEntropyLossVjp,
        normalization.Normalization,
        normalization.NormalizationVjp,
        ragged.RaggedDot,
        ragged_kernels.PallasMosaicTpuRaggedDot,
        triangle.TriangleMultiplication,
    ]
    for operator in found:
        operator.supported_on = lambda *_: True  # asks what device is here
    return found


def drawn(checkout: Path, draws: int) -> Iterator[dict[str, Any]]:
    """Draws so many cases of each operator and chip, always the same.

    Yields:
      What is to be compiled ("fn", "args"), and what was published of it.
    """
    sys.path.insert(0, str(checkout))
    from tokamax._src import benchmarking
    from tokamax._src.autotuning.cache import AutotuningCache
    from tokamax._src.ops.ragged_dot.base import RaggedDot

    for kind in operators():
        operator = kind()
        for target, device in DEVICES.items():
            held = AutotuningCache(operator)[device].items()
            file = re.sub("(?!^)([A-Z])", r"_\1", kind.__name__).lower()
            days = days_of(checkout, f"{device}/{file}.json") if held else {}
            # Of some products of groups nobody has kept how the rows were split, on which their time depends.
            told = ((dict(key), timed) for key, timed in held if not _is_split_at_random(dict(key)))
            rows = [(key, config, found) for key, timed in told for config, found in timed.items()]
            numbered = [row for row in enumerate(rows) if statistics.median(row[1][2].evaluation_times_ms) <= MOST_MS]
            for number, (key, config, found) in random.Random(f"{target} {kind.__name__}").sample(
                numbered, min(draws, len(numbered))
            ):
                bound = operator.bind(**key)
                configured = operator.replace(config=config)
                fn, args = benchmarking.standardize_function(configured, *bound.args, kwargs=bound.kwargs, seed=None)
                yield {
                    "name": f"{kind.__name__} {number}",
                    "target": target,
                    "source": "Tokamax",
                    "measured_us": 1e3 * statistics.median(found.evaluation_times_ms),
                    "peak_mb": found.peak_memory_mb,
                    "day": days[found.compile_time_ms],
                    "fn": fn,
                    "args": (args,),
                    "groups": np.asarray(key["group_sizes"].value) if "group_sizes" in key else None,
                    "rows_of_tile": getattr(config, "tile_m", None),
                    "flags": _GROUPED_PRODUCTS if kind is RaggedDot else ("",),
                }


def memory_difference(peak_mb: float, memory: Any) -> float:
    """By which part a program needs less or more memory than the one that was measured."""
    summed = memory.arguments + memory.outputs - memory.aliased + memory.temporaries
    sizes = [size / 1e6 for size in (memory.peak, summed)]
    return min(abs(peak_mb * unit / size - 1) for size in sizes for unit in (1.0, _MIB))


def group_scalars(case: Mapping[str, Any], kernel: str, lengths: Mapping[int, int]) -> dict[int, np.ndarray]:
    """What a kernel of products by groups of rows reads from scalar memory: its tiles, by group and by rows.

    Args:
      case: one of `drawn`.
      kernel: its name.
      lengths: of the operands in scalar memory.
    """
    sizes = case["groups"]
    if len(lengths) == 1:
        return {0: sizes}  # what computes the others from it
    rows, visits = case["args"][0][0].shape[0], lengths[2]
    of_tile = case["rows_of_tile"] or next(
        2**power for power in range(12) if -(-rows // 2**power) + len(sizes) - 1 == visits
    )
    ends = np.cumsum(sizes)
    first = np.minimum((ends - sizes) // of_tile, rows // of_tile - 1)
    tiles = np.where(sizes == 0, int("tgmm" in kernel), -(-ends // of_tile) - (ends - sizes) // of_tile)
    groups = np.repeat(np.arange(len(sizes)), tiles)
    at = np.concatenate([start + np.arange(count) for start, count in zip(first, tiles, strict=True)])
    of_visits = [np.pad(each, (0, max(visits - len(each), 0)), mode="edge")[:visits] for each in (groups, at)]
    known = {0: np.array([tiles.sum()]), 1: np.concatenate([[0], ends]), 2: of_visits[0], 3: of_visits[1]}
    return known | ({4: np.array([0])} if 4 in lengths else {})


def _is_split_at_random(arguments: Mapping[str, Any]) -> bool:
    return isinstance(getattr(arguments.get("group_sizes"), "repr_value_or_total_size", None), int)
