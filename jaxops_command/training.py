"""`jaxops demo`: trains a small model, and shows what ran."""

from pathlib import Path

from jaxops._demo import report
from jaxops._demo.run_folder import RunError
from jaxops._demo.train import Settings
from jaxops_command.options import CommandError
from jaxops_command.output import console


def demo(steps: int, seed: int, output: Path, processes: int | None, resume: bool) -> None:
    """Trains in one process, or in several."""
    settings = Settings(steps=steps, seed=seed)
    try:
        if processes is None:
            report.run(settings, output, console())
        else:
            report.run_together(processes, settings, resume, output, console())
    except (OSError, RunError) as error:
        raise CommandError(str(error)) from None
