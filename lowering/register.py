"""Lowers an operator's primitive to the implementation that is chosen for each platform."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib import metadata
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from lowering import _jax_private, implementations, operators, select
from lowering.describe import show
from lowering.errors import NotSupportedError
from lowering.measurements import REFERENCE
from lowering.operators import Form, Operator, Place, brief, on_arrays, type_text, unpacked
from lowering.targets import PLATFORMS, abstract_device, being_lowered_for, here, is_absent
from lowering.tuning_store import Evidence
from pallas_kernels.hardware import Hardware
from pallas_kernels.kernel import Kernel

_added_kernels: dict[str, tuple[Kernel, ...]] = {}
_emulators: list[Callable[[Hardware], Callable[..., Any]]] = []
_verifiers: list[Callable[..., None]] = []


def register(operator: Operator) -> None:
    """Installs the lowering rules of an operator's primitive: one for each platform, and the reference elsewhere.

    `jaxops` calls this for each of its operators. Call it yourself for an operator of another package.

    Args:
      operator: anything that implements `lowering.operators.Operator`, with a new primitive.

    Example:
      >>> operator = next(x for x in jaxops.operators() if x.name == "nll_loss")
      >>> lowering.register(operator)  # has happened already; once more changes nothing
      >>> operator.primitive
      nll_loss
    """
    _require_operator("register", operator)
    implementations.require_sound(operator.name, operator.kernels, operator.forms)
    operators.add(operator)
    mlir.register_lowering(operator.primitive, functools.partial(_lower_reference, operator))
    for platform in PLATFORMS:
        mlir.register_lowering(operator.primitive, functools.partial(_lower, operator, platform), platform=platform)
    if operator.kernels or any(form.per_device for form in operator.forms):
        _jax_private.require_devices_during_lowering(operator.primitive)


def add_kernel(operator: Operator, kernel: Kernel) -> None:
    """Offers another kernel for an operator, ahead of the kernels it has.

    Clears JAX's caches, so that functions compiled without the kernel are lowered again.

    Args:
      operator: one of `jaxops.operators()`.
      kernel: a `pallas_kernels.kernel.Kernel`. On the targets in its `measured_on` it becomes the default.

    Raises:
      TypeError: if `kernel` is not a `Kernel`.
      ValueError: if its platform, or a target in `measured_on`, does not exist.

    Example:
      >>> from pallas_kernels.kernel import Kernel
      >>> def run(
      ...     log_probs, labels, weight, *, config, interpret, ignore_index
      ... ): ...  # launch the kernel
      >>> kernel = Kernel(
      ...     "mine", "cpu", run, refuses=lambda hardware, *operands, **params: None
      ... )
      >>> operator = next(x for x in jaxops.operators() if x.name == "nll_loss")
      >>> lowering.add_kernel(operator, kernel)
      >>> lowering.explain(jaxops.nll_loss, jnp.zeros((1, 2)), jnp.array([1])).rows[
      ...     0
      ... ].refusals
      (Refusal(kernel='mine', reason='opt-in: not measured on this target'),)
      >>> lowering.remove_kernel(operator, kernel)
    """
    _require_operator("add_kernel", operator)
    if not isinstance(kernel, Kernel):
        raise TypeError(f"add_kernel: kernel must be a pallas_kernels.kernel.Kernel; got {show(kernel)}")
    implementations.require_sound(operator.name, (kernel,))
    _added_kernels[operator.name] = (kernel, *_added_kernels.get(operator.name, ()))
    _jax_private.require_devices_during_lowering(operator.primitive)
    jax.clear_caches()


def remove_kernel(operator: Operator, kernel: Kernel) -> None:
    """Withdraws a kernel that `add_kernel` offered, and clears JAX's caches.

    Args:
      operator: the operator that was given to `add_kernel`.
      kernel: the same record, not a copy of it.

    Example:
      >>> from pallas_kernels.kernel import Kernel
      >>> operator = next(x for x in jaxops.operators() if x.name == "nll_loss")
      >>> kernel = Kernel(
      ...     "mine",
      ...     "cpu",
      ...     run=lambda *operands, **params: None,
      ...     refuses=lambda *_, **params: None,
      ... )
      >>> lowering.add_kernel(operator, kernel)
      >>> lowering.remove_kernel(operator, kernel)
      >>> lowering.explain(jaxops.nll_loss, jnp.zeros((1, 2)), jnp.array([1])).rows[
      ...     0
      ... ].refusals
      ()
    """
    _require_operator("remove_kernel", operator)
    added = _added_kernels.get(operator.name, ())
    if not any(one is kernel for one in added):
        raise ValueError(f"remove_kernel: kernel must be one that was added to {operator.name}; got {show(kernel)}")
    _added_kernels[operator.name] = tuple(one for one in added if one is not kernel)
    jax.clear_caches()


def _require_operator(caller: str, operator: Any) -> None:
    if not isinstance(getattr(operator, "primitive", None), Primitive):
        raise TypeError(f"{caller}: operator must be one of jaxops.operators(); got {show(operator)}")


def kernels_of(operator: Operator) -> tuple[Kernel, ...]:
    """Returns the operator's kernels in order of preference; those that were added come first."""
    return (*_added_kernels.get(operator.name, ()), *operator.kernels)


@functools.cache
def installed_packages() -> metadata.EntryPoints:
    """Returns the entry points of the installed packages that bring operators, imported or not; read once."""
    return metadata.entry_points(group="lowering.operators")


def load_packages() -> None:
    """Imports the installed packages that bring operators, which registers these."""
    for package in installed_packages():
        package.load()


def choose_in_program(
    operator: Operator,
    selection: select.Selection,
    hardware: Hardware,
    operands: Sequence[Any],
    params: dict[str, Any],
    device_count: int,
) -> select.Choice:
    """Calls `select.choose` for this operator in a program for so many devices."""
    split, split_devices = partitioning(operands, device_count), split_over(operands, device_count)
    request = selection.request(operator.name)
    chip = select.emulated_chip(request)
    if chip is not None:
        hardware, request = chip, "pallas"
    placement_reason = select.placement_reason(split, hardware.platform)
    # On an explicit or automatic mesh a kernel sees one device's part, and only the whole shapes are known here.
    evidence = Evidence(operator.name, hardware, operands, params, selection.tuned, split in ("none", "manual"))
    context = placement_reason, evidence, operator.forms, split_devices
    choice = select.choose(operator.name, kernels_of(operator), request, hardware, operands, params, *context)
    if chip is not None and choice.kernel is not None:
        choice = dataclasses.replace(choice, emulated=chip)
    if choice.form is not None and choice.form.per_device and split == "auto" and placement_reason is not None:
        raise NotSupportedError(f"{operator.name}: {choice.form.name} must run on each device; {placement_reason}")
    return choice


def without_kernels(
    operator: Operator, hardware: Hardware, operands: Sequence[Any], params: dict[str, Any]
) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns the operator on one device where no kernel runs: its form for this hardware, or its reference."""
    place, (structured, attributes) = Place(hardware.platform), unpacked(operands, params)
    form = select.form_for(operator.name, operator.forms, "auto", place, structured, attributes)
    return _in_jnp(operator, form, place, params)


def on_one_device(
    operator: Operator, selection: select.Selection, hardware: Hardware, operands: Sequence[Any], params: dict[str, Any]
) -> Callable[..., Any]:
    """Returns what runs on one device of this hardware, a kernel or not, as a function of an equation's arrays."""
    choice = choose_in_program(operator, selection, hardware, operands, params, 1)
    if choice.kernel is None:
        return _in_jnp(operator, choice.form, Place(hardware.platform), params)
    launch = _launch(operator, choice, hardware, operands, params)
    return on_arrays(functools.partial(choice.kernel.run, **launch), params)


def _launch(
    operator: Operator,
    choice: select.Choice,
    hardware: Hardware,
    operands: Sequence[Any],
    params: dict[str, Any],
    *,
    donates: bool = False,
) -> dict[str, Any]:
    """Returns how to launch the chosen kernel."""
    assert choice.kernel is not None
    structured, attributes = unpacked(operands, params)
    first = implementations.configs_of(operator.name, choice.kernel, hardware, structured, attributes)[0]
    launch: dict[str, Any] = {"config": first if choice.config is None else dict(choice.config)}
    launch["interpret"] = choice.interpret
    if choice.kernel.overwrites(*structured, **attributes):
        launch["in_place"] = donates
    return launch


def _in_jnp(
    operator: Operator, form: Form | None, place: Place, params: dict[str, Any]
) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns a form of the operator, or its reference, as a function of an equation's arrays."""
    if form is None:
        return functools.partial(operator.meaning, **params)
    run = functools.partial(form.run, place=place)
    return lambda *arrays: operator.in_jnp(run, arrays, params)


def _lower(
    operator: Operator, platform: str, ctx: Any, *operands: Any, selection: select.Selection, **params: Any
) -> Any:
    hardware = being_lowered_for(platform, tuple(ctx.module_context.platforms))
    devices = _device_count(ctx)
    place = Place(platform, split_over(ctx.avals_in, devices))
    choice = choose_in_program(operator, selection, hardware, ctx.avals_in, params, devices)
    if choice.is_unverified and selection.verify and not is_absent() and hardware == here():
        _verifiers[-1](operator, choice.kernel, hardware, ctx.avals_in, params)
        choice = choose_in_program(operator, selection, hardware, ctx.avals_in, params, devices)
    if choice.form is not None and choice.form.per_device and place.is_split:
        run = functools.partial(choice.form.run, place=Place(platform))
        with select.using(selection):
            split = partitioning(ctx.avals_in, devices)
            return _lower_kernel(operator, choice, run, split, ctx, *operands, params=params)
    if choice.kernel is None:
        with select.using(selection):
            in_jnp = _in_jnp(operator, choice.form, place, params)
            return _lower_fun(operator, choice.implementation, in_jnp, ctx, *operands)
    donates = choice.emulated is None and _donates(ctx.module_context.symbol_table)
    launch = _launch(operator, choice, choice.emulated or hardware, ctx.avals_in, params, donates=donates)
    kernel: Callable[..., Any] = functools.partial(choice.kernel.run, **launch)
    if choice.emulated is not None:
        kernel = _emulated(kernel, choice.emulated)
    # A kernel is run on each device's own part.
    on_chips = _on_chips(hardware) if is_absent() else contextlib.nullcontext()
    with on_chips:
        split = partitioning(ctx.avals_in, devices)
        return _lower_kernel(operator, choice, kernel, split, ctx, *operands, params=params)


def emulate_with(emulator: Callable[[Hardware], Callable[..., Any]]) -> None:
    """Takes what returns, for a chip, what makes functions run as that chip would; `lowering.emulation` has it."""
    _emulators.append(emulator)


def verify_with(verifier: Callable[..., None]) -> None:
    """Takes what runs a kernel before its first use; `lowering.verification` has it."""
    _verifiers.append(verifier)


def _emulated(run: Callable[..., Any], chip: Hardware) -> Callable[..., Any]:
    def emulated(*operands: Any, **attributes: Any) -> Any:
        return _emulators[-1](chip)(functools.partial(run, **attributes))(*operands)

    return emulated


def _lower_kernel(
    operator: Operator,
    choice: select.Choice,
    run: Callable[..., Any],
    split: str,
    ctx: Any,
    *operands: Any,
    params: dict[str, Any],
) -> Any:
    run = on_arrays(run, params)
    if split in ("explicit", "auto", "mixed"):
        avals = [_on_mesh_around(aval) if split == "explicit" else aval for aval in ctx.avals_in]
        local = ctx.replace(avals_in=avals)

        def on_each(*arrays: Any) -> Any:
            return operator.local_kernel(run, arrays, params)(*arrays)

        return _lower_fun(operator, choice.implementation, on_each, local, *operands)
    # Even inside shard_map a kernel sees plain arrays, as the primitive has already typed the results.
    types = [
        [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in avals] for avals in (ctx.avals_in, ctx.avals_out)
    ]
    plain = ctx.replace(avals_in=types[0], avals_out=types[1])
    with _jax_private.without_varying_axes():
        return _lower_fun(operator, choice.implementation, run, plain, *operands)


def _donates(symbols: Any) -> bool:
    """Tells whether the program that is being lowered donates any argument, or may do so."""
    # JAX lowers an equation once for all places where it stands, so the operands themselves are not known here.
    marks = ("jax.buffer_donor", "tf.aliasing_output")
    return "main" not in symbols or any(mark in given for given in symbols["main"].arg_attrs for mark in marks)


def _on_chips(hardware: Hardware) -> AbstractContextManager[None]:
    """Returns the surrounding mesh with chips of this kind: Pallas asks the mesh, else assumes this machine's chip."""
    mesh = jax.sharding.get_abstract_mesh()
    device = abstract_device(hardware)
    return jax.sharding.use_abstract_mesh(
        AbstractMesh(mesh.axis_sizes, mesh.axis_names, mesh.axis_types, abstract_device=device)
    )


def _on_mesh_around(aval: Any) -> Any:
    """Returns an operand's type on the surrounding mesh, which knows its devices where the operand's own may not."""
    mesh = jax.sharding.get_abstract_mesh()
    return aval.update(sharding=NamedSharding(mesh, aval.sharding.spec)) if is_absent() else aval


def _lower_reference(operator: Operator, ctx: Any, *operands: Any, selection: select.Selection, **params: Any) -> Any:
    with select.using(selection):
        return _lower_fun(operator, REFERENCE, functools.partial(operator.meaning, **params), ctx, *operands)


def _device_count(ctx: Any) -> int:
    return getattr(ctx.module_context.axis_context, "num_devices", 1)


def _lower_fun(operator: Operator, implementation: str, fn: Callable[..., Any], ctx: Any, *operands: Any) -> Any:
    fn = implementations.returning(ctx.avals_out, f"{operator.name}: {implementation}", fn)
    name = f"{operator.name}({brief([type_text(aval) for aval in ctx.avals_in])})"  # as `operator_in` reads it
    return mlir.lower_fun(fn, multiple_results=True)(ctx.replace(name_stack=ctx.name_stack.extend(name)), *operands)


def partitioning(avals: Sequence[Any], device_count: int) -> str:
    """Tells how operands of these types are split over devices: "none", "manual", "mixed", "explicit" or "auto"."""
    axis_types = mesh_of(avals).axis_types
    if AxisType.Explicit in axis_types:
        return "explicit"
    if AxisType.Manual in axis_types:
        return "mixed" if AxisType.Auto in axis_types else "manual"
    return "auto" if device_count > 1 else "none"


def split_over(avals: Sequence[Any], device_count: int) -> int:
    """Counts the devices over which the compiler splits operands of these types; 1 if it does not."""
    mesh, split = mesh_of(avals), partitioning(avals, device_count)
    if split == "auto":
        return device_count
    kinds = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return math.prod(size for size, kind in kinds if kind != AxisType.Manual)


def mesh_of(avals: Sequence[Any]) -> Any:
    """Returns the mesh in the operands' types; an empty mesh if they name none."""
    meshes = [aval.sharding.mesh for aval in avals]
    return next((mesh for mesh in meshes if not mesh.empty), jax.sharding.AbstractMesh((), ()))
