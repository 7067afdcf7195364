"""Checks of what authors of operators write: platforms of kernels and forms, configurations, and results."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from lowering.describe import one_of, show
from lowering.operators import Form, type_text
from lowering.targets import PLATFORMS, TARGETS
from pallas_kernels.hardware import Hardware
from pallas_kernels.kernel import Config, Kernel


def require_sound(operator: str, kernels: Iterable[Kernel], forms: Iterable[Form] = ()) -> None:
    """Refuses kernels and forms for what does not exist, and those that could not be run or told apart."""
    every: tuple[Kernel | Form, ...] = (*(kernels := tuple(kernels)), *forms)
    for one in every:
        same = [other for other in every if (other.name, _platform(other)) == (one.name, _platform(one))]
        if len(same) > 1:
            raise ValueError(
                f"{operator}: name of a kernel or form must be its own on a platform; got {one.name} twice"
            )
        for field in ("run", "refuses", "configs"):
            if not callable(given := getattr(one, field, print)):
                raise TypeError(f"{operator}: {field} of {one.name} must be a function; got {show(given)}")
    for kernel in kernels:
        _require_among(PLATFORMS, kernel.platform, f"{operator}: platform of {kernel.name}")
        _require_among(TARGETS, kernel.measured_on, f"{operator}: measured_on of {kernel.name}")
        _require_keywords(kernel.run, ("config", "interpret"), f"{operator}: run of {kernel.name}")
    for form in forms:
        _require_among(PLATFORMS, form.platforms, f"{operator}: platforms of {form.name}")
        _require_keywords(form.run, ("place",), f"{operator}: run of {form.name}")


def _platform(implementation: Kernel | Form) -> str:
    return implementation.platform if isinstance(implementation, Kernel) else ""


def _require_among(known: Iterable[str], given: Iterable[Any], what: str) -> None:
    for name in (given,) if isinstance(given, str) else given:
        if name not in known:
            raise ValueError(f"{what} must be {one_of(known, name)}")


def _require_keywords(run: Callable[..., Any], names: Sequence[str], what: str) -> None:
    # `inspect.signature` of all kernels would take milliseconds of an import, and this microseconds.
    code = getattr(run, "__code__", None)
    if code is not None and not code.co_flags & inspect.CO_VARKEYWORDS:
        takes = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if not set(names) <= set(takes):
            raise TypeError(f"{what} must take {' and '.join(names)} by name; got ({', '.join(takes)})")


def reason_of(
    operator: str, implementation: Kernel | Form, place: Any, operands: Sequence[Any], params: Mapping[str, Any]
) -> str | None:
    """Says why an implementation refuses operands; None if it takes them.

    Raises:
      TypeError: if the reason is not a string.
    """
    reason = implementation.refuses(place, *operands, **params)
    if reason is not None and not isinstance(reason, str):
        must = "return None or the reason in words"
        raise TypeError(f"{operator}: refuses of {implementation.name} must {must}; got {show(reason)}")
    return reason


def configs_of(
    operator: str, kernel: Kernel, hardware: Hardware, operands: Sequence[Any], attributes: Mapping[str, Any]
) -> Sequence[Config]:
    """Returns the configurations of a kernel that does not refuse: one at least, the default first.

    Raises:
      ValueError: if it has none.
    """
    offered = kernel.configs(hardware, *operands, **attributes)
    if not (isinstance(offered, Sequence) and all(isinstance(config, Mapping) for config in offered)):
        raise TypeError(f"{operator}: configs of {kernel.name} must return a sequence of dicts; got {show(offered)}")
    if not offered:
        types = map(_type, jax.tree.leaves(operands))
        rule = "offer one at least for what it does not refuse"
        raise ValueError(f"{operator}: configs of {kernel.name} must {rule}; got none for {', '.join(types)}")
    return offered


def returning(results: Sequence[Any], what: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fn`, whose results must have the types of the reference's.

    Args:
      results: the types of what the reference returns.
      what: the implementation, for the message: "<operator>: <name>".
      fn: evaluates it, as a function of arrays.
    """

    def checked(*arrays: Any) -> Any:
        found = fn(*arrays)
        expected, got = ([_type(x) for x in each] for each in (results, found))
        if expected != got:
            rule = f"return {', '.join(expected)}, as the reference does"
            raise TypeError(f"{what} must {rule}; got {', '.join(got) or 'nothing'}")
        return found

    return checked


def _type(x: Any) -> str:
    if isinstance(x, bool | int | float | complex):  # arrays to JAX
        x = jax.typeof(x)
    return type_text(x) if hasattr(x, "dtype") else show(x)
