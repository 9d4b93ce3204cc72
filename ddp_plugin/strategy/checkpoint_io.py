"""How Lightning writes and reads a checkpoint file, and the outcome of that as all ranks see it."""

import inspect
import logging
import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch.plugins import CheckpointIO, TorchCheckpointIO

from ddp_plugin import _compat, process_group
from ddp_plugin.checkpoints.files import why_not_written, write
from ddp_plugin.checkpoints.reading import read
from ddp_plugin.errors import DDPPluginError, explain
from ddp_plugin.gather import gather_objects
from ddp_plugin.strategy.group import OwnGroup

__all__ = ["AgreedFiles", "SealedCheckpointIO"]

_log = logging.getLogger(__name__)


class _NotWrittenError(DDPPluginError):
    """A file could not be written; what there is to say of it has been said, with its own path."""


class SealedCheckpointIO(TorchCheckpointIO):
    """Files that are whole or not there, with a seal that any later change breaks; see :mod:`ddp_plugin.checkpoints`.

    It is what the strategy uses where no ``checkpoint_io`` is given, also below one that wraps another, such as
    ``AsyncCheckpointIO()``. Its files are files of ``torch.save``, which anything reads that reads those.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Writes a checkpoint; see :func:`ddp_plugin.checkpoints.files.write`.

        Args:
            checkpoint: what Lightning has put together.
            path: where to; also an address that fsspec opens for writing.
            storage_options: not supported.

        Raises:
            TypeError: with ``storage_options``.
            DDPPluginError: it cannot be written; what had this name before is as it was. The path and the cause are
                in the message, for one that wraps this may raise it when another file's turn has come.

        Collectives:
            None.
        """
        if storage_options is not None:
            raise TypeError(
                explain("no storage_options", repr(storage_options), "Pass a checkpoint_io of your own that uses them")
            )
        try:
            write(checkpoint, path)
        except Exception as error:
            raise _NotWrittenError(why_not_written(error, path)) from error

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> Any:
        """Reads a checkpoint in this process alone; see :func:`ddp_plugin.checkpoints.reading.read`.

        Args:
            path: the file; also an address that fsspec opens.
            map_location: as in ``torch.load``.
            weights_only: nothing in the file may run code, unless this is ``False``.

        Collectives:
            None.
        """
        return read(path, map_location=map_location, weights_only=weights_only is not False)


def _in_words(failure: BaseException) -> str:
    """Says how a save in the background failed; which file it was, only this package's own one says."""
    if isinstance(failure, _NotWrittenError):
        return str(failure)
    got = f"{type(failure).__name__}: {failure}"
    return explain("to write a checkpoint in the background", got, "Correct the cause; a checkpoint is missing")


class AgreedFiles(OwnGroup):
    """Checkpoint files are written and read by rank 0, and all ranks learn how that went.

    It comes last of all that overrides these methods, so that ranks meet nothing else between a failure and the word
    about it.
    """

    _is_training = False  # so that something comes that waits for what is written in the background

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """What writes and reads files: the one that was given, else :class:`SealedCheckpointIO`."""
        if self._checkpoint_io is None:
            self._checkpoint_io = SealedCheckpointIO()
        elif _compat.wraps_checkpoint_io(self._checkpoint_io):
            self._checkpoint_io.checkpoint_io = SealedCheckpointIO()  # type: ignore[attr-defined]  # if it has none
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io

    def _all_ranks(self) -> dist.ProcessGroup | None:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        return process_group.control_group() if several else None

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes a checkpoint on rank 0; if that fails, it fails on all ranks.

        Raises:
            DDPPluginError: on all ranks, with the path, the cause and the room that is left. After an exception that
                ended the run on some rank it is raised on rank 0 alone, for the others may not come any more. Where
                ``AsyncCheckpointIO`` writes, it may be about an earlier file; but outside the training of a fit the
                call waits for the file, for nothing that comes later would.

        Collectives:
            One object gather on the control group, on every rank; outside a training those of :meth:`finish_saves`.
        """
        failure: Exception | None = None
        if self.is_global_zero:
            try:
                self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            except Exception as error:
                failure = error
                _compat.finish_saves(self.checkpoint_io)  # what is raised here is not to come again
        group = None if self.is_interrupted else self._all_ranks()
        if group is None and failure is not None and not isinstance(failure, OSError):
            raise failure
        text = str(failure) if isinstance(failure, _NotWrittenError) else None
        if text is None and failure is not None:
            text = why_not_written(failure, filepath)
        for told in gather_objects(text, group):
            if told is not None:
                raise DDPPluginError(told) from failure
        if not self._is_training:
            self.finish_saves()

    def finish_saves(self) -> None:
        """Waits for the files that rank 0 still writes in the background; if one has failed, it fails on all ranks.

        Raises:
            DDPPluginError: on all ranks, with the path and the cause; after an exception as in :meth:`save_checkpoint`.

        Collectives:
            With an ``AsyncCheckpointIO`` one object gather on the control group, on every rank; otherwise none.
        """
        if not _compat.saves_in_background(self.checkpoint_io):
            return
        failure = _compat.finish_saves(self.checkpoint_io)
        text = None if failure is None else _in_words(failure)
        for told in gather_objects(text, None if self.is_interrupted else self._all_ranks()):
            if told is not None:
                raise DDPPluginError(told) from failure

    def on_train_start(self) -> None:
        """Lets files be written in the background from here on."""
        super().on_train_start()
        self._is_training = True

    def on_train_end(self) -> None:
        """Has every later save waited for at once."""
        self._is_training = False
        super().on_train_end()

    def teardown(self) -> None:
        """Ends the run. After an exception, files that could not be written in the background are a line in the log."""
        if self.is_interrupted and (failure := _compat.finish_saves(self.checkpoint_io)) is not None:
            _log.error("%s", _in_words(failure))  # raised, it would take the place of what ended the run
        self._is_training = False
        super().teardown()

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a checkpoint on rank 0; one for which a newer one is still being written goes when that is whole."""
        if self.is_global_zero:
            _compat.remove_after_saves(self.checkpoint_io, filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads a checkpoint that rank 0 reads; nothing in it is run, unless ``weights_only=False`` is written out.

        Only the path on rank 0 counts. A ``checkpoint_io`` of the user's own reads as it likes, on each rank.

        Returns:
            The checkpoint, the same on all ranks, with its tensors on the CPU.

        Raises:
            FileNotFoundError: on all ranks, when rank 0 finds no such file.
            DDPPluginError: on all ranks, when it cannot be loaded: it is damaged, names code to be run, has a newer
                format, or is no checkpoint of a Trainer.

        Collectives:
            One object gather, and those of :func:`ddp_plugin.checkpoints.reading.read`, on the control group.
        """
        io = _compat.innermost_checkpoint_io(self.checkpoint_io)
        if type(io) in (SealedCheckpointIO, TorchCheckpointIO):
            group = self._all_ranks()
            paths = gather_objects(os.fspath(checkpoint_path), group)
            if len(set(paths)) > 1:
                rank_zero_warn(f"The ranks were given different checkpoints; {paths[0]}, rank 0's, is loaded on all.")
            checkpoint: Any = read(paths[0], group, weights_only=weights_only is not False)
        else:
            given = inspect.signature(self.checkpoint_io.load_checkpoint).parameters
            takes = "weights_only" in given or any(one.kind is one.VAR_KEYWORD for one in given.values())
            options = {"weights_only": weights_only is not False} if takes or weights_only is not None else {}
            checkpoint = self.checkpoint_io.load_checkpoint(checkpoint_path, **options)
        if not isinstance(checkpoint, Mapping) or "state_dict" not in checkpoint:
            what = f"the names {list(checkpoint)[:3]}" if isinstance(checkpoint, Mapping) else type(checkpoint).__name__
            raise DDPPluginError(
                explain(
                    "a checkpoint of a Trainer, with a state_dict and where the run was",
                    f"{os.fspath(checkpoint_path)} with {what}",
                    "Load weights that something else has saved with module.load_state_dict()",
                )
            )
        return dict(checkpoint)
