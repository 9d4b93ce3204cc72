"""Makes the pictures of the pages, each by a command or a callback of the project: ``python docs/make_pictures.py``.

``pictures/step.svg`` is drawn by hand.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

PICTURES = Path(__file__).resolve().parent / "pictures"
ROOT = PICTURES.parent.parent

COMMANDS = (
    f"ring --ranks 4 --picture {PICTURES / 'ring.svg'}",
    f"plan --parameters 110e6 --nodes 2 --gpus 1 --between ethernet_10g --step-s 0.3 --picture {PICTURES / 'plan.png'}",
)

# A model whose backward is long enough for its buckets to be seen; two processes, which torchrun starts.
TRAINING = """
import sys
import lightning as L
import torch
from torch.utils.data import DataLoader
from ddp_plugin import CommunicationMonitor, CustomDDPStrategy, default_callbacks

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(6)])

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = L.Trainer(
    accelerator="cpu", devices=2, max_steps=20, logger=False, enable_checkpointing=False,
    strategy=CustomDDPStrategy(bucket_cap_mb=4),
    callbacks=default_callbacks(CommunicationMonitor(every_n_steps=20, picture_path=sys.argv[1])),
)
trainer.fit(Model(), DataLoader(torch.randn(2048, 1024), batch_size=32))
"""


def main() -> None:
    """Makes all of them, over those that are there."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for command in COMMANDS:
        subprocess.run([sys.executable, "-m", "ddp_plugin", *command.split()], check=True, env=environment)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "training.py")
        script.write_text(TRAINING)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        subprocess.run([*torchrun, str(script), str(PICTURES / "timeline.png")], check=True, env=environment)


if __name__ == "__main__":
    main()
