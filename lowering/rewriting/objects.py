"""Arguments that a function may change while it runs: modules of Flax NNX, Python objects with a state."""

import sys
from typing import Any

import jax


class Arguments:
    """The arguments of a call as a pytree; what the call changes in them is written back by `update`."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        """Takes positional and keyword arguments."""
        self._nnx = sys.modules.get("flax.nnx")  # who has one of its modules has imported it
        leaves, self._structure = jax.tree.flatten((args, kwargs), is_leaf=self._is_object)
        self._is_object_at = [self._is_object(leaf) for leaf in leaves]
        self._objects = [leaf for leaf in leaves if self._is_object(leaf)]
        others = [leaf for leaf in leaves if not self._is_object(leaf)]
        self._graph: Any
        self._graph, state = self._nnx.split(self._objects) if self._nnx and self._objects else (None, ())
        self.tree = (others, state)

    def merged(self, tree: Any) -> tuple[Any, Any, Any]:
        """Returns positional and keyword arguments made of such a tree, and the new objects in them."""
        others, state = tree
        objects = self._nnx.merge(self._graph, state) if self._nnx and self._objects else []
        sources = {True: iter(objects), False: iter(others)}
        args, kwargs = jax.tree.unflatten(self._structure, [next(sources[at]) for at in self._is_object_at])
        return args, kwargs, objects

    def state(self, objects: Any) -> Any:
        """Returns what a call has left in the objects of `merged`."""
        return self._nnx.split(objects)[1] if self._nnx and self._objects else ()

    def update(self, state: Any) -> None:
        """Writes such a state into the objects of the call."""
        if self._nnx and self._objects:
            self._nnx.update(self._objects, state)

    def _is_object(self, leaf: Any) -> bool:
        return self._nnx is not None and isinstance(leaf, getattr(self._nnx, "Pytree", self._nnx.Object))
