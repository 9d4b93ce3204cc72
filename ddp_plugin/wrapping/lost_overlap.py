"""What takes the overlap of backward and reduction away, above all under ``torch.compile``, and how to get it back.

Dynamo cuts a compiled model's graph at the buckets of the DistributedDataParallel that runs it, so that each part of
the backward can hand its gradients over when it is done. That works in both orders, a compiled model in the wrap and a
wrap that is compiled, because compilation waits for the first forward. It is lost where the cuts are switched off, and
where the model had run before the wrap: then the whole graph that was compiled for it runs on, uncut.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_plugin import _compat

__all__ = ["Compilation", "given_cap_mb", "look_at_compilation", "why_late"]

LATE_RATIO = 0.85
"""The part of the backward after which the first of several buckets is late; it comes at a quarter or a third."""

_MEBIBYTE = 1 << 20
_ONE_BUCKET_BYTES = 4 * _MEBIBYTE  # less than this is sent in no time


@dataclass(frozen=True)
class Compilation:
    """What is known of a model when it is wrapped.

    Attributes:
        is_compiled: whether ``torch.compile`` is at work in it.
        is_cut: whether Dynamo cuts graphs at buckets: its own setting ``optimize_ddp``.
        has_run: whether compiled code of it exists already.
    """

    is_compiled: bool = False
    is_cut: bool = True
    has_run: bool = False

    @property
    def warning(self) -> str | None:
        """What is certain before anything was measured, in words."""
        if self.is_compiled and not self.is_cut:
            return (
                "torch._dynamo.config.optimize_ddp is off: a compiled model is one graph, whose gradients all become "
                "ready at the end of the backward, so no reduction overlaps with it. Set it to True, or compile block "
                "by block (block.compile())."
            )
        return None


def look_at_compilation(model: nn.Module) -> Compilation:
    """Looks at a model that is about to be wrapped.

    Collectives:
        None.
    """
    if not _compat.is_compiled(model):
        return Compilation()
    return Compilation(True, _compat.cuts_compiled_graphs(), _compat.has_compiled_code(model))


def given_cap_mb(model: nn.Module | None) -> float | None:
    """Returns the size of a bucket that a wrap was given, in mebibytes; ``None`` for torch's default and for lists.

    Collectives:
        None.
    """
    if not isinstance(model, DistributedDataParallel):
        return None
    if model.bucket_bytes_cap_default or getattr(model, "bucket_bytes_cap_list", False):  # lists are of torch 2.13
        return None
    return float(model.bucket_bytes_cap / _MEBIBYTE)


def why_late(
    ready_ratios: Sequence[float],
    bucket_bytes: Sequence[int],
    compilation: Compilation,
    bucket_cap_mb: float | None = None,
) -> str | None:
    """Says why gradients have to wait for the end of the backward; ``None`` where they do not.

    Args:
        ready_ratios: for each bucket, the part of the backward that had passed when it was ready.
        bucket_bytes: of each bucket.
        compilation: see :func:`look_at_compilation`.
        bucket_cap_mb: the size that was asked for; ``None`` is torch's default, with a small first bucket.

    Collectives:
        None.
    """
    if bucket_cap_mb is not None and len(ready_ratios) == 1 and bucket_bytes[0] >= _ONE_BUCKET_BYTES:
        size_mb = bucket_bytes[0] / _MEBIBYTE
        if size_mb <= bucket_cap_mb:
            return (
                f"All gradients, {size_mb:.3g} MiB, travel in one bucket of bucket_cap_mb={bucket_cap_mb:g}, which is "
                "ready at the end of the backward. Leave bucket_cap_mb out, which gives a small first bucket, or lower "
                f"it, for instance to {size_mb / 4:.2g}."
            )
    if len(ready_ratios) < 2 or min(ready_ratios) < LATE_RATIO:
        return None
    late = f"The first of {len(ready_ratios)} buckets is ready when {min(ready_ratios):.0%} of the backward have passed"
    if compilation.warning is not None:
        return f"{late}: {compilation.warning}"
    if compilation.has_run:
        return (
            f"{late}: the compiled model had run before it was wrapped, and the graph of that time, which nobody cut "
            "at buckets, runs on. Call torch.compiler.reset() before fit, or run the model before it is compiled."
        )
    if compilation.is_compiled:
        return (
            f"{late}, so hardly any reduction overlaps with it. Compiled graphs are cut at buckets here: does "
            "something in the model need all of them, as a layer that is used at every position? Compile block "
            "by block (block.compile()) to compare."
        )
    return (
        f"{late}, so hardly any reduction overlaps with it: do all layers work through the whole forward, as those of "
        "a recurrent network, or does one backward function give all gradients?"
    )
