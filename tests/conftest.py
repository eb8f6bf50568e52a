"""Devices, hypothesis, and which implementation a test runs.

A test that takes ``implementation`` runs once on each row of the implementation table that can
serve it, and one that takes ``variant`` once on each (implementation, algorithm) of the recurrence.
Rows that need a GPU carry the ``gpu`` marker: ``pytest`` leaves them out, ``pytest -m gpu`` on a
machine with one runs them, on the same test functions.
"""

from __future__ import annotations

import os

import hypothesis
import pytest

VIRTUAL_DEVICES = 8


def pytest_configure(config: pytest.Config) -> None:
    # Both must stand in the environment before anything imports jax.
    flag = f"--xla_force_host_platform_device_count={VIRTUAL_DEVICES}"
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    if config.getoption("markexpr") != "gpu":
        # A machine with CUDA libraries but no GPU would otherwise try, and warn.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        # Triton decides when it is imported whether its kernels are compiled or interpreted.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    config.addinivalue_line("markers", "gpu: needs a GPU; run with `pytest -m gpu`")


# Reproducible rather than random: a red run is red again.
hypothesis.settings.register_profile("gdn_jax", deadline=None, derandomize=True, max_examples=60, print_blob=True)
hypothesis.settings.load_profile("gdn_jax")

ON_GPU = pytest.mark.gpu

IMPLEMENTATIONS = [
    pytest.param("scan", id="scan"),
    pytest.param("xla", id="xla"),
    pytest.param("xla", marks=ON_GPU, id="xla-on-gpu"),
    pytest.param("mosaic_gpu", marks=ON_GPU, id="mosaic_gpu"),
    pytest.param("triton", marks=ON_GPU, id="triton"),
]

# ``scan`` is the equations token by token and has no chunked form.
CHUNKED = [
    pytest.param(("xla", "chunked"), id="xla-chunked"),
    pytest.param(("xla", "chunked"), marks=ON_GPU, id="xla-on-gpu-chunked"),
    pytest.param(("mosaic_gpu", "chunked"), marks=ON_GPU, id="mosaic_gpu-chunked"),
    pytest.param(("triton", "chunked"), marks=ON_GPU, id="triton-chunked"),
]
VARIANTS = [
    pytest.param(("scan", "recurrent"), id="scan"),
    pytest.param(("xla", "recurrent"), id="xla-recurrent"),
    pytest.param(("xla", "recurrent"), marks=ON_GPU, id="xla-on-gpu-recurrent"),
    pytest.param(("mosaic_gpu", "recurrent"), marks=ON_GPU, id="mosaic_gpu-recurrent"),
    pytest.param(("triton", "recurrent"), marks=ON_GPU, id="triton-recurrent"),
    *CHUNKED,
]


@pytest.fixture(scope="session", params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest):
    from tests.harness import Implementation

    return Implementation(request.param)


@pytest.fixture(scope="session", params=VARIANTS)
def variant(request: pytest.FixtureRequest):
    """``(implementation, algorithm)``."""
    from tests.harness import Implementation

    name, algorithm = request.param
    return Implementation(name), algorithm


@pytest.fixture(scope="session", params=CHUNKED)
def chunked(request: pytest.FixtureRequest):
    """The variants of the chunked algorithm alone."""
    from tests.harness import Implementation

    name, algorithm = request.param
    return Implementation(name), algorithm
