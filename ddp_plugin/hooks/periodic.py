"""Parameters instead of gradients, now and then: every rank trains alone for a period, then the ranks become one model.

What travels is the outer gradient, by how much a rank's parameters have left the anchor, the last model that all ranks
had in common. Its mean over the ranks goes through an SGD of its own: with learning rate 1 and no momentum that is the
mean of the ranks' parameters, local SGD; with Nesterov's momentum it is DiLoCo.

In the beginning, when ranks that train alone part fastest, they exchange their gradients in each step, as without a
hook: post-local SGD. DiLoCo's authors begin with a model that was trained so.

Reference:
    S. U. Stich, Local SGD converges fast and communicates little, ICLR 2019; T. Lin et al., Don't use large
    mini-batches, use local SGD, ICLR 2020; A. Douillard et al., DiLoCo: distributed low-communication training of
    language models, 2023.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_plugin._compat import GradBucket
from ddp_plugin.averaging import average, chunks, flatten, take_from_first_rank, unflatten
from ddp_plugin.errors import DDPPluginError, check_count, explain
from ddp_plugin.hooks._attached import AttachedHook, dropped
from ddp_plugin.hooks._contents import Contents
from ddp_plugin.hooks._exchange import done
from ddp_plugin.hooks._feedback import working_dtype
from ddp_plugin.hooks._record import CommHook, OuterStep
from ddp_plugin.hooks._resolve import HookSpec, resolve_inner

__all__ = ["Averager", "diloco", "local_sgd", "outer_step"]


def outer_step(anchor: Tensor, gradient: Tensor, momentum: Tensor | None, outer: OuterStep) -> None:
    """Makes one step of the outer SGD, as :class:`torch.optim.SGD` would.

    Args:
        anchor: the parameters, any shape; overwritten.
        gradient: the mean outer gradient, same shape.
        momentum: what the last steps left, same shape, zero before the first; overwritten. ``None`` without momentum.
        outer: learning rate and momentum.
    """
    if momentum is not None:
        momentum.mul_(outer.momentum).add_(gradient)
        gradient = gradient.add(momentum, alpha=outer.momentum) if outer.nesterov else momentum
    anchor.add_(gradient, alpha=-outer.learning_rate)


@dataclass(frozen=True)
class _Piece:
    """Parameters that are exchanged in one go.

    Attributes:
        parameters: of one dtype and device.
        contents: what lies behind one another in the flat tensors.
        anchor: the last common values, flat, in fp32 at least.
        momentum: the outer SGD's, alike; ``None`` without momentum.
    """

    parameters: list[Tensor]
    contents: Contents
    anchor: Tensor
    momentum: Tensor | None

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        return {name: view.detach().cpu().clone() for name, view in self.contents.split(flat)}


class Averager(AttachedHook):
    """A hook at work that leaves gradients alone, and exchanges the trainable parameters once a period.

    Before that, for ``start_step`` optimizer steps, gradients become their exact mean, and nothing else happens. With
    the last of these steps begins the first period: there is the anchor, and the outer momentum is zero.

    Floating buffers, such as BatchNorm's statistics, become their mean at each exchange and where the first period
    begins, other buffers those of the first rank; not so where the wrap has ``broadcast_buffers=False``, by which each
    rank keeps its own.

    It blocks while it exchanges, 32 MiB at a time or one parameter, and holds one copy of the trainable parameters, two
    with momentum, in fp32 at least.

    Args:
        hook: a record with an outer step.
        model: the wrap, all ranks' parameters being equal.
        pg_options: as for :class:`AttachedHook`.
        loss_scale: not used; gradients stay each rank's own.

    Collectives:
        As for :class:`AttachedHook`.
    """

    def __init__(
        self,
        hook: CommHook,
        model: DistributedDataParallel,
        pg_options: Any = None,
        loss_scale: Callable[[], Tensor | None] = lambda: None,
    ) -> None:
        assert hook.outer is not None
        self.outer = hook.outer
        self._num_exact_steps = self.outer.num_exact_steps
        self._has_reduced = False  # a bucket, since the last optimizer step
        self._pieces: list[_Piece] = []
        self._buffers: list[Tensor] = []
        super().__init__(hook, model, pg_options, loss_scale)

    # ------------------------------------------------------------------------------------------------ the parameters

    def follow(self, model: DistributedDataParallel) -> None:
        """Goes on with another wrap; parameters that are new to it begin with their values of now.

        Collectives:
            None.
        """
        super().follow(model)
        known = {id(parameter): values for parameter, *values in self._walk()}
        ignored = set(model.parameters_to_ignore)
        parameters = [p for name, p in model.module.named_parameters() if p.requires_grad and name not in ignored]
        buffers = model.module.named_buffers() if model.broadcast_buffers else ()
        self._buffers = [buffer for name, buffer in buffers if name not in ignored]
        self._pieces = []
        for positions in chunks(parameters):
            chunk: list[Tensor] = [parameters[position] for position in positions]
            contents = Contents.of(chunk, self._names)
            contents = replace(contents, dtype=working_dtype(contents.dtype))
            anchor = flatten(chunk, contents.dtype)
            momentum = torch.zeros_like(anchor) if self.outer.momentum else None
            piece = _Piece(chunk, contents, anchor, momentum)
            self._pieces.append(piece)
            for parameter, *views in self._walk([piece]):
                for view, before in zip(views, known.get(id(parameter), ()), strict=False):
                    if view is not None and before is not None:
                        view.copy_(before)

    def _walk(self, pieces: list[_Piece] | None = None) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """Returns each parameter with the views of its anchor and its momentum."""
        found: list[tuple[Tensor, Tensor, Tensor | None]] = []
        for piece in self._pieces if pieces is None else pieces:
            anchors = [view for _, view in piece.contents.split(piece.anchor)]
            momenta: list[Tensor | None] = [None] * len(anchors)
            if piece.momentum is not None:
                momenta = [view for _, view in piece.contents.split(piece.momentum)]
            found += zip(piece.parameters, anchors, momenta, strict=True)
        return found

    def take_anchor(self) -> None:
        """Begins with the parameters as they are now, the same on all ranks, and remembers nothing of before.

        Collectives:
            None.
        """
        for piece in self._pieces:
            piece.anchor.copy_(flatten(piece.parameters, piece.anchor.dtype))
            if piece.momentum is not None:
                piece.momentum.zero_()
        self._residuals.load({})

    # ---------------------------------------------------------------------------------------------------- the steps

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Gives a bucket back as it is; in the exact steps, its mean.

        Collectives:
            None while the ranks train alone; one all-reduce in the exact steps.
        """
        gradient = bucket.buffer()
        if self.trains_alone:
            return done(gradient)
        self._has_reduced = True
        if not gradient.is_sparse and not gradient.numel():  # parameters without elements, alone in their dtype
            return done(gradient)
        return self._exact.start(gradient, Contents((), (), gradient.dtype))

    @property
    def num_steps(self) -> int:
        """How many optimizer steps were made."""
        return self._num_steps

    @property
    def trains_alone(self) -> bool:
        """Whether the next step's gradients stay each rank's own: run forward and backward within ``no_sync()``."""
        return self._num_steps >= self.hook.start_step

    @property
    def exchanges_next(self) -> bool:
        """Whether the next :meth:`after_step` exchanges parameters, or buffers before the first period."""
        num_alone = self._num_steps + 1 - self.hook.start_step
        return num_alone >= 0 and num_alone % self.outer.period == 0

    def after_step(self) -> None:
        """Counts an optimizer step; at the end of a period the ranks become one model.

        Call it once for each step of the training, also where several optimizers make it, on all ranks equally often.

        Raises:
            DDPPluginError: an exact step whose gradients were not reduced.

        Collectives:
            At the end of a period, on every rank: the exchanges of all pieces; for buffers, all-reduces and broadcasts,
            also after the last exact step.
        """
        if not self.trains_alone:
            self._refuse_unreduced()
        meets = self.exchanges_next
        self._num_steps += 1
        if meets and self._num_steps == self.hook.start_step:
            self._average_buffers()
            self.take_anchor()
        elif meets:
            self._exchange_parameters()

    def _refuse_unreduced(self) -> None:
        has_gradients = any(p.grad is not None for piece in self._pieces for p in piece.parameters)
        if has_gradients and not self._has_reduced and self._exchange.world_size > 1:
            raise DDPPluginError(
                explain(
                    f"reduced gradients in the first {self.hook.start_step} steps (start_step of {self.hook.name})",
                    f"none in step {self._num_steps + 1}, so that the ranks' models have parted",
                    "Run backward within no_sync() only when trains_alone says so, or for all but the last micro-batch",
                )
            )
        self._has_reduced = False

    @torch.no_grad()
    def _exchange_parameters(self) -> None:
        self._average_buffers()
        is_alone = self._exchange.world_size == 1
        if is_alone and self.outer.learning_rate == 1 and not self.outer.momentum:
            return  # its mean is what it has, without the rounding of a difference
        exchange = self._exact if self._num_steps <= self._num_exact_steps else self._exchange
        for piece in self._pieces:
            gradient = flatten(piece.parameters, piece.anchor.dtype).sub_(piece.anchor).neg_()
            self._exchange_in_lane(exchange, gradient, piece.contents, None)
            outer_step(piece.anchor, gradient, piece.momentum, self.outer)
            unflatten(piece.anchor, piece.parameters)

    def average(self) -> None:
        """Makes the ranks one model by the plain mean, such as before an evaluation; the period goes on as it was.

        Anchor, momentum and the count of steps stay, so the next exchange goes from the same anchor. After an exact
        step the ranks are one model anyway.

        Collectives:
            All-reduces of the trainable parameters and of floating buffers, broadcasts of other buffers, on every rank;
            none in the exact steps.
        """
        if not self.trains_alone:
            return
        average([parameter for piece in self._pieces for parameter in piece.parameters], self.group)
        self._average_buffers()

    def _average_buffers(self) -> None:
        is_mean = [buffer.is_floating_point() or buffer.is_complex() for buffer in self._buffers]
        average([b for b, floats in zip(self._buffers, is_mean, strict=True) if floats], self.group)
        take_from_first_rank([b for b, floats in zip(self._buffers, is_mean, strict=True) if not floats], self.group)

    def idle(self) -> str | None:
        """Returns, in words, that the ranks have not exchanged parameters yet; ``None`` when they have."""
        start_step, period = self.hook.start_step, self.outer.period
        if self._num_steps >= start_step + period:
            return None
        if not start_step:
            return f"{self.hook.name} exchanges parameters for the first time after {period} steps (period)"
        return (
            f"{self.hook.name} exchanges gradients for {start_step} steps (start_step), and parameters for the first "
            f"time after {period} more (period)"
        )

    # ---------------------------------------------------------------------------------------------------- checkpoint

    def state(self) -> dict[str, Any]:
        """Returns what the next run needs to go on: see :meth:`AttachedHook.state`.

        Collectives:
            As for :meth:`AttachedHook.state`.
        """
        left_out = self._residuals.share(self.group)
        anchor, momentum = {}, {}
        for piece in self._pieces if self.trains_alone else ():
            anchor.update(piece.by_name(piece.anchor))
            if piece.momentum is not None:
                momentum.update(piece.by_name(piece.momentum))
        return {
            "name": self.hook.name,
            "between": self.hook.options.get("between"),
            "num_steps": self._num_steps,
            "residuals": {},  # of gradients, for a run whose hook exchanges those
            "exchange": self._exchange.state(),
            "anchor": anchor,
            "momentum": momentum,
            "parameter_residuals": left_out,
        }

    def load(self, state: Mapping[str, Any] | None) -> str | None:
        """Takes back a state, also one with another outer step; see :meth:`AttachedHook.load`.

        A run that exchanged gradients has no anchor: the parameters that it left are the anchor then, and with another
        hook of gradients ``start_step`` begins anew.

        Collectives:
            None.
        """
        if state is None:
            return None
        if "anchor" not in state:
            return dropped(state, f"comm_hook={self.hook.name!r} exchanges parameters")
        self._num_steps = int(state["num_steps"])
        if not self.trains_alone:
            return dropped(state, f"start_step={self.hook.start_step} has not been reached")
        names = [name for piece in self._pieces for name in piece.contents.names]
        for name, (_, *views) in zip(names, self._walk(), strict=True):
            for view, saved in zip(views, (state["anchor"], state["momentum"]), strict=True):
                if view is not None and name in saved and saved[name].shape == view.shape:
                    view.copy_(saved[name])
        if state["between"] == self.hook.options.get("between"):
            self._exchange.load(state["exchange"])
        if self._exchange.leaves_error:
            self._residuals.load(state["parameter_residuals"])
        elif state["parameter_residuals"]:
            return dropped(state, f"between={self.hook.options.get('between')!r} has no error feedback")
        return None


# ------------------------------------------------------------------------------------------------------- the records


def local_sgd(period: int = 8, between: HookSpec = "allreduce", start_step: int = 200) -> CommHook:
    """Post-local SGD: every rank trains alone for a period, then the parameters become their mean.

    Communication falls to ``1 / period`` of one parameter's size a step. Clipping, learning rates and what an optimizer
    remembers are each rank's own in between, so it is another algorithm than data parallel training, not a faster way
    to the same numbers; with a period of 1 and an SGD without momentum and clipping it is the same.

    What that costs in loss is the more, the faster the model changes, so the first steps are those of data parallel
    training; with ``start_step=0`` it is local SGD from the beginning.

    Args:
        period: optimizer steps from one exchange to the next.
        between: the hook by which the ranks exchange, as for ``comm_hook``; what it leaves out is sent the next time.
            Its own ``start_step`` counts optimizer steps from the beginning of the run.
        start_step: number of first optimizer steps in which gradients become their exact mean. Ranks that train alone
            part most in the beginning; see :func:`~ddp_plugin.hooks.powersgd.powersgd`. The first period begins then.

    Raises:
        ValueError: an option out of its range.

    Collectives:
        Until ``start_step`` one all-reduce per bucket, and the means of the buffers at its end; then none for a
        gradient. Every ``period`` steps those of ``between``, and the means of the buffers, all ranks.
    """
    return _record("local_sgd", OuterStep(period), between, start_step, {"period": period})


def diloco(
    period: int = 500,
    learning_rate: float = 0.7,
    momentum: float = 0.9,
    nesterov: bool = True,
    between: HookSpec = "allreduce",
    start_step: int = 200,
) -> CommHook:
    """DiLoCo: local training, and Nesterov's momentum over the exchanges.

    The defaults are the paper's, for language models whose inner optimizer is AdamW and whose run has many periods;
    the outer learning rate wants tuning as any other. See :func:`local_sgd` for what is each rank's own.

    Args:
        period: optimizer steps from one exchange to the next.
        learning_rate: of the outer SGD.
        momentum: of the outer SGD.
        nesterov: whether it is Nesterov's.
        between: the hook by which the ranks exchange, as for ``comm_hook``; what it leaves out is sent the next time.
            Its own ``start_step`` counts optimizer steps from the beginning of the run.
        start_step: number of first optimizer steps in which gradients become their exact mean. Ranks that train alone
            part most in the beginning; see :func:`~ddp_plugin.hooks.powersgd.powersgd`. The first period begins then.

    Raises:
        ValueError: an option out of its range.

    Collectives:
        Until ``start_step`` one all-reduce per bucket, and the means of the buffers at its end; then none for a
        gradient. Every ``period`` steps those of ``between``, and the means of the buffers, all ranks.
    """
    if not 0 < learning_rate < math.inf:
        raise ValueError(explain("an outer learning_rate above 0", repr(learning_rate), "0.7 is the default"))
    if not 0 <= momentum < 1:
        raise ValueError(explain("an outer momentum of at least 0 and below 1", repr(momentum), "0.9 is the default"))
    if nesterov and not momentum:
        raise ValueError(explain("a momentum above 0 beside nesterov=True", repr(momentum), "Set nesterov=False"))
    outer = OuterStep(period, float(learning_rate), float(momentum), bool(nesterov))
    options = {"period": period, "learning_rate": learning_rate, "momentum": momentum, "nesterov": nesterov}
    return _record("diloco", outer, between, start_step, options)


def _wire_bytes(contents: Contents, world_size: int, rank: int, inner: CommHook) -> int:
    return inner.wire_bytes(replace(contents, dtype=working_dtype(contents.dtype)), world_size, rank)


def _record(name: str, outer: OuterStep, between: HookSpec, start_step: int, options: Mapping[str, Any]) -> CommHook:
    check_count("period", outer.period, 1)
    check_count("start_step", start_step, 0)
    inner = resolve_inner(between, name)
    if inner.start_step:
        outer = replace(outer, num_exact_steps=inner.start_step)
    return replace(
        inner,
        name=name,
        wire_bytes=partial(_wire_bytes, inner=inner),
        is_exact=False,  # what every rank trains alone in between is no one process's training
        is_direct=False,
        outer=outer,
        start_step=start_step,
        options={**options, "between": str(inner), "start_step": start_step},
    )
