"""Everything that depends on the version of JAX: private modules, and functions that changed.

The interpreter of Mosaic GPU kernels came with JAX 0.10 and became public in 0.11; it knows barriers of clusters in
JAX 0.12. `plgpu.load` needed an index in JAX 0.10, warns of one in 0.11, and takes an indexed Ref alone in 0.12.
"""

import inspect
from typing import Any

import jax

INTERPRETS_CLUSTER_BARRIERS = jax.__version_info__ >= (0, 12)


def interpret_gpu_params(**params: Any) -> Any:
    """Returns `InterpretGPUParams(**params)`, which tells `pl.kernel` to interpret a GPU kernel."""
    if jax.__version_info__ >= (0, 11):
        # Types are checked on JAX 0.10, which does not have it.
        from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams  # type: ignore[attr-defined]
    else:
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
    return InterpretGPUParams(**params)


def load_gpu(ref: Any, index: Any) -> jax.Array:
    """Loads from device memory into any layout, even one that vector accesses do not fit."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    apart = inspect.signature(plgpu.load).parameters.get("idx")
    needs_index = apart is not None and apart.default is inspect.Parameter.empty
    return plgpu.load(*((ref, index) if needs_index else (ref.at[index],)), optimized=False)
