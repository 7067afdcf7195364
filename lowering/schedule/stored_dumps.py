"""Compressed dumps of a program, for a second replay: what is recorded then costs the first one nothing."""

import tempfile
import zlib
from collections.abc import Collection
from pathlib import Path

from lowering.schedule.chips import CHIPS, Chip, bytes_per_cycle
from lowering.schedule.data_hints import Given
from lowering.schedule.program import ProgramReplay, replay_program
from lowering.tpu_core.dumps import Dumps
from pallas_kernels.hardware import Hardware

_LEVEL = 1  # a tenth of a second for 20 MB of schedules, which become 4 MB


class StoredDumps:
    """The schedules of a program, compressed.

    Attributes:
      chip: one core of the chip that they are for.
    """

    def __init__(self, dumps: Dumps, hardware: Hardware, given: Given) -> None:
        """Reads what a replay reads."""
        self.chip: Chip = CHIPS[hardware.name]
        self._hardware = hardware
        self._given = given
        self._texts = {path.name: zlib.compress(path.read_bytes(), _LEVEL) for path in dumps.files()}

    def replay(self, recorded: Collection[str] | None = None, chip: Chip | None = None) -> ProgramReplay:
        """Replays the program once more, by itself, or to record it and the first call of each of these kernels.

        Args:
          recorded: the kernels; None to record nothing.
          chip: another than the one that the schedules were replayed on.
        """
        chip = chip or self.chip
        with tempfile.TemporaryDirectory() as name:
            for file, text in self._texts.items():
                (Path(name) / file).write_bytes(zlib.decompress(text))
            hbm = bytes_per_cycle(chip, self._hardware)
            return replay_program(Dumps(Path(name)), chip, hbm, self._given, recorded)
