"""Verification of a kernel on the device that is here, once, before "auto" first takes it by replays alone.

A small case of the same kind, and an odd one, run three times over poisoned memory and are compared with float64. They
run in a thread of their own, as JAX may be lowering something in this one, and a kernel that never ends must not stop
the program. What began and did not end, because the process did, counts as wrong next time.
"""

import datetime
import functools
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lowering import _jax_private, tuning_store
from lowering.errors import TuningError
from lowering.measurements import HANGS, WRONG, Measurement
from lowering.measuring.agreement import failure
from lowering.measuring.candidates import Machine
from lowering.measuring.checking import Checker
from lowering.measuring.problems import Problem
from lowering.operators import Operator, kind_of, unpacked
from lowering.register import verify_with
from lowering.targets import device_name
from lowering.tuning_store import Verification
from pallas_kernels.hardware import Hardware
from pallas_kernels.kernel import Kernel, Kind

VARIABLE = "JAXOPS_VERIFY"
MOST_SECONDS = 60.0
_MOST_ELEMENTS = 2**18  # of an operand, so that a verification takes about a second
_LEAST_SIZE = 8
_SECONDS_TO_WAIT = 20
_BEGUN = f"{WRONG}the process ended while it ran"
_lock = threading.Lock()


def verify(
    operator: Operator, kernel: Kernel, hardware: Hardware, operands: Sequence[Any], params: Mapping[str, Any]
) -> None:
    """Runs a kernel on small cases like this one, unless that has happened before, and keeps what came of it.

    Raises:
      TuningError: if the processes of `jax.distributed` have found different things.
    """
    target, kind = device_name(hardware), kind_of(kernel, hardware, *unpacked(operands, params))
    if target is None or kind is None or os.environ.get(VARIABLE) == "never":
        return
    key = operator.name, kernel.name, kind.text
    with _lock:
        if key in tuning_store.verifications(target):
            return
        _keep(target, key, _BEGUN)
        try:
            fault = _within(MOST_SECONDS, functools.partial(_fault, operator, kernel, hardware, operands, params, kind))
        except KeyboardInterrupt:
            _keep(target, key, None)
            raise
        _keep(target, key, fault)
        if fault:
            insisting = f"use({operator.name}='pallas:{kernel.name}') takes it all the same"
            message = f"{operator.name}: {kernel.name} is not taken on this device, {fault}; {insisting}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        _require_agreement(target, key)


def _keep(target: str, key: tuple[str, str, str], fault: str | None) -> None:
    """Keeps what is wrong with a kernel, "" for nothing; None forgets it."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    outcome = None if fault is None else Verification(fault, today)
    try:
        tuning_store.keep_verification(target, key, outcome)
    except TuningError as error:
        if fault == _BEGUN:
            message = f"{key[0]}: what is found of {key[1]} cannot be kept, so each process verifies it again: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=4)


def _require_agreement(target: str, key: tuple[str, str, str]) -> None:
    """Compares an outcome with that of the first process: programs that differ would wait for each other forever."""
    if not jax.distributed.is_initialized():
        return
    fault = tuning_store.verifications(target)[key].fault
    first = _jax_private.said_by_first_process(f"jaxops/verified/{target}/{key}", fault or "right", _SECONDS_TO_WAIT)
    if first not in (None, fault or "right"):
        own = f"process {jax.process_index()} found {key[1]} {fault or 'right'} and process 0 {first}"
        advice = f'use({key[0]}="reference") in all of them goes without it'
        raise TuningError(f"{key[0]}: a kernel must be right on the devices of all processes; {own}: {advice}")


def _within(seconds: float, work: Callable[[], str]) -> str:
    """Returns what a function says; if it does not end, that it does not."""
    said: list[str] = []
    # A daemon: a program may end while a kernel hangs.
    thread = threading.Thread(target=lambda: said.append(work()), name="verification of a kernel", daemon=True)
    thread.start()
    thread.join(seconds)
    return said[0] if said else f"{HANGS}no result within {seconds:g} s"


def _fault(
    operator: Operator,
    kernel: Kernel,
    hardware: Hardware,
    operands: Sequence[Any],
    params: Mapping[str, Any],
    kind: Kind,
) -> str:
    """Says what is wrong with a kernel on small cases of a kind; "" if nothing."""

    def is_alike(types: Sequence[Any]) -> bool:
        try:
            jax.eval_shape(functools.partial(operator.meaning, **params), *types)
            found = kind_of(kernel, hardware, *unpacked(types, params))
        except Exception:  # whatever an operator raises about sizes that do not fit each other
            return False
        return found is not None and found.text == kind.text

    try:
        for types in smaller([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands], params, is_alike):
            problem = Problem.of(operator, hardware, types, params).with_arrays()
            candidate = next(Machine(hardware).candidates_of(kernel, problem))
            if isinstance(candidate, Measurement):
                return f"{WRONG}{candidate.discarded}"
            outcome, fault = Checker(problem).verdict(candidate)
            if outcome != "verified":
                return fault if fault.startswith(WRONG) else f"{WRONG}{fault}"
    except Exception as error:  # whatever a device raises
        return f"{WRONG}{failure(error)}"
    return ""


def smaller(
    types: Sequence[Any], params: Mapping[str, Any], is_alike: Callable[[Sequence[Any]], bool]
) -> Iterator[Sequence[Any]]:
    """Yields operands of the same kind that are as small as halving their sizes makes them, and odd ones if they exist.

    Sizes that the operator's attributes name stay.
    """
    fixed = {int(number) for number in re.findall(r"\d+", repr(sorted(params.items(), key=str)))}
    sizes = {size for x in types for size in x.shape} - fixed
    for size in sorted(sizes, reverse=True):
        now = size
        while max(np.prod(x.shape) for x in types) > _MOST_ELEMENTS and now // 2 >= _LEAST_SIZE:
            less = _replaced(types, now, now // 2)
            if not is_alike(less):
                break
            types, now = less, now // 2
        odd = _replaced(types, now, now + 1 + now // 4)
        if now != size and is_alike(odd):
            yield odd
    yield types


def _replaced(types: Sequence[Any], size: int, other: int) -> list[Any]:
    return [jax.ShapeDtypeStruct([other if n == size else n for n in x.shape], x.dtype) for x in types]


verify_with(verify)
