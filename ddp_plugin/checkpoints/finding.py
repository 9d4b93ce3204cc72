"""Finding the checkpoint to resume from: the newest one below a folder that is whole."""

import logging
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ddp_plugin.checkpoints.files import seal_of, verify
from ddp_plugin.checkpoints.manifest import Damage
from ddp_plugin.checkpoints.reading import DamagedCheckpointError, RefusedCheckpointError, load_file
from ddp_plugin.errors import explain

__all__ = ["newest_checkpoint"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Candidate:
    path: Path
    saved_at_s: float
    step: int


def newest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """Returns the newest checkpoint below a folder from which a training can go on, or ``None`` where there is none.

    The newest is the one that was written last; of two at the same time, the one after more steps. A file with a seal
    tells when that was, and has to have the hash in it; any other one, such as Lightning's own, is as old as the file
    system says, and has to load with ``weights_only=True``. What is newer and cannot be taken is said in the log, one
    sentence each: what was cut short or has changed, and what holds weights alone.

    Nothing from any file is run. Every rank that calls this reads one whole file, so call it where the run is started,
    or on one rank; in a run, only the path that rank 0 passes to the Trainer counts.

    Args:
        folder: a folder on this machine, searched with all folders in it for ``*.ckpt``; SLURM's ``hpc_ckpt_*.ckpt``
            and ``last.ckpt`` are among them. A link is followed if it leads out of the folder.

    Returns:
        The path, below ``folder`` as it was given.

    Raises:
        ValueError: ``folder`` is a file, or the address of another machine.
        NewerFormatError: a later version of this package has written the newest one; an older one is not taken in its
            place.

    Collectives:
        None.
    """
    name = os.fspath(folder)
    if "://" in name or os.path.isfile(name):
        raise ValueError(
            explain("a folder on this machine to look for checkpoints in", repr(name), "Pass such a folder")
        )
    candidates = sorted(_candidates(Path(folder)), key=lambda one: (one.saved_at_s, one.step, one.path), reverse=True)
    for candidate in candidates:
        if (problem := _problem(candidate)) is None:
            return candidate.path
        _log.warning("%s is skipped: %s.", candidate.path, problem)
    return None


def _candidates(folder: Path) -> Iterator[_Candidate]:
    root = folder.resolve()
    for path in folder.rglob("*.ckpt"):
        try:
            if path.is_symlink() and root in path.resolve().parents and path.exists():
                continue  # it is met by its own name
            if path.is_dir():
                _log.warning("%s is skipped: it is a folder, and checkpoints of this package are files.", path)
                continue
            yield _look_at(path)
        except OSError as error:
            _log.warning("%s is skipped: %s.", path, error.strerror or error)


def _look_at(path: Path) -> _Candidate:
    """Reads the end of a file, and of one without a seal its outline."""
    with open(path, "rb") as file:
        modified_s = os.fstat(file.fileno()).st_mtime
        try:
            seal = seal_of(file)
        except Damage:
            return _Candidate(path, modified_s, 0)  # it is said when its turn comes
        if seal is not None:
            return _Candidate(path, seal.manifest.saved_at_s, seal.manifest.step)
        try:
            outline = torch.load(file, map_location="meta", weights_only=True)  # no tensor's bytes are read
            step = int(outline["global_step"])
        except (RuntimeError, ValueError, TypeError, KeyError, EOFError, AttributeError, pickle.UnpicklingError):
            step = 0
    return _Candidate(path, modified_s, step)


def _problem(candidate: _Candidate) -> str | None:
    """Reads a file to its end; returns why no training can go on from it, or ``None``."""
    path = candidate.path
    try:
        manifest = verify(path)
        if manifest is None:
            with open(path, "rb") as file:
                outline = load_file(file, path, map_location="meta")
            resumes = isinstance(outline, dict) and {"state_dict", "optimizer_states"} <= outline.keys()
        else:
            resumes = manifest.resumes
    except (Damage, DamagedCheckpointError, RefusedCheckpointError) as error:
        return str(error).rstrip(".")
    except OSError as error:
        return str(error.strerror or error)
    return None if resumes else "it holds weights alone, from which no training can go on"
