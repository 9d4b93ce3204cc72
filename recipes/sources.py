"""Where images come from, by name."""

from pathlib import Path

from cifar10 import cifar10
from imagefolder import imagefolder
from images import ImageSplits, digits

from ddp_plugin.errors import explain

__all__ = ["DATASETS", "load_images"]

DATASETS = ("cifar10", "digits", "imagefolder")


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
        raise ValueError(explain(f"data.name to be one of {sorted(DATASETS)}", repr(name), "Choose one of these"))
    for key, ratio in (("validation_ratio", validation_ratio), ("test_ratio", test_ratio)):
        if not 0 < ratio < 1:
            raise ValueError(explain(f"data.{key} between 0 and 1", str(ratio), "Choose a value such as 0.1"))
    if name == "digits":
        if path is not None:
            raise ValueError(
                explain("no data.path for data.name=digits", repr(path), "Remove it, or choose another data.name")
            )
        splits = digits(augment, seed, validation_ratio, test_ratio)
    elif name == "cifar10":
        splits = cifar10(_folder(name, path), augment, seed, validation_ratio)
    else:
        splits = imagefolder(_folder(name, path), augment, seed, image_size)
    if num_classes is not None and len(splits.classes) != num_classes:
        raise ValueError(
            explain(
                f"data.num_classes={num_classes} classes in data.name={name}",
                f"{len(splits.classes)}: {', '.join(splits.classes[:5])}, …",
                "Correct data.num_classes, or data.path",
            )
        )
    return splits


def _folder(name: str, path: str | None) -> Path:
    if path is None:
        raise ValueError(explain(f"a folder for data.name={name}", "none", "Add data.path=FOLDER"))
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ValueError(explain("data.path to be a folder", f"{str(folder)!r}, which is none", "Correct data.path"))
    return folder
