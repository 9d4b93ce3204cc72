"""What a checkpoint file says about itself: a manifest and a hash, sealed into the file's own end.

A checkpoint of torch is a zip archive, and such an archive may end with a comment. The seal is that comment: a few
lines that ``unzip -z FILE`` prints, that torch and every zip program pass over, and that no copy of the file can lose,
as it would lose a second file beside it::

    ddp_plugin checkpoint
    {"step": 1200, "epoch": 3, "resumes": true, "saved_at_s": 1764370000.1, ..., "format": 1}
    sha256 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08

The hash is of every byte before its own 64 digits. A file that was cut short has no end, so it has no seal; any byte
that changed is noticed. The first and the last line stay what they are in every format. Names, shapes and dtypes of
what is inside are not repeated here: they are those of the tensors in the checkpoint, and loading compares them.
"""

import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields

from ddp_plugin.errors import DDPPluginError, explain

__all__ = [
    "DIGEST_END_BYTES",
    "FORMAT",
    "MAX_SEAL_BYTES",
    "Damage",
    "Manifest",
    "NewerFormatError",
    "Seal",
    "archive_comment",
    "read_seal",
]

FORMAT = 1
"""Version of what this package writes; one that reads it refuses a higher one."""
MAX_SEAL_BYTES = 0xFFFF + 22  # the longest comment of a zip archive, and the record that it ends
DIGEST_END_BYTES = 65  # the digest in hexadecimal and the line's end, the only bytes that it does not cover

_FIRST_LINE = b"ddp_plugin checkpoint\n"
_LAST_LINE = re.compile(rb"\nsha256 ([0-9a-f]{64})\n\Z")
_END_RECORD = b"PK\x05\x06"
_END_RECORD_BYTES = 22


class Damage(Exception):  # noqa: N818  # a finding, that each reader puts into an error or a sentence of its own
    """A file is not what was written; the message says how, as the end of a sentence."""


class NewerFormatError(DDPPluginError):
    """A file was written by a later version of this package, in a format that this one does not know."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint file says about itself.

    Attributes:
        step: optimizer steps done.
        epoch: the epoch that it was written in.
        resumes: whether a training can go on from it; not so with weights alone.
        saved_at_s: when it was written, in seconds since 1970.
        world_size: number of ranks of the run, if known.
        comm_hook: the run's hook in words, ``None`` for DDP's own reducer.
        versions: of the packages that wrote it, by name.
        format: version of the file's format.
    """

    step: int = 0
    epoch: int = 0
    resumes: bool = False
    saved_at_s: float = 0.0
    world_size: int | None = None
    comm_hook: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    format: int = FORMAT

    @classmethod
    def of(cls, checkpoint: object) -> "Manifest":
        """Describes a checkpoint as Lightning builds it; of anything else it is known only when it was written.

        A field that is missing, or that is not what Lightning and this package put there, is left at its default.
        """
        now_s = time.time()
        if not isinstance(checkpoint, Mapping):
            return cls(saved_at_s=now_s)
        own = checkpoint.get("ddp_plugin")
        run = own.get("run") if isinstance(own, Mapping) else None
        run = run if isinstance(run, Mapping) else {}
        world_size, comm_hook, versions = (run.get(name) for name in ("world_size", "comm_hook", "versions"))
        return cls(
            step=_count(checkpoint.get("global_step")),
            epoch=_count(checkpoint.get("epoch")),
            resumes="optimizer_states" in checkpoint,
            saved_at_s=now_s,
            world_size=world_size if isinstance(world_size, int) else None,
            comm_hook=comm_hook if isinstance(comm_hook, str) else None,
            versions={str(k): str(v) for k, v in versions.items()} if isinstance(versions, Mapping) else {},
        )

    def lines(self) -> bytes:
        """Returns the seal up to its digest: ASCII, of at most 65535 bytes together with it."""
        return _FIRST_LINE + json.dumps(asdict(self)).encode("ascii") + b"\nsha256 "


def _count(value: object) -> int:
    """Returns a number of steps or epochs; zero for what is none, for a seal keeps no checkpoint from being written."""
    try:
        return int(value)  # type: ignore[call-overload, no-any-return]
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last one from tensors of several elements
        return 0


@dataclass(frozen=True)
class Seal:
    """The seal of a file: what it says, and the hash that the file must have up to there."""

    manifest: Manifest
    sha256: str

    def compare(self, sha256: str) -> None:
        """Compares with a hash, and only then believes what the manifest says of its format.

        Raises:
            Damage: they differ.
            NewerFormatError: a later version of this package wrote the file.
        """
        if sha256 != self.sha256:
            raise Damage("its bytes are not those that were written: the hash differs from the one in its seal")
        if self.manifest.format > FORMAT:
            raise NewerFormatError(
                explain(
                    f"a checkpoint in format {FORMAT} or an earlier one, which this version of ddp_plugin reads",
                    f"one in format {self.manifest.format}",
                    f"Install ddp_plugin {self.manifest.versions.get('ddp_plugin', '')} or a later version",
                )
            )


def archive_comment(manifest: Manifest) -> bytes:
    """Returns what replaces the last two bytes of a zip archive: the length of its comment, and that up to the digest.

    The 64 digits of the hash of everything so far, and a line's end, are to follow.
    """
    lines = manifest.lines()
    return (len(lines) + DIGEST_END_BYTES).to_bytes(2, "little") + lines


def read_seal(tail: bytes) -> Seal | None:
    """Reads the seal from the end of a file.

    Args:
        tail: the last :data:`MAX_SEAL_BYTES` of the file, or all of it.

    Returns:
        The seal; ``None`` where nothing speaks of one, as in a file that something else wrote, or that was cut short
        long before its end.

    Raises:
        Damage: there is a part of a seal, but not a whole one.
    """
    begin, last = tail.rfind(_FIRST_LINE), _LAST_LINE.search(tail)
    if begin < 0 and last is None:
        record = tail[at : at + _END_RECORD_BYTES] if (at := tail.rfind(_END_RECORD)) >= 0 else b""
        if len(record) == _END_RECORD_BYTES and int.from_bytes(record[-2:], "little") > len(tail) - at - len(record):
            raise Damage("the seal at its end is not whole")
        return None
    record = tail[begin - _END_RECORD_BYTES : begin] if begin >= _END_RECORD_BYTES else b""
    is_whole = last is not None and record.startswith(_END_RECORD)
    if last is None or not is_whole or int.from_bytes(record[-2:], "little") != len(tail) - begin:
        raise Damage("the seal at its end is not whole")
    try:
        said = json.loads(tail[begin + len(_FIRST_LINE) : last.start()])
        known = {entry.name for entry in fields(Manifest)}
        manifest = Manifest(**{name: value for name, value in said.items() if name in known})
    except (ValueError, TypeError, AttributeError) as error:
        raise Damage("the manifest in its seal cannot be read") from error
    return Seal(manifest, last[1].decode("ascii"))
