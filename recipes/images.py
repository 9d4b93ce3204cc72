"""The images: handwritten digits that scikit-learn ships, CIFAR-10 from a folder, ImageNet-style folders.

All of them end as three map-style datasets of ``(image, label)``. What augmentation does to a sample depends on the
seed, the epoch and the sample's index alone, so that any number of processes and workers sees the same images.
"""

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

__all__ = ["DATASETS", "ImageSplits", "Images", "load_images", "shift_and_flip", "stratified_split"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
"""What torchvision's ImageNet weights expect; of RGB values in [0, 1]."""

CIFAR10_FOLDER = "cifar-10-batches-py"
CIFAR10_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
CIFAR10_TEST = "test_batch"
CIFAR10_META = "batches.meta"
CIFAR10_IMAGE = (3, 32, 32)
CIFAR10_NUM_CLASSES = 10

Sample = tuple[Tensor, int]


class Source(Protocol):
    """Anything that holds ``(raw image, label)`` by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Any, Any]: ...


class Images(Dataset[Sample]):
    """A source with a transform, whose random numbers belong to the sample and not to the process.

    Args:
        source: the raw images and labels.
        transform: makes a float32 tensor ``(C, H, W)`` of a raw image; may draw from torch's global generator.
        seed: of the random numbers. ``None``: the transform draws none, and no generator is touched.
    """

    def __init__(self, source: Source, transform: Callable[[Any], Tensor], seed: int | None = None) -> None:
        self.source = source
        self.transform = transform
        self.seed = seed
        # In shared memory, because persistent workers keep the copy of the dataset that they started with.
        self._epoch = torch.zeros((), dtype=torch.int64)
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]

    def set_epoch(self, epoch: int) -> None:
        """Chooses the random numbers of an epoch; to be called before the loader's iterator is made."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        raw, label = self.source[index]
        if self.seed is None:
            return self.transform(raw), int(label)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(_mix(self.seed, int(self._epoch), index))
            return self.transform(raw), int(label)


def _mix(*values: int) -> int:
    """Hashes a few integers into 63 bits with the finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    mask, state = 2**64 - 1, 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return state >> 1


@dataclass(frozen=True)
class ImageSplits:
    """Three datasets that share no image, and what a network has to know of them.

    Attributes:
        train: for training, augmented if that was asked for.
        val: for choices made during training.
        test: for the one number at the end.
        classes: names of the classes, by label.
        image_shape: ``(channels, height, width)`` of an image as the network sees it.
        test_is_val: whether there were no test images, and ``test`` is ``val`` again.
    """

    train: Images
    val: Images
    test: Images
    classes: tuple[str, ...]
    image_shape: tuple[int, int, int]
    test_is_val: bool = False


def load_images(
    name: str,
    path: str | None = None,
    *,
    augment: bool = True,
    seed: int = 0,
    validation_ratio: float = 0.1,
    test_ratio: float = 0.2,
    image_size: int = 224,
    num_classes: int | None = None,
) -> ImageSplits:
    """Loads one of :data:`DATASETS`.

    Args:
        name: ``"digits"``, ``"cifar10"`` or ``"imagefolder"``.
        path: the folder; refused for digits, which come with scikit-learn.
        augment: whether training images are shifted, cropped or flipped at random.
        seed: of the split and of the augmentation.
        validation_ratio: part of the images kept for validation (digits: of all, CIFAR-10: of the training images).
        test_ratio: part of all images kept for the test (digits alone; the others have test images of their own).
        image_size: pixels of a side after cropping (image folders alone).
        num_classes: how many classes there should be; ``None`` takes what there is.

    Raises:
        ValueError: an unknown name, a missing or broken folder or file, or another number of classes.
        ImportError: scikit-learn or torchvision is needed and not installed.

    Collectives:
        None; each process reads the files for itself.
    """
    if name not in DATASETS:
        raise ValueError(f"Expected data.name to be one of {sorted(DATASETS)}. Got {name!r}. Choose one of these.")
    for key, ratio in (("validation_ratio", validation_ratio), ("test_ratio", test_ratio)):
        if not 0 < ratio < 1:
            raise ValueError(f"Expected data.{key} between 0 and 1. Got {ratio}. Choose a value such as 0.1.")
    if name == "digits":
        splits = _digits(path, augment, seed, validation_ratio, test_ratio)
    elif name == "cifar10":
        splits = _cifar10(_folder(name, path), augment, seed, validation_ratio)
    else:
        splits = _imagefolder(_folder(name, path), augment, seed, image_size)
    if num_classes is not None and len(splits.classes) != num_classes:
        raise ValueError(
            f"Expected data.num_classes={num_classes} classes in data.name={name}. Got {len(splits.classes)}: "
            f"{', '.join(splits.classes[:5])}, .... Correct data.num_classes, or data.path."
        )
    return splits


def _folder(name: str, path: str | None) -> Path:
    if path is None:
        raise ValueError(f"Expected a folder for data.name={name}. Got none. Add data.path=FOLDER.")
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ValueError(f"Expected data.path to be a folder. Got {str(folder)!r}, which is none. Correct data.path.")
    return folder


# -------------------------------------------------------------------------------------------------- kernels on tensors


def stratified_split(labels: Tensor, sizes: Sequence[int], seed: int) -> list[Tensor]:
    """Splits samples so that each part has each class in the proportion of the whole.

    Samples of each class are shuffled and spread evenly over one line; the parts are cut from that line. Sizes are kept
    exactly, and the count of a class in a part is within two of its share.

    Args:
        labels: ``(N,)`` int64.
        sizes: how many samples each part gets, but for the last, which gets the rest.
        seed: of the shuffle.

    Returns:
        One int64 tensor of sorted indices for each size, and one for the rest.

    Raises:
        ValueError: the sizes leave nothing for the last part.
    """
    if sum(sizes) >= len(labels) or min(sizes, default=0) < 0:
        raise ValueError(f"Expected parts of {len(labels)} samples with some left over. Got {list(sizes)}. Lower them.")
    generator = torch.Generator().manual_seed(seed)
    position = torch.empty(len(labels), dtype=torch.float64)
    for label in sorted(set(labels.tolist())):
        members = (labels == label).nonzero().flatten()
        shuffled = members[torch.randperm(len(members), generator=generator)]
        position[shuffled] = (torch.arange(len(members), dtype=torch.float64) + 0.5) / len(members)
    line = position.argsort(stable=True)
    return [part.sort().values for part in torch.split(line, [*sizes, len(labels) - sum(sizes)])]


def shift_and_flip(image: Tensor, max_shift: int, flip: bool) -> Tensor:
    """Moves an image by up to ``max_shift`` pixels each way, black where it leaves, and mirrors every second one.

    Args:
        image: ``(C, H, W)``, any dtype.
        max_shift: largest shift in pixels.
        flip: whether to mirror left and right with probability one half.

    Returns:
        An image of the same shape and dtype. Draws from torch's global generator.
    """
    down, right = torch.randint(0, 2 * max_shift + 1, (2,)).tolist()
    height, width = image.shape[-2:]
    image = F.pad(image, [max_shift] * 4)[..., down : down + height, right : right + width]
    if flip and torch.rand(()) < 0.5:
        image = image.flip(-1)
    return image


@dataclass(frozen=True)
class _Normalise:
    """uint8 ``(C, H, W)`` to float32 of mean 0 and deviation 1, after the augmentation if there is one."""

    mean: Tensor
    std: Tensor
    max_shift: int = 0
    flip: bool = False

    def __call__(self, image: Tensor) -> Tensor:
        if self.max_shift or self.flip:
            image = shift_and_flip(image, self.max_shift, self.flip)
        return (image.float() - self.mean) / self.std


def _tensor_splits(
    train: tuple[Tensor, Tensor],
    val: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    classes: Sequence[str],
    augment: bool,
    seed: int,
    max_shift: int,
    flip: bool,
) -> ImageSplits:
    pixels = train[0].double()
    mean, std = (statistic.float().view(-1, 1, 1) for statistic in (pixels.mean((0, 2, 3)), pixels.std((0, 2, 3))))
    plain = _Normalise(mean, std)
    return ImageSplits(
        train=Images(TensorDataset(*train), _Normalise(mean, std, max_shift, flip), seed)
        if augment
        else Images(TensorDataset(*train), plain),
        val=Images(TensorDataset(*val), plain),
        test=Images(TensorDataset(*test), plain),
        classes=tuple(classes),
        image_shape=(train[0].shape[1], train[0].shape[2], train[0].shape[3]),
    )


# ---------------------------------------------------------------------------------------------------------- the digits


def _digits(path: str | None, augment: bool, seed: int, validation_ratio: float, test_ratio: float) -> ImageSplits:
    """1797 grey 8x8 images of handwritten digits (E. Alpaydin and C. Kaynak, UCI repository, 1998)."""
    if path is not None:
        raise ValueError(f"Expected no data.path for data.name=digits. Got {path!r}. Remove it, or choose data.name.")
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "Expected scikit-learn, which ships the digits. Got an environment without it. "
            "Run: pip install 'ddp_plugin[recipes]'."
        ) from error
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).to(torch.uint8).unsqueeze(1)
    labels = torch.from_numpy(bunch.target).to(torch.int64)
    sizes = [math.ceil(len(labels) * test_ratio), math.ceil(len(labels) * validation_ratio)]
    test, val, train = ((images[part], labels[part]) for part in stratified_split(labels, sizes, seed))
    names = [str(name) for name in bunch.target_names]
    return _tensor_splits(train, val, test, names, augment, seed, max_shift=1, flip=False)


# ------------------------------------------------------------------------------------------------------------ CIFAR-10


def _cifar10(folder: Path, augment: bool, seed: int, validation_ratio: float) -> ImageSplits:
    """60 000 colour images of 32x32 pixels in ten classes (A. Krizhevsky, 2009), in the "python version" files."""
    if (folder / CIFAR10_FOLDER).is_dir():
        folder = folder / CIFAR10_FOLDER
    missing = [name for name in (*CIFAR10_TRAIN, CIFAR10_TEST, CIFAR10_META) if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"Expected the files of CIFAR-10's python version in {str(folder)!r}. Got none of the names {missing}. "
            "Point data.path at the unpacked folder."
        )
    meta = _safe_unpickle(folder / CIFAR10_META)
    classes = meta.get("label_names")
    if not isinstance(classes, list) or len(classes) != CIFAR10_NUM_CLASSES:
        raise ValueError(
            f"Expected {CIFAR10_NUM_CLASSES} label_names in {str(folder / CIFAR10_META)!r}. Got {classes!r}. "
            "Unpack CIFAR-10 again."
        )
    parts = [_cifar10_batch(folder / name) for name in CIFAR10_TRAIN]
    images, labels = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    val, train = stratified_split(labels, [math.ceil(len(labels) * validation_ratio)], seed)
    return _tensor_splits(
        (images[train], labels[train]),
        (images[val], labels[val]),
        _cifar10_batch(folder / CIFAR10_TEST),
        [str(name) for name in classes],
        augment,
        seed,
        max_shift=4,
        flip=True,
    )


def _cifar10_batch(path: Path) -> tuple[Tensor, Tensor]:
    """Reads one file: images uint8 ``(N, 3, 32, 32)`` and labels int64 ``(N,)``, N >= 1."""
    batch = _safe_unpickle(path)
    data, labels = batch.get("data"), batch.get("labels")
    row = math.prod(CIFAR10_IMAGE)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != row:
        found = f"{data.dtype} {data.shape}" if isinstance(data, np.ndarray) else type(data).__name__
        raise ValueError(f"Expected 'data' in {str(path)!r} to be uint8 (N, {row}). Got {found}. Unpack it again.")
    if not isinstance(labels, list) or len(labels) != len(data) or not labels:
        found = f"{len(labels)} of them" if isinstance(labels, list) else type(labels).__name__
        raise ValueError(f"Expected {len(data)} 'labels' in {str(path)!r}. Got {found}. Unpack it again.")
    if not all(isinstance(label, int) and 0 <= label < CIFAR10_NUM_CLASSES for label in labels):
        raise ValueError(
            f"Expected labels from 0 to {CIFAR10_NUM_CLASSES - 1} in {str(path)!r}. Got others. Unpack it again."
        )
    return torch.from_numpy(data.copy()).view(-1, *CIFAR10_IMAGE), torch.tensor(labels, dtype=torch.int64)


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
        raise ValueError(
            f"Expected a readable CIFAR-10 file at {str(path)!r}. Got {error or type(error).__name__}. "
            "Unpack or download it again."
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"Expected a dict in {str(path)!r}. Got a {type(content).__name__}. Unpack it again.")
    return content


# ------------------------------------------------------------------------------------------------------- image folders


def _imagefolder(folder: Path, augment: bool, seed: int, image_size: int) -> ImageSplits:
    """``train/CLASS/*.jpg``, ``val/CLASS/*.jpg`` and, if there is one, ``test/CLASS/*.jpg``."""
    try:
        from torchvision import datasets, transforms
    # RuntimeError: a torchvision made for another build of torch finds none of its own operators.
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            f"Expected a torchvision that fits torch {torch.__version__} for data.name=imagefolder. Got: {error}. "
            "Run: pip install 'ddp_plugin[vision]'."
        ) from error
    for split in ("train", "val"):
        if not (folder / split).is_dir():
            raise ValueError(
                f"Expected train/ and val/ in data.path={str(folder)!r}. Got no folder {split}/. Correct data.path."
            )
    finish = [transforms.ToTensor(), transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    # The ratio 256 : 224 that ImageNet's numbers are reported with.
    steady = [transforms.Resize(math.ceil(image_size * 256 / 224)), transforms.CenterCrop(image_size)]
    random = [transforms.RandomResizedCrop(image_size), transforms.RandomHorizontalFlip()]

    def split_of(split: str, steps: list[Any], split_seed: int | None = None) -> Images:
        try:
            source = datasets.ImageFolder(str(folder / split), loader=_read_image)
        except FileNotFoundError as error:
            raise ValueError(
                f"Expected images of each class in {str(folder / split)!r}. Got: {error}. Fill or remove the folder."
            ) from error
        first_of_class = dict(reversed([(label, path) for path, label in source.samples]))
        for path in first_of_class.values():  # all of them would take hours; a bad one later names itself too
            _read_image(path)
        return Images(source, transforms.Compose([*steps, *finish]), split_seed)

    train = split_of("train", random, seed) if augment else split_of("train", steady)
    val = split_of("val", steady)
    has_test = (folder / "test").is_dir()
    test = split_of("test", steady) if has_test else val
    classes = _classes(train)
    for split, images in (("val", val), ("test", test)):
        if _classes(images) != classes:
            difference = sorted(set(classes).symmetric_difference(_classes(images)))
            raise ValueError(
                f"Expected the {len(classes)} classes of train/ in {split}/ of {str(folder)!r}. "
                f"Got {len(_classes(images))}; only in one of them: {', '.join(difference[:5])}. Make them equal."
            )
    return ImageSplits(train, val, test, classes, (3, image_size, image_size), test_is_val=not has_test)


def _classes(images: Images) -> tuple[str, ...]:
    return tuple(images.source.classes)  # type: ignore[attr-defined]  # an ImageFolder has them


def _read_image(path: str) -> Any:
    """Reads one file as an RGB image, or raises a ValueError that names it."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"Expected an image in {path!r}. Got: {error}. Remove or replace the file.") from error


DATASETS = ("cifar10", "digits", "imagefolder")
"""Where images can come from."""
