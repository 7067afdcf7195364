"""The links between chips and to hosts, at their published rates, and the least time that a collective needs on them.

A time here is a bound: every link of a group at its full rate in both directions, no latency, no header, no collision
with another group. Chips lie on a slice in the order of the mesh, its last axis along the slice's last.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from lowering.planning.collectives import Collective
from lowering.targets import TargetSlice


@dataclasses.dataclass(frozen=True)
class Torus:
    """Links to the neighbours along each side of a slice.

    Attributes:
      bytes_per_s: of one link in one direction.
      least_ring: the length from which a side closes to a ring.
      rings_need_all: whether that holds only if every side has this length.
      source: where the rate is published.
    """

    bytes_per_s: float
    least_ring: int
    rings_need_all: bool
    source: str

    def seconds(self, one: Collective, target: TargetSlice) -> float:
        """Returns the least time of one run of a collective. Devices of a chip share its links and what it receives."""
        sides = _sides(target)
        chips = sorted({device // target.hardware.devices_per_chip for device in one.group})
        if len(chips) == 1:
            return 0.0
        if one.kind == "collective-permute":  # others may go the other way meanwhile
            return one.bytes / self.bytes_per_s / 2
        share = len(one.group) / len(chips) / target.hardware.devices_per_chip
        places = [set(along.tolist()) for along in np.unravel_index(np.array(chips), sides)]
        rates = [share * self._rate(along, side, sides) for along, side in zip(places, sides, strict=True)]
        received = one.bytes * (len(chips) - 1) / len(chips)
        seconds = _passes(one.kind) * received / sum(rates)
        if "all-to-all" in one.kind:  # of all bytes, a quarter crosses the middle of each side in each direction
            sent = one.bytes * len(one.group) / len(chips)
            crossing = [sent * len(along) / 4 / rate for along, rate in zip(places, rates, strict=True) if rate]
            seconds = max(seconds, *crossing)
        return seconds

    def _rate(self, places: set[int], side: int, sides: Sequence[int]) -> float:
        """Returns the rate into a chip along one side: two links of a ring, one of a line, shared between groups."""
        if len(places) == 1:
            return 0.0
        ordered = sorted(places)
        stride = ordered[1] - ordered[0]
        closes = min(sides) >= self.least_ring if self.rings_need_all else side >= self.least_ring
        is_ring = closes and len(places) * stride == side
        return (2 if is_ring else 1) * self.bytes_per_s / stride


@dataclasses.dataclass(frozen=True)
class Switched:
    """Machines of eight chips on a switch, and a network card for each chip between machines.

    Attributes:
      bytes_per_s: of a chip to the switch, in one direction.
      network_bytes_per_s: of a chip's network card, in one direction.
      reduces: whether the switch adds, so that an all-reduce crosses it once.
      source: where the rates are published.
    """

    bytes_per_s: float
    network_bytes_per_s: float
    reduces: bool
    source: str

    def seconds(self, one: Collective, target: TargetSlice) -> float:
        """Returns the least time of one run of a collective."""
        machines = {chip // 8 for chip in one.group}
        if one.kind == "collective-permute":
            return one.bytes / (self.bytes_per_s if len(machines) == 1 else self.network_bytes_per_s)
        cards = one.group_size / len(machines)
        passes = _passes(one.kind)
        within = (1 if self.reduces else passes) * (one.group_size - 1) / one.group_size
        between = passes * (len(machines) - 1) / len(machines) / cards
        return max(within * one.bytes / self.bytes_per_s, between * one.bytes / self.network_bytes_per_s)


_CLOUD = "https://cloud.google.com/tpu/docs"
_NVIDIA = "https://www.nvidia.com/en-us/data-center"
_H100 = Switched(450e9, 50e9, True, f"{_NVIDIA}/h100 (NVLink 900 GB/s), DGX H100: eight 400 Gb/s ports")
LINKS: dict[str, Torus | Switched] = {
    # A chip's published rate counts all its ports and both directions.
    "tpu-v5e": Torus(400e9 / 4 / 2, 16, False, f"{_CLOUD}/v5e (400 GB/s, 4 ports)"),
    "tpu-v6e": Torus(800e9 / 4 / 2, 16, False, f"{_CLOUD}/v6e (800 GB/s, 4 ports)"),
    "tpu-v5p": Torus(1200e9 / 6 / 2, 4, True, f"{_CLOUD}/v5p (1200 GB/s, 3D torus from 4x4x4)"),
    "tpu-v7x": Torus(1200e9 / 6 / 2, 4, True, f"{_CLOUD}/tpu7x (1200 GB/s, 3D torus from 4x4x4)"),
    "cuda-h100": _H100,
    "cuda-h200": dataclasses.replace(_H100, source=f"{_NVIDIA}/h200 (NVLink 900 GB/s), DGX H200: eight 400 Gb/s ports"),
    "cuda-b200": Switched(900e9, 50e9, True, f"{_NVIDIA}/dgx-b200 (NVLink 1.8 TB/s, eight 400 Gb/s ports)"),
    "cuda-a100": Switched(300e9, 25e9, False, f"{_NVIDIA}/a100 (NVLink 600 GB/s), DGX A100: eight 200 Gb/s ports"),
}


_SCALING = "https://jax-ml.github.io/scaling-book/tpus (PCIe of a chip: 32 GB/s on v6e, about half on v5)"
_PCIE = "PCIe 5.0 x16, 128 GB/s both ways"
# Between a chip and its host, in one direction: bytes in a second, and where that is published.
HOST_LINKS = {
    "tpu-v5e": (16e9, _SCALING),
    "tpu-v5p": (16e9, _SCALING),
    "tpu-v6e": (32e9, _SCALING),
    "cuda-h100": (64e9, f"{_NVIDIA}/h100 ({_PCIE})"),
    "cuda-h200": (64e9, f"{_NVIDIA}/h200 ({_PCIE})"),
    "cuda-b200": (64e9, f"{_NVIDIA}/dgx-b200 ({_PCIE})"),
    "cuda-a100": (32e9, f"{_NVIDIA}/a100 (PCIe 4.0 x16, 64 GB/s both ways)"),
}


def seconds(one: Collective, target: TargetSlice) -> float:
    """Returns the least time of all runs of a collective on the links of a slice; 0 where no links are published."""
    links = LINKS.get(target.hardware.name)
    if links is None or one.group_size < 2 or target.device_count <= max(one.group):
        return 0.0
    return one.count * links.seconds(one, target)


def _passes(kind: str) -> int:
    """Returns how often all bytes cross the links: an all-reduce is a reduce-scatter and an all-gather."""
    return 2 if kind == "all-reduce" else 1


def _sides(target: TargetSlice) -> tuple[int, ...]:
    """Returns the lengths of a slice's sides."""
    return tuple(map(int, target.topology.split("x"))) if target.topology else (1,)
