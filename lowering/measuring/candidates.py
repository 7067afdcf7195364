"""The candidates of a problem: each configuration of each kernel that a machine can run, and the reference."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp

from lowering.measurements import NOT_COMPILED, REFERENCE, Config, Measurement, config_items
from lowering.measuring import timing
from lowering.measuring.agreement import Results, failure, reason_to_discard, truth_in_float32
from lowering.measuring.problems import Problem
from lowering.operators import Operator, on_arrays, refusal_by_fields, unpacked
from lowering.register import kernels_of, without_kernels
from lowering.targets import TARGETS
from pallas_kernels.hardware import Hardware
from pallas_kernels.kernel import Kernel, Kind


class Watch:
    """Listener that is told what happens to a candidate, in case it never ends. This one ignores it."""

    def begins(self, way: Measurement) -> None:
        """Hears of a candidate before it is compiled, and before it is timed."""

    def runs(self) -> None:
        """Hears that what began is compiled, and runs."""

    def ran(self) -> None:
        """Hears that it has run to its end, and that what comes next is not its fault."""


UNWATCHED = Watch()


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A way to run an operator.

    Attributes:
      implementation: the kernel's name, or "reference".
      config: the kernel's launch configuration.
      run: takes and returns arrays; a program once it is `compiled`.
      in_place: the positions of operands that it overwrites.
      kind: of the kernel on these operands, if it has one.
      is_slow: whether it is interpreted with side effects.
    """

    implementation: str
    config: Config
    run: Callable[..., Results]
    in_place: tuple[int, ...] = ()
    kind: Kind | None = None
    is_slow: bool = False

    @property
    def way(self) -> Measurement:
        """The implementation and its configuration, without a time."""
        return Measurement(self.implementation, self.config)

    def compiled(self, operands: Sequence[jax.Array]) -> "Candidate":
        """Returns the candidate as a program for these operands, which it overwrites where it is in place."""

        def results(*arrays: jax.Array) -> Results:
            return tuple(self.run(*arrays))

        program = jax.jit(results, donate_argnums=self.in_place).lower(*operands).compile()
        return dataclasses.replace(self, run=program)

    def arguments(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the arguments of one run: copies of the operands that it overwrites, and the others themselves."""
        return [jnp.copy(x) if position in self.in_place else x for position, x in enumerate(operands)]


# Takes the configurations that a kernel offers, and returns those to run.
Chosen = Callable[[Sequence[Mapping[str, int]]], Iterable[Mapping[str, int]]]


@dataclasses.dataclass(frozen=True)
class Machine:
    """Device that kernels run on, or interpreters of them on a CPU for a rehearsal.

    Attributes:
      hardware: the device.
      rehearse: whether kernels for other chips are interpreted, in their first configuration.
      faults: why kernels must not run, by operator and kernel.
    """

    hardware: Hardware
    rehearse: bool = False
    faults: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)

    def kernels(self, operator: Operator, *, timed: bool = False) -> list[Kernel]:
        """Returns the kernels that run here; to be timed, only those that an interpreter does not slow down."""
        found = [kernel for kernel in kernels_of(operator) if self.rehearse or not self._interprets(kernel)]
        return [kernel for kernel in found if not (timed and self._is_slow(kernel))]

    def reference(self, problem: Problem) -> Candidate:
        """Returns what runs where no kernel does, not compiled yet."""
        run = without_kernels(problem.operator, self.hardware, problem.operands, dict(problem.params))
        return Candidate(REFERENCE, (), run)

    def candidates(
        self, problem: Problem, chosen: Chosen = tuple, deadline: float = math.inf, *, timed: bool = False
    ) -> Iterator[Candidate | Measurement]:
        """Yields the kernels that run here, as `candidates_of` does each."""
        for kernel in self.kernels(problem.operator, timed=timed):
            yield from self.candidates_of(kernel, problem, chosen, deadline)

    def candidates_of(
        self, kernel: Kernel, problem: Problem, chosen: Chosen = tuple, deadline: float = math.inf
    ) -> Iterator[Candidate | Measurement]:
        """Yields a kernel in the chosen configurations, not compiled yet; the reason for what does not run.

        Nothing more is to be compiled once `timing.clock` has passed the deadline.
        """
        structured, attributes = unpacked(problem.operands, problem.params)
        interprets = self._interprets(kernel)
        chips = (chip for chip in TARGETS.values() if chip.platform == kernel.platform)
        chip = next(chips) if interprets else self.hardware
        reason = self.faults.get(problem.operator.name, {}).get(kernel.name) or refusal_by_fields(kernel, structured)
        reason = reason or kernel.refuses(chip, *structured, **attributes)
        offered = () if reason else kernel.configs(chip, *structured, **attributes)
        if not offered:
            yield Measurement(kernel.name, discarded=reason or "its configs are empty")
            return
        kind, in_place = kernel.kind(chip, *structured, **attributes), kernel.overwrites(*structured, **attributes)
        for config in chosen(offered[:1] if interprets else offered):
            items = config_items(config)
            if timing.clock() >= deadline:
                yield Measurement(kernel.name, items, discarded=NOT_COMPILED)
                continue
            run = on_arrays(functools.partial(kernel.run, config=config, interpret=interprets), problem.params)
            yield Candidate(kernel.name, items, run, tuple(in_place), kind, self._is_slow(kernel))

    def _interprets(self, kernel: Kernel) -> bool:
        return kernel.platform != self.hardware.platform

    def _is_slow(self, kernel: Kernel) -> bool:
        return self._interprets(kernel) and not kernel.interpreter_is_pure


def checked_candidates(
    problem: Problem, machine: Machine, chosen: Chosen, deadline: float, watch: Watch
) -> Iterator[Candidate | Measurement]:
    """Yields programs: the reference, and each kernel's that agree with it; for discarded ones the reason.

    Each is compiled and checked only when the iterator gets to it.
    """
    operands = problem.operands
    kernels = machine.kernels(problem.operator, timed=True)
    watch.begins(Measurement(REFERENCE))
    try:
        reference = machine.reference(problem).compiled(operands)
        expected = reference.run(*operands)
        truth = truth_in_float32(problem.meaning, operands) if kernels else ()
    except Exception as error:
        yield Measurement(REFERENCE, discarded=failure(error))
        for kernel in kernels:
            yield Measurement(kernel.name, discarded="there is no reference to compare it with")
        return
    yield reference
    for candidate in machine.candidates(problem, chosen, deadline, timed=True):
        if isinstance(candidate, Measurement):
            yield candidate
        else:
            yield _checked(candidate, operands, expected, truth, watch)


def _checked(
    candidate: Candidate, operands: Sequence[jax.Array], expected: Results, truth: Results, watch: Watch
) -> Candidate | Measurement:
    watch.begins(candidate.way)
    try:
        program = candidate.compiled(operands)
        watch.runs()
        results = jax.block_until_ready(program.run(*program.arguments(operands)))
    except Exception as error:  # whatever a compiler raises
        return dataclasses.replace(candidate.way, discarded=failure(error))
    reason = reason_to_discard(results, expected, truth, operands)
    return dataclasses.replace(candidate.way, discarded=reason) if reason else program
