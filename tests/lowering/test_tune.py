"""Measuring: what is right wins by its median, what is wrong or fails is discarded, and what was measured is kept."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowering
from jaxops._primitive.operator import Operator
from lowering.measuring import timing
from lowering.operators import Form, Place
from pallas_kernels.kernel import Kernel

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


class Clock:
    """Time that passes only when a program of the toy operator says so, or a test."""

    def __init__(self) -> None:
        self.ms = 0.0
        self.runs: list[str] = []
        self.before_run = lambda name: None

    def __call__(self) -> float:
        return self.ms / 1e3

    def spend(self, name: str, ms: float, x: jax.Array) -> jax.Array:
        """`x`, after a run of so many milliseconds."""

        def passes(x: np.ndarray) -> np.ndarray:
            self.runs.append(name)
            self.ms += ms
            return np.asarray(x)

        return jax.pure_callback(passes, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential")


CLOCK = Clock()
MS = {"fast": 1.0, "slow": 4.0, "wrong": 0.1, "infinite": 0.1, "short": 0.1, "broken": 0.1, "overwriting": 2.0}


def run(x, *, power, config, interpret):
    """Does what its configuration says, by the index of a name in MS."""
    name = list(MS)[config["kind"]]
    if name == "broken":
        raise RuntimeError("the compiler [gives] up\nand says more")
    result = CLOCK.spend(name, MS[name], x**power)
    changes = {"wrong": lambda y: y * 1.1, "infinite": lambda y: y.at[0, 0].set(jnp.nan), "short": lambda y: y[:1]}
    return (changes.get(name, lambda y: y)(result),)


def configs(hardware, x, *, power):
    return tuple({"kind": kind} for kind in range(len(MS) - 1))


def refuses(hardware, x, *, power):
    return "takes no cubes" if power == 3 else None


toy_power = Operator(
    "toy_power",
    "... -> ...",
    lambda x, power: None,
    lambda x, power: (CLOCK.spend("reference", 3.0, x**power),),
    kernels=(
        Kernel("cpu_kernel", "cpu", run, refuses, configs),
        Kernel(
            "overwriting",
            "cpu",
            run,
            refuses,
            lambda *_, **params: ({"kind": len(MS) - 1},),
            overwrites=lambda *_, **params: (0,),
        ),
        Kernel("elsewhere", "tpu", run, refuses),
    ),
)


def squares(x):
    """The operator at two shapes and within loops."""
    (y,) = toy_power(x, power=2)
    total, _ = jax.lax.scan(lambda carry, row: (carry + toy_power(row, power=2)[0], None), jnp.zeros(4), y)
    return total


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr(timing, "clock", CLOCK)
    CLOCK.ms, CLOCK.runs = 0.0, []
    return CLOCK


@pytest.fixture(scope="module")
def result():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "clock", CLOCK)
        return lowering.tune(toy_power, X, power=2, repeats=4)


def test_winner_is_the_fastest_that_is_right(result):
    (entry,) = result.entries
    assert (entry.key.target, entry.key.operator) == ("cpu", "toy_power")
    assert (entry.key.operands, entry.key.attributes) == (("float32[3,4]",), "power=2")
    assert dict(entry.key.versions)["jax"] == jax.__version__
    assert (entry.winner.implementation, dict(entry.winner.config)) == ("cpu_kernel", {"kind": 0})
    medians = {candidate.name: candidate.median_us for candidate in entry.candidates if candidate.median_us}
    assert medians == pytest.approx(
        {"reference": 3000, "cpu_kernel (kind=0)": 1000, "cpu_kernel (kind=1)": 4000, "overwriting (kind=6)": 2000}
    )
    assert result.complete


def test_what_is_wrong_or_fails_is_discarded_with_its_reason(result):
    discarded = {c.name: c.discarded for c in result.entries[0].candidates if c.discarded}
    assert discarded == {
        "cpu_kernel (kind=2)": "wrong: result 0 is off by 0.1 of its largest value, where 1e-05 is allowed",
        "cpu_kernel (kind=3)": "wrong: result 0 is not finite where the reference is",
        "cpu_kernel (kind=4)": "wrong: results are float32[1,4] instead of float32[3,4]",
        "cpu_kernel (kind=5)": "fails with RuntimeError: the compiler [gives] up",
    }


def test_candidates_take_turns_forwards_and_backwards(clock):
    lowering.tune(toy_power, X, power=2, repeats=2)
    right = ["reference", "fast", "slow", "overwriting"]
    assert clock.runs[-3 * len(right) :] == [*right, *right, *right[::-1]]


def test_a_kernel_that_overwrites_its_operand_leaves_it_to_the_others():
    x = jnp.asarray(X)
    lowering.tune(toy_power, x, power=2, repeats=2)
    np.testing.assert_array_equal(x, X)


def test_a_kernel_that_refuses_is_recorded_and_the_reference_wins():
    (entry,) = lowering.tune(toy_power, X, power=3, repeats=3).entries
    assert entry.winner.implementation == "reference"
    assert [c.discarded for c in entry.candidates[1:]] == ["takes no cubes"] * 2


def test_every_operator_of_a_function_is_measured_once_on_operands_of_its_shape():
    result = lowering.tune(jax.jit(squares), jax.ShapeDtypeStruct((3, 4), "float32"), repeats=3)
    assert [entry.key.operands for entry in result.entries] == [("float32[3,4]",), ("float32[4]",)]
    assert all(entry.repeats == 3 and entry.winner.implementation == "cpu_kernel" for entry in result.entries)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_kernel_in_16_bits_need_not_be_better_than_the_reference_in_16_bits(dtype):
    (entry,) = lowering.tune(toy_power, jnp.asarray(X, dtype), power=2, repeats=3).entries
    assert (entry.winner.implementation, dict(entry.winner.config)) == ("cpu_kernel", {"kind": 0})


def test_operators_in_shard_map_are_measured_at_the_shape_of_one_device():
    mesh = jax.make_mesh((3,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:3])
    spec = jax.sharding.PartitionSpec("data")
    mapped = jax.shard_map(lambda x: toy_power(x, power=2)[0], mesh=mesh, in_specs=spec, out_specs=spec)
    (entry,) = lowering.tune(mapped, X, repeats=3).entries
    assert entry.key.operands == ("float32[1,4]",)


@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit], ids=str)
def test_operators_that_are_split_over_a_mesh_are_left_out(axis_type):
    mesh = jax.make_mesh((3,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:3])
    placed = jax.device_put(X, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))
    result = lowering.tune(lambda x: toy_power(x, power=2), placed)
    assert (result.entries, result.stopped) == ((), "without toy_power, which is split over a mesh")


def test_budget_shortens_the_rounds_and_then_leaves_operators_out(tmp_path):
    # Compiling checks each candidate with one run, 10.5 ms in all; a round takes 10 ms, and 3 rounds are always timed.
    one = lowering.tune(squares, X, budget_seconds=0.05, repeats=100)
    assert [entry.repeats for entry in one.entries] == [3]
    assert (one.complete, one.stopped) == (False, "stopped at the time budget")
    assert lowering.tune(squares, X, budget_seconds=1e-6, path=tmp_path / "none.json").entries == ()
    kept = lowering.TuningResult.load(tmp_path / "none.json")
    assert (kept.entries, kept.stopped) == ((), "stopped at the time budget")


def test_what_is_compiled_when_time_runs_out_is_timed_and_next_time_measured_anew(tmp_path, clock):
    """Reference and truth take 3 ms each, and the first kernel 1 ms: the time ends with the second one."""
    path = tmp_path / "tuned.json"
    first = lowering.tune(toy_power, X, power=2, budget_seconds=7.5e-3, path=path)
    (entry,) = first.entries
    assert (first.stopped, entry.repeats, entry.is_unfinished) == ("stopped at the time budget", 3, True)
    assert [x.median_us for x in entry.candidates if not x.discarded] == [3000.0, 1000.0, 4000.0]
    assert {x.discarded for x in entry.candidates} == {"", "not compiled before the time budget ended"}
    assert lowering.TuningResult.load(path) == first
    second = lowering.tune(toy_power, X, power=2, repeats=3, path=path)
    assert (second.complete, second.entries[0].is_unfinished) == (True, False)


def test_interruption_keeps_what_was_measured_and_the_next_run_goes_on(tmp_path, clock, monkeypatch):
    path = tmp_path / "tuned.json"
    rounds = timing.rounds
    calls = []

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return rounds(*args, **kwargs)

    monkeypatch.setattr(timing, "rounds", interrupted)
    first = lowering.tune(squares, X, repeats=3, path=path)
    assert (len(first.entries), first.complete, first.stopped) == (1, False, "interrupted")
    assert lowering.TuningResult.load(path) == first
    second = lowering.tune(squares, X, repeats=3, path=path)
    assert len(calls) == 3
    assert second.complete
    assert second.entries[0] == first.entries[0]
    assert lowering.TuningResult.load(path) == second


def test_a_file_is_extended_and_measured_again_only_on_demand(tmp_path, clock):
    path = tmp_path / "tuned.json"
    lowering.tune(toy_power, X, power=2, repeats=3, path=path)
    lowering.tune(toy_power, X, power=3, repeats=3, path=path)
    assert [entry.key.attributes for entry in lowering.TuningResult.load(path).entries] == ["power=2", "power=3"]
    clock.runs.clear()
    assert lowering.tune(toy_power, X, power=2, path=path).entries[0].repeats == 3
    assert clock.runs == []
    assert lowering.tune(toy_power, X, power=2, repeats=5, path=path, again=True).entries[0].repeats == 5
    kept = lowering.TuningResult.load(path).entries
    assert [(entry.key.attributes, entry.repeats) for entry in kept] == [("power=2", 5), ("power=3", 3)]
    assert [file.name for file in tmp_path.iterdir()] == ["tuned.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1, "entries": [{}]}', json.dumps({"entries": 3})])
def test_a_file_of_another_kind_is_never_overwritten(tmp_path, clock, content):
    path = tmp_path / "mine.json"
    path.write_text(content)
    with pytest.raises(lowering.TuningError, match=r"mine.json' must be a whole file that tune has written$"):
        lowering.tune(toy_power, X, power=2, path=path)
    assert path.read_text() == content
    assert clock.runs == []


def test_a_file_that_cannot_be_written_is_noticed_before_anything_is_measured(tmp_path, clock):
    with pytest.raises(lowering.TuningError, match=r"must be a file that can be written; got No such file"):
        lowering.tune(toy_power, X, power=2, path=tmp_path / "nowhere" / "tuned.json")
    assert clock.runs == []


def test_only_the_device_here_can_be_measured():
    with pytest.raises(lowering.TuningError, match=r"^tune: target must be the device here, cpu; got 'cuda-h100'$"):
        lowering.tune(toy_power, X, power=2, target="cuda-h100")
    assert lowering.tune(toy_power, X, power=2, target="cpu", repeats=3).complete


@pytest.mark.parametrize("wrong", [{"repeats": 0}, {"budget_seconds": 0.0}, {"budget_seconds": float("nan")}], ids=str)
def test_time_and_repeats_must_be_given(wrong):
    with pytest.raises(lowering.TuningError, match=r"^tune: \w+ must be a positive (number|integer); got "):
        lowering.tune(toy_power, X, power=2, **wrong)


def test_progress_is_shown_on_demand(capsys):
    lowering.tune(toy_power, X, power=2, repeats=3)
    assert capsys.readouterr() == ("", "")
    lowering.tune(toy_power, X, power=2, repeats=3, progress=True)
    assert "toy_power float32[3,4]" in capsys.readouterr().err


def test_result_prints_as_a_table(result):
    text = str(result)
    assert "* cpu_kernel (kind=0)" in text
    assert "the compiler [gives] up" in text


def test_tune_times_the_form_that_runs_in_place_of_the_reference():
    places = []

    def run(x, *, place):
        places.append(place)
        return (x + 1,)

    form = Form("xla_toy_placed", frozenset({"cpu"}), run)
    placed = Operator("toy_placed", "... -> ...", lambda x: None, lambda x: (x + 1,), forms=(form,))
    lowering.tune(lambda x: placed(x)[0], X)
    assert {*places} == {Place("cpu")}
