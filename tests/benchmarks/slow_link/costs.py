"""The cost model on a real link: fitted to one algorithm at some sizes, judged at other sizes and on the others."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddp_plugin.collectives import Link, Measurement, fit, measure, predict

__all__ = ["FITTED", "Prediction", "fitted_link", "measure_costs", "predictions"]

FITTED = "ring"
ALGORITHMS = ("ring", "tree", "butterfly", "recursive_doubling", "parameter_server")
# Messages far above what the rate limit lets pass at once, so that it is the link that is timed.
FITTED_BYTES = (2**18, 2**20, 2**22)
HELD_OUT_BYTES = (2**19, 2**21)
NUM_REPEATS = 5


@dataclass(frozen=True)
class Prediction:
    """What the model said and what was measured.

    Attributes:
        algorithm: which.
        num_bytes: of the message.
        measured_s: seconds.
        predicted_s: seconds.
        is_fitted: whether the model had seen this.
    """

    algorithm: str
    num_bytes: int
    measured_s: float
    predicted_s: float
    is_fitted: bool

    @property
    def error_ratio(self) -> float:
        """Returns ``predicted / measured - 1``."""
        return self.predicted_s / self.measured_s - 1


def measure_costs() -> dict[str, Any]:
    """Measures all algorithms at all sizes.

    Collectives:
        Those of :func:`ddp_plugin.collectives.measure`, on all ranks.
    """
    sizes_bytes = sorted(FITTED_BYTES + HELD_OUT_BYTES)
    found = measure(sizes_bytes, algorithms=ALGORITHMS, num_repeats=NUM_REPEATS)
    return {"measured": [[one.algorithm, one.world_size, one.num_bytes, one.elapsed_s] for one in found]}


def predictions(measured: Sequence[Sequence[Any]], gradient: tuple[int, float] | None = None) -> list[Prediction]:
    """Fits the model to the ring at some sizes, and predicts everything.

    Args:
        measured: what :func:`measure_costs` returned.
        gradient: bytes and seconds of a whole gradient's ``dist.all_reduce``, which is a ring as well.

    Returns:
        One prediction for each, the fitted ones too.
    """
    known = _known(measured)
    fitted = _fitted(known)
    link = fit(fitted)
    listed = [
        Prediction(
            one.algorithm,
            one.num_bytes,
            one.elapsed_s,
            predict(link, one.algorithm, one.world_size, one.num_bytes),
            one in fitted,
        )
        for one in known
    ]
    if gradient is not None:
        num_bytes, measured_s = gradient
        predicted_s = predict(link, FITTED, known[0].world_size, num_bytes)
        listed.append(Prediction("dist.all_reduce", num_bytes, measured_s, predicted_s, False))
    return listed


def fitted_link(measured: Sequence[Sequence[Any]]) -> Link:
    """Returns the link as the ring shows it, at the sizes that :func:`predictions` fits to."""
    return fit(_fitted(_known(measured)))


def _known(measured: Sequence[Sequence[Any]]) -> list[Measurement]:
    return [Measurement(str(name), int(n), int(size), float(s)) for name, n, size, s in measured]


def _fitted(known: Sequence[Measurement]) -> list[Measurement]:
    return [one for one in known if one.algorithm == FITTED and one.num_bytes in FITTED_BYTES]
