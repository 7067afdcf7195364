"""A process that runs every operator split over all devices of all processes, and writes what its devices hold.

Its arguments: the coordinator's address, how many processes there are, which one this is, and the file to write.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxops

RNG = np.random.default_rng(0)
DATA, SHARED = P("data"), P()
KEY = np.array([1, 2], np.uint32)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def ids(*shape):
    return RNG.integers(0, 6, shape).astype(np.int32)


IMAGE = normal(8, 4, 6, 6)


def summed_cross_entropy(x, weight, labels):
    return jaxops.linear_cross_entropy(x, weight, labels, reduction="sum")


def stepped(params, grads):
    optimizer = optax.chain(optax.clip(1.0), jaxops.ema_adam(1e-2, weight_decay=0.1))
    return jaxops.fused_apply(optimizer, grads, optimizer.init(params), params)[0]


# The operator, its operands, how they are split, and how many of them, from the first on, it is differentiated in.
OPERATORS = {
    "activation": (lambda x: jaxops.activation(x, "swish"), [IMAGE], [DATA], 1),
    "affine_grid": (lambda theta: jaxops.affine_grid(theta, (len(theta), 4, 6, 6)), [normal(8, 2, 3)], [DATA], 1),
    "avg_pool": (lambda x: jaxops.avg_pool(x, 2, layout="NCHW"), [IMAGE], [DATA], 1),
    "batch_norm": (
        lambda *xs: jaxops.batch_norm(*xs, layout="NCHW").y,
        [IMAGE, normal(4), normal(4)],
        [DATA, SHARED, SHARED],
        3,
    ),
    "divisive_norm": (lambda x: jaxops.divisive_norm(x, layout="NCHW"), [IMAGE], [DATA], 1),
    "dropout": (lambda x, key: jaxops.dropout(key, x, 0.5), [normal(8, 32), KEY], [DATA, SHARED], 1),
    "ema_adam": (stepped, [normal(8, 3), normal(8, 3)], [DATA, DATA], 1),
    "embedding": (jaxops.embedding, [normal(6, 3), ids(8, 2)], [SHARED, DATA], 1),
    "grid_sample": (jaxops.grid_sample, [IMAGE, np.tanh(normal(8, 5, 5, 2))], [DATA, DATA], 2),
    "linear_cross_entropy": (summed_cross_entropy, [normal(8, 5), normal(6, 5), ids(8)], [DATA, SHARED, DATA], 2),
    "local_response_norm": (lambda x: jaxops.local_response_norm(x, layout="NCHW"), [IMAGE], [DATA], 1),
    "max_pool": (lambda x: jaxops.max_pool(x, 2, layout="NCHW"), [IMAGE], [DATA], 1),
    "nll_loss": (lambda x, labels: jaxops.nll_loss(x, labels, reduction="sum"), [normal(8, 6), ids(8)], [DATA] * 2, 1),
    "softmax": (jaxops.softmax, [normal(8, 6)], [DATA], 1),
}
KINDS = ("Auto", "Explicit", "shard_map")


def gradient(kind, name):
    """The value and the gradients of one operator, by its operands as they lie on all devices."""
    fn, operands, specs, differentiated = OPERATORS[name]
    axis_type = AxisType.Explicit if kind == "Explicit" else AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("data", "other"), axis_types=(axis_type,) * 2)

    def total(*operands):
        value = jnp.sum(jnp.sin(fn(*operands)))
        return jax.lax.psum(value, "data") if kind == "shard_map" else value

    if kind == "shard_map":
        total = jax.shard_map(total, mesh=mesh, in_specs=tuple(specs), out_specs=P())
    placed = [
        jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index, x=x: x[index])
        for x, spec in zip(operands, specs, strict=True)
    ]
    return jax.jit(jax.value_and_grad(total, tuple(range(differentiated))))(*placed)


def main(address, count, process, file):
    jax.distributed.initialize(address, int(count), int(process), heartbeat_timeout_seconds=10)
    held = {}
    for name in OPERATORS:
        for kind in KINDS:
            for number, leaf in enumerate(jax.tree.leaves(gradient(kind, name))):
                for shard in leaf.addressable_shards:
                    device = jax.devices().index(shard.device)
                    held[f"{name}, {kind}, {number}, device {device}"] = np.asarray(shard.data).tobytes().hex()
    with open(file, "w") as stream:
        json.dump(held, stream)


if __name__ == "__main__":
    main(*sys.argv[1:])
