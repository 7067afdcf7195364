"""What was replayed chooses configurations of kernels that are asked for, and says so; measurements come first."""

import collections
import dataclasses
import itertools
import json
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import lowering
from jaxops import softmax
from lowering.explain import operator_uses
from lowering.measurements import Entry, Key, Measurement
from lowering.measuring import replaying, timing
from lowering.targets import named

X = jax.ShapeDtypeStruct((2**21, 3), jnp.float32)  # fewer classes than evidence speaks of
V5E = named("tpu-v5e")


@pytest.fixture
def entry():
    (use,) = operator_uses(jax.make_jaxpr(softmax)(X).jaxpr, (X,), V5E)
    (kernel,) = (kernel for kernel in use.operator.kernels if kernel.platform == "tpu")
    first, *_, last = kernel.configs(V5E, *use.operands, **use.params)
    times = [(first, 30.0), (last, 25.0)]
    configs = [Measurement(kernel.name, tuple(sorted(config.items())), time) for config, time in times]
    key = Key.of(use.operator.name, V5E, use.operands, use.params)
    return Entry(key, (Measurement("reference", (), 50.0), *configs), repeats=0, replayed=True)


def explained(*entries, implementation="auto"):
    with lowering.TuningResult(entries), lowering.use(implementation):
        (row,) = lowering.explain(softmax, X, target="tpu-v5e").rows
    return row


def test_a_replay_makes_no_kernel_the_default_but_is_told(entry):
    row = explained(entry)
    assert row.implementation == "reference"
    reasons = {refusal.kernel: refusal.reason for refusal in row.refusals}
    told = "opt-in: replayed on tpu-v5e at 0.50 of the reference's time; not run on a device"
    assert reasons["mosaic_tpu"] == told


def test_a_kernel_that_is_asked_for_takes_the_configuration_that_was_replayed_fastest(entry):
    fastest = entry.candidates[-1].config
    assert str(dict(fastest)["block_elements"]) in explained(entry, implementation="pallas").implementation


def test_what_was_measured_comes_before_what_was_replayed(entry):
    reference, first, last = entry.candidates
    measured = dataclasses.replace(
        entry, replayed=False, candidates=(reference, dataclasses.replace(first, median_us=9.0), last)
    )
    for entries in ((entry, measured), (measured, entry)):
        assert str(dict(first.config)["block_elements"]) in explained(*entries).implementation


def test_files_keep_what_was_replayed_apart_from_what_was_measured(entry, tmp_path):
    measured = dataclasses.replace(entry, replayed=False)
    path = tmp_path / "tuned.json"
    lowering.TuningResult((entry, measured)).save(path)
    assert lowering.TuningResult.load(path).entries == (entry, measured)
    records = json.loads(path.read_text())["entries"]
    assert [record.get("replayed") for record in records] == [True, None]
    assert "1 replayed, not measured, on tpu-v5e" in str(lowering.TuningResult((entry,)))


def test_what_is_replayed_when_time_runs_out_is_kept(monkeypatch):
    """The reference, in XLA's layouts and in JAX's, and the first configuration of the kernel."""
    times, clock = iter((50.0, 40.0, 30.0)), itertools.count()
    report = types.SimpleNamespace(schedule=types.SimpleNamespace(total_us=0.0))

    def replay(*_, **__):
        report.schedule.total_us = next(times)
        return report

    monkeypatch.setattr(replaying, "replay", replay)
    monkeypatch.setattr(timing, "clock", lambda: next(clock))
    result = lowering.tune(softmax, X, target="tpu-v5e", by="schedule", budget_seconds=3)
    reference, first, *others = result.entries[0].candidates
    assert (result.stopped, reference.median_us, first.median_us) == ("stopped at the time budget", 40.0, 30.0)
    assert {other.discarded for other in others} == {"not compiled before the time budget ended"}


def test_a_configuration_that_pallas_does_not_lower_is_discarded(monkeypatch):
    reports = itertools.count()

    def replay(*_, **__):
        if next(reports) == 2:  # after the reference, in two layouts
            raise ValueError("The last two dimensions of a block must be divisible by 8 and 128.\nMore follows.")
        return types.SimpleNamespace(schedule=types.SimpleNamespace(total_us=30.0))

    monkeypatch.setattr(replaying, "replay", replay)
    (entry,) = lowering.tune(softmax, X, target="tpu-v5e", by="schedule").entries
    reference, first, *others = entry.candidates
    refused = "ValueError: The last two dimensions of a block must be divisible by 8 and 128."
    assert [reference.discarded, first.discarded, *{other.discarded for other in others}] == ["", refused, ""]


@pytest.mark.parametrize("target", ["tpu-v5e", "tpu-v6e", "tpu-v7x"])
def test_the_same_operands_were_ranked_with_each_jax(target):
    path = Path(lowering.__file__).parent / "tuned" / f"{target}.replayed.json"
    ranked = collections.defaultdict(set)
    for entry in lowering.TuningResult.load(path).entries:
        ranked[dict(entry.key.versions)["jax"]].add((entry.key.operator, entry.key.operands, entry.key.attributes))
    first, second = ranked.values()
    assert first == second


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"by": "guess"}, "tune: by must be 'device' or 'schedule'; got 'guess'"),
        ({"by": "schedule"}, "tune: target must be a TPU for by='schedule'; got 'cpu'"),
        ({"by": "schedule", "target": "cuda-h100"}, "tune: target must be a TPU for by='schedule'; got 'cuda-h100'"),
        ({"by": "schedule", "target": "tpu"}, "tune: target must be a TPU for by='schedule'; got 'tpu'"),
        ({"trip_counts": {"dropout": 1}}, "tune: trip_counts must come with by='schedule'; got by='device'"),
        ({"scalars": {"dropout": {0: 1}}}, "tune: scalars must come with by='schedule'; got by='device'"),
        (
            {"by": "schedule", "target": "tpu-v5e", "scalars": 3},
            "tune: scalars must be a mapping; got 3",
        ),
        ({"target": "tpu-v5e"}, "tune: target must be the device here, cpu; got 'tpu-v5e'"),
    ],
)
def test_what_cannot_be_tuned_is_refused(options, sentence):
    with pytest.raises(lowering.TuningError) as refused:
        lowering.tune(softmax, X, **options)
    assert str(refused.value) == sentence
