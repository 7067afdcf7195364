"""Keeps what compilers said of a program, so that the same program is not compiled twice."""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import platformdirs

from lowering.describe import file_fault, show
from lowering.planning.cases import Case, PlanError
from lowering.select import current_selection

_FORMAT = 2  # of the records; a change makes old ones unused


def folder(given: str | Path | None) -> Path:
    """Returns the folder where records are kept: what the caller names, else a folder in the user's cache.

    Raises:
      PlanError: if nothing can be kept there.
    """
    path = platformdirs.user_cache_path("jaxops") / "plans" if given is None else Path(given)
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise PlanError(
            f"plan: cache must be a folder that can be written to; got {show(str(path))}: {file_fault(error)}"
        ) from None
    return path


def key(case: Case, closed: Any, args: Sequence[Any], donated: Sequence[bool]) -> str:
    """Names a program on a slice, under these versions: what it computes, on what, and where each part lies."""
    text = re.sub(r" at 0x[0-9a-f]+", "", str(closed.jaxpr))
    leaves = jax.tree.leaves(args)
    described = [
        str(_FORMAT),
        case.name,
        str(dict(case.mesh.shape)),
        text,
        *(f"{leaf.dtype}{leaf.shape}{getattr(leaf.sharding, 'spec', '')}" for leaf in leaves),
        str(list(donated)),
        repr(current_selection()),
        *(f"{name} {_version(name)}" for name in ("jax", "jaxlib", "jaxops")),
    ]
    digest = hashlib.sha256("\n".join(described).encode())
    for constant in closed.consts:
        if not jnp.issubdtype(constant.dtype, jax.dtypes.extended):
            digest.update(np.asarray(constant).tobytes())
    return digest.hexdigest()[:32]


def read(path: Path, name: str) -> dict[str, Any] | None:
    """Reads the record under a name; None if there is none that can be read."""
    with contextlib.suppress(OSError, ValueError):
        record = json.loads((path / f"{name}.json").read_text())
        return record if isinstance(record, dict) else None
    return None


def write(path: Path, name: str, record: dict[str, Any]) -> None:
    """Keeps a record, complete or not at all."""
    with tempfile.NamedTemporaryFile("w", dir=path, suffix=".part", delete=False) as file:
        json.dump(record, file)
    os.replace(file.name, path / f"{name}.json")


def _version(name: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return ""
