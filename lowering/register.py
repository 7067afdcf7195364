"""Makes an operator's primitive lower to the implementation that is chosen for each platform."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib import metadata
from typing import Any, Protocol

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from lowering import _jax_private, select, source_lines, tuning
from lowering.patterns import Pattern
from lowering.placement import placed
from lowering.targets import PLATFORMS, abstract_device, being_lowered_for, is_absent
from pallas_kernels.hardware import Hardware
from pallas_kernels.kernel import Kernel


class Operator(Protocol):
    """What `lowering` knows of an operator."""

    @property
    def name(self) -> str:
        """Of the operator and of its primitive."""
        ...

    @property
    def primitive(self) -> Primitive:
        """What jaxprs hold."""
        ...

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """In order of preference."""
        ...

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """Of plain JAX that it would replace."""
        ...

    def meaning(self, *operands: Any, **params: Any) -> tuple[jax.Array, ...]:
        """The reference implementation."""
        ...

    def local_kernel(self, run: Callable[..., Any], operands: Any) -> Callable[..., Any]:
        """A kernel's `run`, applied to each device's part of operands that lie on a mesh."""
        ...


_registered: dict[Primitive, Operator] = {}
_added_kernels: dict[str, tuple[Kernel, ...]] = {}


def register(operator: Operator) -> None:
    """Installs the lowering rules of the operator's primitive: one a platform, and the reference elsewhere."""
    _registered[operator.primitive] = operator
    select.operator_names.add(operator.name)
    source_lines.add_operators(type(operator).__module__.partition(".")[0])
    mlir.register_lowering(operator.primitive, functools.partial(_lower_reference, operator, "other"))
    for platform in PLATFORMS:
        mlir.register_lowering(operator.primitive, functools.partial(_lower, operator, platform), platform=platform)
    if operator.kernels:
        _jax_private.require_devices_during_lowering(operator.primitive)


def add_kernel(operator: Operator, kernel: Kernel) -> None:
    """Offers one more kernel for an operator, before the ones it has.

    Args:
      operator: one of `jaxops.operators()`.
      kernel: its record; `measured_on` decides where it is a default.

    Clears JAX's caches, so that functions that were compiled without the kernel are lowered again.

    Raises:
      TypeError: if `kernel` is no `Kernel`.
    """
    if not isinstance(kernel, Kernel):
        raise TypeError(f"add_kernel: kernel must be a pallas_kernels.kernel.Kernel; got {kernel!r}")
    _added_kernels[operator.name] = (kernel, *_added_kernels.get(operator.name, ()))
    _jax_private.require_devices_during_lowering(operator.primitive)
    jax.clear_caches()


def remove_kernel(operator: Operator, kernel: Kernel) -> None:
    """Takes back a kernel that `add_kernel` offered."""
    _added_kernels[operator.name] = tuple(added for added in _added_kernels[operator.name] if added is not kernel)
    jax.clear_caches()


def operator_of(primitive: Primitive) -> Operator | None:
    """The operator of ours that this primitive is, if it is one."""
    return _registered.get(primitive)


def kernels_of(operator: Operator) -> tuple[Kernel, ...]:
    """The operator's kernels in order of preference, after those that were added."""
    return (*_added_kernels.get(operator.name, ()), *operator.kernels)


def lowered_without_devices() -> AbstractContextManager[None]:
    """Lets operators be lowered for a mesh of chips that are not here."""
    return _jax_private.without_devices(_registered)


def patterns() -> tuple[Pattern, ...]:
    """Those that the operators would replace, also operators of installed packages that nothing has imported yet."""
    for package in metadata.entry_points(group="lowering.operators"):
        package.load()
    return tuple(pattern for operator in _registered.values() for pattern in operator.patterns)


def choose(
    operator: Operator,
    selection: select.Selection,
    hardware: Hardware,
    operands: Sequence[Any],
    params: dict[str, Any],
    split: str,
) -> select.Choice:
    """`select.choose` for this operator, where operands are split over devices as `split` (of `partitioning`) says."""
    kernels = kernels_of(operator)
    request = selection.request(operator.name)
    obstacle = _obstacle(split, hardware.platform)
    # Outside of shard_map a kernel gets a part of what is split, not the shapes that are known here.
    is_whole = bool(kernels) and split in ("none", "manual")
    tuned = tuning.find(selection.tuned, operator.name, hardware, operands, params) if is_whole else None
    return select.choose(operator.name, kernels, request, hardware, operands, params, obstacle, tuned)


def _lower(
    operator: Operator, platform: str, ctx: Any, *operands: Any, selection: select.Selection, **params: Any
) -> Any:
    hardware = being_lowered_for(platform, tuple(ctx.module_context.platforms))
    split = partitioning(ctx.avals_in, _device_count(ctx))
    choice = choose(operator, selection, hardware, ctx.avals_in, params, split)
    if choice.kernel is None:
        return _lower_reference(operator, platform, ctx, *operands, selection=selection, **params)
    first = choice.kernel.configs(hardware, *ctx.avals_in, **params)[0]
    config = first if choice.config is None else dict(choice.config)
    run = functools.partial(choice.kernel.run, config=config, interpret=choice.interpret, **params)
    with _on_chips(hardware) if is_absent() else contextlib.nullcontext():
        return _lower_kernel(operator, run, split, ctx, *operands)


def _lower_kernel(operator: Operator, run: Callable[..., Any], split: str, ctx: Any, *operands: Any) -> Any:
    if split in ("explicit", "auto"):
        avals = [_on_mesh_around(aval) if split == "explicit" else aval for aval in ctx.avals_in]
        return _lower_fun(
            lambda *arrays: operator.local_kernel(run, arrays)(*arrays), ctx.replace(avals_in=avals), *operands
        )
    # A kernel sees plain arrays, also inside shard_map: the primitive has typed the results already.
    plain = [
        [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in avals] for avals in (ctx.avals_in, ctx.avals_out)
    ]
    with _jax_private.without_varying_axes():
        return _lower_fun(run, ctx.replace(avals_in=plain[0], avals_out=plain[1]), *operands)


def _on_chips(hardware: Hardware) -> AbstractContextManager[None]:
    """The mesh around, of chips of this kind: Pallas asks it for the chip, and would take the one here."""
    mesh = jax.sharding.get_abstract_mesh()
    device = abstract_device(hardware)
    return jax.sharding.use_abstract_mesh(
        AbstractMesh(mesh.axis_sizes, mesh.axis_names, mesh.axis_types, abstract_device=device)
    )


def _on_mesh_around(aval: Any) -> Any:
    """The type of an operand on an explicit mesh, laid out over the mesh around, which may say more of its devices."""
    mesh = jax.sharding.get_abstract_mesh()
    return aval.update(sharding=NamedSharding(mesh, aval.sharding.spec)) if is_absent() else aval


def _lower_reference(
    operator: Operator, platform: str, ctx: Any, *operands: Any, selection: select.Selection, **params: Any
) -> Any:
    split = partitioning(ctx.avals_in, _device_count(ctx))
    with select.using(selection), placed(platform, is_split=split not in ("none", "manual")):
        return _lower_fun(functools.partial(operator.meaning, **params), ctx, *operands)


def _device_count(ctx: Any) -> int:
    return getattr(ctx.module_context.axis_context, "num_devices", 1)


def _lower_fun(fn: Callable[..., Any], ctx: Any, *operands: Any) -> Any:
    return mlir.lower_fun(fn, multiple_results=True)(ctx, *operands)


def partitioning(avals: Sequence[Any], device_count: int) -> str:
    """How operands of these types are split over devices: "none", "manual", "mixed", "explicit" or "auto"."""
    axis_types = mesh_of(avals).axis_types
    if AxisType.Explicit in axis_types:
        return "explicit"
    if AxisType.Manual in axis_types:
        return "mixed" if AxisType.Auto in axis_types else "manual"
    return "auto" if device_count > 1 else "none"


def mesh_of(avals: Sequence[Any]) -> Any:
    """The mesh in the operands' types; an empty one where they have none."""
    meshes = [aval.sharding.mesh for aval in avals]
    return next((mesh for mesh in meshes if not mesh.empty), jax.sharding.AbstractMesh((), ()))


def _obstacle(split: str, platform: str) -> str | None:
    if split == "mixed":
        return "inside a shard_map that leaves some mesh axes automatic, a kernel cannot be partitioned"
    if split == "auto" and platform == "tpu":
        return "on a TPU mesh with automatic axes a kernel cannot be partitioned: use shard_map or explicit axes"
    if split == "auto" and is_absent():
        return "with automatic axes a kernel is partitioned on GPUs that are here: use shard_map or explicit axes"
    return None
