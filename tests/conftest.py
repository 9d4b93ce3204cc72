"""What every test finds: no process group, and the environment that the run began with."""

import os
import signal
from collections.abc import Iterator

import pytest
import torch.distributed as dist

# torch's store asks the name server for the name of ::ffff:127.0.0.1, and an answer that is lost costs 5 s by default.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")
os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of Lightning's use of it, for Lightning to change

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in a shell's background, and its children, ignore it


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole-parity-table", action="store_true", help="every cell of the parity table, not a sample")


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Takes back what a Trainer in this process leaves: a process group that holds a port, and its address."""
    before = dict(os.environ)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)
