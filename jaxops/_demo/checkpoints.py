"""Checkpoints of a run: written by orbax while training goes on, by each process its part, and sealed when complete."""

from typing import Any

import jax

from jaxops._demo.run_folder import RunError, RunFolder
from lowering.describe import first_line

_KEPT = 3
# Orbax's processes wait for each other while they save, and no longer than this.
_SECONDS_TO_SAVE = 300


class Checkpoints:
    """Storage that saves and restores the state of a run."""

    def __init__(self, folder: RunFolder, save_every: int) -> None:
        self._folder, self._save_every = folder, save_every
        self._unsealed: int | None = None
        import orbax.checkpoint as ocp  # in an extra

        self._args = ocp.args
        options = ocp.CheckpointManagerOptions(
            max_to_keep=_KEPT, async_options=ocp.AsyncOptions(timeout_secs=_SECONDS_TO_SAVE)
        )
        self._manager = ocp.CheckpointManager(folder.checkpoints.absolute(), options=options)

    def restore(self, step: int, types: Any) -> Any:
        """Restores the state after a step, split as the types say, over however many processes there are now."""
        try:
            return self._manager.restore(step, args=self._args.StandardRestore(types))
        except (ValueError, KeyError) as error:
            rule = f"the checkpoint of step {step} must hold the state of this run"
            raise RunError(f"{rule}; got {first_line(error)}") from None

    def after_step(self, step: int, state: Any) -> None:
        """Begins to save the state if it is time, and seals what was saved meanwhile."""
        if self._unsealed is not None and not self._manager.is_saving_in_progress():
            self._seal()
        if step % self._save_every == 0:
            self.save(step, state)

    def save(self, step: int, state: Any) -> None:
        """Begins to save the state, once the previous one is complete."""
        if self._manager.latest_step() == step:
            return
        self._manager.wait_until_finished()
        self._seal()
        self._manager.save(step, args=self._args.StandardSave(state), force=True)
        self._unsealed = step

    def close(self) -> None:
        """Waits for what is being saved."""
        self._manager.wait_until_finished()
        self._seal()
        self._manager.close()

    def _seal(self) -> None:
        if self._unsealed is not None and jax.process_index() == 0:
            self._folder.seal(self._unsealed)
        self._unsealed = None
