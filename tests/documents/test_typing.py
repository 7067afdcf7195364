"""The packages' types, as a type checker sees them from a user's program."""

from pathlib import Path

import mypy.api
import pytest

PROGRAM = Path(__file__).parent / "typed_user_program.py"


@pytest.mark.slow
def test_user_program_type_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # away from this project's own settings
    # optax and parts of JAX are not annotated; that is not ours to report.
    flags = ["--strict", "--config-file=", "--follow-imports=silent", "--disable-error-code=import-untyped"]
    said, complaints, status = mypy.api.run([*flags, str(PROGRAM)])
    assert (status, complaints) == (0, ""), said
