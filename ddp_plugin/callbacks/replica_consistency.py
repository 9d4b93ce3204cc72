"""Replicas that have parted are found within k steps, and the first tensor that differs is named on all ranks."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from ddp_plugin.callbacks._shell import control_group_of
from ddp_plugin.errors import DDPPluginError, explain
from ddp_plugin.fingerprint import Difference, Entry, differences, digests, take_fingerprints
from ddp_plugin.gather import broadcast_object, gather_objects
from ddp_plugin.replica_state import KINDS, PARAMETER, PROGRESS, TRAINABLE, replica_state

__all__ = ["ReplicaConsistency"]

_ON_DIFFERENCE = ("raise", "warn", "repair")
_CHUNK = 2**20  # elements that are compared in one message
_NUM_NAMED = 20  # entries that a repair names


class ReplicaConsistency(pl.Callback):
    """Checks that all ranks hold the same training, bit for bit, and says what differs first and on which ranks.

    Compared are the global step and the epoch, which parameters are trainable, every hyperparameter of the optimizers'
    groups (the learning rate among them), parameters, buffers, and optimizer states; right after the start of ``fit``,
    after every ``every_n_steps`` optimizer steps, and at its end. Steps are counted by batches, so ranks that stepped
    their optimizers unequally still check together. Between two ranks that are equal no check is ever red; a
    difference of one bit in one element is always found (:mod:`ddp_plugin.fingerprint`).

    Left out, because each rank's are its own by design: the running statistics of BatchNorm and InstanceNorm layers
    that are not synchronised (``torch.nn.SyncBatchNorm`` and the layers of ``ConvertSyncBatchNorm`` are compared),
    everything inside torchmetrics objects, the states of a ``ZeroRedundancyOptimizer``, the loss that ``LBFGS``
    remembers, and what DistributedDataParallel was told to ignore. A buffer of your own that each rank updates from its
    own batch differs until DDP's next broadcast: name it in ``ignore``, and so do for parameters that torch's
    post-local SGD lets part. With ``comm_hook="local_sgd"`` or ``"diloco"`` a check that is due while the ranks train
    alone waits for their next exchange, and optimizer states, which stay each rank's own, are compared at the start.

    Args:
        every_n_steps: optimizer steps between two checks.
        on_difference: ``"raise"`` on all ranks; ``"warn"`` once for each first difference; ``"repair"``: rank 0's value
            is copied to all ranks and one warning names what was repaired. Counters, the set of trainable parameters
            and entries that a rank lacks cannot be repaired, and raise.
        ignore: patterns as in :mod:`fnmatch` for names of parameters, buffers, optimizer states, hyperparameters and
            counters that are not compared, such as ``"codebook.*"``.

    Raises:
        ValueError: ``every_n_steps`` below 1, or another ``on_difference``.
        TypeError: at setup, several processes under another strategy than ``CustomDDPStrategy``.
        DDPPluginError: on all ranks, when the replicas differ.

    Collectives:
        On the control group, on all ranks: one all-gather of six integers for each check. Where they differ: one object
        gather of all fingerprints, one all-reduce for each part of the first tensor, and for a repair a broadcast for
        each entry. None on one process.
    """

    def __init__(
        self, every_n_steps: int = 100, on_difference: str = "raise", ignore: Sequence[str] | None = None
    ) -> None:
        if every_n_steps < 1:
            raise ValueError(explain("every_n_steps of at least 1", repr(every_n_steps), "Count optimizer steps"))
        if on_difference not in _ON_DIFFERENCE:
            raise ValueError(explain(f"on_difference to be one of {_ON_DIFFERENCE}", repr(on_difference), "Choose one"))
        self.every_n_steps = every_n_steps
        self.on_difference = on_difference
        self.ignore = tuple(ignore or ())
        self._group: dist.ProcessGroup | None = None
        self._num_steps = 0
        self._is_due = False
        self._warned: set[tuple[str, str]] = set()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Finds the control group; with a hook that exchanges nothing there is nothing to compare."""
        self._group = control_group_of(self, trainer)
        hook = getattr(trainer.strategy, "comm_hook", None)
        if self._group is not None and hook is not None and hook.exchanges_nothing:
            rank_zero_info(f"ReplicaConsistency compares nothing with comm_hook={hook.name!r}: the ranks never meet.")
            self._group = None
        self._num_steps = 0
        self._is_due = False
        self._warned.clear()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Checks what the ranks start from."""
        self._check(trainer, "at the start of fit")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Checks after every ``every_n_steps`` optimizer steps."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches and not trainer.is_last_batch:
            return
        self._num_steps += 1
        self._is_due = self._is_due or self._num_steps % self.every_n_steps == 0
        if self._is_due and PARAMETER not in _parted(trainer):
            self._is_due = False
            self._check(trainer, f"after {self._num_steps} steps of this run")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Checks what the ranks end with."""
        self._check(trainer, "at the end of fit")

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Lets go of the group."""
        self._group = None

    # --------------------------------------------------------------------------------------------------------- a check

    def _check(self, trainer: pl.Trainer, when: str) -> None:
        if self._group is None:
            return
        entries = replica_state(
            trainer.lightning_module,
            trainer.optimizers,
            {"global_step": trainer.global_step, "epoch": trainer.current_epoch},
            (*self.ignore, *getattr(trainer.strategy.model, "parameters_to_ignore", ())),
        )
        parted = _parted(trainer)
        fingerprints = take_fingerprints([entry for entry in entries if entry.kind not in parted])
        parts = gather_objects(list(digests(fingerprints, KINDS)), self._group)
        if all(part == parts[0] for part in parts):
            return
        found = differences(gather_objects(fingerprints, self._group), KINDS)
        by_name = {(entry.kind, entry.name): entry for entry in entries}
        text = self._describe(found, by_name)
        if self.on_difference == "repair":
            self._refuse_what_cannot_be_repaired(found, by_name, text, when)
            for difference in found:
                _repair(by_name[difference.kind, difference.name], difference, self._group)
            names = [f"{difference.kind} {difference.name}" for difference in found]
            more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
            rank_zero_warn(
                f"ReplicaConsistency: replicas differed {when}. {text}. Rank 0's values were copied to all ranks: "
                f"{', '.join(names[:_NUM_NAMED])}{more}."
            )
        elif self.on_difference == "raise":
            raise DDPPluginError(_error(f"all replicas to be equal {when}", text))
        elif (key := (found[0].kind, found[0].name)) not in self._warned:
            self._warned.add(key)
            rank_zero_warn(f"ReplicaConsistency: replicas differ {when}. {text}.")

    def _describe(self, found: list[Difference], entries: dict[tuple[str, str], Entry]) -> str:
        """Describes the first difference in full, and the first of each further kind."""
        first = found[0]
        text = first.describe()
        if first.is_in_bits:
            text += _largest_difference(entries[first.kind, first.name].value, self._group)
        for kind in KINDS:
            others = [difference for difference in found if difference.kind == kind and difference is not first]
            if others:
                more = "more " if kind == first.kind else ""
                plural = "s" if len(others) > 1 else ""
                text += f"; {len(others)} {more}{kind}{plural}, the first: {others[0].name}"
        return text

    def _refuse_what_cannot_be_repaired(
        self, found: list[Difference], entries: dict[tuple[str, str], Entry], text: str, when: str
    ) -> None:
        for difference in found:
            entry = entries.get((difference.kind, difference.name))
            is_fixed = difference.kind in (PROGRESS, TRAINABLE) or (
                entry is not None and not isinstance(entry.value, Tensor) and not isinstance(entry.owner, (dict, list))
            )
            has_gaps = any(item is None for item, _ in difference.groups)
            has_shapes = not difference.is_in_bits and any(item and item.is_tensor for item, _ in difference.groups)
            if is_fixed or has_gaps or has_shapes:
                raise DDPPluginError(
                    _error(f"replicas that differ {when} in what can be repaired", f"{difference.describe()} ({text})")
                )


def _parted(trainer: pl.Trainer) -> frozenset[str]:
    """Returns the kinds of entries that differ between ranks now because the strategy lets them."""
    parted: frozenset[str] = getattr(trainer.strategy, "parted", frozenset())
    return parted


def _error(expected: str, got: str) -> str:
    change = (
        "Look for a rank that went its own way (an edit in place, loss.backward() instead of manual_backward, a metric "
        "without sync_dist that sets a learning rate); name in ReplicaConsistency(ignore=[...]) what differs on purpose"
    )
    return explain(expected, got, change)


def _largest_difference(tensor: Tensor, group: dist.ProcessGroup | None) -> str:
    """Says how far apart the ranks' values are; collective, on all ranks."""
    if tensor.layout is not torch.strided:
        return ""
    tensor = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    largest, num_differing = 0.0, 0
    for part in torch.split(tensor.reshape(-1), _CHUNK):
        values = part.to("cpu", torch.float64)
        is_nan = values.isnan()
        values = values.masked_fill(is_nan, 0.0)
        extremes = torch.stack([-values, values, is_nan.double(), 1.0 - is_nan.double()])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
        lowest, highest = -extremes[0], extremes[1]
        spread = torch.where(highest == lowest, 0.0, highest - lowest)
        spread = torch.where(extremes[2] * extremes[3] > 0, torch.inf, spread)  # NaN on some ranks, a number on others
        largest = max(largest, float(spread.max()))
        num_differing += int((spread > 0).sum())
    if num_differing == 0:
        return " (in bits that a value does not show, such as the sign of a zero)"
    return f" (largest |difference| {largest:.6g}, in {num_differing} of {tensor.numel()} elements)"


def _repair(entry: Entry, difference: Difference, group: dist.ProcessGroup | None) -> None:
    """Copies rank 0's value to all ranks."""
    if not difference.is_in_bits:
        entry.owner[entry.key] = broadcast_object(entry.value, group)
        return
    with torch.no_grad():
        if entry.value.layout is not torch.strided:
            entry.value.copy_(broadcast_object(entry.value.detach().cpu(), group))
            return
        value = entry.value.detach().to("cpu", copy=True).contiguous()
        source = dist.get_global_rank(group, 0) if group is not None else 0
        dist.broadcast(value, source, group=group)
        entry.value.copy_(value)
