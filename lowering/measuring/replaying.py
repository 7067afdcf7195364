"""The ways to run one operator on a TPU that is not here, ranked by the schedules that its compiler makes."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from lowering.compiling.compile import CompileError, compile
from lowering.compiling.process import more_libtpu_flags
from lowering.compiling.report import CompiledReport
from lowering.measurements import REFERENCE, Config, Entry, Key, Measurement, config_items
from lowering.operators import Operator, on_arrays, refusal_by_fields, unpacked
from lowering.register import kernels_of, without_kernels
from pallas_kernels.hardware import Hardware

# Where a whole program is one operator, libtpu may keep an argument in VMEM from one run to the next: on TPU v5e up to
# 128 MB, and then the operator seems faster than HBM is. In a model its operands come from elsewhere.
_KEEP_NO_ARGUMENT = "--xla_max_cross_program_prefetches=0"


def replay(
    run: Callable[..., Any],
    operands: Sequence[Any],
    hardware: Hardware,
    data: Mapping[str, Any],
    in_place: tuple[int, ...] = (),
    auto_layouts: bool = True,
) -> CompiledReport:
    """Compiles a function of arrays by itself, as if its operands came from HBM, and replays its schedule.

    Raises:
      CompileError: if it does not compile, or if data decide what runs and `data` does not say it.
    """
    jitted = jax.jit(lambda *arrays: tuple(run(*arrays)), donate_argnums=in_place)
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    with more_libtpu_flags(_KEEP_NO_ARGUMENT):
        return compile(jitted, *types, target=hardware.name, schedule=True, auto_layouts=auto_layouts, **data)


def replayed_entry(
    key: Key,
    operator: Operator,
    types: Sequence[Any],
    params: Mapping[str, Any],
    hardware: Hardware,
    data: Mapping[str, Any],
    before_each: Callable[[], None],
) -> Entry:
    """Replays the reference and every configuration of every kernel of an operator, with the times of their schedules.

    Args:
      key: of the entry.
      operator: its record.
      types: of its operands.
      params: its attributes.
      hardware: the TPU.
      data: `trip_counts` and `scalars` of `compile`.
      before_each: called before each is compiled; what it raises ends the work.
    """
    operands = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in types]

    def replayed(
        name: str, config: Config, run: Callable[..., Any], in_place: tuple[int, ...] = (), auto_layouts: bool = True
    ) -> Measurement:
        before_each()
        try:
            report = replay(run, operands, hardware, data, in_place, auto_layouts)
        except CompileError as error:
            reason = str(error).removeprefix("lowering.compile: ").partition("\n")[0]
            return Measurement(name, config, discarded=reason)
        assert report.schedule is not None
        return Measurement(name, config, round(report.schedule.total_us, 3))

    reference = without_kernels(operator, hardware, operands, dict(params))
    # In a model, what is around an operator can take and give any layout. Those that XLA chooses for its own program
    # are not always its best.
    references = [replayed(REFERENCE, (), reference, auto_layouts=auto) for auto in (True, False)]
    found = [min(references, key=lambda each: math.inf if each.median_us is None else each.median_us)]
    structured, attributes = unpacked(operands, params)
    for kernel in (kernel for kernel in kernels_of(operator) if kernel.platform == hardware.platform):
        reason = refusal_by_fields(kernel, structured) or kernel.refuses(hardware, *structured, **attributes)
        if reason is not None:
            found.append(Measurement(kernel.name, discarded=reason))
            continue
        in_place = tuple(kernel.overwrites(*structured, **attributes))
        for config in kernel.configs(hardware, *structured, **attributes):
            run = on_arrays(functools.partial(kernel.run, config=config, interpret=False), params)
            found.append(replayed(kernel.name, config_items(config), run, in_place))
    return Entry(key, tuple(found), repeats=0, replayed=True)
