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

# What XLA needs to know of an H100 SXM to compile for it, as a GpuTargetConfigProto.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84978434048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


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
    from jax._src import xla_bridge  # no public way to a CUDA topology without a device, in jax 0.10 to 0.12

    jax.devices()  # registers the plugin, which logs that it finds no device
    topology = xla_bridge.make_pjrt_topology("cuda", "1x1x1", target_config=H100, topology="1x1x1")
    devices = np.array(topology._make_compile_only_devices()[:1])
    return Mesh(devices, ("device",), axis_types=(AxisType.Auto,))


@pytest.fixture
def h100_sharding(h100_mesh):
    """An array on one H100, while everything is lowered for it."""
    device = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    abstract_mesh = AbstractMesh((1,), ("device",), (AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(abstract_mesh):
        yield NamedSharding(h100_mesh, PartitionSpec())
