"""The record that describes a kernel to the code that selects, compiles or tunes it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

Config = Mapping[str, int]


def _single_config(hardware: Any, *operands: Any, **params: Any) -> Sequence[Config]:
    return ({},)


def _no_operand(*operands: Any, **params: Any) -> Sequence[int]:
    return ()


class Kind(NamedTuple):
    """Cases of a kernel that are alike but for their sizes, so that evidence on some speaks of those between them.

    Attributes:
      text: whatever must agree: dtypes, options, how arrays are stored, which way the kernel takes.
      sizes: the numbers that may differ, in a fixed order, each positive.
    """

    text: str
    sizes: tuple[int, ...]


def dtype_names(*arrays: Any) -> str:
    """Returns the dtypes of arrays as text, equal ones once, for the text of a `Kind`."""
    return " ".join(dict.fromkeys(jnp.dtype(array.dtype).name for array in arrays))


def _no_kind(hardware: Any, *operands: Any, **params: Any) -> Kind | None:
    return None


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One hand-written implementation of an operator for one kind of hardware.

    Attributes:
      name: unique among an operator's kernels, such as "mosaic_tpu".
      platform: the lowering platform that can run it, "tpu" or "cuda".
      run: `run(*operands, config, interpret=False, **params) -> outputs`. Launches the kernel on arrays; the only place
        that does. `interpret` is False, True, or the interpreter parameters of the kernel's own dialect.
      refuses: `refuses(hardware, *operands, **params) -> str | None`. Why this kernel cannot take operands of these
        shapes and dtypes on this hardware, in words that a user can act on; None if it can. Never raises. Symbolic
        sizes are refused earlier, for all kernels.
      takes: the names of the fields of operands that it takes, if these are NamedTuples. The machinery refuses operands
        in which another field is present, before `refuses` is asked. None takes every field.
      yields_to: those of the other fields that leave the operator to jnp where they are present, even if the user asked
        for kernels, instead of an error: for gradients of what a kernel can compute the value of.
      configs: `configs(hardware, *operands, **params)`. The launch configurations worth trying there, the default
        first.
      kind: `kind(hardware, *operands, **params) -> Kind | None`, for operands that it does not refuse. Which other
        cases speak of this one; None if none does.
      measured_on: names of the targets where it was measured at least as fast as the reference. There it is the
        default; elsewhere the user has to ask for it.
      interpreter_is_pure: whether `run(interpret=True)` has no side effects. Mosaic GPU's interpreter has some, so an
        operator cannot be lowered to it; tests call `run` directly.
      overwrites: `overwrites(*operands, **params)`. The positions of operands whose buffers are reused for results of
        the same type, in order. XLA copies such an operand first if it is needed afterwards; tuning times the kernel
        without that copy. The `run` of such a kernel takes another argument, `in_place=True`: False in a program that
        donates nothing, where new buffers for the results save the copies.
      gives_way: whether "pallas" takes the reference where the kernels of an operator refuse, instead of an error: for
        a kernel that only sometimes beats XLA, of an operator that runs beside others with kernels, as a value beside
        its gradient.
    """

    name: str
    platform: str
    run: Callable[..., Any]
    refuses: Callable[..., str | None]
    configs: Callable[..., Sequence[Config]] = _single_config
    kind: Callable[..., Kind | None] = _no_kind
    measured_on: frozenset[str] = frozenset()
    interpreter_is_pure: bool = True
    overwrites: Callable[..., Sequence[int]] = _no_operand
    gives_way: bool = False
    takes: frozenset[str] | None = None
    yields_to: frozenset[str] = frozenset()
