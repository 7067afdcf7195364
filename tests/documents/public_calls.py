"""One valid call of each public function, with a value for as many of its arguments as it can take at once.

A function that the table lacks is called as in the case of its operator that calls nothing else.
"""

import functools
import inspect
from typing import Any

import contract
import jax
import numpy as np

import jaxops
from jaxops import aclnn, mcdnn

F32, HALF = np.float32, np.float16
IMAGE, ROW, COLUMN = np.ones((2, 3, 4, 4), F32), np.ones(3, F32), np.ones((1, 3, 1, 1), F32)
IDS = np.array([0, 2], np.int32)
LOGITS, WEIGHT = np.ones((2, 3), F32), np.ones((4, 3), F32)
KEY = jax.random.key(0)
RELU = mcdnn.ActivationDescriptor("RELU")
WINDOW = mcdnn.PoolingDescriptor("MAX", 2, 0, 2)
TRANSFORMER = mcdnn.SpatialTransformerDescriptor((2, 3, 4, 4))
GRID = np.zeros((2, 4, 4, 2), F32)
BN = {"mode": "SPATIAL", "x": IMAGE, "scale": COLUMN, "bias": COLUMN}
BN_OPS = {"bn_ops": "OPS_BN_ADD_ACTIVATION", "z": IMAGE, "activation": RELU}
NORM = {"mode": "PER_CHANNEL", "norm_ops": "NORM_ADD_ACTIVATION", "algo": "STANDARD"}
NORM_OPS = {"activation": RELU, "z": IMAGE}
TRAINED = {"running_mean": COLUMN, "running_variance": COLUMN, "exponential_average_factor": 0.5, "y": IMAGE}
ESTIMATED = {"estimated_mean": COLUMN, "estimated_variance": COLUMN, "y": IMAGE}
SAVED = {"saved_mean": COLUMN, "saved_inv_variance": COLUMN, "dx": IMAGE, "dscale": COLUMN, "dbias": COLUMN}
BACKWARD = {"dy": IMAGE, "y": IMAGE, "bias": COLUMN, "activation": RELU, "reserve_space": np.zeros(12, np.uint8)}
BACKWARD_SIZE = {"x": IMAGE, "y": IMAGE, "dy": IMAGE, "dz": IMAGE, "dx": IMAGE, "scale": COLUMN, "activation": RELU}
SIZE = {"x": IMAGE, "z": IMAGE, "y": IMAGE, "scale": COLUMN, "activation": RELU}
NLL = {"target": IDS, "weight": ROW, "reduction": 1, "ignore_index": -100}
NLL_2D = {"x": np.ones((2, 3, 1, 1), F32), "target": IDS.reshape(2, 1, 1)}
PARAMS = {"w": np.ones(3, F32), "b": np.ones((), F32)}
ADAM = {name: np.ones(3, F32) for name in ("grad", "var", "m", "v", "s")}
RATES = {"lr": 0.1, "ema_decay": 0.9, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
OPTIMIZER = jaxops.ema_adam(1e-3)
TABLES = jaxops.RowGradients(np.array([0, 2], np.int32), LOGITS)


def stepped(make, **attributes):
    """One step of an optimizer, which reads what its constructor may have kept: masks, schedules."""
    optimizer = make(**attributes)
    return optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS)


def updated_rows(grads, state, params):
    return jaxops.ema_adam_rows(1e-3).update(grads, state, params)


def used(implementation, operator="auto", verify=None):
    with jaxops.use(implementation, verify=verify, nll_loss=operator):
        return None


def planned(operation, x, target, weight, reduction, ignore_index):
    return aclnn.get_workspace_size(operation, x, target, weight, reduction=reduction, ignore_index=ignore_index)[0]


# name: (call, its arguments). The name is the public one, perhaps with a method or a variant behind it.
CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "activation": (jaxops.activation, {"x": LOGITS, "mode": "elu"}),
    "activation-swish": (jaxops.activation, {"x": LOGITS, "mode": "swish"}),
    "affine_grid": (jaxops.affine_grid, {"theta": np.ones((2, 2, 3), F32), "size": (2, 3, 4, 4)}),
    "avg_pool": (jaxops.avg_pool, {"x": IMAGE, "window": 2, "ceil_mode": False, "layout": "NCHW"}),
    "max_pool": (jaxops.max_pool, {"x": IMAGE, "window": 2, "dilation": 1, "ceil_mode": False, "layout": "NCHW"}),
    "batch_norm": (
        jaxops.batch_norm,
        {
            "x": IMAGE,
            "scale": ROW,
            "bias": ROW,
            "running_mean": ROW,
            "running_var": ROW,
            "residual": IMAGE,
            "layout": "NCHW",
        },
    ),
    "batch_norm_inference": (
        jaxops.batch_norm_inference,
        {"x": IMAGE, "scale": ROW, "bias": ROW, "mean": ROW, "var": ROW, "residual": IMAGE, "layout": "NCHW"},
    ),
    "dropout": (jaxops.dropout, {"key": KEY, "x": LOGITS, "rate": 0.5}),
    "ema_adam": (functools.partial(stepped, jaxops.ema_adam), {"learning_rate": 0.1}),
    "ema_adam_rows": (functools.partial(stepped, jaxops.ema_adam_rows), {"learning_rate": 0.1}),
    "ema_adam.init": (OPTIMIZER.init, {"params": PARAMS}),
    "ema_adam.update": (OPTIMIZER.update, {"grads": PARAMS, "state": OPTIMIZER.init(PARAMS), "params": PARAMS}),
    "ema_adam_rows.update": (
        updated_rows,
        {"grads": {"t": TABLES}, "state": OPTIMIZER.init({"t": WEIGHT}), "params": {"t": WEIGHT}},
    ),
    "ema_params": (jaxops.ema_params, {"opt_state": OPTIMIZER.init(PARAMS)}),
    "fused_apply": (
        jaxops.fused_apply,
        {"transform": OPTIMIZER, "grads": PARAMS, "opt_state": OPTIMIZER.init(PARAMS), "params": PARAMS},
    ),
    "embedding_row_gradients": (
        jaxops.embedding_row_gradients,
        {"grad": LOGITS, "indices": IDS, "num_weights": 4},
    ),
    "linear_cross_entropy": (jaxops.linear_cross_entropy, {"x": LOGITS, "weight": WEIGHT, "labels": IDS}),
    "linear_log_probs": (jaxops.linear_log_probs, {"x": LOGITS, "weight": WEIGHT, "labels": IDS}),
    "softmax": (jaxops.softmax, {"x": LOGITS}),
    "use": (used, {"implementation": "auto", "operator": "auto"}),
    "aclnn.embedding_dense_backward": (
        aclnn.embedding_dense_backward,
        {"grad": LOGITS, "indices": IDS, "num_weights": 4},
    ),
    "aclnn.nll_loss": (aclnn.nll_loss, {"x": LOGITS, **NLL}),
    "aclnn.nll_loss2d": (aclnn.nll_loss2d, NLL | NLL_2D),
    "aclnn.nll_loss_backward": (
        aclnn.nll_loss_backward,
        {"grad_output": F32(1), "x": LOGITS, "total_weight": F32(1), **NLL},
    ),
    "aclnn.nll_loss2d_backward": (
        aclnn.nll_loss2d_backward,
        {"grad_output": F32(1), "total_weight": F32(1), **NLL, **NLL_2D},
    ),
    "aclnn.fused_linear_online_max_sum": (
        aclnn.fused_linear_online_max_sum,
        {
            "input": LOGITS.astype(HALF),
            "weight": WEIGHT.astype(HALF),
            "target": IDS,
            "vocab_start_index": 0,
            "vocab_end_index": 4,
        },
    ),
    "aclnn.fused_cross_entropy_loss_with_max_sum": (
        aclnn.fused_cross_entropy_loss_with_max_sum,
        {
            "logits_max": ROW,
            "sum_exp_logits": ROW,
            "predicted_logits": ROW,
            "vocab_parallel_logits": np.ones((3, 4), F32),
        },
    ),
    "aclnn.fused_linear_cross_entropy_loss_grad": (
        aclnn.fused_linear_cross_entropy_loss_grad,
        {
            "grad": ROW[:2],
            "input": LOGITS.astype(HALF),
            "weight": np.ones((128, 3), HALF),
            "target_mask": np.zeros(1, np.uint8),
            "masked_target": IDS,
            "logits_max": ROW[:2],
            "sum_exp_logits": ROW[:2],
        },
    ),
    "aclnn.apply_fused_ema_adam": (aclnn.apply_fused_ema_adam, {**ADAM, "step": np.ones(1, np.int32), **RATES}),
    "aclnn.get_workspace_size": (planned, {"operation": aclnn.nll_loss, "x": LOGITS, **NLL}),
    "mcdnn.ActivationDescriptor": (mcdnn.ActivationDescriptor, {"mode": "RELU"}),
    "mcdnn.DropoutDescriptor": (mcdnn.DropoutDescriptor, {"dropout": 0.5}),
    "mcdnn.LRNDescriptor": (mcdnn.LRNDescriptor, {}),
    "mcdnn.PoolingDescriptor": (mcdnn.PoolingDescriptor, {"mode": "MAX", "window": 2, "padding": 0, "stride": 2}),
    "mcdnn.SpatialTransformerDescriptor": (mcdnn.SpatialTransformerDescriptor, {"dims": (2, 3, 4, 4)}),
    "mcdnn.activation_forward": (mcdnn.activation_forward, {"desc": RELU, "x": IMAGE, "y": IMAGE}),
    "mcdnn.activation_backward": (
        mcdnn.activation_backward,
        {"desc": RELU, "y": IMAGE, "dy": IMAGE, "x": IMAGE, "dx": IMAGE},
    ),
    "mcdnn.softmax_forward": (
        mcdnn.softmax_forward,
        {"algorithm": "FAST", "mode": "CHANNEL", "x": IMAGE, "y": IMAGE},
    ),
    "mcdnn.softmax_backward": (
        mcdnn.softmax_backward,
        {"algorithm": "LOG", "mode": "INSTANCE", "y": IMAGE, "dy": IMAGE, "dx": IMAGE},
    ),
    "mcdnn.pooling_forward": (mcdnn.pooling_forward, {"desc": WINDOW, "x": IMAGE, "y": np.ones((2, 3, 2, 2), F32)}),
    "mcdnn.pooling_backward": (
        mcdnn.pooling_backward,
        {
            "desc": WINDOW,
            "y": np.ones((2, 3, 2, 2), F32),
            "dy": np.ones((2, 3, 2, 2), F32),
            "x": IMAGE,
            "dx": IMAGE,
            "x_shape": IMAGE.shape,
        },
    ),
    "mcdnn.lrn_cross_channel_forward": (
        mcdnn.lrn_cross_channel_forward,
        {"desc": mcdnn.LRNDescriptor(), "x": IMAGE, "y": IMAGE},
    ),
    "mcdnn.lrn_cross_channel_backward": (
        mcdnn.lrn_cross_channel_backward,
        {"desc": mcdnn.LRNDescriptor(), "y": IMAGE, "dy": IMAGE, "x": IMAGE, "dx": IMAGE},
    ),
    "mcdnn.divisive_normalization_forward": (
        mcdnn.divisive_normalization_forward,
        {"desc": mcdnn.LRNDescriptor(), "x": IMAGE, "means": IMAGE, "y": IMAGE},
    ),
    "mcdnn.divisive_normalization_backward": (
        mcdnn.divisive_normalization_backward,
        {"desc": mcdnn.LRNDescriptor(), "x": IMAGE, "means": IMAGE, "dy": IMAGE, "dx": IMAGE, "dmeans": IMAGE},
    ),
    "mcdnn.dropout_forward": (
        mcdnn.dropout_forward,
        {"desc": mcdnn.DropoutDescriptor(0.5), "key": KEY, "x": IMAGE},
    ),
    "mcdnn.dropout_backward": (
        mcdnn.dropout_backward,
        {"desc": mcdnn.DropoutDescriptor(0.5), "dy": IMAGE, "reserve_space": np.zeros(12, np.uint8)},
    ),
    "mcdnn.dropout_get_reserve_space_size": (mcdnn.dropout_get_reserve_space_size, {"x": IMAGE}),
    "mcdnn.batch_normalization_forward_training": (mcdnn.batch_normalization_forward_training, BN | TRAINED),
    "mcdnn.batch_normalization_forward_training_ex": (
        mcdnn.batch_normalization_forward_training_ex,
        BN | BN_OPS | TRAINED,
    ),
    "mcdnn.batch_normalization_forward_inference": (mcdnn.batch_normalization_forward_inference, BN | ESTIMATED),
    "mcdnn.batch_normalization_backward": (
        mcdnn.batch_normalization_backward,
        {"mode": "SPATIAL", "x": IMAGE, "dy": IMAGE, "scale": COLUMN, **SAVED},
    ),
    "mcdnn.batch_normalization_backward_ex": (
        mcdnn.batch_normalization_backward_ex,
        {"mode": "SPATIAL", "bn_ops": "OPS_BN_ACTIVATION", "x": IMAGE, "scale": COLUMN, **SAVED, **BACKWARD},
    ),
    "mcdnn.normalization_forward_training": (
        mcdnn.normalization_forward_training,
        BN | TRAINED | NORM | NORM_OPS,
    ),
    "mcdnn.normalization_forward_inference": (
        mcdnn.normalization_forward_inference,
        BN | ESTIMATED | NORM | NORM_OPS,
    ),
    "mcdnn.normalization_backward": (
        mcdnn.normalization_backward,
        {"x": IMAGE, "scale": COLUMN, **SAVED, **NORM, **BACKWARD},
    ),
    "mcdnn.get_batch_normalization_forward_training_ex_workspace_size": (
        mcdnn.get_batch_normalization_forward_training_ex_workspace_size,
        {"mode": "SPATIAL", "bn_ops": "OPS_BN_ADD_ACTIVATION", **SIZE},
    ),
    "mcdnn.get_batch_normalization_backward_ex_workspace_size": (
        mcdnn.get_batch_normalization_backward_ex_workspace_size,
        {"mode": "SPATIAL", "bn_ops": "OPS_BN_ADD_ACTIVATION", **BACKWARD_SIZE},
    ),
    "mcdnn.get_batch_normalization_training_ex_reserve_space_size": (
        mcdnn.get_batch_normalization_training_ex_reserve_space_size,
        {"mode": "SPATIAL", "bn_ops": "OPS_BN_ACTIVATION", "activation": RELU, "x": IMAGE},
    ),
    "mcdnn.get_normalization_forward_training_workspace_size": (
        mcdnn.get_normalization_forward_training_workspace_size,
        {**NORM, **SIZE, "mean_var": COLUMN},
    ),
    "mcdnn.get_normalization_backward_workspace_size": (
        mcdnn.get_normalization_backward_workspace_size,
        {**NORM, **BACKWARD_SIZE, "mean_var": COLUMN},
    ),
    "mcdnn.get_normalization_training_reserve_space_size": (
        mcdnn.get_normalization_training_reserve_space_size,
        {**NORM, "activation": RELU, "x": IMAGE},
    ),
    "mcdnn.spatial_tf_grid_generator_forward": (
        mcdnn.spatial_tf_grid_generator_forward,
        {"desc": TRANSFORMER, "theta": np.ones((2, 2, 3), F32)},
    ),
    "mcdnn.spatial_tf_grid_generator_backward": (
        mcdnn.spatial_tf_grid_generator_backward,
        {"desc": TRANSFORMER, "dgrid": GRID},
    ),
    "mcdnn.spatial_tf_sampler_forward": (
        mcdnn.spatial_tf_sampler_forward,
        {"desc": TRANSFORMER, "x": IMAGE, "grid": GRID, "y": IMAGE},
    ),
    "mcdnn.spatial_tf_sampler_backward": (
        mcdnn.spatial_tf_sampler_backward,
        {"desc": TRANSFORMER, "x": IMAGE, "dy": IMAGE, "grid": GRID, "dx": IMAGE, "dgrid": GRID},
    ),
}


def call_of(name: str) -> tuple[Any, dict[str, Any]]:
    """A call of a public function that is a case of its operator: of those, one with the most arguments."""
    function, found = getattr(jaxops, name), [{}]
    for case in contract.cases_of(function.__module__.split(".")[1]):
        called = case.fn if isinstance(case.fn, functools.partial) else functools.partial(case.fn)
        if called.func is function:
            operands = case.operands(np.random.default_rng(0))
            found.append(inspect.signature(function).bind(*operands, **called.keywords).arguments)
    assert len(found) > 1, f"{name} must be called here or be the `fn` of a case"
    return function, max(found, key=len)


NO_ARRAYS = {"operators", "tune_device"}
FUNCTIONS = {name for name in jaxops.__all__ if inspect.isfunction(getattr(jaxops, name))} - NO_ARRAYS
CALLS |= {name: call_of(name) for name in sorted(FUNCTIONS - {name.partition("-")[0] for name in CALLS})}
