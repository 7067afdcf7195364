"""How operators behave on more than one device, driven by their signatures."""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxops._checks.attributes import require_axis_names
from jaxops._checks.errors import require
from jaxops._primitive.signature import Axes, Signature, entry_of, names_of


def same_varying_axes(operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Inside shard_map, makes all operands vary over the same mesh axes: cotangents of replicated ones are summed."""
    axes = frozenset().union(*(_varying_axes(x) for x in operands))
    if not axes:
        return list(operands)
    return [
        jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if (missing := axes - _varying_axes(x)) else x
        for x in operands
    ]


def varying_with(arrays: Sequence[jax.Array], operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Inside shard_map, the arrays that a loop starts with, varying over all axes over which what it reads varies."""
    return tuple(same_varying_axes([*arrays, *operands])[: len(arrays)])


def tracks_varying_axes(axis_name: Any) -> bool:
    """Whether the shard_map around has `check_vma`: then all devices share the cotangent of a sum over devices.

    Without it each device has its own, and they are to be summed.
    """
    return bool(_varying_axes(jax.lax.axis_index(axis_name)))


def explicit_mesh(operands: Sequence[Any]) -> Any | None:
    """The mesh with explicit axes over which the types of the operands are laid out, if there is one."""
    for operand in operands:
        mesh = jax.typeof(operand).sharding.mesh
        if AxisType.Explicit in mesh.axis_types:
            return mesh
    return None


def sharded_as_signature(
    axes: Signature, fn: Callable[..., Any], operands: Sequence[Any], params: dict[str, Any]
) -> Any:
    """Calls `fn`; on an explicit mesh its inside is left to the compiler and results lie as the signature says."""
    mesh = explicit_mesh(operands)
    if mesh is None:
        return fn(*operands, **params)
    specs = tuple(_full_spec(operand) for operand in operands)
    result_ranks = _result_ranks(axes, tuple(len(spec) for spec in specs))
    shardings = tuple(NamedSharding(mesh, spec) for spec in axes.result_specs(specs, result_ranks))
    return jax.sharding.auto_axes(lambda *arrays: fn(*arrays, **params), out_sharding=shardings)(*operands)


def laid_out_as(x: jax.Array, sharding: Any) -> jax.Array:
    """On an explicit mesh, `x` laid out as a type's sharding says: a cotangent has to lie as its operand does."""
    if AxisType.Explicit not in sharding.mesh.axis_types or jax.typeof(x).sharding == sharding:
        return x
    return jax.sharding.reshard(x, sharding)


def axis_size(operator: str, argument: str, axis: Hashable) -> int:
    """The number of devices along a mesh axis, or several. BadParamError if no shard_map around splits over them."""
    require_axis_names(operator, argument, axis)
    try:
        return jax.lax.axis_size(axis)
    except NameError:
        require(False, operator, argument, "name a mesh axis of the surrounding shard_map", axis)
        raise


def agreeing(signature: str, *operands: Any) -> list[Any]:
    """Operands of a signature; on an explicit mesh moved, so that none splits an axis otherwise than another.

    Types of operands that do cannot be combined. Where two disagree, `Signature.agreed_specs` decides; what agrees
    already, or is whole along an axis, stays.
    """
    mesh = explicit_mesh(operands)
    if mesh is None:
        return list(operands)
    specs = Signature.parse(signature).agreed_specs(tuple(map(_full_spec, operands)))
    return [_moved(x, mesh, spec) for x, spec in zip(operands, specs, strict=True)]


def reshaped(x: jax.Array, shape: Sequence[int], *, sharding: Any = None) -> jax.Array:
    """`x` in another shape with the same elements in the same order, wherever it lies.

    On an explicit mesh axes that are merged or parted are split, before and after, along the first of them: so each
    device has whole runs of elements in either shape. A later axis that is split is exchanged for the first between
    devices, at no cost in memory; it is gathered only if the first cannot be divided by as many devices. The result is
    then laid out as a type's `sharding` says, if that is given.
    """
    mesh = explicit_mesh([x])
    if mesh is None or not any(_full_spec(x)):
        y = jnp.reshape(x, shape)
    else:
        before, after = _specs_of_reshape(mesh, x, tuple(shape))
        y = jax.lax.reshape(_moved(x, mesh, before), tuple(shape), out_sharding=NamedSharding(mesh, after))
    return y if sharding is None else laid_out_as(y, sharding)


def _specs_of_reshape(mesh: Any, x: jax.Array, shape: tuple[int, ...]) -> tuple[PartitionSpec, PartitionSpec]:
    """How an array is to be split so that a reshape moves nothing between devices, and how the result is split then."""
    spec = _full_spec(x)
    before: list[Any] = [None] * x.ndim
    after: list[Any] = [None] * len(shape)
    for olds, news in _runs(x.shape, shape):
        if not olds or not news:
            continue
        old, new = (_first_long(sizes, run) for sizes, run in ((x.shape, olds), (shape, news)))
        kept: list[str] = []
        for name in (name for axis in (old, *olds) for name in names_of(spec[axis]) if name not in kept):
            parts = math.prod(mesh.shape[one] for one in (*kept, name))
            if x.shape[old] % parts == 0 and shape[new] % parts == 0:
                kept.append(name)
        before[old] = after[new] = entry_of(kept)
    return PartitionSpec(*before), PartitionSpec(*after)


def _runs(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[range, range]]:
    """The fewest neighbouring axes of the one shape that have as many elements as some of the other, one by one."""
    at, to = 0, 0
    while at < len(old) or to < len(new):
        first, first_new = at, to
        at, to = min(at + 1, len(old)), min(to + 1, len(new))
        while (left := math.prod(old[first:at])) != (right := math.prod(new[first_new:to])):
            if (left < right or to == len(new)) and at < len(old):
                at += 1
            elif to < len(new):
                to += 1
            else:  # beyond an axis of size 0
                break
        yield range(first, at), range(first_new, to)


def _first_long(sizes: Sequence[int], axes: range) -> int:
    return next((axis for axis in axes if sizes[axis] != 1), axes[0])


def _moved(x: Any, mesh: Any, spec: PartitionSpec) -> Any:
    return x if spec == _full_spec(x) else jax.sharding.reshard(x, NamedSharding(mesh, spec))


def whole_along_first(x: jax.Array) -> jax.Array:
    """On an explicit mesh, `x` with its first axis gathered; anywhere else `x` itself."""
    mesh = explicit_mesh([x])
    return x if mesh is None else _moved(x, mesh, PartitionSpec(None, *_full_spec(x)[1:]))


def _full_spec(operand: Any) -> PartitionSpec:
    aval = jax.typeof(operand)
    return PartitionSpec(*aval.sharding.spec, *(None,) * (aval.ndim - len(aval.sharding.spec)))


def _varying_axes(operand: Any) -> frozenset[str]:
    return jax.typeof(operand).manual_axis_type.varying


def sharding_of_result(signature: str, *operands: Any) -> Any:
    """How the result of a signature lies where operands like these are given."""
    axes = Signature.parse(signature)
    specs = tuple(map(_full_spec, operands))
    (spec,) = axes.result_specs(specs, _result_ranks(axes, tuple(map(len, specs))))
    mesh = explicit_mesh(operands)
    return jax.typeof(operands[0]).sharding if mesh is None else NamedSharding(mesh, spec)


def per_device(axes: Signature, run: Callable[..., Any], operands: Sequence[Any]) -> Callable[..., Any]:
    """Applies a kernel, which knows nothing of meshes, to each device's part of the operands.

    The batch axes stay split; the named axes are gathered; results without batch axes are summed over the devices that
    hold different parts of them.
    """
    mesh = explicit_mesh(operands)
    if mesh is None:
        return _per_device_auto(axes, run)
    specs = _batch_specs(axes, [_full_spec(x) for x in operands])
    ranks = tuple(len(spec) for spec in specs)
    results_ranks = _result_ranks(axes, ranks)
    local = _summed_over_batch(axes, run, _batch_mesh_axes(axes, specs))
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=axes.result_specs(tuple(specs), results_ranks),
        check_vma=False,
    )
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    return lambda *arrays: mapped(*map(jax.sharding.reshard, arrays, shardings))


def _per_device_auto(axes: Signature, run: Callable[..., Any]) -> Callable[..., Any]:
    """The same where the compiler decides how operands are laid out, and asks when it has decided."""

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        full = [PartitionSpec(*x.sharding.spec, *(None,) * (len(x.shape) - len(x.sharding.spec))) for x in operands]
        specs = _batch_specs(axes, full)
        result_specs = axes.result_specs(tuple(specs), tuple(len(result.shape) for result in results))
        local = _summed_over_batch(axes, run, _batch_mesh_axes(axes, specs))
        layout = [tuple(NamedSharding(mesh, spec) for spec in side) for side in (result_specs, specs)]
        return mesh, local, *layout

    def call(*operands: Any) -> Any:
        return tuple(run(*operands))

    partitioned = custom_partitioning(call)
    names = tuple(dict.fromkeys(name for operand in axes.operands for name in operand.names))
    partitioned.def_partition(partition=partition, sharding_rule=str(axes), need_replication_factors=names)
    return partitioned


def _batch_specs(axes: Signature, specs: Sequence[PartitionSpec]) -> list[PartitionSpec]:
    """Splits the batch axes of all operands that carry them as those of the first that are split; gathers the rest."""
    ranks = [operand.batch_rank(len(spec)) for operand, spec in zip(axes.operands, specs, strict=True)]
    (batch,) = Signature(axes.operands, (Axes(True, ()),)).result_specs(tuple(specs), (max(ranks),))
    return [
        PartitionSpec(*batch[:rank], *(None,) * (len(spec) - rank)) for rank, spec in zip(ranks, specs, strict=True)
    ]


def _batch_mesh_axes(axes: Signature, specs: Sequence[PartitionSpec]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for spec in specs for entry in spec for name in names_of(entry)))


def _summed_over_batch(axes: Signature, run: Callable[..., Any], mesh_axes: tuple[str, ...]) -> Callable[..., Any]:
    def local(*operands: Any) -> Any:
        results = run(*operands)
        return tuple(
            x if result.batched or not mesh_axes else jax.lax.psum(x, mesh_axes)
            for x, result in zip(results, axes.results, strict=True)
        )

    return local


def _result_ranks(axes: Signature, operand_ranks: tuple[int, ...]) -> tuple[int, ...]:
    batch_rank = max((a.batch_rank(rank) for a, rank in zip(axes.operands, operand_ranks, strict=True)), default=0)
    return tuple(batch_rank * result.batched + len(result.names) for result in axes.results)
