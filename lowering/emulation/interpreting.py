"""Runs a function's kernels in Pallas' own interpreter, for a comparison with what is compiled."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.pallas import tpu

from lowering.emulation.api import checked, of_values
from lowering.emulation.emulator import Emulator


class _Interpreter(Emulator):
    """A chip whose kernels are interpreted as they are written."""

    def called(self, equation: Any, *arrays: Any) -> Sequence[Any]:
        """Computes the results of a kernel's call."""
        params = {**equation.params, "interpret": tpu.InterpretParams()}
        return equation.primitive.bind(*arrays, **equation.primitive.get_bind_params(params))


def interpret(fn: Callable[..., Any], *args: Any, target: str) -> Any:
    """Returns the results of a function whose kernels are interpreted; the arguments are those of `emulate`.

    Raises:
      EmulationError: as `emulate` does.
    """
    fn, arrays = of_values(fn, args)
    return jax.jit(_Interpreter(checked(target), checks=False).emulated(fn))(*arrays)
