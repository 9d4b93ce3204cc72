"""Says what this process is doing, so that the others can tell when it fails or hangs."""

import atexit
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from ddp_plugin import _compat
from ddp_plugin.strategy.stopping import Stopping
from ddp_plugin.supervision.activity import Activity, place_of
from ddp_plugin.supervision.board import Board
from ddp_plugin.supervision.failure_watch import FailureWatch
from ddp_plugin.supervision.pulse import Pulse

__all__ = ["Supervised"]


LOOKS_PER_S = 1000.0
"""How often all ranks together look whether one has failed: a tenth of a core, in the process that holds the store."""


class Supervised(Stopping):
    """Tells what it is doing, in each method that Lightning calls around a step or a collective.

    The first rank that fails ends all; see :class:`~ddp_plugin.supervision.failure_watch.FailureWatch`.
    """

    ends_all_on_failure = True
    """Whether the first rank that fails ends all; not so for a program that tries something out on all ranks, catches
    what comes of it, and lets the ranks meet afterwards by a way of its own."""

    _pulse: Pulse | None = None
    _failures: FailureWatch | None = None
    _is_guarded = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._activity = Activity(self._place)

    @property
    def activity(self) -> Activity:
        """What this process is doing."""
        return self._activity

    @property
    def pulse(self) -> Pulse | None:
        """The thread that tells the others; ``None`` outside a run."""
        return self._pulse

    @property
    def failures(self) -> FailureWatch | None:
        """What ends all ranks when one fails; ``None`` outside a run, and in a run of one process."""
        return self._failures

    def _place(self) -> Mapping[str, Any]:
        try:
            module = self.lightning_module
            return {} if module is None else place_of(module.trainer)
        except Exception:  # read beside the thread that writes: between two runs, a module has no Trainer
            return {}

    def _configure_launcher(self) -> None:
        """Lets what the launcher runs in this process tell the other ranks how it fails."""
        super()._configure_launcher()
        _compat.guard_launched(self._launcher, self._run_guarded, before=self.refuse_contradictions)

    def _run_guarded(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._is_guarded = True
        try:
            result = function(*args, **kwargs)
            self._end_supervision()
            return result
        except BaseException as error:  # before Lightning lets callbacks know, which may wait for other ranks
            try:  # here, because Python looks for signals as soon as a function is entered
                to_raise = self._told(error, _compat.hook_of)
            except RuntimeError as interruption:  # torch's handler of a killed data worker's signal, wherever this was
                to_raise = self._told(interruption, lambda _: "a data loader")
            if to_raise is error:
                raise
            raise to_raise from error
        finally:
            self._is_guarded = False

    def _told(self, error: BaseException, doing: Callable[[BaseException], str | None]) -> BaseException:
        """Tells the others of an exception, and returns what to raise."""
        return error if self._failures is None else self._failures.raised(error, doing(error))

    def setup_environment(self) -> None:
        """Starts the processes' group, and tells from here on what this process is doing.

        Collectives:
            Those of :meth:`setup_distributed`.
        """
        super().setup_environment()
        self._pulse = Pulse(Board.beside(_compat.default_group()), self._activity)
        self._pulse.start()
        atexit.register(self._pulse.stop)  # a thread that still asks the store when the interpreter ends may abort it
        if self.world_size > 1 and self.ends_all_on_failure:
            first = self.global_rank - self.local_rank
            on_this_node = range(first, min(first + self.num_processes, self.world_size))
            pulse = self._pulse
            self._failures = FailureWatch(pulse.board, self._activity, on_this_node, lambda: pulse.slept_s)
            self._failures.start()
            self._pulse.add(self._failures, every_s=max(0.2, self.world_size / LOOKS_PER_S))

    def teardown(self) -> None:
        """Ends the run, and with it what is told to others, unless hooks follow that Lightning calls later.

        Collectives:
            None; rank 0 waits until the others come here too, 10 s at most.
        """
        if not self._is_guarded:
            self._end_supervision()
        super().teardown()

    def _end_supervision(self) -> None:
        """Tells the others that this rank's run is over, after ``on_fit_end`` and the callbacks' ``teardown``."""
        if self._failures is not None:
            self._failures.over()
            self._failures = None
        if self._pulse is not None:
            self._pulse.stop()
            atexit.unregister(self._pulse.stop)
            self._pulse.board.close()
            self._pulse = None

    # ------------------------------------------------------------------------------------------------------ one step

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step; see :class:`AveragedReplicas`."""
        with self._activity.doing("training_step"):
            return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Runs the backward; see :class:`FollowingWrap`."""
        with self._activity.doing("backward"):
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs the closure and the step; see :class:`FollowingWrap`."""
        with self._activity.doing("optimizer_step"):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step."""
        with self._activity.doing("validation_step"):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step."""
        with self._activity.doing("test_step"):
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step."""
        with self._activity.doing("predict_step"):
            return super().predict_step(*args, **kwargs)

    # --------------------------------------------------------------------------------------------------- collectives

    def barrier(self, name: str | None = None) -> None:
        """Waits for all ranks."""
        with self._activity.doing(f"the barrier {name!r}" if name else "a barrier"):
            super().barrier(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns the object of rank ``src`` on all ranks."""
        with self._activity.doing(f"a broadcast from rank {src}"):
            return super().broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor; see :class:`MatchedReductions`."""
        with self._activity.doing("a reduction of a value"):
            return super().reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gathers a tensor; see :class:`MatchedReductions`."""
        with self._activity.doing("an all-gather"):
            return super().all_gather(tensor, group, sync_grads)

    # ---------------------------------------------------------------------------------------------------- checkpoint

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Saves a checkpoint; see the classes above."""
        with self._activity.doing(f"the save of {filepath}"):
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Loads a checkpoint; see the classes above."""
        with self._activity.doing(f"the load of {checkpoint_path}"):
            return super().load_checkpoint(checkpoint_path, *args, **kwargs)
