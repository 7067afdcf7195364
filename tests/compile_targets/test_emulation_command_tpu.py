"""The command that executes compiled TPU kernels: what it prints, and how it exits."""

import re
import textwrap
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from jaxops_command.app import app

pytestmark = pytest.mark.tpu_compile

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("name", "fn"), [("double_buffered", "double"), ("nearest", "squared_distances")])
def test_the_page_shows_what_the_command_prints(name, fn):
    page = (ROOT / "docs" / "emulation.md").read_text()
    command = f"emulate examples/{name}.py:{fn} --target tpu-v5e"
    shown = re.search(rf"    \$ jaxops {re.escape(command)}\n((?:    .*\n)+)", page)
    result = CliRunner().invoke(app, command.replace("examples", str(ROOT / "examples")).split())
    # How long it takes, and how many bundles there are, differs between machines and compilers.
    numbers = re.compile(r" *[\d.,]+(?= │)| 0x[0-9a-f]+")
    assert shown is not None
    # Sentences are wrapped on a terminal alone.
    printed, on_page = (" ".join(numbers.sub(" 0", text).split()) for text in (result.stdout, shown[1]))
    assert printed == on_page
    assert result.exit_code == (1 if name == "double_buffered" else 0)


def test_the_command_fails_where_the_interpreter_refuses_a_kernel_or_none_runs(tmp_path):
    """A block that is visited again is lost on a chip; by accident, the emulation may be right."""
    (tmp_path / "mine.py").write_text(
        textwrap.dedent("""
        import jax
        import jax.numpy as jnp
        from jax.experimental import pallas as pl

        def kernel(x_ref, o_ref):
            o_ref[...] = x_ref[...]

        def undefined_kernel(x_ref, o_ref):
            o_ref[...] = jnp.log(-1 - x_ref[...])  # on a chip NaN has other bits

        def copied(x, interpret, at, kernel=kernel):
            spec = pl.BlockSpec((8, 128), lambda i, j: (at(i), j))
            options = {"grid": (2, 2), "out_shape": x, "interpret": interpret}
            return pl.pallas_call(kernel, in_specs=[spec], out_specs=spec, **options)(x)

        def revisits(x):
            return copied(x, False, lambda i: 0)

        def interpreted(x):
            return copied(x, True, lambda i: i)

        def copies(x):
            return copied(x, False, lambda i: i)

        def undefined(x):
            return copied(x, False, lambda i: i, undefined_kernel)
        """)
    )
    for name, argument, code, said in (
        ("revisits", "f32[8,256]", 1, "┘ Pallas' interpreter refuses it: RuntimeError: Revisited block"),
        (
            "interpreted",
            "f32[16,256]",
            2,
            "no Pallas kernel runs; a pallas_call on mine.py:15 (copied) has interpret=True",
        ),
        ("undefined", "f32[16,256]", 0, "NaN: 4,096 here, 4,096 there"),
        ("copies", "i32[16,256]", 0, "┘ integer arguments were drawn from 0 to 1: --operands FILE.npz gives others"),
    ):
        command = ["emulate", f"{tmp_path / 'mine.py'}:{name}", "--arg", argument, "--target", "tpu-v5e"]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == code
        assert said in " ".join(result.output.split())
        assert "Traceback" not in result.stderr


def test_the_command_fails_where_results_are_too_far_from_the_interpreters(monkeypatch):
    distances = f"{ROOT / 'examples' / 'nearest.py'}:squared_distances"

    def code(*options):
        result = CliRunner().invoke(app, ["emulate", distances, "--target", "tpu-v5e", *options])
        assert ("nothing was found" in result.stdout) == (result.exit_code == 0)
        return result.exit_code, result.stderr

    assert code("--at-most", "1e-2")[0] == 0
    failed, said = code("--at-most", "1e-3")
    assert failed == 1
    assert "further from the interpreter's than 0.001 of the largest element: result" in said
    monkeypatch.setattr("jaxops_command.emulation.interpret", lambda *_, target: np.full((64, 256), 1e3, np.float32))
    failed, said = code()
    assert failed == 1
    assert "than 0.1 of the largest element (--at-most gives another limit): result" in said
    assert code("--at-most", "1")[0] == 0
    monkeypatch.setattr("jaxops_command.emulation.interpret", lambda *_, target: np.full((64, 256), np.nan, np.float32))
    failed, said = code()
    assert failed == 1
    assert "NaN here or there, but not in both: result" in said
