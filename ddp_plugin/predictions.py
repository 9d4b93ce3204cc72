"""What every rank predicted, in one order: batch by batch, sample by sample, or streamed to disk."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ddp_plugin.errors import explain

__all__ = ["PredictionWriter", "Predictions", "read_predictions", "split_batch"]

_MANIFEST = "manifest.json"
_SCALARS = (str, bytes, int, float, type(None))


@dataclass
class Predictions:
    """The predictions of one loader.

    Attributes:
        indices: the dataset indices of each batch, in the order in which one process would have seen the batches.
        outputs: what ``predict_step`` returned for each of these batches.
    """

    indices: list[list[Any]] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)

    def samples(self) -> list[Any]:
        """Returns one output per sample, in dataset order; a sample drawn twice is there twice.

        Raises:
            ValueError: a batch's output does not say which part belongs to which sample; use ``outputs`` then.
        """
        pairs = [
            (index, output)
            for indices, batch in zip(self.indices, self.outputs, strict=True)
            for index, output in zip(indices, split_batch(batch, len(indices)), strict=True)
        ]
        return [output for _, output in sorted(pairs, key=lambda pair: pair[0])]


def split_batch(output: Any, num_samples: int) -> list[Any]:
    """Splits one batch's output into its samples' outputs, keeping the structure.

    A tensor is split along its first dimension. A list of ``num_samples`` items that are no tensors holds one item per
    sample; any other list, tuples and mappings are split member by member.

    Args:
        output: any nesting of tensors of shape ``(num_samples, ...)`` and lists of ``num_samples`` strings or numbers.
        num_samples: samples in the batch.

    Raises:
        ValueError: a part has another length, or a list of as many tensors as there are samples could mean both.
    """
    if isinstance(output, Mapping):
        parts = {key: split_batch(value, num_samples) for key, value in output.items()}
        return [{key: part[position] for key, part in parts.items()} for position in range(num_samples)]
    if type(output) is list and len(output) == num_samples:
        tensors = [item for item in output if isinstance(item, torch.Tensor)]
        if not tensors or num_samples == 1 and not tensors[0].dim():
            return list(output)
        if any(tensor.shape[:1] != (num_samples,) for tensor in tensors):
            return list(output)  # they cannot be members
        raise ValueError(
            explain(
                f"a list of one entry per sample, or members of shape ({num_samples}, ...)",
                f"{num_samples} tensors of first dimension {num_samples}, which could be both",
                "Return a tuple of members, or stack the samples' tensors",
            )
        )
    if isinstance(output, (list, tuple)):
        members = [split_batch(item, num_samples) for item in output]
        made = getattr(type(output), "_make", type(output))  # named tuples are built from an iterable by _make
        return [made([member[position] for member in members]) for position in range(num_samples)]
    if isinstance(output, torch.Tensor) and output.dim() > 0 and len(output) == num_samples:
        return list(output)
    got = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, torch.Tensor) else repr(output)[:80]
    raise ValueError(
        explain(
            f"predictions with one entry for each of the batch's {num_samples} samples",
            got,
            "Return tensors of shape (batch, ...) or lists of the batch's length, or read the outputs batch by batch",
        )
    )


class PredictionWriter:
    """Writes one rank's predictions to files as they come, so that memory holds at most one chunk.

    Args:
        folder: where the files go; it is made if it does not exist.
        rank: this rank.
        chunk_size: batches per file.
    """

    def __init__(self, folder: str, rank: int, chunk_size: int) -> None:
        self._folder, self._rank, self._chunk_size = Path(folder), rank, chunk_size
        self._pending: list[dict[str, Any]] = []
        self.files: list[str] = []
        self.num_batches = 0

    def add(self, dataloader_idx: int, indices: list[Any], output: Any) -> None:
        """Takes one batch; writes a file when a chunk is full.

        Raises:
            TypeError: the output holds something that could not be read back.
        """
        _require_plain(output)
        self._pending.append({"dataloader_idx": dataloader_idx, "indices": indices, "output": output})
        self.num_batches += 1
        if len(self._pending) >= self._chunk_size:
            self.flush()

    def flush(self) -> None:
        """Writes what is pending; a file appears under its name only when it is complete."""
        if not self._pending:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"predictions-rank{self._rank:05d}-{len(self.files):06d}.pt"
        partial = self._folder / f"{name}.partial"
        torch.save(self._pending, partial)
        os.replace(partial, self._folder / name)
        self.files.append(name)
        self._pending = []

    @staticmethod
    def used_files(folder: str) -> list[str]:
        """Returns the names of a few files of predictions that a folder holds already."""
        names = sorted(path.name for path in Path(folder).glob("*"))
        return [name for name in names if name.startswith(("predictions-", _MANIFEST))][:3]

    def write_manifest(self, files_by_rank: list[list[str]], num_batches: int) -> None:
        """Writes the list of all ranks' files, which makes the predictions complete."""
        self._folder.mkdir(parents=True, exist_ok=True)
        partial = self._folder / f"{_MANIFEST}.partial"
        partial.write_text(json.dumps({"files_by_rank": files_by_rank, "num_batches": num_batches}, indent=1))
        os.replace(partial, self._folder / _MANIFEST)


def _require_plain(output: Any) -> None:
    """Refuses what a file could not give back: ``torch.load(weights_only=True)`` knows plain types only."""
    if type(output) is dict:
        for key, value in output.items():
            _require_plain(key)
            _require_plain(value)
    elif type(output) in (list, tuple):
        for value in output:
            _require_plain(value)
    elif not isinstance(output, torch.Tensor) and type(output) not in (*_SCALARS, bool, complex):
        raise TypeError(
            explain(
                "predictions of tensors, numbers, strings, lists, tuples and dicts, because they go to files",
                f"a {type(output).__module__}.{type(output).__qualname__}",
                "Return it as one of these (a named tuple as a dict, an array by torch.from_numpy)",
            )
        )


def read_predictions(folder: str, dataloader_idx: int = 0) -> Iterator[tuple[list[Any], Any]]:
    """Yields ``(indices, output)`` of each batch, in one process's order, with one file in memory at a time.

    Args:
        folder: the folder that :class:`~ddp_plugin.GatherPredictions` wrote.
        dataloader_idx: which loader's predictions.

    Raises:
        FileNotFoundError: there is no complete set of predictions.
    """
    manifest = Path(folder) / _MANIFEST
    if not manifest.exists():
        raise FileNotFoundError(
            explain(f"complete predictions in {folder!r}", f"no {_MANIFEST}", "Run predict with output_dir= to its end")
        )
    for files in json.loads(manifest.read_text())["files_by_rank"]:
        for name in files:
            for entry in torch.load(Path(folder) / name, weights_only=True):
                if entry["dataloader_idx"] == dataloader_idx:
                    yield entry["indices"], entry["output"]
