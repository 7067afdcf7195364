"""What was found on a device decides there from then on; a wrong kernel is never taken unless somebody insists."""

import dataclasses
import json
import os
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import lowering
from jaxops._primitive.operator import Operator
from jaxops_command.app import app
from lowering import _jax_private, tuning_store
from lowering.measurements import Entry, Key, Measurement, versions
from lowering.targets import named
from pallas_kernels.kernel import Kernel

CPU = named("cpu")
X = np.zeros((2, 3), np.float32)
OTHER = (("jax", "0.1"), ("jaxlib", "0.2"))


def kernel(name, answer, **fields):
    return Kernel(name, "cpu", lambda x, *, config, interpret: (x + answer,), lambda hardware, x: None, **fields)


toy_kept = Operator(
    "toy_kept",
    "... -> ...",
    lambda x: None,
    lambda x: (x + 0,),
    kernels=(kernel("first", 1, measured_on=frozenset({"cpu"})), kernel("second", 2)),
)


def entry(*candidates, shape=(2, 3), repeats=5, **changes):
    key = Key.of("toy_kept", CPU, [jax.ShapeDtypeStruct(shape, jnp.dtype("float32"))], {})
    return Entry(dataclasses.replace(key, **changes), candidates, repeats)


def timed(**medians):
    return tuple(Measurement(name, (), median) for name, median in medians.items())


SECOND_WINS = entry(*timed(reference=3.0, first=2.0, second=1.0))


def fault(name, reason="wrong: off by 1", **changes):
    return entry(Measurement(name, (), discarded=reason), **{"shape": (7,), "repeats": 0, **changes})


@pytest.fixture
def keep(tmp_path, monkeypatch):
    """Keeps entries, or lines as they are, in a folder that nothing else reads."""
    monkeypatch.setenv(tuning_store.VARIABLE, str(tmp_path / "found"))
    tuning_store.reread()

    def keeps(*things):
        path = tuning_store.file_of("cpu")
        tuning_store.append(path, [{"versions": dict(x.key.versions), "entry": x.to_record()} for x in things])
        tuning_store.reread()
        return path

    yield keeps
    monkeypatch.undo()
    tuning_store.reread()


def answer(x=X):
    """What the toy adds: 0 is the reference, 1 the first kernel and 2 the second."""
    return float(jax.jit(lambda x: toy_kept(x)[0])(x).ravel()[0])


def reasons(x=X):
    (row,) = lowering.explain(lambda x: toy_kept(x), x).rows
    return {refusal.kernel: refusal.reason for refusal in row.refusals}


def test_what_was_found_decides_without_a_context(keep):
    assert answer() == 1
    keep(SECOND_WINS)
    assert answer() == 2
    assert answer(np.zeros((3, 2), np.float32)) == 1
    with lowering.TuningResult((entry(*timed(reference=1.0, first=2.0, second=3.0)),)):
        assert answer() == 0
    assert answer() == 2


def test_it_is_read_once_and_lazily(keep):
    path = keep(SECOND_WINS)
    assert answer() == 2
    path.unlink()
    assert answer(np.zeros((2, 3), np.float32)) == 2
    assert tuning_store.entries_for("cpu") == (SECOND_WINS,)
    tuning_store.reread()
    assert answer() == 1


def test_a_wrong_kernel_is_never_taken_at_any_shape_unless_somebody_insists(keep):
    keep(fault("first"))
    assert answer() == 0
    assert reasons()["first"] == (
        "went wrong on this device when it was tuned, wrong: off by 1 (float32[7]); "
        "use(toy_kept='pallas:first') takes it all the same"
    )
    with lowering.use("pallas"):
        assert answer() == 2
    with lowering.use(toy_kept="pallas:first"):
        assert answer() == 1
    keep(fault("second", "hangs: no result within 60 seconds"))
    with lowering.use("pallas"), pytest.raises(lowering.NotSupportedError, match=r"second: went wrong .* hangs: no"):
        answer()


def test_faults_of_several_kernels_at_one_shape_all_count(keep):
    keep(entry(*timed(reference=3.0, first=2.0), shape=(7,)), fault("first"), fault("second"))
    assert reasons().keys() == {"first", "second"}
    assert all("went wrong on this device" in reason for reason in reasons().values())


def test_one_wrong_configuration_bans_no_kernel_that_was_right_in_another(keep):
    wrong = Measurement("first", (("rows", 8),), discarded="wrong: off by 1")
    keep(entry(*timed(reference=3.0, first=2.0), wrong))
    assert answer() == 1


def test_what_other_versions_found_does_not_count(keep):
    keep(dataclasses.replace(SECOND_WINS, key=dataclasses.replace(SECOND_WINS.key, versions=OTHER)))
    keep(fault("first", versions=OTHER))
    assert answer() == 1
    with lowering.use(toy_kept="pallas:second"):
        assert reasons() == {"first": "second was asked for"}


DAMAGED = ["{", "[]", "3", '{"entry": {"target": "cpu"}}', "\N{SNOWMAN}" * 3, "[" * 10_000]


def test_damaged_lines_are_told_once_and_the_others_count(keep):
    path = keep(SECOND_WINS)
    path.write_bytes("\n".join([*DAMAGED, ""]).encode() + path.read_bytes() + b'{"cut off')
    tuning_store.reread()
    words = r"must hold records .*, which is not used, in line 1, 2, 3, 4, 5"
    with pytest.warns(RuntimeWarning, match=words) as warned:
        assert answer() == 2
    assert len(warned) == 1
    assert reasons() == reasons()
    # A line that a stopped process did not finish spoils none that come after it.
    keep(fault("second"))
    with pytest.warns(RuntimeWarning, match="must hold records"):
        assert answer() == 1


def test_a_file_that_cannot_be_read_is_told_and_ignored(keep):
    tuning_store.file_of("cpu").mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match=r"must be a file that can be read; got Is a directory; nothing in it is"):
        assert answer() == 1


def test_a_folder_that_cannot_be_written_is_one_sentence(keep, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(tuning_store.VARIABLE, str(tmp_path / "file" / "found"))
    result = CliRunner().invoke(app, ["tune", "--stages", "verify"])
    assert result.exit_code == 2
    assert "must be a folder that can be written to; got Not a directory (JAXOPS_TUNED names another)" in result.stderr
    with pytest.raises(lowering.TuningError, match=r"must be a file that can be written; got Not a directory$"):
        tuning_store.append(tuning_store.file_of("cpu"), [{}])


def test_commands_show_export_and_forget(keep, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments):
        result = CliRunner().invoke(app, ["tune", *arguments])
        assert (result.exit_code, result.stderr) == (0, "")
        return " ".join(result.stdout.split())

    assert "nothing is kept in" in run("--show")
    path = keep(SECOND_WINS, fault("first", versions=OTHER))
    shown = run("--show")
    assert "cpu: 2 faster" in shown
    assert 'records of other versions do not count here: {"jax": "0.1", "jaxlib": "0.2"}' in shown
    assert [row["outcome"] for row in json.loads(run("--show", "--json"))[0]["rows"]] == ["faster", "faster"]
    assert "2 results" in run("--export", str(tmp_path / "all.json"))
    exported = lowering.TuningResult.load(tmp_path / "all.json")
    assert SECOND_WINS in exported.entries
    assert f"forgot {path}" in run("--forget")
    assert answer() == 1
    with exported:
        assert answer() == 2


def test_processes_that_found_different_things_are_told_in_one_sentence(keep, monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    said = []

    def first_says(digest):
        monkeypatch.setattr(
            _jax_private, "said_by_first_process", lambda *name_value: said.append(name_value) or digest
        )
        tuning_store.reread()

    first_says(None)  # the first process has not compiled anything yet
    assert answer() == 1
    digest = said[0][1]
    first_says(digest)
    assert answer() == 1
    first_says("0123456789ab")
    words = r"must be the same for all processes; process 0 has 0 results \(digest \w+\) and process 0 others"
    with pytest.raises(lowering.TuningError, match=words):
        answer()
    keep(SECOND_WINS)
    assert said[-1][0] == "jaxops/tuned/cpu"
    with pytest.raises(lowering.TuningError):
        answer()
    assert said[-1][1] != digest


PROCESS = """
import sys
import jax
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from lowering import tuning_store
try:
    print("entries", len(tuning_store.entries_for("cpu")))
except Exception as error:
    print(error)
from jax.experimental import multihost_utils
multihost_utils.sync_global_devices("end")
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_same", [True, False])
def test_two_processes_compare_what_they_have_found(keep, tmp_path, is_same):
    path = keep(SECOND_WINS)
    empty = tmp_path / "empty"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, address, str(number)],
            env={**os.environ, "XLA_FLAGS": "", tuning_store.VARIABLE: str(folder)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for number, folder in enumerate((path.parent, path.parent if is_same else empty))
    ]
    printed = (process.communicate(timeout=120)[0].splitlines() for process in processes)
    # Gloo adds lines of its own, before or after.
    first, second = (next(line for line in lines if not line.startswith("[Gloo]")) for lines in printed)
    assert first == "entries 1"
    assert second == first if is_same else "process 1 has 0 results" in second
    assert [process.returncode for process in processes] == [0, 0]


def test_versions_are_those_of_this_process():
    assert dict(versions())["jax"] == jax.__version__
