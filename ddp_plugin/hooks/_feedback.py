"""Error feedback: what an exchange leaves out of a gradient is added to the next one, so nothing is lost for good.

Each rank keeps what it has left out so far, its residual. For the sum of all steps only the mean of the ranks'
residuals counts, so the mean is what a checkpoint holds, and every rank of the resumed run begins with it, on however
many ranks.

Reference:
    F. Seide et al., 1-bit stochastic gradient descent and its application to data-parallel distributed training of
    speech DNNs, Interspeech 2014; S. P. Karimireddy et al., Error feedback fixes SignSGD and other gradient compression
    schemes, ICML 2019.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from ddp_plugin.hooks._contents import Contents
from ddp_plugin.hooks._exchange import Exchange

__all__ = ["Residuals", "exchange_with_feedback", "used_elements", "working_dtype"]


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype to compress and remember in: at least fp32, or small residuals would drown."""
    return torch.promote_types(dtype, torch.float32)


def exchange_with_feedback(
    exchange: Exchange,
    gradient: torch.Tensor,
    contents: Contents,
    residual: torch.Tensor,
    used: torch.Tensor | None = None,
) -> None:
    """Replaces a gradient by its mean over the ranks, and a residual by what is still missing from all means so far.

    A gradient that is not finite comes out so on every rank, and the residual of those elements stays as it was there.

    Args:
        exchange: one that leaves an error.
        gradient: this rank's, flat; overwritten.
        contents: what it holds.
        residual: what this rank has left out so far, same shape, in :func:`working_dtype`; overwritten.
        used: which elements are sent, same shape, bool, the same on all ranks; the residual of the others stays as it
            is, and they are 0 in the result. ``None`` means all.

    Collectives:
        Those of the exchange.
    """
    values, error = residual + gradient, torch.empty_like(residual)
    if used is not None:
        values.mul_(used)
    exchange.mean_(values, contents, error)
    if used is not None:
        values.mul_(used)
        error = torch.where(used, error, residual)
    torch.where(values.abs() < torch.inf, error, residual, out=residual)  # isfinite() takes twice as long
    gradient.copy_(values)


def used_elements(gradient: torch.Tensor, contents: Contents, group: dist.ProcessGroup) -> torch.Tensor:
    """Returns which elements belong to parameters that some rank has used, as far as their gradient is not all zero.

    DDP gives nobody the result of a parameter that no rank has used, so what was left out of it has to wait.

    Args:
        gradient: this rank's, flat.
        contents: what it holds.
        group: the ranks.

    Returns:
        Bool, the gradient's shape, the same on all ranks.

    Collectives:
        One all-reduce of a byte per parameter, on every rank of the group.
    """
    parts = [part for _, part in contents.split(gradient)]
    is_used = torch.stack([(part != 0).any() for part in parts]).to(torch.uint8)  # a NaN is not 0 either
    dist.all_reduce(is_used, op=dist.ReduceOp.MAX, group=group)
    sizes = torch.tensor([part.numel() for part in parts], device=gradient.device)
    return is_used.bool().repeat_interleave(sizes, output_size=gradient.numel())


class Residuals:
    """What this rank has left out so far, by parameter; laid out as the buckets are, and again when those change."""

    def __init__(self) -> None:
        self._flat: dict[Contents, torch.Tensor] = {}
        self._by_name: dict[str, torch.Tensor] = {}  # views into the flat ones, or loaded ones that no bucket took yet
        self._scale: dict[Contents, torch.Tensor] = {}

    def of(self, contents: Contents, device: torch.device, loss_scale: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the residual of a bucket, to be changed in place; zero for what was never exchanged.

        Args:
            contents: what the bucket holds.
            device: where its gradient lies.
            loss_scale: by what the loss was multiplied in this step, shape ``()``; the residual follows when it
                changes. ``None`` means 1.
        """
        flat = self._flat.get(contents)
        if flat is None:
            flat = self._lay_out(contents, device)
        if loss_scale is not None:
            before = self._scale.get(contents)
            flat.mul_(loss_scale if before is None else loss_scale / before)
            self._scale[contents] = loss_scale.clone()
        return flat

    def _lay_out(self, contents: Contents, device: torch.device) -> torch.Tensor:
        flat = torch.zeros(contents.num_elements, dtype=working_dtype(contents.dtype), device=device)
        for old in [old for old in self._flat if not set(contents.names).isdisjoint(old.names)]:
            if (scale := self._scale.pop(old, None)) is not None:
                self._flat[old].div_(scale)  # what is laid out anew begins without a scale
            del self._flat[old]
        for name, view in contents.split(flat):
            before = self._by_name.get(name)
            if before is not None and before.shape == view.shape:  # else the parameter was replaced by another
                view.copy_(before)
            self._by_name[name] = view
        self._flat[contents] = flat
        return flat

    def share(self, group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
        """Gives every rank the mean of the ranks' residuals, so that a resumed run and this one go on alike.

        Returns:
            The means by parameter, unscaled, on the CPU.

        Collectives:
            One all-reduce for each parameter, on every rank of the group.
        """
        scale_of = {name: scale for contents, scale in self._scale.items() for name in contents.names}
        means = {}
        for name in sorted(self._by_name):
            residual = self._by_name[name]
            dist.all_reduce(residual, group=group)
            residual.div_(group.size())
            means[name] = (residual / scale_of[name] if name in scale_of else residual.clone()).cpu()
        return means

    def load(self, means: Mapping[str, torch.Tensor]) -> None:
        """Begins with these residuals, the same on every rank.

        Collectives:
            None.
        """
        self._flat.clear()
        self._scale.clear()
        self._by_name = {name: mean.clone() for name, mean in means.items()}
