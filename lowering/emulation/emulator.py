"""Compiles the Pallas kernels of a function for an absent TPU, executes them, and remembers what was found."""

import collections
import contextlib
import dataclasses
import functools
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from lowering import _jax_private
from lowering.compiling.compile import schedules_of
from lowering.compiling.process import more_libtpu_flags
from lowering.cost import PALLAS_CALL
from lowering.emulation.evaluating import Evaluation, Place, Replacement
from lowering.emulation.faults import EmulationError, KernelFaultError
from lowering.emulation.in_flight import Meeting
from lowering.emulation.kernels import POISONS, Execution, Kernel, execute, unsettled
from lowering.emulation.report import EmulatedKernel, Finding
from lowering.emulation.transfers import Transfers
from lowering.operators import operator_of
from lowering.register import on_one_device
from lowering.rewriting.graph import equations
from lowering.source_lines import UNKNOWN_LINE, Site
from lowering.targets import abstract_device, compiled_for
from lowering.tpu_core.dumps import KERNEL, Dumps, place_of
from lowering.tpu_core.faults import MachineFaultError, UnknownFormError
from pallas_kernels.hardware import Hardware

_TRANSFORMS = re.compile(r"\w+\(|\)")  # "jvp(" and the like around a scope
# XLA may copy an operand to VMEM before a kernel runs; on TPU v7x it does so up to 32 MB. What the kernel then copies
# from there is not a transfer, and the compiler does not check whether a block lies within the operand.
_OPERANDS_IN_HBM = "--xla_msa_enable=false"
# A kernel is not executed again for more places that start transfers, or for more pairs of them.
MOST_STARTS = 16
UNWRITTEN = "memory that nothing has written, such as scratch before its first store or rows behind an array's last"


@dataclasses.dataclass
class _Called:
    """A kernel, and what its calls have shown."""

    kernel: Kernel
    source: str
    issues: np.ndarray
    calls: int = 0
    seconds: float = 0.0
    transfers: int = 0

    def finding(self, what: str) -> Finding:
        """Makes a finding about this kernel."""
        return Finding(self.kernel.name, self.source, what)


class Emulator:
    """A chip that executes kernels.

    Attributes:
      error: why the last call stopped, if one did.
      passed_over: kernels that are not executed, and why.
      memory_findings: results of kernels that depend on what memory held before anything was written to it. Parts of
        them that nobody reads, such as rows beyond an array's last, may.
    """

    def __init__(
        self,
        hardware: Hardware,
        *,
        checks: bool,
        eup_error: float = 0.0,
        defers: bool = False,
        poison: int = POISONS[0],
    ) -> None:
        """Starts without kernels.

        Args:
          hardware: the chip.
          checks: whether to execute each call in every order of transfers and with two poisons, and to follow which
            value each register holds.
          eup_error: the relative error of the transcendental unit's results.
          defers: whether whoever asks for results raises `error`: JAX logs what a callback raises as its own.
          poison: what is read where nobody has written.
        """
        self._hardware = hardware
        self._checks = checks
        self._eup_error = eup_error
        self._defers = defers
        self._poison = poison
        self.memory_findings: dict[Finding, None] = {}
        self._called: dict[Any, _Called] = {}
        self._findings: dict[Finding, None] = {}
        self._evaluation = Evaluation(self._replacement)
        self.passed_over: dict[str, None] = {}
        self.error: EmulationError | None = None

    def with_other_memory(self) -> "Emulator":
        """Returns a chip in whose memory lies something else where nobody has written; it checks nothing."""
        options: dict[str, Any] = {"checks": False, "eup_error": self._eup_error, "poison": POISONS[1]}
        other = Emulator(self._hardware, **options)
        other._called = self._called
        return other

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Makes what is traced inside be for the chip: kernels ask the surrounding mesh what they run on."""
        device, around = abstract_device(self._hardware), jax.sharding.get_abstract_mesh()
        axes: Any = ((1,), ("chip",), (AxisType.Auto,))
        if not around.empty:
            axes = (around.axis_sizes, around.axis_names, around.axis_types)
        mesh = AbstractMesh(*axes, abstract_device=device)
        with compiled_for(self._hardware), jax.sharding.use_abstract_mesh(mesh), _jax_private.without_devices():
            yield

    def emulated(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that computes what another does, whose kernels this chip executes."""

        def call(*args: Any) -> Any:
            with self.tracing():
                closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
            return jax.tree.unflatten(jax.tree.structure(shape), self.run(closed, *jax.tree.leaves(args)))

        return call

    def run(self, closed: Any, *arrays: Any, around: Place | None = None) -> list[Any]:
        """Evaluates a jaxpr that was traced for the chip, of a function by itself or within another."""
        around = around or Place(None, closed.jaxpr.debug_info.func_name)
        return self._evaluation.run(closed, *arrays, around=around)

    def kernels(self) -> tuple[EmulatedKernel, ...]:
        """Returns what is known of each kernel."""
        return tuple(
            EmulatedKernel.of(
                one.kernel.name, one.source, one.kernel.bundles, one.issues, one.calls, one.seconds, one.transfers
            )
            for one in self._called.values()
            if one.calls  # what nobody reads is not computed
        )

    def unknown(self) -> tuple[str, ...]:
        """Returns the opcodes and operands in bundles that were never issued whose meaning nobody has settled."""
        return tuple(
            dict.fromkeys(
                text
                for one in self._called.values()
                for text in unsettled(one.kernel, np.flatnonzero(one.issues == 0).tolist())
            )
        )

    def findings(self) -> tuple[Finding, ...]:
        """Returns everything that was found."""
        return tuple(self._findings)

    def _replacement(self, equation: Any) -> Replacement | None:
        """Returns how to compute the results of a kernel's call, or of an operator; None for other equations."""
        if equation.primitive.name == PALLAS_CALL:
            if not equation.params.get("interpret"):
                return functools.partial(self.called, equation)
            source = Site(equation.source_info.traceback, None, None).line
            self.passed_over[f"a pallas_call on {source} has interpret=True"] = None
        operator = operator_of(equation.primitive)
        if operator is None:
            return None
        params = dict(equation.params)
        selection, avals = params.pop("selection"), [x.aval for x in equation.invars]

        def evaluate(place: Place, *arrays: Any) -> Sequence[Any]:
            with self.tracing():
                fn = on_one_device(operator, selection, self._hardware, avals, params)
                closed = jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals))
            kernels = [kernel.name for kernel in operator.kernels if kernel.platform == self._hardware.platform]
            if kernels and not any(one.primitive.name == PALLAS_CALL for one in equations(closed.jaxpr)):
                self.passed_over[f'{operator.name} runs its reference: wrap the call in jaxops.use("pallas")'] = None
            return self.run(closed, *arrays, around=place)

        return evaluate

    def called(self, equation: Any, place: Place, *arrays: Any) -> Sequence[Any]:
        """Computes the results of a kernel's call."""
        if not equation.outvars:
            self.passed_over[f"a pallas_call on {place.line} returns nothing"] = None
            return []
        for number, x in enumerate(equation.outvars):
            if jax.numpy.issubdtype(x.aval.dtype, jax.dtypes.extended):
                what = f"result {number} is of {x.aval.dtype}, and no memory of numbers"
                raise EmulationError(f"a pallas_call on {place.line}: {what}")
        like = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in equation.outvars]
        called = self._compiled(equation, place)
        execute_call = functools.partial(self.executed, called, like)
        if any(isinstance(x, jax.core.Tracer) for x in arrays):
            return jax.pure_callback(execute_call, like, *arrays, vmap_method="sequential")
        return list(map(jax.numpy.asarray, execute_call(*arrays)))

    def _compiled(self, equation: Any, place: Place) -> _Called:
        types = tuple((x.aval.shape, str(x.aval.dtype)) for x in equation.invars)
        key = types, str(equation.params)
        if key not in self._called:
            line, function = _line_and_function(equation, place)
            call = _function_of(equation, function)
            avals = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in equation.invars]
            with more_libtpu_flags(_OPERANDS_IN_HBM), schedules_of(jax.jit(call), avals, self._hardware) as folder:
                dumps = Dumps(folder)
                (name,) = (name for name, one in dumps.instructions.items() if one.opcode == KERNEL)
                kernel = Kernel.of(dumps, name, self._hardware.name)
            self._called[key] = _Called(kernel, line, np.zeros(len(kernel.bundles), np.int64))
        return self._called[key]

    def executed(self, called: _Called, like: Sequence[Any], *arrays: Any) -> tuple[np.ndarray, ...]:
        """Executes a call, in several ways if results are to be checked."""
        operands = list(map(np.asarray, arrays))
        start = time.perf_counter()
        try:
            first = execute(
                called.kernel,
                operands,
                like,
                checks=self._checks,
                eup_error=self._eup_error,
                poison=self._poison,
            )
        except (UnknownFormError, MachineFaultError, MemoryError) as error:
            self.error = self.error or self._stop(called, error, operands, like)
            if not self._defers:
                raise self.error from None
            return tuple(np.zeros(x.shape, x.dtype) for x in like)
        for what in (*first.clobbered, *first.left_over):
            self._findings[called.finding(what)] = None
        if self._checks:
            for what in self._transfers_found(called, operands, like, first):
                self._findings[called.finding(what)] = None
            if what := self._depends(called, operands, like, first, poison=POISONS[1]):
                finding = called.finding(f"{what} on {UNWRITTEN}: {_unwritten(called.kernel, first)}")
                self.memory_findings[finding] = None
        called.calls += 1
        called.seconds += time.perf_counter() - start
        called.issues += np.asarray(first.issues)
        called.transfers = called.transfers or len(first.starts)
        return first.results

    def _stop(self, called: _Called, error: Exception, operands: Sequence[Any], like: Sequence[Any]) -> EmulationError:
        """Returns the error that names the kernel and says why its execution has stopped."""
        why = str(error)
        if isinstance(error, UnknownFormError):
            why += ", whose meaning nobody has settled"
        elif isinstance(error, MemoryError):
            size = sum(math.prod(x.shape) * x.dtype.itemsize for x in (*operands, *like))
            why = f"this machine's memory does not hold {size / 1e9:.1f} GB of operands and results several times"
        kind = KernelFaultError if isinstance(error, MachineFaultError) else EmulationError
        return kind(f"{called.kernel.name} ({called.source}) on {self._hardware.name}: {why}")

    def _transfers_found(
        self, called: _Called, operands: Sequence[Any], like: Sequence[Any], first: Execution
    ) -> Iterator[str]:
        """Says what depends on when transfers happen, and on which: on two, or on one by itself."""
        of_two, bundles = set(), called.kernel.bundles
        for meeting in first.meetings[:MOST_STARTS]:
            if what := self._depends(called, operands, like, first, **later(meeting)):
                of_two.add(meeting.first.bundle)
                at, then = bundles[meeting.first.bundle], bundles[meeting.second.bundle]
                yield meeting.said(place_of(at), place_of(then), what)
        found = [of_two] if of_two else []
        numbers: dict[int, list[int]] = collections.defaultdict(list)
        for number, bundle in enumerate(first.starts):
            numbers[bundle].append(number)
        # The last order leaves one between the first and the last under way.
        for order in Transfers.ORDERS[1 : None if first.most_on_one_semaphore > 2 else -1]:
            if what := self._depends(called, operands, like, first, order=order):
                starts = {
                    bundle
                    for bundle, only in (numbers.items() if len(numbers) <= MOST_STARTS else ())
                    if self._depends(called, operands, like, first, order=order, only=only)
                }
                # What differs in two orders, or because of two transfers, is said once.
                if not any(starts <= known for known in found):
                    found.append(starts)
                    yield f"{_used_early(called.kernel, sorted(starts))}: {what} on when that happens"

    def _depends(
        self, called: _Called, operands: Sequence[Any], like: Sequence[Any], first: Execution, **how: Any
    ) -> str:
        """Executes a call in another way, and says what depends on it; "" for nothing."""
        try:
            other = execute(called.kernel, operands, like, eup_error=self._eup_error, **how)
        except MachineFaultError as error:
            return of_fault(error)
        return depending(first.results, other.results)


def later(meeting: Meeting) -> dict[str, Any]:
    """Returns how to execute again what has transfers that meet, so that the earlier ones come after the later ones."""
    return {"order": Transfers.ORDERS[2 if meeting.first_writes else 1], "only": meeting.early}


def depending(results: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> str:
    """Says which results differ in any bit, as the beginning of a sentence; "" if none does."""
    pairs = zip(results, others, strict=True)
    found = [
        f"result {number}{_first_difference(a, b)}" for number, (a, b) in enumerate(pairs) if a.tobytes() != b.tobytes()
    ]
    return f"{' and '.join(found)} depend{'s' if len(found) == 1 else ''}" if found else ""


def _first_difference(a: np.ndarray, b: np.ndarray) -> str:
    """Says of arrays that differ where they do so first; "" for those of one element."""
    bits = np.dtype(f"V{a.itemsize}")
    differ = np.ascontiguousarray(a).view(bits) != np.ascontiguousarray(b).view(bits)
    return f" (from element {tuple(map(int, np.argwhere(differ)[0]))} on)" if a.size > 1 else ""


def of_fault(error: MachineFaultError) -> str:
    """Returns the beginning of the same sentence about a fault in another execution."""
    return f"a fault ({error}) depends"


def _line_and_function(equation: Any, place: Place) -> tuple[str, str]:
    """Returns where a kernel is called and the function around that; the kernel's own where it is called bare."""
    kernel, _, line = str(equation.params["jaxpr"].debug_info.func_src_info).partition(" at ")
    if place.line != UNKNOWN_LINE:
        return place.line, place.function
    return f"{os.path.basename(line)} ({kernel})", kernel


def _function_of(equation: Any, function: str) -> Callable[..., Any]:
    """Returns a function of a kernel's operands, by whose name XLA calls it as in a program: by the innermost scope."""

    def call(*arrays: Any) -> Any:
        primitive = equation.primitive
        return primitive.bind(*arrays, **primitive.get_bind_params(equation.params))

    _, _, scope = str(equation.source_info.name_stack).rpartition("/")
    called = re.sub(r"\W", "_", _TRANSFORMS.sub("", scope) or function)
    call.__name__ = call.__qualname__ = called if called.isidentifier() else "kernel"
    return call


def _used_early(kernel: Kernel, starts: Sequence[int]) -> str:
    """Says whose memory is used too early: that of the transfers which these bundles start, or of any for none."""
    if not starts:
        return "memory of transfers is used before the waits for them"
    where = " or ".join(place_of(kernel.bundles[at]) for at in starts)
    return f"bundle {where} starts a transfer whose memory is used before the wait for it"


def _unwritten(kernel: Kernel, execution: Execution) -> str:
    """Says which bundles first load memory that nobody has written, and copy it to HBM."""
    places = {
        "load it": min(execution.unwritten, default=None),
        "copy it to HBM": min(execution.sent_unwritten, default=None),
    }
    found = [
        f"bundle {place_of(kernel.bundles[at])} is the first to {does}" for does, at in places.items() if at is not None
    ]
    return ", and ".join(found) or "no bundle loads it, so a part of the result is never written"
