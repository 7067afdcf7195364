"""A model and its train step as tutorials for flax and optax have them: they do not know this library."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState


class Classifier(nn.Module):
    """Convolutions and dense layers, as tutorials have them."""

    @nn.compact
    def __call__(self, x):
        for features in (32, 64):
            x = nn.relu(nn.Conv(features, kernel_size=(3, 3))(x))
            x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(features=256)(x.reshape((x.shape[0], -1))))
        return nn.Dense(features=10)(x)


def classifier_step(state, images, labels):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits=logits, labels=labels).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def init_state(key):
    params = Classifier().init(key, jnp.zeros((1, 28, 28, 1)))["params"]
    return TrainState.create(apply_fn=Classifier().apply, params=params, tx=optax.adamw(1e-3))
