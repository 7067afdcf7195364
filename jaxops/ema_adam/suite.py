"""Cases of EMA-Adam in the suite of `jaxops tune`."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxops import aclnn
from jaxops._cases import BF16, F16, F32, normal
from lowering.campaign.suite import Case


def _adam_arguments(count: int, dtype: str) -> tuple[jax.Array, ...]:
    grad, var, m, s = (normal(seed, (count,), dtype) for seed in range(4))
    return grad, var, m, jnp.square(m), s, jnp.asarray([3], jnp.int32)


def _adam(*operands: jax.Array) -> Any:
    return aclnn.apply_fused_ema_adam(
        *operands, lr=1e-3, ema_decay=0.99, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1
    )


SUITE = (
    Case(
        "EMA-Adam",
        _adam,
        _adam_arguments,
        ((129, F32), (1025, BF16), (1151, F16), (100_003, F32)),
        ((2**24, BF16), (2**26, F32)),
        ((1151, F32),),
    ),
)
