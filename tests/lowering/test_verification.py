"""A kernel that was only replayed and executed is verified on the device that is here, once, before its first use."""

import json
import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
import lowering
from lowering import _jax_private, evidence, tuning_store, verification
from lowering.evidence import Case, Grid
from pallas_kernels.kernel import Kernel, Kind

OPERATOR = next(operator for operator in jaxops.operators() if operator.name == "softmax")
X = np.linspace(-2, 2, 64 * 1000, dtype=np.float32).reshape(64, 1000)
RELEASED = threading.Event()
EXPECTED = np.exp(X) / np.exp(X).sum(axis=1, keepdims=True)


def refuses(hardware, x, **_):
    return None


def kind(hardware, x, **_):
    return Kind("float32", x.shape)


def right(x, *, config, interpret, **_):
    return (jax.nn.softmax(x),)


def wrong(x, *, config, interpret, **_):
    return (jax.nn.softmax(x) + 0.01,)


def crashing(x, *, config, interpret, **_):
    return (jax.pure_callback(lambda x: os._exit(3), jax.ShapeDtypeStruct(x.shape, x.dtype), x),)


def hanging(x, *, config, interpret, **_):
    return (jax.pure_callback(lambda x: RELEASED.wait() and x, jax.ShapeDtypeStruct(x.shape, x.dtype), x),)


def simulate(run) -> Kernel:
    """Offers a kernel on this machine's processor, and evidence that it is twice as fast as the reference."""
    kernel = Kernel("simulated", "cpu", run, refuses, kind=kind)
    key = "softmax", "simulated", "float32"
    cases = tuple(Case(*key, (rows, columns), 0.5, 100.0, (0, 0)) for rows in (16, 128) for columns in (256, 1024))
    grid = Grid({}, {key: cases}, {key: [16, 256]})
    evidence.shipped = lambda target: grid if target == "cpu" else None
    lowering.add_kernel(OPERATOR, kernel)
    return kernel


@pytest.fixture
def offered(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXOPS_TUNED", str(tmp_path))
    monkeypatch.setattr(evidence, "shipped", evidence.shipped)
    tuning_store.reread()
    kernels = []

    def offer(run):
        kernels.append(simulate(run))
        return tmp_path

    yield offer
    for kernel in kernels:
        lowering.remove_kernel(OPERATOR, kernel)
    tuning_store.reread()


def records(folder):
    (file,) = folder.glob("*.jsonl")
    return [json.loads(line)["verification"] for line in file.read_text().splitlines()]


def row():
    return lowering.explain(jaxops.softmax, X).rows[0]


def test_a_right_kernel_is_verified_once_and_taken(offered):
    counted = []

    def run(x, **options):
        counted.append(x.shape)
        return right(x, **options)

    folder = offered(run)
    assert row().evidence.endswith("0.50 of the reference's time, executed; not run on a device")
    np.testing.assert_allclose(jax.jit(jaxops.softmax)(X), EXPECTED, rtol=1e-5)
    sizes = counted[:-1]
    assert sizes, "nothing was verified"
    assert counted[-1] == X.shape
    assert [record["fault"] for record in records(folder)] == [verification._BEGUN, ""]
    assert f"verified on this device on {records(folder)[-1]['date']}" in row().evidence
    tuning_store.reread()  # as in another process
    counted.clear()
    jax.jit(jaxops.softmax)(X)
    assert counted == [X.shape]


def test_a_wrong_kernel_is_never_taken_and_warned_of_once(offered, recwarn):
    folder = offered(wrong)
    with pytest.warns(
        RuntimeWarning, match="softmax: simulated is not taken on this device, wrong: result 0 is off by"
    ):
        np.testing.assert_allclose(jax.jit(jaxops.softmax)(X), EXPECTED, rtol=1e-5)
    tuning_store.reread()
    recwarn.clear()
    np.testing.assert_allclose(jax.jit(jaxops.softmax)(X), EXPECTED, rtol=1e-5)
    assert not recwarn.list
    assert len(records(folder)) == 2
    (refusal,) = [refusal for refusal in row().refusals if refusal.kernel == "simulated"]
    assert "went wrong on this device on" in refusal.reason


def test_a_kernel_that_hangs_stops_nothing(offered, monkeypatch):
    monkeypatch.setattr(verification, "MOST_SECONDS", 0.5)
    offered(hanging)
    with pytest.warns(RuntimeWarning, match=r"not taken on this device, hangs: no result within 0\.5 s"):
        np.testing.assert_allclose(jax.jit(jaxops.softmax)(X), EXPECTED, rtol=1e-5)
    RELEASED.set()
    for thread in threading.enumerate():
        if thread.name == "verification of a kernel":
            thread.join()


@pytest.mark.slow
def test_a_kernel_that_ended_the_process_is_not_tried_again(tmp_path):
    program = (
        "import test_verification as v, numpy as np, jaxops; v.simulate(v.crashing); jaxops.softmax(v.X); print(1)"
    )
    paths = os.pathsep.join([os.path.dirname(__file__), os.path.dirname(os.path.dirname(__file__))])
    environment = os.environ | {"JAXOPS_TUNED": str(tmp_path), "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    codes = [subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode for _ in "12"]
    assert codes == [3, 0]


def test_a_kernel_is_taken_unverified_if_the_user_says_so(offered, monkeypatch):
    folder = offered(wrong)
    with lowering.use(verify=False):
        assert float(jax.jit(jaxops.softmax)(X)[0, 0]) > 0.01
    monkeypatch.setenv("JAXOPS_VERIFY", "never")
    jax.clear_caches()
    assert float(jax.jit(jaxops.softmax)(X)[0, 0]) > 0.01
    assert not list(folder.iterdir())


def test_what_cannot_be_kept_is_found_again_by_each_process(offered, monkeypatch, tmp_path):
    offered(right)
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAXOPS_TUNED", str(tmp_path / "file"))
    tuning_store.reread()
    with pytest.warns(RuntimeWarning) as warned:
        np.testing.assert_allclose(jax.jit(jaxops.softmax)(X), EXPECTED, rtol=1e-5)
    assert any("what is found of simulated cannot be kept" in str(one.message) for one in warned)
    assert row().implementation == "simulated"


def test_processes_that_disagree_stop(offered, monkeypatch):
    offered(right)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    said = {"jaxops/verified": "wrong: result 0 is off by 1"}
    monkeypatch.setattr(
        _jax_private, "said_by_first_process", lambda name, own, _: said.get(name.rpartition("/cpu/")[0], own)
    )
    with pytest.raises(
        lowering.TuningError,
        match=r"must be right on the devices of all processes; process 0 found simulated right and process 0 wrong",
    ):
        jax.jit(jaxops.softmax)(X)


def test_what_the_user_interrupts_is_verified_next_time(offered, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    folder = offered(right)
    with monkeypatch.context() as patched:
        patched.setattr(verification, "_within", interrupt)
        with pytest.raises(KeyboardInterrupt):
            jax.jit(jaxops.softmax)(X)
    tuning_store.reread()
    assert row().evidence.endswith("not run on a device")
    np.testing.assert_allclose(jax.jit(jaxops.softmax)(X), EXPECTED, rtol=1e-5)
    assert [record["fault"] for record in records(folder)] == [verification._BEGUN, None, verification._BEGUN, ""]


def test_the_processes_of_a_program_verify_each_for_itself(offered, monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(_jax_private, "said_by_first_process", lambda name, own, _: own)
    folder = offered(right)
    np.testing.assert_allclose(jax.jit(jaxops.softmax)(X), EXPECTED, rtol=1e-5)
    assert "verified on this device" in row().evidence
    assert not list(folder.iterdir())


def test_small_cases_keep_what_attributes_name():
    types = [jax.ShapeDtypeStruct((4096, 1000), jnp.float32)]
    found = list(verification.smaller(types, {"size": 1000}, lambda types: True))
    assert [x.shape for (x,) in found] == [(321, 1000), (256, 1000)]
