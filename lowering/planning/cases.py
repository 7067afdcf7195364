"""The slices and meshes to plan for, and a function's arguments on them."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from lowering.describe import first_line, show
from lowering.targets import TargetSlice, TopologyError, parse


class PlanError(ValueError):
    """A plan cannot be made of what was given."""


class Case(NamedTuple):
    """One slice, the name that the user gave it, and one mesh of all its devices."""

    name: str
    target: TargetSlice
    mesh: AbstractMesh


def cases(targets: Sequence[str], meshes: Sequence[Mapping[str, int]]) -> list[Case]:
    """Returns every slice with every mesh that has as many devices; a size of -1 takes what the others leave."""
    if isinstance(targets, str) or not targets:
        raise PlanError(f"plan: targets must be a sequence of slices such as tpu-v5e:4x4; got {show(targets)}")
    if isinstance(meshes, Mapping) or not meshes:
        raise PlanError(f"plan: meshes must be a sequence of dicts such as {{'data': 4}}; got {show(meshes)}")
    for mesh in meshes:
        _require_sizes(mesh)
    found = []
    slices = {name: _parsed(name) for name in targets}
    for name, target in slices.items():
        found += [
            Case(name, target, AbstractMesh(sizes, tuple(mesh), (AxisType.Auto,) * len(mesh)))
            for mesh in meshes
            if (sizes := _sizes(mesh, target.device_count)) is not None
        ]
    for mesh in meshes:
        if not any(_sizes(mesh, target.device_count) for target in slices.values()):
            counts = ", ".join(f"{name} has {target.device_count}" for name, target in slices.items())
            raise PlanError(
                f"plan: meshes must have as many devices as a target; got {show(dict(mesh))} where {counts}"
            )
    for name, target in slices.items():
        if name not in {case.name for case in found}:
            count = target.device_count
            raise PlanError(f"plan: targets must have as many devices as a mesh; got {show(name)}, which has {count}")
    return list(dict.fromkeys(found))


def placed(args: Sequence[Any], mesh: AbstractMesh, shardings: Callable[[AbstractMesh], Any] | None) -> tuple[Any, ...]:
    """Returns the arguments' types on a mesh, split as the user's function says; whole on every device without one."""
    types = jax.tree.map(_type, tuple(args))
    if mesh.size == 1:
        return types
    specs = _specs(types, mesh, shardings)
    paths, structure = jax.tree.flatten_with_path(types)
    leaves = [_on_mesh(path, leaf, spec, mesh) for (path, leaf), spec in zip(paths, specs, strict=True)]
    return jax.tree.unflatten(structure, leaves)


def _parsed(name: str) -> TargetSlice:
    try:
        target = parse(name)
    except TopologyError as error:
        raise PlanError(str(error).replace("lowering", "plan", 1)) from None
    except ValueError as error:
        raise PlanError(str(error).replace("lowering: target", "plan: targets", 1)) from None
    if not target.hardware.device_kind or target.hardware.platform == "cpu":
        raise PlanError(f"plan: targets must be TPUs or NVIDIA GPUs; got {show(name)}")
    return target


def _require_sizes(mesh: Any) -> None:
    is_mesh = isinstance(mesh, Mapping) and all(
        isinstance(name, str) and isinstance(size, int) and (size > 0 or size == -1) for name, size in mesh.items()
    )
    if not is_mesh or not mesh or list(mesh.values()).count(-1) > 1:
        rule = "have a positive size for each axis, or -1 for one of them"
        raise PlanError(f"plan: meshes must {rule}; got {show(mesh)}")


def _sizes(mesh: Mapping[str, int], devices: int) -> tuple[int, ...] | None:
    """Returns the sizes of a mesh of so many devices; None if there is no such mesh."""
    known = math.prod(size for size in mesh.values() if size > 0)
    if devices % known or (known != devices and -1 not in mesh.values()):
        return None
    return tuple(devices // known if size == -1 else size for size in mesh.values())


def _specs(types: tuple[Any, ...], mesh: AbstractMesh, shardings: Callable[[AbstractMesh], Any] | None) -> list[Any]:
    given = (None,) * len(types) if shardings is None else shardings(mesh)
    if not isinstance(given, tuple) or len(given) != len(types):
        raise PlanError(
            f"plan: shardings must return a tuple with an entry for each of {len(types)} args; got {show(given)}"
        )
    try:
        whole = jax.tree.broadcast(given, types, is_leaf=_is_spec)
    except ValueError as error:
        raise PlanError(f"plan: shardings must return a prefix of the args' pytrees; got {first_line(error)}") from None
    return jax.tree.leaves(whole, is_leaf=_is_spec)


def _is_spec(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, PartitionSpec)


def _type(leaf: Any) -> jax.ShapeDtypeStruct:
    aval = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _on_mesh(path: Any, leaf: Any, spec: Any, mesh: AbstractMesh) -> jax.ShapeDtypeStruct:
    spec = PartitionSpec() if spec is None else spec
    where = f"plan: args{jax.tree_util.keystr(path)}"
    if not isinstance(spec, PartitionSpec):
        raise PlanError(f"{where} must have a PartitionSpec from shardings; got {show(spec)}")
    if len(spec) > len(leaf.shape):
        raise PlanError(f"{where} must have an axis for each entry of its PartitionSpec; got {show(leaf)} with {spec}")
    for size, entry in zip(leaf.shape, spec, strict=False):
        names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        unknown = [name for name in names if name not in mesh.shape]
        if unknown:
            raise PlanError(
                f"{where} must be split over axes of the mesh; got {show(unknown[0])} with {dict(mesh.shape)}"
            )
        parts = math.prod(mesh.shape[name] for name in names)
        if size % parts:
            raise UnevenError(
                f"{where} must be split into {parts} equal parts along {'x'.join(names)}; got {show(leaf)}"
            )
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))


class UnevenError(PlanError):
    """An argument has a size that an axis of one mesh does not divide; another mesh may do."""
