"""Artifacts: one file for three platforms that runs in another process, and one sentence for any other file."""

import json
import subprocess
import sys
import zipfile

import contract
import exported_training
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_classifier import classifier_step, init_state

import jaxops
import lowering

OPTIMIZER = jaxops.ema_adam(1e-2)


def step(params, opt_state, x, labels):
    loss, grads = jax.value_and_grad(lambda p: jaxops.linear_cross_entropy(x, p["head"], labels))(params)
    return *jaxops.fused_apply(OPTIMIZER, grads, opt_state, params), {
        "loss": loss,
        "nothing": None,
        "pair": [loss, 2.0],
    }


@pytest.fixture
def args(rng):
    params = {"head": jnp.asarray(rng.normal(size=(16, 8)), jnp.float32)}
    x, labels = jnp.asarray(rng.normal(size=(4, 8)), jnp.float32), jnp.asarray([1, 2, 3, 15], jnp.int32)
    return params, OPTIMIZER.init(params), x, labels


@pytest.fixture
def artifact(args):
    # Float32 is not for the loss's kernels on GPUs.
    with lowering.use("pallas", linear_cross_entropy_sum_with_gradients="auto"):
        return lowering.export(step, *args)


def test_artifact_holds_the_kernel_of_each_platform(artifact):
    assert artifact.platforms == ("cpu", "cuda", "tpu")
    assert artifact.stablehlo.count("tpu_custom_call") >= 1
    assert artifact.stablehlo.count("mosaic_gpu_v2") >= 1
    implementations = {p: artifact.implementations[p]["apply_fused_ema_adam"] for p in artifact.platforms}
    assert implementations == {"cpu": ["reference"], "cuda": ["mosaic_gpu"], "tpu": ["mosaic_tpu"]}
    assert artifact.versions["jax"] == jax.__version__


@pytest.mark.slow
def test_flax_train_step_is_exported(rng):
    with jax.numpy_dtype_promotion("standard"):
        state = init_state(jax.random.key(0))
        images, labels = rng.normal(size=(4, 28, 28, 1)).astype(np.float32), np.array([3, 1, 4, 1], np.int32)
        artifact = lowering.export(classifier_step, state, images, labels)
        expected, loss = classifier_step(state, images, labels)
        exported, exported_loss = artifact.call(state, images, labels)
    assert artifact.platforms == ("cpu", "cuda", "tpu")
    np.testing.assert_allclose(exported_loss, loss, rtol=1e-5)
    np.testing.assert_allclose(exported.params["Dense_1"]["kernel"], expected.params["Dense_1"]["kernel"], atol=1e-5)


@pytest.mark.long
def test_artifact_runs_in_a_fresh_process(artifact, args, tmp_path):
    artifact.save(tmp_path / "step.jaxops")
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(args)]
    np.savez(tmp_path / "args.npz", *leaves)
    code = """
import sys, jax, numpy as np, optax, lowering
from jaxops.ema_adam.api import EmaParamsState
artifact = lowering.load(sys.argv[1] + "/step.jaxops")
head, count, mu, nu, ema, x, labels = np.load(sys.argv[1] + "/args.npz").values()
state = optax.ScaleByAdamState(count, {"head": mu}, {"head": nu}), EmaParamsState({"head": ema})
params, (adam, average), rest = artifact.call({"head": head}, state, x, labels)
assert isinstance(adam, optax.ScaleByAdamState) and isinstance(average, EmaParamsState), (adam, average)
assert rest["nothing"] is None and isinstance(rest["pair"], list), rest
np.savez(sys.argv[1] + "/results.npz", params["head"], average.ema["head"], rest["loss"])
"""
    environment = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": ":".join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=environment)
    params, opt_state, rest = step(*args)
    expected = params["head"], jaxops.ema_params(opt_state)["head"], rest["loss"]
    for found, true in zip(np.load(tmp_path / "results.npz").values(), expected, strict=True):
        np.testing.assert_allclose(found, true, rtol=1e-6)


def test_artifact_takes_its_second_step():
    artifact = lowering.export(jax.jit(exported_training.step), exported_training.start(), *exported_training.batch())
    expected = exported_training.two_steps(jax.jit(exported_training.step))
    found = exported_training.two_steps(artifact.call)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    contract.assert_close(found, expected)
    assert found[0].first.tx is exported_training.OPTIMIZERS["adamw"]


@pytest.mark.slow
def test_artifact_takes_its_second_step_in_a_fresh_process(tmp_path):
    step = jax.jit(exported_training.step)
    lowering.export(step, exported_training.start(), *exported_training.batch()).save(tmp_path / "step")
    code = """
import sys, jax, numpy as np, exported_training, lowering
artifact = lowering.load(sys.argv[1] + "/step")
found = exported_training.two_steps(artifact.call)
expected = exported_training.two_steps(jax.jit(exported_training.step))
assert jax.tree.structure(found) == jax.tree.structure(expected), found
assert isinstance(found[1], exported_training.Report), found[1]
assert isinstance(found[1].updates["norms"], exported_training.Norms), found[1]
np.savez(sys.argv[1] + "/results.npz", *jax.tree.leaves(found))
"""
    environment = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": ":".join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=environment)
    expected = jax.tree.leaves(exported_training.two_steps(step))
    for found, true in zip(np.load(tmp_path / "results.npz").values(), expected, strict=True):
        np.testing.assert_allclose(found, true, rtol=1e-5)


@pytest.mark.slow
def test_artifact_gives_stand_ins_for_classes_that_are_not_imported_and_imports_none(tmp_path):
    run, data = exported_training.start(), exported_training.batch()
    lowering.export(exported_training.start, platforms="cpu").save(tmp_path / "start")
    lowering.export(exported_training.step, run, *data, platforms="cpu").save(tmp_path / "step")
    code = """
import sys, numpy as np, lowering
start, step = (lowering.load(sys.argv[1] + name) for name in ("/start", "/step"))
x, y = np.cos(np.arange(12, dtype="f4")).reshape(4, 3), np.sin(np.arange(8, dtype="f4")).reshape(4, 2)
run = start.call()
for _ in range(2):
    run, report = step.call(run, x, y)
assert not {"optax", "flax", "jaxops", "exported_training"} & {*sys.modules}
assert type(run).__name__ == "Run" and run.second["opt_state"][1][0].count == 2, run
np.savez(sys.argv[1] + "/results.npz", run.first.params["weight"], report.updates["norms"].weight)
"""
    environment = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": ":".join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=environment)
    run, report, _ = exported_training.two_steps(jax.jit(exported_training.step))
    expected = run.first.params["weight"], report.updates["norms"].weight
    for found, true in zip(np.load(tmp_path / "results.npz").values(), expected, strict=True):
        np.testing.assert_allclose(found, true, rtol=1e-5)


def test_results_are_of_the_callers_classes_and_have_their_static_data(tmp_path):
    """And not those of another argument that has other static data."""

    def swap(left, right):
        return right, left

    def run_of(scale):
        return exported_training.start().replace(scale=scale)

    artifact = lowering.export(swap, run_of(1.0), run_of(2.0), platforms="cpu")
    artifact.save(tmp_path / "swap")
    for one in (artifact, lowering.load(tmp_path / "swap")):
        assert [run.scale for run in one.call(run_of(1.0), run_of(2.0))] == [2.0, 1.0]
        assert [run.scale for run in one.call(run_of(3.0), run_of(4.0))] == [4.0, 3.0]


def test_artifact_takes_symbolic_sizes(tmp_path):
    (rows,) = jax.export.symbolic_shape("rows")
    x, labels = jax.ShapeDtypeStruct((rows, 8), jnp.float32), jax.ShapeDtypeStruct((rows,), jnp.int32)
    weight = jnp.ones((16, 8))
    lowering.export(lambda x, y: jaxops.linear_cross_entropy(x, weight, y), x, labels).save(tmp_path / "loss")
    artifact = lowering.load(tmp_path / "loss")
    for size in (3, 5):
        np.testing.assert_allclose(
            artifact.call(jnp.ones((size, 8)), jnp.zeros(size, jnp.int32)), np.log(16), rtol=1e-6
        )


def test_call_refuses_another_structure(artifact, args):
    params, opt_state, x, labels = args
    no_arrays = "export: args[2] must be float32[4,8]; got"
    refused = {
        "export: args[0]['head'] must be float32[16,8]; got nothing": ({}, opt_state, x, labels),
        "export: args[0]['tail'] must not be given; got float32[4,8]": (params | {"tail": x}, opt_state, x, labels),
        "export: args[0]['head'] must be float32[16,8]; got float32[4,8]": ({"head": x}, opt_state, x, labels),
        "export: args[3] must be int32[4]; got float32[4]": (params, opt_state, x, labels.astype(jnp.float32)),
        f"{no_arrays} 1.5": (params, opt_state, 1.5, labels),
        f"{no_arrays} 'x'": (params, opt_state, "x", labels),
        f"{no_arrays} a object": (params, opt_state, object(), labels),
        "export: args[4] must not be given; got float32[4,8]": (*args, x),
    }
    for sentence, wrong in refused.items():
        with pytest.raises(lowering.ArtifactError) as refusal:
            artifact.call(*wrong)
        assert str(refusal.value) == sentence


def test_artifact_says_what_it_is_called_with(artifact, tmp_path):
    artifact.save(tmp_path / "step")
    for one in (artifact, lowering.load(tmp_path / "step")):
        assert one.arguments["args[0]['head']"] == one.arguments["args[1][0].mu['head']"] == "float32[16,8]"
        assert one.arguments["args[3]"] == "int32[4]"
        assert len(one.arguments) == 7
        operators = len(one.implementations["cpu"])
        assert (
            str(one)
            == repr(one)
            == (f"Artifact for cpu, cuda, tpu: 7 arrays, {operators} operators, exported with JAX {jax.__version__}")
        )


def test_call_refuses_symbolic_sizes_that_disagree():
    (rows,) = jax.export.symbolic_shape("rows")
    x, y = jax.ShapeDtypeStruct((rows, 8), jnp.float32), jax.ShapeDtypeStruct((rows,), jnp.float32)
    artifact = lowering.export(lambda x, y: x.sum(1) + y, x, y)
    assert artifact.arguments == {"args[0]": "float32[rows,8]", "args[1]": "float32[rows]"}
    sentence = r"export: args\[1\] must be float32\[rows\] with rows = 3, as args\[0\] is; got float32\[4\]"
    with pytest.raises(lowering.ArtifactError, match=sentence):
        artifact.call(jnp.ones((3, 8)), jnp.ones(4))
    doubled = lowering.export(lambda x, y: x.sum() + y.sum(), x, jax.ShapeDtypeStruct((2 * rows,), jnp.float32))
    assert doubled.call(jnp.ones((3, 8)), jnp.ones(6)) == 30
    with pytest.raises(lowering.ArtifactError, match=r"^export: args must have sizes that were exported; got others: "):
        doubled.call(jnp.ones((3, 8)), jnp.ones(5))


def test_call_refuses_a_platform_that_the_artifact_does_not_hold():
    artifact = lowering.export(lambda x: x + 1, jnp.ones(3), platforms=["tpu"])
    with pytest.raises(lowering.ArtifactError, match="artifact must hold the platform cpu; got one for tpu"):
        artifact.call(jnp.ones(3))


@pytest.mark.parametrize(("platforms", "got"), [(["cpu", "rocm"], "rocm"), ([], "none")])
def test_export_refuses_an_unknown_platform(platforms, got):
    with pytest.raises(lowering.ArtifactError, match=f"platforms must be of cpu, cuda, tpu; got {got}"):
        lowering.export(lambda x: x, jnp.ones(3), platforms=platforms)


def test_load_refuses_what_export_has_not_saved(artifact, tmp_path):
    path = tmp_path / "artifact"
    with pytest.raises(lowering.ArtifactError, match=r"path must name a file that can be read; got .*: No such file"):
        lowering.load(path)
    artifact.save(path)
    whole = path.read_bytes()
    for wrong in (b"", b"not an artifact", whole[: len(whole) // 2], whole[:-30]):
        path.write_bytes(wrong)
        with pytest.raises(lowering.ArtifactError, match="must be a whole file that export has saved"):
            lowering.load(path)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 255
    path.write_bytes(flipped)
    with pytest.raises(lowering.ArtifactError, match="must be a whole file that export has saved"):
        lowering.load(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("program", b""),
        ("program", b"not a program" * 9),
        ("metadata.json", b"[]"),
        ("metadata.json", b'{"format": 4}'),
    ],
)
def test_load_refuses_what_it_cannot_read_in_a_whole_file(name, text, artifact, tmp_path):
    artifact.save(tmp_path / "artifact")
    with zipfile.ZipFile(tmp_path / "artifact") as file:
        parts = {part: file.read(part) for part in file.namelist()} | {name: text}
    with zipfile.ZipFile(tmp_path / "other", "w") as file:
        for part, content in parts.items():
            file.writestr(part, content)
    with pytest.raises(lowering.ArtifactError, match=r"must (have format 4|hold a program that JAX .* can read); got"):
        lowering.load(tmp_path / "other")


def test_one_platform_may_be_a_string():
    assert lowering.export(jnp.sin, jnp.ones(3), platforms="cpu").platforms == ("cpu",)


def test_load_refuses_a_later_format(artifact, tmp_path):
    artifact.save(tmp_path / "artifact")
    with zipfile.ZipFile(tmp_path / "artifact") as file:
        record = {**json.loads(file.read("metadata.json")), "format": 5}
        program = file.read("program")
    with zipfile.ZipFile(tmp_path / "later", "w") as file:
        file.writestr("metadata.json", json.dumps(record))
        file.writestr("program", program)
    with pytest.raises(lowering.ArtifactError, match="must have format 4; got 5"):
        lowering.load(tmp_path / "later")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((np.ones(3, np.float32), object()), r"args must be 1, as exported; got 2"),
        ((np.full(3, 1e300),), r"args\[0\] must hold numbers that fit float32; got float64\[3\]"),
        ((np.ma.ones(3, np.float32),), r"args\[0\] must be float32\[3\]; got a MaskedArray of float32\[3\]"),
        ((np.ones(3, object),), r"args\[0\] must be float32\[3\]; got object\[3\]"),
    ],
    ids=["one-more", "too-large", "masked", "objects"],
)
def test_call_refuses_what_it_would_drop_or_round_to_infinity(args, words):
    with pytest.raises(lowering.ArtifactError, match=words):
        lowering.export(jnp.sin, np.ones(3, np.float32), platforms="cpu").call(*args)


@pytest.mark.parametrize("number", [2**31, 10**30, np.array(2**40), np.int64(-(2**31) - 1)])
def test_call_refuses_integers_that_it_would_cut(number):
    with pytest.raises(lowering.ArtifactError, match=r"args\[0\] must hold numbers that fit int32; got"):
        lowering.export(jnp.square, 3, platforms="cpu").call(number)


def of_channels(x):
    return x[..., None, None], *[jnp.ones((1, x.shape[1], 1, 1))] * 2


RESULTS = {
    "BatchNormOutput": lambda x: jaxops.batch_norm(x, layout="NC"),
    "BatchNormTraining": lambda x: jaxops.mcdnn.batch_normalization_forward_training(
        "SPATIAL", *of_channels(x), exponential_average_factor=1.0
    ),
    "OnlineMaxSum": lambda x: jaxops.aclnn.fused_linear_online_max_sum(
        x.astype(jnp.bfloat16),
        x.astype(jnp.bfloat16),
        jnp.arange(len(x)),
        vocab_start_index=0,
        vocab_end_index=len(x),
    ),
    "RowGradients": lambda x: jaxops.embedding_row_gradients(x, jnp.arange(len(x)), num_weights=5),
    "LinearCrossEntropyAux": lambda x: jaxops.linear_cross_entropy(x, x, jnp.arange(len(x)), return_aux=True)[1],
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", RESULTS)
def test_jax_stores_functions_that_return_results_of_this_library(name):
    x = jnp.ones((2, 4))
    stored = jax.export.export(jax.jit(RESULTS[name]))(x).serialize()
    result = jax.export.deserialize(stored).call(x)
    assert type(result).__name__ == name
    jax.tree.map(np.testing.assert_array_equal, result, RESULTS[name](x))


def test_artifact_is_compiled_once(caplog):
    artifact, x = lowering.export(jnp.sin, jnp.ones(3), platforms="cpu"), jnp.ones(3)
    with jax.log_compiles():
        artifact.call(x)
        assert "Compiling" in caplog.text
        caplog.clear()
        artifact.call(x)
        assert "Compiling" not in caplog.text


@pytest.mark.parametrize("options", [{}, {"graph": False}], ids=["graph", "tree"])
def test_what_nnx_has_jitted_is_compiled_with_its_updates_and_not_exported(options: dict[str, bool]) -> None:
    layer = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    jitted = nnx.jit(lambda layer, x: jaxops.softmax(layer(x)), **options)
    report = lowering.compile(jitted, layer, jnp.ones((4, 8)), target="cpu")
    # Beside the results, the averages are written.
    assert report.memory.outputs >= 4 * (4 * 8 + 8 + 8)
    with pytest.raises(lowering.ArtifactError, match="fn must be the function itself, or jitted by"):
        lowering.export(jitted, layer, jnp.ones((4, 8)))
