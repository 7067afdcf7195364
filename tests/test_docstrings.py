"""The docstring of each public function has an example that runs as written."""

import doctest
import inspect
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
    for module in (jaxops, jaxops.aclnn, jaxops.mcdnn, lowering)
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
