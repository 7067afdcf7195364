"""Facts about each TPU for a replay: its clock, its units, and how far figures for it are to be trusted."""

import dataclasses
from collections.abc import Mapping

from pallas_kernels.hardware import Hardware


@dataclasses.dataclass(frozen=True)
class Chip:
    """One TensorCore.

    Attributes:
      clock_hz: a bundle is issued in each cycle.
      matmul_cycles: for which 8 rows, or 16 of 16-bit values, keep a matrix unit.
      cross_lane_cycles: for which an instruction keeps a cross-lane unit.
      slots: how many instructions of each kind, or units, there are in a cycle.
      delay_slots: bundles after a taken branch that are still issued.
      hbm_efficiency: the part of the nominal bandwidth that is reached, where someone has published it.
      remark: what a figure for this chip must not be shown without; empty where replays agree with measurements.
    """

    clock_hz: float
    matmul_cycles: int
    cross_lane_cycles: int
    slots: Mapping[str, int]
    delay_slots: int = 4
    hbm_efficiency: float = 1.0
    remark: str = ""


# As libtpu states them in its bundle profiles; lengths of matrix products as well.
_V5 = {"MXU": 4, "vector": 4, "transcendental": 1, "cross-lane": 3, "load": 3, "store": 1, "scalar": 2}
_V6 = {**_V5, "MXU": 2, "cross-lane": 2, "store": 2}
_NOT_VALIDATED = "not validated: compared with no published measurement"
# The authors of Helion's TPU roofline found it slower than its schedule: MXU 0.81, XLU 0.82, vector stores 0.83.
_V7X_SPEED = 0.82

CHIPS = {
    "tpu-v5e": Chip(1.5e9, 8, 9, _V5),
    "tpu-v5p": Chip(1.75e9, 8, 9, _V5, remark=_NOT_VALIDATED),
    "tpu-v6e": Chip(1.75e9, 4, 4, _V6, remark=_NOT_VALIDATED),
    "tpu-v7x": Chip(
        2.2e9 * _V7X_SPEED,
        4,
        4,
        _V6,
        delay_slots=6,
        hbm_efficiency=0.856,
        remark=f"{_NOT_VALIDATED}; with a published calibration, {_V7X_SPEED} of the clock and 0.856 of HBM's speed",
    ),
}


def bytes_per_cycle(chip: Chip, hardware: Hardware) -> float:
    """Returns the bytes that the memory of a chip gives to one TensorCore in a cycle."""
    assert hardware.memory_bytes_per_s is not None
    return hardware.memory_bytes_per_s / (hardware.cores or 1) * chip.hbm_efficiency / chip.clock_hz
