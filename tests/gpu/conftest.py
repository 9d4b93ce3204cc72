"""Skips everything in this folder where there is no CUDA device."""

import pytest
import torch

from tests.gpu.device import ON_CUDA


@pytest.fixture(autouse=True)
def device_is_here() -> None:
    if ON_CUDA and not torch.cuda.is_available():
        pytest.skip("needs one CUDA device")
