"""Reading a checkpoint once for all ranks: rank 0 reads and compares the hash, the others get the bytes from it.

So the file may lie on a disk that only rank 0 has, a shared file system is asked once and not once for each rank, and
no rank loads another file than rank 0. What is in the file is data: nothing of it is run, unless that was asked for.
"""

import contextlib
import io
import os
import pickle
import pickletools
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Set
from pathlib import Path
from typing import IO, Any

import fsspec  # type: ignore[import-untyped]
import torch
import torch.distributed as dist

from ddp_plugin.checkpoints.files import ARCHIVE, Hashed, check_records, local_path, seal_of
from ddp_plugin.checkpoints.manifest import Damage, NewerFormatError, Seal
from ddp_plugin.errors import DDPPluginError, explain
from ddp_plugin.gather import gather_objects

__all__ = ["DamagedCheckpointError", "RefusedCheckpointError", "load_file", "mentions", "read"]

CHUNK_BYTES = 16 << 20
"""How much of a file travels in one broadcast."""
IN_MEMORY_BYTES = 256 << 20
"""Up to this size the received bytes of a file are kept in memory until it is loaded, above in a temporary file."""


class DamagedCheckpointError(DDPPluginError):
    """A checkpoint is not what was written, or is none at all."""


class RefusedCheckpointError(DDPPluginError):
    """A checkpoint names code to be run, and that was not allowed."""


def read(
    path: str | os.PathLike[str],
    group: dist.ProcessGroup | None = None,
    *,
    map_location: Any = "cpu",
    weights_only: bool = True,
) -> Any:
    """Returns what is in a checkpoint file, on every rank; the file is opened on the group's first rank alone.

    Beside what is returned, a rank needs the memory of one chunk, and that of the whole file only if it is small
    (:data:`IN_MEMORY_BYTES`); a larger one is received into a temporary file.

    Args:
        path: where the file is, seen from rank 0: on its disks, or any address that fsspec opens.
        group: a gloo group, such as the control group; ``None`` reads for this process alone.
        map_location: as in ``torch.load``.
        weights_only: whether a file that names anything but tensors, numbers, strings, containers and what
            ``torch.serialization.add_safe_globals`` allows is refused. ``False`` runs whatever the file says.

    Raises:
        FileNotFoundError: on all ranks, when there is no such file.
        DamagedCheckpointError: on all ranks, when the file is not what was written.
        NewerFormatError: on all ranks, when a later version of this package wrote it.
        RefusedCheckpointError: on all ranks, when it names code to be run; every name is in the message.
        DDPPluginError: on all ranks, when one of them cannot read or keep the bytes.

    Collectives:
        On every rank of the group: an object gather before, one after the bytes and one after loading, and between them
        a broadcast for each :data:`CHUNK_BYTES`.
    """
    with contextlib.ExitStack() as stack:
        file, problem, size_bytes = None, None, 0
        is_source = group is None or dist.get_rank(group) == 0
        seal: Seal | None = None
        if is_source:
            try:
                file = stack.enter_context(_open(path))
                size_bytes = file.seek(0, os.SEEK_END)
                seal = seal_of(file)
                if seal is None and file.read(len(ARCHIVE)) == ARCHIVE:
                    check_records(file)
            except FileNotFoundError:
                problem = _not_found(path)
            except Exception as error:
                problem = _in_words(error, path)
        told = gather_objects((problem, size_bytes), group)
        _raise_first([told[0][0]])
        problem = None
        try:
            if file is not None:
                file.seek(0)
            file = file or stack.enter_context(_spool(told[0][1]))
        except OSError as error:  # this rank goes on taking part, and says so at the end
            problem = _in_words(error, path)
        problem = _share(file, told[0][1], seal, group, path) or problem
        _raise_first(gather_objects(problem, group))
        assert file is not None
        value, problem = None, None
        try:
            file.seek(0)
            value = load_file(file, path, map_location=map_location, weights_only=weights_only)
        except Exception as error:
            problem = _in_words(error, path)
        _raise_first(gather_objects(problem, group))
    return value


def load_file(
    file: IO[bytes], path: str | os.PathLike[str], *, map_location: Any = "cpu", weights_only: bool = True
) -> Any:
    """Loads an open file; see :func:`read`.

    Args:
        file: a file that can seek.
        path: its name, for messages.
        map_location: as in ``torch.load``.
        weights_only: whether a file that names code to be run is refused.

    Raises:
        DamagedCheckpointError: it is no file of ``torch.save``.
        RefusedCheckpointError: it names code to be run.

    Collectives:
        None.
    """
    try:
        return torch.load(file, map_location=map_location, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        if not weights_only or not (names := _refused_names(file, error)):
            raise _damaged(path, _first_line(error)) from error
        raise RefusedCheckpointError(
            explain(
                "a checkpoint of tensors, numbers, strings and containers of them, because nothing in it may run code",
                f"{os.fspath(path)}, which names {', '.join(names)}",
                "If you trust the file and know these names, allow them before it is loaded: "
                f"torch.serialization.add_safe_globals([{', '.join(names)}]). "
                "weights_only=False runs whatever the file says",
            )
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError, TypeError) as error:
        if not weights_only:  # code that the file names has failed, or is not there
            raise
        raise _damaged(path, _first_line(error)) from error


def mentions(file: IO[bytes], texts: Set[str]) -> bool:
    """Whether all of these texts are somewhere in a file of ``torch.save``; nothing of it is loaded or run.

    Args:
        file: a whole archive, that can seek.
        texts: such as keys that a file is expected to have.

    Collectives:
        None.
    """
    file.seek(0)
    with zipfile.ZipFile(file) as archive:
        [record] = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        content = archive.read(record)
    try:
        return texts <= {argument for _, argument, _ in pickletools.genops(content) if isinstance(argument, str)}
    except ValueError:  # it is no pickle
        return False


def _refused_names(file: IO[bytes], error: BaseException) -> list[str]:
    """Returns the names in a file that are not allowed; reading them runs nothing."""
    search: Callable[[Any], list[str]] | None = getattr(torch.serialization, "get_unsafe_globals_in_checkpoint", None)
    if search is not None:
        with contextlib.suppress(Exception):  # a file in torch's old format has no such list
            file.seek(0)
            if names := search(file):
                return sorted(names)
    words = str(error).split()
    return [words[words.index("GLOBAL") + 1]] if "GLOBAL" in words[:-1] else []


def _share(
    file: IO[bytes] | None,
    size_bytes: int,
    seal: Seal | None,
    group: dist.ProcessGroup | None,
    path: str | os.PathLike[str],
) -> "_Problem | None":
    """Brings the bytes from the first rank's file into the others'; the first compares the hash on the way.

    A rank that fails goes on taking part, and returns what went wrong.
    """
    is_source = group is None or dist.get_rank(group) == 0
    problem: _Problem | None = None
    hashed = Hashed(size_bytes) if seal is not None else None
    chunk = torch.empty(min(CHUNK_BYTES, size_bytes), dtype=torch.uint8)
    for begin in range(0, size_bytes, CHUNK_BYTES):
        part = chunk[: min(CHUNK_BYTES, size_bytes - begin)]
        numbers: Any = part.numpy()
        view = memoryview(numbers)
        try:
            if is_source and file is not None and problem is None:
                _read_into(file, view)
                if hashed is not None:
                    hashed.update(view)
        except Exception as error:
            problem = _in_words(error, path)
        if group is not None:
            dist.broadcast(part, src=dist.get_global_rank(group, 0), group=group)
        try:
            if not is_source and file is not None and problem is None:
                file.write(view)
        except Exception as error:
            problem = _in_words(error, path)
    try:
        if hashed is not None and seal is not None and problem is None:
            hashed.compare(seal)
    except (Damage, NewerFormatError) as error:
        problem = _in_words(error, path)
    return problem


def _read_into(file: Any, view: memoryview) -> None:
    while view:
        num_read = file.readinto(view)
        if not num_read:
            raise Damage("it became shorter while it was read")
        view = view[num_read:]


def _open(path: str | os.PathLike[str]) -> IO[bytes]:
    """Opens a file on rank 0; one that is not on its disks is copied first, so that it is fetched once."""
    local = local_path(path)
    if local is not None:
        return open(local, "rb")
    filesystem, location = fsspec.core.url_to_fs(os.fspath(path))
    if not filesystem.exists(location):
        raise FileNotFoundError(os.fspath(path))
    with filesystem.open(location, "rb") as remote:
        copy = _spool(getattr(remote, "size", None) or IN_MEMORY_BYTES + 1)
        shutil.copyfileobj(remote, copy, CHUNK_BYTES)
    return copy


def _spool(size_bytes: int) -> IO[bytes]:
    return io.BytesIO() if size_bytes <= IN_MEMORY_BYTES else tempfile.TemporaryFile()


# ------------------------------------------------------------------------------------------------ errors for all ranks

_Problem = tuple[type[Exception], str]  # as it travels: a class of this module or of the standard library, and its text


def _in_words(error: Exception, path: str | os.PathLike[str]) -> _Problem:
    if isinstance(error, (DamagedCheckpointError, RefusedCheckpointError, NewerFormatError)):
        return type(error), str(error)
    if isinstance(error, Damage):
        damaged = _damaged(path, str(error))
        return type(damaged), str(damaged)
    return DDPPluginError, explain(
        f"to read the checkpoint {os.fspath(path)}",
        f"{type(error).__name__}: {error}",
        "Correct the cause, or load another one",
    )


def _not_found(path: str | os.PathLike[str]) -> _Problem:
    name = os.fspath(path)
    where = name if "://" in name else Path(name).absolute()
    return FileNotFoundError, explain("a checkpoint file", f"nothing at {where}", "Correct the path")


def _damaged(path: str | os.PathLike[str], how: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        explain(
            "a checkpoint as it was written",
            f"{os.fspath(path)}: {how.rstrip('.')}",
            "Resume from another one; ddp_plugin.checkpoints.newest_checkpoint(folder) finds the newest that is whole",
        )
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _raise_first(problems: list[_Problem | None]) -> None:
    for kind, text in filter(None, problems):
        raise kind(text)
