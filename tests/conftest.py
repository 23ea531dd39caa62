"""What all tests share: eight virtual CPU devices, the profiles of hypothesis, and bounded memory."""

import os

# Before jax is imported by any test: the number of devices is fixed when it starts.
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
).strip()

import gc
import resource

import jax
import pytest
from hypothesis import HealthCheck, settings

_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile("default", derandomize=True, deadline=None, max_examples=30, suppress_health_check=_QUIET)
settings.register_profile("long", deadline=None, max_examples=2000, print_blob=True, suppress_health_check=_QUIET)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# Compiled programs are kept for as long as a process lives, and the zoo compiles thousands.
_GROWTH = 1 << 30
_cleared_at = 0


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.fixture(autouse=True)
def bounded_memory():
    """Drops jax's caches whenever the process has grown by another gigabyte."""
    global _cleared_at
    yield
    if _peak_bytes() > _cleared_at + _GROWTH:
        jax.clear_caches()
        gc.collect()
        _cleared_at = _peak_bytes()


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and jax.default_backend() == "cpu":
        pytest.skip("needs an accelerator")
