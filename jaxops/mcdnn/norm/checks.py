"""Refusals that all norm calls share, with the documented status."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._checks import layouts
from jaxops._checks.arguments import NOT_SUPPORTED
from jaxops._checks.dtypes import accumulation_dtype
from jaxops._checks.mcdnn import require, require_bool, require_integer
from jaxops.activation.modes import Activation
from jaxops.batch_norm.api import BN_MIN_EPSILON as BN_MIN_EPSILON
from jaxops.batch_norm.api import checked_epsilon, checked_momentum
from jaxops.batch_norm.layouts import View, view_of
from jaxops.mcdnn.activation import requested
from jaxops.mcdnn.checks import DTYPES, Call
from jaxops.mcdnn.descriptors import ActivationDescriptor
from jaxops.mcdnn.enums import (
    ActivationMode,
    BatchNormMode,
    BatchNormOps,
    NormAlgo,
    NormMode,
    NormOps,
    member,
)


@dataclasses.dataclass(frozen=True)
class NormCall(Call):
    """A norm call with its enumerations read.

    Attributes:
      per_activation: whether there are statistics for each activation instead of each channel.
      ops: what follows the normalization.
      activation: the one that `ops` applies; None for OPS_BN.
      strict: whether to refuse what these calls support but the documents do not.
      parameter_status: the status for parameters whose dtype does not go with the data.
    """

    per_activation: bool
    ops: BatchNormOps = BatchNormOps.OPS_BN
    activation: Activation | None = None
    strict: bool = False
    parameter_status: str = NOT_SUPPORTED

    @property
    def adds(self) -> bool:
        """Tells whether a residual is added before the activation."""
        return self.ops == BatchNormOps.OPS_BN_ADD_ACTIVATION

    def view(self, x: Any, layout: str | None) -> View:
        """Returns the view of x; refuses other ranks than 4 and 5, and undocumented layouts."""
        layout = layouts.resolved(self.name, x, layout, defaults=layouts.CHANNELS_FIRST)
        return view_of(self.name, x, layout, "per_activation" if self.per_activation else "spatial")

    def like_x(self, x: Any, **arrays: Any) -> None:
        """Refuses arrays that differ from x in shape or dtype; None passes."""
        for argument, array in arrays.items():
            if array is not None:
                same = array.shape == x.shape and array.dtype == x.dtype
                self.require(same, argument, f"be like x, {x.dtype}{list(x.shape)}", array)

    def parameters(self, view: View, **arrays: Any) -> None:
        """Refuses parameters and statistics whose shape does not fit the mode; None passes."""
        shape = parameter_shape(view)
        for argument, array in arrays.items():
            if array is not None:
                self.require(array.shape == shape, argument, f"have shape {shape}, as x is {view.layout}", array)

    def pair(self, **pair: Any) -> None:
        """Refuses one of two arguments without the other."""
        (first, one), (second, other) = pair.items()
        self.require((one is None) == (other is None), first, f"be given with {second}, or neither", one)

    def epsilon(self, epsilon: Any) -> float:
        """Returns epsilon as a float; refuses less than BN_MIN_EPSILON, and NaN."""
        return checked_epsilon(self.name, epsilon)

    def factor(self, factor: Any) -> float | jax.Array:
        """Returns the factor of the running average as a float or a traced scalar; refuses numbers outside [0, 1]."""
        return checked_momentum(self.name, "exponential_average_factor", factor)

    def dtypes(self, x: Any, listed: tuple[str, ...], **parameters: Any) -> None:
        """Refuses dtypes that are undocumented (if strict, for this function) or do not go together."""
        dtypes = listed if self.strict else DTYPES
        self.supported_dtype("x", x, dtypes)
        dtype = accumulation_dtype(x.dtype)
        refuse = self.support if self.parameter_status == NOT_SUPPORTED else self.require
        for argument, array in parameters.items():
            if array is not None:
                refuse(array.dtype == dtype, argument, f"be {dtype}, as {x.dtype} data asks for", array)

    def supported_ops(self, view: View, x: Any, listed: tuple[ActivationMode, ...]) -> None:
        """Refuses, if strict, layouts, activations and residuals that the documents leave out."""
        if self.strict and self.activation is not None:
            self.support(view.channels_last, "layout", "be NHWC or NDHWC with an activation", "channels first")
            modes = [mode.name for mode in listed]
            mode = self.activation.mode.upper()
            self.support(mode in modes, "activation", f"be {' or '.join(modes)}", mode)
            if self.adds:
                self.support(x.dtype == jnp.float16, "z", "be float16", x)


def batch_norm_call(name: str, mode: Any, ops: Any = 0, activation: Any = None, strict: bool = False) -> NormCall:
    """Reads the enumerations of a batch-normalization call."""
    mode = member(name, "mode", BatchNormMode, mode)
    strict = require_bool(name, "strict", strict, or_int=True)
    ops = member(name, "bn_ops", BatchNormOps, ops)
    return NormCall(name, mode == BatchNormMode.PER_ACTIVATION, ops, _fused(name, ops, activation), strict)


def norm_call(
    name: str, mode: Any, ops: Any, algo: Any, activation: Any, strict: bool, parameter_status: str = NOT_SUPPORTED
) -> NormCall:
    """Reads the enumerations of a normalization call."""
    mode = member(name, "mode", NormMode, mode)
    strict = require_bool(name, "strict", strict, or_int=True)
    ops = BatchNormOps(member(name, "norm_ops", NormOps, ops))
    member(name, "algo", NormAlgo, algo)
    fused = _fused(name, ops, activation)
    return NormCall(name, mode == NormMode.PER_ACTIVATION, ops, fused, strict, parameter_status)


def check_group_count(call: NormCall, group_cnt: Any) -> None:
    """Refuses groups, which no version of mcDNN supports."""
    require_integer(call.name, "group_cnt", group_cnt)
    call.support(group_cnt == 1, "group_cnt", "be 1", group_cnt)


def parameter_shape(view: View) -> tuple[int, ...]:
    """Returns the documented shape of parameters and statistics: (1, C, 1, 1[, 1]), or (1, C[, D], H, W)."""
    shape = (1, *view.parameter_shape)
    return shape + (1,) * (len(view.shape) - len(shape))


def _fused(name: str, ops: BatchNormOps, descriptor: Any) -> Activation | None:
    if ops == BatchNormOps.OPS_BN:
        return None
    is_descriptor = isinstance(descriptor, ActivationDescriptor)
    require(is_descriptor, name, "activation", "be an ActivationDescriptor", descriptor)
    return requested(descriptor)
