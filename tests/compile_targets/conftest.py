"""The chips that tests compile for without having them, through `lowering.compile`, as users do."""

import collections

import pytest

import lowering
from lowering.targets import parse

# Every case is compiled for the first of them. Of each test the others get the first case, the rest are slow tests.
TPUS = ("tpu-v5e", "tpu-v5p", "tpu-v6e")
CHIPS = (
    *(pytest.param(name, marks=pytest.mark.tpu_compile) for name in (*TPUS, "tpu-v7x")),
    *(pytest.param(name, marks=pytest.mark.cuda_compile) for name in ("cuda-h100", "cuda-h200", "cuda-b200")),
)


def pytest_collection_modifyitems(items):
    seen, places = set(), collections.defaultdict(dict)
    for item in items:
        if not hasattr(item, "callspec"):
            continue
        for mark in item.iter_markers("in_turns"):
            values = [(places[item.path, item.originalname, name], item.callspec.params[name]) for name in mark.args]
            if sum(place.setdefault(str(value), len(place)) for place, value in values) % 2:
                item.add_marker(pytest.mark.slow)
        tpu = item.callspec.params.get("tpu")
        if tpu in TPUS[1:]:
            test = (item.path, item.originalname, tpu)
            if test in seen:
                item.add_marker(pytest.mark.slow)
            seen.add(test)


def installed(name):
    """The target, if the compiler of its platform is in this environment."""
    status = lowering.availability(parse(name).hardware)
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
