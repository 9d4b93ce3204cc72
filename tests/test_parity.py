"""The parity table: training on 1 to 4 ranks against one process in plain torch, in float64, after 20 steps.

A sample in which every pair of settings occurs runs here; ``make parity`` runs the whole table.
"""

import traceback
import warnings
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from tests.harness import run_ranks
from tests.parity import parallel, reference
from tests.parity.table import AXES, TABLE, Cell, pairs_of, sample

TOLERANCE = 1e-10


def difference(values: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert values.keys() == expected.keys()
    return max(float((values[name] - expected[name]).abs().max()) for name in expected)


def _differences(cells: list[Cell], without: str | None = None) -> dict[str, Any]:
    """Runs cells on the ranks that are running; returns each one's largest difference, or what it raised."""
    warnings.filterwarnings("ignore", "ConvertSyncBatchNorm: gradients are accumulated")  # the reference does so too
    found: dict[str, Any] = {}
    for cell in cells:
        try:
            values = parallel.train(cell, without)
        except RuntimeError:
            found[cell.name] = traceback.format_exc(limit=-1)
            break  # the ranks may have stopped at different places
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, values)
        assert all(difference(other, values) == 0 for other in everyone), f"{cell.name}: ranks differ"
        found[cell.name] = difference(values, reference.train(cell)[0])
    return found


def _unsafe_differences(cells: list[Cell], without: str) -> dict[str, Any]:
    """The same where ranks may come to differ."""
    warnings.filterwarnings("ignore", "ConvertSyncBatchNorm: gradients are accumulated")
    found: dict[str, Any] = {}
    for cell in cells:
        found[cell.name] = difference(parallel.train(cell, without), reference.train(cell)[0])
    return found


@pytest.mark.parametrize("num_ranks", AXES["num_ranks"])
def test_training_on_any_number_of_ranks_equals_one_process(num_ranks: int, request: pytest.FixtureRequest) -> None:
    table = TABLE if request.config.getoption("--whole-parity-table") else sample()
    cells = [cell for cell in table if cell.num_ranks == num_ranks]
    found = run_ranks(_differences, num_ranks, init=False, timeout_s=1800, cells=cells)[0]
    failed = {name: value for name, value in found.items() if not (isinstance(value, float) and value <= TOLERANCE)}
    assert not failed, "\n".join(f"{name}: {value}" for name, value in failed.items())
    assert len(found) == len(cells) > 0


def test_every_pair_of_settings_is_in_the_sample() -> None:
    expected = set().union(*(pairs_of(cell) for cell in TABLE))
    assert set().union(*(pairs_of(cell) for cell in sample())) == expected
    assert len(sample()) < len(TABLE) / 10
    assert len({cell.name for cell in TABLE}) == len(TABLE) == 288


def test_the_reference_is_clipped_where_it_should_be() -> None:
    for model in AXES["model"]:
        assert reference.train(Cell(str(model), 2, 1, "even", True, "plain"))[1] >= 3


# What is left out, and the cells that must fail then. Two ranks, to be quick.
CONTROLS = {
    "global mean": [
        Cell("mlp", 2, 3, "uneven", False, "plain"),
        Cell("transformer", 2, 1, "even", False, "plain"),
        Cell("convnet", 2, 3, "uneven", True, "static"),
    ],
    "exact last batch": [
        Cell("mlp", 2, 1, "uneven", False, "unused"),
        Cell("convnet", 2, 3, "uneven", False, "plain"),
        Cell("transformer", 2, 1, "uneven", True, "static"),
    ],
    "synchronised BatchNorm": [
        Cell("convnet", 2, 1, "even", False, "plain"),
        Cell("convnet", 2, 3, "uneven", True, "unused"),
    ],
    "clipping": [
        Cell("mlp", 2, 1, "even", True, "plain"),
        Cell("convnet", 2, 1, "even", True, "plain"),
        Cell("transformer", 2, 3, "uneven", True, "static"),
    ],
    "sampler": [Cell("mlp", 2, 1, "uneven", False, "plain"), Cell("transformer", 2, 3, "uneven", False, "static")],
    "reduction": [Cell("mlp", 2, 1, "even", False, "plain"), Cell("convnet", 2, 3, "even", False, "static")],
}


@pytest.mark.parametrize("without", CONTROLS)
def test_with_a_feature_left_out_its_cells_fail(without: str) -> None:
    cells = CONTROLS[without]
    for found in run_ranks(_unsafe_differences, 2, init=False, cells=cells, without=without):
        assert all(value > 1e4 * TOLERANCE for value in found.values()), found
        assert len(found) == len(cells)


@pytest.mark.parametrize(
    ("without", "cell", "message"),
    [
        ("graph", Cell("mlp", 2, 1, "even", False, "unused"), "branch"),
        ("strategy", Cell("mlp", 2, 3, "even", False, "static"), "INTERNAL ASSERT"),  # Lightning's own
    ],
)
def test_without_the_setting_a_graph_cell_raises(without: str, cell: Cell, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        run_ranks(_unsafe_differences, 2, init=False, cells=[cell], without=without)
