"""What an evaluation on many ranks adds up to: pure arithmetic over what each rank logged."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["EvaluationRecord", "combine_logged", "merge_states"]


def combine_logged(reduction: str, parts: Sequence[tuple[float, float]]) -> float:
    """Combines one logged key's contributions of all ranks into what one process would have got.

    Args:
        reduction: ``"mean"``, ``"sum"``, ``"max"`` or ``"min"``.
        parts: ``(value, weight)`` of each rank that logged the key. For a mean the value is the weighted sum and the
            weight the number of samples behind it; for the others the weight is not used.

    Returns:
        The value in float64; NaN for a mean without weight, as dividing by zero gives one process.

    Raises:
        ValueError: an unknown reduction.
    """
    values = [value for value, _ in parts]
    if reduction == "mean":
        weight = sum(part_weight for _, part_weight in parts)
        return sum(values) / weight if weight else float("nan")
    if reduction == "sum":
        return sum(values)
    if reduction in ("max", "min"):
        if any(value != value for value in values):  # a NaN stays visible, wherever it stands
            return float("nan")
        return max(values) if reduction == "max" else min(values)
    raise ValueError(f"unknown reduction {reduction!r}")


def merge_states(
    parts: Sequence[tuple[int, Mapping[str, Any]]], reductions: Mapping[str, Callable[[Any], Any] | None]
) -> dict[str, Any]:
    """Merges the states that ranks hold of one metric into the state that one process would hold.

    Args:
        parts: ``(num_updates, states)`` of each rank, in rank order; a state is a tensor or a list of tensors. Ranks
            without an update contribute nothing, so their default states do not enter a mean or a merge.
        reductions: for each state the function that torchmetrics declares for it, applied to the stacked tensors or to
            the joined list; ``None`` keeps what was gathered, as torchmetrics does.

    Returns:
        The merged states; those of no contributor at all are left out.
    """
    contributions = [states for num_updates, states in parts if num_updates]
    merged: dict[str, Any] = {}
    for name, reduction in reductions.items():
        received = [states[name] for states in contributions]
        if received and isinstance(received[0], list):
            joined = [tensor for state in received for tensor in state]
            merged[name] = reduction(joined) if reduction is not None and joined else joined
        elif received and reduction is None and len(received) == 1:
            merged[name] = received[0]  # as one process holds it: nothing was merged
        elif received:
            stacked = torch.stack(received)
            merged[name] = stacked if reduction is None else reduction(stacked)
    return merged


@dataclass(frozen=True)
class EvaluationRecord:
    """What was evaluated by one loader in one evaluation, over all ranks.

    Attributes:
        stage: ``"validate"``, ``"test"``, ``"sanity_check"`` or ``"predict"``.
        dataloader_idx: position of the loader.
        num_samples: samples evaluated, each exactly once.
        num_batches: batches evaluated.
        num_steps: steps each rank took.
        num_ghost_steps: steps without a batch of the rank's own, over all ranks.
        num_batches_left_out: batches that a limit left out; ``None`` where their number is not known.
        num_samples_dropped: samples that ``drop_last`` left out.
        order_hash: hash of the batches and their positions, the same for every world size.
    """

    stage: str
    dataloader_idx: int
    num_samples: int
    num_batches: int
    num_steps: int
    num_ghost_steps: int
    num_batches_left_out: int | None
    num_samples_dropped: int
    order_hash: int

    def describe(self, world_size: int) -> str:
        """One line for people."""
        text = (
            f"{self.stage}: dataloader {self.dataloader_idx}: {self.num_samples} samples in {self.num_batches} "
            f"batches, each evaluated once, on {world_size} rank{'s' * (world_size > 1)}"
        )
        left_out = []
        if self.num_samples_dropped:
            left_out.append(f"drop_last left out {self.num_samples_dropped} samples")
        if self.num_batches_left_out is None:
            left_out.append("a limit may have left out batches; the loader does not say how many it has")
        elif self.num_batches_left_out:
            left_out.append(f"the limit on batches left out {self.num_batches_left_out} batches")
        return "; ".join([text, *left_out])
