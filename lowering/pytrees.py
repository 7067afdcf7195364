"""Says why JAX cannot flatten a pytree, before JAX says it in its own way."""

from typing import Any

import jax

from lowering.describe import first_line


def flattening_fault(tree: Any) -> str | None:
    """Says what makes it impossible to flatten this; None if it is a pytree."""
    try:
        jax.tree.structure(tree)
    except Exception as error:  # nodes of users' own types may raise anything
        cause = error.__cause__ or error  # JAX raises SystemError and ValueError from what went wrong
        if isinstance(cause, RecursionError):
            return "one that contains itself, or is nested too deeply"
        if cause is not error and isinstance(cause, TypeError):
            return "one with a dict whose keys cannot be sorted"
        return f"one with a node that fails: {first_line(cause)}"
    return None
