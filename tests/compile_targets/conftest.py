"""The real compilers for chips that are not there. Each runs in an environment that has its vendor's packages."""

import os

# libtpu and the CUDA plugin read these when they are first loaded, which is later than `import jax`.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import importlib.util

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from lowering._jax_private import cuda_devices
from lowering.targets import gpu_target_config, named

H100 = named("cuda-h100")


@pytest.fixture(scope="session", params=["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def tpu_sharding(request):
    """An array on one chip of the topology."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed; pip install 'jaxops[tpu-compile]'")
    topology = topologies.get_topology_desc(request.param, platform="tpu")
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


@pytest.fixture(scope="session")
def h100_mesh():
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("the CUDA plugin is not installed; pip install 'jaxops[cuda-compile]'")
    devices = np.array(cuda_devices(gpu_target_config(H100), "1"))
    return Mesh(devices, ("device",), axis_types=(AxisType.Auto,))


@pytest.fixture
def h100_sharding(h100_mesh):
    """An array on one H100, while everything is lowered for it."""
    device = AbstractDevice(device_kind=H100.device_kind, num_cores=H100.cores, platform="gpu")
    abstract_mesh = AbstractMesh((1,), ("device",), (AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(abstract_mesh):
        yield NamedSharding(h100_mesh, PartitionSpec())
