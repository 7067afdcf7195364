"""Operators on more than one device, run as their signatures say.

JAX has three ways to split arrays, and an operator has to work under each. Under jit on an automatic mesh, XLA's
partitioner decides. On an explicit mesh (`AxisType.Explicit`), the sharding is part of an array's type, and every
result must have one. Inside shard_map, each device runs its own part, and types say over which mesh axes values vary.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxops._checks.arguments import require, require_axis_names
from jaxops._primitive.signature import Axes, Signature, entry_of, names_of


def same_varying_axes(operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Makes all operands inside shard_map vary over the same mesh axes, as primitives require.

    The transpose of `pcast` then sums the cotangents of replicated operands over devices.
    """
    axes = frozenset().union(*(_varying_axes(x) for x in operands))
    # Outside shard_map, or with check_vma off, nothing is tracked as varying.
    if not axes:
        return list(operands)
    return [
        jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if (missing := axes - _varying_axes(x)) else x
        for x in operands
    ]


def varying_with(arrays: Any, operands: Any) -> Any:
    """Makes the initial carry of a loop inside shard_map vary over all axes over which its operands vary; pytrees."""
    leaves, structure = jax.tree.flatten(arrays)
    return jax.tree.unflatten(structure, same_varying_axes([*leaves, *jax.tree.leaves(operands)])[: len(leaves)])


def tracks_varying_axes(axis_name: Any) -> bool:
    """Tells whether the surrounding shard_map has `check_vma`.

    If so, all devices share the cotangent of a sum over devices. If not, each has its own, and they must be summed.
    """
    return bool(_varying_axes(jax.lax.axis_index(axis_name)))


def explicit_mesh(operands: Sequence[Any]) -> Any | None:
    """Returns the mesh with explicit axes on which the operands lie, or None."""
    for operand in operands:
        mesh = jax.typeof(operand).sharding.mesh
        if AxisType.Explicit in mesh.axis_types:
            return mesh
    return None


def sharded_as_signature(axes: Callable[[], Signature], fn: Callable[..., Any], operands: Sequence[Any]) -> Any:
    """Calls `fn`. On an explicit mesh, lays its results out as the signature says and leaves its inside to XLA.

    `axes` returns the signature, which is only needed there.
    """
    mesh = explicit_mesh(operands)
    if mesh is None:
        return fn(*operands)
    # On an explicit mesh every jnp call must know the sharding of its result, and many in a reference do not. The
    # signature does, so only the results are fixed and XLA's partitioner decides about everything between.
    specs = tuple(_full_spec(operand) for operand in operands)
    signature = axes()
    result_ranks = _result_ranks(signature, tuple(len(spec) for spec in specs))
    shardings = tuple(NamedSharding(mesh, spec) for spec in signature.result_specs(specs, result_ranks))
    return jax.sharding.auto_axes(fn, out_sharding=shardings)(*operands)


def as_array(x: Any) -> Any:
    """Returns an operand, tangent or cotangent as an array. JAX passes on Python numbers as users wrote them."""
    return x if isinstance(x, jax.Array) else jnp.asarray(x, jax.typeof(x).dtype)


def laid_out_as(x: jax.Array, sharding: Any) -> jax.Array:
    """Reshards `x` on an explicit mesh to a type's sharding: a cotangent must be laid out like its operand."""
    if AxisType.Explicit not in sharding.mesh.axis_types or jax.typeof(x).sharding == sharding:
        return x
    return jax.sharding.reshard(x, sharding)


def axis_size(operator: str, argument: str, axis: Hashable) -> int:
    """Returns the number of devices along mesh axes; BadParamError if no surrounding shard_map splits over them."""
    require_axis_names(operator, argument, axis)
    try:
        return jax.lax.axis_size(axis)
    except NameError:  # JAX's own message would not name the argument
        require(False, operator, argument, axis_rule(), axis)
        raise


def axis_rule() -> str:
    """Returns the rule for a mesh axis of the surrounding shard_map, which lists those there are."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    there_are = f"one of {', '.join(map(repr, axes))}" if axes else "and there is none here"
    return f"name a mesh axis of the surrounding shard_map, {there_are}"


def axis_or_vmap_rule() -> str:
    """Returns the rule for an axis of a surrounding shard_map or vmap, which lists the mesh axes there are."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    there_are = f" (one of {', '.join(map(repr, axes))})" if axes else ""
    return f"name an axis of a surrounding shard_map{there_are} or vmap, and none here has this name"


def require_split(operator: str, argument: str, array: jax.Array, places: jax.Array) -> None:
    """Refuses an array that is the same on all devices along a mesh axis along which `places` differ.

    Only inside a shard_map with `check_vma` do types say so. An axis of one device splits nothing.
    """
    for name in sorted(_varying_axes(places) - _varying_axes(array)):
        rule = f"be split over mesh axis {name!r} by the in_specs of shard_map, not the same on all devices along it"
        require(jax.lax.axis_size(name) == 1, operator, argument, rule, array)


def agreeing(signature: str | Signature, *operands: Any) -> list[Any]:
    """Returns a signature's operands; on an explicit mesh, resharded so that no two of them split an axis differently.

    JAX cannot combine operands whose types disagree. `Signature.agreed_specs` decides for them; operands that already
    agree, and axes that are not split, stay as they are.
    """
    mesh = explicit_mesh(operands)
    if mesh is None:
        return list(operands)
    axes = Signature.parse(signature) if isinstance(signature, str) else signature
    specs = axes.agreed_specs(tuple(map(_full_spec, operands)))
    # Of an array that a traced function closes over, `zeros_like` and the like are not split, though it is itself.
    is_traced = any(isinstance(x, jax.core.Tracer) for x in operands)
    return [
        _resharded(x, mesh, spec, always=is_traced and not isinstance(x, jax.core.Tracer))
        for x, spec in zip(operands, specs, strict=True)
    ]


def reshaped(x: jax.Array, shape: Sequence[int], *, sharding: Any = None) -> jax.Array:
    """Returns `x` in another shape, with the same elements in the same row-major order, however it is laid out.

    On an explicit mesh, axes that are merged or divided are split only along the first of them, before and after. So
    each device holds whole runs of elements in either shape. If a later axis is split, devices exchange elements so
    that the first is split instead, which costs no memory. Elements are gathered only if the first axis cannot be
    divided by that many devices. The result is then resharded to a type's `sharding`, if there is one.
    """
    mesh = explicit_mesh([x])
    if mesh is None or not any(_full_spec(x)):
        y = jnp.reshape(x, shape)
    else:
        # JAX refuses to guess how merged or divided axes are split: bring x to a layout that survives, and name it.
        before, after = _specs_of_reshape(mesh, x, tuple(shape))
        y = jax.lax.reshape(_resharded(x, mesh, before), tuple(shape), out_sharding=NamedSharding(mesh, after))
    return y if sharding is None else laid_out_as(y, sharding)


def _specs_of_reshape(mesh: Any, x: jax.Array, shape: tuple[int, ...]) -> tuple[PartitionSpec, PartitionSpec]:
    """Says how to split an array so that a reshape moves nothing between devices, and how its result is then split."""
    spec = _full_spec(x)
    before: list[Any] = [None] * x.ndim
    after: list[Any] = [None] * len(shape)
    # Within a run, a device's part stays in one piece only if the outermost axis that is longer than 1 is split, and
    # nothing else: so all mesh axes that split the run move there, one by one, as long as both extents can be divided.
    for olds, news in _runs(x.shape, shape):
        if not olds or not news:
            continue
        old, new = (_first_long(sizes, run) for sizes, run in ((x.shape, olds), (shape, news)))
        kept: list[str] = []
        # Mesh axes that split the outermost axis already come first: then they stay where they are.
        for name in (name for axis in (old, *olds) for name in names_of(spec[axis]) if name not in kept):
            parts = math.prod(mesh.shape[one] for one in (*kept, name))
            if x.shape[old] % parts == 0 and shape[new] % parts == 0:
                kept.append(name)
        before[old] = after[new] = entry_of(kept)
    return PartitionSpec(*before), PartitionSpec(*after)


def _runs(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[range, range]]:
    """Splits both shapes into the shortest runs of neighbouring axes with as many elements on either side."""
    at, to = 0, 0
    while at < len(old) or to < len(new):
        first, first_new = at, to
        at, to = min(at + 1, len(old)), min(to + 1, len(new))
        # Whichever side has fewer elements takes the next axis, until both have as many.
        while (left := math.prod(old[first:at])) != (right := math.prod(new[first_new:to])):
            if (left < right or to == len(new)) and at < len(old):
                at += 1
            elif to < len(new):
                to += 1
            else:  # beyond an axis of size 0
                break
        yield range(first, at), range(first_new, to)


def _first_long(sizes: Sequence[int], axes: range) -> int:
    """Returns the first axis of a run that is longer than 1, or its first axis."""
    return next((axis for axis in axes if sizes[axis] != 1), axes[0])


def _resharded(x: Any, mesh: Any, spec: PartitionSpec, *, always: bool = False) -> Any:
    # What NumPy made lies on no mesh, also as the argument of a jitted function.
    if spec == _full_spec(x) and explicit_mesh([x]) is not None and not always:
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, spec))


def whole_along_first(x: jax.Array) -> jax.Array:
    """Returns `x` with its first axis gathered on an explicit mesh; elsewhere `x` itself."""
    mesh = explicit_mesh([x])
    return x if mesh is None else _resharded(x, mesh, PartitionSpec(None, *_full_spec(x)[1:]))


def in_pieces_along_first(x: jax.Array, size: int) -> jax.Array:
    """Returns `x` with its first axis gathered where a device does not have whole pieces of this size of it."""
    mesh = explicit_mesh([x])
    if mesh is None:
        return x
    parts = math.prod(mesh.shape[name] for name in names_of(_full_spec(x)[0]))
    return x if x.shape[0] % (size * parts) == 0 else whole_along_first(x)


def _full_spec(operand: Any) -> PartitionSpec:
    """Returns the spec of an operand, with an entry for every axis."""
    aval = jax.typeof(operand)
    return PartitionSpec(*aval.sharding.spec, *(None,) * (aval.ndim - len(aval.sharding.spec)))


def _varying_axes(operand: Any) -> frozenset[str]:
    return jax.typeof(operand).manual_axis_type.varying


def sharding_of_result(signature: str, *operands: Any) -> Any:
    """Returns the sharding of a signature's only result for operands like these."""
    axes = Signature.parse(signature)
    specs = tuple(map(_full_spec, operands))
    (spec,) = axes.result_specs(specs, _result_ranks(axes, tuple(map(len, specs))))
    mesh = explicit_mesh(operands)
    return jax.typeof(operands[0]).sharding if mesh is None else NamedSharding(mesh, spec)


def per_device(axes: Signature, run: Callable[..., Any], operands: Sequence[Any]) -> Callable[..., Any]:
    """Applies a kernel, which knows nothing of meshes, to each device's part of the operands.

    The batch axes stay split and the named axes are gathered. Results without batch axes are summed over the devices
    that hold different parts of the batch. Inside a shard_map over some axes of a mesh, all devices along its automatic
    axes compute the same.
    """
    around = jax.typeof(operands[0]).sharding.mesh
    if AxisType.Manual in around.axis_types and AxisType.Auto in around.axis_types:
        kinds = zip(around.axis_names, around.axis_types, strict=True)
        automatic, spec = {name for name, kind in kinds if kind == AxisType.Auto}, PartitionSpec()
        return jax.shard_map(
            lambda *arrays: tuple(run(*arrays)),
            in_specs=spec,
            out_specs=spec,
            axis_names=automatic,
            check_vma=False,
        )
    mesh = explicit_mesh(operands)
    if mesh is None:
        return _per_device_auto(axes, run)
    # Operands come in any layout, but a kernel needs all of every named axis, and the same positions of the batch in
    # every operand that has them.
    specs = _batch_specs(axes, [_full_spec(x) for x in operands])
    ranks = tuple(len(spec) for spec in specs)
    results_ranks = _result_ranks(axes, ranks)
    local = _summed_over_batch(axes, run, _batch_mesh_axes(specs))
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=axes.result_specs(tuple(specs), results_ranks),
        check_vma=False,  # a kernel does not say over which axes its results vary
    )
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    return lambda *arrays: mapped(*map(jax.sharding.reshard, arrays, shardings))


def _per_device_auto(axes: Signature, run: Callable[..., Any]) -> Callable[..., Any]:
    """Acts for `per_device` on an automatic mesh, where the compiler chooses the layout of operands and then asks."""

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        # A spec may leave out trailing axes that are not split; ours have an entry for each axis.
        full = [PartitionSpec(*x.sharding.spec, *(None,) * (len(x.shape) - len(x.sharding.spec))) for x in operands]
        specs = _batch_specs(axes, full)
        result_specs = axes.result_specs(tuple(specs), tuple(len(result.shape) for result in results))
        local = _summed_over_batch(axes, run, _batch_mesh_axes(specs))
        layout = [tuple(NamedSharding(mesh, spec) for spec in side) for side in (result_specs, specs)]
        return mesh, local, *layout

    def call(*operands: Any) -> Any:
        return tuple(run(*operands))

    partitioned = custom_partitioning(call)
    # The rule tells Shardy how axes correspond. Without the named axes as "need replication", it would propagate a
    # split of one of them into the results, though `partition` gathers it.
    names = tuple(dict.fromkeys(name for operand in axes.operands for name in operand.names))
    partitioned.def_partition(partition=partition, sharding_rule=str(axes), need_replication_factors=names)
    return partitioned


def _batch_specs(axes: Signature, specs: Sequence[PartitionSpec]) -> list[PartitionSpec]:
    """Specs that split the batch axes of all operands in the same way, and gather the named axes."""
    ranks = [operand.batch_rank(len(spec)) for operand, spec in zip(axes.operands, specs, strict=True)]
    # An imaginary result that consists of the batch axes alone has the spec that all operands can share.
    (batch,) = Signature(axes.operands, (Axes(True, ()),)).result_specs(tuple(specs), (max(ranks),))
    return [
        PartitionSpec(*batch[:rank], *(None,) * (len(spec) - rank)) for rank, spec in zip(ranks, specs, strict=True)
    ]


def _batch_mesh_axes(specs: Sequence[PartitionSpec]) -> tuple[str, ...]:
    """Returns the mesh axes over which the batch is split."""
    return tuple(dict.fromkeys(name for spec in specs for entry in spec for name in names_of(entry)))


def _summed_over_batch(axes: Signature, run: Callable[..., Any], mesh_axes: tuple[str, ...]) -> Callable[..., Any]:
    def local(*operands: Any) -> Any:
        results = run(*operands)
        # A result without batch axes reduces over them: each device has only seen its own positions.
        return tuple(
            x if result.batched or not mesh_axes else jax.lax.psum(x, mesh_axes)
            for x, result in zip(results, axes.results, strict=True)
        )

    return local


def _result_ranks(axes: Signature, operand_ranks: tuple[int, ...]) -> tuple[int, ...]:
    batch_rank = max((a.batch_rank(rank) for a, rank in zip(axes.operands, operand_ranks, strict=True)), default=0)
    return tuple(batch_rank * result.batched + len(result.names) for result in axes.results)
