"""One environment for every test: CPU, eight virtual devices, strict promotion, one seed."""

import os

# XLA and JAX read these when they start, so they stand above the first import of jax.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiling tiny programs takes most of the time, and 0.6 of that without LLVM's optimizations. XLA's own passes still
# run, so what tests read in compiled programs (fusions, collectives, memory) stays. CI sets 0 in one of its runs.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import hypothesis
import jax
import numpy as np
import pytest

SEED = 20260

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("jaxops", derandomize=True, deadline=None)
hypothesis.settings.load_profile("jaxops")

# The promises are asserted there, not in the test modules that call them.
pytest.register_assert_rewrite("contract")


def pytest_report_header() -> str:
    return f"jax {jax.__version__}, {jax.device_count()} devices ({jax.default_backend()}), seed {SEED}"


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(SEED)
