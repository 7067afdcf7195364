"""The candidates of one operator: compiled, and compared with the reference before they are timed."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lowering.measurements import NOT_COMPILED, REFERENCE, WRONG, Config, Measurement, config_items
from lowering.operators import Operator, on_arrays, refusal_by_fields, type_text, unpacked
from lowering.register import kernels_of, without_kernels
from pallas_kernels.hardware import Hardware
from pallas_kernels.kernel import Kernel

# How far a kernel may be off, relative to the largest value of a result and beyond the reference's own error; by the
# narrowest dtype among the operands and the result.
_TOLERANCES = {"float64": 1e-10, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}

Results = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Launch:
    """Way to run a kernel.

    Attributes:
      chip: the one that it is launched for.
      interpret: what its `run` takes as `interpret`.
      first_only: whether only the first of its configurations is wanted.
      excluded: why it must not run at all; empty if it may.
    """

    chip: Hardware
    interpret: Any = False
    first_only: bool = False
    excluded: str = ""

    def refusal(self, kernel: Kernel, operands: Sequence[Any], params: Mapping[str, Any]) -> str | None:
        """Says why the kernel does not run; None if it does."""
        structured, attributes = unpacked(operands, params)
        reason = self.excluded or refusal_by_fields(kernel, structured)
        reason = reason or kernel.refuses(self.chip, *structured, **attributes)
        return reason or (None if self.configs(kernel, operands, params) else "its configs are empty")

    def configs(
        self, kernel: Kernel, operands: Sequence[Any], params: Mapping[str, Any]
    ) -> Sequence[Mapping[str, int]]:
        """Returns the configurations to run."""
        structured, attributes = unpacked(operands, params)
        offered = kernel.configs(self.chip, *structured, **attributes)
        return offered[:1] if self.first_only else offered


def _ignored(*_: Any) -> None:
    pass


@dataclasses.dataclass(frozen=True)
class Watch:
    """Listener that is told what happens to a candidate, in case it never ends.

    Attributes:
      begins: called with a candidate's name before it is compiled, and before it is timed.
      runs: called before it runs.
    """

    begins: Callable[[str], None] = _ignored
    runs: Callable[[], None] = _ignored

    def before_run(self, name: str) -> None:
        """Says that a candidate of this name runs, which is compiled."""
        self.begins(name)
        self.runs()


UNWATCHED = Watch()

# How to run a kernel; None leaves it out, as one for another platform.
Launches = Callable[[Kernel], Launch | None]


def on_device(hardware: Hardware) -> Launches:
    """Runs the kernels for the chip that is here, and leaves out all others."""
    return lambda kernel: Launch(hardware) if kernel.platform == hardware.platform else None


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A way to run an operator that compiles and computes the right results.

    Attributes:
      implementation: the kernel's name, or "reference".
      config: the kernel's launch configuration.
      run: the compiled program.
      in_place: the positions of operands that it overwrites.
    """

    implementation: str
    config: Config
    run: Callable[..., Results]
    in_place: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The implementation and its configuration."""
        return Measurement(self.implementation, self.config).name

    def arguments(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the arguments of one run: copies of the operands that it overwrites, and the others themselves."""
        return [jnp.copy(x) if position in self.in_place else x for position, x in enumerate(operands)]


def launched(operator: Operator, launches: Launches) -> list[tuple[Kernel, Launch]]:
    """Returns the kernels of an operator that are not left out, and how each is run."""
    return [(kernel, launch) for kernel in kernels_of(operator) if (launch := launches(kernel)) is not None]


def candidates(
    operator: Operator,
    hardware: Hardware,
    operands: Sequence[jax.Array],
    params: Mapping[str, Any],
    launches: Launches,
    watch: Watch,
    is_time_left: Callable[[], bool],
) -> Iterator[Candidate | Measurement]:
    """Yields the reference, then every configuration of every kernel; for discarded ones a measurement with the reason.

    Each is compiled and checked only when the iterator gets to it, and not at all once no time is left.
    """
    meaning = functools.partial(operator.meaning, **params)
    kernels = launched(operator, launches)
    watch.begins(REFERENCE)
    try:
        as_lowered = without_kernels(operator, hardware, operands, dict(params))
        reference = _compiled(REFERENCE, (), as_lowered, operands)
        expected = reference.run(*operands)
        truth = truth_in_float32(meaning, operands) if kernels else ()
    except Exception as error:
        yield Measurement(REFERENCE, discarded=failure(error))
        for kernel, _ in kernels:
            yield Measurement(kernel.name, discarded="there is no reference to compare it with")
        return
    yield reference
    for kernel, launch in kernels:
        reason = launch.refusal(kernel, operands, params)
        if reason is not None:
            yield Measurement(kernel.name, discarded=reason)
            continue
        structured, attributes = unpacked(operands, params)
        in_place = tuple(kernel.overwrites(*structured, **attributes))
        for config in launch.configs(kernel, operands, params):
            way = Measurement(kernel.name, config_items(config))
            if not is_time_left():
                yield dataclasses.replace(way, discarded=NOT_COMPILED)
                continue
            run = on_arrays(functools.partial(kernel.run, config=config, interpret=launch.interpret), params)
            watch.begins(way.name)
            yield _checked(way, run, operands, in_place, expected, truth, watch)


def _checked(
    way: Measurement,
    run: Callable[..., Results],
    operands: Sequence[jax.Array],
    in_place: tuple[int, ...],
    expected: Results,
    truth: Results,
    watch: Watch,
) -> Candidate | Measurement:
    try:
        candidate = _compiled(way.implementation, way.config, run, operands, in_place)
        watch.runs()
        results = jax.block_until_ready(candidate.run(*candidate.arguments(operands)))
    except Exception as error:  # whatever a compiler raises
        return dataclasses.replace(way, discarded=failure(error))
    reason = reason_to_discard(results, expected, truth, operands)
    return dataclasses.replace(way, discarded=reason) if reason else candidate


def _compiled(
    implementation: str,
    config: Config,
    run: Callable[..., Results],
    operands: Sequence[jax.Array],
    in_place: tuple[int, ...] = (),
) -> Candidate:
    def results(*arrays: jax.Array) -> Results:
        return tuple(run(*arrays))

    compiled = jax.jit(results, donate_argnums=in_place).lower(*operands).compile()
    return Candidate(implementation, config, compiled, in_place)


def truth_in_float32(meaning: Callable[..., Results], operands: Sequence[jax.Array]) -> Results:
    """Computes the reference in float32, with the most exact products that the device has."""
    upcast = [x.astype(jnp.float32) if _bits(x) < 32 else x for x in operands]
    with jax.default_matmul_precision("highest"):
        return jax.block_until_ready(jax.jit(meaning)(*upcast))


def reason_to_discard(results: Results, expected: Results, truth: Results, operands: Sequence[jax.Array]) -> str:
    """Says what is wrong with the results, or ""."""
    types, right_types = (", ".join(map(type_text, arrays)) for arrays in (results, expected))
    if types != right_types:
        return f"{WRONG}results are {types} instead of {right_types}"
    for position, (result, reference, exact) in enumerate(zip(results, expected, truth, strict=True)):
        if not jnp.issubdtype(result.dtype, jnp.inexact):
            different = int(jnp.sum(result != reference))
            if different:
                return f"{WRONG}{different} of {result.size} elements of result {position} differ"
            continue
        narrowest = min([result, *(x for x in operands if jnp.issubdtype(x.dtype, jnp.floating))], key=_bits)
        own_error = _relative_error(reference, exact)
        allowed = _TOLERANCES.get(narrowest.dtype.name, 0.1) + (own_error if math.isfinite(own_error) else 0.0)
        error = _relative_error(result, exact)
        if not math.isfinite(error):
            return f"{WRONG}result {position} is not finite where the reference is"
        if error > allowed:
            return (
                f"{WRONG}result {position} is off by {error:.2g} of its largest value, where {allowed:.2g} is allowed"
            )
    return ""


def _relative_error(x: jax.Array, exact: jax.Array) -> float:
    """Returns the largest error relative to the largest value; not finite if only `x` has a value that is not."""
    is_known = jnp.isfinite(exact)
    difference = jnp.max(jnp.where(is_known, jnp.abs(x.astype(exact.dtype) - exact), 0), initial=0)
    scale = float(jnp.max(jnp.where(is_known, jnp.abs(exact), 0), initial=0))
    return float(difference) / (scale or 1.0)


def _bits(x: Any) -> int:
    return jnp.finfo(x.dtype).bits if jnp.issubdtype(x.dtype, jnp.inexact) else 64


def failure(error: Exception) -> str:
    """Says why something is discarded that raises this."""
    return f"fails with {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
