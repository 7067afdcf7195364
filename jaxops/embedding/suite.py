"""Cases of the embedding gradient in the suite of `jaxops tune`."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxops._cases import BF16, F16, F32, ids, normal
from jaxops.embedding.api import embedding
from lowering.campaign.suite import Case


def _looked_up(table: jax.Array, indices: jax.Array, dy: jax.Array) -> Any:
    return jax.vjp(lambda table: embedding(table, indices), table)[1](dy)


def _embedding_arguments(rows: int, width: int, positions: int, dtype: str) -> tuple[jax.Array, ...]:
    # A quarter of the positions hold one id, as frequent words do.
    indices = jnp.where(jnp.arange(positions) % 4 == 0, rows // 2, ids(1, positions, rows))
    return normal(0, (rows, width), dtype), indices, normal(2, (positions, width), dtype)


SUITE = (
    Case(
        "embedding gradient",
        _looked_up,
        _embedding_arguments,
        ((10, 128, 7, F32), (1000, 160, 777, BF16), (4000, 1024, 4099, F16)),
        ((50257, 768, 8192, F32), (128256, 4096, 16384, BF16)),
        ((40, 128, 37, F32),),
    ),
)
