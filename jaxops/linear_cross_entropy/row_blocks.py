"""Computes something for rows in blocks of a fixed size: a row's bits then depend on nothing but the row.

A compiler chooses the order in which a product or a reduction adds by the shapes of its operands. So every step of a
loop takes as many rows, whatever the batch; rows that are missing are filled in. A loop of one step would be no loop:
compilers merge its body with what is around it, which may round differently. So there are at least two.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

import lowering
from jaxops._checks.errors import NotSupportedError, require
from jaxops._primitive.derivative import Arrays
from jaxops._primitive.operator import Operator
from lowering._jax_private import require_devices_during_lowering
from lowering.structures import on_arrays
from lowering.targets import is_absent

_BLOCK_ROWS = 64
_LEAST_BLOCKS = 2
# So many rows that reading the weight again for the next ones is cheap.
_GROUP_BLOCKS = 16


class RowBlocks(NamedTuple):
    """How rows of shape `batch` are cut: into groups of blocks, each of `_BLOCK_ROWS` rows."""

    batch: tuple[int, ...]

    @property
    def groups(self) -> int:
        """How many groups there are."""
        return max(1, math.ceil(math.prod(self.batch) / (_GROUP_BLOCKS * _BLOCK_ROWS)))

    @property
    def shape(self) -> tuple[int, int, int]:
        """The numbers of groups, of blocks in a group, and of rows in a block."""
        blocks = math.ceil(math.prod(self.batch) / (self.groups * _BLOCK_ROWS))
        return self.groups, max(_LEAST_BLOCKS, blocks), _BLOCK_ROWS

    def split(self, array: jax.Array, fill: float = 0) -> jax.Array:
        """(..., rest) -> (groups, blocks, rows, rest), the last rows filled up."""
        rows, rest = math.prod(self.batch), array.shape[len(self.batch) :]
        padding = [(0, math.prod(self.shape) - rows), *((0, 0),) * len(rest)]
        flat = array.reshape(rows, *rest)
        return jnp.pad(flat, padding, constant_values=jnp.asarray(fill, array.dtype)).reshape(*self.shape, *rest)

    def join(self, array: jax.Array) -> jax.Array:
        """(groups, blocks, rows, rest) -> (..., rest), without what was filled in."""
        rest = array.shape[len(self.shape) :]
        flat = array.reshape(math.prod(self.shape), *rest)
        return flat[: math.prod(self.batch)].reshape(*self.batch, *rest)


def scan_blocks(body: Callable[[Any, Any], tuple[Any, Any]], start: Any, rows: Any) -> tuple[Any, Any]:
    """`jax.lax.scan` whose steps keep nothing for their derivative but what they are given."""
    return jax.lax.scan(jax.checkpoint(body, prevent_cse=False), start, rows)


def map_blocks(body: Callable[..., Arrays], batch: tuple[int, ...], rows: Sequence[jax.Array]) -> Arrays:
    """Calls `body` with each block of rows; returns what it returns for each row."""
    blocks = RowBlocks(batch)

    def of_group(_: None, group: Arrays) -> tuple[None, Arrays]:
        return scan_blocks(lambda _, block: (None, tuple(body(*block))), None, group)

    return tuple(map(blocks.join, jax.lax.scan(of_group, None, tuple(map(blocks.split, rows)))[1]))


class PerDeviceOperator(Operator):
    """An operator whose reference runs on each device's own part, as kernels do: XLA would split blocks of rows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_devices_during_lowering(self.primitive)

    def meaning(self, *operands: Any, **params: Any) -> Arrays:
        """Evaluates the reference, where it is lowered on each device's own part."""
        place = lowering.placement()
        if place is None or not place.is_split:
            return super().meaning(*operands, **params)
        run = on_arrays(self.reference, params)
        mesh = jax.typeof(operands[0]).sharding.mesh
        if AxisType.Manual in mesh.axis_types:
            # Inside a shard_map over other axes, all devices along the automatic ones compute the same.
            kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
            names = {name for name, kind in kinds if kind == AxisType.Auto}
            specs = PartitionSpec()
            replicated = jax.shard_map(run, in_specs=specs, out_specs=specs, axis_names=names, check_vma=False)
            return tuple(replicated(*operands))
        if AxisType.Explicit not in mesh.axis_types:
            rule = "be used inside shard_map or with explicit axes on meshes of such chips"
            is_partitioned = place.platform in ("cpu", "cuda") and not is_absent()
            require(is_partitioned, self.name, "batch_invariant", rule, place.platform, error=NotSupportedError)
        return tuple(self.local_kernel(run, operands, params)(*operands))
