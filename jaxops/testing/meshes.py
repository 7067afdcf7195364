"""Promises about several devices: a function means the same when its rows are split over them."""

import contextlib
import functools
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxops.testing.promise import Promise
from jaxops.testing.rows import Rows
from jaxops.testing.trial import FoundError, SkipError, Trial, during, stacked

_AXIS = "rows"


def shard_map(trial: Trial) -> None:
    """Checks that each device computes its own rows in shard_map, and sums the gradient of what is shared."""
    rows = Rows.of(trial)
    count = _device_count(rows)
    mesh, specs = _mesh(count, AxisType.Auto), _specs(rows)
    size = rows.count // count
    parts = [rows.taken(slice(size * device, size * (device + 1))) for device in range(count)]

    def each(*local: Any) -> Any:
        return jax.tree.map(lambda x: _varying(x)[None], trial.fn(*local))

    with during(f"in jax.shard_map over {count} devices"):
        mapped = jax.jit(jax.shard_map(each, mesh=mesh, in_specs=specs, out_specs=P(_AXIS)))
        actual = mapped(*trial.operands)
    expected = stacked([trial.jitted(*part) for part in parts])
    trial.agree("the result in jax.shard_map", actual, expected, compared_with="that of each part on its own")
    if not trial.needs_gradient():
        return

    def total(*local: Any) -> jax.Array:
        return jax.lax.psum(_varying(trial.loss(*local)), _AXIS)

    with during(f"when jax.shard_map over {count} devices is differentiated"):
        sharded = jax.shard_map(total, mesh=mesh, in_specs=specs, out_specs=P())
        gradients = jax.jit(jax.grad(sharded, trial.differentiable))(*trial.operands)
    of_parts = list(zip(*(trial.gradient(*part) for part in parts), strict=True))
    joined = []
    for position, pieces in zip(trial.differentiable, of_parts, strict=True):
        axis, arrays = rows.axes[position], [np.asarray(x) for x in pieces]
        joined.append(sum(x.astype(np.float64) for x in arrays) if axis is None else np.concatenate(arrays, axis))
    trial.gradients_agree(
        "the gradient through jax.shard_map", gradients, joined, compared_with="that of the parts together"
    )


def _on_mesh(trial: Trial, axis_type: AxisType) -> None:
    """Checks that results with rows split under jit are those of one device, and no large operand is gathered."""
    rows = Rows.of(trial)
    count = _device_count(rows)
    mesh = _mesh(count, axis_type)
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(trial.operands, _specs(rows), strict=True)
    ]
    functions = {"the result": trial.jitted}
    if trial.has_gradient:
        functions["the gradient"] = trial.gradient
    # The mesh is known from the operands alone, and then is the current one as well.
    meshes = (contextlib.nullcontext, functools.partial(jax.set_mesh, mesh))
    for (subject, fn), enter in itertools.product(functions.items(), meshes):
        where = f"on a mesh of {count} devices with {axis_type.name.lower()} axes"
        with during(f"when {subject} is computed {where}"), enter():
            compiled = fn.lower(*placed).compile()
            actual = compiled(*placed)
        trial.agree(f"{subject} {where}", actual, fn(*trial.operands), compared_with="that of one device")
        largest = max(x.size for x in trial.operands)
        gathered = max(gathered_sizes(compiled.as_text()), default=0)
        if gathered >= max(largest, 1):
            raise FoundError(f"{where}, {subject} gathers {gathered} elements; the largest operand has {largest}")
    trial.needs_gradient()


def gathered_sizes(compiled_text: str) -> Iterator[int]:
    """Yields the number of elements of every result of an all-gather in an optimised program."""
    for shapes in re.findall(r"= (.*) all-gather(?:-start)?\(", compiled_text):
        for shape in re.findall(r"\w+\[([\d,]*)\]", shapes):
            yield math.prod(int(size) for size in shape.split(",") if size)


def _device_count(rows: Rows) -> int:
    available = jax.device_count()
    if available == 1:
        raise SkipError(
            "there is one device: set XLA_FLAGS=--xla_force_host_platform_device_count=8 and JAX_PLATFORMS=cpu in the "
            "environment for eight on CPU"
        )
    count = next(devices for devices in range(available, 0, -1) if rows.count % devices == 0)
    if count == 1:
        raise SkipError(f"{rows.count} rows cannot be split evenly over two to {available} devices")
    return count


def _mesh(count: int, axis_type: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((count,), (_AXIS,), axis_types=(axis_type,), devices=jax.devices()[:count])


def _specs(rows: Rows) -> tuple[P, ...]:
    return tuple(P() if axis is None else P(*(None,) * axis, _AXIS) for axis in rows.axes)


def _varying(x: Any) -> Any:
    """Lets a value that is the same on all devices count as one that differs, so that it can be split over them."""
    return x if _AXIS in jax.typeof(x).manual_axis_type.varying else jax.lax.pcast(x, _AXIS, to="varying")


PROMISES = (
    Promise("shard_map", shard_map),
    Promise("auto_mesh", functools.partial(_on_mesh, axis_type=AxisType.Auto)),
    Promise("explicit_mesh", functools.partial(_on_mesh, axis_type=AxisType.Explicit)),
)
