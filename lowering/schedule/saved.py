"""Schedules in files: what `Schedule.save` wrote is read and checked."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowering.describe import file_fault, show
from lowering.errors import ScheduleError
from lowering.schedule.kernel import Region
from lowering.schedule.rows import KernelSchedule

_KERNEL = {
    "texts": ("name", "kind", "source", "operator", "bound"),
    "numbers": ("calls", "cycles", "time_us", "share", "dma_bytes", "dma_count", "stall_cycles", "spills"),
}
_REGION = {"texts": ("bound", "source"), "numbers": ("first", "last", "trips", "cycles", "stall_cycles", "spills")}


def read(path: str | Path) -> dict[str, Any]:
    """Returns the attributes of a saved schedule.

    Raises:
      ScheduleError: if the file is missing, damaged or of another kind.
    """
    try:
        record = json.loads(Path(path).read_text())
    except (OSError, TypeError) as error:
        message = f"load: {show(str(path))} must be a file that can be read; got {file_fault(error)}"
        raise ScheduleError(message) from None
    except (ValueError, RecursionError):
        record = None
    try:
        return {
            "target": _checked(record["target"], str),
            "kernels": tuple(map(_kernel, record["kernels"])),
            **{name: _number(record[name]) for name in ("total_us", "roofline_us", "border_bytes")},
            **{name: tuple(_checked(text, str) for text in record[name]) for name in ("unknown", "remarks")},
        }
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ScheduleError(f"load: {show(str(path))} must be a whole file of a saved schedule") from None


def _kernel(record: Any) -> KernelSchedule:
    slots = {_checked(kind, str): _number(part) for kind, part in record["slots"].items()}
    regions = tuple(Region(**_fields(region, _REGION)) for region in record["regions"])
    roofline_us = _number(record["roofline_us"])
    return KernelSchedule(**_fields(record, _KERNEL), slots=slots, roofline_us=roofline_us, regions=regions)


def _fields(record: Any, names: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    texts = {name: _checked(record[name], str) for name in names["texts"]}
    return {**texts, **{name: _number(record[name]) for name in names["numbers"]}}


def _checked(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"not of type {kind.__name__}: {value!r}")
    return value


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"not a number: {value!r}")
    return value
