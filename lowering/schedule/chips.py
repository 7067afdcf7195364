"""Facts about each TPU for a replay: its clock, its units, and how far figures for it are to be trusted."""

import dataclasses
from collections.abc import Mapping

from pallas_kernels.hardware import Hardware


@dataclasses.dataclass(frozen=True)
class Chip:
    """One TensorCore.

    Attributes:
      clock_hz: nominal; a bundle is issued in each cycle.
      matmul_cycles: for which 8 rows, or 16 of 16-bit values, keep a matrix unit.
      cross_lane_cycles: for which an instruction keeps a cross-lane unit.
      slots: how many instructions of each kind, or units, there are in a cycle.
      delay_slots: bundles after a taken branch that are still issued.
      clock_efficiency: the part of the clock that is reached, by published times.
      hbm_efficiency: the part of the nominal bandwidth that is reached, by the same.
      accuracy: how far replays are from published times, as docs/schedule.md has it.
    """

    clock_hz: float
    matmul_cycles: int
    cross_lane_cycles: int
    slots: Mapping[str, int]
    clock_efficiency: float
    hbm_efficiency: float
    accuracy: str
    delay_slots: int = 4

    @property
    def hz(self) -> float:
        """Cycles in a second, as they are reached."""
        return self.clock_hz * self.clock_efficiency


# As libtpu states them in its bundle profiles; lengths of matrix products as well.
_V5 = {"MXU": 4, "vector": 4, "transcendental": 1, "cross-lane": 3, "load": 3, "store": 1, "scalar": 2}
_V6 = {**_V5, "MXU": 2, "cross-lane": 2, "store": 2}


def _accuracy(mean: int, count: int, worst: int) -> str:
    return f"replays were {mean} % off in the mean of {count} published times, and {worst} % at worst"


# What is reached of a clock and of HBM was fitted to published times by benchmarks/tpu_published.py, but for a v7x: of
# that both are a calibration which the authors of Helion's roofline have published. How accurate replays then are
# is in docs/schedule.md.
CHIPS = {
    "tpu-v5e": Chip(1.5e9, 8, 9, _V5, 1.0, 0.91, _accuracy(2, 9, 9)),
    "tpu-v5p": Chip(1.75e9, 8, 9, _V5, 1.0, 0.90, _accuracy(2, 6, 3)),
    "tpu-v6e": Chip(1.75e9, 4, 4, _V6, 0.94, 0.90, _accuracy(2, 13, 11)),
    "tpu-v7x": Chip(2.2e9, 4, 4, _V6, 0.82, 0.856, _accuracy(5, 13, 9), delay_slots=6),
}


def bytes_per_cycle(chip: Chip, hardware: Hardware) -> float:
    """Returns the bytes that the memory of a chip gives to one TensorCore in a cycle."""
    assert hardware.memory_bytes_per_s is not None
    return hardware.memory_bytes_per_s / (hardware.cores or 1) * chip.hbm_efficiency / chip.hz
