"""All that this package takes from JAX's private modules, with the reason and the versions that need it.

The interpreter of Mosaic GPU kernels came with JAX 0.10 and became public in 0.11.
"""

from typing import Any

import jax


def interpret_gpu_params(**params: Any) -> Any:
    """`InterpretGPUParams(**params)`, how `pl.kernel` is told to interpret a GPU kernel."""
    if jax.__version_info__ >= (0, 11):
        # CI checks types on JAX 0.10, which does not have it.
        from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams  # type: ignore[attr-defined]
    else:
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
    return InterpretGPUParams(**params)
