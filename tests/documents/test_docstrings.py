"""Docstrings begin as one would say them; those of public functions have examples that run as written.

mcDNN's arguments are described in each function's docstring, or in its package's.
"""

import doctest
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
import lowering

FOR_FRAMEWORKS = (jaxops.equinox, jaxops.linen, jaxops.nnx)  # whose classes have examples as well
PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (jaxops, jaxops.aclnn, jaxops.mcdnn, jaxops.testing, lowering, *FOR_FRAMEWORKS)
    for name in module.__all__
    if inspect.isfunction(getattr(module, name)) or module in FOR_FRAMEWORKS
}

ROOT = Path(__file__).parents[2]
PACKAGES = ("jaxops", "jaxops_command", "lowering", "pallas_kernels")
QUESTION_WORDS = frozenset(("What", "Whether", "How", "Why", "Where", "Which", "When", "Who", "If", "Of", "That"))
ARTICLES = frozenset(("A", "An", "The"))


def first_words(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yields the line and the first word of every docstring in a file, and tells whether it is a function's.

    Reads lines, as parsing all files takes a second and more.
    """
    owner = "module"
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if found := re.match(r" *(@\S*property|(?:async )?def|class)\b", line):
            owner = "value" if owner.startswith("@") else found[1]
        elif found := re.match(r' *r?"""(\w+)', line):
            yield number, found[1], owner.endswith("def")


def test_docstrings_begin_with_verbs_and_nouns() -> None:
    wrong = []
    for path in sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        for line, word, is_function in first_words(path):
            if word in QUESTION_WORDS or (is_function and word in ARTICLES):
                wrong.append(f"{path.relative_to(ROOT)}:{line} begins with {word}")
    assert not wrong, "\n".join(wrong)


def test_examples_fit_their_column() -> None:
    """A page of 1440 pixels shows 88 characters of code; the rest of a line is cut."""
    lines = [
        line.strip()
        for file in sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
        for line in file.read_text().splitlines()
    ]
    assert [line for line in lines if line.startswith((">>> ", "... ")) and len(line) > 88] == []


@pytest.mark.sampled
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
