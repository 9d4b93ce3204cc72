"""A clean run ends with 0; `make exit-codes` starts a hundred."""

from pathlib import Path

from tests.exit_codes import run_once


def test_clean_runs_end_with_0(tmp_path: Path) -> None:
    for _ in range(2):
        code, output = run_once(tmp_path)
        assert code == 0, output[-3000:]
