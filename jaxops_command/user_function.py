"""Functions in a user's own file, as the command line names them, with arguments to trace them with."""

import contextlib
import functools
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._checks.arguments import OperatorError
from jaxops_command.options import CommandError, dtype_and_shape, file_and_name, require
from lowering import ArtifactError, CompileError, EmulationError, PlanError, TuningError, operators, use
from lowering.describe import counted, first_line, meant, opening
from lowering.errors import UsageError
from lowering.functions import require_function


def load(location: str, arguments: Sequence[str] = ()) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Finds a function and the arguments to trace it with.

    Args:
      location: "FILE.py:FUNCTION".
      arguments: "DTYPE[SHAPE]" for each argument of the function, such as "float32[128,64]", or "i32[]" for a scalar.
        If empty: the file's FUNCTION_args, else its example_args (a tuple, or a function without parameters that
        returns one), else no arguments.

    Raises:
      CommandError: if the file or function does not exist, the file fails, or the arguments do not fit the function.
    """
    fn, args, _ = load_with(location, arguments, "")
    return fn, args


def load_with(
    location: str, arguments: Sequence[str], companion: str
) -> tuple[Any, tuple[Any, ...], Callable[..., Any] | None]:
    """Loads a function, its arguments, and the file's FUNCTION_companion, else companion; None if it has neither.

    With a companion, FUNCTION may be a dict of functions.
    """
    module, fn = _loaded(location, may_be_several=bool(companion))
    name = location.rpartition(":")[2]
    args = tuple(_parse(argument) for argument in arguments) or _example_arguments(module, name)
    for one in fn.values() if isinstance(fn, Mapping) else [fn]:
        _require_callable_with(one, name, args)
    return fn, args, _companion(module, name, companion)


def load_another(
    location: str, args: tuple[Any, ...], *, may_have_own: bool
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Finds a second function; it takes the arguments of the first, or its file's FUNCTION_args where it may."""
    module, fn = _loaded(location)
    name = location.rpartition(":")[2]
    args = _example_arguments(module, name) if may_have_own and hasattr(module, f"{name}_args") else args
    _require_callable_with(fn, name, args)
    return fn, args


def require_operators(by_operator: Mapping[str, str]) -> None:
    """Refuses OPERATOR=NAME of an operator that neither this library nor the user's code has."""
    for name in by_operator:
        rule = "name an operator that `jaxops ops` lists, as in dropout=reference"
        require(name in operators.names(), "--implementation", rule, repr(name), meant(name, operators.names()))


def chosen_by(chosen: tuple[str, Mapping[str, Any]]) -> contextlib.AbstractContextManager[None]:
    """Returns a context of the operators that --implementation names; call it after the user's code is loaded."""
    name, by_operator = chosen
    require_operators(by_operator)
    return use(name, **by_operator)


def run_user_code(subject: str, rule: str, code: Callable[[], Any]) -> Any:
    """Returns the result of `code()`. An operator's refusal keeps its own words; any other error becomes one line."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what the user's code prints is not part of our output
            return code()
    except CommandError:
        raise
    except (OperatorError, ArtifactError, CompileError, EmulationError, PlanError, TuningError) as error:
        message = re.sub(r"^(lowering\.compile|lowering\.emulate|export|load|plan|save|tune): ", "", str(error))
        raise CommandError(
            re.sub(r'use\("(\S+)", (\w+)="reference"\)', r"--implementation \1,\2=reference", message)
        ) from None
    except UsageError as error:
        raise CommandError(re.sub(r"^lowering: (fn|args)", subject, str(error))) from None
    except (Exception, SystemExit) as error:
        # Without a device, JAX fails wherever it first looks for one.
        trouble = device_trouble()
        message = opening(f"{type(error).__name__}: {error}".removesuffix(": "), "a call in Python")
        raise CommandError(trouble or f"{subject} must {rule}; got {message}") from None


def device_trouble() -> str:
    """Says why JAX finds no device at all, and what helps; empty if it finds one."""
    try:
        jax.devices()
    except Exception as error:  # JAX raises several kinds, AssertionError among them
        asked = os.environ.get("JAX_PLATFORMS", "")
        found = f"no device with JAX_PLATFORMS={asked}" if asked else "no device"
        helps = "without JAX_PLATFORMS it takes what there is" if asked else "JAX_PLATFORMS=cpu runs without one"
        return f"JAX finds {found}, {first_line(error)}: {helps}"
    return ""


def _loaded(location: str, may_be_several: bool = False) -> tuple[ModuleType, Any]:
    path, name = file_and_name(location)
    file = str(path)
    module = run_user_code(file, "be importable", lambda: _import(path))
    fn = getattr(module, name, None)
    several = list(fn.values()) if may_be_several and isinstance(fn, Mapping) else [fn]
    if not several or not all(map(callable, several)):
        kind = "a function, or a dict of functions," if may_be_several else "a function"
        others = [one for one, value in vars(module).items() if callable(value) and not one.startswith("_")]
        raise CommandError(f"FILE.py:FUNCTION must name {kind} of {file}; got {name!r}{meant(name, others)}")
    for one in several:
        run_user_code(location, "be a function", functools.partial(require_function, one))
    return module, fn


def _require_callable_with(fn: Callable[..., Any], name: str, args: Sequence[Any]) -> None:
    try:
        inspect.signature(fn).bind(*args)
    except ValueError:  # some functions written in C say nothing of their arguments
        pass
    except TypeError as error:
        advice = f"pass one --arg for each argument, or define {name}_args or example_args in the file"
        if not args:
            raise CommandError(f"{name} needs arguments: {advice}") from None
        given = f"{counted(len(args), 'argument')} ({error})"
        raise CommandError(f"{name} must take the arguments that are given; got {given}: {advice}") from None


def _import(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"nothing loads {path}")
    module = importlib.util.module_from_spec(spec)
    # The file can import its neighbours, as when Python runs it.
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    return module


def _companion(module: ModuleType, name: str, companion: str) -> Callable[..., Any] | None:
    found = next((one for one in (f"{name}_{companion}", companion) if hasattr(module, one)), None)
    if found is None:
        return None
    require(callable(getattr(module, found)), found, "be a function", type(getattr(module, found)).__name__)
    return getattr(module, found)


def _example_arguments(module: ModuleType, name: str) -> tuple[Any, ...]:
    source = f"{name}_args" if hasattr(module, f"{name}_args") else "example_args"
    args = getattr(module, source, ())
    if callable(args):
        args = run_user_code(source, "return the arguments", args)
    require(isinstance(args, tuple), source, "be a tuple, or a function that returns one", type(args).__name__)
    return args


def _parse(argument: str) -> jax.ShapeDtypeStruct:
    dtype, shape = dtype_and_shape(argument)
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
