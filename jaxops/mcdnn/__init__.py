"""The mcDNN training calls without prefix and handle: documented checks and statuses, and operators beneath them."""

from jaxops.mcdnn.descriptors import PoolingDescriptor as PoolingDescriptor
from jaxops.mcdnn.enums import NanPropagation as NanPropagation
from jaxops.mcdnn.enums import PoolingMode as PoolingMode
from jaxops.mcdnn.pooling import pooling_backward as pooling_backward
from jaxops.mcdnn.pooling import pooling_forward as pooling_forward

__all__ = [
    "NanPropagation",
    "PoolingDescriptor",
    "PoolingMode",
    "pooling_backward",
    "pooling_forward",
]
