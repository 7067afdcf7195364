"""The `jaxops` command: what it prints, and one sentence with exit code 2 for whatever it cannot do."""

import importlib.util
import json
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest
from typer.testing import CliRunner, Result

import jaxops
import lowering
from jaxops._demo.processes import COUNTS
from jaxops._demo.train import Settings
from jaxops_command import options
from jaxops_command.app import app
from lowering.campaign.run import STAGES
from lowering.measurements import Entry, Key, Measurement
from lowering.measuring import timing
from lowering.select import EMULATED
from lowering.targets import PLATFORMS, parse

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
USER_FILE = """
import jax
import jaxops
import neighbour

def loss(log_probs, labels):
    return jaxops.nll_loss(log_probs, labels)

def loss_args():
    return jax.ShapeDtypeStruct((4, 7), "float32"), jax.ShapeDtypeStruct((4,), "int32")

def gradient(log_probs, labels):
    return jax.grad(loss)(log_probs, labels)

gradient_args = loss_args()

def nothing():
    return neighbour.ZERO

def failing(x):
    raise RuntimeError("first line, " + 30 * "long, " + "but whole\\nsecond line")

def doubled(x):
    from jax.experimental import pallas as pl
    def body(x, y):
        y[...] = 2 * x[...]
    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

same = listed = loss
listed_args = [1, 2]

largest = max

async def waiting(x):
    return x

def unlucky(x):
    return x

def unlucky_args():
    raise RuntimeError("no arguments today")
"""


@pytest.fixture
def user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a user's files, which becomes the working directory."""
    (tmp_path / "mine.py").write_text(USER_FILE)
    (tmp_path / "neighbour.py").write_text("ZERO = 0\n")
    (tmp_path / "example.py").write_text(USER_FILE.replace("loss_args", "example_args"))
    (tmp_path / "broken.py").write_text("import a_module_that_does_not_exist\n")
    (tmp_path / "notes.txt").write_text("not Python\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_ops_lists_every_operator() -> None:
    records = json.loads(run("ops", "--json").stdout)
    assert [record["name"] for record in records] == [operator.name for operator in jaxops.operators()]
    by_name = {record["name"]: record for record in records}
    assert by_name["nll_loss"]["signature"] == "... c, ..., c -> ..., ..."
    assert {kernel["platform"] for kernel in by_name["apply_fused_ema_adam"]["kernels"]} == {"tpu", "cuda"}
    table = run("ops").stdout
    assert all(name in table for name in by_name)


@pytest.mark.usefixtures("user_file")
@pytest.mark.parametrize(
    "arguments",
    [
        ("mine.py:loss",),
        ("example.py:loss",),
        ("mine.py:loss", "--arg", "float32[4,7]", "--arg", "int32[4]"),
        ("mine.py:loss", "--arg", "f32[4,7]", "--arg", "i32[4]"),
    ],
    ids=["arguments of the function", "arguments of the file", "arguments of the command", "short"],
)
def test_explain_prints_what_lowering_explains(arguments: tuple[str, ...]) -> None:
    explanation = json.loads(run("explain", *arguments, "--target", "tpu-v5e", "--json").stdout)
    assert explanation["target"] == "tpu-v5e"
    (row,) = explanation["rows"]
    assert (row["operator"], row["count"], row["operands"][0]) == ("nll_loss", 1, "float32[4,7]")


def test_json_is_not_mixed_with_what_user_code_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loud.py").write_text("print('imported')\ndef loud(x):\n    print('called')\n    return x\n")
    result = run("explain", "loud.py:loud", "--arg", "f32[2]", "--json")
    assert json.loads(result.stdout)["rows"] == []
    assert "called" in result.stderr


@pytest.mark.usefixtures("user_file")
def test_explain_table_shows_the_backward_operator() -> None:
    result = run("explain", "mine.py:gradient")
    assert result.exit_code == 0
    assert "nll_loss_backward" in result.stdout


@pytest.mark.usefixtures("user_file")
def test_explain_takes_a_function_without_arguments() -> None:
    assert json.loads(run("explain", "mine.py:nothing", "--json").stdout)["rows"] == []


REFUSALS = {
    "no command": (("tell",), "No such command 'tell'."),
    "no option": (("ops", "--yaml"), "No such option: --yaml"),
    "no file": (
        ("explain", "yours.py:loss"),
        "FILE.py:FUNCTION must name an existing Python file; got 'yours.py:loss'",
    ),
    "long file": (("explain", f"{300 * 'a'}.py:loss"), "FILE.py:FUNCTION must name an existing Python file; got 'aaa"),
    "no function": (
        ("explain", "mine.py"),
        "FILE.py:FUNCTION must name a function after the file, as in mine.py:step; got 'mine.py'",
    ),
    "empty function": (
        ("explain", "mine.py:"),
        "FILE.py:FUNCTION must name a function after the file, as in mine.py:step; got 'mine.py:'",
    ),
    "not Python": (("explain", "notes.txt:loss"), "must name an existing Python file; got 'notes.txt:loss'"),
    "unknown function": (("explain", "mine.py:losss"), "FILE.py:FUNCTION must name a function of mine.py; got 'losss'"),
    "broken file": (
        ("explain", "broken.py:f"),
        "broken.py must be importable; got ModuleNotFoundError: No module named",
    ),
    "unknown target": (
        ("explain", "mine.py:loss", "--target", "abacus"),
        "jaxops: target must be one of cpu, tpu-v5e,",
    ),
    "bad shape": (
        ("explain", "mine.py:loss", "--arg", "float32(4)"),
        "--arg must be DTYPE[SHAPE], such as float32[128,64]",
    ),
    "bad dtype": (
        ("explain", "mine.py:loss", "--arg", "float31[4]"),
        "--arg must have a dtype such as float32, bf16 or i32",
    ),
    "endless shape": (
        ("compile", "mine.py:unlucky", "--target", "cpu", "--arg", f"float32[{10**20}]"),
        "--arg must have fewer than 2**63 elements; got 'float32[100000000000000000000]'",
    ),
    "function without a signature": (
        ("explain", "mine.py:largest", "--arg", "float32[]", "--arg", "float32[]"),
        "mine.py:largest must be a function that JAX can trace; got <built-in function max>: TracerBoolConversionError",
    ),
    "async function": (("tune", "mine.py:waiting"), "mine.py:waiting must be a plain function; got an async function"),
    "long option": (("tune", f"--{'z' * 10**5}"), "z..."),
    "limit that is none": (
        ("emulate", "mine.py:loss", "--target", "tpu-v5e", "--at-most", "nan"),
        "--at-most must be 0 or a positive number; got nan",
    ),
    "too few arguments": (
        ("explain", "mine.py:loss", "--arg", "float32[4,7]"),
        "loss must take the arguments that are given; got 1 argument (missing a required argument: 'labels'): pass",
    ),
    "arguments in a list": (
        ("explain", "mine.py:listed"),
        "listed_args must be a tuple, or a function that returns one; got list",
    ),
    "failing arguments": (
        ("explain", "mine.py:unlucky"),
        "unlucky_args must return the arguments; got RuntimeError: no",
    ),
    "failing function": (
        ("explain", "mine.py:failing", "--arg", "float32[]"),
        f"; got RuntimeError: first line, {30 * 'long, '}but whole (a call in Python shows 1 more line)",
    ),
    "refused by an operator": (
        ("explain", "mine.py:loss", "--arg", "float32[4,7]", "--arg", "float32[4]"),
        "nll_loss: labels must ",
    ),
    "compile without target": (("compile", "mine.py:loss"), "Missing option '--target'"),
    "explain under two implementations": (
        ("explain", "mine.py:loss", "--implementation", "auto,pallas"),
        "--implementation must name one implementation, and exceptions such as dropout=reference; got 'auto,pallas'",
    ),
    "compile for an unknown target": (("compile", "mine.py:loss", "--target", "abacus"), "target must be one of cpu,"),
    "unknown implementation": (
        ("compile", "mine.py:loss", "--target", "cpu", "--implementation", "fast"),
        "must be one of auto, reference, pallas, or an exception such as dropout=reference; got 'fast'",
    ),
    "near implementation": (
        ("compile", "mine.py:loss", "--target", "cpu", "--implementation", "dropout=palas"),
        "got 'dropout=palas', did you mean pallas?",
    ),
    "compile what an operator refuses": (
        ("compile", "mine.py:loss", "--target", "cpu", "--arg", "float32[4,7]", "--arg", "float32[4]"),
        "nll_loss: labels must ",
    ),
    "export for an unknown platform": (
        ("export", "mine.py:loss", "--output", "out", "--platforms", "cpu,rocm"),
        "platforms must be of cpu, cuda, tpu; got rocm",
    ),
    "export into a file": (
        ("export", "mine.py:loss", "--output", "mine.py/out"),
        "--output must name a file that can be written; got 'mine.py/out': Not a directory",
    ),
    "no budget": (("tune", "mine.py:loss", "--budget", "0"), "--budget must be a positive number of seconds; got 0.0"),
    "endless budget": (("tune", "mine.py:loss", "--budget", "inf"), "--budget must be a positive number of seconds"),
    "tune into a file of another kind": (
        ("tune", "mine.py:loss", "--output", "notes.txt"),
        "notes.txt' must be a whole file that tune has written",
    ),
    "tune into no folder": (
        ("tune", "mine.py:loss", "--output", "nowhere/tuned.json"),
        "nowhere/tuned.json' must be a file that can be written; got No such file or directory",
    ),
    "tune what fails": (
        ("tune", "mine.py:failing", "--arg", "float32[4]"),
        "mine.py:failing must be traceable and its operators run here; got RuntimeError: first line",
    ),
    "tune what an operator refuses": (
        ("tune", "mine.py:loss", "--arg", "float32[4,7]", "--arg", "float32[4]"),
        "nll_loss: labels must ",
    ),
    "tuned by a file of another kind": (
        ("explain", "mine.py:loss", "--tuned", "notes.txt"),
        "notes.txt' must be a whole file that tune has written",
    ),
    "tuned by no file": (
        ("bench", "mine.py:loss", "--tuned", "tuned.json"),
        "'tuned.json' does not exist.",
    ),
    "bench an unknown implementation": (
        ("bench", "mine.py:loss", "--implementation", "auto,fast"),
        "must be one of auto, reference, pallas, or an exception such as dropout=reference; got 'fast'",
    ),
    "unknown operator": (
        ("compile", "mine.py:loss", "--target", "cpu", "--implementation", "dropuot=reference"),
        "must name an operator that `jaxops ops` lists, as in dropout=reference; got 'dropuot', did you mean dropout?",
    ),
    "two implementations": (
        ("compile", "mine.py:loss", "--target", "cpu", "--implementation", "auto,pallas"),
        "--implementation must name one implementation, and exceptions such as dropout=reference; got 'auto,pallas'",
    ),
    "empty operator": (
        ("export", "mine.py:loss", "--output", "out", "--implementation", "=reference"),
        "or an exception such as dropout=reference; got '=reference'",
    ),
    "bench three functions": (
        ("bench", "mine.py:loss", "mine.py:loss", "mine.py:loss"),
        "FILE.py:FUNCTION must be given once or twice; got mine.py:loss mine.py:loss mine.py:loss",
    ),
    "bench two functions and a rewrite": (
        ("bench", "mine.py:loss", "mine.py:gradient", "--rewrite"),
        "--rewrite must be given with one function; got mine.py:loss mine.py:gradient",
    ),
    "bench once": (("bench", "mine.py:loss", "--repeats", "1"), "--repeats must be at least 2; got 1"),
    "bench into no folder": (
        ("bench", "mine.py:loss", "--output", "nowhere/times.json"),
        "--output must be a file that can be written; got 'nowhere/times.json'",
    ),
    "export a kernel for TPUs to a CPU": (
        ("export", "mine.py:doubled", "--arg", "float32[8,128]", "--output", "doubled.jaxops"),
        "--platforms must be some on which the function's Pallas kernels run, such as tpu; got cpu,cuda,tpu",
    ),
    "bench what fails": (
        ("bench", "mine.py:failing", "--arg", "float32[4]"),
        "mine.py:failing must run here with these arguments; got RuntimeError: first line",
    ),
    "scalars of nothing": (
        ("compile", "mine.py:loss", "--target", "tpu-v5e", "--schedule", "--scalars", "kernel=3"),
        "--scalars must be KERNEL:POSITION=1,2,3 or KERNEL:POSITION=FILE.npy; got 'kernel=3'",
    ),
    "save no schedule": (
        ("compile", "mine.py:loss", "--target", "tpu-v5e", "--save", "base.json"),
        "--save must be given with --schedule; got 'base.json'",
    ),
    "compare with no file": (
        ("compile", "mine.py:loss", "--target", "tpu-v5e", "--schedule", "--against", "base.json"),
        "'base.json' does not exist.",
    ),
    "slower by no percentage": (
        ("compile", "mine.py:loss", "--target", "tpu-v5e", "--schedule", "--slower-than", "-3%"),
        "--slower-than must be a percentage, such as 3%; got '-3%'",
    ),
    "slower than nothing": (
        ("compile", "mine.py:loss", "--target", "tpu-v5e", "--schedule", "--slower-than", "3%"),
        "--slower-than must be given with --against; got '3%'",
    ),
    "trace into no folder": (
        ("compile", "mine.py:loss", "--target", "tpu-v5e", "--schedule", "--perfetto", "nowhere/trace.json"),
        "--perfetto must be a file that can be written; got 'nowhere/trace.json'",
    ),
    "compare with another file": (
        ("compile", "mine.py:loss", "--target", "tpu-v5e", "--schedule", "--against", "notes.txt"),
        "--against: 'notes.txt' must be a whole file of a saved schedule",
    ),
    "save over another file": (
        ("compile", "mine.py:loss", "--target", "tpu-v5e", "--schedule", "--save", "mine.py"),
        "--save: 'mine.py' must be a whole file of a saved schedule",
    ),
    "no steps": (("demo", "--steps", "0"), "--steps must be positive; got 0"),
    "steps in words": (("demo", "--steps", "many"), "Invalid value for '--steps'"),
    "negative seed": (("demo", "--seed", "-1"), "--seed must be in [0, 2**32); got -1"),
    "output in a file": (
        ("demo", "--output", "mine.py/out"),
        "--output must be a folder that can be written to; got 'mine.py/out'",
    ),
}


@pytest.mark.usefixtures("user_file")
@pytest.mark.parametrize(("arguments", "words"), REFUSALS.values(), ids=REFUSALS)
def test_refusal_is_one_sentence(arguments: tuple[str, ...], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    (sentence,) = result.stderr.splitlines()
    assert sentence.startswith("jaxops: ")
    assert len(sentence) < 1000
    assert words in sentence


# Refusals that need the user's code, or the library.
NEED_MORE_THAN_WORDS = {
    "unknown function",
    "broken file",
    "function without a signature",
    "async function",
    "too few arguments",
    "arguments in a list",
    "failing arguments",
    "failing function",
    "refused by an operator",
    "compile what an operator refuses",
    "export into a file",
    "tune into a file of another kind",
    "tune into no folder",
    "tune what fails",
    "tune what an operator refuses",
    "tuned by a file of another kind",
    "unknown operator",
    "bench what fails",
    "export a kernel for TPUs to a CPU",
    "compare with another file",
    "save over another file",
}


@pytest.mark.usefixtures("user_file")
def test_help_and_refusals_of_words_do_without_jax() -> None:
    """In a process of its own, started as the installed command is: importing JAX takes most of a second."""
    assert set(REFUSALS) > NEED_MORE_THAN_WORDS
    commands = [[], *([command.name or command.callback.__name__] for command in app.registered_commands)]
    lines = [[*command, "--help"] for command in commands]
    lines += [list(arguments) for name, (arguments, _) in REFUSALS.items() if name not in NEED_MORE_THAN_WORDS]
    module, _, attribute = PROJECT["scripts"]["jaxops"].partition(":")
    code = f"""
import json, sys
from {module} import {attribute} as command
heavy = lambda: sorted({{"jax", "jaxlib", "jaxops", "lowering"}} & sys.modules.keys())
found = [["import", 0, heavy()]]
for line in json.loads(sys.stdin.read()):
    try:
        command(line)
    except SystemExit as stop:
        found.append([line, stop.code, heavy()])
print(json.dumps(found), file=sys.stderr)
"""
    child = [sys.executable, "-c", code]
    result = subprocess.run(child, input=json.dumps(lines), capture_output=True, text=True, check=True)
    found = json.loads(result.stderr.splitlines()[-1])
    assert [line for line, _, _ in found] == ["import", *lines]
    assert [status for _, status, _ in found] == [0] * (1 + len(commands)) + [2] * (len(lines) - len(commands))
    assert [line for line, _, heavy in found if heavy] == []


def test_command_says_what_the_library_does() -> None:
    """What `options` repeats, in order to do without JAX."""
    assert tuple(chip.name for chip in lowering.targets()) == options.CHIPS
    assert EMULATED == options.EMULATED
    assert options.PLATFORMS == PLATFORMS
    assert options.COMPILERS == lowering.compilers.PLATFORMS
    assert options.STAGES == STAGES
    assert options.PROCESS_COUNTS == COUNTS
    assert (Settings().steps, Settings().seed) == (options.STEPS, options.SEED)
    names = ("cpu", "tpu", "rocm", "tpu-v5e:4x4", "tpu-v5e:0", "tpu-v5e:4x4x4x4", "cuda-h100:64", "cuda-h100:a", "")
    names = (*names, "tpu-v5", "tpu-v99", "H100", "tpu_v6e:2x2", "tpus")
    for name in (*options.CHIPS, *names):
        refused = []
        for check, error in ((options.require_target, options.CommandError), (parse, ValueError)):
            try:
                check(name)
            except error as problem:
                refused.append(str(problem).removeprefix("lowering: "))
        assert len(refused) in (0, 2)
        assert len(set(refused)) <= 1


@pytest.mark.parametrize("package", ["tokenizers", "matplotlib"])
def test_demo_says_what_to_install(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else object())
    result = run("demo")
    assert result.exit_code == 2
    helps = "pip install '.[demo]' in a clone of the repository"
    assert result.stderr == f"jaxops: {package} must be installed; it is not: {helps}\n"


def test_the_command_runs_as_a_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["jaxops", "targets"])
    with pytest.raises(SystemExit) as ending:
        runpy.run_module("jaxops_command", run_name="__main__")
    assert ending.value.code in (None, 0)
    assert "tpu-v5e" in capsys.readouterr().out


def test_help_without_arguments() -> None:
    said = run().output
    assert all(command in said for command in ("demo", "explain", "bench"))
    assert "..." not in said.replace("[ARGS]...", "")  # each command's sentence is whole


@pytest.mark.usefixtures("user_file")
def test_compile_prints_and_saves_the_report(tmp_path: Path) -> None:
    arguments = ("compile", "mine.py:loss", "--target", "cpu", "--output", "out")
    report = json.loads(run(*arguments, "--json").stdout)
    assert report["target"] == "cpu"
    assert report["memory"]["arguments"] == 4 * (4 * 7 + 4)
    assert "stablehlo.select" in (tmp_path / "out" / "stablehlo.mlir").read_text()
    assert (tmp_path / "out" / "optimized.hlo").read_text().startswith("HloModule")
    assert "temporaries, bytes" in run(*arguments).stdout


@pytest.mark.usefixtures("user_file")
def test_export_writes_what_load_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("export", "mine.py:loss", "--output", "loss.jaxops")
    record = json.loads(run(*arguments, "--json").stdout)
    assert record["implementations"]["tpu"] == {"nll_loss": ["reference"]}
    assert lowering.load(tmp_path / "loss.jaxops").platforms == ("cpu", "cuda", "tpu")
    assert "nll_loss" in run(*arguments).stdout
    # A list, where the table is too wide, says which platform takes what.
    monkeypatch.setenv("COLUMNS", "24")
    assert run(*arguments).stdout.splitlines()[-3:] == ["  cpu: reference", "  cuda: reference", "  tpu: reference"]


def test_targets_says_what_can_be_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")  # no cell is wrapped
    records = {record["name"]: record for record in json.loads(run("targets", "--json").stdout)}
    assert records["cpu"]["status"] == "here"
    assert records["cuda-h100"]["memory_bytes"] == 80 * 10**9
    table = run("targets").stdout
    assert all(name in table for name in records)
    # Brackets in what is to be installed are no markup.
    assert records["tpu-v5e"]["status"] in " ".join(table.split())


@pytest.mark.usefixtures("user_file")
def test_tune_prints_and_keeps_what_it_measured(tmp_path: Path) -> None:
    arguments = ("tune", "mine.py:gradient", "--output", "tuned.json")
    record = json.loads(run(*arguments, "--json").stdout)
    assert record == json.loads((tmp_path / "tuned.json").read_text())
    assert [entry["operator"] for entry in record["entries"]] == ["nll_loss", "nll_loss_backward"]
    assert record["entries"][0]["winner"] == {"implementation": "reference", "config": {}}
    result = run(*arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "* reference" in result.stdout


@pytest.mark.usefixtures("user_file")
@pytest.mark.parametrize("command", ["explain", "compile", "export"])
def test_commands_choose_by_what_was_tuned(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = Key("tpu-v5e", "nll_loss", ("float32[4,7]",), "", ())
    lowering.TuningResult((Entry(key, (Measurement("reference", (), 1.0),), 3),)).save(tmp_path / "tuned.json")
    seen = []
    original = getattr(lowering, command)

    def spied(*args: object, **kwargs: object) -> object:
        seen.append([entry.key for entry in lowering.current_selection().tuned])
        return original(*args, **kwargs)

    monkeypatch.setattr(lowering, command, spied)
    more = {"explain": (), "compile": ("--target", "cpu"), "export": ("--output", "loss.jaxops")}[command]
    assert run(command, "mine.py:loss", "--tuned", "tuned.json", *more).exit_code == 0
    assert seen == [[key]]


@pytest.mark.usefixtures("user_file")
def test_interrupted_tune_says_in_one_sentence_what_it_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(timing, "rounds", interrupted)
    result = run("tune", "mine.py:loss", "--output", "tuned.json", "--json")
    assert result.exit_code == 130
    assert result.stderr == "jaxops: interrupted after 0 of the function's operators, which tuned.json keeps\n"
    assert json.loads(result.stdout)["stopped"] == "interrupted"
    assert not lowering.TuningResult.load(tmp_path / "tuned.json").complete


@pytest.mark.usefixtures("user_file")
def test_bench_times_each_implementation(tmp_path: Path) -> None:
    arguments = ("bench", "mine.py:gradient", "--repeats", "3", "--output", "times.json")
    record = json.loads(run(*arguments, "--json").stdout)
    assert record == json.loads((tmp_path / "times.json").read_text())
    assert (record["device"], record["versions"]["jax"]) == ("cpu", jax.__version__)
    assert [row["implementation"] for row in record["rows"]] == ["auto", "reference", "pallas"]
    for row in record["rows"]:
        assert row["repeats"] == 3
        assert row["quartiles_ms"][0] <= row["median_ms"] <= row["quartiles_ms"][1]
        assert row["taken"] == {"nll_loss": ["reference"], "nll_loss_backward": ["reference"]}
    assert "the same program as auto" in run(*arguments, "--implementation", "auto,pallas").stdout


@pytest.mark.usefixtures("user_file")
def test_bench_says_where_there_is_nothing_to_compare() -> None:
    said = "these are one program on cpu, so there is nothing to compare: name a second function, or pass --rewrite"
    assert said in run("bench", "mine.py:loss", "--repeats", "2").stdout.splitlines()
    said = "these are one program on cpu, so there is nothing to compare"
    result = run("bench", "mine.py:loss", "mine.py:same", "--repeats", "2")
    assert said in result.stdout.splitlines()
    assert "nothing to compare" not in run("bench", "mine.py:loss", "mine.py:gradient", "--repeats", "2").stdout


def test_bench_gives_two_functions_arguments_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "both.py").write_text(
        """import jax, jax.numpy as jnp, numpy as np
def adam(params, state):
    assert state["m"].shape == (4,)
    return params.sum() * state["m"].sum()
def lion(params, state):
    assert state.shape == (5,)
    return params.sum() + state.sum()
adam_args = (jnp.ones(3), {"m": np.ones(4, np.float32)})
lion_args = (jnp.ones(3), jax.ShapeDtypeStruct((5,), jnp.float32))
"""
    )
    monkeypatch.chdir(tmp_path)
    command = ("bench", "both.py:adam", "both.py:lion", "--repeats", "2", "--json")
    for more in ((), ("--gradients",)):
        rows = json.loads(run(*command, *more).stdout)["rows"]
        assert [row["function"] for row in rows] == ["both.py:adam", "both.py:lion"]
        assert all(row["median_ms"] > 0 for row in rows)


@pytest.mark.usefixtures("user_file")
def test_bench_times_a_function_before_and_after() -> None:
    record = json.loads(run("bench", "mine.py:loss", "mine.py:gradient", "--repeats", "3", "--json").stdout)
    assert [(row["function"], row["implementation"], row["same_as"]) for row in record["rows"]] == [
        ("mine.py:loss", "auto", ""),
        ("mine.py:gradient", "auto", ""),
    ]
    assert all(row["repeats"] == 3 and row["median_ms"] > 0 for row in record["rows"])


REWRITTEN_FILE = """
import jax, jax.numpy as jnp

def pooled(x):
    return jnp.sum(jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2), (1, 2), "VALID") ** 2)
"""


def test_bench_compares_a_function_with_its_rewrite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plain.py").write_text(REWRITTEN_FILE)
    monkeypatch.chdir(tmp_path)
    arguments = ("bench", "plain.py:pooled", "--rewrite", "--gradients", "--arg", "f32[64,4096]", "--repeats", "2")
    before, after = json.loads(run(*arguments, "--json").stdout)["rows"]
    assert (before["function"], after["function"]) == ("plain.py:pooled", "plain.py:pooled, rewritten")
    assert before["taken"] == {}
    assert set(after["taken"]) == {"max_pool", "max_pool_backward"}
    assert after["same_as"] == ""
    refused = run(*arguments[:3], "--gradients", "--arg", "i32[64,4096]")
    assert refused.exit_code
    assert "--gradients must be given where plain.py:pooled has floating-point arguments" in refused.stderr


@pytest.mark.usefixtures("user_file")
def test_implementations_of_single_operators_are_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = lowering.compile

    def spied(*args: object, **kwargs: object) -> object:
        seen.append(str(lowering.current_selection()))
        return original(*args, **kwargs)

    monkeypatch.setattr(lowering, "compile", spied)
    command = ("compile", "mine.py:loss", "--target", "cpu", "--implementation")
    for words in (("pallas,nll_loss=reference",), ("pallas", "--implementation", "nll_loss=reference")):
        assert run(*command, *words).exit_code == 0
    assert run(*command, "dropout=reference, nll_loss=pallas").exit_code == 0
    selected = "pallas nll_loss=reference"
    assert seen == [selected, selected, "auto dropout=reference nll_loss=pallas"]


def test_explain_shows_what_an_asked_implementation_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "probs.py").write_text("import jaxops\ndef probs(x):\n    return jaxops.softmax(x)\n")
    monkeypatch.chdir(tmp_path)
    command = ("explain", "probs.py:probs", "--target", "tpu-v5e", "--arg", "f32[256,1024]", "--json")
    for words, expected in (
        ("reference", "reference"),
        ("pallas", "mosaic_tpu"),
        ("pallas,softmax=reference", "reference"),
    ):
        (row,) = json.loads(run(*command, "--implementation", words).stdout)["rows"]
        assert (row["operator"], row["implementation"]) == ("softmax", expected)


def test_refused_kernel_names_the_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import jax, jaxops\ndef dropped(x):\n    return jaxops.dropout(jax.random.key(0), x, 0.5)\n"
    (tmp_path / "ragged.py").write_text(code)  # a row of its argument below has no whole words
    monkeypatch.chdir(tmp_path)
    export = ("export", "ragged.py:dropped", "--output", "out", "--platforms", "tpu", "--arg", "f32[3,5]")
    refused = run(*export, "--implementation", "pallas")
    assert refused.exit_code == 2
    assert refused.stderr.endswith(": --implementation pallas,dropout=reference keeps it on its reference\n")
    record = run(*export, "--implementation", "pallas", "--implementation", "dropout=reference", "--json").stdout
    assert json.loads(record)["implementations"] == {"tpu": {"dropout": ["reference"]}}


@pytest.mark.sampled
@pytest.mark.usefixtures("user_file")
@pytest.mark.parametrize("columns", [40, 80])
@pytest.mark.parametrize(
    "arguments",
    [
        ("ops",),
        ("targets",),
        ("explain", "mine.py:gradient", "--target", "tpu-v5e"),
        ("export", "mine.py:gradient", "--output", "gradient"),
        ("tune", "mine.py:gradient", "--budget", "60"),
        ("bench", "mine.py:gradient", "mine.py:loss", "--repeats", "2"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_narrow_tables_break_no_names(
    arguments: tuple[str, ...], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    narrow = run(*arguments).stdout
    assert max(map(len, narrow.splitlines())) <= columns
    monkeypatch.setenv("COLUMNS", "300")
    names = re.findall(r"[a-z]\w*_\w+|tpu-\w+|cuda-\w+", run(*arguments).stdout)
    assert names
    assert [name for name in names if name not in narrow] == []


@pytest.mark.usefixtures("user_file")
def test_functions_without_operators_are_told_in_a_sentence() -> None:
    sentence = "mine.py:unlucky has none of this library's operators"
    assert run("tune", "mine.py:unlucky", "--arg", "f32[3]").stdout == f"{sentence}: there is nothing to tune\n"
    exported = run("export", "mine.py:unlucky", "--arg", "f32[3]", "--output", "plain").stdout
    assert exported == f"plain, {Path('plain').stat().st_size:,} bytes: {sentence}\n"
