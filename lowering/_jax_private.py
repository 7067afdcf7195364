"""The one place where `lowering` reaches into JAX's private modules (tried on JAX 0.10.2, 0.11.2 and 0.12.0.1).

* `dispatch.prim_requires_devices_during_lowering`: a primitive whose lowering rule uses `custom_partitioning` must be
  listed there, as JAX's own cuDNN primitives are; there is no public way to say so.
* `config._check_vma`: inside shard_map a kernel would have to say over which mesh axes each of its results varies. The
  primitive has already typed its results by then, so kernels are traced without.
"""

from contextlib import AbstractContextManager

from jax._src import config, dispatch
from jax.extend.core import Primitive


def require_devices_during_lowering(primitive: Primitive) -> None:
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def without_varying_axes() -> AbstractContextManager[None]:
    return config._check_vma(False)
