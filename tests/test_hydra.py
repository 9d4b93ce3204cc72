"""The Hydra page's program, on two processes that Lightning starts, in the run's own folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.harness import ROOT

PAGE = ROOT / "docs" / "how-to" / "hydra.md"


def test_every_rank_gets_the_overrides_and_runs_in_the_same_folder(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M)
    (tmp_path / "train.py").write_text(block)
    command = [sys.executable, "-W", "ignore", "train.py", "strategy.bucket_cap_mb=2", "batch_size=8"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "hydra.job.chdir=true"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = dict(line.split(": ", 1) for line in done.stdout.splitlines() if line.startswith("rank "))
    num_steps = 64 // (8 * 2)
    folders = {text.rpartition(" in ")[2] for text in told.values()}
    assert len(folders) == 1
    (folder,) = folders
    assert Path(folder).is_relative_to(tmp_path / "outputs")
    assert told == {f"rank {rank}": f"{num_steps} steps, bucket_cap_mb=2.0, in {folder}" for rank in (0, 1)}
    assert [path.parent for path in tmp_path.rglob(".hydra")] == [Path(folder)]  # of rank 0 alone
