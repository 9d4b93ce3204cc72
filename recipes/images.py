"""Images as datasets, what is done to them, and the handwritten digits that scikit-learn ships.

All images end as three map-style datasets of ``(image, label)``. What augmentation does to a sample depends on the
seed, the epoch and the sample's index alone, so that any number of processes and workers sees the same images.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from ddp_plugin.errors import explain
from ddp_plugin.streams import stream_seed

__all__ = ["ImageSplits", "Images", "Normalise", "digits", "shift_and_flip", "stratified_split", "tensor_splits"]

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
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the random numbers of an epoch; ``SamplerEpoch`` calls it in all processes, workers included."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        raw, label = self.source[index]
        if self.seed is None:
            return self.transform(raw), int(label)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(stream_seed(self.seed, None, "augmentation", self.epoch, index))
            return self.transform(raw), int(label)


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
        raise ValueError(explain(f"parts of {len(labels)} samples with some left over", str(list(sizes)), "Lower them"))
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
class Normalise:
    """uint8 ``(C, H, W)`` to float32 of mean 0 and deviation 1, after the augmentation if there is one."""

    mean: Tensor
    std: Tensor
    max_shift: int = 0
    flip: bool = False

    def __call__(self, image: Tensor) -> Tensor:
        """Returns float32 of the same shape."""
        if self.max_shift or self.flip:
            image = shift_and_flip(image, self.max_shift, self.flip)
        return (image.float() - self.mean) / self.std


def tensor_splits(
    train: tuple[Tensor, Tensor],
    val: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    classes: Sequence[str],
    *,
    max_shift: int = 0,
    flip: bool = False,
    seed: int = 0,
) -> ImageSplits:
    """Makes the three datasets of images that fit in memory, normalised by the training images' own statistics.

    Args:
        train: images uint8 ``(N, C, H, W)`` and labels int64 ``(N,)``.
        val: the same.
        test: the same.
        classes: names of the classes, by label.
        max_shift: how far training images are shifted, in pixels; 0 for not at all.
        flip: whether training images are mirrored.
        seed: of shifts and flips.
    """
    pixels = train[0].double()
    mean, std = (statistic.float().view(-1, 1, 1) for statistic in (pixels.mean((0, 2, 3)), pixels.std((0, 2, 3))))
    plain = Normalise(mean, std)
    return ImageSplits(
        train=Images(TensorDataset(*train), Normalise(mean, std, max_shift, flip), seed if max_shift or flip else None),
        val=Images(TensorDataset(*val), plain),
        test=Images(TensorDataset(*test), plain),
        classes=tuple(classes),
        image_shape=(train[0].shape[1], train[0].shape[2], train[0].shape[3]),
    )


def digits(augment: bool, seed: int, validation_ratio: float, test_ratio: float) -> ImageSplits:
    """Loads 1797 grey 8x8 images of handwritten digits (E. Alpaydin and C. Kaynak, UCI repository, 1998).

    Args:
        augment: whether training images are shifted.
        seed: of the split and of the shifts.
        validation_ratio: part of all images kept for validation.
        test_ratio: part of all images kept for the test.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            explain(
                "scikit-learn, which ships the digits",
                "an environment without it",
                "Run: pip install 'ddp_plugin[recipes]'",
            )
        ) from error
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).to(torch.uint8).unsqueeze(1)
    labels = torch.from_numpy(bunch.target).to(torch.int64)
    sizes = [math.ceil(len(labels) * test_ratio), math.ceil(len(labels) * validation_ratio)]
    test, val, train = ((images[part], labels[part]) for part in stratified_split(labels, sizes, seed))
    names = [str(name) for name in bunch.target_names]
    return tensor_splits(train, val, test, names, max_shift=1 if augment else 0, seed=seed)
