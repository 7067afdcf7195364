"""The documented descriptors, as frozen records that check their fields."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxops._checks import layouts
from jaxops._checks.arguments import INT32_MAX, is_integer
from jaxops._checks.mcdnn import require, require_integer, require_real
from jaxops.dropout.api import checked_rate
from jaxops.mcdnn.enums import ActivationMode, NanPropagation, PoolingMode, SamplerType, member
from jaxops.pooling.windows import Ints


@dataclasses.dataclass(frozen=True)
class ActivationDescriptor:
    """An activation and its coefficient.

    Attributes:
      mode: an `ActivationMode`.
      nan_propagation: a `NanPropagation`: whether RELU and CLIPPED_RELU turn NaN into NaN or 0.
      coef: the ceiling of CLIPPED_RELU and the factor of ELU; other modes ignore it. C has no default: with 0,
        CLIPPED_RELU gives 0, and ELU is RELU.
      swish_beta: the beta of SWISH.

    Raises:
      BadParamError: if an enumeration does not have the member, or a coefficient is not a number.
    """

    mode: ActivationMode | str | int
    nan_propagation: NanPropagation | str | int = "NOT_PROPAGATE_NAN"
    coef: float = 0.0
    swish_beta: float = 1.0

    def __post_init__(self) -> None:
        name = type(self).__name__
        object.__setattr__(self, "mode", member(name, "mode", ActivationMode, self.mode))
        nan_propagation = member(name, "nan_propagation", NanPropagation, self.nan_propagation)
        object.__setattr__(self, "nan_propagation", nan_propagation)
        for field in ("coef", "swish_beta"):
            object.__setattr__(self, field, require_real(name, field, getattr(self, field)))


LRN_MIN_N, LRN_MAX_N = 1, 16
LRN_MIN_K = 1e-5
LRN_MIN_BETA = 0.01


@dataclasses.dataclass(frozen=True)
class LRNDescriptor:
    """The window and weights of local response normalization and divisive normalization.

    Attributes:
      n: the extent of the window, 1 to 16; an even window reaches one further ahead.
      alpha: the factor of the mean square; any number.
      beta: the power, at least 0.01.
      k: what is added to the mean square, at least 1e-5.

    Raises:
      BadParamError: if n is not an integer, another field is not a number, or a value is out of range.
    """

    n: int = 5
    alpha: float = 1e-4
    beta: float = 0.75
    k: float = 2.0

    def __post_init__(self) -> None:
        name = type(self).__name__
        rule = f"be an integer from {LRN_MIN_N} to {LRN_MAX_N}"
        n = require_integer(name, "n", self.n, rule, least=LRN_MIN_N, most=LRN_MAX_N)
        object.__setattr__(self, "n", n)
        for field, least in (("alpha", None), ("beta", LRN_MIN_BETA), ("k", LRN_MIN_K)):
            value = getattr(self, field)
            number = require_real(name, field, value)
            if least is not None:
                # The limit rounded to float32 may lie below the limit; it is accepted.
                limit = float(type(value)(least)) if isinstance(value, np.floating) else least
                require(number >= limit, name, field, f"be at least {least}", value)
            object.__setattr__(self, field, number)

    @property
    def attributes(self) -> dict[str, float]:
        """The attributes of the operators, except the window."""
        return {"alpha": self.alpha, "beta": self.beta, "k": self.k}


@dataclasses.dataclass(frozen=True)
class DropoutDescriptor:
    """The probability of dropping an element.

    Attributes:
      dropout: the probability of dropping an element, in [0, 1]: a Python or NumPy number, or a traced scalar. The
        value of a traced one is not checked: it is clamped to [0, 1], and NaN gives NaN.

    Raises:
      BadParamError: if the probability is not a number in [0, 1].
    """

    dropout: float | jax.Array

    def __post_init__(self) -> None:
        rate = checked_rate(type(self).__name__, "dropout", self.dropout)
        object.__setattr__(self, "dropout", rate)


@dataclasses.dataclass(frozen=True)
class PoolingDescriptor:
    """The windows of a pooling and their reduction.

    Attributes:
      mode: a `PoolingMode`. MAX and MAX_DETERMINISTIC are the same: both are deterministic here.
      window: the extents of the windows: two or three integers, or one for all spatial axes.
      padding: how far windows may reach beyond each side of the image, likewise.
      stride: the steps between windows, likewise.
      nan_propagation: a `NanPropagation`, for maxima. Averages always propagate NaN.

    Raises:
      BadParamError: if an enumeration does not have the member, a window or stride is not positive, or another field is
        not an integer.
    """

    mode: PoolingMode | str | int
    window: Ints
    padding: Ints
    stride: Ints
    nan_propagation: NanPropagation | str | int = "NOT_PROPAGATE_NAN"

    def __post_init__(self) -> None:
        name = type(self).__name__
        mode = member(name, "mode", PoolingMode, self.mode)
        nan_propagation = member(name, "nan_propagation", NanPropagation, self.nan_propagation)
        object.__setattr__(self, "mode", mode)
        object.__setattr__(self, "nan_propagation", nan_propagation)
        for field, least in (("window", 1), ("padding", None), ("stride", 1)):
            object.__setattr__(self, field, _integers(name, field, getattr(self, field), least))


@dataclasses.dataclass(frozen=True)
class SpatialTransformerDescriptor:
    """The output of a spatial transformer.

    Attributes:
      dims: the shape (N, C, H, W) of the output, in this order whatever the layout.
      sampler: a `SamplerType`.

    Raises:
      BadParamError: if the enumeration does not have the member, or dims is not a tuple of at least four sizes. The
        calls refuse more than four as not supported.
    """

    dims: tuple[int, ...]
    sampler: SamplerType | str | int = "BILINEAR"

    def __post_init__(self) -> None:
        name = type(self).__name__
        object.__setattr__(self, "sampler", member(name, "sampler", SamplerType, self.sampler))
        dims = layouts.sizes(self.dims)
        are_four = dims is not None and len(dims) >= 4
        require(are_four, name, "dims", "be four sizes, (N, C, H, W)", self.dims)
        object.__setattr__(self, "dims", dims)


def _integers(name: str, field: str, value: Any, least: int | None) -> Ints:
    values = (value,) if is_integer(value) else value
    are_integers = isinstance(values, tuple | list) and all(map(is_integer, values))
    require(are_integers, name, field, "be an integer or a tuple of them", value)
    integers = tuple(map(int, values))
    counts = (1,) if is_integer(value) else (2, 3)
    require(len(integers) in counts, name, field, "have two or three integers", value)
    is_small = max(map(abs, integers)) <= INT32_MAX
    require(is_small, name, field, f"be at most {INT32_MAX}", value)
    if least is not None:
        require(min(integers) >= least, name, field, f"be at least {least}", value)
    return integers[0] if is_integer(value) else integers
