"""The docstring of each public function has an example that runs as written, and mcDNN's arguments are described."""

import doctest
import inspect
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
import lowering

PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (jaxops, jaxops.aclnn, jaxops.mcdnn, jaxops.testing, lowering)
    for name in module.__all__
    if inspect.isfunction(getattr(module, name))
}


@pytest.mark.parametrize("name", PUBLIC)
def test_example_runs_as_written(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"jax": jax, "jnp": jnp, "np": np, "jaxops": jaxops, "lowering": lowering}
    docstring = inspect.getdoc(PUBLIC[name]) or ""
    example = doctest.DocTestParser().get_doctest(docstring, names, name, None, None)
    assert any(step.want for step in example.examples), "shows no result"
    said: list[str] = []
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).run(example, out=said.append)
    assert not said, "".join(said)


def arguments_described_in(docstring: str) -> set[str]:
    lines = re.findall(r"^ +(\w+(?:, \w+)*): ", docstring, re.MULTILINE)
    return {name for line in lines for name in line.split(", ")}


@pytest.mark.parametrize("name", [name for name in PUBLIC if "mcdnn" in name])
def test_mcdnn_arguments_are_described_here_or_in_the_package(name: str) -> None:
    function = PUBLIC[name]
    package = jaxops.mcdnn.norm if "mcdnn.norm." in function.__module__ else jaxops.mcdnn
    described = arguments_described_in(inspect.getdoc(function) or "") | arguments_described_in(package.__doc__ or "")
    assert inspect.signature(function).parameters.keys() <= described
