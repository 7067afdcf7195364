"""Modules of Equinox, which hold functions and flags beside their arrays, are explained, compiled and exported."""

import equinox as eqx
import jax
import numpy as np
import pytest

import jaxops
import lowering


class Model(eqx.Module):
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout
    head: jax.Array
    name: str

    def __init__(self, key):
        self.mlp = eqx.nn.MLP(8, 8, 16, 1, key=key)
        self.dropout = eqx.nn.Dropout(0.5, inference=True)
        self.head = jax.random.normal(key, (12, 8))
        self.name = "model"

    def __call__(self, x):
        return self.dropout(jax.vmap(self.mlp)(x))


def loss(model, x, labels):
    return jaxops.linear_cross_entropy(model(x), model.head, labels)


def step(model, x, labels):
    value, grads = eqx.filter_value_and_grad(loss)(model, x, labels)
    return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), value


MODEL = Model(jax.random.key(0))
BATCH = np.ones((4, 8), np.float32), np.arange(4, dtype=np.int32)
ABSTRACT = eqx.filter_eval_shape(Model, jax.random.key(0))


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("fn", [step, eqx.filter_jit(step)], ids=["plain", "filter_jit"])
@pytest.mark.parametrize("model", [MODEL, ABSTRACT], ids=["arrays", "shapes"])
def test_equinox_step_is_explained_and_compiled(fn, model):
    operators = [row.operator for row in lowering.explain(fn, model, *BATCH).rows]
    assert operators == ["linear_cross_entropy_sum_with_gradients"]
    report = lowering.compile(fn, model, *BATCH, target="cpu")
    updated, value = report.call(MODEL, *BATCH)
    expected_model, expected = step(MODEL, *BATCH)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(updated.head, expected_model.head, rtol=1e-5)


@pytest.mark.long
def test_equinox_step_is_exported(tmp_path):
    lowering.export(eqx.filter_jit(step), ABSTRACT, *BATCH, platforms="cpu").save(tmp_path / "step")
    artifact = lowering.load(tmp_path / "step")
    assert artifact.arguments["args[0].mlp.layers[1].weight"] == "float32[8,16]"
    assert artifact.fixed["args[0].dropout.inference"] == "True"
    np.testing.assert_allclose(artifact.call(MODEL, *BATCH)[1], loss(MODEL, *BATCH), rtol=1e-6)
    training = eqx.tree_at(lambda model: model.dropout.inference, MODEL, False)
    sentence = r"^export: args\[0\]\.dropout\.inference must be True, as it was exported; got False$"
    with pytest.raises(lowering.ArtifactError, match=sentence):
        artifact.call(training, *BATCH)


@pytest.mark.long
def test_exported_equinox_step_takes_its_second_step(tmp_path):
    lowering.export(eqx.filter_jit(step), MODEL, *BATCH, platforms="cpu").save(tmp_path / "step")
    model, expected = MODEL, MODEL
    for _ in range(2):
        model, value = lowering.load(tmp_path / "step").call(model, *BATCH)
        expected, true = step(expected, *BATCH)
        np.testing.assert_allclose(value, true, rtol=1e-6)
    assert (model.name, model.dropout.inference) == ("model", True)
    np.testing.assert_allclose(model(BATCH[0]), expected(BATCH[0]), rtol=1e-5, atol=1e-6)  # activations and all


def test_modules_with_flags_alone_are_fixed_and_numbers_elsewhere_are_not():
    def dropped(dropout, x, scale):
        return scale * dropout(x, key=jax.random.key(0), inference=None)

    x = np.ones((4, 8), np.float32)
    artifact = lowering.export(dropped, eqx.nn.Dropout(0.5), x, 2.0, platforms="cpu")
    assert artifact.arguments == {"args[1]": "float32[4,8]", "args[2]": "float32[]"}
    np.testing.assert_allclose(artifact.call(eqx.nn.Dropout(0.5), x, 3.0), dropped(eqx.nn.Dropout(0.5), x, 3.0))


def test_equinox_model_is_measured():
    result = lowering.tune(loss, MODEL, *BATCH, repeats=1, progress=False)
    assert [entry.key.operator for entry in result.entries] == ["linear_cross_entropy"]
