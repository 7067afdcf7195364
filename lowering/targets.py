"""The chips that can be targets, in this machine or not, and the names by which users ask for them."""

import math
import re
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractDevice

from lowering.describe import one_of, show
from pallas_kernels.hardware import Hardware

_GIB = 2**30
_TPU_SOURCE = "Google Cloud TPU documentation, system architecture pages (v5e, v5p, v6e, TPU7x)"
_NVIDIA_SOURCE = (
    "NVIDIA data sheet of the SXM module, without sparsity; CUDA C++ Programming Guide, compute capabilities"
)


def _tpu_rates(bfloat16: float, **others: float) -> tuple[tuple[str, float], ...]:
    """Derives rates for float32: rounded to bfloat16, or split into parts whose products take three or six passes."""
    passes = {"float32": bfloat16, "float32 high": bfloat16 / 3, "float32 highest": bfloat16 / 6}
    return tuple({"bfloat16": bfloat16, **passes, **others}.items())


def _nvidia_rates(*, float16: float, tf32: float, float32: float, float64: float, **others: float) -> Any:
    """Derives the rates for float32: rounded to TF32, unless the highest precision is asked for."""
    halves = {"bfloat16": float16, "float16": float16}
    singles = {"float32": tf32, "float32 high": tf32, "float32 highest": float32}
    return tuple({**halves, **singles, "float64": float64, **others}.items())


_HOPPER_RATES = _nvidia_rates(
    float16=989.4e12, tf32=494.7e12, float32=66.9e12, float64=66.9e12, int8=1978.9e12, float8=1978.9e12
)

TARGETS = {
    hardware.name: hardware
    for hardware in (
        Hardware("cpu", "cpu", device_kind="cpu"),
        Hardware(
            "tpu-v5e",
            "tpu",
            device_kind="TPU v5 lite",
            cores=1,
            on_chip_bytes=128 * 2**20,
            scoped_bytes=16 * 2**20,
            memory_bytes=16 * _GIB,
            memory_bytes_per_s=819e9,
            matmul_flops_per_s=_tpu_rates(197e12, int8=393e12),
            smallest_slice="v5e:2x2",
            source=_TPU_SOURCE,
        ),
        Hardware(
            "tpu-v5p",
            "tpu",
            device_kind="TPU v5",
            cores=2,
            on_chip_bytes=64 * 2**20,
            scoped_bytes=16 * 2**20,
            memory_bytes=95 * _GIB,
            memory_bytes_per_s=2765e9,
            matmul_flops_per_s=_tpu_rates(459e12, int8=918e12),
            smallest_slice="v5p:2x2x1",
            source=_TPU_SOURCE,
        ),
        Hardware(
            "tpu-v6e",
            "tpu",
            device_kind="TPU v6 lite",
            cores=1,
            on_chip_bytes=128 * 2**20,
            scoped_bytes=32 * 2**20,
            memory_bytes=32 * _GIB,
            memory_bytes_per_s=1640e9,
            matmul_flops_per_s=_tpu_rates(918e12, int8=1836e12),
            smallest_slice="v6e:2x2",
            source=_TPU_SOURCE,
        ),
        # Each of a chip's two TensorCores is a device of its own, with half of the chip's memory.
        Hardware(
            "tpu-v7x",
            "tpu",
            device_kind="TPU7x",
            cores=1,
            on_chip_bytes=64 * 2**20,
            scoped_bytes=32 * 2**20,
            memory_bytes=96 * _GIB,
            memory_bytes_per_s=7380e9 / 2,
            matmul_flops_per_s=_tpu_rates(2307e12 / 2, float8=4614e12 / 2),
            devices_per_chip=2,
            smallest_slice="tpu7x:2x2x1",
            source=_TPU_SOURCE,
        ),
        Hardware(
            "cuda-h100",
            "cuda",
            device_kind="NVIDIA H100 80GB HBM3",
            compute_capability=(9, 0),
            cores=132,
            on_chip_bytes=227 * 2**10,
            shared_bytes=228 * 2**10,
            l2_bytes=50 * 2**20,
            fp32_lanes=128,
            clock_hz=1.980e9,
            memory_bytes=80 * 10**9,
            memory_bytes_per_s=3.35e12,
            matmul_flops_per_s=_HOPPER_RATES,
            source=_NVIDIA_SOURCE,
        ),
        Hardware(
            "cuda-h200",
            "cuda",
            device_kind="NVIDIA H200",
            compute_capability=(9, 0),
            cores=132,
            on_chip_bytes=227 * 2**10,
            shared_bytes=228 * 2**10,
            l2_bytes=50 * 2**20,
            fp32_lanes=128,
            clock_hz=1.980e9,
            memory_bytes=141 * 10**9,
            memory_bytes_per_s=4.8e12,
            matmul_flops_per_s=_HOPPER_RATES,
            source=_NVIDIA_SOURCE,
        ),
        Hardware(
            "cuda-b200",
            "cuda",
            device_kind="NVIDIA B200",
            compute_capability=(10, 0),
            cores=148,
            on_chip_bytes=227 * 2**10,
            shared_bytes=228 * 2**10,
            l2_bytes=126 * 2**20,
            fp32_lanes=128,
            clock_hz=1.965e9,
            memory_bytes=180 * 10**9,
            memory_bytes_per_s=7.7e12,
            matmul_flops_per_s=_nvidia_rates(
                float16=2.25e15, tf32=1.1e15, float32=75e12, float64=37e12, int8=4.5e15, float8=4.5e15
            ),
            source=_NVIDIA_SOURCE,
        ),
        Hardware(
            "cuda-a100",
            "cuda",
            device_kind="NVIDIA A100-SXM4-80GB",
            compute_capability=(8, 0),
            cores=108,
            on_chip_bytes=163 * 2**10,
            shared_bytes=164 * 2**10,
            l2_bytes=40 * 2**20,
            fp32_lanes=64,
            clock_hz=1.410e9,
            memory_bytes=80 * 10**9,
            memory_bytes_per_s=2.039e12,
            matmul_flops_per_s=_nvidia_rates(
                float16=312e12, tf32=156e12, float32=19.5e12, float64=19.5e12, int8=624e12
            ),
            source=_NVIDIA_SOURCE,
        ),
    )
}
PLATFORMS = ("cpu", "cuda", "tpu")
_TOPOLOGY = re.compile(r"[1-9]\d{0,5}(x[1-9]\d{0,5}){0,2}")

# A user context is part of the keys of JAX's caches, so what is traced for one chip is not used for another.
_compiled_for = jax.make_user_context(None)


def targets() -> tuple[Hardware, ...]:
    """Returns the record of every chip that can be a target: memory, bandwidth, rates, and where they are published.

    Example:
      >>> [chip.name for chip in lowering.targets()]
      ['cpu', 'tpu-v5e', 'tpu-v5p', ..., 'cuda-a100']
      >>> next(
      ...     chip.memory_bytes // 2**30
      ...     for chip in lowering.targets()
      ...     if chip.name == "tpu-v5e"
      ... )
      16
    """
    return tuple(TARGETS.values())


def named(name: str) -> Hardware:
    """Returns the record of a chip, or of a platform ("cpu", "cuda", "tpu") if nothing more is known of the chip."""
    if isinstance(name, str) and name in TARGETS:
        return TARGETS[name]
    if isinstance(name, str) and name in PLATFORMS:
        return Hardware(name, name)
    raise ValueError(f"lowering: target must be {one_of((*TARGETS, *PLATFORMS[1:]), name)}")


class TopologyError(ValueError):
    """A target's topology is not a size, or two or three sizes with an x between them."""


class TargetSlice(NamedTuple):
    """Slice that a target string such as "tpu-v5e:16x16" names.

    Attributes:
      hardware: the record of the chip, or of a platform about whose chip nothing more is known.
      topology: of the slice, such as "16x16"; "" for a single chip.
      device_count: how many JAX devices the slice has; 1 without a topology.
    """

    hardware: Hardware
    topology: str
    device_count: int


def parse(target: str) -> TargetSlice:
    """Reads a target string: a chip or a platform, and after a colon the topology of a slice.

    Raises:
      TopologyError: if there is a topology that is not one or up to three sizes.
      ValueError: for an unknown chip.
    """
    name, _, topology = target.partition(":") if isinstance(target, str) else (target, "", "")
    hardware = named(name)
    if not topology:
        return TargetSlice(hardware, "", 1)
    if not _TOPOLOGY.fullmatch(topology):
        raise TopologyError(f"lowering: target must have a topology such as 16x16 or 8; got {show(topology)}")
    chips = math.prod(map(int, topology.split("x")))
    return TargetSlice(hardware, topology, chips * hardware.devices_per_chip)


def of_device(platform: str, device: jax.Device | AbstractDevice) -> Hardware:
    """Returns the record of a device, by the runtime's name for it; of any other GPU, what the runtime says of it."""
    kind = device.device_kind
    for hardware in TARGETS.values():
        if (hardware.platform, hardware.device_kind) == (platform, kind):
            return hardware
    if platform != "cuda":
        return Hardware(platform, platform, kind)
    # An abstract device only has the cores. Of a GPU that is here, the device itself says more.
    present = jax.devices() if platform_here() == platform else ()
    device = next((each for each in present if each.device_kind == kind), device)
    return Hardware(
        platform,
        platform,
        kind,
        compute_capability=_capability(getattr(device, "compute_capability", None)),
        cores=getattr(device, "core_count", None) or getattr(device, "num_cores", None),
    )


def device_name(hardware: Hardware) -> str | None:
    """Returns the target's name. A chip without a record goes by the runtime's name for it; an unknown chip is None."""
    known = TARGETS.get(hardware.name)
    if known is not None and known.device_kind == hardware.device_kind:
        return hardware.name
    return f"{hardware.platform} {hardware.device_kind}" if hardware.device_kind else None


def _capability(text: str | None) -> tuple[int, int] | None:
    """Parses a compute capability such as "9.0" as two numbers."""
    major, dot, minor = (text or "").partition(".")
    return (int(major), int(minor)) if dot else None


def gpu_target_config(hardware: Hardware) -> str:
    """Returns what XLA has to know about an NVIDIA GPU to compile for it: a GpuTargetConfigProto in text form."""
    if hardware.compute_capability is None or hardware.clock_hz is None:
        raise ValueError(f"lowering: target must be one of NVIDIA's chips; got {show(hardware.name)}")
    major, minor = hardware.compute_capability
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {hardware.shared_bytes}
  shared_memory_per_block_optin: {hardware.on_chip_bytes}
  threads_per_core_limit: 2048
  core_count: {hardware.cores}
  fpus_per_core: {hardware.fp32_lanes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {hardware.memory_bytes_per_s:.0f}
  l2_cache_size: {hardware.l2_bytes}
  clock_rate_ghz: {hardware.clock_hz / 1e9}
  device_memory_size: {hardware.memory_bytes}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{hardware.device_kind}"
"""


def being_lowered_for(platform: str, platforms: tuple[str, ...]) -> Hardware:
    """Returns the chip that code for `platform` will run on, as far as lowering knows it.

    `lowering.compile` names the chip, and so may an abstract mesh. Otherwise code for one platform runs on the devices
    of this process, if they are of that platform. Code exported for several platforms may run on any of their chips.
    """
    chip: Hardware | None = _compiled_for.value
    if chip is not None and chip.platform == platform:
        return chip
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if device is not None:
        return of_device(platform, device)
    if len(platforms) == 1 and platform_here() == platform:
        return of_device(platform, jax.devices()[0])
    return named(platform)


def compiled_for(hardware: Hardware) -> AbstractContextManager[None]:
    """Lowers code within the context for this chip."""
    return _compiled_for(hardware)


def is_absent() -> bool:
    """Tells whether code is being compiled for a chip that is absent."""
    return _compiled_for.value is not None


def abstract_device(hardware: Hardware) -> AbstractDevice:
    """Returns the chip as an abstract mesh holds it."""
    platform = "gpu" if hardware.platform == "cuda" else hardware.platform
    return AbstractDevice(device_kind=hardware.device_kind, num_cores=hardware.cores, platform=platform)


def here() -> Hardware:
    """Returns the chip that this process uses by default."""
    return of_device(platform_here(), jax.devices()[0])


def platform_here() -> str:
    """Returns the default backend, by the name that lowering rules use: "cpu", "cuda" or "tpu"."""
    backend = jax.default_backend()
    return "cuda" if backend == "gpu" else backend
