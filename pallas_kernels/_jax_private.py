"""All that depends on the version of JAX: what comes from its private modules, and what it calls differently.

The interpreter of Mosaic GPU kernels came with JAX 0.10 and became public in 0.11. `plgpu.load` took an index in
JAX 0.10 and takes a Ref that is indexed already in 0.12.
"""

import inspect
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


def load_gpu(ref: Any, index: Any) -> jax.Array:
    """Loads from device memory into any layout, also one that no vector access fits."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    takes_index = "idx" in inspect.signature(plgpu.load).parameters
    return plgpu.load(*((ref, index) if takes_index else (ref.at[index],)), optimized=False)
