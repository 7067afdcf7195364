"""What a kernel may need to know about the chip it is asked to run on."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Facts about one kind of chip, in units that are part of each name.

    Attributes:
      name: the target's name, such as "tpu-v5e" or "cuda-h100". A platform's own name ("tpu", "cuda", "cpu") stands for
        a chip of that platform about which nothing more is known.
      platform: the lowering platform, "cpu", "cuda" or "tpu".
      device_kind: `jax.Device.device_kind` as the runtime reports it; empty where several chips share the record.
      compute_capability: NVIDIA's compute capability, such as (9, 0); None elsewhere.
      cores: streaming multiprocessors of a GPU, TensorCores of a TPU chip.
      on_chip_bytes: the memory one kernel instance can tile into: VMEM of a TensorCore, shared memory of one thread
        block.
      memory_bytes: device memory of the chip.
      memory_bytes_per_s: its bandwidth.
      source: where the figures were published.
    """

    name: str
    platform: str
    device_kind: str = ""
    compute_capability: tuple[int, int] | None = None
    cores: int | None = None
    on_chip_bytes: int | None = None
    memory_bytes: int | None = None
    memory_bytes_per_s: float | None = None
    source: str = ""
