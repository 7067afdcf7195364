"""Machine of a campaign: the device of this process, or interpreters on a CPU for a rehearsal."""

import dataclasses
from collections.abc import Mapping

from lowering.measuring.candidates import Launch
from lowering.targets import TARGETS
from pallas_kernels.hardware import Hardware
from pallas_kernels.kernel import Kernel


@dataclasses.dataclass(frozen=True)
class Machine:
    """The device, and what is known to go wrong on it.

    Attributes:
      hardware: the device of this process.
      rehearse: whether kernels for other chips are interpreted.
      faults: why kernels must not run, by operator and kernel.
    """

    hardware: Hardware
    rehearse: bool
    faults: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)

    def timed_launch(self, operator_name: str, kernel: Kernel, *, first_only: bool) -> Launch | None:
        """Returns a kernel's launch to be timed; None for interpreters with side effects: they are too slow."""
        is_slow = kernel.platform != self.hardware.platform and not kernel.interpreter_is_pure
        return None if is_slow else self.launch(operator_name, kernel, first_only=first_only)

    def launch(self, operator_name: str, kernel: Kernel, *, first_only: bool = False) -> Launch | None:
        """Returns how a kernel is run here; None if it is not."""
        excluded = self.faults.get(operator_name, {}).get(kernel.name, "")
        if kernel.platform == self.hardware.platform:
            return Launch(self.hardware, first_only=first_only, excluded=excluded)
        if not self.rehearse:
            return None
        chip = next(chip for chip in TARGETS.values() if chip.platform == kernel.platform)
        return Launch(chip, interpret=True, first_only=True, excluded=excluded)
