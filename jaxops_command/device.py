"""`jaxops tune` without a function: the campaign on this device, and what is kept of it."""

import json
from collections.abc import Sequence
from pathlib import Path

import typer

import lowering
from jaxops.tune_device import tune_device
from jaxops_command.options import CommandError
from jaxops_command.output import show, show_text
from lowering import TuningError, tuning_store
from lowering.campaign.report import Campaign
from lowering.measurements import versions
from lowering.measuring.timing import INTERRUPTED

INTERRUPTED_STATUS = 130  # what shells report of a command that was interrupted from the keyboard


def campaign(
    stages: Sequence[str],
    only: Sequence[str],
    budget_seconds: float,
    limit_seconds: float,
    rehearse: bool,
    again: bool,
    as_json: bool,
) -> None:
    """Runs a campaign, and prints what is known then."""
    try:
        found = tune_device(
            stages=stages,
            only=only,
            budget_seconds=budget_seconds,
            limit_seconds=limit_seconds,
            rehearse=rehearse,
            again=again,
        )
    except TuningError as error:
        raise _as_command_error(error) from None
    if as_json:
        print(found.to_json())
    else:
        show(found.table())
        if found.stopped:
            show_text(f"{found.stopped}: the same command goes on where this one ended")
    if found.stopped == INTERRUPTED:
        raise typer.Exit(INTERRUPTED_STATUS)


def about_kept(is_shown: bool, export: Path | None, is_forgotten: bool, as_json: bool) -> None:
    """Shows, exports and forgets what is kept, in this order."""
    if is_shown:
        _show(as_json)
    if export is not None:
        _export(export)
    if is_forgotten:
        _forget()


def _show(as_json: bool) -> None:
    """Prints what is kept of each device."""
    campaigns = []
    for path in _files():
        records = _read(path).records
        present = tuple(record for record in records if record.get("versions") == dict(versions()))
        campaigns.append(Campaign(_target_of(path), present))
        if len(present) < len(records) and not as_json:
            others = {json.dumps(record.get("versions")) for record in records} - {json.dumps(dict(versions()))}
            show_text(f"{path}: records of other versions do not count here: {', '.join(sorted(others))}")
    if as_json:
        print(json.dumps([json.loads(each.to_json()) for each in campaigns], indent=2))
        return
    for each in campaigns:
        show(each.table())
    if not campaigns:
        show_text(f"nothing is kept in {tuning_store.folder()}")


def _forget() -> None:
    """Deletes what is kept of each device."""
    paths = _files()
    try:
        for path in paths:
            tuning_store.forget(path)
    except TuningError as error:
        raise _as_command_error(error) from None
    show_text(", ".join(f"forgot {path}" for path in paths) or f"nothing is kept in {tuning_store.folder()}")


def _export(path: Path) -> None:
    """Writes the entries of all devices to one file, which `lowering.TuningResult` reads."""
    entries = tuple(entry for each in _files() for entry in _read(each).entries)
    try:
        lowering.TuningResult(entries).save(path)
    except TuningError as error:
        raise CommandError(str(error).replace("save: ", "--export ", 1)) from None
    show_text(f"{path}: {len(entries)} results, for `with lowering.TuningResult.load(...)` or --tuned")


def _files() -> list[Path]:
    return sorted(tuning_store.folder().glob("*.jsonl"))


def _target_of(path: Path) -> str:
    entries = _read(path).entries
    return entries[0].key.target if entries else path.stem


def _read(path: Path) -> tuning_store.Found:
    try:
        found = tuning_store.read(path)
    except TuningError as error:
        raise _as_command_error(error) from None
    if found.damaged_lines:
        numbers = ", ".join(map(str, found.damaged_lines))
        typer.echo(f"jaxops: {path} has lines that tune did not write and that are ignored: {numbers}", err=True)
    return found


def _as_command_error(error: TuningError) -> CommandError:
    return CommandError(str(error).removeprefix("tune: "))
