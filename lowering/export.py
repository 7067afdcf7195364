"""Exports a function for several platforms at once, each with its own implementation of every operator."""

import dataclasses
import functools
import json
import os
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export

from lowering import static_leaves
from lowering.artifact_arguments import Expected, fixed_text, types_by_path
from lowering.artifact_results import Results
from lowering.compiling.compile import flattened
from lowering.compiling.report import UNCHECKED_CALLS
from lowering.describe import file_fault, shortened, show
from lowering.errors import ArtifactError
from lowering.explain import operator_uses
from lowering.measurements import versions
from lowering.targets import PLATFORMS, named, platform_here

_FORMAT = 4
_PROGRAM, _METADATA = "program", "metadata.json"


@dataclasses.dataclass(frozen=True)
class Artifact:
    """A function as StableHLO for one or more platforms, with compiled Pallas kernels inside.

    Attributes:
      platforms: any of "cpu", "cuda" and "tpu".
      versions: of JAX, and of this library if it is installed, at the time of the export.
      implementations: what each operator runs as, by platform and then by operator.
      arguments: the type of each array argument, such as "float32[8,128]", by its path, such as `args[0]['weight']`.
      fixed: the Python numbers and strings among the arguments that are fixed, as text, by path.
      stablehlo: the text of the program.
    """

    platforms: tuple[str, ...]
    versions: dict[str, str]
    implementations: dict[str, dict[str, list[str]]]
    arguments: dict[str, str]
    fixed: dict[str, str]
    _arg_count: int = dataclasses.field(repr=False)
    _exported: jax.export.Exported = dataclasses.field(repr=False)
    _results: Results = dataclasses.field(repr=False)

    def __repr__(self) -> str:
        counts = f"{len(self.arguments)} arrays, {len(next(iter(self.implementations.values())))} operators"
        return f"Artifact for {', '.join(self.platforms)}: {counts}, exported with JAX {self.versions.get('jax')}"

    @property
    def stablehlo(self) -> str:
        """The text of the program."""
        return self._exported.mlir_module()

    @functools.cached_property
    def _jitted(self) -> Any:
        # Kept: JAX would compile a new method at each call.
        return jax.jit(self._exported.call)

    def call(self, *args: Any) -> Any:
        """Runs the function; works inside jit too.

        Args:
          *args: arrays, or pytrees of them, with the structure, shapes and dtypes of the export. Fixed numbers and
            strings have to be the same; functions are not compared.

        Returns:
          What the function returned, so that a train step takes what it gave. Where the function returned a node that
          its arguments have, such as the state of an optimizer or a model, the result is of the caller's own class, and
          has its static data.

          Of the other nodes, tuples, lists and dicts stay what they are, and in the process of the export so do all.
          In another, NamedTuples and dataclasses without static fields are of their class if its module has been
          imported; otherwise a NamedTuple with the same attributes takes their place, for other classes a dict or a
          tuple. Nothing is imported because a file says so.

        Raises:
          ArtifactError: if an argument is missing, unexpected or of another type, or if the artifact was not exported
            for this process' platform.
        """
        if platform_here() not in self.platforms:
            held = ", ".join(self.platforms)
            raise ArtifactError(f"export: artifact must hold the platform {platform_here()}; got one for {held}")
        avals = self._exported.in_avals
        made = "exported"
        leaves = Expected("export", ArtifactError, made, self._arg_count, self.arguments, self.fixed, avals).leaves(
            args
        )
        self._check_sizes(leaves)
        return self._results.filled(iter(self._jitted(*leaves)), args)

    def _check_sizes(self, leaves: Sequence[Any]) -> None:
        """Refuses sizes that do not solve the symbolic ones, such as an odd size for 2 * rows."""
        if not any(jax.export.is_symbolic_dim(size) for aval in self._exported.in_avals for size in aval.shape):
            return
        try:
            jax.eval_shape(self._exported.call, *leaves)
        except ValueError as error:
            reason = " ".join(str(error).split()).partition(" Using the following")[0]
            raise ArtifactError(f"export: args must have sizes that were exported; got others: {reason}") from None

    def save(self, path: str | Path) -> None:
        """Writes the artifact to a file. `load` reads it in any process that has JAX and this library.

        Raises:
          ArtifactError: if the file cannot be written.
        """
        record = {
            "format": _FORMAT,
            "platforms": self.platforms,
            "versions": self.versions,
            "implementations": self.implementations,
            "arguments": self.arguments,
            "fixed": self.fixed,
            "arg_count": self._arg_count,
            "results": self._results.to_json(),
        }
        if not isinstance(path, str | os.PathLike):
            raise ArtifactError(f"save: path must be a string or a path; got {show(path)}")
        try:
            with zipfile.ZipFile(path, "w") as file:
                file.writestr(_METADATA, json.dumps(record))
                file.writestr(_PROGRAM, bytes(self._exported.serialize()))
        except (OSError, ValueError) as error:  # of characters that no path may have
            message = f"save: path must name a file that can be written; got {show(str(path))}: {file_fault(error)}"
            raise ArtifactError(message) from None


def export(fn: Callable[..., Any], *args: Any, platforms: Sequence[str] = PLATFORMS) -> Artifact:
    """Traces a function once and lowers it for each platform, with the implementation of each operator there.

    Args:
      fn: a function of arrays, jitted or not.
      *args: its arguments: arrays, `jax.ShapeDtypeStruct`s, or pytrees of them. Shapes may be symbolic
        (`jax.export.symbolic_shape`) if the function allows it. Everything else in a pytree, as in modules of Equinox,
        is fixed; where results have it, they have the caller's own. Static arguments of a jitted function are part of
        the program: `call` takes the others.
      platforms: any of "cpu", "cuda" and "tpu"; a single one may be a string.

    Returns:
      The artifact: `call` runs it, `save` writes it to a file.

    Raises:
      ArtifactError: for an unknown platform.
      TypeError: if JAX cannot trace `fn`, or the arguments are not pytrees.
      OperatorError: if an operator refuses its arguments.

    Example:
      >>> artifact = lowering.export(
      ...     jaxops.softmax, jnp.zeros((2, 4)), platforms=("cpu", "tpu")
      ... )
      >>> artifact.implementations["tpu"]
      {'softmax': ['reference']}
      >>> artifact.call(jnp.zeros((2, 4))).tolist()
      [[0.25, 0.25, 0.25, 0.25], [0.25, 0.25, 0.25, 0.25]]
    """
    platforms = (platforms,) if isinstance(platforms, str) else platforms
    names = platforms if isinstance(platforms, tuple | list) else (show(platforms),)
    unknown = [str(name) for name in names if name not in PLATFORMS]
    if unknown or not names:
        raise ArtifactError(
            f"export: platforms must be of {', '.join(PLATFORMS)}; got {shortened(', '.join(unknown)) or 'none'}"
        )
    given = args
    fn, args = static_leaves.of_arrays(fn, args, marked=True)
    if isinstance(fn, static_leaves.Stages):
        raise ArtifactError(
            f"export: fn must be the function itself, or jitted by `jax.jit`, as a file has no place for what other"
            f" libraries make of its arguments; got {show(fn.fn)}"
        )
    fixed = fixed_text(given, args)
    jitted: Any = fn if hasattr(fn, "trace") else jax.jit(fn)
    exported = jax.export.export(jitted, platforms=list(platforms), disabled_checks=UNCHECKED_CALLS)(*args)
    types = jax.tree.unflatten(exported.in_tree, exported.in_avals)[0]  # without static arguments
    implementations = {platform: _implementations(jitted, args, platform) for platform in platforms}
    return Artifact(
        tuple(platforms),
        dict(versions()),
        implementations,
        types_by_path(types, exported.in_avals),
        fixed,
        len(types),
        flattened(exported),
        Results.of(jax.tree.unflatten(exported.out_tree, exported.out_avals), types),
    )


def load(path: str | Path) -> Artifact:
    """Reads an artifact that `Artifact.save` wrote.

    Args:
      path: of the file.

    Returns:
      The artifact, as `export` returned it.

    Raises:
      ArtifactError: if the file is missing, damaged, of another kind, or written by a later version.

    Example:
      >>> lowering.export(jnp.square, 2.0, platforms="cpu").save("square.jaxops")
      >>> print(lowering.load("square.jaxops").call(3.0))
      9.0
    """
    if not isinstance(path, str | os.PathLike):
        raise ArtifactError(f"load: path must be a string or a path; got {show(path)}")
    try:
        with zipfile.ZipFile(path) as file:
            record = json.loads(file.read(_METADATA))
            program = file.read(_PROGRAM)
    except OSError as error:
        raise ArtifactError(
            f"load: path must name a file that can be read; got {show(str(path))}: {file_fault(error)}"
        ) from None
    except (zipfile.BadZipFile, KeyError, ValueError, EOFError, NotImplementedError, RuntimeError):
        raise ArtifactError(f"load: {show(str(path))} must be a whole file that export has saved") from None
    found = record.get("format") if isinstance(record, dict) else None
    if found != _FORMAT:
        raise ArtifactError(f"load: {show(str(path))} must have format {_FORMAT}; got {show(found)}")
    try:
        return Artifact(
            platforms=tuple(record["platforms"]),
            versions=record["versions"],
            implementations=record["implementations"],
            arguments=record["arguments"],
            fixed=record["fixed"],
            _arg_count=record["arg_count"],
            _exported=jax.export.deserialize(bytearray(program)),
            _results=Results.from_json(record["results"]),
        )
    except Exception as error:  # JAX raises whatever it trips over, also for programs of a later JAX
        written_with = record.get("versions")
        raise ArtifactError(
            f"load: {show(str(path))} must hold a program that JAX {jax.__version__} can read; got one written with "
            f"{written_with}: {type(error).__name__}"
        ) from None


def _implementations(jitted: Any, args: Sequence[Any], platform: str) -> dict[str, list[str]]:
    """Returns the implementations that each operator takes on a platform, without knowing the chip."""
    chosen: dict[str, set[str]] = {}
    for use in operator_uses(static_leaves.jaxpr_of(jitted, args), args, named(platform)):
        chosen.setdefault(use.operator.name, set()).add(use.choice.implementation)
    return {operator: sorted(names) for operator, names in sorted(chosen.items())}
