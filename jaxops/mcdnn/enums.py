"""The documented enumerations. As an argument, a member, its name, here or in C, or its number will do."""

import enum
from typing import TypeVar

import numpy as np

from jaxops._checks.arguments import BAD_PARAM, BadParamError
from lowering.describe import one_of


class ActivationMode(enum.IntEnum):
    """The activation function."""

    SIGMOID = 0
    RELU = 1
    TANH = 2
    CLIPPED_RELU = 3
    ELU = 4
    IDENTITY = 5
    SWISH = 6


class BatchNormMode(enum.IntEnum):
    """Axes that batch normalization reduces: the batch, or the batch and space."""

    PER_ACTIVATION = 0
    SPATIAL = 1
    SPATIAL_PERSISTENT = 2


class BatchNormOps(enum.IntEnum):
    """Operations that follow batch normalization."""

    OPS_BN = 0
    OPS_BN_ACTIVATION = 1
    OPS_BN_ADD_ACTIVATION = 2


class NormMode(enum.IntEnum):
    """Axes that normalization reduces: the batch, or the batch and space."""

    PER_ACTIVATION = 0
    PER_CHANNEL = 1


class NormOps(enum.IntEnum):
    """Operations that follow normalization; the numbers are those of `BatchNormOps`."""

    NORM = 0
    NORM_ACTIVATION = 1
    NORM_ADD_ACTIVATION = 2


class NormAlgo(enum.IntEnum):
    """Algorithm of normalization on the vendor's chip; values are the same, and there is no choice here."""

    STANDARD = 0
    PERSIST = 1


class LRNMode(enum.IntEnum):
    """The axis along which local response normalization looks at neighbours."""

    CROSS_CHANNEL_DIM1 = 0


class DivNormMode(enum.IntEnum):
    """Source of the means of divisive normalization."""

    PRECOMPUTED_MEANS = 0


class PoolingMode(enum.IntEnum):
    """Reduction of a window in pooling."""

    MAX = 0
    AVERAGE_COUNT_INCLUDE_PADDING = 1
    AVERAGE_COUNT_EXCLUDE_PADDING = 2
    MAX_DETERMINISTIC = 3


class SoftmaxAlgorithm(enum.IntEnum):
    """Algorithm of a softmax, or of its logarithm; FAST and ACCURATE are the same here."""

    FAST = 0
    ACCURATE = 1
    LOG = 2


class SoftmaxMode(enum.IntEnum):
    """Elements that add up to 1: a whole image, or the channels of each pixel."""

    INSTANCE = 0
    CHANNEL = 1


class NanPropagation(enum.IntEnum):
    """Treatment of NaN: propagated, or passed over as if it were minus infinity."""

    NOT_PROPAGATE_NAN = 0
    PROPAGATE_NAN = 1


class SamplerType(enum.IntEnum):
    """Interpolation between pixels in a spatial transformer."""

    BILINEAR = 0


Enumeration = TypeVar("Enumeration", bound=enum.IntEnum)


def member(operator: str, argument: str, enumeration: type[Enumeration], value: object) -> Enumeration:
    """Returns the member that a name or number stands for; raises BadParamError if there is none.

    C's names, such as "MCDNN_SOFTMAX_ACCURATE", end with the member's.
    """
    names = [one.name for one in enumeration]
    if isinstance(value, str):
        in_c = [name for name in names if value.startswith("MCDNN_") and value.endswith(f"_{name}")]
        name = value if value in names else max(in_c, key=len, default="")
    else:
        is_number = type(value) in (int, enumeration) or (isinstance(value, np.integer) and value.dtype.kind in "iu")
        name = next((one.name for one in enumeration if is_number and one == value), "")
    if not name:
        raise BadParamError(f"{operator}: {argument} must be {one_of(names, value)}", BAD_PARAM)
    return enumeration[name]
