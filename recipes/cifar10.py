"""CIFAR-10 from the files of its "python version", which are pickles: read without running what a pickle may name."""

import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from images import ImageSplits, stratified_split, tensor_splits
from torch import Tensor

from ddp_plugin.errors import explain

__all__ = ["cifar10"]

FOLDER = "cifar-10-batches-py"
TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST = "test_batch"
META = "batches.meta"
IMAGE = (3, 32, 32)
NUM_CLASSES = 10


def cifar10(folder: Path, augment: bool, seed: int, validation_ratio: float) -> ImageSplits:
    """Loads 60 000 colour images of 32x32 pixels in ten classes (A. Krizhevsky, 2009).

    Args:
        folder: where the files are, or a folder with the archive's own folder in it.
        augment: whether training images are shifted and mirrored.
        seed: of the split and of the augmentation.
        validation_ratio: part of the training images kept for validation.

    Raises:
        ValueError: files that are missing or broken.
    """
    if (folder / FOLDER).is_dir():
        folder = folder / FOLDER
    missing = [name for name in (*TRAIN, TEST, META) if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            explain(
                f"the files of CIFAR-10's python version in {str(folder)!r}",
                f"none of the names {missing}",
                "Point data.path at the unpacked folder",
            )
        )
    meta = _safe_unpickle(folder / META)
    classes = meta.get("label_names")
    if not isinstance(classes, list) or len(classes) != NUM_CLASSES:
        raise broken(folder / META, f"{NUM_CLASSES} label_names", repr(classes))
    parts = [read_batch(folder / name) for name in TRAIN]
    images, labels = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    val, train = stratified_split(labels, [math.ceil(len(labels) * validation_ratio)], seed)
    return tensor_splits(
        (images[train], labels[train]),
        (images[val], labels[val]),
        read_batch(folder / TEST),
        [str(name) for name in classes],
        max_shift=4 if augment else 0,
        flip=augment,
        seed=seed,
    )


def read_batch(path: Path) -> tuple[Tensor, Tensor]:
    """Reads one file: images uint8 ``(N, 3, 32, 32)`` and labels int64 ``(N,)``, N >= 1."""
    batch = _safe_unpickle(path)
    data, labels = batch.get("data"), batch.get("labels")
    row = math.prod(IMAGE)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != row:
        found = f"{data.dtype} {data.shape}" if isinstance(data, np.ndarray) else type(data).__name__
        raise broken(path, f"'data' of uint8 (N, {row})", found)
    if not isinstance(labels, list) or len(labels) != len(data) or not labels:
        found = f"{len(labels)} of them" if isinstance(labels, list) else type(labels).__name__
        raise broken(path, f"{len(data)} 'labels'", found)
    if not all(isinstance(label, int) and 0 <= label < NUM_CLASSES for label in labels):
        raise broken(path, f"labels from 0 to {NUM_CLASSES - 1}", "others")
    return torch.from_numpy(data.copy()).view(-1, *IMAGE), torch.tensor(labels, dtype=torch.int64)


def broken(path: Path, expected: str, got: str) -> ValueError:
    """Returns the error that names a file, what should be in it and what is."""
    return ValueError(explain(f"{str(path)!r} to hold {expected}", got, "Unpack or download CIFAR-10 again"))


def _latin1(text: str, encoding: str) -> bytes:
    """Stands in for ``_codecs.encode``, which pickles of arrays call with this one encoding."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"the encoding {encoding!r}")
    return text.encode("latin1")


# What the pickle of a numpy array names; both homes of _reconstruct, old and new.
_RECONSTRUCT = np.empty(0).__reduce__()[0]
_ALLOWED: Mapping[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _latin1,
}


class _ArrayUnpickler(pickle.Unpickler):
    """Reads dicts, lists, strings, numbers and arrays; a pickle that names anything else is refused, not run."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"the name {module}.{name}, which has no place in a data file")
        return _ALLOWED[module, name]


def _safe_unpickle(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = _ArrayUnpickler(file, encoding="latin1").load()
    # A damaged pickle can fail with nearly any exception.
    except Exception as error:
        raise broken(path, "readable content", str(error) or type(error).__name__) from error
    if not isinstance(content, dict):
        raise broken(path, "a dict", f"a {type(content).__name__}")
    return content
