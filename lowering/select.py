"""Which implementation of an operator a target gets, and why the others were refused."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from lowering.errors import NotSupportedError
from lowering.measurements import REFERENCE, Config, Entry, config_items, config_text, versions
from pallas_kernels.hardware import Hardware
from pallas_kernels.kernel import Kernel

MODES = ("auto", "reference", "pallas", "interpret")
_RUNTIME_ERROR = 361001  # CANN's status for "unsupported on this platform"


@dataclasses.dataclass(frozen=True)
class Selection:
    """What the user asked for: a default, exceptions for single operators, and what was tuned.

    Each request is one of MODES; "pallas" and "interpret" may name a kernel, as in "pallas:mosaic_gpu".
    """

    default: str = "auto"
    by_operator: tuple[tuple[str, str], ...] = ()
    tuned: tuple[Entry, ...] = ()

    def request(self, operator_name: str) -> str:
        """What was asked for this operator."""
        return dict(self.by_operator).get(operator_name, self.default)

    def __repr__(self) -> str:
        tuned = [f"tuned={len(self.tuned)}"] if self.tuned else []
        return " ".join([self.default, *(f"{name}={request}" for name, request in self.by_operator), *tuned])


# Filled by `lowering.register`, so that a misspelt name is noticed.
operator_names: set[str] = set()

# A user context, and not a plain global, because it is part of jit's cache key: a function that was traced under one
# selection is traced again under another.
_selection = jax.make_user_context(Selection())


def current_selection() -> Selection:
    """What the innermost `use` asks for."""
    return _selection.value


@contextlib.contextmanager
def using(selection: Selection) -> Iterator[None]:
    """Makes exactly this selection the current one."""
    with _selection(selection):
        yield


def use(implementation: str | None = None, /, **by_operator: str) -> contextlib.AbstractContextManager[None]:
    """Chooses how operators are implemented in the code that is traced within the context.

    The choice is made while tracing and is part of `jax.jit`'s cache key, so that one function can be compiled under
    several. Contexts nest; the inner one wins where both speak.

    Args:
      implementation: for every operator. "auto" takes what was tuned for exactly these shapes; where nothing was, the
        first kernel that was measured at least as fast as the reference on the target and does not refuse, else the
        reference. "reference" takes the jnp form. "pallas" takes
        the first kernel that does not refuse, measured or not, wherever an operator has kernels for the platform.
        "interpret" runs a kernel in Pallas' interpreter, on any machine. None leaves the surrounding choice as it is.
      **by_operator: the same for one operator, by its name, as in `use(apply_fused_ema_adam="pallas")`. After a colon,
        "pallas" and "interpret" take the name of the kernel: "interpret:mosaic_gpu".

    Raises:
      ValueError: for an unknown implementation or operator, at once.
      NotSupportedError: while lowering, if a kernel was asked for and all of the operator's kernels for the platform
        refuse. The message holds each kernel's reason.
    """
    for request in [*([] if implementation is None else [implementation]), *by_operator.values()]:
        if not _is_request(request):
            raise ValueError(f"use: implementation must be one of {', '.join(MODES)}; got {_shown(request)}")
    for name in by_operator:
        if name not in operator_names:
            raise ValueError(f"use: operator must be one of {', '.join(sorted(operator_names))}; got {name!r}")
    return _used(implementation, by_operator)


@contextlib.contextmanager
def _used(implementation: str | None, by_operator: Mapping[str, str]) -> Iterator[None]:
    outer = current_selection()
    merged = dict(outer.by_operator) if implementation is None else {}
    merged.update(by_operator)
    with using(Selection(implementation or outer.default, tuple(sorted(merged.items())), outer.tuned)):
        yield


def _shown(request: Any) -> str:
    return repr(request) if isinstance(request, str) else f"a value of type {type(request).__name__}"


def _is_request(request: Any) -> bool:
    mode, colon, kernel_name = request.partition(":") if isinstance(request, str) else ("", "", "")
    return mode in MODES and (not colon or (bool(kernel_name) and mode in ("pallas", "interpret")))


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A kernel that was not taken, and the reason."""

    kernel: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Choice:
    """The kernel taken, or None for the reference; whether it is interpreted; and what was refused before it.

    `config` is the kernel's tuned configuration; None leaves the kernel its first.
    """

    kernel: Kernel | None
    interpret: bool
    refusals: tuple[Refusal, ...]
    config: Config | None = None

    @property
    def implementation(self) -> str:
        """What `explain` calls it."""
        if self.kernel is None:
            return REFERENCE
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
    obstacle: str | None = None,
    tuned: Entry | None = None,
) -> Choice:
    """Takes what was tuned, else the first kernel that does not refuse, else the reference.

    Args:
      operator_name: for the error.
      kernels: in order of preference.
      request: what the user asked for, as in `Selection`.
      hardware: what is being lowered for, which need not be what is here.
      operands: anything with shape and dtype.
      params: the operator's attributes.
      obstacle: why no kernel at all can be used in this place, if so.
      tuned: what was measured of this operator with these operands and attributes on this hardware.

    Raises:
      NotSupportedError: if a kernel was asked for and every candidate refuses.
    """
    mode, _, kernel_name = request.partition(":")

    def refusal(kernel: Kernel) -> str | None:
        reason = _platform_reason(kernel, mode, hardware) or obstacle or _size_reason(operands)
        if kernel_name and kernel.name != kernel_name:
            reason = f"{kernel_name} was asked for"
        chip = Hardware(kernel.platform, kernel.platform) if mode == "interpret" else hardware
        return reason or kernel.refuses(chip, *operands, **params)

    def config_of(kernel: Kernel) -> Config | None:
        best = tuned.best(kernel.name) if tuned is not None and tuned.key.versions == versions() else None
        offered = [config_items(config) for config in kernel.configs(hardware, *operands, **params)] if best else []
        return best.config if best is not None and best.config in offered else None

    setback = (
        None if tuned is None or tuned.replayed or mode != "auto" else _setback(tuned, kernels, refusal, config_of)
    )
    refusals: list[Refusal] = []
    for kernel in kernels if mode != "reference" else ():
        reason = refusal(kernel)
        if reason is None and mode == "auto":
            reason = _automatic_reason(kernel, hardware, tuned, setback)
        if reason is None:
            return Choice(
                kernel, mode == "interpret", tuple(refusals), None if mode == "interpret" else config_of(kernel)
            )
        refusals.append(Refusal(kernel.name, reason))
    has_candidates = any(_platform_reason(kernel, mode, hardware) is None for kernel in kernels)
    if mode in ("pallas", "interpret") and (has_candidates or (kernel_name and kernels)):
        reasons = "; ".join(f"{refusal.kernel}: {refusal.reason}" for refusal in refusals)
        message = (
            f"{operator_name}: implementation must be one that {hardware.name} can take; got {request!r} ({reasons})"
        )
        raise NotSupportedError(message, _RUNTIME_ERROR)
    return Choice(None, False, tuple(refusals))


def _platform_reason(kernel: Kernel, mode: str, hardware: Hardware) -> str | None:
    if mode == "interpret":
        return None if kernel.interpreter_is_pure else "its interpreter has side effects, which a primitive cannot have"
    return None if kernel.platform == hardware.platform else f"runs on {kernel.platform} only"


def _size_reason(operands: Sequence[Any]) -> str | None:
    for operand in operands:
        if any(map(jax.export.is_symbolic_dim, operand.shape)):
            return f"a kernel's blocks need sizes that are numbers; an operand is {list(operand.shape)}"
    return None


def _setback(
    tuned: Entry,
    kernels: Sequence[Kernel],
    refusal: Callable[[Kernel], str | None],
    config_of: Callable[[Kernel], Config | None],
) -> str | None:
    """Why what was measured does not decide; None if it does."""
    winner = tuned.winner
    if tuned.key.versions != versions():
        measured_with = ", ".join(f"{name} {version}" for name, version in tuned.key.versions)
        return f"what was tuned with {measured_with} does not count here"
    if winner is None:
        return "tuning could compare nothing with the reference"
    if winner.implementation == REFERENCE:
        return None
    for kernel in kernels:
        if kernel.name == winner.implementation:
            reason = refusal(kernel)
            if reason is None and config_of(kernel) is None:
                reason = "that is none of its configurations"
            return reason and f"{winner.name} was tuned, but {reason}"
    return f"{winner.name} was tuned, but is not offered"


def _automatic_reason(kernel: Kernel, hardware: Hardware, tuned: Entry | None, setback: str | None) -> str | None:
    if tuned is not None and setback is None and not tuned.replayed:
        return tuned.against(kernel.name)
    if hardware.name in kernel.measured_on:
        return None
    if tuned is not None and tuned.replayed and (remark := tuned.replay_remark(kernel.name)):
        return f"opt-in: {remark}"
    return "opt-in: not measured on this target" + (f"; {setback}" if setback else "")
