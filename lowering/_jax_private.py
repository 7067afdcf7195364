"""The one place where `lowering` reaches into JAX's private modules (tried on JAX 0.10.2, 0.11.2 and 0.12.0.1).

* `dispatch.prim_requires_devices_during_lowering`: lists the primitives whose lowering rules use `custom_partitioning`,
  as JAX's own cuDNN primitives do. There is no public way to list one. When compiling for absent chips the rules do not
  use it, and JAX would refuse for nothing.
* `config._check_vma`: inside shard_map a kernel would have to say over which mesh axes each result varies. The
  primitive has already typed the results by then, so kernels are traced without this check.
* `distributed.global_state`: the only way to tell the other processes something without a program that all of them run.
* `mosaic_gpu._mosaic_gpu_ext`: CUPTI's times of each kernel. Mosaic's own `measure` runs each program twice on the same
  operands, so that the second run finds them in the cache.
* `source_info_util.user_context`: evaluates an equation again, or what takes its place, under its own source line and
  name stack, as `jax.core.eval_jaxpr` does for all equations of a jaxpr.
* `ad.JVPTracer`, `ad.LinearizeTracer`: tell whether arrays are being differentiated. Public tracers do not say it.
* `core.trace_ctx`, `pe.DynamicJaxprTrace`: tell whether equations are written down or computed at once, also under
  transformations.
* `callback.logger`: writes a traceback of what a callback raises, which JAX raises as well.
* `xla_bridge.make_pjrt_topology`: the public `jax.experimental.topologies` cannot describe absent NVIDIA GPUs.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax
from jax._src import callback, config, core, dispatch, distributed, source_info_util, xla_bridge
from jax._src.interpreters import ad, batching
from jax._src.interpreters import partial_eval as pe
from jax.extend.core import Primitive

_listed: set[Primitive] = set()


def require_devices_during_lowering(primitive: Primitive) -> None:
    _listed.add(primitive)
    dispatch.prim_requires_devices_during_lowering.add(primitive)


@contextmanager
def without_devices() -> Iterator[None]:
    """Lets operators be lowered for a mesh of absent chips."""
    listed = dispatch.prim_requires_devices_during_lowering & _listed
    dispatch.prim_requires_devices_during_lowering.difference_update(listed)
    try:
        yield
    finally:
        dispatch.prim_requires_devices_during_lowering.update(listed)


def without_varying_axes() -> AbstractContextManager[None]:
    return config._check_vma(False)


def evaluate(equation: Any, operands: Sequence[Any], traceback: Any) -> Sequence[Any]:
    """Evaluates an equation of a jaxpr for other operands, as if it had been traced there."""
    primitive = equation.primitive
    stack = source_info_util.current_name_stack() + equation.source_info.name_stack
    with source_info_util.user_context(traceback, name_stack=stack), equation.ctx.manager:
        results = primitive.bind(*operands, **primitive.get_bind_params(equation.params))
    return results if primitive.multiple_results else [results]


def are_differentiated(arrays: Sequence[Any]) -> bool:
    return any(isinstance(x, ad.JVPTracer | ad.LinearizeTracer) for x in arrays)


def writes_equations() -> bool:
    """Tells whether what is evaluated here becomes equations of a jaxpr, and calls stay calls there."""
    trace = core.trace_ctx.trace
    while isinstance(trace, ad.JVPTrace | ad.LinearizeTrace | batching.BatchTrace):
        trace = trace.parent_trace
    return isinstance(trace, pe.DynamicJaxprTrace) and not config.disable_jit.value


@contextmanager
def without_tracebacks_of_callbacks() -> Iterator[None]:
    was_disabled, callback.logger.disabled = callback.logger.disabled, True
    try:
        yield
    finally:
        callback.logger.disabled = was_disabled


def traced_at(traceback: Any) -> AbstractContextManager[None]:
    """Gives the equations that are made within the context this traceback."""
    return source_info_util.user_context(traceback)


def cuda_devices(target_config: str, count: str) -> Sequence[jax.Device]:
    """Returns the NVIDIA GPUs of one machine to compile for. Call it only in a process that does nothing else."""
    jax.devices()  # registers the CUDA plugin, which logs that it found no device
    shape = f"1x1x{count}"
    topology = xla_bridge.make_pjrt_topology("cuda", shape, target_config=target_config, topology=shape)
    return topology._make_compile_only_devices()


def said_by_first_process(name: str, value: str, seconds: float) -> str | None:
    """Returns what the first process of `jax.distributed` says under a name; None if nothing for so many seconds."""
    client = distributed.global_state.client
    assert client is not None
    if distributed.global_state.process_id == 0:
        client.key_value_set(name, value, allow_overwrite=True)
        return value
    try:
        return client.blocking_key_value_get(name, int(1e3 * seconds))
    except jax.errors.JaxRuntimeError:
        return None


def kernel_times_ms(launch: Callable[[], None]) -> list[tuple[str, float]]:
    """Returns the name and the time of every GPU kernel that `launch` runs to its end, in order."""
    # Only installations with JAX's CUDA plugin have it.
    extension = importlib.import_module("jax._src.lib.mosaic_gpu")._mosaic_gpu_ext
    extension._cupti_init()
    try:
        launch()
    finally:
        times = extension._cupti_get_timings(True)  # and lets other profilers work again
    return times
