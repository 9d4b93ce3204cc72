"""ImageNet-style folders of images, read through torchvision where it is installed."""

import math
from pathlib import Path
from typing import Any

import torch
from images import Images, ImageSplits

from ddp_plugin.errors import explain

__all__ = ["imagefolder"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
"""What torchvision's ImageNet weights expect; of RGB values in [0, 1]."""


def imagefolder(folder: Path, augment: bool, seed: int, image_size: int) -> ImageSplits:
    """Loads ``train/CLASS/*.jpg``, ``val/CLASS/*.jpg`` and, if there is one, ``test/CLASS/*.jpg``.

    Args:
        folder: where these folders are.
        augment: whether training images are cropped and mirrored at random.
        seed: of the augmentation.
        image_size: pixels of a side after cropping.

    Raises:
        ValueError: a folder that is missing, that has other classes than ``train``, or that has none; a broken image.
        ImportError: there is no torchvision that works.
    """
    try:
        from torchvision import datasets, transforms
    # RuntimeError: a torchvision made for another build of torch finds none of its own operators.
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            explain(
                f"a torchvision that fits torch {torch.__version__} for data.name=imagefolder",
                str(error),
                "Run: pip install 'ddp_plugin[vision]'",
            )
        ) from error
    for split in ("train", "val"):
        if not (folder / split).is_dir():
            raise ValueError(
                explain(f"train/ and val/ in data.path={str(folder)!r}", f"no folder {split}/", "Correct data.path")
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
                explain(f"images of each class in {str(folder / split)!r}", str(error), "Fill or remove the folder")
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
                explain(
                    f"the {len(classes)} classes of train/ in {split}/ of {str(folder)!r}",
                    f"{len(_classes(images))}; only in one of them: {', '.join(difference[:5])}",
                    "Make them equal",
                )
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
        raise ValueError(explain(f"an image in {path!r}", str(error), "Remove or replace the file")) from error
