"""What was tuned decides for exactly what it was measured for, in a context or as shipped; no file is trusted."""

import dataclasses
import json
import pickle
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
import lowering
from jaxops._primitive.operator import Operator
from lowering import select, tuning_store
from lowering.measurements import Entry, Key, Measurement, versions
from lowering.targets import named
from pallas_kernels.hardware import Hardware
from pallas_kernels.kernel import Kernel

CPU = named("cpu")
H100 = named("cuda-h100")
X = np.zeros((2, 3), np.float32)
CONFIGS = ({"answer": 1}, {"answer": 2})


def run(x, *, shift, config, interpret):
    return (x + config["answer"],)


def refuses(hardware, x, *, shift):
    return "takes no negative shift" if shift < 0 else None


def kernel(name="cpu_kernel", **fields):
    return Kernel(name, "cpu", run, refuses, lambda *_, **params: CONFIGS, **fields)


toy_answer = Operator(
    "toy_answer",
    "... -> ...",
    lambda x, shift: None,
    lambda x, shift: (x + 0 * shift,),
    kernels=(kernel("other"), kernel()),
)


def entry(*candidates, shape=X.shape, shift=0, hardware=CPU, **changes):
    """What was measured of the toy: by default, its kernel's second configuration was the fastest."""
    types = [jax.ShapeDtypeStruct(shape, jnp.dtype("float32"))]
    key = Key.of("toy_answer", hardware, types, {"shift": shift})
    measured = candidates or (
        Measurement("reference", (), 12.0),
        Measurement("other", (("answer", 1),), 11.0),
        Measurement("cpu_kernel", (("answer", 1),), 10.0),
        Measurement("cpu_kernel", (("answer", 2),), 8.0),
    )
    return Entry(dataclasses.replace(key, **changes), measured, repeats=5)


def result(*entries, **fields):
    return lowering.TuningResult(entries or (entry(),), **fields)


REFERENCE_WINS = (
    Measurement("reference", (), 12.0),
    Measurement("other", (), None, "fails with RuntimeError: no"),
    Measurement("cpu_kernel", (("answer", 2),), 15.0),
)


def test_the_host_s_time_is_kept_beside_the_device_s():
    measured = entry(Measurement("reference", (), 12.0, wall_us=40.5), Measurement("cpu_kernel", (), 10.0))
    record = measured.to_record()
    assert [candidate.get("wall_us") for candidate in record["candidates"]] == [40.5, None]
    assert Entry.from_record(record) == measured
    record["candidates"][0]["wall_us"] = float("inf")
    with pytest.raises(ValueError, match="not a time: inf"):
        Entry.from_record(record)


def answer(x=X, shift=0):
    """What the toy adds: 0 is the reference, 1 a kernel's first configuration and 2 its second."""
    return float(jax.jit(lambda x: toy_answer(x, shift=shift)[0])(x)[0, 0])


def explained(x=X, shift=0, target=None):
    (row,) = lowering.explain(lambda x: toy_answer(x, shift=shift), x, target=target).rows
    return row.implementation, {refusal.kernel: refusal.reason for refusal in row.refusals}


def test_tuned_kernel_and_configuration_are_taken_within_the_context_only():
    assert answer() == 0
    with result():
        assert answer() == 2
        assert explained() == (
            "cpu_kernel (tuned: answer=2)",
            {"other": "tuned: cpu_kernel was faster here (8 us against 11 us)"},
        )
    assert answer() == 0


def test_tuned_reference_is_taken_from_a_kernel_that_would_be_the_default():
    default = kernel("default", measured_on=frozenset({"cpu"}))
    lowering.add_kernel(toy_answer, default)
    try:
        assert answer() == 1
        with result(entry(*REFERENCE_WINS, Measurement("default", (("answer", 1),), 13.5))):
            assert answer() == 0
            implementation, reasons = explained()
            with lowering.use("pallas:default"):
                assert answer() == 1
    finally:
        lowering.remove_kernel(toy_answer, default)
    assert implementation == "reference"
    assert reasons == {
        "default": "tuned: the reference was faster here (12 us against 13.5 us)",
        "other": "tuned: fails with RuntimeError: no",
        "cpu_kernel": "tuned: the reference was faster here (12 us against 15 us)",
    }


@pytest.mark.parametrize(
    "other",
    [{"shape": (3, 2)}, {"shift": 1}, {"hardware": H100}, {"operator": "toy_question"}],
    ids=["shape", "attribute", "target", "operator"],
)
def test_tuning_decides_for_nothing_that_is_merely_similar(other):
    with result(entry(**other)):
        assert answer() == 0
        assert explained()[1]["cpu_kernel"] == "opt-in: not measured on this target"


def test_what_other_versions_measured_does_not_count_and_explain_says_so():
    with result(entry(versions=(("jax", "0.1"), ("jaxlib", "0.2")))):
        implementation, reasons = explained()
    assert implementation == "reference"
    assert reasons["cpu_kernel"] == (
        "opt-in: not measured on this target; what was tuned with jax 0.1, jaxlib 0.2 does not count here"
    )


def test_a_tuned_kernel_that_refuses_leaves_the_choice_to_the_present_rule():
    with result(entry(shift=-1)):
        assert explained(shift=-1) == ("reference", dict.fromkeys(("other", "cpu_kernel"), "takes no negative shift"))
    with result(entry(Measurement("reference", (), 2.0), Measurement("gone", (), 1.0))):
        assert explained()[1]["other"].endswith("; gone was tuned, but is not offered")
    with result(entry(Measurement("reference", (), 2.0), Measurement("cpu_kernel", (("answer", 3),), 1.0))):
        assert answer() == 0
        assert explained()[1]["cpu_kernel"].endswith(
            "; cpu_kernel (answer=3) was tuned, but that is none of its configurations"
        )
    with result(entry(Measurement("reference", discarded="fails"))):
        assert explained()[1]["cpu_kernel"].endswith("; tuning could compare nothing with the reference")


def test_a_kernel_that_was_asked_for_takes_its_tuned_configuration():
    with result(entry(*REFERENCE_WINS)), lowering.use("pallas:cpu_kernel"):
        assert answer() == 2
        assert explained()[0] == "cpu_kernel (tuned: answer=2)"
    with lowering.use("reference"), result():
        assert answer() == 0


def test_contexts_nest_and_the_inner_one_decides():
    first = entry(Measurement("reference", (), 2.0), Measurement("cpu_kernel", (("answer", 1),), 1.0))
    wide = entry(shape=(4, 3))
    outer, inner = result(first, wide), result()
    with outer, lowering.use("auto"), inner, inner:
        assert answer() == 2
        assert answer(np.zeros((4, 3), np.float32)) == 2
        with outer:
            assert answer() == 1
        assert answer() == 2
    assert lowering.current_selection() == select.Selection()


def test_context_ends_with_an_exception_and_belongs_to_one_thread():
    seen = []
    thread = threading.Thread(target=lambda: seen.append(lowering.current_selection().tuned))
    with pytest.raises(KeyError), result():
        raise {}[thread.start(), thread.join()]
    assert seen == [()]
    assert lowering.current_selection().tuned == ()


def test_result_is_part_of_the_cache_key_of_jit():
    traced_under = []

    @jax.jit
    def function(x):
        traced_under.append(len(lowering.current_selection().tuned))
        return toy_answer(x, shift=0)[0]

    answers = [float(function(X)[0, 0])]
    for _ in range(2):
        with result():  # equal to the one before, and another object
            answers.append(float(function(X)[0, 0]))
    answers.append(float(function(X)[0, 0]))
    assert answers == [0, 2, 2, 0]
    assert traced_under == [0, 1]


def test_jaxprs_stay_short():
    with result():
        assert "selection=auto tuned=1" in str(jax.make_jaxpr(lambda x: toy_answer(x, shift=0))(X))


def test_tuning_decides_inside_shard_map_and_not_where_operands_are_split():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    mapped = jax.shard_map(lambda x: toy_answer(x, shift=0)[0], mesh=mesh, in_specs=spec, out_specs=spec)
    both, x = result(entry(), entry(shape=(1, 3))), jax.device_put(X, jax.sharding.NamedSharding(mesh, spec))
    with both:
        assert float(jax.jit(mapped)(x)[0, 0]) == 2
        assert answer(x) == 0


def test_a_chip_without_a_record_is_told_from_others_of_its_platform():
    types = [jax.ShapeDtypeStruct((2,), jnp.dtype("float32"))]
    assert Key.of("op", Hardware("cuda", "cuda", "NVIDIA L4"), types, {}).target == "cuda NVIDIA L4"
    assert Key.of("op", H100, types, {}).target == "cuda-h100"
    assert Key.of("op", named("cuda"), types, {}) is None


def test_equal_times_go_to_the_reference_then_to_the_order_of_preference():
    tie = (Measurement("reference", (), 1.0), Measurement("cpu_kernel", (("answer", 1),), 1.0))
    assert entry(*tie).winner.implementation == "reference"
    kernels = (Measurement("reference", (), 2.0), *(Measurement(name, (), 1.0) for name in ("other", "cpu_kernel")))
    assert entry(*kernels).winner.implementation == "other"


def test_file_holds_what_was_saved(tmp_path):
    saved = result(entry(), entry(*REFERENCE_WINS, shift=3), stopped="interrupted")
    saved.save(tmp_path / "tuned.json")
    loaded = lowering.TuningResult.load(tmp_path / "tuned.json")
    assert (loaded, hash(loaded), loaded.complete) == (saved, hash(saved), False)
    record = json.loads((tmp_path / "tuned.json").read_text())["entries"][0]
    assert record["versions"]["jax"] == jax.__version__
    assert record["winner"] == {"implementation": "cpu_kernel", "config": {"answer": 2}}
    assert pickle.loads(pickle.dumps(saved)) == saved
    with loaded:
        assert answer() == 2


def damaged(change):
    record = json.loads(result().to_json())
    change(record, record["entries"][0])
    return json.dumps(record)


DAMAGES = {
    "empty": "",
    "cut off": result().to_json()[:-40],
    "not UTF-8": b"\xff\xfe{",
    "a list": "[]",
    "another record": '{"name": "mine", "format": 1}',
    "entries are a number": '{"format": 1, "stopped": "", "entries": 3}',
    "nested beyond reason": "[" * 100_000,
    "no winner": damaged(lambda _, entry: entry.pop("winner")),
    "another winner": damaged(lambda _, entry: entry.update(winner={"implementation": "reference", "config": {}})),
    "time as text": damaged(lambda _, entry: entry["candidates"][0].update(median_us="fast")),
    "no time": damaged(lambda _, entry: entry["candidates"][0].update(median_us=None)),
    "infinite time": damaged(lambda _, entry: entry["candidates"][0].update(median_us=float("inf"))),
    "negative time": damaged(lambda _, entry: entry["candidates"][0].update(median_us=-1.0)),
    "configuration as text": damaged(lambda _, entry: entry["candidates"][2].update(config="answer=1")),
    "operands as a number": damaged(lambda _, entry: entry.update(operands=7)),
    "no versions": damaged(lambda _, entry: entry.pop("versions")),
    "no word on whether it is complete": damaged(lambda record, _: record.pop("stopped")),
}


@pytest.mark.parametrize("content", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_refused_and_never_overwritten(tmp_path, content):
    path = tmp_path / "tuned.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = path.read_bytes()
    for refused in (lambda: lowering.TuningResult.load(path), lambda: result().save(path)):
        with pytest.raises(lowering.TuningError, match=r"tuned.json' must be a whole file that tune has written$"):
            refused()
    assert path.read_bytes() == before


def test_a_file_of_a_later_format_is_refused_with_its_number(tmp_path):
    path = tmp_path / "tuned.json"
    path.write_text(damaged(lambda record, _: record.update(format=2)))
    with pytest.raises(lowering.TuningError, match=r"tuned.json' must have format 1; got 2$"):
        lowering.TuningResult.load(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(
        lowering.TuningError, match=r"^load: .*nowhere.json' must be a file that can be read; got No such"
    ):
        lowering.TuningResult.load(tmp_path / "nowhere.json")


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A folder in place of the one that ships."""
    monkeypatch.setattr(tuning_store, "_SHIPPED", tmp_path)
    jax.clear_caches()
    yield tmp_path
    jax.clear_caches()


def test_shipped_file_of_a_target_decides_where_the_context_says_nothing(shipped):
    result().save(shipped / "cpu.json")
    result(entry(hardware=H100, shift=2)).save(shipped / "cuda-h100.json")
    assert answer() == 2
    assert answer(shift=1) == 0
    with result(entry(*REFERENCE_WINS)):
        assert answer() == 0
    assert explained(shift=2, target="cuda-h100")[1]["cpu_kernel"] == "runs on cpu only"


def test_a_damaged_shipped_file_is_reported_once_and_ignored(shipped):
    (shipped / "cpu.json").write_text("{")
    with pytest.warns(RuntimeWarning, match=r"cpu.json' must be a whole file .*; nothing in it is used") as warned:
        assert explained() == explained()
    assert len(warned) == 1
    assert explained()[0] == "reference"


def test_shipped_files_are_whole():
    for path in tuning_store._SHIPPED.glob("*.json"):
        target, *kind = path.name.removesuffix(".json").split(".")
        for entry in lowering.TuningResult.load(path).entries:
            assert (entry.key.target, entry.replayed) == (target, kind == ["replayed"])
    assert [name for name, _ in versions()][:2] == ["jax", "jaxlib"]


def test_shipped_replays_are_shown_and_choose_configurations():
    """Where the versions are those of the files; elsewhere they say nothing."""
    x = jax.ShapeDtypeStruct((16384, 4096), jnp.float32)
    keys = [entry.key for entry in lowering.TuningResult.load(tuning_store._SHIPPED / "tpu-v6e.replayed.json").entries]
    ranked = [key for key in keys if key.operands == ("float32[16384,4096]",) and key.operator == "softmax"]
    is_known = versions() in [key.versions for key in ranked]
    (row,) = lowering.explain(jaxops.softmax, x, target="tpu-v6e").rows
    assert row.implementation.startswith("mosaic_tpu (tuned: block_elements=" if is_known else "mosaic_tpu")
    assert row.evidence.startswith("replayed on tpu-v6e at 0.50")
