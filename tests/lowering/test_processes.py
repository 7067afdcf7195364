"""The demo in several processes: as one to the last bit, whatever is killed, damaged or different on the way."""

import functools
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import contract
import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from jaxops._demo import model, processes, split_training, train
from jaxops._demo.checkpoints import Checkpoints
from jaxops._demo.run_folder import RunError, RunFolder
from jaxops_command.app import app

STEPS, VOCABULARY = 12, 64
SIZES = {"width": 32, "depth": 1, "context": 8}
ARGUMENTS = ["--steps", str(STEPS), "--batch", "4", "--save-every", "3"]
ARGUMENTS += [word for name, size in SIZES.items() for word in (f"--{name}", str(size))]
TRAINING = split_training.Training(train.Settings(steps=STEPS, batch=4), model.Shape(VOCABULARY, heads=4, **SIZES))
CHILD = (str(Path(__file__).with_name("process_child.py")),)


@pytest.fixture(autouse=True)
def _standard_promotion():
    """What users have; optax's schedules divide an integer count by floats."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(autouse=True)
def _limit(monkeypatch):
    monkeypatch.setattr(processes, "SECONDS_WITHOUT_A_STEP", 300)


def folder_with_text(path: Path) -> RunFolder:
    path.mkdir()
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 500).astype(np.int32)
    np.savez(path / "tokens.npz", train=tokens, vocabulary_size=VOCABULARY)
    return RunFolder(path)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return folder_with_text(tmp_path / "run")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = folder_with_text(tmp_path_factory.mktemp("uninterrupted") / "run")
    processes.run(1, ARGUMENTS, folder, lambda loss: None)
    return folder


def happens(monkeypatch: pytest.MonkeyPatch, **what: object) -> None:
    monkeypatch.setattr(processes, "WORKER", CHILD)
    monkeypatch.setenv("HAPPENS", json.dumps(what))


def run(count: int, folder: RunFolder, *more: str) -> None:
    processes.run(count, [*ARGUMENTS, *more], folder, lambda loss: None)


def final_state(folder: RunFolder) -> list[bytes]:
    """Every bit of parameters, moments, average and count, restored here, by one process of eight devices."""
    types = split_training.state_types(TRAINING, split_training.mesh())
    leaves = jax.tree.leaves(Checkpoints(folder, 1).restore(STEPS, types))
    assert len(leaves) > 4 * len(jax.tree.leaves(types[0])) - 1
    return [np.asarray(leaf).tobytes() for leaf in leaves]


def assert_same(actual: RunFolder, expected: RunFolder) -> None:
    assert [loss.step for loss in actual.losses()] == list(range(1, STEPS + 1))
    assert actual.losses_file.read_text() == expected.losses_file.read_text()
    assert final_state(actual) == final_state(expected)


def damage(folder: RunFolder, step: int) -> None:
    """Changes one bit of the largest file of a checkpoint."""
    path = max((folder.checkpoints / str(step)).rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_the_table_and_its_gradient_are_never_gathered():
    over = split_training.mesh()
    assert dict(over.shape) == {"data": 4, "vocabulary": 2}
    text = split_training.compiled_step(TRAINING, over).as_text()
    used = set(re.findall(r"(all-\w+|reduce-scatter|collective-\w+)(?:-start)?\(", text))
    assert used == {"all-reduce"}
    reduced = re.findall(r"= (.*?) all-reduce(?:-start)?\(", text)
    shapes = [tuple(map(int, dims.split(","))) for types in reduced for dims in re.findall(r"\[([\d,]+)\]", types)]
    # The gradients of lookup and head, over the data; each device has its own part of the vocabulary.
    assert shapes.count((VOCABULARY // 2, SIZES["width"])) >= 1
    assert not any(VOCABULARY in shape for shape in shapes)


@pytest.mark.slow
def test_split_training_is_that_of_jnp_and_optax():
    training, over = TRAINING._replace(dropout=0.0), split_training.mesh()
    text = np.random.default_rng(0).integers(0, VOCABULARY, 500).astype(np.int32)
    compiled, state = split_training.compiled_step(training, over), split_training.first_state(training, over)
    plain = train.plain(training.settings)
    params = model.init(jax.random.key(training.settings.seed), training.shape)
    plain_step, plain_state = train.train_step(plain, training.shape), (params, plain.init(params))
    for number in range(1, 4):
        batch = split_training.batch(training, over, text, number)
        *state, loss = compiled(*state, *batch)
        *plain_state, plain_loss = plain_step(*plain_state, np.asarray(batch[0]))
        np.testing.assert_allclose(loss, plain_loss, rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(state[0]), jax.tree.leaves(plain_state[0]), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)


def sealed(folder: RunFolder, *steps: int) -> None:
    for step in steps:
        (folder.checkpoints / str(step)).mkdir(parents=True)
        (folder.checkpoints / str(step) / "data").write_bytes(bytes([step]) * 8)
        folder.seal(step)


def test_a_run_goes_on_from_the_newest_whole_checkpoint(folder):
    assert folder.begin({"seed": 0}, resume=True) == 0
    for step in range(1, 8):
        folder.add_loss(step, 1 / step)
    sealed(folder, 2, 4, 6)
    (folder.checkpoints / "7.orbax-checkpoint-tmp").mkdir()
    (folder.checkpoints / "7").mkdir()  # complete, but stopped before it was sealed
    assert folder.begin({"seed": 0}, resume=True) == 6
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["2", "4", "6"]
    damage(folder, 6)
    with folder.losses_file.open("a") as stream:
        stream.write('{"step": 7, "lo')
    assert folder.begin({"seed": 0}, resume=True) == 4
    assert folder.losses() == [(step, 1 / step) for step in range(1, 5)]
    (folder.checkpoints / "4" / "data").unlink()
    assert folder.begin({"seed": 0}, resume=True) == 2
    damage(folder, 2)
    with pytest.raises(RunError, match=r"^the checkpoints in '.*' must be whole; none is, of steps 2$"):
        folder.begin({"seed": 0}, resume=True)


@pytest.mark.parametrize("name", ["run.json", "losses.jsonl", "tokens.npz"])
def test_a_damaged_file_is_told_in_one_sentence(name, folder):
    folder.begin({"seed": 0}, resume=False)
    (folder.path / name).write_text("snow\n")
    read = folder.tokens if name == "tokens.npz" else functools.partial(folder.begin, {"seed": 0}, resume=True)
    with pytest.raises(RunError, match=rf"^'.*{name}' must be as the run wrote it; got .*$"):
        read()


def test_another_run_is_refused(folder):
    folder.begin({"seed": 0, "steps": 5}, resume=False)
    with pytest.raises(RunError, match=r"^--output must be a folder without a run, unless --resume is given; got"):
        folder.begin({"seed": 0, "steps": 5}, resume=False)
    with pytest.raises(RunError, match=r"^--resume must be given with what the run began with; that is seed 0$"):
        folder.begin({"seed": 1, "steps": 5}, resume=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--processes", "3"), "--processes must be one of 1, 2, 4; got 3"),
        (("--resume",), "--resume must be given with --processes; got none"),
    ],
    ids=["three", "resume alone"],
)
def test_command_refuses(arguments, words):
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert (result.exit_code, result.stderr) == (2, f"jaxops: {words}\n")


def test_command_says_that_orbax_is_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "orbax" else object())
    result = CliRunner().invoke(app, ["demo", "--processes", "2"])
    words = (
        "jaxops: orbax-checkpoint must be installed; it is not: pip install '.[demo]' in a clone of the repository\n"
    )
    assert (result.exit_code, result.stderr) == (2, words)


@pytest.mark.slow
def test_processes_train_as_one_bit_for_bit_whatever_is_killed(folder, uninterrupted, monkeypatch):
    """Four, then two from a checkpoint before the newest, which is damaged, then one."""
    happens(monkeypatch, process=2, killed_at=8)
    with pytest.raises(RunError, match=r"^process 2 must run to the end; got SIGKILL after step 7, so all were"):
        run(4, folder)
    whole = max(int(path.stem) for path in (folder.path / "seals").iterdir())
    assert whole in (3, 6)
    if whole == 6:
        damage(folder, 6)
    happens(monkeypatch, process=0, killed_at=11)
    with pytest.raises(RunError, match=r"^process 0 must run to the end; got SIGKILL after step 10, so all were"):
        run(2, folder, "--resume")
    happens(monkeypatch)
    run(1, folder, "--resume")
    assert_same(folder, uninterrupted)


PARENT = """
import pathlib, sys
from jaxops._demo import processes, run_folder
folder = run_folder.RunFolder(pathlib.Path(sys.argv[1]))
processes.run(2, sys.argv[2:], folder, lambda loss: None)
"""


@pytest.mark.slow
def test_killing_the_command_ends_its_processes_and_loses_nothing(folder, uninterrupted):
    with subprocess.Popen([sys.executable, "-c", PARENT, str(folder.path), *ARGUMENTS]) as parent:
        deadline = time.monotonic() + 240
        while not folder.losses() and time.monotonic() < deadline:
            time.sleep(0.05)
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        parent.kill()
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    run(2, folder, "--resume")
    assert_same(folder, uninterrupted)


@pytest.mark.slow
def test_processes_of_other_versions_are_told_in_one_sentence(folder, monkeypatch):
    happens(monkeypatch, process=1, jax="0.1")
    words = r"^the versions must be the same for all processes; process 1 has jax 0\.1 and process 0 jax 0\.1[0-9.]+$"
    with pytest.raises(RunError, match=words):
        run(2, folder)


@pytest.mark.slow
def test_processes_that_have_tuned_differently_are_told_in_one_sentence(folder, monkeypatch, tmp_path):
    from test_tuning_store import SECOND_WINS

    from lowering import tuning_store

    tuning_store.append(tuning_store.file_of("cpu", tmp_path), [{"entry": SECOND_WINS.to_record()}])
    happens(monkeypatch, process=1, tuned=str(tmp_path))
    with pytest.raises(RunError, match=r"^tune: what is kept of cpu must be the same for all processes; process 1 has"):
        run(2, folder)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_without_a_command_around_them_a_lost_process_ends_the_other(how, folder):
    """As on a cluster, where nothing watches both."""
    address = f"localhost:{processes._free_port()}"
    command = [sys.executable, "-m", "jaxops._demo.worker", "--output", str(folder.path), *ARGUMENTS]
    command += ["--steps", "100000", "--coordinator", address, "--processes", "2", "--process"]
    members = [
        subprocess.Popen(
            [*command, str(number)], env=processes._environment(2), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        for number in range(2)
    ]
    try:
        deadline = time.monotonic() + 240
        while not folder.losses() and time.monotonic() < deadline:
            time.sleep(0.05)
        members[1].send_signal(how)
        members[0].communicate(timeout=60)
        assert members[0].returncode != 0
    finally:
        for member in members:
            member.kill()
            member.communicate()


def held_by_devices(count: int, at: Path) -> dict[str, str]:
    """What each device holds of each operator's value and gradients, with so many processes."""
    script, address = str(Path(__file__).with_name("process_operators.py")), f"localhost:{processes._free_port()}"
    files = [at / f"{number}-of-{count}.json" for number in range(count)]
    members = [
        subprocess.Popen(
            [sys.executable, script, address, str(count), str(number), str(file)],
            env={**processes._environment(count), "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.DEVNULL,
        )
        for number, file in enumerate(files)
    ]
    try:
        assert [member.wait(timeout=600) for member in members] == [0] * count
    finally:
        for member in members:
            member.kill()
            member.wait()
    return {name: held for file in files for name, held in json.loads(file.read_text()).items()}


@pytest.mark.slow
def test_every_operator_in_processes_is_that_of_one_bit_for_bit(tmp_path):
    held, held_in_one_process = held_by_devices(2, tmp_path), held_by_devices(1, tmp_path)
    assert len(held) >= 2 * 3 * 4 * len(contract.representatives())
    assert [name for name in held if held[name] != held_in_one_process[name]] == []
    assert held.keys() == held_in_one_process.keys()
