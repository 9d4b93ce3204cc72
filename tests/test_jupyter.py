"""The Jupyter page's program, in a real notebook on two forked processes; and what a fork cannot do."""

import json
import re
from pathlib import Path

import lightning.pytorch as pl
import nbformat
import pytest
import torch
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from ddp_plugin import CustomDDPStrategy
from tests.harness import ROOT

PAGE = ROOT / "docs" / "how-to" / "jupyter.md"
TELL = """
import json
print("RESULT", json.dumps([model.net.weight.flatten().tolist(), float(trainer.callback_metrics["loss"])]))
"""
USE_CUDA = """
from unittest import mock
strategy = CustomDDPStrategy(start_method="fork")
strategy.parallel_devices = [torch.device("cuda", 0)]
with mock.patch.object(torch.cuda, "is_initialized", lambda: True):
    assert strategy.launcher is None  # as a forked rank asks, which may use its GPU
    strategy.refuse_contradictions()
"""


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NotebookClient:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M)
    cells = [nbformat.v4.new_code_cell(text) for text in (block, TELL, USE_CUDA)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    return NotebookClient(notebook, timeout=150, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})


@pytest.mark.filterwarnings("ignore")  # Jupyter's, about itself
def test_a_notebook_trains_on_two_processes_what_one_would(client: NotebookClient) -> None:
    with pytest.raises(CellExecutionError, match="a process that has not touched CUDA") as refused:
        client.execute()
    assert "Restart the notebook's kernel" in str(refused.value)
    outputs = "".join(output.get("text", "") for output in client.nb.cells[1].outputs)
    weights, loss = json.loads(outputs.partition("RESULT ")[2])

    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1)
    samples = torch.randn(64, 4).double()
    net.double()
    for _ in range(3):  # two batches of 32 are all of the data
        expected = (net(samples) - 1).square().mean()
        gradients = torch.autograd.grad(expected, list(net.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
    assert weights == pytest.approx(net.weight.flatten().tolist(), rel=1e-5)
    assert loss == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(("start_method", "device"), [("popen", "cuda"), ("spawn", "cuda"), ("fork", "cpu")])
def test_other_ways_to_start_do_not_mind_cuda(start_method: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    strategy = CustomDDPStrategy(start_method=start_method)
    strategy.parallel_devices = [torch.device(device, 0)]
    assert strategy.launcher is None  # of no Trainer yet


def test_a_fork_is_let_alone_where_cuda_was_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    strategy = CustomDDPStrategy(start_method="fork")
    strategy.parallel_devices = [torch.device("cuda", 0)]
    assert strategy.launcher is None
    assert isinstance(
        pl.Trainer(accelerator="cpu", devices=2, strategy="ddp_plugin_notebook", logger=False).strategy,
        CustomDDPStrategy,
    )
