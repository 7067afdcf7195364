"""The demo's output on the terminal and on disk."""

import io
import json
import operator
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from jaxops._demo import corpus, model, processes, train, writing
from jaxops._demo.corpus import Corpus
from jaxops._demo.run_folder import RunFolder
from jaxops._demo.train import Run, Settings
from lowering.describe import counted

STEPS_PER_LINE = 25
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>A language model of the Python standard library</title>
<style>
  {stylesheet}
  body {{ margin: 2rem auto; max-width: 60rem; padding: 0 1rem; font-family: sans-serif }}
  img {{ max-width: 100% }}
  pre {{ overflow-x: auto; font-size: 13px; line-height: 1.35 }}
</style>
<h1>A language model of the Python standard library</h1>
<p>Trained twice from the same parameters on the same batches: in plain JAX and optax, and with jaxops.</p>
<img src="loss.png" alt="Loss curves of both, and validation losses">
<pre><code>{code}</code></pre>
</html>
"""


def run(settings: Settings, output: Path, console: Console) -> None:
    """Runs the whole demo: reads the corpus, trains, prints the results and saves them into a folder that exists."""
    started = time.perf_counter()
    with _progress(console) as progress:
        task = progress.add_task("training a vocabulary on the standard library's source", total=None)
        progress.console.print(_opening(settings, output), highlight=False)
        text = corpus.standard_library()
        shape = model.Shape(text.vocabulary_size)
        progress.update(task, description="compiling the train step")
        result = train.run(settings, text, shape, _shows_steps(progress, task, settings.steps))
        progress.update(task, description=f"the same step with {train.LARGE_VOCABULARY:,} words")
        record = _record(settings, text, shape, result) | {
            "costs_of_large": {n: cost._asdict() for n, cost in train.costs_of_large(settings, shape).items()},
            "text": writing.written(result.average, shape, text.tokenizer, jax.random.key(settings.seed)),
            "seconds": time.perf_counter() - started,
        }
        progress.update(task, description=f"trained, loss {result.losses[train.OURS][-1]:5.2f}")
    (output / "numbers.json").write_text(json.dumps(record, indent=2) + "\n")
    _plot(result, output / "loss.png")
    shown = Group(_summary(record), result.explanation.table(), "", Text(record["text"], "dim"), "")
    (output / "index.html").write_text(_page(shown))
    console.print(shown)
    console.print(f"{output / 'index.html'}: all this as a page, with the loss curves", highlight=False, soft_wrap=True)


def _page(shown: RenderableType) -> str:
    """Renders what the terminal shows, below the picture, as a page."""
    recorder = Console(record=True, file=io.StringIO(), width=110)
    recorder.print(shown)
    return recorder.export_html(code_format=PAGE)


def run_together(count: int, settings: Settings, resume: bool, output: Path, console: Console) -> None:
    """Trains in several processes, with checkpoints; shows their progress and the outcome.

    Raises:
      RunError: if one of them cannot go on.
    """
    arguments = ["--steps", str(settings.steps), "--seed", str(settings.seed), *(["--resume"] if resume else [])]
    started = time.perf_counter()
    with _progress(console) as progress:
        task = progress.add_task("reading the text and compiling the train step", total=settings.steps)
        show_step = _shows_steps(progress, task, settings.steps)
        folder = RunFolder(output)
        losses = processes.run(count, arguments, folder, lambda loss: show_step(loss.step, loss.value))
    facts = Table.grid(padding=(0, 2))
    share = f"{count} of them, with {processes.DEVICES // count} of {processes.DEVICES} devices each"
    facts.add_row("processes", share)
    facts.add_row(
        "loss", f"{losses[0].value:.3f} at step {losses[0].step}, {losses[-1].value:.3f} at {losses[-1].step}"
    )
    facts.add_row("time", f"{time.perf_counter() - started:.0f} s")
    console.print(facts)
    console.print(f"{folder.losses_file}: the losses; {folder.checkpoints}: the newest states", highlight=False)


def _progress(console: Console) -> Progress:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console)


def _shows_steps(progress: Progress, task: TaskID, steps: int) -> Callable[[int, float], None]:
    """Returns a function that shows a step and its loss: in a terminal's bar, elsewhere on a line now and then."""
    said = 0

    def show_step(done: int, loss: float) -> None:
        nonlocal said
        progress.update(task, description=f"training, loss {loss:5.2f}", completed=done, total=steps)
        if not progress.console.is_terminal and done - said >= STEPS_PER_LINE:
            said = done
            progress.console.print(f"step {done} of {steps}, loss {loss:.2f}", highlight=False)

    return show_step


def _record(settings: Settings, text: Corpus, shape: model.Shape, result: Run) -> dict[str, Any]:
    """Collects everything about the training as JSON."""
    differences = [*map(abs, map(operator.sub, *result.losses.values()))]
    return {
        "settings": {**settings._asdict(), "ema_decay": settings.ema_decay},
        "corpus": {
            "files": text.files,
            "characters": text.characters,
            "train_tokens": len(text.train),
            "validation_tokens": len(text.validation),
        },
        "model": {**shape._asdict(), "parameters": result.parameters},
        "validation": [evaluation._asdict() for evaluation in result.evaluations],
        "train_losses": result.losses,
        "first_difference": differences[0],
        "largest_difference": max(differences),
        "costs": {name: cost._asdict() for name, cost in result.costs.items()},
        "explanation": json.loads(result.explanation.to_json()),
        "device": jax.devices()[0].device_kind,
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
    }


def _summary(record: dict[str, Any]) -> Group:
    """Lays out the results as tables; every number is one of the record's."""
    text, sizes, settings = record["corpus"], record["model"], record["settings"]
    trained_on, held_out = text["train_tokens"], text["validation_tokens"]
    facts = Table.grid(padding=(0, 2))
    facts.add_row("text", f"{text['files']} standard library files, {trained_on:,} tokens + {held_out:,} held out")
    facts.add_row("model", f"{sizes['parameters']:,} parameters in {sizes['depth']} blocks of width {sizes['width']}")
    facts.add_row("vocabulary", f"{sizes['vocabulary']} tokens")
    facts.add_row(
        "training", f"{counted(settings['steps'], 'step')} of {settings['batch']} x {sizes['context']} tokens"
    )
    first, largest = (f"{record[name]:.1g}" for name in ("first_difference", "largest_difference"))
    differ = f"differ from those of {train.PLAIN} by {first} in the first step"
    facts.add_row("training losses", f"{differ}; training amplifies how sums are rounded, to {largest} at most")
    facts.add_row("time", f"{record['seconds']:.0f} s for everything")
    tables = [_validation_table(record["validation"]), _cost_table(sizes["vocabulary"], record)]
    return Group("", facts, "", Columns(tables, padding=(0, 4)), "")


def _opening(settings: Settings, output: Path) -> str:
    """Returns the text for a newcomer while the first part runs. The estimate is for two cores of a server's CPU."""
    seconds = 40 + 0.6 * settings.steps
    about = f"{seconds / 60:.0f} minutes" if seconds >= 90 else f"{seconds:.0f} seconds"
    steps = counted(settings.steps, "step")
    return (
        f"A small language model learns the source of Python's standard library on {jax.devices()[0].device_kind}, in "
        f"{steps}:\nonce with this library's embedding, loss and optimizer, and once in {train.PLAIN}.\n"
        f"That takes about {about} on two CPU cores. Then you see both losses, memory and speed, what ran and why,\n"
        f"and what the model writes; {output}/ keeps it all.\n"
    )


def _validation_table(evaluations: list[dict[str, Any]]) -> Table:
    """Lays out the loss over the run, in at most five rows."""
    table = Table(title="validation loss", title_justify="left")
    for name in ("step", "trained weights", "EMA weights"):
        table.add_column(name, justify="right")
    for evaluation in (*evaluations[: -1 : max(1, len(evaluations) // 4)], evaluations[-1]):
        table.add_row(str(evaluation["step"]), f"{evaluation['raw']:.3f}", f"{evaluation['averaged']:.3f}")
    return table


def _cost_table(vocabulary: int, record: dict[str, Any]) -> Table:
    table = Table(title="the train step", title_justify="left")
    for name in ("vocabulary", "written in"):
        table.add_column(name)
    for name in ("temporaries, MB", "tokens/s"):
        table.add_column(name, justify="right")
    for size, costs in ((vocabulary, record["costs"]), (train.LARGE_VOCABULARY, record["costs_of_large"])):
        for name in (train.PLAIN, train.OURS):
            cost = costs[name]
            megabytes, speed = f"{cost['temporary_bytes'] / 1e6:,.1f}", f"{cost['tokens_per_second']:,.0f}"
            table.add_row(f"{size:,}", name, megabytes, speed)
    return table


def _plot(result: Run, path: Path) -> None:
    # The object interface draws with Agg on its own and leaves a user's pyplot alone.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    steps = [evaluation.step for evaluation in result.evaluations]
    for name, color, width in ((train.PLAIN, "0.75", 4), (train.OURS, "0.25", 1)):
        losses = result.losses[name]
        axes.plot(range(1, len(losses) + 1), losses, color=color, linewidth=width, label=f"training batches, {name}")
    for marker, weights in (("o", "raw"), ("s", "averaged")):
        label = {"raw": "validation, trained weights", "averaged": "validation, EMA weights"}[weights]
        axes.plot(
            steps, [getattr(evaluation, weights) for evaluation in result.evaluations], marker=marker, label=label
        )
    axes.set(xlabel="step", ylabel="loss (nats per token)", title="A language model of the Python standard library")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
