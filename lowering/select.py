"""Which implementation of an operator a target gets, and why the others were refused."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from lowering.errors import NotSupportedError
from pallas_kernels.hardware import Hardware
from pallas_kernels.kernel import Kernel

MODES = ("auto", "reference", "pallas", "interpret")
_RUNTIME_ERROR = 361001  # CANN's status for "unsupported on this platform"


@dataclasses.dataclass(frozen=True)
class Selection:
    """What the user asked for: a default, and exceptions for single operators.

    Each request is one of MODES; "pallas" and "interpret" may name a kernel, as in "pallas:mosaic_gpu".
    """

    default: str = "auto"
    by_operator: tuple[tuple[str, str], ...] = ()

    def request(self, operator_name: str) -> str:
        """What was asked for this operator."""
        return dict(self.by_operator).get(operator_name, self.default)

    def __repr__(self) -> str:
        return " ".join([self.default, *(f"{name}={request}" for name, request in self.by_operator)])


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


@contextlib.contextmanager
def use(implementation: str | None = None, /, **by_operator: str) -> Iterator[None]:
    """Chooses how operators are implemented in the code that is traced within the context.

    The choice is made while tracing and is part of `jax.jit`'s cache key, so that one function can be compiled under
    several. Contexts nest; the inner one wins where both speak.

    Args:
      implementation: for every operator. "auto" takes the first kernel that was measured at least as fast as the
        reference on the target and does not refuse, else the reference. "reference" takes the jnp form. "pallas" takes
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
            raise ValueError(f"use: implementation must be one of {', '.join(MODES)}; got {request!r}")
    for name in by_operator:
        if name not in operator_names:
            raise ValueError(f"use: operator must be one of {', '.join(sorted(operator_names))}; got {name!r}")
    outer = current_selection()
    merged = dict(outer.by_operator) if implementation is None else {}
    merged.update(by_operator)
    with using(Selection(implementation or outer.default, tuple(sorted(merged.items())))):
        yield


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
    """The kernel taken, or None for the reference; whether it is interpreted; and what was refused before it."""

    kernel: Kernel | None
    interpret: bool
    refusals: tuple[Refusal, ...]

    @property
    def implementation(self) -> str:
        """What `explain` calls it."""
        if self.kernel is None:
            return "reference"
        return f"{self.kernel.name} (interpreted)" if self.interpret else self.kernel.name


def choose(
    operator_name: str,
    kernels: Sequence[Kernel],
    request: str,
    hardware: Hardware,
    operands: Sequence[Any],
    params: Mapping[str, Any],
    obstacle: str | None = None,
) -> Choice:
    """Takes the first kernel that does not refuse, else the reference.

    Args:
      operator_name: for the error.
      kernels: in order of preference.
      request: what the user asked for, as in `Selection`.
      hardware: what is being lowered for, which need not be what is here.
      operands: anything with shape and dtype.
      params: the operator's attributes.
      obstacle: why no kernel at all can be used in this place, if so.

    Raises:
      NotSupportedError: if a kernel was asked for and every candidate refuses.
    """
    mode, _, kernel_name = request.partition(":")
    refusals: list[Refusal] = []
    for kernel in kernels if mode != "reference" else ():
        reason = _platform_reason(kernel, mode, hardware) or obstacle
        if kernel_name and kernel.name != kernel_name:
            reason = f"{kernel_name} was asked for"
        if reason is None:
            chip = Hardware(kernel.platform, kernel.platform) if mode == "interpret" else hardware
            reason = kernel.refuses(chip, *operands, **params)
        if reason is None and mode == "auto" and hardware.name not in kernel.measured_on:
            reason = "opt-in: not measured on this target"
        if reason is None:
            return Choice(kernel, mode == "interpret", tuple(refusals))
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
