"""Writing a checkpoint so that a kill at any moment leaves the old file or the new one, and checking what was written.

A file gets its name only when all of it is on the disk: it is written under another name in the same folder, flushed,
and renamed, and the folder is flushed as well. Bytes are hashed on their way, so nothing is read again.
"""

import contextlib
import hashlib
import io
import os
import platform
import secrets
import shutil
import sys
import time
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import fsspec  # type: ignore[import-untyped]
import torch
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from ddp_plugin.checkpoints.manifest import (
    DIGEST_END_BYTES,
    MAX_SEAL_BYTES,
    Damage,
    Manifest,
    Seal,
    archive_comment,
    read_seal,
)
from ddp_plugin.errors import DDPPluginError, explain

if sys.platform != "win32":
    import fcntl

__all__ = [
    "ARCHIVE",
    "Hashed",
    "check_records",
    "local_path",
    "remove_leftovers",
    "seal_of",
    "verify",
    "why_not_written",
    "write",
]

ARCHIVE = b"PK\x03\x04"
"""How every file of ``torch.save`` begins since its format is an archive."""

_BUFFER_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 20
# Lightning looks for "hpc_ckpt_" and "last" anywhere in a name, and takes digits out of it: none of these may occur.
_UNFINISHED = ".ddp_plugin-{host}-{writer}.part"
_ABANDONED_AFTER_S = 86400.0  # a whole day without a byte, so that clocks of two hosts need not agree


def local_path(path: str | os.PathLike[str]) -> Path | None:
    """Returns a path on this machine's file system, ``None`` for one that fsspec finds elsewhere, such as ``s3://``."""
    filesystem, location = fsspec.core.url_to_fs(os.fspath(path))
    return Path(location) if isinstance(filesystem, LocalFileSystem) else None


# ------------------------------------------------------------------------------------------------------------ writing


def write(checkpoint: Any, path: str | os.PathLike[str]) -> Manifest:
    """Writes a checkpoint with its seal; the name has the old file or the new one at any moment, never a part.

    On a file system of this machine the new file is on the disk when this returns, also if the power fails then.
    Elsewhere it is what fsspec's transaction of that file system makes of it: an object store shows an object when it
    is complete.

    Args:
        checkpoint: what ``torch.save`` takes.
        path: where to; the folder is made if it does not exist. What earlier writers that were killed have left in the
            folder is removed.

    Returns:
        The manifest in the seal.

    Raises:
        OSError: it cannot be written, for instance because the disk is full. The file that had this name is as it was,
            and nothing of the new one is left.

    Collectives:
        None.
    """
    manifest = Manifest.of(checkpoint)
    target = local_path(path)
    if target is None:
        filesystem, location = fsspec.core.url_to_fs(os.fspath(path))
        filesystem.makedirs(os.path.dirname(location), exist_ok=True)
        with filesystem.transaction, filesystem.open(location, "wb") as file:
            _save(checkpoint, manifest, file)
        return manifest
    _make_folder(target.parent)
    remove_leftovers(target.parent)
    with _unfinished_file(target.parent) as (unfinished, raw):
        _save(checkpoint, manifest, raw)
        os.fsync(raw.fileno())
        os.replace(unfinished, target)
    _flush_folder(target.parent)
    return manifest


def why_not_written(error: BaseException, path: str | os.PathLike[str]) -> str:
    """Says in the package's one form that a checkpoint could not be written, and what is left.

    Args:
        error: what :func:`write` raised.
        path: what it was given.
    """
    change = "Correct the cause; until then the run cannot keep its progress"
    got = f"{type(error).__name__}: {error}"
    folder = local_path(path)
    if isinstance(error, OSError) and folder is not None:
        existing = next(parent for parent in folder.absolute().parents if parent.exists())
        free_bytes = shutil.disk_usage(existing).free
        got += f" ({free_bytes} bytes are free in {existing} now that the unfinished file is removed)"
        change = "Make room there, or save fewer or smaller checkpoints elsewhere"
    kept = "A file that had this name before is as it was"
    return explain(f"to write the checkpoint {os.fspath(path)}", got, f"{kept}. {change}")


class _Sealing:
    """A file to ``torch.save`` into, that hashes what goes through, and holds back the end of the archive for the seal.

    Args:
        file: opened for writing bytes; may write a part only, as unbuffered files do.

    Attributes:
        error: the first error of the file. Torch ends the archive after it, and reports what goes wrong there instead.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._pending = bytearray()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        if self.error is not None:
            raise self.error
        view = memoryview(data).cast("B")
        if view.nbytes < _BUFFER_BYTES:
            self._pending += view
        else:
            self._emit(self._pending)
            self._emit(view[:-2])
            self._pending = bytearray(view[-2:])
        if len(self._pending) >= _BUFFER_BYTES:
            self._emit(self._pending[:-2])
            del self._pending[:-2]
        return view.nbytes

    def flush(self) -> None:
        """Does nothing: what is held back goes with :meth:`seal`."""

    def seal(self, manifest: Manifest) -> None:
        if self._pending[-2:] != b"\0\0":  # the length of the archive's comment
            raise RuntimeError(
                explain("torch.save to write a zip archive without a comment", "something else", "Use torch's own save")
            )
        self._pending[-2:] = archive_comment(manifest)
        self._emit(self._pending)
        self._put(self._hash.hexdigest().encode("ascii") + b"\n")

    def _emit(self, data: bytearray | memoryview) -> None:
        self._hash.update(data)
        self._put(data)

    def _put(self, data: bytes | bytearray | memoryview) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self.error = error
            raise


def _save(checkpoint: Any, manifest: Manifest, file: IO[bytes]) -> None:
    sealing = _Sealing(file)
    try:
        torch.save(checkpoint, sealing)  # type: ignore[arg-type]  # it asks for write alone
        sealing.seal(manifest)
    except Exception:
        if sealing.error is not None:
            raise sealing.error from None
        raise


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _flush_folder(folder.parent)


def _flush_folder(folder: Path) -> None:
    """Brings the names in a folder to the disk, where the file system can do that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _unfinished_file(folder: Path) -> Iterator[tuple[Path, io.FileIO]]:
    """Makes a file whose lock says that its writer lives; it is gone afterwards, unless it was renamed."""
    while True:
        path = folder / _UNFINISHED.format(host=_host(), writer=secrets.token_hex(8))
        raw = open(path, "xb", buffering=0)  # noqa: SIM115  # unbuffered: no error comes late
        _lock(raw)
        if os.fstat(raw.fileno()).st_nlink:  # else somebody took it for a leftover before it was locked
            break
        raw.close()
    try:
        with raw:
            yield path, raw
    finally:
        path.unlink(missing_ok=True)


def _host() -> str:
    """Returns what stands for this host in a file's name: hexadecimal, for a host may have any name."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:12]


def _lock(file: IO[bytes]) -> bool:
    """Locks a file until it is closed or its process ends; ``False`` where another has it, or nothing can be locked."""
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def remove_leftovers(folder: Path) -> list[Path]:
    """Removes unfinished files whose writers were killed; those of writers that live are left alone.

    A writer that lives holds a lock. On some shared file systems another host does not see it, so an unfinished file
    of another host is removed only when nothing has been written to it for a day.

    Returns:
        What was removed.

    Collectives:
        None.
    """
    removed = []
    own = set(folder.glob(_UNFINISHED.format(host=_host(), writer="*")))
    for path in folder.glob(_UNFINISHED.format(host="*", writer="*")):
        with contextlib.suppress(OSError), open(path, "r+b") as file:
            idle_s = time.time() - os.fstat(file.fileno()).st_mtime
            if (path in own or idle_s > _ABANDONED_AFTER_S) and _lock(file):
                path.unlink()
                removed.append(path)
    return removed


# ----------------------------------------------------------------------------------------------------------- checking


def seal_of(file: IO[bytes]) -> Seal | None:
    """Reads the seal of an open file, and nothing else of it; see :func:`~ddp_plugin.checkpoints.manifest.read_seal`.

    Args:
        file: a file that can seek; its position is the beginning afterwards.
    """
    num_bytes = file.seek(0, os.SEEK_END)
    file.seek(max(0, num_bytes - MAX_SEAL_BYTES))
    tail = file.read(MAX_SEAL_BYTES)
    file.seek(0)
    return read_seal(tail)


class Hashed:
    """The hash of a file whose parts pass by in order, without those bytes at its end that are the hash itself.

    Args:
        num_bytes: size of the file.
    """

    def __init__(self, num_bytes: int) -> None:
        self._hash = hashlib.sha256()
        self._rest_bytes = num_bytes - DIGEST_END_BYTES

    def update(self, part: Any) -> None:
        """Takes the next part, any object with bytes inside."""
        view = memoryview(part)[: max(0, self._rest_bytes)]
        self._hash.update(view)
        self._rest_bytes -= view.nbytes

    def compare(self, seal: Seal) -> None:
        """Compares with what a seal says; see :meth:`~ddp_plugin.checkpoints.manifest.Seal.compare`."""
        seal.compare(self._hash.hexdigest())


def verify(path: str | os.PathLike[str]) -> Manifest | None:
    """Reads a file to its end and compares it with its seal; runs nothing from it and keeps nothing of it.

    Args:
        path: a file on this machine.

    Returns:
        What its seal says; ``None`` for a file without one, which then is at least a whole zip archive.

    Raises:
        Damage: the file is not what was written.
        NewerFormatError: a later version of this package wrote it.
        OSError: it cannot be read.

    Collectives:
        None.
    """
    with open(path, "rb") as file:
        seal = seal_of(file)
        if seal is None:
            check_records(file)
            return None
        hashed = Hashed(os.fstat(file.fileno()).st_size)
        while part := file.read(_CHUNK_BYTES):
            hashed.update(part)
        hashed.compare(seal)
    return seal.manifest


def check_records(file: IO[bytes]) -> None:
    """Compares the records of a zip archive without a seal with their checksums, which ``torch.load`` does not do.

    An archive in which no record fits was written without them (``torch.serialization.set_crc32_options(False)``), and
    is let pass.

    Args:
        file: an open file that can seek; its position is the beginning afterwards.

    Raises:
        Damage: it is no whole archive, or a record has changed.
    """
    damaged: list[str] = []
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            for record in records:
                try:
                    with archive.open(record) as content:
                        while content.read(_CHUNK_BYTES):
                            pass
                except zipfile.BadZipFile:
                    damaged.append(record.filename)
    except DDPPluginError:  # of another rank, which may reach this one anywhere
        raise
    except (zipfile.BadZipFile, zlib.error, RuntimeError, EOFError, ValueError) as error:
        raise Damage(_why_no_archive(file)) from error
    finally:
        file.seek(0)
    if damaged and len(damaged) < len(records):
        raise Damage(f"its record {damaged[0]} has changed since it was written")


_END_OF_ARCHIVE = b"PK\x05\x06"
_LONGEST_END_BYTES = 22 + 65_535
"""Of a zip's record of its end, with the longest comment that it may have."""


def _why_no_archive(file: IO[bytes]) -> str:
    num_bytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    if file.read(len(ARCHIVE)) != ARCHIVE:
        return "it is no archive of torch.save"
    file.seek(max(0, num_bytes - _LONGEST_END_BYTES))
    if _END_OF_ARCHIVE in file.read():
        return "it is no whole archive of torch.save"
    return f"it was cut short: only {num_bytes} bytes are there, without the end of the archive"
