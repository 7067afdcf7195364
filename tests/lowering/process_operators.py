"""A process that runs every operator split over all devices of all processes, and writes what its devices hold.

Its arguments: the coordinator's address, how many processes there are, which one this is, and the file to write.
"""

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import contract
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxops

KINDS = ("Auto", "Explicit", "shard_map")


def stepped(params, grads):
    optimizer = optax.chain(optax.clip(1.0), jaxops.ema_adam(1e-2, weight_decay=0.1))
    return jaxops.fused_apply(optimizer, grads, optimizer.init(params), params)[0]


def operators() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...], list[P], tuple[int, ...]]]:
    """Each operator: its name, a function, operands, how they are split, and which of them it is differentiated in."""
    for name, case in contract.representatives().items():
        specs = [P() if axis is None else P("data") for axis in case.batched]
        yield name, case.fn, case.operands(np.random.default_rng(0)), specs, case.differentiable
    params, grads = np.random.default_rng(0).normal(size=(2, 8, 3)).astype(np.float32)
    yield "fused_apply", stepped, (params, grads), [P("data")] * 2, (0,)


def total(fn: Callable[..., Any], *operands: Any) -> Any:
    """A sum of all results that is not linear in them."""
    return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(fn(*operands)) if jnp.issubdtype(x.dtype, jnp.floating))


def gradient(kind, fn, operands, specs, differentiable):
    """The value and the gradients of one operator, by its operands as they lie on all devices."""
    axis_type = AxisType.Explicit if kind == "Explicit" else AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("data", "other"), axis_types=(axis_type,) * 2)

    def of_all(*operands):
        return total(fn, *operands)

    def of_parts(*operands):
        return jax.lax.psum(total(fn, *operands), "data")

    mapped = jax.shard_map(of_parts, mesh=mesh, in_specs=tuple(specs), out_specs=P())
    placed = [
        jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index, x=x: x[index])
        for x, spec in zip(operands, specs, strict=True)
    ]
    return jax.jit(jax.value_and_grad(mapped if kind == "shard_map" else of_all, differentiable))(*placed)


def main(address, count, process, file):
    jax.distributed.initialize(address, int(count), int(process), heartbeat_timeout_seconds=10)
    held = {}
    for name, *operator in operators():
        for kind in KINDS:
            for number, leaf in enumerate(jax.tree.leaves(gradient(kind, *operator))):
                for shard in leaf.addressable_shards:
                    device = jax.devices().index(shard.device)
                    held[f"{name}, {kind}, {number}, device {device}"] = np.asarray(shard.data).tobytes().hex()
    with open(file, "w") as stream:
        json.dump(held, stream)


if __name__ == "__main__":
    main(*sys.argv[1:])
