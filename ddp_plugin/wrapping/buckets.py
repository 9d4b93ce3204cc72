"""The layout of gradient buckets, kept over a resume.

DDP begins with one layout and rebuilds it after its first step, by the order in which gradients arrived. A resumed run
would begin with the first layout again. With three ranks and more a ring adds each element in an order that depends on
its place in the bucket, so the resumed run's first step would differ from the uninterrupted one in the last bit.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_plugin import _compat
from ddp_plugin.gather import gather_objects
from ddp_plugin.wrapping.rewrap import TrainableParameters

__all__ = ["BucketLayout", "LayoutKeeper"]


@dataclass(frozen=True)
class BucketLayout:
    """Which parameters share a bucket, in the order of reduction.

    Attributes:
        names: the parameters that are reduced, in the module's order.
        buckets: positions in ``names``, bucket by bucket, in the order in which they lie there.
        cap_bytes: the bucket sizes in force when it was made; it is of no use to a run with others.
    """

    names: tuple[str, ...]
    buckets: tuple[tuple[int, ...], ...]
    cap_bytes: tuple[int, ...]

    @classmethod
    def of(
        cls,
        model: DistributedDataParallel,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter] | None = None,
    ) -> "BucketLayout | None":
        """Reads the rebuilt layout; ``None`` before there is one, and where DDP never rebuilds.

        Args:
            model: the wrap.
            names: the names of the parameters that it reduces.
            parameters: these parameters, if the answer cannot wait some steps; it may take their memory then.

        Collectives:
            None.
        """
        buckets = _compat.rebuilt_buckets(model, parameters)
        return None if buckets is None else cls(tuple(names), buckets, _caps(model))

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "BucketLayout":
        """Makes the layout from :meth:`state`."""
        buckets = tuple(tuple(int(index) for index in bucket) for bucket in state["buckets"])
        return cls(tuple(state["names"]), buckets, tuple(state["cap_bytes"]))

    def state(self) -> dict[str, Any]:
        """Returns the layout as lists of strings and numbers."""
        return {
            "names": list(self.names),
            "buckets": [list(bucket) for bucket in self.buckets],
            "cap_bytes": list(self.cap_bytes),
        }

    def covers(self, names: Sequence[str]) -> bool:
        """Whether it places each of these parameters exactly once, and no other."""
        placed = sorted(index for bucket in self.buckets for index in bucket)
        return self.names == tuple(names) and placed == list(range(len(self.names)))

    def fits(self, model: DistributedDataParallel) -> bool:
        """Whether a wrap, made with it, will rebuild its buckets by the same sizes."""
        return self.cap_bytes == _caps(model)


def _caps(model: DistributedDataParallel) -> tuple[int, ...]:
    sizes = (model.bucket_bytes_cap, *getattr(model, "bucket_bytes_cap_list", ()))
    return (int(model.bucket_bytes_cap_default), *(int(size) for size in sizes))


class LayoutKeeper:
    """Carries a layout from the checkpoint to the wrap that begins with it, and looks whether DDP comes back to it.

    Args:
        find_unused_parameters: whether DDP searches for unused parameters; it never rebuilds its buckets then.
    """

    def __init__(self, find_unused_parameters: bool) -> None:
        self._is_needed = not find_unused_parameters
        self._saved: BucketLayout | None = None  # of a checkpoint, until a wrap takes it
        self._expected: BucketLayout | None = None  # of that wrap, until DDP has rebuilt its buckets
        self._last: BucketLayout | None = None  # of the run that has ended

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Takes the layout out of a checkpoint, if there is one.

        Collectives:
            None.
        """
        state = checkpoint.get("ddp_plugin", {}).get("bucket_layout") if self._is_needed else None
        self._saved = BucketLayout.from_state(state) if state is not None else None

    def save(
        self,
        checkpoint: dict[str, Any],
        model: DistributedDataParallel | None,
        trainable: TrainableParameters | None,
        may_rebuild: bool = True,
    ) -> None:
        """Puts the layout in force into a checkpoint; after a run, the one that was in force at its end.

        Args:
            checkpoint: what will be written.
            model: the wrap, if there is one.
            trainable: the parameters that it reduces.
            may_rebuild: ``False`` where other ranks may not come; a layout that is due to change is left out then.

        Collectives:
            Those of DDP's rebuilding of its buckets on every rank, when that is due; none without ``may_rebuild``.
        """
        if model is not None and trainable is not None:
            if may_rebuild:
                _compat.finish_rebuilding_buckets(model)
            self._last = BucketLayout.of(model, trainable.names, trainable.parameters())
        if self._last is not None:
            checkpoint.setdefault("ddp_plugin", {})["bucket_layout"] = self._last.state()

    def end(self, model: DistributedDataParallel, trainable: TrainableParameters) -> None:
        """Remembers the layout at the end of a run, for a checkpoint that is written after it.

        Collectives:
            None.
        """
        self._last = BucketLayout.of(model, trainable.names, trainable.parameters())
        self._saved = self._expected = None

    def first_buckets(self, names: Sequence[str], group: dist.ProcessGroup | None) -> AbstractContextManager[None]:
        """Lets the wrap made inside begin with the saved layout, if it is for its parameters on all ranks.

        Args:
            names: the parameters that the wrap will reduce.
            group: the control group; ``None`` for one process.

        Collectives:
            One object gather on every rank of the group, where a layout was loaded.
        """
        self._expected = self._last = None
        if self._saved is not None and self._saved.covers(names):
            layout, self._saved = self._saved, None
            if len(set(gather_objects(layout, group))) == 1:
                self._expected = layout
        return _compat.first_buckets(self._expected.buckets if self._expected is not None else None)

    def complaint(self, model: DistributedDataParallel, names: Sequence[str]) -> str | None:
        """Returns, once, how the run reduces otherwise than the one that it continues.

        Args:
            model: the wrap, when a training batch begins.
            names: the parameters that it reduces.

        Collectives:
            None.
        """
        if self._saved is not None:
            self._saved = None
            return "the checkpoint's bucket layout is for other parameters"
        expected = self._expected
        layout = BucketLayout.of(model, names) if expected is not None else None
        if expected is None or layout is None:
            return None
        self._expected = None
        if not expected.fits(model):
            return "the checkpoint's bucket layout is for another bucket size"
        return "the gradients arrived in another order than in the checkpoint's run" if layout != expected else None
