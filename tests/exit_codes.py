"""Starts small clean runs again and again and counts their exit codes: ``python -m tests.exit_codes --num-runs 100``.

Each run is two ranks under torchrun, with the default callbacks, a hook that communicates in its own thread, and data
workers: all that has a thread, a process or a group which must be gone before the interpreter is.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from pathlib import Path

from tests.harness import ROOT

SCRIPT = """
    import lightning.pytorch as pl
    from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
    from torch.utils.data import DataLoader

    from ddp_plugin import CustomDDPStrategy, default_callbacks

    if __name__ == "__main__":
        run = pl.Trainer(accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=False,
                         enable_progress_bar=False, enable_model_summary=False, callbacks=default_callbacks(),
                         strategy=CustomDDPStrategy(comm_hook="powersgd"))
        run.fit(BoringModel(), DataLoader(RandomDataset(32, 32), batch_size=4, num_workers=1))
        run.test(BoringModel(), DataLoader(RandomDataset(32, 8), batch_size=4), verbose=False)
"""


def run_once(folder: Path) -> tuple[int, str]:
    """Returns the exit code of one run, and what it wrote."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(script)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    return done.returncode, done.stdout


def main() -> int:
    """Runs, and returns how many runs did not end with 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-runs", type=int, default=100)
    num_runs = parser.parse_args().num_runs
    codes: Counter[int] = Counter()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for run in range(num_runs):
            code, output = run_once(Path(folder))
            codes[code] += 1
            if code:
                print(f"run {run} ended with {code}:\n{output[-3000:]}", flush=True)
    print(f"{num_runs} runs in {time.monotonic() - start:.0f} s; exit codes and how often: {dict(codes)}")
    return num_runs - codes[0]


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
