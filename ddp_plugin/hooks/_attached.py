"""A hook at work on one model: it takes DDP's buckets, sends them through the exchange, and remembers in between.

This module does not use postponed annotations: DDP compares a hook's annotations as objects, and it finds the bucket by
the parameter's name, which must be ``bucket``.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_plugin._compat import GradBucket
from ddp_plugin.collectives.lane import Lane
from ddp_plugin.errors import explain
from ddp_plugin.hooks._contents import Contents
from ddp_plugin.hooks._exchange import DirectExchange, Exchange, done
from ddp_plugin.hooks._feedback import Residuals, exchange_with_feedback, used_elements
from ddp_plugin.hooks._record import CommHook
from ddp_plugin.hooks.exact import AllReduce
from ddp_plugin.process_group import HeldGroup, give_back_exchange_group, take_exchange_group

__all__ = ["AttachedHook", "dropped", "run_hook"]


class AttachedHook:
    """What one model's communication consists of: its exchange, its lane, its residuals, its count of steps.

    Args:
        hook: the record.
        model: the wrap whose gradients it exchanges.
        pg_options: backend options for a group of its own, where the exchange takes several collectives.
        loss_scale: returns by what the loss of the running step was multiplied, shape ``()``, or ``None``.

    Raises:
        ValueError: the hook must not train.

    Collectives:
        Making a group, where none is free that the exchange could take, and what the exchange makes for itself, on all
        ranks.
    """

    def __init__(
        self,
        hook: CommHook,
        model: DistributedDataParallel,
        pg_options: Any = None,
        loss_scale: Callable[[], torch.Tensor | None] = lambda: None,
    ) -> None:
        self.hook = hook
        if hook.refusal is not None:
            raise ValueError(hook.refusal)
        self._beside = HeldGroup(model.process_group)
        self._taken = None if hook.is_direct else take_exchange_group(model.process_group, pg_options)
        group = model.process_group if self._taken is None else self._taken()
        self._exchange = hook.make_exchange(group)
        self._exact = AllReduce(group)
        self._loss_scale = loss_scale
        self._lane = Lane(next(model.parameters()).device)
        self._residuals = Residuals()
        self._num_steps = 0
        self._is_given_back = False
        self._contents: dict[tuple[int, ...], Contents] = {}
        self.follow(model)

    @property
    def group(self) -> dist.ProcessGroup:
        """The group for the exchange."""
        return self._exact.group

    @property
    def leaves_error(self) -> bool:
        """Whether the exchange leaves something out, which is then kept for the next step."""
        return self._exchange.leaves_error

    def follow(self, model: DistributedDataParallel) -> None:
        """Goes on with another wrap of the model; what is remembered belongs to names, and stays.

        Collectives:
            None.
        """
        self._contents.clear()
        self._finds_unused = model.find_unused_parameters
        self._names = {id(parameter): name for name, parameter in model.module.named_parameters()}

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Starts the exchange of a bucket; returns at once.

        Returns:
            A future of the bucket's flat gradient, which then holds the mean over the ranks.

        Raises:
            TypeError: a sparse gradient, where the exchange cannot send it.

        Collectives:
            The exchange's, in the lane; all ranks hand over the same buckets in the same order.
        """
        gradient = bucket.buffer()
        if bucket.index() == 0:
            self._num_steps += 1
        if not gradient.is_sparse and not gradient.numel():  # parameters without elements, alone in their dtype
            return done(gradient)
        if gradient.is_sparse:
            return self._reduce_sparse(gradient)
        contents, spares_unused = self._contents_of(bucket, gradient.dtype), self._finds_unused
        exchange = self._exchange if self._num_steps > self.hook.start_step else self._exact
        if self.hook.is_direct and isinstance(exchange, DirectExchange):
            return exchange.start(gradient, contents)
        loss_scale = self._loss_scale()
        return self._lane.submit(
            lambda: self._exchange_in_lane(exchange, gradient, contents, loss_scale, spares_unused),
            f"the exchange of bucket {bucket.index()}",
        )

    def _exchange_in_lane(
        self,
        exchange: Exchange,
        gradient: torch.Tensor,
        contents: Contents,
        loss_scale: torch.Tensor | None,
        spares_unused: bool = False,
    ) -> torch.Tensor:
        if exchange.leaves_error:
            residual = self._residuals.of(contents, gradient.device, loss_scale)
            used = used_elements(gradient, contents, self.group) if spares_unused else None
            exchange_with_feedback(exchange, gradient, contents, residual, used)
        else:
            exchange.mean_(gradient, contents)
        return gradient

    def _reduce_sparse(self, gradient: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        if not self._exchange.takes_sparse:
            raise TypeError(
                explain(
                    f"dense gradients for comm_hook={self.hook.name!r}",
                    "a sparse gradient",
                    "Use comm_hook='allreduce' or comm_hook=None for this model, or layers with sparse=False",
                )
            )
        assert isinstance(self._exchange, DirectExchange)
        return self._exchange.start(gradient, Contents((), (), gradient.dtype))

    def _contents_of(self, bucket: GradBucket, dtype: torch.dtype) -> Contents:
        parameters = bucket.parameters()
        key = tuple(id(parameter) for parameter in parameters)
        if key not in self._contents:
            self._contents[key] = Contents.of(parameters, self._names, dtype)
        return self._contents[key]

    def after_step(self) -> None:
        """Comes after each optimizer step in a loop that serves any hook; nothing is left to do for gradients."""

    def average(self) -> None:
        """Comes before an evaluation or a checkpoint; gradients that are means keep the ranks one model anyway."""

    def state(self) -> dict[str, Any] | None:
        """Returns what the next run needs to go on: tensors on the CPU, numbers and strings, equal on all ranks.

        ``None`` where the hook remembers nothing.

        The ranks' residuals are their mean afterwards, so that a run resumed from it and this one go on alike.

        Collectives:
            One all-reduce for each parameter with a residual, on every rank of the group, after what runs has ended.
        """
        self._lane.drain()
        of_exchange = self._exchange.state()
        if not (self.leaves_error or of_exchange or self.hook.start_step):
            return None
        return {
            "name": self.hook.name,
            "num_steps": self._num_steps,
            "residuals": self._residuals.share(self.group),
            "exchange": of_exchange,
        }

    def load(self, state: Mapping[str, Any] | None) -> str | None:
        """Takes back a state, also that of another hook or of another number of ranks.

        Residuals are gradient that was left out, whatever hook left it: any hook with error feedback can send it.

        Args:
            state: what :meth:`state` returned; nothing happens for ``None``.

        Returns:
            What could not be taken over, in words, or ``None``.

        Collectives:
            None.
        """
        if state is None:
            return None
        self._lane.drain()
        if self.leaves_error:
            self._residuals.load(state["residuals"])
        if state["name"] == self.hook.name:
            self._num_steps = int(state["num_steps"])
            self._exchange.load(state["exchange"])
        if not self.leaves_error:
            return dropped(state, f"comm_hook={self.hook.name!r} has no error feedback")
        return dropped({**state, "residuals": {}}, f"comm_hook={self.hook.name!r} exchanges gradients")

    def idle(self) -> str | None:
        """Returns, in words, that the hook's own way has not begun yet; ``None`` when it has."""
        if self._num_steps > self.hook.start_step or not self.hook.start_step:
            return None
        return f"{self.hook.name} exchanges exact means for {self.hook.start_step} steps (start_step)"

    def close(self) -> None:
        """Ends the lane, when what runs in it has ended.

        Collectives:
            None.
        """
        self._lane.close()
        if self._taken is not None and not self._is_given_back and not self._lane.has_failed:
            give_back_exchange_group(self._beside(), self._taken)
            self._is_given_back = True


def dropped(state: Mapping[str, Any], reason: str) -> str | None:
    """Returns what is lost, in words, when something goes on from a state that cannot take all of it over.

    Args:
        state: what :meth:`AttachedHook.state` returned.
        reason: why it cannot.
    """
    lost = [
        what
        for key, what in (
            ("residuals", "the gradient that it had left out for later"),
            ("parameter_residuals", "what it had left out of the parameters for later"),
            ("momentum", "the outer momentum"),
        )
        if state.get(key)
    ]
    if not lost:
        return None
    what = " and ".join(lost)
    return f"The checkpoint was written with comm_hook={state['name']!r}; {what} is dropped, because {reason}."


def run_hook(attached: AttachedHook, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's own signature for a hook: ``model.register_comm_hook(attached, run_hook)``.

    Collectives:
        Those of :meth:`AttachedHook.reduce`.
    """
    return attached.reduce(bucket)
