"""From text files to blocks of tokens: the corpus, its byte-pair tokenizer, the token files and the datasets."""

import codecs
import hashlib
import json
import math
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from settings import SettingsError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import Dataset
from transformer import IGNORED

from ddp_plugin.errors import explain

__all__ = [
    "BlockDataset",
    "Corpus",
    "Piece",
    "TokenFiles",
    "bits_per_byte",
    "find_corpus",
    "order0_bits_per_byte",
    "train_tokenizer",
]

_CHUNK_BYTES = 2**22
_HEAD_BYTES = 2**16
# In the standard library, what is not its source: tables of code points, generated help, tests, other packages.
_SKIPPED_IN_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
_FORMAT = 1  # of the cache; a change of what is written needs another number


@dataclass(frozen=True)
class Piece:
    """A range of bytes of one file, ``start`` to ``stop``; one document of the corpus."""

    path: Path
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Bytes of text in it."""
        return self.stop - self.start

    def chunks(self) -> Iterator[str]:
        """Yields the text in parts of a few megabytes, cut between characters.

        Raises:
            SettingsError: bytes that are not UTF-8.
        """
        decoder = codecs.getincrementaldecoder("utf-8")()
        with open(self.path, "rb") as file:
            file.seek(self.start)
            remaining = self.num_bytes
            while remaining:
                data = file.read(min(remaining, _CHUNK_BYTES))
                if not data:
                    raise SettingsError(explain(f"{self.path} to stay as it is", "a shorter file", "Run again"))
                remaining -= len(data)
                try:
                    yield decoder.decode(data, final=not remaining)
                except UnicodeDecodeError as error:
                    raise _not_text(self.path, str(error)) from error


@dataclass(frozen=True)
class Corpus:
    """Documents for training and others for validation; no byte is in both.

    Attributes:
        name: where it comes from, in words.
        train: documents to train on.
        validation: documents held out.
    """

    name: str
    train: tuple[Piece, ...]
    validation: tuple[Piece, ...]

    def key(self, **settings: Any) -> str:
        """Returns a hash of the documents' names, sizes and times, and of settings, for a cache."""
        documents = [
            [(str(piece.path), piece.start, piece.stop, piece.path.stat().st_mtime_ns) for piece in part]
            for part in (self.train, self.validation)
        ]
        content = json.dumps([_FORMAT, tokenizers.__version__, documents, settings])
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def find_corpus(path: str | None, patterns: list[str], max_bytes: int, validation_ratio: float) -> Corpus:
    """Finds the documents and splits them, in an order that depends on names alone.

    Files of a folder are ordered by a hash of their relative name, which makes the first few a fair sample of all; of
    these the first ones that fit are held out. A single file is cut at a line's end and its last part is held out. Only
    names, sizes and the first bytes of each file are read.

    Args:
        path: a text file or a folder; ``None`` for the Python source of this interpreter's standard library.
        patterns: which files of a folder, such as ``"*.txt"``; folders below are searched too, hidden ones are not.
        max_bytes: the corpus ends before it would grow beyond this; 0 for no limit.
        validation_ratio: part of the bytes to hold out, above 0 and below 1.

    Raises:
        SettingsError: no such path, nothing in it, or files that are not text.

    Collectives:
        None.
    """
    if not 0 < validation_ratio < 1:
        raise SettingsError(
            explain("data.validation_ratio between 0 and 1", repr(validation_ratio), "Give a part, such as 0.05")
        )
    root = Path(path).expanduser() if path is not None else Path(sysconfig.get_paths()["stdlib"])
    name = str(root) if path is not None else f"the standard library of Python, {root}"
    if not root.exists():
        raise SettingsError(
            explain("data.path= to be a text file or a folder", f"{root}, which does not exist", "Correct it")
        )
    if root.is_file():
        train, validation = _split_file(root, max_bytes, validation_ratio)
    else:
        skipped = _SKIPPED_IN_STDLIB if path is None else set()
        train, validation = _split_folder(
            root, ["*.py"] if path is None else patterns, skipped, max_bytes, validation_ratio
        )
    return Corpus(name, tuple(train), tuple(validation))


def _split_file(path: Path, max_bytes: int, validation_ratio: float) -> tuple[list[Piece], list[Piece]]:
    _check_text(path)
    size = path.stat().st_size
    if size == 0:
        raise SettingsError(explain("text in data.path", f"{path}, which is empty", "Give a file with text"))
    stop = size if not max_bytes or size <= max_bytes else _line_end(path, max_bytes, size)
    middle = _line_end(path, round(stop * (1 - validation_ratio)), stop)
    if middle >= stop:
        raise SettingsError(
            explain(
                "a text of several lines, to hold some of them out",
                f"{path} without a line's end in its last {validation_ratio:.0%}",
                "Raise data.validation_ratio, or give a folder of several files",
            )
        )
    return [Piece(path, 0, middle)], [Piece(path, middle, stop)]


def _line_end(path: Path, position: int, stop: int) -> int:
    """Returns the first line's end at or behind a position, or ``stop``."""
    with open(path, "rb") as file:
        file.seek(max(0, position - 1))
        file.readline()
        return min(file.tell(), stop)


def _split_folder(
    root: Path, patterns: list[str], skipped: set[str], max_bytes: int, validation_ratio: float
) -> tuple[list[Piece], list[Piece]]:
    found: dict[str, Piece] = {}
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in skipped and f != "__pycache__" and not f.startswith(".")]
        for file_name in names:
            path = Path(folder, file_name)
            if any(path.match(pattern) for pattern in patterns) and path.is_file() and path.stat().st_size:
                found[path.relative_to(root).as_posix()] = Piece(path, 0, path.stat().st_size)
    pieces: list[Piece] = []
    num_bytes = 0
    for relative in sorted(found, key=lambda name: hashlib.sha256(name.encode()).digest()):
        piece = found[relative]
        if max_bytes and num_bytes + piece.num_bytes > max_bytes:
            continue
        _check_text(piece.path)
        pieces.append(piece)
        num_bytes += piece.num_bytes
    if len(pieces) < 2:
        raise SettingsError(
            explain(
                f"at least two files with text that match {patterns}, one to train on and one to hold out",
                f"{len(pieces)} under {root} (of {len(found)} before data.max_bytes={max_bytes})",
                "Correct data.path, data.patterns or data.max_bytes",
            )
        )
    held: list[Piece] = []
    room_bytes = validation_ratio * num_bytes
    for piece in pieces:
        if piece.num_bytes <= room_bytes:
            held.append(piece)
            room_bytes -= piece.num_bytes
    held = held or [min(pieces, key=lambda piece: piece.num_bytes)]
    return [piece for piece in pieces if piece not in held], held


def _check_text(path: Path) -> None:
    with open(path, "rb") as file:
        head = file.read(_HEAD_BYTES)
    if b"\0" in head:
        raise _not_text(path, "it contains zero bytes")
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError as error:
        raise _not_text(path, str(error)) from error


def _not_text(path: Path, why: str) -> SettingsError:
    return SettingsError(explain("text in UTF-8", f"{path}: {why}", "Convert it, or leave it out by data.patterns"))


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-pair tokenizer on bytes, so that any text makes the round trip (Sennrich et al. 2016).

    Args:
        texts: what to train on.
        vocab_size: ids at most, among them the 256 bytes.

    Raises:
        SettingsError: a vocabulary below 256.
    """
    if vocab_size < 256:
        raise SettingsError(
            explain("tokenizer.vocab_size of at least 257: the bytes and one end mark", str(vocab_size + 1), "Raise it")
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class TokenFiles:
    """Tokenizer and token files of a corpus in a cache folder.

    The last id of the vocabulary is the end mark. It is no token of the tokenizer, so no text can contain it. It stands
    before the first document, between documents and behind the last one; thus every token of the text is a target.

    Args:
        corpus: the documents.
        vocab_size: ids of the model, the end mark included; the tokenizer may have fewer on a small corpus.
        cache_dir: parent of the folder, which is named by :meth:`Corpus.key`.
    """

    def __init__(self, corpus: Corpus, vocab_size: int, cache_dir: str | Path) -> None:
        self.corpus = corpus
        self.vocab_size = vocab_size
        self.end_id = vocab_size - 1
        self.dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
        self.folder = Path(cache_dir) / corpus.key(vocab_size=vocab_size)

    def build(self) -> None:
        """Trains the tokenizer on the training documents and writes all files, unless they exist.

        The folder appears at once or not at all, so several processes may build it at the same time.
        """
        if self.folder.exists():
            return
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=self.folder.parent))
        try:
            texts = (text for piece in self.corpus.train for text in piece.chunks())
            tokenizer = train_tokenizer(texts, self.vocab_size - 1)
            tokenizer.save(str(unfinished / "tokenizer.json"))
            for part in ("train", "validation"):
                self._write(unfinished / f"{part}.bin", tokenizer, getattr(self.corpus, part))
            unfinished.chmod(0o755)
            try:
                unfinished.rename(self.folder)
            except OSError:
                if not self.folder.exists():  # else another process was first, with the same content
                    raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def _write(self, path: Path, tokenizer: Tokenizer, pieces: tuple[Piece, ...]) -> None:
        end = np.array([self.end_id], self.dtype)
        with open(path, "wb") as file:
            file.write(end.tobytes())
            for piece in pieces:
                for text in piece.chunks():
                    file.write(np.array(tokenizer.encode(text).ids, self.dtype).tobytes())
                file.write(end.tobytes())

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The trained tokenizer; :meth:`build` has to have run."""
        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    def blocks(self, part: str, block_size: int, *, keep_tail: bool) -> "BlockDataset":
        """Returns the dataset of ``"train"`` or ``"validation"``."""
        return BlockDataset(self.folder / f"{part}.bin", self.dtype, block_size, self.end_id, keep_tail=keep_tail)

    def token_bytes(self) -> Tensor:
        """Returns how many bytes of text each id stands for: int64, shape ``(vocab_size,)``; the end mark for none."""
        lengths = torch.zeros(self.vocab_size, dtype=torch.int64)
        for token, index in self.tokenizer.get_vocab().items():
            lengths[index] = len(token)  # the byte-level alphabet writes each byte as one character
        return lengths


class BlockDataset(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive blocks of a memory-mapped token file, with their successors as targets.

    Block ``i`` reads tokens ``i * block_size`` on, and predicts the token behind each; the blocks' targets do not
    overlap and leave nothing out but, without ``keep_tail``, the last few. The first token of a block sees no context
    but itself, the last one sees the whole block.

    Args:
        path: the token file.
        dtype: of its tokens.
        block_size: tokens in a block.
        end_id: fills the inputs behind the last token.
        keep_tail: whether a last, shorter block counts; its missing targets are ``IGNORED``.
    """

    def __init__(self, path: Path, dtype: Any, block_size: int, end_id: int, *, keep_tail: bool) -> None:
        self.path = path
        self.dtype = np.dtype(dtype)
        self.block_size = block_size
        self.end_id = end_id
        self.num_targets: int = path.stat().st_size // self.dtype.itemsize - 1
        self._num_blocks: int = -(-self.num_targets // block_size) if keep_tail else self.num_targets // block_size
        self._map: np.ndarray[Any, Any] | None = None

    @property
    def tokens(self) -> np.ndarray[Any, Any]:
        """All tokens, mapped into this process when first read."""
        if self._map is None:
            self._map = np.memmap(self.path, self.dtype, mode="r")
        return self._map

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_map": None}  # a pickled map would be a copy of the file

    def __len__(self) -> int:
        return self._num_blocks

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        begin = index * self.block_size
        tokens = torch.from_numpy(self.tokens[begin : begin + self.block_size + 1].astype(np.int64))
        inputs = torch.full((self.block_size,), self.end_id)
        targets = torch.full((self.block_size,), IGNORED)
        inputs[: len(tokens) - 1], targets[: len(tokens) - 1] = tokens[:-1], tokens[1:]
        return inputs, targets


def bits_per_byte(nats: float, num_bytes: int) -> float:
    """Returns a loss that does not depend on the tokenizer: all targets' nats in bits, per byte of their text."""
    return nats / math.log(2) / num_bytes


def order0_bits_per_byte(pieces: tuple[Piece, ...]) -> float:
    """Returns the entropy of the byte frequencies of some documents.

    No model that predicts each byte without looking at others can do better on them, not even one that knew their
    frequencies beforehand.
    """
    counts = np.zeros(256, np.int64)
    for piece in pieces:
        for text in piece.chunks():
            counts += np.bincount(np.frombuffer(text.encode(), np.uint8), minlength=256)
    frequencies = counts[counts > 0] / counts.sum()
    return float(-(frequencies * np.log2(frequencies)).sum())
