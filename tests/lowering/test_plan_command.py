"""`jaxops plan`: a file's function and its shardings, the options, and one sentence for what cannot be planned."""

import json
from pathlib import Path

import pytest
from jax.sharding import PartitionSpec
from typer.testing import CliRunner, Result

from jaxops_command.app import app
from lowering.compiling.report import Memory
from lowering.planning import api

USER_FILE = """
import jax
from jax.sharding import PartitionSpec as P

def step(weight, x):
    return jax.numpy.tanh(x @ weight)

step_args = jax.ShapeDtypeStruct((64, 32), "float32"), jax.ShapeDtypeStruct((16, 64), "float32")

def step_shardings(mesh):
    return P(None, "tensor"), P("data")

def whole(weight, x):
    return step(weight, x)

whole_args = step_args

def wrong(weight, x):
    return step(weight, x)

wrong_args, wrong_shardings = step_args, 3

steps = {"as it is": step, "negated": lambda weight, x: -step(weight, x)}
steps_args, steps_shardings = step_args, step_shardings
"""
STEP = ("plan", "user.py:step", "--mesh", "data=2,tensor=-1", "--target", "tpu-v5e:2x4", "--target", "cuda-h100:16")


@pytest.fixture(autouse=True)
def planned(tmp_path, monkeypatch):
    """A user's file, and no compilers; lists how arguments were split."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("user.py").write_text(USER_FILE)
    specs = []

    class Compiled:
        memory = Memory(10**9, 0, 0, 0)
        hlo = ""

    def compile(fn, *args, target):
        specs.append((target, *(getattr(arg.sharding, "spec", None) for arg in args)))
        return Compiled()

    monkeypatch.setattr(api, "compile", compile)
    monkeypatch.setattr(api, "availability", lambda hardware: "can compile for")
    return specs


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_plan_prints_and_saves_what_fits(planned):
    pytest.importorskip("matplotlib")
    result = run(*STEP, "--tokens", "16", "--price", "tpu-v5e=1.2", "--output", "plan.json", "--plot", "plan.png")
    assert result.exit_code == 0
    assert "2 of 2 fit" in result.stdout
    assert "data=2, tensor=8" in result.stdout
    rows = json.loads(Path("plan.json").read_text())["rows"]
    assert [row["target"] for row in rows] == ["cuda-h100:16", "tpu-v5e:2x4"]
    assert rows[1]["cost_per_step"] > 0
    assert Path("plan.png").stat().st_size > 1000
    assert planned[0] == ("tpu-v5e:2x4", PartitionSpec(None, "tensor"), PartitionSpec("data"))


def test_plan_prints_json_and_goes_on_where_its_budget_ended(planned):
    stopped = run(*STEP, "--budget", "0", "--json")
    assert json.loads(stopped.stdout)["rows"] == []
    assert stopped.stderr == "jaxops: stopped at the time budget: 2 of 2 left; the same command goes on\n"
    assert len(json.loads(run(*STEP, "--json").stdout)["rows"]) == len(planned) == 2
    assert len(json.loads(run(*STEP, "--json", "--budget", "0").stdout)["rows"]) == 2


def test_plan_exits_with_1_if_nothing_fits(planned):
    result = run("plan", "user.py:step", "--mesh", "data=1,tensor=-1", "--target", "cuda-h100:64")
    assert result.exit_code == 1
    assert "0 of 1 fit" in result.stdout
    assert result.stdout.endswith("must be split into 64 equal parts along tensor; got float32[64, 32]\n")


def test_plan_of_several_functions_names_each(planned):
    result = run("plan", "user.py:steps", *STEP[2:6], "--json")
    assert {row["variant"] for row in json.loads(result.stdout)["rows"]} == {"as it is", "negated"}
    assert planned == [("tpu-v5e:2x4", PartitionSpec(None, "tensor"), PartitionSpec("data"))] * 2
    assert "negated" in run("plan", "user.py:steps", *STEP[2:6]).stdout


def test_plan_of_a_file_without_shardings_splits_nothing(planned):
    assert run("plan", "user.py:whole", *STEP[2:6]).exit_code == 0
    assert {str(spec) for spec in planned[0][1:]} == {str(PartitionSpec())}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            (*STEP, "--mesh", "data"),
            "--mesh must be AXIS=SIZE, with commas between, such as data=4,tensor=-1; got 'data'",
        ),
        ((*STEP, "--mesh", "data=3"), "meshes must have as many devices as a target; got {'data': 3} where"),
        ((*STEP, "--mesh", "rows=8"), "args[0] must be split over axes of the mesh; got 'tensor' with {'rows': 8}"),
        ((*STEP, "--target", "tpu-v9"), "target must be one of cpu, tpu-v5e"),
        ((*STEP, "--target", "cpu"), "targets must be TPUs or NVIDIA GPUs; got 'cpu'"),
        ((*STEP, "--price", "1.2"), "--price must be CHIP=PRICE, such as tpu-v5e=1.2; got '1.2'"),
        ((*STEP, "--price", "v5e=1.2"), "price_per_chip_hour must name tpu-v5e"),
        ((*STEP, "--tokens", "-4"), "tokens must be a positive integer; got -4"),
        ((*STEP, "--output", "/nowhere/plan.json"), "--output must be a file that can be written; got"),
        (("plan", "user.py:wrong", *STEP[2:]), "wrong_shardings must be a function; got int"),
        (
            ("plan", "user.py:nothing", *STEP[2:]),
            "FILE.py:FUNCTION must name a function, or a dict of functions, of user.py; got 'nothing'",
        ),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(value[-2:]),
)
def test_plan_refuses_in_one_sentence(arguments, words):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert words in result.stderr
