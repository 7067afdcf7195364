"""Evaluates a function with JAX on the CPU, and what some of its equations compute in another way."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, Literal

from lowering import _jax_private, cost
from lowering.rewriting import control_flow
from lowering.rewriting.graph import Node, opened
from lowering.source_lines import Site


class Place(NamedTuple):
    """Place of an equation: the line that made it, and the name of the jitted function around it."""

    site: Site | None = None
    function: str = ""

    @property
    def line(self) -> str:
        """The line in words; "" where none is known."""
        return self.site.line if self.site is not None else ""


# Computes the results of an equation from where it is, and its operands.
Replacement = Callable[..., Sequence[Any]]


class Evaluation:
    """Evaluates jaxprs, at any depth of loops, branches, calls and functions with a derivative of their own."""

    def __init__(self, replacement: Callable[[Any], Replacement | None]) -> None:
        """Takes what returns how to compute an equation's results; None where JAX evaluates it."""
        self._replacement = functools.cache(replacement)
        self._known: dict[Jaxpr, bool] = {}

    def run(self, closed: Any, *arrays: Any, around: Place) -> list[Any]:
        """Computes the results of a jaxpr, closed or not, which is called at a place."""
        jaxpr, constants = opened(closed)
        file = getattr(jaxpr.debug_info, "func_filename", None)
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arrays), strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else values[atom]

        for equation in jaxpr.eqns:
            site = Site(equation.source_info.traceback, around.site if file else None, file)
            results = self._results(equation, Place(site, around.function), [read(atom) for atom in equation.invars])
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _results(self, equation: Any, place: Place, operands: Sequence[Any]) -> Sequence[Any]:
        replacement = self._replacement(equation)
        traceback = equation.source_info.traceback
        if replacement is not None:
            with _jax_private.traced_at(traceback):
                return replacement(place, *operands)
        bodies = cost.bodies(equation)
        if not any(self._holds(opened(body)[0]) for body in bodies):
            return _jax_private.evaluate(equation, operands, traceback)
        node = Node(equation, (), (), Site(traceback, None, None))
        inner = control_flow.bodies_of(node)
        function = equation.params.get("name") or place.function
        run = functools.partial(self.run, around=Place(place.site, function))
        if inner:
            return control_flow.evaluate(node, [functools.partial(run, body) for body in inner], operands)
        # Of a function with a derivative of its own, only the value is asked for.
        return run(bodies[0], *operands)

    def _holds(self, jaxpr: Jaxpr) -> bool:
        if jaxpr not in self._known:
            self._known[jaxpr] = any(
                self._replacement(equation) is not None
                or any(self._holds(opened(body)[0]) for body in cost.bodies(equation))
                for equation in jaxpr.eqns
            )
        return self._known[jaxpr]
