"""Correctness of a kernel on one problem: against float64, bit by bit again, and in memory that holds poison."""

import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lowering.measurements import WRONG
from lowering.measuring.agreement import Results, failure, fault_of, on_host, truth_in_float64
from lowering.measuring.candidates import UNWATCHED, Candidate, Watch
from lowering.measuring.problems import Problem

# What results and temporaries hold before each run: a kernel that reads what it never wrote shows it.
_POISONS = (math.nan, math.nan, 7.0)


class Checker:
    """Judge of kernels on one problem, with the truth computed once."""

    def __init__(self, problem: Problem, watch: Watch = UNWATCHED) -> None:
        """Takes the problem, and who is told when a kernel runs and when it has run to its end."""
        self._problem, self._watch = problem, watch

    @functools.cached_property
    def _expected(self) -> Results:
        """The reference's results, and with them their dtypes."""
        return jax.block_until_ready(jax.jit(self._problem.meaning)(*self._problem.operands))

    @functools.cached_property
    def _truth(self) -> Results:
        return truth_in_float64(self._problem.meaning, self._problem.operands)

    def verdict(self, candidate: Candidate) -> tuple[str, str]:
        """Runs a kernel: "verified", "wrong" or "fails", and why."""
        try:
            # An interpreter is the same every time.
            poisons = _POISONS[:1] if candidate.is_slow else _POISONS
            repeats = [tuple(map(on_host, results)) for results in self._repeats(candidate, poisons)]
        except Exception as error:  # whatever a compiler or a device raises
            return "fails", failure(error)
        self._watch.ran()  # the reference may take long to compile, and the truth to compute
        reason = fault_of(repeats[0], self._expected, self._truth, self._problem.operands)
        for repeat, results in enumerate(repeats[1:], 2):
            for position, (x, y) in enumerate(zip(repeats[0], results, strict=True)):
                if not reason and x.tobytes() != y.tobytes():
                    reason = f"{WRONG}result {position} of run {repeat} is not that of run 1 bit by bit"
        return ("wrong", reason) if reason else ("verified", "")

    def _repeats(self, candidate: Candidate, poisons: Sequence[float]) -> list[Results]:
        """Returns the results of several runs, each written over poison that was there before."""
        operands = self._problem.operands
        # XLA writes results over donated operands of their types. A kernel in place writes over its own operands.
        types = () if candidate.in_place else tuple((x.shape, x.dtype) for x in self._expected)

        def program(poison: Any, *arrays: jax.Array) -> Results:
            return tuple(candidate.run(*arrays))

        donated = (0, *(1 + position for position in candidate.in_place))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            jitted = jax.jit(program, donate_argnums=donated, keep_unused=True)
            compiled = jitted.lower(_poison(types, math.nan), *operands).compile()
        memory = compiled.memory_analysis()
        temporary_bytes = 0 if memory is None else memory.temp_size_in_bytes
        found = []
        self._watch.runs()
        for value in poisons:
            arrays = candidate.arguments(operands)
            # The allocator gives freed memory to the next that asks for as much: the temporaries.
            jax.block_until_ready(jnp.full(temporary_bytes // 4, value, jnp.float32)).delete()
            found.append(jax.block_until_ready(compiled(_poison(types, value), *arrays)))
        return found


def _poison(types: Sequence[tuple[tuple[int, ...], Any]], value: float) -> list[jax.Array]:
    """Makes arrays of these types that hold nothing but a value; the largest integer stands for NaN."""
    arrays = []
    for shape, dtype in types:
        if jnp.issubdtype(dtype, jnp.integer) and math.isnan(value):
            arrays.append(jnp.full(shape, jnp.iinfo(dtype).max, dtype))
        else:
            arrays.append(jnp.full(shape, value, dtype))
    return arrays
