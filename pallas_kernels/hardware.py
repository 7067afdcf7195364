"""Facts about the chip that a kernel runs on."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Facts about one kind of chip, in units that are part of each name.

    Attributes:
      name: the target's name, such as "tpu-v5e" or "cuda-h100". A platform's own name ("tpu", "cuda", "cpu") stands for
        an unknown chip of that platform.
      platform: the lowering platform, "cpu", "cuda" or "tpu".
      device_kind: `jax.Device.device_kind` as the runtime reports it; empty if several chips share the record.
      compute_capability: NVIDIA's compute capability, such as (9, 0); None elsewhere.
      cores: streaming multiprocessors of a GPU, TensorCores of a TPU chip.
      on_chip_bytes: the memory that one kernel instance can tile into: VMEM of a TensorCore, shared memory of one
        thread block.
      scoped_bytes: the part of VMEM that XLA:TPU reserves for the buffers of one operation, as its compiler says. In
        the rest it keeps whole arrays between operations.
      shared_bytes: the shared memory of a GPU's multiprocessor, for all of its thread blocks.
      l2_bytes: the cache between a GPU's multiprocessors and its memory.
      fp32_lanes: float32 operations that one multiprocessor starts in a cycle.
      clock_hz: the highest clock of a GPU's multiprocessors.
      memory_bytes: device memory of the chip.
      memory_bytes_per_s: its bandwidth.
      matmul_flops_per_s: the rates of dense matrix products at JAX's default precision, by the dtype of the operands.
        float32 at higher precision has entries of its own ("float32 high", "float32 highest").
      devices_per_chip: the number of JAX devices of a chip; this record describes one of them.
      smallest_slice: the smallest TPU slice that can be compiled for, as `jax.experimental.topologies` names it.
      source: where the figures were published.
    """

    name: str
    platform: str
    device_kind: str = ""
    compute_capability: tuple[int, int] | None = None
    cores: int | None = None
    on_chip_bytes: int | None = None
    scoped_bytes: int = 0
    shared_bytes: int | None = None
    l2_bytes: int | None = None
    fp32_lanes: int | None = None
    clock_hz: float | None = None
    memory_bytes: int | None = None
    memory_bytes_per_s: float | None = None
    matmul_flops_per_s: tuple[tuple[str, float], ...] = ()
    devices_per_chip: int = 1
    smallest_slice: str = ""
    source: str = ""

    @property
    def label(self) -> str:
        """The target's name; for a chip without one, what the runtime calls it."""
        return self.device_kind if self.name == self.platform and self.device_kind else self.name

    def may_keep(self, size_bytes: int) -> bool:
        """Tells whether XLA:TPU may keep an array of this size in VMEM from one operation to the next."""
        return self.on_chip_bytes is None or size_bytes <= self.on_chip_bytes - self.scoped_bytes
