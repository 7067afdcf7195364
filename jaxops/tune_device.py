"""Finds out which kernels are right and fast on the device of this machine, for everything that follows."""

from collections.abc import Collection, Sequence
from pathlib import Path

from lowering.campaign.report import Campaign
from lowering.campaign.run import STAGES, run

SUITE = "jaxops._suite:SUITE"


def tune_device(
    *,
    stages: Sequence[str] = STAGES,
    only: Collection[str] = (),
    budget_seconds: float = 1800.0,
    limit_seconds: float = 60.0,
    folder: str | Path | None = None,
    rehearse: bool = False,
    again: bool = False,
    progress: bool | None = None,
) -> Campaign:
    """Verifies, times and tunes every kernel of this library on the device of this machine, and keeps what it finds.

    Each case runs in a process of its own: what hangs or crashes costs that case. Call this before JAX has taken the
    device for this process. Results are written as they come, so a campaign that was stopped goes on where it was. From
    then on "auto" takes the kernels that were right and faster here, and never one that was wrong; also in this
    process, whose JAX caches are cleared.

    Args:
      stages: of "verify" (against float64, three times bit by bit, in poisoned memory), "time" (each kernel's first
        configuration) and "tune" (all configurations), in the order in which to do them.
      only: names of cases; all if empty.
      budget_seconds: when to stop.
      limit_seconds: how long a kernel may run before it counts as hanging; compiling it may take five times as long.
      folder: where results are kept; by default where "auto" finds them, in what JAXOPS_TUNED names or else among the
        user's data.
      rehearse: whether to interpret the kernels on the CPU at small sizes instead. Results of that are kept apart.
      again: whether to forget first what was found on this device before.
      progress: whether to show a progress bar on stderr; by default, if stderr is a terminal.

    Returns:
      What is known of the device: `.rows`, `.entries`, `.table()`, `.to_json()`; `.stopped` says what cut it short.

    Raises:
      lowering.TuningError: if a stage or case is unknown, the folder cannot be written to, or no device answers.

    Example:
      >>> campaign = jaxops.tune_device(
      ...     stages=["verify"], only=["EMA-Adam"], folder="found", rehearse=True
      ... )
      >>> [(row.kernel, row.outcome) for row in campaign.rows]
      [('mosaic_tpu', 'verified'), ('mosaic_gpu', 'verified')]
    """
    return run(
        SUITE,
        stages=stages,
        only=only,
        budget_seconds=budget_seconds,
        limit_seconds=limit_seconds,
        folder=None if folder is None else Path(folder),
        rehearse=rehearse,
        again=again,
        progress=progress,
    )
