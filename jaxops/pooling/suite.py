"""Cases of max pooling in the suite of `jaxops tune`."""

import functools

from jaxops._cases import BF16, F32, arrays, with_gradient
from jaxops.pooling.max_pool import max_pool
from lowering.campaign.suite import Case

SUITE = (
    Case(
        "max pool",
        functools.partial(with_gradient, functools.partial(max_pool, window=2, layout="NHWC")),
        arrays,
        ((1, 4, 4, 128, F32), (3, 7, 6, 256, BF16), (8, 28, 28, 128, F32)),
        ((32, 112, 112, 128, BF16), (32, 112, 112, 128, F32)),
        ((2, 8, 8, 128, F32),),
    ),
)
