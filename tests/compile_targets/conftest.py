"""The chips that tests compile for without having them, through `lowering.compile`, as users do."""

import pytest

import lowering
from lowering.targets import named

TPUS = ("tpu-v5e", "tpu-v5p", "tpu-v6e")
CHIPS = (
    *(pytest.param(name, marks=pytest.mark.tpu_compile) for name in (*TPUS, "tpu-v7x")),
    *(pytest.param(name, marks=pytest.mark.cuda_compile) for name in ("cuda-h100", "cuda-h200", "cuda-b200")),
)


def installed(name):
    """The target, if the compiler of its platform is in this environment."""
    status = lowering.availability(named(name.partition(":")[0]))
    if status != "can compile for":
        pytest.fail(f"{name} {status}")
    return name


@pytest.fixture(params=TPUS)
def tpu(request):
    return installed(request.param)


@pytest.fixture
def h100():
    return installed("cuda-h100")


@pytest.fixture(params=CHIPS)
def chip(request):
    return installed(request.param)
