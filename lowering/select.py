"""Selection of the implementation of an operator for a target, and why the others were refused."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from lowering import operators
from lowering.describe import meant, one_of, show
from lowering.errors import NotSupportedError
from lowering.evidence import Verdict, verdict
from lowering.implementations import reason_of
from lowering.measurements import REFERENCE, Config, Entry, config_items, config_text, versions
from lowering.operators import Form, Place, present_names, refusal_by_fields, unpacked
from lowering.targets import TARGETS, is_absent
from lowering.tuning_store import Evidence
from pallas_kernels.hardware import Hardware
from pallas_kernels.kernel import Kernel

MODES = ("auto", "reference", "pallas", "interpret")
EMULATED = ("tpu-v5e", "tpu-v6e", "tpu-v7x")  # whose code `lowering.emulation` executes
NOTHING_KNOWN = Evidence("", Hardware("", ""), (), {})  # as of any unknown chip
_RUNTIME_ERROR = 361001  # CANN's status for "unsupported on this platform"


@dataclasses.dataclass(frozen=True)
class Selection:
    """Choice of the user: a default, exceptions for single operators, and measurements from tuning.

    Kernels that no device has run are verified before their first use, unless `verify` is False.

    Each request is one of MODES; "pallas" and "interpret" may name a kernel, as in "pallas:mosaic_gpu". Or it is
    "emulate:" and a TPU.
    """

    default: str = "auto"
    by_operator: tuple[tuple[str, str], ...] = ()
    tuned: tuple[Entry, ...] = ()
    verify: bool = True

    def request(self, operator_name: str) -> str:
        """Returns what the user asked for this operator."""
        return dict(self.by_operator).get(operator_name, self.default)

    def __repr__(self) -> str:
        tuned = [f"tuned={len(self.tuned)}"] if self.tuned else []
        unverified = [] if self.verify else ["verify=False"]
        requests = (f"{name}={request}" for name, request in self.by_operator)
        return " ".join([self.default, *requests, *tuned, *unverified])


# A user context is part of jit's cache key, which a plain global is not: a function that was traced under one selection
# is traced again under another.
_selection = jax.make_user_context(Selection())


def current_selection() -> Selection:
    """Returns what the surrounding `use` contexts ask for.

    Returns:
      A record with the `default` request, the requests `by_operator`, and the `tuned` measurements in force.

    Example:
      >>> with lowering.use("pallas"):
      ...     lowering.current_selection().default
      'pallas'
    """
    return _selection.value


def using(selection: Selection) -> contextlib.AbstractContextManager[None]:
    """Makes exactly this selection the current one; `use` changes parts of it.

    Args:
      selection: as `current_selection` returns it.

    Example:
      >>> with lowering.use("pallas"):
      ...     selection = lowering.current_selection()
      >>> with lowering.using(selection):
      ...     lowering.current_selection().default
      'pallas'
    """
    if not isinstance(selection, Selection):
        raise TypeError(f"using: selection must be what current_selection returns; got {show(selection)}")
    return _selection(selection)


def use(
    implementation: str | None = None, /, *, verify: bool | None = None, **by_operator: str
) -> contextlib.AbstractContextManager[None]:
    """Chooses the implementation of operators in code that is traced within the context.

    The choice is made while tracing and is part of `jax.jit`'s cache key, so one function can be compiled under several
    choices. Contexts nest; where two disagree, the inner one wins.

    Args:
      implementation: for every operator.

        - "auto" takes the fastest implementation if these exact shapes were tuned, in a context or by `jaxops tune` on
          this machine. Otherwise it takes the first kernel that accepts the operands and was measured at least as fast
          as the reference on the target, or that the evidence on operands like these favours: measured there or
          replayed at 0.85 of the reference's time or less, and executed. Else it takes the first form in `jax.numpy`
          that is meant for the platform and accepts the operands, else the reference.
        - "reference" takes the operator's definition in `jax.numpy`, the same program on every platform.
        - the name of another form in `jax.numpy`, as `explain` shows it ("xla_prior_shift"), takes that form, on any
          platform; operators without such a form take what "auto" takes.
        - "pallas" takes the first kernel that accepts the operands, measured or not, but none that `jaxops tune` found
          wrong on the device. An operator without kernels for the platform takes its form in `jax.numpy`; so does one
          whose kernels all refuse, if they are only there for some shapes, as `Kernel.gives_way` says.
        - "interpret" runs a kernel in Pallas' interpreter, on any machine.
        - "emulate:tpu-v5e" compiles kernels for that TPU and executes the compiled code, as `lowering.emulate` does, on
          any machine with the compiler. Each call is executed once. The TPU's kernels are chosen as by "pallas".
        - None keeps the choice of the surrounding context.

        "pallas" and "interpret" may name a kernel after a colon, as in "interpret:mosaic_gpu"; "pallas:mosaic_gpu"
        takes that kernel even where it was found wrong.
      verify: whether a kernel that "auto" takes by replays alone, or by measurements with other versions, is run on the
        device that is here, once, before it is first used: a small case of its kind, against float64. The outcome is
        kept; a kernel that goes wrong is not taken. JAXOPS_VERIFY=never in the environment switches it off as well.
        None keeps what the surrounding context says, at first True.
      **by_operator: the same for single operators, by name, as in `use(apply_fused_ema_adam="pallas")`.

    Returns:
      A context manager.

    Raises:
      ValueError: for an unknown implementation or operator, when `use` is called.
      NotSupportedError: while lowering, if you asked for a kernel and each of the operator's kernels for the platform
        refuses. The message gives each kernel's reason.

    Example:
      >>> with lowering.use("pallas", embedding="reference"):
      ...     print(lowering.current_selection())
      pallas embedding=reference
    """
    for request in [*([] if implementation is None else [implementation]), *by_operator.values()]:
        if not _is_request(request):
            choices = ", ".join([*MODES, *(f"emulate:{chip}" for chip in EMULATED)])
            what = f"one of {choices}, or a kernel or form that `explain` names"
            known = (*MODES, *(f"emulate:{chip}" for chip in EMULATED), *operators.form_names())
            raise ValueError(f"use: implementation must be {what}; got {show(request)}{meant(request, known)}")
    for name in by_operator:
        if name not in operators.names():
            raise ValueError(f"use: operator must be {one_of(sorted(operators.names()), name)}")
    if verify is not None and not isinstance(verify, bool):
        raise ValueError(f"use: verify must be True, False or None; got {show(verify)}")
    return _used(implementation, by_operator, verify)


@contextlib.contextmanager
def _used(implementation: str | None, by_operator: Mapping[str, str], verify: bool | None) -> Iterator[None]:
    outer = current_selection()
    merged = dict(outer.by_operator) if implementation is None else {}
    merged.update(by_operator)
    requests = implementation or outer.default, tuple(sorted(merged.items()))
    with using(Selection(*requests, outer.tuned, outer.verify if verify is None else verify)):
        yield


def _is_request(request: Any) -> bool:
    mode, colon, kernel_name = request.partition(":") if isinstance(request, str) else ("", "", "")
    if mode == "emulate":
        return emulated_chip(request) is not None
    if mode in MODES:
        return not colon or (bool(kernel_name) and mode in ("pallas", "interpret"))
    return isinstance(request, str) and request in operators.form_names()


def emulated_chip(request: str) -> Hardware | None:
    """Returns the TPU that a request such as "emulate:tpu-v5e" names; None for others."""
    mode, _, name = request.partition(":")
    chip = TARGETS.get(name) if mode == "emulate" else None
    return chip if name in EMULATED else None


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A kernel that was not chosen, or a form in jnp that refuses, and the reason."""

    kernel: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Choice:
    """The chosen implementation, and the refusals of those that come before it.

    Attributes:
      kernel: None for a form in jnp.
      form: another form in jnp than the reference, if there is no kernel; None for the reference.
      interpret: whether Pallas' interpreter runs the kernel.
      reasons: `reasons()` computes the refusals.
      config: the kernel's tuned configuration; None takes the first that the kernel offers.
      evidence: why "auto" takes the kernel, if it was not tuned at these shapes.
      is_unverified: whether no device is known to have run the kernel.
      emulated: the TPU as which this machine executes the kernel, if so.
    """

    kernel: Kernel | None
    interpret: bool
    reasons: Callable[[], tuple[Refusal, ...]]
    config: Config | None = None
    form: Form | None = None
    emulated: Hardware | None = None
    evidence: str = ""
    is_unverified: bool = False

    @functools.cached_property
    def refusals(self) -> tuple[Refusal, ...]:
        """Refusals of the kernels and forms that were considered first, in order of preference."""
        return self.reasons()

    @property
    def implementation(self) -> str:
        """The name that `explain` shows."""
        if self.kernel is None:
            return REFERENCE if self.form is None else self.form.name
        if self.emulated is not None:
            return f"{self.kernel.name} (emulated, {self.emulated.name})"
        if self.config is not None:
            return f"{self.kernel.name} (tuned: {config_text(self.config) or 'its only configuration'})"
        return f"{self.kernel.name} (interpreted)" if self.interpret else self.kernel.name


def choose(
    operator_name: str,
    kernels: Sequence[Kernel],
    request: str,
    hardware: Hardware,
    operands: Sequence[Any],
    params: Mapping[str, Any],
    placement_reason: str | None = None,
    evidence: Evidence = NOTHING_KNOWN,
    forms: Sequence[Form] = (),
    device_count: int = 1,
) -> Choice:
    """Takes the tuned winner, else the first kernel that may run, else a form in jnp, else the reference.

    By default only those kernels may run that were measured on the hardware.

    Args:
      operator_name: for the error.
      kernels: in order of preference.
      request: what the user asked for, as in `Selection`.
      hardware: the chip that is lowered for, which may be absent.
      operands: the arrays of an equation, or anything with shape and dtype.
      params: the equation's parameters: the operator's attributes, and the operands' structure.
      placement_reason: why no kernel at all can run in this place, if so.
      evidence: results for this operator on this hardware, with these operands and attributes.
      forms: the operator's forms in jnp, in order of preference.
      device_count: over how many devices the compiler splits the operands.

    Raises:
      NotSupportedError: if the user asked for a kernel and every candidate refuses.
    """
    form_names = [form.name for form in forms]
    mode, _, kernel_name = request.partition(":")
    if mode not in (*MODES, *form_names):  # a form of other operators
        mode = "auto"
    structured, attributes = unpacked(operands, params)
    context = hardware, structured, attributes, placement_reason, evidence
    considered = () if mode in (REFERENCE, *form_names) else tuple(kernels)
    candidates = _Candidates(operator_name, considered, mode, kernel_name, *context)
    kernel = candidates.chosen()
    reasons = functools.partial(candidates.refusals, kernel)
    if kernel is not None:
        config = None if mode == "interpret" else candidates.tuned_config(kernel)
        found = None if mode == "interpret" else candidates.verdict_on(kernel)
        taken = found if found is not None and found.is_taken else Verdict(True, "")
        known = taken.reason
        if mode == "pallas" and taken is not found:
            known = f"as asked; {'not measured on this target' if found is None else found.reason}"
        is_unverified = mode == "auto" and bool(taken.kind)
        return Choice(kernel, mode == "interpret", reasons, config, evidence=known, is_unverified=is_unverified)
    if mode in ("pallas", "interpret") and candidates.insist():
        told = "; ".join(f"{refusal.kernel}: {refusal.reason}" for refusal in reasons())
        message = (
            f"{operator_name}: implementation must be one that {hardware.name} can take; got {show(request)} "
            f'({told}): use("{request}", {operator_name}="reference") keeps it on its reference'
        )
        raise NotSupportedError(message, _RUNTIME_ERROR)
    place = Place(hardware.platform, device_count)
    form = None if mode == REFERENCE else form_for(operator_name, forms, mode, place, structured, attributes)
    considered_forms = () if mode in (REFERENCE, *form_names) else forms

    def all_reasons() -> tuple[Refusal, ...]:
        before = itertools.takewhile(lambda one: one is not form, considered_forms)
        told = (
            (x.name, reason_of(operator_name, x, place, structured, attributes))
            for x in before
            if place.platform in x.platforms
        )
        return (*reasons(), *(Refusal(name, reason) for name, reason in told if reason is not None))

    return Choice(None, False, all_reasons, form=form)


def placement_reason(split: str, platform: str) -> str | None:
    """Says why no kernel can run on operands that are split as `register.partitioning` says; None if one can."""
    if split == "mixed":
        return "inside a shard_map that leaves some mesh axes automatic, a kernel cannot be partitioned"
    if split == "auto" and platform == "tpu":
        return "on a TPU mesh with automatic axes a kernel cannot be partitioned: use shard_map or explicit axes"
    if split == "auto" and is_absent():
        return "with automatic axes a kernel is partitioned on GPUs that are here: use shard_map or explicit axes"
    return None


@dataclasses.dataclass(frozen=True)
class _Candidates:
    """The kernels that may run an equation, and why they do not.

    Attributes:
      operator: its name.
      kernels: in order of preference.
      mode: "auto", "pallas" or "interpret"; without kernels, any.
      kernel_name: of the kernel that was asked for; "" for any.
      hardware: the chip that is lowered for.
      operands: of the equation, as the operator takes them.
      attributes: the operator's attributes.
      placement_reason: why no kernel at all can run in this place, if so.
      evidence: what is known of the equation.
    """

    operator: str
    kernels: tuple[Kernel, ...]
    mode: str
    kernel_name: str
    hardware: Hardware
    operands: Sequence[Any]
    attributes: Mapping[str, Any]
    placement_reason: str | None
    evidence: Evidence

    def chosen(self) -> Kernel | None:
        """Returns the kernel that runs; None for a form in jnp."""
        if self.mode == "auto":
            return self._default()
        return next((kernel for kernel in self.kernels if self._refusal(kernel) is None), None)

    def refusals(self, chosen: Kernel | None) -> tuple[Refusal, ...]:
        """Says why each kernel before the chosen one does not run."""
        before = itertools.takewhile(lambda kernel: kernel is not chosen, self.kernels)
        return tuple(Refusal(kernel.name, self._refusal(kernel) or self._opt_in(kernel)) for kernel in before)

    def insist(self) -> bool:
        """Tells whether a user who asks for kernels wants an error where all refuse, not a form in jnp."""
        asked = (kernel for kernel in self.kernels if self.kernel_name or self._platform_reason(kernel) is None)
        present = set(present_names(self.operands))
        return any(not kernel.gives_way and present.isdisjoint(kernel.yields_to) for kernel in asked)

    def tuned_config(self, kernel: Kernel) -> Config | None:
        """Returns the configuration that was fastest, if the kernel offers it; None for the first."""
        tuned = self.evidence.entry
        best = tuned.best(kernel.name) if tuned is not None and tuned.key.versions == versions() else None
        if best is None:
            return None
        offered = map(config_items, kernel.configs(self.hardware, *self.operands, **self.attributes))
        return best.config if best.config in offered else None

    def _default(self) -> Kernel | None:
        """Returns the kernel that "auto" takes."""
        chip, may_favour = self.hardware, self.evidence.may_favour
        of_platform = [kernel for kernel in self.kernels if kernel.platform == chip.platform]
        # Nothing else is asked of kernels that could not be taken whatever the operands are.
        able = [kernel for kernel in of_platform if chip.name in kernel.measured_on or may_favour(kernel.name)]
        winner = self.evidence.measured.winner if able and self.evidence.measured else None
        if winner is not None:
            if winner.implementation == REFERENCE:
                return None
            tuned = next((kernel for kernel in able if kernel.name == winner.implementation), None)
            if tuned is not None and self._refusal(tuned) is None and self.tuned_config(tuned) is not None:
                return tuned
        free = (kernel for kernel in able if self._refusal(kernel) is None)
        return next((kernel for kernel in free if (found := self.verdict_on(kernel)) and found.is_taken), None)

    def verdict_on(self, kernel: Kernel) -> Verdict | None:
        """Returns whether "auto" takes a kernel that was not tuned at these shapes; None if nothing is known of it."""
        if self.hardware.name in kernel.measured_on:
            return Verdict(True, "")
        # On an explicit or automatic mesh a kernel sees a part of the operands, whose sizes are not known here.
        if not self.evidence.is_whole:
            return None
        known = self.evidence.measured_cases
        found = verdict(self.operator, kernel, self.hardware, self.operands, self.attributes, known)
        if found is None or not found.kind:
            return found
        seen = self.evidence.verification(kernel.name, found.kind)
        if seen is not None and seen.fault:
            insisting = f"use({self.operator}='pallas:{kernel.name}') takes it all the same"
            return Verdict(False, f"went wrong on this device on {seen.date}, {seen.fault}; {insisting}")
        if seen is None:
            return found._replace(reason=f"{found.reason}; {found.unseen}")
        return Verdict(True, f"{found.reason}; verified on this device on {seen.date}")

    def _refusal(self, kernel: Kernel) -> str | None:
        reason = self._platform_reason(kernel) or self.placement_reason or _size_reason(jax.tree.leaves(self.operands))
        if self.kernel_name and kernel.name != self.kernel_name:
            reason = f"{self.kernel_name} was asked for"
        minds_faults = self.mode != "interpret" and not self.kernel_name
        if reason is None and minds_faults and kernel.name in self.evidence.faults:
            insisting = f"use({self.operator}='pallas:{kernel.name}') takes it all the same"
            reason = f"went wrong on this device when it was tuned, {self.evidence.faults[kernel.name]}; {insisting}"
        chip = Hardware(kernel.platform, kernel.platform) if self.mode == "interpret" else self.hardware
        reason = reason or refusal_by_fields(kernel, self.operands)
        return reason or reason_of(self.operator, kernel, chip, self.operands, self.attributes)

    def _platform_reason(self, kernel: Kernel) -> str | None:
        if self.mode == "interpret":
            pure = kernel.interpreter_is_pure
            return None if pure else "its interpreter has side effects, which a primitive cannot have"
        return None if kernel.platform == self.hardware.platform else f"runs on {kernel.platform} only"

    def _opt_in(self, kernel: Kernel) -> str:
        """Says why "auto" does not take a kernel that would run."""
        tuned = self.evidence.entry
        is_replay = tuned is not None and tuned.replayed and tuned.key.versions == versions()
        remark = tuned.replay_remark(kernel.name) if tuned is not None and is_replay else None
        if remark:
            return f"opt-in: {remark}"
        undecided = "" if tuned is None or tuned.replayed else self._undecided(tuned)
        if tuned is not None and undecided is None:
            return tuned.against(kernel.name) or ""
        found = self.verdict_on(kernel)
        return f"opt-in: {'not measured on this target' if found is None else found.reason}{undecided}"

    def _undecided(self, tuned: Entry) -> str | None:
        """Says why what was tuned does not decide which kernel runs; None if it does."""
        winner = tuned.winner
        if tuned.key.versions != versions():
            measured_with = ", ".join(f"{name} {version}" for name, version in tuned.key.versions)
            return f"; what was tuned with {measured_with} does not count here"
        if winner is None:
            return "; tuning could compare nothing with the reference"
        if winner.implementation == REFERENCE:
            return None
        kernel = next((kernel for kernel in self.kernels if kernel.name == winner.implementation), None)
        if kernel is None:
            return f"; {winner.name} was tuned, but is not offered"
        if (refused := self._refusal(kernel)) is not None:
            return f"; {winner.name} was tuned, but {refused}"
        if self.tuned_config(kernel) is None:
            return f"; {winner.name} was tuned, but that is none of its configurations"
        return None


def form_for(
    operator: str,
    forms: Sequence[Form],
    request: str,
    place: Place,
    operands: Sequence[Any],
    attributes: Mapping[str, Any],
) -> Form | None:
    """Returns the form that runs where no kernel does; None for the reference.

    Raises:
      NotSupportedError: if a form was asked for by name and refuses.
    """
    for form in forms:
        if request == form.name:
            if (reason := reason_of(operator, form, place, operands, attributes)) is None:
                return form
            raise NotSupportedError(f"{form.name} was asked for, but {reason}", _RUNTIME_ERROR)
    default = (form for form in forms if place.platform in form.platforms)
    return next((form for form in default if reason_of(operator, form, place, operands, attributes) is None), None)


def _size_reason(operands: Sequence[Any]) -> str | None:
    for operand in operands:
        if any(map(jax.export.is_symbolic_dim, operand.shape)):
            return f"a kernel's blocks need sizes that are numbers; an operand is {list(operand.shape)}"
    return None
