"""Finding the checkpoint to resume from: the newest one below a folder that is whole."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ddp_plugin.checkpoints.files import seal_of, verify
from ddp_plugin.checkpoints.manifest import Damage
from ddp_plugin.checkpoints.reading import DamagedCheckpointError, RefusedCheckpointError, load_file, mentions
from ddp_plugin.errors import DDPPluginError, explain

__all__ = ["folders_below", "newest_checkpoint"]

_log = logging.getLogger(__name__)

_RESUMES = frozenset({"state_dict", "optimizer_states"})  # what a checkpoint has from which a training can go on


@dataclass(frozen=True)
class _Candidate:
    path: Path
    saved_at_s: float
    step: int


def newest_checkpoint(folder: str | os.PathLike[str], others: Sequence[str | os.PathLike[str]] = ()) -> Path | None:
    """Returns the newest checkpoint below a folder from which a training can go on, or ``None`` where there is none.

    The newest is the one that was written last; of two at the same time, the one after more steps. A file with a seal
    tells when that was, and has to have the hash in it; any other one, such as Lightning's own, is as old as the file
    system says, and has to be whole. What is newer and cannot be taken is said in the log, one sentence each: what was
    cut short or has changed, and what holds weights alone. A whole one that names code to be run is taken: whether that
    is allowed is for the load to decide, and no older one is taken in its place.

    Nothing from any file is run. Every rank that calls this reads one whole file, so call it where the run is started,
    or on one rank; in a run, only the path that rank 0 passes to the Trainer counts.

    Args:
        folder: a folder on this machine, searched with all folders in it for ``*.ckpt``; SLURM's ``hpc_ckpt_*.ckpt``
            and ``last.ckpt`` are among them. A link, to a file or a folder, is followed if it leads out of the folder;
            not so one to a folder that this one is in.
        others: files elsewhere, on this machine, that may be the newest as well.

    Returns:
        The path, below ``folder`` as it was given, or one of ``others``.

    Raises:
        ValueError: ``folder`` is a file, or the address of another machine.
        OSError: a folder cannot be listed, for another reason than the rights of this process.
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
    looked_at = (*_readable(map(Path, others)), *_candidates(Path(folder)))
    found = {one.path.resolve(): one for one in looked_at}
    candidates = sorted(found.values(), key=lambda one: (one.saved_at_s, one.step, one.path), reverse=True)
    for candidate in candidates:
        if (problem := _problem(candidate)) is None:
            return candidate.path
        _skip(candidate.path, problem)
    return None


def folders_below(folder: str | os.PathLike[str], denied: Callable[[OSError], None] | None = None) -> Iterator[Path]:
    """Yields a folder and all folders in it, each once; links are followed as in :func:`newest_checkpoint`.

    Args:
        folder: on this machine; nothing is yielded where there is none.
        denied: called with the error for a folder that this process may not list, and that is left out therefore.

    Raises:
        OSError: a folder cannot be listed, for another reason.

    Collectives:
        None.
    """

    def failed(error: OSError) -> None:
        if isinstance(error, PermissionError):
            if denied is not None:
                denied(error)
        elif not isinstance(error, (FileNotFoundError, NotADirectoryError)):  # it may have gone meanwhile
            raise error

    root = Path(folder).resolve()
    seen = {root}
    for name, children, _ in os.walk(folder, followlinks=True, onerror=failed):
        yield Path(name)
        above = {*root.parents, *Path(name).resolve().parents}
        for child in sorted(children):
            path = Path(name, child)
            target = path.resolve()
            is_needless = path.is_symlink() and (root in target.parents or target in above)
            if target in seen or is_needless:  # what is below the root is met by its own name
                children.remove(child)
            else:
                seen.add(target)


def _candidates(folder: Path) -> Iterator[_Candidate]:
    folders = list(folders_below(folder, lambda error: _skip(error.filename, error.strerror)))
    seen = {each.resolve() for each in folders}
    for path in sorted(path for each in folders for path in each.glob("*.ckpt")):
        try:
            if path.is_symlink() and path.exists():
                target = path.resolve()
                if target.suffix == ".ckpt" and target.parent in seen:
                    continue  # it is met by its own name
            if path.is_dir():
                _skip(path, "it is a folder, and checkpoints of this package are files")
            elif path.exists() and not path.is_file():
                _skip(path, "it is no file")
            else:
                yield _look_at(path)
        except OSError as error:
            _skip(path, error.strerror or str(error))


def _readable(paths: Iterable[Path]) -> Iterator[_Candidate]:
    for path in paths:
        try:
            yield _look_at(path)
        except OSError as error:
            _skip(path, error.strerror or str(error))


def _skip(path: str | Path, problem: str | None) -> None:
    _log.warning("%s is skipped: %s.", path, problem)


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
        except DDPPluginError:  # of another rank, which may reach this one anywhere
            raise
        except Exception:  # whatever a damaged file makes torch raise: it is said when its turn comes
            step = 0
    return _Candidate(path, modified_s, step)


def _problem(candidate: _Candidate) -> str | None:
    """Reads a file to its end; returns why no training can go on from it, or ``None``."""
    path = candidate.path
    try:
        manifest = verify(path)
        if manifest is None:
            with open(path, "rb") as file:
                try:
                    outline = load_file(file, path, map_location="meta")
                    resumes = isinstance(outline, dict) and outline.keys() >= _RESUMES
                except RefusedCheckpointError:
                    resumes = mentions(file, _RESUMES)
        else:
            resumes = manifest.resumes
    except (Damage, DamagedCheckpointError) as error:
        return str(error).rstrip(".")
    except OSError as error:
        return str(error.strerror or error)
    return None if resumes else "it holds weights alone, from which no training can go on"
