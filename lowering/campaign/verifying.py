"""Correctness of kernels on this device: against float64, bit by bit again, and in memory that holds poison."""

import functools
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowering.campaign.channel import Channel
from lowering.campaign.machine import Machine
from lowering.campaign.problems import Problem, problems
from lowering.campaign.suite import Case
from lowering.measurements import WRONG, Measurement, config_items
from lowering.measuring.candidates import (
    Launch,
    Results,
    failure,
    launched,
    reason_to_discard,
    truth_in_float32,
)
from lowering.operators import on_arrays, unpacked
from pallas_kernels.kernel import Kernel

# What results and temporaries hold before each run: a kernel that reads what it never wrote shows it.
_POISONS = (math.nan, math.nan, 7.0)


def verify(case: Case, machine: Machine, channel: Channel, operators: Collection[str] = ()) -> bool:
    """Tells a verdict on every kernel at every size.

    The first configuration is run at every size, and the others at the last. A kernel that was wrong is not run again.

    Args:
      case: what uses the kernels.
      machine: what to run them on.
      channel: where to tell.
      operators: by name, those whose kernels to verify; all if empty.

    Returns:
      Whether all was done; False after a failure that may have spoilt the device for this process.
    """
    sizes = case.sizes("verify", rehearse=machine.rehearse)
    spoilt = set(channel.spoilt)
    for position, size in enumerate(sizes):
        for problem in problems(case.fn, case.arguments(*size), machine.hardware):
            if operators and problem.operator.name not in operators:
                continue
            checker = Checker(problem, channel.runs, channel.ran)
            is_last = position == len(sizes) - 1
            for kernel, launch, config in steps(case, problem, machine, all_configs=is_last):
                way = Measurement(kernel.name, config_items(config or {}))
                if (problem.operator.name, kernel.name) in spoilt or channel.is_decided(problem.key, way):
                    continue
                reason = launch.refusal(kernel, problem.operands, problem.params)
                if reason is not None:
                    channel.tell_verdict(problem.key, way, "refused", reason)
                    continue
                channel.begin(problem.key, way)
                outcome, reason = checker.verdict(kernel, launch, config or {})
                channel.tell_verdict(problem.key, way, outcome, reason)
                if outcome != "verified":
                    spoilt.add((problem.operator.name, kernel.name))
                if outcome == "fails" and machine.hardware.platform != "cpu":
                    channel.ask_for_new_process()
                    return False
    return True


def steps(
    case: Case, problem: Problem, machine: Machine, *, all_configs: bool
) -> Iterator[tuple[Kernel, Launch, Mapping[str, int] | None]]:
    """Yields every kernel in every configuration that is due; None for the configuration of a kernel that refuses."""
    launch = functools.partial(machine.launch, problem.operator.name, first_only=not all_configs)
    for kernel, how in launched(problem.operator, launch):
        if how.refusal(kernel, problem.operands, problem.params) is not None:
            yield kernel, how, None
            continue
        for config in case.overridden(how.configs(kernel, problem.operands, problem.params)):
            yield kernel, how, config


def _ignored() -> None:
    pass


def truth_of(meaning: Callable[..., Results], operands: Sequence[jax.Array]) -> Results:
    """Computes the reference in float64, on the host; where it cannot be, in float32 on the device."""
    try:
        with jax.enable_x64(True), jax.default_device(_host()):
            return jax.block_until_ready(jax.jit(meaning)(*map(_widened, operands)))
    except Exception:  # whatever an operator or a compiler raises about float64
        return truth_in_float32(meaning, operands)


def fault_of(results: Any, expected: Results, truth: Results, operands: Sequence[jax.Array]) -> str:
    """Compares results on the host, as `reason_to_discard` does."""
    with jax.enable_x64(True), jax.default_device(_host()):
        arrays = (results, expected, truth, operands)
        return reason_to_discard(*(tuple(jnp.asarray(_on_host(x)) for x in each) for each in arrays))


class Checker:
    """Judge of kernels on one problem, with the truth computed once."""

    def __init__(
        self, problem: Problem, runs: Callable[[], None] = _ignored, ran: Callable[[], None] = _ignored
    ) -> None:
        """Takes the problem, and what to call before a kernel runs and after it has run to its end."""
        self._problem, self._runs, self._ran = problem, runs, ran
        self._meaning = functools.partial(problem.operator.meaning, **problem.params)

    @functools.cached_property
    def _expected(self) -> Results:
        """The reference's results, and with them their dtypes."""
        return jax.block_until_ready(jax.jit(self._meaning)(*self._problem.operands))

    @functools.cached_property
    def _truth(self) -> Results:
        return truth_of(self._meaning, self._problem.operands)

    def verdict(self, kernel: Kernel, launch: Launch, config: Mapping[str, int]) -> tuple[str, str]:
        """Runs a kernel: "verified", "wrong" or "fails", and why."""
        structured, attributes = unpacked(self._problem.operands, self._problem.params)
        run = on_arrays(functools.partial(kernel.run, config=config, interpret=launch.interpret), self._problem.params)
        in_place = tuple(kernel.overwrites(*structured, **attributes))
        try:
            # An interpreter is the same every time, and one with side effects is slow.
            times = 1 if launch.interpret and not kernel.interpreter_is_pure else len(_POISONS)
            repeats = [tuple(map(_on_host, results)) for results in self._repeats(run, in_place, times)]
        except Exception as error:  # whatever a compiler or a device raises
            return "fails", failure(error)
        self._ran()  # the reference may take long to compile, and the truth to compute
        reason = fault_of(repeats[0], self._expected, self._truth, self._problem.operands)
        for repeat, results in enumerate(repeats[1:], 2):
            for position, (x, y) in enumerate(zip(repeats[0], results, strict=True)):
                if not reason and x.tobytes() != y.tobytes():
                    reason = f"{WRONG}result {position} of run {repeat} is not that of run 1 bit by bit"
        return ("wrong", reason) if reason else ("verified", "")

    def _repeats(self, run: Any, in_place: Sequence[int], times: int) -> list[Results]:
        """Returns the results of several runs, each written over poison that was there before."""
        operands = self._problem.operands
        # XLA writes results over donated operands of their types. A kernel in place writes over its own operands.
        types = () if in_place else tuple((x.shape, x.dtype) for x in self._expected)

        def program(poison: Any, *arrays: jax.Array) -> Results:
            return tuple(run(*arrays))

        donated = (0, *(1 + position for position in in_place))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            jitted = jax.jit(program, donate_argnums=donated, keep_unused=True)
            compiled = jitted.lower(_poison(types, math.nan), *operands).compile()
        memory = compiled.memory_analysis()
        temporary_bytes = 0 if memory is None else memory.temp_size_in_bytes
        found = []
        self._runs()
        for value in _POISONS[:times]:
            arrays = [jnp.copy(x) if position in in_place else x for position, x in enumerate(operands)]
            # The allocator gives freed memory to the next that asks for as much: the temporaries.
            jax.block_until_ready(jnp.full(temporary_bytes // 4, value, jnp.float32)).delete()
            found.append(jax.block_until_ready(compiled(_poison(types, value), *arrays)))
        return found


def _poison(types: Sequence[tuple[tuple[int, ...], Any]], value: float) -> list[jax.Array]:
    """Makes arrays of these types that hold nothing but a value; the largest integer stands for NaN."""
    arrays = []
    for shape, dtype in types:
        if jnp.issubdtype(dtype, jnp.integer) and math.isnan(value):
            arrays.append(jnp.full(shape, jnp.iinfo(dtype).max, dtype))
        else:
            arrays.append(jnp.full(shape, value, dtype))
    return arrays


def _host() -> Any:
    """Returns the processor beside the device; the device itself where JAX has no other."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:
        return jax.devices()[0]


def _on_host(x: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def _widened(x: jax.Array) -> jax.Array:
    """Returns an operand on the host, in float64 if it holds floats."""
    host = _on_host(x)
    return jnp.asarray(host.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else host)
