"""Operands split along every axis over a mesh of two axes, as the promises and the documented calls are tried."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

# Of a mesh on which axes of nearly all sizes that cases have can be split.
MESH = {"rows": 2, "columns": 3}


def check(fn: Callable[..., Any], operands: Sequence[np.ndarray], like: Sequence[int] = ()) -> None:
    """Traces a function on an explicit mesh with all layouts `of` its operands; results lie as the operands `like` do.

    Their shapes and dtypes are those for operands that are not split.
    """
    mesh = _mesh(AxisType.Explicit)
    expected = jax.tree.map(lambda x: (x.shape, x.dtype), jax.eval_shape(fn, *operands))
    for specs in of(operands):
        placed = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
            for x, spec in zip(operands, specs, strict=True)
        ]
        with jax.set_mesh(mesh):
            results = jax.eval_shape(fn, *placed)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), results) == expected, specs
        for position, result in zip(like, results if like else (), strict=True):
            assert result.sharding.spec == specs[position], (position, specs)


def of(operands: Sequence[np.ndarray], together: int = 2) -> Iterator[list[P]]:
    """Each axis of each operand split, one at a time, and any two of different operands over one axis of a mesh."""
    axes = [(i, axis) for i, x in enumerate(operands) for axis in range(x.ndim)]
    groups = (group for count in range(1, together + 1) for group in itertools.combinations(axes, count))
    different = (group for group in groups if len({i for i, _ in group}) == len(group))
    for chosen, (name, parts) in itertools.product(different, MESH.items()):
        if all(operands[i].shape[axis] % parts == 0 for i, axis in chosen):
            yield [
                P(*(name if (i, axis) in chosen else None for axis in range(x.ndim))) for i, x in enumerate(operands)
            ]


def crossed(operands: Sequence[np.ndarray]) -> list[P]:
    """Every operand split over both axes of a mesh, where it can be, and no two neighbours alike."""
    specs = []
    for i, x in enumerate(operands):
        entries: dict[int, str] = {}
        for name, parts in MESH.items():
            order = range(x.ndim) if i % 2 else reversed(range(x.ndim))
            free = (axis for axis in order if axis not in entries and x.shape[axis] % parts == 0)
            entries.update(dict.fromkeys(itertools.islice(free, 1), name))
        specs.append(P(*map(entries.get, range(x.ndim))))
    return specs


def _mesh(axis_type: AxisType) -> jax.sharding.Mesh:
    count = math.prod(MESH.values())
    return jax.make_mesh(
        tuple(MESH.values()), tuple(MESH), axis_types=(axis_type,) * len(MESH), devices=jax.devices()[:count]
    )


def results(fn: Callable[..., Any], operands: Sequence[np.ndarray], specs: Sequence[P], axis_type: AxisType) -> Any:
    """What a function gives for operands that are split so."""
    mesh = _mesh(axis_type)
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(operands, specs, strict=True)]
    with jax.set_mesh(mesh):
        return fn(*placed)
