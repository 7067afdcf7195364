"""Cases of dropout in the suite of `jaxops tune`."""

from typing import Any

import jax

from jaxops._cases import BF16, F16, F32, arrays, with_gradient
from jaxops.dropout.api import dropout
from lowering.campaign.suite import Case


def _dropped(key: jax.Array, x: jax.Array) -> Any:
    return with_gradient(lambda x: dropout(key, x, 0.1), x)


SUITE = (
    Case(
        "dropout",
        _dropped,
        lambda *sizes: (jax.random.key(0), *arrays(*sizes)),
        # Kernels want rows of 4096 elements. That of TPUs takes others, too.
        ((33, 129, BF16), (64, 1000, F32), (3, 4096, BF16), (2, 4128, BF16), (2, 8192, F16)),
        ((16384, 4096, BF16), (16384, 4096, F32)),
        ((4, 4096, F32),),
    ),
)
