"""Rebuilds the pytrees that an exported function returned, also in a process that has nothing but the artifact's file.

A file holds no classes. But what a train step returns is mostly what it took: states of optimizers and models, whose
classes and static data the caller's own arguments have. For the rest the file has names.
"""

import collections
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.tree_util import DictKey, GetAttrKey, PyTreeDef

from lowering.artifact_arguments import leaves_with_paths
from lowering.static_leaves import FixedLeaf

_LEAF, _LIST, _TUPLE = "leaf", "list", "tuple"


@dataclasses.dataclass(frozen=True)
class Node:
    """A node of the results that is neither a list nor a tuple: a dict, a NamedTuple, a dataclass, or another class.

    Attributes:
      type: its class, as "module:qualified.name".
      keys: the names of its children if they are attributes, the keys if they are items, else their number.
      is_mapping: whether the children are items.
      like: where the arguments have a node of this class with this static data, as the position among the children of
        each node on the way; None if nowhere.
      structure: the node without its children; None in another process than that of the export.
    """

    type: str
    keys: tuple[Any, ...] | int
    is_mapping: bool
    like: tuple[int, ...] | None
    structure: PyTreeDef | None = None

    def filled(self, children: Sequence[Any], args: Any) -> Any:
        """Returns this node with other children, of the class that the caller's arguments have there."""
        template = None if self.like is None else _node_at(args, self.like)
        structure = self.structure if template is None else _structure(template)
        if structure is not None and structure.num_leaves == len(children):
            return structure.unflatten(children)
        if isinstance(self.keys, int):
            return tuple(children)
        if self.is_mapping:
            return dict(zip(self.keys, children, strict=True))
        return self._of_fields(self.keys, children)

    def _of_fields(self, names: tuple[str, ...], children: Sequence[Any]) -> Any:
        module, _, qualified_name = self.type.partition(":")
        # Not imported: a file should not decide which code runs.
        found: Any = functools.reduce(
            lambda at, name: getattr(at, name, None), qualified_name.split("."), sys.modules.get(module)
        )
        if _fields(found) == {*names}:
            if issubclass(found, tuple):
                return found(**dict(zip(names, children, strict=True)))
            # A constructor may check or change what it is given.
            built = object.__new__(found)
            for name, child in zip(names, children, strict=True):
                object.__setattr__(built, name, child)
            return built
        return _stand_in(qualified_name.rpartition(".")[2], names)(*children)


@dataclasses.dataclass(frozen=True)
class Results:
    """The pytree that a function returns, without its leaves.

    Attributes:
      tree: the tree as JSON: "leaf"; null; the path of a fixed leaf of the arguments; a list or tuple with its kind
        before its children; or the position of a node in `nodes`, and its children.
      nodes: the nodes that are neither lists nor tuples.
    """

    tree: Any
    nodes: tuple[Node, ...]

    @classmethod
    def of(cls, results: Any, args: tuple[Any, ...]) -> "Results":
        """Describes the tree of the results of a function of these arguments; leaves may be anything."""
        known = [*_nodes(args, ())]
        nodes: list[Node] = []

        def tree_of(at: Any) -> Any:
            if at is None:
                return None
            if isinstance(at, FixedLeaf):
                return {"fixed": at.path}
            children = _children(at)
            if children is None:
                return _LEAF
            trees = [tree_of(child) for _, child in children]
            if type(at) in (list, tuple):
                return [_LIST if type(at) is list else _TUPLE, *trees]
            nodes.append(_described(at, [key for key, _ in children], known))
            return {"node": len(nodes) - 1, "children": trees}

        return cls(tree_of(results), tuple(nodes))

    @classmethod
    def from_json(cls, record: Any) -> "Results":
        """Reads the results that `to_json` wrote."""
        nodes = [Node(**{name: _hashable(value) for name, value in node.items()}) for node in record["nodes"]]
        return cls(record["tree"], tuple(nodes))

    def to_json(self) -> Any:
        """Returns all but the structures, for which JSON has no place."""
        names = [one.name for one in dataclasses.fields(Node) if one.name != "structure"]
        return {"tree": self.tree, "nodes": [{name: getattr(node, name) for name in names} for node in self.nodes]}

    def filled(self, leaves: Iterator[Any], args: tuple[Any, ...]) -> Any:
        """Builds the results of a call, from their leaves and the arguments of the call."""
        by_path = functools.cache(lambda: dict(leaves_with_paths(args)))
        return self._filled(self.tree, leaves, args, lambda path: by_path().get(path))

    def _filled(self, tree: Any, leaves: Iterator[Any], args: tuple[Any, ...], fixed: Callable[[str], Any]) -> Any:
        if tree is None:
            return None
        if tree == _LEAF:
            return next(leaves)
        if isinstance(tree, dict) and "fixed" in tree:
            return fixed(tree["fixed"])
        if isinstance(tree, dict):
            children = [self._filled(child, leaves, args, fixed) for child in tree["children"]]
            return self.nodes[tree["node"]].filled(children, args)
        kind, *trees = tree
        children = [self._filled(child, leaves, args, fixed) for child in trees]
        return children if kind == _LIST else tuple(children)


def _described(at: Any, keys: list[Any], known: list[tuple[tuple[int, ...], PyTreeDef]]) -> Node:
    """Describes a node of the results; `known` are those of the arguments."""
    structure = _structure(at)
    like = next((place for place, one in known if one == structure), None)
    kind = f"{type(at).__module__}:{type(at).__qualname__}"
    if isinstance(at, Mapping) and all(isinstance(key, DictKey) for key in keys):
        return Node(kind, tuple(key.key for key in keys), True, like, structure)
    if all(isinstance(key, GetAttrKey) for key in keys):
        return Node(kind, tuple(key.name for key in keys), False, like, structure)
    return Node(kind, len(keys), False, like, structure)


def _nodes(at: Any, place: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], PyTreeDef]]:
    """Yields the places and structures of all nodes that are neither lists nor tuples."""
    children = _children(at)
    if children is None:
        return
    if type(at) not in (list, tuple):
        yield place, _structure(at)
    for position, (_, child) in enumerate(children):
        yield from _nodes(child, (*place, position))


def _node_at(args: Any, place: Sequence[int]) -> Any:
    """Returns the node at a place in a caller's arguments; None if they have none there."""
    at = args
    for position in place:
        children = _children(at) or []
        if position >= len(children):
            return None
        at = children[position][1]
    return at


def _children(at: Any) -> list[tuple[Any, Any]] | None:
    """Returns the children of a node with their keys; None for a leaf."""
    if at is None or jax.tree_util.all_leaves([at]):
        return None
    flat, _ = jax.tree_util.tree_flatten_with_path(at, is_leaf=lambda x: x is not at)
    return [(path[0], child) for path, child in flat]


def _structure(at: Any) -> PyTreeDef:
    """Returns a node's structure with its children as leaves."""
    structure: PyTreeDef = jax.tree.structure(at, is_leaf=lambda x: x is not at)
    return structure


def _fields(found: Any) -> set[str] | None:
    """Returns the fields of a NamedTuple or a dataclass; None for anything else."""
    if not isinstance(found, type):
        return None
    if dataclasses.is_dataclass(found):
        return {one.name for one in dataclasses.fields(found)}
    return {*getattr(found, "_fields", ())} if issubclass(found, tuple) else None


@functools.cache
def _stand_in(name: str, fields: tuple[str, ...]) -> Any:
    """Makes a NamedTuple in place of a class that is not known here: same attributes, same paths as arguments."""
    return collections.namedtuple(name, fields, rename=True)


def _hashable(value: Any) -> Any:
    """Turns lists, which JSON has for tuples, back into tuples."""
    return tuple(map(_hashable, value)) if isinstance(value, list) else value
