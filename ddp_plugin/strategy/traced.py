"""Records a window of steps, where the process was started by ``ddp-plugin trace``."""

import os

from ddp_plugin.callbacks._tracing import TraceRecording
from ddp_plugin.strategy.supervised import Supervised
from ddp_plugin.tracing.request import request_in

__all__ = ["Traced"]


class Traced(Supervised):
    """Adds what records to the Trainer's callbacks, last of all, where the environment asks for it."""

    def setup_environment(self) -> None:
        """Starts the processes' group.

        Raises:
            ValueError: the environment variable of ``ddp-plugin trace`` holds something else.

        Collectives:
            Those of :meth:`setup_distributed`.
        """
        super().setup_environment()
        request, module = request_in(os.environ), self.lightning_module
        if request is None or module is None:
            return
        trainer = module.trainer
        others = [callback for callback in trainer.callbacks if not isinstance(callback, TraceRecording)]  # type: ignore[attr-defined]
        trainer.callbacks = [*others, TraceRecording(request)]  # type: ignore[attr-defined]
