"""`jaxops doctor`: what is installed, and which known faults of it touch this library or a user's function."""

import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import typer
from rich.table import Table
from rich.text import Text

from jaxops_command import touched
from jaxops_command.known_faults import release
from jaxops_command.output import show, show_text
from jaxops_command.user_function import device_trouble, load, run_user_code
from lowering import TuningError, compilers, tuning_store
from lowering.measurements import versions
from lowering.register import installed_packages
from lowering.targets import here, parse

_PYTHONS = ((3, 11), (3, 14))
_OLDEST_JAX = (0, 10, 2)
_MOST_LINES = 3


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of the environment.

    Attributes:
      name: what it is.
      found: what was found.
      trouble: what is wrong with it and what helps; empty if nothing is.
    """

    name: str
    found: str
    trouble: str = ""


@dataclasses.dataclass(frozen=True)
class Finding:
    """A known fault of what is installed.

    Attributes:
      fault: its repository and number.
      thread: where it was reported.
      what: what goes wrong.
      touches: what it may touch: lines of the user's function, or of this library.
      helps: what avoids it.
    """

    fault: str
    thread: str
    what: str
    touches: tuple[str, ...]
    helps: str


def doctor(function: str | None, arg: Sequence[str], target: str | None, as_json: bool) -> None:
    """Checks what is installed against known faults."""
    parts = tuple(_environment())
    has_devices = not any(part.name == "devices" and part.trouble for part in parts)
    findings = _findings(function, arg or [], target) if has_devices else []  # without any, JAX traces nothing
    is_healthy = not any(part.trouble for part in parts) and not any(finding.touches for finding in findings)
    if as_json:
        record = {
            "healthy": is_healthy,
            "environment": [dataclasses.asdict(part) for part in parts],
            "faults": [dataclasses.asdict(finding) for finding in findings],
        }
        print(json.dumps(record, indent=2))
    else:
        _show_parts(parts)
        if has_devices:
            _show_findings(findings, function or "this library")
    if not is_healthy:
        raise typer.Exit(1)


def _findings(function: str | None, arg: Sequence[str], target: str | None) -> list[Finding]:
    platform = here().platform if target is None else parse(target).hardware.platform
    faults = touched.faults_here(metadata.version("jaxlib"), platform, os.environ.get("XLA_FLAGS", ""))
    if function is None:
        places = [touched.of_library(fault, platform) for fault in faults]
    else:
        fn, args = load(function, arg)

        def looked() -> list[list[str]]:
            return [touched.lines(fn, args, fault, platform) for fault in faults]

        places = run_user_code(function, "be traceable with these arguments", looked)
    found = [
        Finding(fault.name, fault.thread, fault.what, tuple(where), fault.helps)
        for fault, where in zip(faults, places, strict=True)
    ]
    return sorted(found, key=lambda finding: not finding.touches)


def _environment() -> Iterator[Part]:
    python = sys.version_info[:3]
    supported = _PYTHONS[0] <= python < _PYTHONS[1]
    yield Part("Python", ".".join(map(str, python)), "" if supported else "it must be 3.11, 3.12 or 3.13")
    jax_version, jaxlib = metadata.version("jax"), metadata.version("jaxlib")
    trouble = "" if release(jax_version) >= _OLDEST_JAX else "jaxops needs JAX 0.10.2 or newer"
    if release(jax_version)[:3] != release(jaxlib)[:3]:
        trouble = f"they should be of one release: pip install jaxlib=={jax_version}"
    yield Part("JAX", f"jax {jax_version}, jaxlib {jaxlib}", trouble)
    yield Part("jaxops", dict(versions()).get("jaxops", "not installed, but found on the path"))
    yield _plugins(jaxlib)
    yield Part("operator packages", _listed(_versions_by_package(installed_packages())))
    yield _devices()
    for platform in compilers.PLATFORMS:
        interpreter = compilers.interpreter(platform)
        yield Part(f"{platform} compiler", interpreter or f"not installed: {compilers.command(platform)}")
    yield _tuned()
    yield Part("XLA_FLAGS", os.environ.get("XLA_FLAGS", "").strip() or "not set")


def _plugins(jaxlib: str) -> Part:
    installed = _versions_by_package(metadata.entry_points(group="jax_plugins"))
    others = [name for name, version in installed.items() if release(version)[:3] != release(jaxlib)[:3]]
    is_pinned = [name for name in others if name.startswith("jax")]
    trouble = f"{is_pinned[0]} should be of jaxlib's release, {jaxlib}" if is_pinned else ""
    if not installed and Path("/dev/nvidiactl").exists():
        trouble = "there is an NVIDIA GPU that JAX cannot use: pip install 'jax[cuda13]'"
    return Part("JAX plugins", _listed(installed), trouble)


def _versions_by_package(entries: metadata.EntryPoints) -> dict[str, str]:
    """Returns the packages, other than this one, that these entry points come from."""
    return {entry.dist.name: entry.dist.version for entry in entries if entry.dist and entry.dist.name != "jaxops"}


def _listed(packages: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(packages.items())) or "none"


def _devices() -> Part:
    if trouble := device_trouble():
        return Part("devices", "none", trouble)
    devices = jax.devices()
    kinds = sorted({device.device_kind for device in devices})
    count = f"{len(devices)} x {', '.join(kinds)}"
    if here().platform == "cpu":
        return Part("devices", count)
    is_unknown = here().name == here().platform
    return Part("devices", f"{count}, a chip without figures" if is_unknown else f"{count}, {here().name}")


def _tuned() -> Part:
    """Describes the files that `jaxops tune` keeps on this machine."""
    paths = sorted(tuning_store.folder().glob("*.jsonl"))
    texts, troubles = [], []
    for path in paths:
        try:
            records = tuning_store.read(path)
        except TuningError as error:
            troubles.append(str(error))
            continue
        current = [record for record in records.records if record.get("versions") == dict(versions())]
        texts.append(f"{path.stem}: {len(current)} of {len(records.records)} records of these versions")
        if records.damaged_lines:
            troubles.append(f"{path} has damaged lines: {', '.join(map(str, records.damaged_lines))}")
    return Part("tuned", "; ".join(texts) or f"nothing in {tuning_store.folder()}", "; ".join(troubles))


def _show_parts(parts: tuple[Part, ...]) -> None:
    table = Table(title="what is installed", title_justify="left")
    table.add_column("part", no_wrap=True)
    table.add_column("found")
    for part in parts:
        found = Text(part.found)
        if part.trouble:
            found.append(f"\n{part.trouble}", "red")
        table.add_row(part.name, found)
    show(table)


def _show_findings(findings: list[Finding], subject: str) -> None:
    touching = [finding for finding in findings if finding.touches]
    if touching:
        table = Table(title=Text(f"known faults that may touch {subject}"), title_justify="left")
        for name in ("fault", "what", "touches", "what helps"):
            table.add_column(name)
        for finding in touching:
            cells = (finding.fault, finding.what, _shortened(finding.touches), finding.helps)
            table.add_row(*map(Text, cells))
        show(table)
        for finding in touching:
            show_text(f"{finding.fault}: {finding.thread}")
    others = [finding for finding in findings if not finding.touches]
    if others:
        show_text(f"other known faults of these versions, which do not touch {subject}:")
    for finding in others:
        show_text(f"  {finding.fault}: {finding.what} {finding.thread}")
    if not findings:
        show_text("no known faults of these versions on this platform")


def _shortened(places: tuple[Any, ...]) -> str:
    more = len(places) - _MOST_LINES
    return "\n".join([*places[:_MOST_LINES], *([f"and {more} more"] if more > 0 else [])])
