"""One CPU Megatron world for each module that decodes in its own process."""

from __future__ import annotations

import pytest
import torch

from tests.evaluation import tiny


@pytest.fixture(scope="module")
def megatron():
    """Megatron on the CPU for the tests of a module."""
    if torch.cuda.is_available():
        pytest.skip("checks the CPU platform, and a CUDA device is present")
    with tiny.megatron_world():
        yield
