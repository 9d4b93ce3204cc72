"""The cells, and a sample of them in which every pair of settings occurs."""

import itertools
from dataclasses import astuple, dataclass, fields

__all__ = ["TABLE", "Cell", "sample"]

BATCH_SIZE = 3  # samples of one rank's micro-batch
NUM_STEPS = 20  # optimizer steps


@dataclass(frozen=True)
class Cell:
    """One training run.

    Attributes:
        model: name in :data:`tests.parity.models.MODELS`.
        num_ranks: processes.
        accumulate: micro-batches per optimizer step.
        data: ``"even"``: an epoch is a whole number of optimizer steps; ``"uneven"``: its last window is short, and its
            last global batch neither full nor divisible by the ranks.
        clipping: whether the gradient's norm is clipped.
        graph: ``"plain"``, ``"static"`` (a parameter is never used) or ``"unused"`` (some are not used in some steps).
    """

    model: str
    num_ranks: int
    accumulate: int
    data: str
    clipping: bool
    graph: str

    @property
    def name(self) -> str:
        clipping = "clipped" if self.clipping else "unclipped"
        return f"{self.model}-{self.num_ranks}ranks-accumulate{self.accumulate}-{self.data}-{clipping}-{self.graph}"

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        size = self.num_ranks * BATCH_SIZE
        if self.data == "even":
            return 2 * self.accumulate * size
        return (self.accumulate + 1) * size + self.num_ranks + 1


AXES = {
    "model": ("mlp", "convnet", "transformer"),
    "num_ranks": (1, 2, 3, 4),
    "accumulate": (1, 3),
    "data": ("even", "uneven"),
    "clipping": (False, True),
    "graph": ("plain", "static", "unused"),
}
assert list(AXES) == [field.name for field in fields(Cell)]
TABLE = [Cell(*values) for values in itertools.product(*AXES.values())]


def pairs_of(cell: Cell) -> set[tuple[tuple[int, object], ...]]:
    return set(itertools.combinations(enumerate(astuple(cell)), 2))


def sample() -> list[Cell]:
    """Returns few cells that hold every pair of settings of the table, always the same ones."""
    missing = set().union(*(pairs_of(cell) for cell in TABLE))
    chosen: list[Cell] = []
    while missing:
        best = max(TABLE, key=lambda cell: len(pairs_of(cell) & missing))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen
