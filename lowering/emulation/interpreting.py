"""Runs a function's kernels in Pallas' own interpreter, for a comparison with what is compiled."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.pallas import tpu

from lowering import _jax_private
from lowering.emulation.api import checked, of_values
from lowering.emulation.emulator import Emulator
from lowering.emulation.evaluating import Place


class _Interpreter(Emulator):
    """A chip whose kernels are interpreted as they are written."""

    def called(self, equation: Any, place: Place, *arrays: Any) -> Sequence[Any]:
        """Computes the results of a kernel's call."""
        params = {**equation.params, "interpret": tpu.InterpretParams()}
        return equation.primitive.bind(*arrays, **equation.primitive.get_bind_params(params))


def interpret(fn: Callable[..., Any], *args: Any, target: str) -> Any:
    """Returns the results of a function whose kernels are interpreted; the arguments are those of `emulate`.

    Raises:
      EmulationError: as `emulate` does.
    """
    fn, arrays = of_values(fn, args)
    interpreted = jax.jit(_Interpreter(checked(target), checks=False).emulated(fn))
    with _jax_private.without_tracebacks_of_callbacks():
        return jax.block_until_ready(interpreted(*arrays))
