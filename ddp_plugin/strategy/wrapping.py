"""The wrap in DistributedDataParallel: its hook and observers, and that it follows the model while it trains."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from ddp_plugin import _compat
from ddp_plugin.errors import DDPPluginError, explain
from ddp_plugin.hooks import HOOKS, AttachedHook, CommHook, dropped, put_to_work, run_hook
from ddp_plugin.strategy.reductions import MatchedReductions
from ddp_plugin.wrapping.arguments import BucketObserver, no_sync, observed
from ddp_plugin.wrapping.buckets import LayoutKeeper
from ddp_plugin.wrapping.lost_overlap import Compilation, look_at_compilation
from ddp_plugin.wrapping.rewrap import (
    TrainableParameters,
    agree_on_trainable,
    average_gradients,
    forget_buckets,
    in_words,
    meet,
    refuse_what_holds_on,
    release,
)
from ddp_plugin.wrapping.unused import named_parameter_errors

__all__ = ["FollowingWrap"]

_UNFREEZE_WAIT = timedelta(minutes=5)  # for the other ranks to change their trainable parameters in the same step


class FollowingWrap(MatchedReductions):
    """Wraps the model, wraps it again when other parameters are trainable, and names parameters in errors."""

    _comm_hook: CommHook | None = None
    _attached_hook: AttachedHook | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._bucket_observers: list[BucketObserver] = []
        self._saved_hook: dict[str, Any] | None = None  # of a checkpoint, until a hook takes it
        self._layout = LayoutKeeper(bool(kwargs.get("find_unused_parameters")))
        self._hook_is_registered = False
        self._first_backward_done = False
        self._trainable: TrainableParameters | None = None  # of the latest wrap
        self._epoch_of_agreement: int | None = None  # in which all ranks' trainable parameters were compared last
        self._unused_at_first: list[str] = []
        self._compilation = Compilation()

    def setup(self, trainer: Any) -> None:
        """Wraps the model, and lets the first training batch compare what is trainable."""
        if trainer.state.fn == TrainerFn.FITTING:  # else the last run's hook stays, for a checkpoint
            self._attached_hook = None
        super().setup(trainer)
        self._epoch_of_agreement = None

    @property
    def comm_hook(self) -> CommHook | None:
        """The hook that was asked for by ``comm_hook``, or ``None`` where DDP's own reducer runs."""
        return self._comm_hook

    @property
    def _averages_parameters(self) -> bool:
        """Whether the ranks train alone, and exchange parameters now and then in place of gradients."""
        return self._comm_hook is not None and self._comm_hook.outer is not None

    @property
    def compilation(self) -> Compilation:
        """What ``torch.compile`` had to do with the model when it was wrapped."""
        return self._compilation

    def add_bucket_observer(self, observer: BucketObserver) -> None:
        """Lets ``observer`` see each gradient bucket before and after its reduction.

        The first observer replaces DDP's reducer by the bit-identical ``allreduce`` hook, unless a hook runs already.
        Adding the same observer again changes nothing.

        Collectives:
            None.
        """
        if observer not in self._bucket_observers:
            self._bucket_observers.append(observer)
        if isinstance(self.model, DistributedDataParallel) and not self._hook_is_registered:
            self._register_ddp_hooks()

    def remove_bucket_observer(self, observer: BucketObserver) -> None:
        """Lets ``observer`` see no more buckets; one that was never added is let alone. The hook stays.

        Collectives:
            None.
        """
        if observer in self._bucket_observers:
            self._bucket_observers.remove(observer)

    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        self._hook_is_registered = self._first_backward_done = self._pl_static_graph_delay_done = False
        self._unused_at_first = []
        self._compilation = look_at_compilation(model)
        if self._compilation.warning is not None:
            rank_zero_warn(self._compilation.warning)
        self._trainable = trainable = self._trainable_parameters(model)
        group = self.control_group if self._one_model_on_all_ranks else None
        agree_on_trainable(trainable, group)
        with self._layout.first_buckets(trainable.names, group):
            return super()._setup_model(model)

    def _register_ddp_hooks(self) -> None:
        """Registers a hook only if a hook or an observer was asked for, on every device type."""
        assert isinstance(self.model, DistributedDataParallel)
        function: Callable[..., Any]
        if self._comm_hook is None and self._saved_hook is not None:
            if loss := dropped(self._saved_hook, "this run has comm_hook=None"):
                rank_zero_warn(loss)
            self._saved_hook = None
        if self._ddp_comm_hook is not None:
            function, state = self._ddp_comm_hook, self._ddp_comm_state
            if self._ddp_comm_wrapper is not None:
                function = self._ddp_comm_wrapper(function)
        elif self._comm_hook is not None or self._bucket_observers:
            function, state = run_hook, self._attach_hook(self.model)
        else:
            return
        self.model.register_comm_hook(state, observed(function, self._bucket_observers))
        self._hook_is_registered = True

    def _attach_hook(self, model: DistributedDataParallel) -> AttachedHook:
        """Returns the hook at work: the one that the wrap before had, so that nothing it remembers is lost."""
        if self._attached_hook is None:
            hook = self._comm_hook or HOOKS["allreduce"]()
            self._attached_hook = put_to_work(hook, model, self._nccl_group_options(), self._loss_scale)
            if self._saved_hook is not None and (loss := self._attached_hook.load(self._saved_hook)):
                rank_zero_warn(loss)
            self._saved_hook = None
        else:
            self._attached_hook.follow(model)
        return self._attached_hook

    def _loss_scale(self) -> Tensor | None:
        return _compat.loss_scale(getattr(self.precision_plugin, "scaler", None))

    # ------------------------------------------------------------------------------------------------------ one step

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Follows what is trainable; Lightning calls this after all hooks of the same name."""
        super().on_train_batch_start(batch, batch_idx)
        if isinstance(self.model, DistributedDataParallel) and self._trainable is not None:
            self._follow_trainable(self.model, self._trainable)
            if complaint := self._layout.complaint(self.model, self._trainable.names):
                rank_zero_warn(f"Results may differ from the uninterrupted run's in the last bit: {complaint}.")

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step through the wrap; DDP's errors about parameters name them."""
        with self._parameter_errors():
            return super().training_step(*args, **kwargs)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Refuses parameters that were unfrozen inside the step, where no wrap can reduce their gradients any more."""
        wrapped, trainable = isinstance(self.model, DistributedDataParallel), self._trainable
        if wrapped and trainable is not None and (late := trainable.unfrozen()):
            raise DDPPluginError(
                explain(
                    "parameters to be unfrozen before the training step",
                    f"{in_words(late)} unfrozen inside it, so that their gradients would stay this rank's own",
                    "Unfreeze them in a hook before the step, such as on_train_epoch_start or on_train_batch_start",
                )
            )
        super().pre_backward(closure_loss)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Runs the backward; parameters that got no gradient are named.

        Raises:
            DDPPluginError: a parameter got no gradient, or was unfrozen since the step began; it is named. Torch says
                so at the next forward only, after a step with unreduced gradients, and never in the last step.

        Collectives:
            One all-reduce per bucket on every rank, except while gradients accumulate.
        """
        with self._parameter_errors():
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Notes that this wrap has seen a backward, beside what Lightning does, and looks whether it is complete."""
        super().post_backward(closure_loss)
        model, module = self.model, self.lightning_module
        if isinstance(model, DistributedDataParallel):
            if module is None or module.automatic_optimization:
                _compat.check_reduction_finished(model)
            if getattr(model, "static_graph", False) and not self._first_backward_done and self._trainable is not None:
                self._unused_at_first = self._trainable.without_gradient()
        self._first_backward_done = True

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Skips the reduction while gradients accumulate; the first backward of a static graph still synchronises."""
        if not isinstance(self.model, DistributedDataParallel):
            yield
            return
        with no_sync(self.model, first_backward_done=self._first_backward_done):
            yield

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs the closure and the step; in manual optimization, after a look whether the reduction is complete.

        LBFGS decides by the loss how far to go and when to end, so it is given the mean of the ranks' losses; not so
        where the ranks train alone.

        Raises:
            DDPPluginError: a parameter got no gradient; it is named.

        Collectives:
            Those of the closure; for LBFGS, one :meth:`reduce` more each time.
        """
        module = self.lightning_module
        if isinstance(optimizer, LBFGS) and self.world_size > 1 and not self._averages_parameters:
            closure = functools.partial(self._mean_loss, closure)
        if isinstance(self.model, DistributedDataParallel) and module is not None and not module.automatic_optimization:
            with self._parameter_errors():  # several backwards may make one reduction here, but now it has to be one
                _compat.check_reduction_finished(self.model)
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    def on_train_end(self) -> None:
        """Says so if the hook's own way never began: a run that is over too early for it has shown nothing about it."""
        super().on_train_end()
        if self._attached_hook is not None and (idle := self._attached_hook.idle()):
            rank_zero_info(f"CustomDDPStrategy: {idle}; this run has ended before.")

    def teardown(self) -> None:
        """Lets go of the wrap."""
        if isinstance(self.model, DistributedDataParallel) and self._trainable is not None:
            self._layout.end(self.model, self._trainable)
        self._trainable = None
        if self._attached_hook is not None:
            self._attached_hook.close()  # it is kept for a checkpoint that is written after the run
        super().teardown()

    def _mean_loss(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        return self.reduce(loss.detach().clone(), reduce_op="mean") if isinstance(loss, Tensor) else loss

    def _parameter_errors(self) -> AbstractContextManager[None]:
        model, module = self.model, self.lightning_module
        return named_parameter_errors(
            self._trainable.names if self._trainable is not None else (),
            static_graph=bool(getattr(model, "static_graph", False)),
            find_unused_parameters=bool(getattr(model, "find_unused_parameters", False)),
            unused_at_first=self._unused_at_first,
            several_backwards=module is not None and not module.automatic_optimization,
        )

    # ------------------------------------------------------------------------------------------------------- re-wrap

    def rewrap(self) -> None:
        """Wraps the model again, from rank 0's values; the hook and the observers are registered again.

        This happens by itself where the set of trainable parameters has changed when a training batch begins; call it
        after any other change that DistributedDataParallel has to know of. Optimizers are left as they are, and so are
        gradients that an accumulation window has gathered so far; those of parameters that are frozen now are averaged,
        because no wrap will do so any more. Does nothing while there is no wrap.

        Raises:
            DDPPluginError: on all ranks, when they differ in what is trainable; or where a setting holds the old wrap.

        Collectives:
            On every rank: what a wrap costs, a comparison on the control group, and an all-reduce for each frozen
            parameter that holds a gradient.
        """
        old, before = self.model, self._trainable
        if not isinstance(old, DistributedDataParallel) or before is None:
            return
        refuse_what_holds_on(old)
        now = self._trainable_parameters(old.module)
        unfrozen, frozen = now.added_since(before), before.added_since(now)
        if self._one_model_on_all_ranks:
            agree_on_trainable(now, self.control_group)
            left = [parameter for parameter in before.parameters() if not parameter.requires_grad]
            average_gradients(left, old.process_group, self.control_group)
        own_buffers = [] if old.broadcast_buffers else [(b, b.detach().clone()) for b in old.module.buffers()]
        self.model = release(old)
        forget_buckets(self._ddp_comm_state)
        self.configure_ddp()
        with torch.no_grad():
            for buffer, value in own_buffers:
                buffer.copy_(value)
        changes = [f"{verb} {in_words(n)}" for verb, n in (("unfrozen", unfrozen), ("frozen", frozen)) if n]
        rank_zero_info(f"CustomDDPStrategy: the model is wrapped again: {'; '.join(changes) or 'on request'}.")

    def _follow_trainable(self, model: DistributedDataParallel, known: TrainableParameters) -> None:
        """Wraps the model again if other parameters are trainable than at the wrap, on all ranks."""
        module = self.lightning_module
        assert module is not None
        epoch, automatic = module.trainer.current_epoch, module.automatic_optimization
        is_new_epoch = epoch != self._epoch_of_agreement
        # Manual optimization freezes and unfreezes at will inside a step: what is frozen there stays in the wrap.
        if not (is_new_epoch or (known.changed() if automatic else known.unfrozen())):
            return
        self._epoch_of_agreement = epoch
        now = self._trainable_parameters(model.module)
        unfrozen, frozen = now.added_since(known), known.added_since(now)
        if self._one_model_on_all_ranks:
            wait = self._timeout or timedelta(minutes=30)
            reason = f"{in_words([*unfrozen, *frozen])} changed here" if unfrozen or frozen else "a new epoch"
            meet(self.world_size, wait if is_new_epoch else min(wait, _UNFREEZE_WAIT), reason)
            agree_on_trainable(now, self.control_group)
        if unfrozen or (frozen and automatic):
            self.rewrap()

    def _trainable_parameters(self, module: torch.nn.Module) -> TrainableParameters:
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        delayed = {name for name, _ in self._ddp_kwargs.get("delay_all_reduce_named_params", ())}
        return TrainableParameters(module, ignored | delayed)

    # ---------------------------------------------------------------------------------------------------- checkpoint

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Saves a checkpoint; one of a training run also keeps its bucket layout and what its hook remembers.

        Collectives:
            Those of DDP's own rebuilding of its buckets, when it is due, and of the hook's
            :meth:`~ddp_plugin.hooks.AttachedHook.state`, on every rank; none of these after an exception.
        """
        if "optimizer_states" in checkpoint:  # of a run, not of weights alone
            model = self.model if isinstance(self.model, DistributedDataParallel) else None
            self._layout.save(checkpoint, model, self._trainable, may_rebuild=not self.is_interrupted)
            self._save_hook(checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _save_hook(self, checkpoint: dict[str, Any]) -> None:
        attached = self._attached_hook
        if attached is None:
            return
        if self.is_interrupted:  # the others may not come to a collective any more
            if attached.leaves_error:
                rank_zero_warn(
                    "What comm_hook had left out for later is not in this checkpoint: the run was interrupted."
                )
        elif (state := attached.state()) is not None:
            checkpoint.setdefault("ddp_plugin", {})["comm_hook"] = state

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Loads a checkpoint; the wrap that follows begins with the buckets and the hook's state of the run before."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        module = self.lightning_module
        if module is not None and module.trainer.state.fn != TrainerFn.FITTING:
            return checkpoint  # its run is not continued here
        self._layout.load(checkpoint)
        self._saved_hook = checkpoint.get("ddp_plugin", {}).get("comm_hook")
        return checkpoint
