"""A campaign finds out what is wrong, what hangs and what is fast, keeps each result, and goes on where it was."""

import dataclasses
import io
import json
from pathlib import Path

import campaign_toys as toys
import contract
import jax
import numpy as np
import pytest
from typer.testing import CliRunner

import jaxops
import lowering
from jaxops import _suite
from jaxops_command.app import app
from lowering import tuning_store
from lowering.campaign import run as running
from lowering.campaign.channel import Channel, step_name
from lowering.campaign.process import PATIENCE, Ending, converse
from lowering.campaign.stages import measure, verify
from lowering.measurements import Key, Measurement, versions
from lowering.measuring import timing
from lowering.measuring.candidates import Machine
from lowering.measuring.problems import problems
from lowering.targets import named

CPU = named("cpu")
HERE = Machine(CPU)
TOYS = "campaign_toys:SUITE"


def told(work, decided=(), spoilt=()):
    """What a case tells while it works."""
    stream = io.StringIO()
    channel = Channel(stream, decided, spoilt)
    channel.begin_case("case")
    work(channel)
    messages = [json.loads(line) for line in stream.getvalue().splitlines()]
    return [message["record"] for message in messages if "record" in message], messages


def outcomes(records):
    return {(record["kernel"], tuple(record["operands"])): record["outcome"] for record in records}


def test_verdicts_are_right_and_every_bad_kernel_is_run_no_further():
    records, messages = told(lambda channel: verify(toys.DOUBLE, HERE, channel))
    small, large = ("float32[3]",), ("float32[12]",)
    assert outcomes(records) == {
        ("wrong", small): "verified",
        ("wrong", large): "wrong",
        ("unsteady", small): "wrong",
        ("doubled", small): "verified",
        ("doubled", large): "verified",
        ("failing", small): "fails",
    }
    reasons = {record["kernel"]: record["reason"] for record in records if record["reason"]}
    assert reasons["wrong"].startswith("wrong: result 0 is off by ")
    assert reasons["unsteady"] == "wrong: result 0 of run 2 is not that of run 1 bit by bit"
    assert reasons["failing"] == "fails with RuntimeError: no such instruction"
    # What comes next is said before it is compiled, and once more before it runs.
    begun = [message["begin"]["kernel"] for message in messages if "begin" in message]
    assert begun[:2] == ["wrong", "unsteady"]
    steps = [*(message.get("runs", next(iter(message))) for message in messages if "case" not in message)]
    assert steps[:4] == ["begin", True, False, "record"]
    failing = messages.index({"record": next(each for each in records if each["kernel"] == "failing")})
    assert "begin" in messages[failing - 1]  # it is not compiled


def test_what_is_decided_or_spoilt_is_not_run_again():
    key = Key.of("toy_double", CPU, [np.zeros(3, np.float32)], {})
    decided = [f"case: {step_name(key, Measurement('doubled'))}"]
    spoilt = [("toy_double", name) for name in ("wrong", "unsteady", "failing")]
    records, _ = told(lambda channel: verify(toys.DOUBLE, HERE, channel), decided, spoilt)
    assert outcomes(records) == {("doubled", ("float32[12]",)): "verified"}


def test_a_refusal_is_told_with_its_reason():
    records, _ = told(lambda channel: verify(toys.REFUSED, HERE, channel))
    assert {(record["outcome"], record["reason"]) for record in records} == {("refused", "takes nothing")}


def test_measuring_leaves_out_what_went_wrong_and_keeps_the_reason():
    faults = {"toy_double": dict.fromkeys(("wrong", "unsteady", "failing"), "wrong: off by 1 (float32[12])")}
    machine = Machine(CPU, faults=faults)
    records, _ = told(lambda channel: measure(toys.DOUBLE, machine, channel, "time", 100.0))
    (entry,) = [record["entry"] for record in records]
    timed = [candidate["implementation"] for candidate in entry["candidates"] if candidate["median_us"] is not None]
    assert timed == ["reference", "doubled"]
    assert {candidate["discarded"] for candidate in entry["candidates"]} == {"", "wrong: off by 1 (float32[12])"}


def test_operators_are_given_what_the_function_gives_them():
    found = problems(toys.doubles, (np.asarray([1.0, 2.0], np.float32),), CPU)
    np.testing.assert_array_equal(found[0].operands[0], [2.0, 3.0])
    x = np.linspace(-3, 3, 260, dtype=np.float32).reshape(2, 130)
    (softmax_of_rows,) = (case for case in _suite.SUITE if case.name == "softmax of rows")
    forward, backward = problems(softmax_of_rows.fn, (x,), CPU)
    assert (forward.operator.name, backward.operator.name) == ("softmax", "softmax_backward")
    np.testing.assert_allclose(backward.operands[0], jax.nn.softmax(x), rtol=1e-5)


def heard(messages, then, **limits):
    records = []
    request = {"messages": messages, "then": then}
    limits = {"limit_seconds": 20.0, "deadline": timing.clock() + 60, **limits}
    return converse(request, {}, records.append, module="campaign_child", **limits), records


BEGIN = [{"case": "double"}, {"record": {"a": 1}}, {"begin": {"kernel": "endless"}}]
RUNS, RAN = {"runs": True}, {"runs": False}


@pytest.mark.long
def test_a_process_that_says_nothing_more_is_ended_and_blamed():
    start = timing.clock()
    ending, records = heard([*BEGIN, RUNS], "sleep", limit_seconds=2.0)
    assert timing.clock() - start < 9  # while something runs; a compiler has five times as long
    assert (ending.how, ending.case, ending.ran, records) == ("hangs", "double", True, [{"a": 1}])
    assert ending.begun == {"kernel": "endless"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("messages", "begun"),
    [(BEGIN, {"kernel": "endless"}), ([*BEGIN, RUNS, RAN], None)],
    ids=["compiling", "after the run"],
)
def test_the_limit_of_a_run_does_not_count_while_nothing_of_it_runs(messages, begun):
    start = timing.clock()
    ending, _ = heard(messages, "sleep", limit_seconds=0.5)
    assert timing.clock() - start > 0.5 * PATIENCE
    assert (ending.how, ending.begun, ending.ran) == ("hangs", begun, False)


def test_a_process_that_dies_is_quoted():
    ending, _ = heard([*BEGIN, RUNS], "die")
    assert (ending.how, ending.begun, ending.ran, ending.last_words) == (
        "died",
        {"kernel": "endless"},
        True,
        "a last word",
    )


@pytest.mark.long
def test_the_end_of_the_budget_blames_nobody():
    assert heard(BEGIN, "sleep", deadline=timing.clock() + 1.0)[0].how == "budget"
    assert heard([{"case": "double"}, {"ended": "done"}], "sleep")[0].how == "done"


PROBED = {}


@pytest.fixture
def script(monkeypatch):
    """Processes that follow a script: for each, its records and its ending. Their requests are kept."""
    steps, requests = [], []

    def acted(request, environment, on_record, **limits):
        requests.append((request, environment))
        if request["stage"] == "probe":
            on_record({"target": "cpu", "versions": PROBED or dict(versions())})
            return Ending("done")
        records, ending = steps.pop(0)
        for record in records:
            on_record(record)
        return ending

    monkeypatch.setattr(running, "converse", acted)
    monkeypatch.setenv(tuning_store.VARIABLE, "")
    return steps, requests


def done(case, **more):
    return {"case": case, "done": True, "seconds": 1.0, **more}


HUNG = {"operator": "toy_double", "kernel": "endless", "operands": ["float32[3]"], "attributes": "", "config": {}}


@pytest.mark.slow
def test_a_hang_costs_one_kernel_and_the_next_campaign_goes_on(script, tmp_path):
    steps, requests = script
    steps += [
        ([], Ending("hangs", "double", HUNG, ran=True)),
        ([done("double")], Ending("done", "double")),
        ([], Ending("died", "refused", {**HUNG, "kernel": "deadly"}, ran=True, last_words="bus error")),
        ([], Ending("budget", "refused")),
    ]
    options = {"stages": ["verify"], "only": ["double", "refused"], "folder": tmp_path, "limit_seconds": 7.0}
    first = running.run(TOYS, **options)
    assert first.stopped == "stopped at the time budget"
    assert requests[2][0]["spoilt"] == [["toy_double", "endless"]]
    assert {row.kernel: (row.outcome, row.detail) for row in first.rows} == {
        "endless": ("hangs", "hangs: no result within 7 seconds (float32[3])"),
        "deadly": ("wrong", "wrong: its process ended: bus error (float32[3])"),
    }
    steps += [([done("refused")], Ending("done", "refused"))]
    second = running.run(TOYS, **options)
    assert (second.stopped, requests[-1][0]["cases"]) == ("", ["refused"])
    assert set(requests[-1][0]["faults"]["toy_double"]) == {"endless", "deadly"}
    assert not steps
    steps += [([done(name)], Ending("done", name)) for name in ("double", "refused")]
    assert running.run(TOYS, **options, again=True).rows == ()


@pytest.mark.long
@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        (Ending("hangs", "double", HUNG), "while it was compiled, nothing was heard for 35 seconds"),
        (Ending("died", "double", HUNG, last_words="no memory"), "while it was compiled, its process ended: no memory"),
    ],
    ids=["hangs", "died"],
)
def test_what_is_not_compiled_is_left_out_once_and_tried_again_next_time(ending, reason, script, tmp_path):
    steps, requests = script
    options = {"stages": ["verify"], "only": ["double"], "folder": tmp_path, "limit_seconds": 7.0}
    for _ in range(2):
        steps += [([], ending), ([], Ending("budget", "double"))]
        campaign = running.run(TOYS, **options)
        assert [(row.kernel, row.outcome) for row in campaign.rows] == [("endless", "unfinished")]
        assert campaign.entries == ()  # "auto" and "pallas" hear nothing of it
        first, second = (request for request, _ in requests[-2:])
        assert (first["faults"], first["spoilt"]) == ({}, [])
        assert second["faults"] == {"toy_double": {"endless": reason}}


def test_a_gpu_campaign_does_without_autotuning(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--mine")
    run = running._Run(TOYS, 1.0, 1.0, tmp_path, rehearse=False)
    for target, expected in (
        ("cuda-h200", "--xla_gpu_enable_triton_gemm=false --mine --more"),
        ("cpu", "--mine --more"),
    ):
        run._device = {"target": target}
        assert run._environment("--more")["XLA_FLAGS"] == expected


@pytest.mark.long
def test_a_case_that_fails_is_told_and_tried_again_next_time(script, tmp_path):
    steps, requests = script
    options = {"stages": ["verify"], "only": ["broken"], "folder": tmp_path}
    for attempt in (1, 2):
        steps += [([done("broken", outcome="failed", reason="TypeError: text")], Ending("done", "broken"))]
        (row,) = running.run(TOYS, **options).rows[-1:]
        assert (row.operator, row.outcome, row.detail) == ("broken", "failed", "verify: TypeError: text")
        assert len(requests) == 2 * attempt


def test_other_versions_begin_anew(script, tmp_path, monkeypatch):
    steps, _ = script
    options = {"stages": ["verify"], "only": ["double"], "folder": tmp_path}
    steps += [([done("double")], Ending("done", "double"))]
    running.run(TOYS, **options)
    monkeypatch.setitem(PROBED, "jax", "99")
    steps += [([done("double")], Ending("done", "double"))]
    assert len(running.run(TOYS, **options).records) == 1
    assert not steps


def test_loops_are_verified_with_and_without_recording_on_gpus(script, tmp_path):
    run = running._Run(TOYS, 1.0, 1.0, tmp_path, rehearse=False)
    run._device = {"target": "cuda-h200"}
    looping = next(case for case in _suite.SUITE if case.loops)
    assert [task.flags for task in run._tasks("verify", [looping])] == ["", "--xla_gpu_enable_command_buffer="]
    assert [task.flags for task in run._tasks("tune", [looping])] == [""]
    steps, requests = script
    steps += [([done("looping")], Ending("done", "looping"))] * 2
    run._device["versions"], run._path, run._deadline = {}, tmp_path / "found.jsonl", timing.clock() + 60
    for task in run._tasks("verify", [dataclasses.replace(looping, name="looping")]):
        assert run._finish(task)
    assert [request["only_loops"] for request, _ in requests] == [False, True]


def test_only_what_runs_in_loops_is_verified_without_recording():
    assert told(lambda channel: verify(toys.DOUBLE, HERE, channel, ["toy_other"]))[0] == []
    assert told(lambda channel: verify(toys.DOUBLE, HERE, channel, ["toy_double"]))[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stages": ["polish"]}, r"stage must be one of verify, time, tune; got 'polish'"),
        ({"only": ["triple"]}, r"case must be one of double, .*; got 'triple'"),
        ({"folder": Path(__file__)}, r"must be a folder that can be written to; got .*\(JAXOPS_TUNED names another\)$"),
    ],
    ids=["stage", "case", "folder"],
)
def test_what_cannot_be_is_refused_before_any_process_starts(script, options, words):
    with pytest.raises(lowering.TuningError, match=rf"^tune: .*{words}"):
        running.run(TOYS, **options)
    assert script[1] == []


def test_a_device_that_does_not_answer_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(running, "converse", lambda *_, **__: Ending("died", last_words="the TPU is in use"))
    words = r"^tune: the device must answer a new process; got its process ended: the TPU is in use$"
    with pytest.raises(lowering.TuningError, match=words):
        running.run(TOYS, folder=tmp_path)


def test_command_runs_the_suite_and_prints_a_table(script, tmp_path, monkeypatch):
    steps, _ = script
    monkeypatch.setenv(tuning_store.VARIABLE, str(tmp_path / "found"))
    steps += [([done("softmax of rows")], Ending("hangs", "softmax of rows")), ([], Ending("budget"))]
    result = CliRunner().invoke(app, ["tune", "--stages", "verify", "--only", "softmax of rows", "--only", "dropout"])
    assert "cpu: 1 failed; stopped at the time budget" in result.stdout
    assert "the same command goes on where this one ended" in " ".join(result.stdout.split())
    for arguments, words in (
        (("--stages", "polish"), "--stages must be one of verify, time, tune; got 'polish'"),
        (("mine.py:f", "--show"), "--show must be given without a function; got 'mine.py:f'"),
        (("--limit", "0"), "--limit must be a positive number of seconds; got 0.0"),
    ):
        refused = CliRunner().invoke(app, ["tune", *arguments])
        assert (refused.exit_code, refused.stderr) == (2, f"jaxops: {words}\n")


@pytest.mark.slow
def test_whole_campaign_of_toys_survives_them(tmp_path):
    campaign = running.run(TOYS, folder=tmp_path, limit_seconds=10.0, progress=True)
    worst = {(row.operator, row.kernel): row.outcome for row in campaign.rows}
    assert campaign.stopped == ""
    assert {key: worst[key] for key in worst if key[1] != "doubled"} == {
        ("toy_double", "wrong"): "wrong",
        ("toy_double", "unsteady"): "wrong",
        ("toy_double", "failing"): "fails",
        ("toy_endless", "endless"): "hangs",
        ("toy_endless", "deadly"): "wrong",
        ("broken", ""): "failed",
    }
    assert worst["toy_double", "doubled"] in ("faster", "slower")
    assert worst["toy_refused", "doubled"] == "refused"


@pytest.mark.rehearsal
@pytest.mark.slow
def test_rehearsal_runs_every_stage_to_its_end(tmp_path):
    campaign = jaxops.tune_device(rehearse=True, folder=tmp_path, budget_seconds=600, limit_seconds=200)
    assert campaign.stopped == ""
    kernels = {(operator.name, kernel.name) for operator in contract.with_kernels() for kernel in operator.kernels}
    found = {(row.operator, row.kernel): row.outcome for row in campaign.rows}
    assert kernels <= found.keys()
    # It takes nothing so small.
    assert found.pop(("max_pool", "mosaic_tpu")) == "refused"
    assert set(found.values()) <= {"verified", "faster", "slower"}
    assert {record["stage"] for record in campaign.records if record.get("done")} == {"verify", "time", "tune"}
    assert tuning_store.entries_for("cpu") == ()  # a rehearsal decides nothing
