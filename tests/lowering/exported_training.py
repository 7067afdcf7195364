"""A training step whose state has every kind of node, to be exported: of optax, of flax, and of this file."""

from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import jaxops

OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "ema_adam": optax.chain(optax.clip_by_global_norm(1.0), jaxops.ema_adam(1e-2, ema_decay=0.5)),
}


class Report(NamedTuple):
    """Is in the results alone."""

    loss: jax.Array
    updates: Any


@flax.struct.dataclass
class Run:
    """Two models with one optimizer each, and how the second one learns."""

    first: TrainState
    second: dict[str, Any]
    scale: float = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class Norms:
    """A dataclass without static fields, in the results alone."""

    weight: jax.Array


def predict(params, x):
    return jnp.tanh(x @ params["weight"])


def start():
    params = {"weight": jnp.linspace(-1, 1, 6).reshape(3, 2)}
    first = TrainState.create(apply_fn=predict, params=params, tx=OPTIMIZERS["adamw"])
    return Run(first, {"params": params, "opt_state": OPTIMIZERS["ema_adam"].init(params)}, 0.5)


@jax.numpy_dtype_promotion("standard")  # as optax and flax are written for
def step(run, x, y):
    def loss(params):
        return jnp.mean(jnp.square(predict(params, x) - y))

    gradient = jax.grad(lambda params: run.scale * loss(params))
    value, grads = jax.value_and_grad(loss)(run.first.params)
    params, opt_state = run.second["params"], run.second["opt_state"]
    updates, opt_state = OPTIMIZERS["ema_adam"].update(gradient(params), opt_state, params)
    second = {"params": optax.apply_updates(params, updates), "opt_state": opt_state}
    report = Report(value, {"norms": Norms(jnp.linalg.norm(params["weight"]))})
    return run.replace(first=run.first.apply_gradients(grads=grads), second=second), report


def batch():
    return jnp.cos(jnp.arange(12.0)).reshape(4, 3), jnp.sin(jnp.arange(8.0)).reshape(4, 2)


def two_steps(one_step):
    """What two steps return, and the average of the second model's parameters."""
    run, _ = one_step(start(), *batch())
    run, report = one_step(run, *batch())
    return run, report, jaxops.ema_params(run.second["opt_state"])
