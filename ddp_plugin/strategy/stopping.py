"""Whatever asks a run to stop, on whatever rank: all ranks stop at the same step.

=============================  ==========================================================  ============================
what asks                      what happens                                                exit status of each rank
=============================  ==========================================================  ============================
``trainer.should_stop``        ``fit`` ends and returns, as in Lightning                   0
``max_time``, ``Timer``        the same                                                    0
SIGTERM                        ``SIGTERMException``                                        143, that is 128 + 15
SIGINT (Ctrl+C)                ``KeyboardInterrupt``, which Lightning turns into an exit   1
SIGINT once more               this process ends at once                                   killed by signal 2
SIGUSR1                        ``SIGTERMException``, where nobody else uses that signal    138, that is 128 + 10
SLURM's requeue signal         checkpoint, ``scontrol requeue``, ``SIGTERMException``      0; 138 if it did not work
=============================  ==========================================================  ============================

A launcher takes the statuses as what they are: torchrun restarts the workers after 143, 138 and 1 if it has restarts
left, and not after 0. When it gets SIGTERM itself it passes it on, waits 30 seconds, and ends with 1 whatever the
workers answer. With Lightning's own launcher the first process speaks for all. With the spawn and fork launchers the
ranks are children of a process that has no handlers, and that ends with an error which names the status of a rank.
"""

import atexit
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from ddp_plugin import _compat
from ddp_plugin.agreement import Agreement
from ddp_plugin.data.loaders import replaced
from ddp_plugin.gather import gather_objects
from ddp_plugin.stopping.shield import ShieldWorker
from ddp_plugin.stopping.signals import StopSignals, is_free
from ddp_plugin.stopping.slurm import requeue
from ddp_plugin.strategy.checkpoints import ExplainedCheckpoints

__all__ = ["Stopping"]

_STATUS = {"SIGTERM": 128 + signal.SIGTERM, "SIGUSR1": 128 + signal.SIGUSR1, "requeue": 0}
_LEAVING = ("requeue", "SIGTERM", "SIGUSR1", "SIGINT")  # if several are agreed upon, the first counts
_KINDS = (*_LEAVING, "should_stop", "max_time")
_CHILDREN_MAY_TAKE_S = 10.0  # to end by themselves, once all ranks have left the run


class Stopping(ExplainedCheckpoints):
    """All ranks stop at the same step, whichever of them is asked to, and without anybody waiting for a device.

    **A wish travels.** ``trainer.should_stop = True``, a ``Timer`` whose time is up, and a signal are wishes of one
    rank. A wish after a batch travels beside the next step and takes effect at its end, one step later than on one
    process; a wish from a validation or from the end of an epoch takes effect at once, so ``EarlyStopping`` stops where
    it would alone. ``min_epochs`` and ``min_steps`` mean what they mean in Lightning, and so does the validation before
    a stop by ``should_stop``. Until it is agreed upon, ``trainer.should_stop`` reads ``False`` on the rank that set it
    as well, and setting it to ``False`` does not take the wish back; a stop that is agreed upon can be taken back by
    all ranks together.

    **Signals** are answered after an optimizer step (never while gradients are being accumulated), between two batches
    of a validation, test or prediction, and before the first step; the handler only notes them. A validation that is
    due then, or not over, is left, and done anew by the run that resumes. Where ranks have unequal numbers of
    evaluation batches, they look after as many as the one with the fewest has; where nobody can tell how many there
    are, after the evaluation. A rank that never gets to the end of its batch keeps the others, until the launcher's
    patience ends; so does one whose process group does not exist yet, where a signal does what it does without Python.

    **A checkpoint** is written on all ranks' behalf with ``checkpoint_on_stop=True``, before ``on_exception`` is
    called: ``stop.ckpt`` beside those of the first ``ModelCheckpoint``, else in ``default_root_dir``, on a signal and
    when ``max_time`` is up, unless no batch has been trained on since ``fit`` began. Lightning's
    ``OnExceptionCheckpoint`` and ``ModelCheckpoint(save_on_exception=True)`` are called at the same step as well. When
    SLURM asks to requeue, the checkpoint is ``hpc_ckpt_<n>.ckpt`` in ``default_root_dir``, always; Lightning finds it
    there when the job starts again.

    Collectives:
        On the control group, on all ranks: one all-reduce of twelve integers for each batch, which is waited for one
        batch later; an object gather twice before the first batch, at the end of each epoch, and twice for each
        evaluation. None on one process.
    """

    _checkpoint_on_stop: bool = False
    _signals: StopSignals | None = None
    _meanings: dict[signal.Signals, str] = {}  # what each signal asks for; found out when they begin to be noted
    _moments: "_Moments | None" = None
    _release: Callable[[], None] | None = None
    _has_failed: bool = False

    @property
    def checkpoint_on_stop(self) -> bool:
        """Whether a checkpoint is written when a signal or ``max_time`` stops the run."""
        return self._checkpoint_on_stop

    @property
    def stop_reason(self) -> str | None:
        """Why all ranks have agreed to stop in this run, or in the last one.

        ``"should_stop"``, ``"max_time"``, ``"SIGTERM"``, ``"SIGINT"``, ``"SIGUSR1"`` or ``"requeue"``; ``None`` while
        they have not. The same on all ranks between two batches.
        """
        return None if self._moments is None else self._moments.reason(_KINDS)

    def setup_environment(self) -> None:
        """Starts the processes' group, and notes signals from here on.

        Collectives:
            Those of :meth:`setup_distributed`.
        """
        super().setup_environment()
        self._stop_noting()
        self._has_failed, self._moments = False, None
        self._meanings = _meanings(self.cluster_environment)
        is_alone = self.world_size == 1
        self._signals = StopSignals(self._meanings, is_alone=is_alone, speaks=self.global_rank == 0)
        self._signals.install()

    def setup(self, trainer: pl.Trainer) -> None:
        """Sets up model and optimizers, and takes hold of ``trainer.should_stop``.

        Collectives:
            See :class:`~ddp_plugin.strategy.wrapping.FollowingWrap`.
        """
        super().setup(trainer)
        assert self._signals is not None
        self._moments = _Moments(self, trainer, self._signals, self._meanings)
        self._release = _compat.intercept_stopping(trainer, self._moments)

    def process_dataloader(self, dataloader: object) -> object:
        """Prepares a loader; signals for the whole job are kept away from its workers."""
        dataloader = super().process_dataloader(dataloader)
        if not isinstance(dataloader, DataLoader) or dataloader.num_workers == 0:
            return dataloader
        shield = ShieldWorker(self._meanings, dataloader.worker_init_fn)
        return replaced(dataloader, worker_init_fn=shield)

    def on_train_end(self) -> None:
        """Writes the checkpoint that was asked for, if the time is up; and waits for what is written in the background.

        Collectives:
            Those of a save and of :meth:`finish_saves`.
        """
        super().on_train_end()
        if self._moments is not None:
            self._moments.after_training()
        self.finish_saves()

    def on_exception(self, exception: BaseException) -> None:
        """Forgets signals: they have been answered, or the run fails anyway."""
        self._has_failed = True
        super().on_exception(exception)

    def teardown(self) -> None:
        """Gives the Trainer and the signals back as they were."""
        if self._release is not None:
            self._release()
            self._release = None
        if self._moments is not None:
            self._moments.end()
        super().teardown()
        self._stop_noting()

    def _stop_noting(self) -> None:
        signals, self._signals = self._signals, None
        if signals is not None:
            late = () if self._has_failed else ("SIGTERM", "SIGINT")  # the others mean nothing without a run
            signals.restore([number for number, kind in self._meanings.items() if kind not in late])


def _meanings(environment: Any) -> dict[signal.Signals, str]:
    """Returns the signals that ask to stop, and the kind of stop that each asks for."""
    meanings = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "SIGINT"}
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        meanings[signal.Signals(environment.requeue_signal or signal.SIGUSR1)] = "requeue"
    elif is_free(signal.SIGUSR1):
        meanings[signal.SIGUSR1] = "SIGUSR1"
    return meanings


class _Moments:
    """What is decided in one run, at the moments that :func:`ddp_plugin._compat.intercept_stopping` names."""

    def __init__(
        self, strategy: Stopping, trainer: pl.Trainer, signals: StopSignals, meanings: dict[signal.Signals, str]
    ) -> None:
        self._strategy = strategy
        self._trainer = trainer
        self._signals = signals
        self._meanings = meanings
        self._group = strategy.control_group if strategy.world_size > 1 else None
        self._agreement = Agreement(self._group, _KINDS)
        self._announced: set[str] = set()
        self._has_trained = False
        self._num_posts, self._num_steps = 0, 0  # of this evaluation

    def reason(self, kinds: tuple[str, ...] = _LEAVING) -> str | None:
        return next((kind for kind in kinds if self._agreement.is_agreed(kind)), None)

    def end(self) -> None:
        """Lets go of the group: an exception may keep this alive until the interpreter ends."""
        self._agreement.end()
        self._group = None

    # -------------------------------------------------------------------------------------------------------- wishes

    def is_stop_agreed(self) -> bool:
        return self.reason(("should_stop", "max_time")) is not None

    def wish_stop(self, stop: bool) -> None:
        if stop:
            self._wish("should_stop")
        else:
            self._agreement.drop("should_stop")
            self._agreement.drop("max_time")

    def wish_time_is_up(self) -> None:
        self._wish("max_time")

    def _wish(self, kind: str) -> None:
        self._agreement.wish(kind)
        if self._group is None:  # whoever is alone agrees at once
            self._agreement.post()

    def _exchange(self, function: Callable[[], None]) -> None:
        for number in self._signals.received:
            self._agreement.wish(self._meanings[number])
        function()
        for kind in _KINDS:
            if kind not in self._announced and self._agreement.is_agreed(kind):
                self._announced.add(kind)
                self._announce(kind, *(self._agreement.wishers(kind) or (0, 0)))

    def _announce(self, kind: str, num_ranks: int, sum_of_ranks: int) -> None:
        where = f"rank {sum_of_ranks}" if num_ranks == 1 else f"{num_ranks} ranks"
        if kind == "should_stop":
            if num_ranks == 1 and self._group is not None:
                rank_zero_info(f"CustomDDPStrategy: trainer.should_stop was set on {where}; all ranks stop together.")
        elif kind == "max_time":
            rank_zero_info(f"CustomDDPStrategy: the time is up on {where}; all ranks stop together.")
        else:
            named = "SLURM's signal to requeue" if kind == "requeue" else kind
            rank_zero_info(f"CustomDDPStrategy: {named} reached {where}; all ranks stop at the same step.")

    # ------------------------------------------------------------------------------------------------------- moments

    def before_fit(self) -> None:
        self._exchange(self._agreement.settle)
        if self.reason():
            self._leave()

    def after_batch(self) -> None:
        self._has_trained = True
        self._exchange(self._agreement.post)

    def after_batch_and_validation(self, *, ends_epoch: bool, inside_window: bool) -> None:
        if self.reason() and not ends_epoch and not inside_window:
            self._leave()

    def after_epoch(self) -> None:
        self._exchange(self._agreement.settle)
        if self.reason():
            self._leave()

    def after_training(self) -> None:
        if self._agreement.is_agreed("max_time"):
            self._save(self._stop_path)

    def before_evaluation(self, loop: Any) -> None:
        self._num_posts = self._num_steps = 0
        if self._is_inside_fit:
            _compat.forget_interrupted_validation(self._trainer)
            self._leave_evaluation()

    def count_evaluation_steps(self, num_steps: int) -> None:
        self._num_posts = min(gather_objects(num_steps, self._group))
        if not self._is_inside_fit:
            self._exchange(self._agreement.settle)
            self._leave_evaluation()

    def after_evaluation_step(self, loop: Any) -> None:
        self._num_steps += 1
        if self._num_steps < self._num_posts:
            self._exchange(self._agreement.post)
            self._leave_evaluation()

    def after_evaluation(self, loop: Any) -> None:
        self._exchange(self._agreement.settle)
        if self.reason() and not (self._is_inside_fit and _compat.train_window_is_open(self._trainer)):
            self._leave()

    @property
    def _is_inside_fit(self) -> bool:
        return self._trainer.state.fn == TrainerFn.FITTING and not self._trainer.sanity_checking

    def _leave_evaluation(self) -> None:
        if self.reason() is None:
            return
        if self._is_inside_fit:
            if _compat.train_window_is_open(self._trainer):
                return  # the gradients so far would be lost
            _compat.interrupt_validation(self._trainer)
        self._leave()

    # ------------------------------------------------------------------------------------------------------- leaving

    def _leave(self) -> None:
        """Ends the run on all ranks; they are at the same place, with nothing under way."""
        reason = self.reason()
        assert reason is not None
        self._agreement.receive()
        _look_after_children(self._strategy)
        if reason == "requeue":
            status = self._requeue()
        else:
            self._save(self._stop_path)
            status = _STATUS.get(reason, 0)
        if reason == "SIGINT":
            raise KeyboardInterrupt
        if reason == "SIGTERM":
            _compat.note_sigterm(self._trainer)
        raise SIGTERMException(status)

    def _requeue(self) -> int:
        self._save(lambda: _compat.hpc_checkpoint_path(self._trainer), is_asked=True)
        failure = None
        if self._trainer.is_global_zero:
            failure = requeue(os.environ)
        failure = gather_objects(failure, self._group)[0]
        if failure is None:
            rank_zero_info("CustomDDPStrategy: the job is in SLURM's queue again.")
            return _STATUS["requeue"]
        rank_zero_warn(f"CustomDDPStrategy: SLURM did not requeue the job: {failure}. Submit it again; it goes on.")
        return _STATUS["SIGUSR1"]

    def _save(self, path: Callable[[], str], *, is_asked: bool | None = None) -> None:
        is_asked = self._strategy.checkpoint_on_stop if is_asked is None else is_asked
        trainer: Any = self._trainer  # its attributes are set by connectors
        if is_asked and self._has_trained and self._is_inside_fit and not trainer.fast_dev_run:
            trainer.save_checkpoint(gather_objects(path(), self._group)[0], weights_only=False)
            self._strategy.finish_saves()  # the run ends, or is queued again, with this file whole

    def _stop_path(self) -> str:
        callbacks: list[pl.Callback] = self._trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        folders = [callback.dirpath for callback in callbacks if isinstance(callback, ModelCheckpoint)]
        folder = next((folder for folder in folders if folder), self._trainer.default_root_dir)
        return os.path.join(folder, "stop.ckpt")


def _look_after_children(strategy: Any) -> None:
    """Takes the other ranks' processes from Lightning's own launcher, which kills all as soon as one has a status.

    They end by themselves now; whoever does not is killed when this process ends.
    """
    started: list[subprocess.Popen[bytes]] = getattr(strategy.launcher, "procs", [])
    children = list(started)
    started.clear()
    if children:
        atexit.register(_await_end, children)


def _await_end(children: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + _CHILDREN_MAY_TAKE_S
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, deadline - time.monotonic()))
        if child.poll() is None:
            child.kill()
            child.wait()
