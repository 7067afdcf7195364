"""One of the processes that train the demo together, and a recipe for your own: `python -m jaxops._demo.worker`.

On a cluster that JAX knows (SLURM, GKE, Cloud TPU), every host runs the same command, without --coordinator. What makes
a run go on as if it had never stopped: batches, dropout and the schedule follow from the step's number alone, and the
number, the parameters, the optimizer's moments and the moving average are all in the checkpoint.
"""

import dataclasses
import json
import os
import platform
import sys
import threading
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import jax
import typer

import lowering
from jaxops._demo import split_training
from jaxops._demo.checkpoints import Checkpoints
from jaxops._demo.model import Shape
from jaxops._demo.run_folder import SENTENCE, RunError, RunFolder
from jaxops._demo.split_training import Training
from jaxops._demo.train import Settings
from lowering import tuning_store
from lowering._jax_private import said_by_first_process
from lowering.describe import first_line
from lowering.targets import device_name, here

# After so many seconds without a sign of life from one process, JAX ends the others.
HEARTBEAT_SECONDS = 10
SECONDS_TO_START = 120
SECONDS_TO_END = 60
REFUSED, LOST = 2, 3


@dataclasses.dataclass(frozen=True)
class Plan:
    """Task of one process."""

    folder: RunFolder
    settings: Settings
    sizes: dict[str, int]
    dropout: float
    save_every: int
    resume: bool

    def record(self) -> dict[str, Any]:
        """Returns the settings that a resumed run must have in common with the one that was stopped."""
        return {**self.settings._asdict(), **self.sizes, "dropout": self.dropout}


def main(
    output: Annotated[Path, typer.Option(help="A folder that all processes see.")],
    steps: Annotated[int, typer.Option(help="How many training steps to take.")] = Settings().steps,
    seed: Annotated[int, typer.Option(help="Seeds parameters, the order of the text, and dropout.")] = 0,
    batch: Annotated[int, typer.Option(help="Windows of text in a step.")] = Settings().batch,
    width: Annotated[int, typer.Option(help="The model's width.")] = Shape(0).width,
    depth: Annotated[int, typer.Option(help="The model's depth.")] = Shape(0).depth,
    context: Annotated[int, typer.Option(help="Tokens in a window.")] = Shape(0).context,
    dropout: Annotated[float, typer.Option(help="The share of embedded values that are dropped.")] = 0.1,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 20,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest whole checkpoint.")] = False,
    coordinator: Annotated[str | None, typer.Option(help="HOST:PORT; without it, the cluster's own.")] = None,
    processes: Annotated[int | None, typer.Option(help="How many there are, with --coordinator.")] = None,
    process: Annotated[int | None, typer.Option(help="Which one this is, with --coordinator.")] = None,
    attached: Annotated[bool, typer.Option("--attached", help="End when standard input closes.")] = False,
) -> None:
    """Trains the demo's language model together with the other processes."""
    plan = Plan(
        RunFolder(output),
        Settings(steps=steps, seed=seed, batch=batch),
        {"width": width, "depth": depth, "context": context},
        dropout,
        save_every,
        resume,
    )
    code = 0
    try:
        if attached:
            _leave_with_parent()
        _join(coordinator, processes, process)
        _train(plan)
    except (RunError, lowering.TuningError, OSError) as error:
        code = _say(REFUSED, str(error))
    except jax.errors.JaxRuntimeError as error:
        code = _say(LOST, f"the processes must all go on; got {first_line(error)}")
    # An ordinary end of Python would wait for the other processes, some of which may be gone.
    if code:
        os._exit(code)


def _join(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Meets the other processes."""
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            initialization_timeout=SECONDS_TO_START,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SECONDS_TO_END,
        )
    except ValueError as error:
        rule = "--coordinator, --processes and --process must fit together, and be given where JAX knows no cluster"
        raise RunError(f"{rule}; got {first_line(error)}") from None


def _train(plan: Plan) -> None:
    is_first = jax.process_index() == 0
    _require_agreement("what is asked for", {**plan.record(), "resume": plan.resume})
    _require_agreement("the versions", _versions())
    tuning_store.entries_for(device_name(here()) or here().name)  # refuses if the processes have tuned differently
    start = _from_first("begin", lambda: plan.folder.begin(plan.record(), plan.resume))
    _from_first("text", plan.folder.keep_text)
    text, vocabulary = plan.folder.tokens()
    training = Training(plan.settings, Shape(vocabulary, **plan.sizes), plan.dropout)
    over = split_training.mesh()
    split_training.require_divisible(training, over)
    checkpoints = Checkpoints(plan.folder, plan.save_every)
    if start:
        state = checkpoints.restore(start, split_training.state_types(training, over))
    else:
        state = split_training.first_state(training, over)
    compiled = split_training.compiled_step(training, over)
    for done in range(start + 1, plan.settings.steps + 1):
        *state, loss = compiled(*state, *split_training.batch(training, over, text, done))
        value = float(loss)  # waits for the step, so every process learns at once when another is gone
        if is_first:
            plan.folder.add_loss(done, value)
            print(f"step {done}, loss {value:.3f}", flush=True)
        checkpoints.after_step(done, state)
    checkpoints.save(plan.settings.steps, state)
    checkpoints.close()


def _versions() -> dict[str, str]:
    """Returns the versions that programs depend on: processes that differ would not meet in the same collectives."""
    installed = {name: metadata.version(name) for name in ("jaxops", "jaxlib", "orbax-checkpoint", "numpy")}
    return {"python": platform.python_version(), "jax": jax.__version__, **installed}


def _require_agreement(subject: str, of_this: dict[str, Any]) -> None:
    """Refuses a process that differs from the first, before they wait for each other in a collective."""
    of_first = _from_first(subject, lambda: of_this)
    if of_first != of_this:
        here, there = (
            [f"{name} {of[name]}" for name in of_this if of_this[name] != of_first[name]] for of in (of_this, of_first)
        )
        raise RunError(
            f"{subject} must be the same for all processes; process {jax.process_index()} has {', '.join(here)} "
            f"and process 0 {', '.join(there)}"
        )


def _from_first(name: str, action: Callable[[], Any]) -> Any:
    """Returns, in all processes, the result of an action of the first one."""
    value = json.dumps(action()) if jax.process_index() == 0 else ""
    said = said_by_first_process(f"demo/{name}", value, SECONDS_TO_START)
    if said is None:
        raise RunError(f"process 0 must answer within {SECONDS_TO_START} seconds; it says nothing of '{name}'")
    return json.loads(said)


def _say(code: int, sentence: str) -> int:
    print(f"{SENTENCE}{sentence}", file=sys.stderr, flush=True)
    return code


def _leave_with_parent() -> None:
    """Ends this process when the one that started it ends in any way: the pipe between them closes."""

    def wait() -> None:
        os.read(sys.stdin.fileno(), 1)
        os._exit(LOST)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    typer.run(main)
