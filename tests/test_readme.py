"""What the README shows is what happens."""

import re
from pathlib import Path
from typing import Any

import jax
import pytest

README = Path(__file__).parent.parent / "README.md"


def test_readme_examples_run_as_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    first, explained = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    (shown,) = re.findall(r"^```\n(tpu-v5e: .*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    namespace: dict[str, Any] = {}
    # What users have; optax's schedules, for one, divide an integer count by floats.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(first, namespace)
        exec(explained, namespace)
    assert 8 < float(namespace["loss"]) < 10
    printed = "".join(f"{line.rstrip()}\n" for line in capsys.readouterr().out.splitlines())
    assert printed == shown
