"""Skips everything in this folder where there is no CUDA device."""

import pytest
import torch

from tests.gpu.device import DEVICE


@pytest.fixture(autouse=True)
def device_is_here(request: pytest.FixtureRequest) -> None:
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs one CUDA device")
    if DEVICE.type != "cuda" and request.node.get_closest_marker("gpu") is None:
        raise RuntimeError(f"{request.node.nodeid} lacks the marker gpu")
