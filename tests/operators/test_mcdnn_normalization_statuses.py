"""The documented conditions of refusal of batch normalization and normalization, function by function."""

import inspect

import jax.numpy as jnp
import numpy as np
import pytest

from jaxops import BadParamError, NotSupportedError, mcdnn

BAD, UNSUPPORTED = "MCDNN_STATUS_BAD_PARAM", "MCDNN_STATUS_NOT_SUPPORTED"
X = np.ones((2, 3, 4, 5), np.float32)
VOLUME = np.ones((2, 3, 2, 4, 5), np.float32)
P = np.ones((1, 3, 1, 1), np.float32)
RELU = mcdnn.ActivationDescriptor("RELU")
NORM = {"mode": "PER_CHANNEL", "norm_ops": "NORM", "algo": "STANDARD"}
EX = {"mode": "SPATIAL", "bn_ops": "OPS_BN"}
FORWARD = {"x": X, "scale": P, "bias": P, "exponential_average_factor": 0.5}
INFERENCE = {"x": X, "scale": P, "bias": P, "estimated_mean": P, "estimated_variance": P}
BACKWARD = {"x": X, "dy": X, "scale": P}
FORWARD_SIZE = {"x": X, "z": None, "y": X, "scale": P, "activation": None}
BACKWARD_SIZE = {"x": X, "y": None, "dy": X, "dz": None, "dx": X, "scale": P, "activation": None}
CALLS = {
    "batch_normalization_forward_training": {"mode": "SPATIAL", **FORWARD},
    "batch_normalization_forward_training_ex": {**EX, **FORWARD},
    "batch_normalization_forward_inference": {"mode": "SPATIAL", **INFERENCE},
    "batch_normalization_backward": {"mode": "SPATIAL", **BACKWARD},
    "batch_normalization_backward_ex": {**EX, **BACKWARD},
    "normalization_forward_training": {**NORM, **FORWARD},
    "normalization_forward_inference": {**NORM, **INFERENCE},
    "normalization_backward": {**NORM, **BACKWARD},
    "get_batch_normalization_forward_training_ex_workspace_size": {**EX, **FORWARD_SIZE},
    "get_batch_normalization_backward_ex_workspace_size": {**EX, **BACKWARD_SIZE},
    "get_batch_normalization_training_ex_reserve_space_size": {**EX, "activation": None, "x": X},
    "get_normalization_forward_training_workspace_size": {**NORM, **FORWARD_SIZE, "mean_var": P},
    "get_normalization_backward_workspace_size": {**NORM, **BACKWARD_SIZE, "mean_var": P},
    "get_normalization_training_reserve_space_size": {**NORM, "activation": None, "x": X},
}
TRAINING = [name for name in CALLS if "forward_training" in name and not name.startswith("get")]
FORWARDS = [*TRAINING, *(name for name in CALLS if "inference" in name)]
BACKWARDS = [name for name in CALLS if name.startswith(("batch", "norm")) and "backward" in name]
COMPUTING = [*FORWARDS, *BACKWARDS]
SIZES = [name for name in CALLS if name.startswith("get")]
WORKSPACES = [name for name in SIZES if "workspace" in name]
ACTIVATING = [name for name, given in CALLS.items() if "bn_ops" in given or "norm_ops" in given]
NORMS = [name for name, given in CALLS.items() if "norm_ops" in given]
NORM_BACKWARD = "normalization_backward"
OTHERS = [name for name in [*COMPUTING, *WORKSPACES] if name != NORM_BACKWARD]

# condition: (functions, what to give instead, status). Of what is given each function gets the arguments that it has.
CONDITIONS = {
    **{f"{name}-null": ([f for f in CALLS if name in CALLS[f]], {name: None}, BAD) for name in ("x", "scale")},
    "bias-null": (FORWARDS, {"bias": None}, BAD),
    "dy-null": ([f for f in CALLS if "dy" in CALLS[f]], {"dy": None}, BAD),
    "estimates-null": ([f for f in CALLS if "inference" in f], {"estimated_variance": None}, BAD),
    **{f"{name}-null": (FORWARDS, {name: None}, BAD) for name in ("alpha", "beta")},
    **{
        f"{name}-null": (BACKWARDS, {name: None}, BAD)
        for name in ("alpha_data_diff", "beta_data_diff", "alpha_param_diff", "beta_param_diff")
    },
    "y-prior-null": (FORWARDS, {"beta": 1.0}, BAD),
    "dx-prior-null": (BACKWARDS, {"beta_data_diff": 1.0}, BAD),
    "dscale-prior-null": (BACKWARDS, {"beta_param_diff": 1.0, "dbias": P}, BAD),
    "dbias-prior-null": (BACKWARDS, {"beta_param_diff": 1.0, "dscale": P}, BAD),
    "y-prior-dims": (FORWARDS, {"beta": 1.0, "y": X[:1]}, BAD),
    "y-prior-dtype": (FORWARDS, {"beta": 1.0, "y": X.astype(np.float16)}, BAD),
    "dx-prior-dims": (BACKWARDS, {"dx": X[:1]}, BAD),
    "dscale-prior-dims": (BACKWARDS, {"dscale": P[:, :1]}, BAD),
    "rank-3": (CALLS, {"x": X[0]}, BAD),
    "rank-6": (CALLS, {"x": X[None, None]}, BAD),
    "scale-of-5d": ([*COMPUTING, *WORKSPACES], {"scale": P[..., None]}, BAD),
    "scale-channels": ([*COMPUTING, *WORKSPACES], {"scale": P[:, :2]}, BAD),
    "scale-flat": ([*COMPUTING, *WORKSPACES], {"scale": P.reshape(3)}, BAD),
    "scale-of-a-volume": (FORWARDS, {"x": VOLUME}, BAD),
    "scale-per-activation": ([*COMPUTING, *WORKSPACES], {"mode": "PER_ACTIVATION"}, BAD),
    "bias-dims": (FORWARDS, {"bias": P[:, :2]}, BAD),
    "mean-var-dims": (["get_normalization_forward_training_workspace_size"], {"mean_var": P[0]}, BAD),
    "dy-dims": ([f for f in CALLS if "dy" in CALLS[f]], {"dy": X[:1]}, BAD),
    "dy-dtype": ([f for f in CALLS if "dy" in CALLS[f]], {"dy": X.astype(np.float16)}, BAD),
    "dx-dims": ([f for f in SIZES if "dx" in CALLS[f]], {"dx": X[:1]}, BAD),
    "y-dims": (WORKSPACES, {"y": X[:1]}, BAD),
    "y-dtype": (WORKSPACES, {"y": X.astype(np.float16)}, BAD),
    "one-saved": (BACKWARDS, {"saved_mean": P}, BAD),
    "other-saved": (BACKWARDS, {"saved_inv_variance": P}, BAD),
    "one-running": (TRAINING, {"running_mean": P}, BAD),
    "other-running": (TRAINING, {"running_variance": P}, BAD),
    "saved-dims": (BACKWARDS, {"saved_mean": P[0], "saved_inv_variance": P[0]}, BAD),
    "running-dims": (TRAINING, {"running_mean": P[0], "running_variance": P[0]}, BAD),
    "epsilon-negative": (COMPUTING, {"epsilon": -1e-12}, BAD),
    "epsilon-nan": (COMPUTING, {"epsilon": np.nan}, BAD),
    "epsilon-null": (COMPUTING, {"epsilon": None}, BAD),
    "factor": (TRAINING, {"exponential_average_factor": 1.5}, BAD),
    "mode": (CALLS, {"mode": "BATCH"}, BAD),
    "mode-number": (CALLS, {"mode": 7}, BAD),
    "layout": ([*COMPUTING, *WORKSPACES], {"layout": "CHWN"}, BAD),
    "layout-rank": ([*COMPUTING, *WORKSPACES], {"layout": "NCDHW"}, BAD),
    "algo": (NORMS, {"algo": "FAST"}, BAD),
    "ops": (NORMS, {"norm_ops": "OPS_BN"}, BAD),
    "activation-null": (ACTIVATING, {"norm_ops": 1, "bn_ops": 1, "activation": None}, BAD),
    "z-null": (
        [name for name in ACTIVATING if "forward" in name],
        {"norm_ops": 2, "bn_ops": 2, "activation": RELU, "z": None},
        BAD,
    ),
    "z-dims": (
        [name for name in ACTIVATING if "forward" in name],
        {"norm_ops": 2, "bn_ops": 2, "activation": RELU, "z": X[:1]},
        BAD,
    ),
    "reserve-smaller": (
        [name for name in BACKWARDS if name in ACTIVATING],
        {"norm_ops": 1, "bn_ops": 1, "activation": RELU, "reserve_space": np.zeros(12, np.uint8), "y": X},
        BAD,
    ),
    "slope-untold": (
        [name for name in BACKWARDS if name in ACTIVATING],
        {"norm_ops": 1, "bn_ops": 1, "activation": RELU},
        BAD,
    ),
    "group-count": (NORMS, {"group_cnt": 2}, UNSUPPORTED),
    "data-dtype": (
        [*COMPUTING, *WORKSPACES],
        {name: X.astype(np.int8) for name in ("x", "dy", "dx", "y")},
        UNSUPPORTED,
    ),
    "parameter-dtype": (OTHERS, {"scale": P.astype(np.float16)}, UNSUPPORTED),
    "parameter-dtype-of-its-own-list": ([NORM_BACKWARD], {"scale": P.astype(np.float16)}, BAD),
    "swish-backward": (
        [name for name in BACKWARDS if name in ACTIVATING],
        {"norm_ops": 1, "bn_ops": 1, "activation": mcdnn.ActivationDescriptor("SWISH"), "y": X},
        UNSUPPORTED,
    ),
    "strict-layout": (
        [name for name in COMPUTING if name in ACTIVATING],
        {"norm_ops": 1, "bn_ops": 1, "activation": RELU, "y": X, "strict": True},
        UNSUPPORTED,
    ),
    "strict-z": (
        [name for name in FORWARDS if name in ACTIVATING],
        {"norm_ops": 2, "bn_ops": 2, "activation": RELU, "z": X, "layout": "NHWC", "strict": True}
        | {
            name: np.ones((1, 5, 1, 1), np.float32)
            for name in ("scale", "bias", "estimated_mean", "estimated_variance")
        },
        UNSUPPORTED,
    ),
    "strict-bfloat16": (
        ["batch_normalization_backward", "batch_normalization_backward_ex", "batch_normalization_forward_training_ex"],
        dict.fromkeys(("x", "dy"), jnp.ones(X.shape, "bfloat16")) | {"strict": True},
        UNSUPPORTED,
    ),
}
ROWS = [
    pytest.param(function, instead, status, id=f"{condition}-{function}")
    for condition, (functions, instead, status) in CONDITIONS.items()
    for function in functions
]


@pytest.mark.parametrize(("function", "instead", "status"), ROWS)
def test_documented_condition_has_its_status(function, instead, status):
    call = getattr(mcdnn, function)
    takes = inspect.signature(call).parameters
    with pytest.raises((BadParamError, NotSupportedError)) as refusal:
        call(**(CALLS[function] | {k: v for k, v in instead.items() if k in takes}))
    assert refusal.value.status == status
    assert isinstance(refusal.value, BadParamError if status == BAD else NotSupportedError)
    assert str(refusal.value).startswith(f"{function}: ")


@pytest.mark.parametrize("function", CALLS)
def test_call_that_breaks_no_condition_runs(function):
    getattr(mcdnn, function)(**CALLS[function])
