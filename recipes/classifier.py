"""What the image recipe hands to a Trainer: the network with its loss and its measures, and the loaders."""

from dataclasses import dataclass
from typing import Any, cast

import lightning.pytorch as pl
import torch
from images import ImageSplits
from omegaconf import DictConfig
from optimizer import make_sgd
from residual import ResNet, resnet
from run import loader_options, refuse_other_run
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import Metric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

__all__ = ["ImageClassifier", "ImageLoaders", "Sizes", "make_measures", "make_network"]

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Sizes:
    """What network and plan need to know of the images.

    Attributes:
        num_train: training images.
        num_classes: number of logits.
        image_shape: ``(channels, height, width)``.
    """

    num_train: int
    num_classes: int
    image_shape: tuple[int, int, int]

    @classmethod
    def of(cls, splits: ImageSplits) -> "Sizes":
        """Returns the sizes of images that are at hand."""
        return cls(len(splits.train), len(splits.classes), splits.image_shape)

    @classmethod
    def stated(cls, settings: DictConfig) -> "Sizes":
        """Returns the sizes of an image folder that the settings state."""
        data = settings.data
        return cls(data.num_train_images, data.num_classes, (3, data.image_size, data.image_size))


class ImageClassifier(pl.LightningModule):
    """A residual network with its loss, its optimizer and its measures.

    Args:
        settings: the recipe's settings.
        sizes: of the images.
        facts: what has to be equal in a run and in one that continues it, see :func:`run.facts_of`; ``None`` for a
            module that is not continued.
    """

    def __init__(self, settings: DictConfig, sizes: Sizes, facts: dict[str, Any] | None = None) -> None:
        super().__init__()
        if facts is not None:
            self.save_hyperparameters({"run": facts})
        self.settings = settings
        self.facts = facts
        self.memory_format = torch.channels_last if settings.model.channels_last else torch.contiguous_format
        self.network = make_network(settings, sizes)
        self.network.to(memory_format=self.memory_format)  # type: ignore[call-overload]  # a form its stub lacks
        self.val_measures, self.test_measures = make_measures(sizes.num_classes), make_measures(sizes.num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits ``(N, num_classes)`` of images ``(N, C, H, W)``."""
        logits: Tensor = self.network(images.to(memory_format=self.memory_format))
        return logits

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuses another run's checkpoint."""
        if self.facts is not None:
            refuse_other_run(checkpoint, self.facts)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Returns the cross entropy with smoothed labels (Szegedy et al. 2016, section 7), the batch's mean."""
        images, labels = batch
        loss = F.cross_entropy(self(images), labels, label_smoothing=self.settings.optimizer.label_smoothing)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Measures a batch of validation images."""
        self._measure("val", self.val_measures, batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Measures a batch of test images."""
        self._measure("test", self.test_measures, batch)

    def _measure(self, stage: str, measures: nn.ModuleDict, batch: Batch) -> None:
        images, labels = batch
        logits = self(images)
        self.log(f"{stage}/loss", F.cross_entropy(logits, labels), batch_size=len(labels), sync_dist=True)
        cast(Metric, measures["num_correct"]).update((logits.argmax(dim=1) == labels).sum())
        cast(Metric, measures["num_images"]).update(len(labels))
        for name in ("top1", "top5"):
            cast(Metric, measures[name]).update(logits, labels)
        for name, measure in measures.items():
            self.log(f"{stage}/{name}", cast(Metric, measure), on_epoch=True, prog_bar=name == "top1")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum, at the learning rate of the base batch; weight decay spares norms and biases."""
        chosen = self.settings.optimizer
        return make_sgd(self.network, chosen.learning_rate, chosen.weight_decay, chosen.momentum, chosen.nesterov)


def make_network(settings: DictConfig, sizes: Sizes) -> ResNet:
    """Returns the network that the settings name, on torch's default device.

    Raises:
        ValueError: there is no such network.
    """
    chosen = settings.model
    return resnet(
        chosen.name,
        num_classes=sizes.num_classes,
        in_channels=sizes.image_shape[0],
        stem=chosen.stem,
        width=chosen.width,
        zero_init_residual=chosen.zero_init_residual,
    )


def make_measures(num_classes: int) -> nn.ModuleDict:
    """Returns what evaluation counts; all of it in sums, which hold over any number of processes."""
    return nn.ModuleDict(
        {
            "top1": MulticlassAccuracy(num_classes, top_k=1, average="micro", validate_args=False),
            "top5": MulticlassAccuracy(num_classes, top_k=min(5, num_classes), average="micro", validate_args=False),
            "num_correct": SumMetric(),
            "num_images": SumMetric(),
        }
    )


class ImageLoaders(pl.LightningDataModule):
    """The loaders of the three datasets.

    Training leaves out each process's last batch of an epoch where it is short, so that all steps weigh alike and
    BatchNorm never sees a single image. Evaluation leaves out nothing.

    Args:
        settings: the recipe's settings.
        splits: the images.
    """

    def __init__(self, settings: DictConfig, splits: ImageSplits) -> None:
        super().__init__()
        self.settings = settings
        self.splits = splits

    def train_dataloader(self) -> DataLoader[Any]:
        """Returns the training images, in a new order each epoch."""
        return self._loader(self.splits.train, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Returns the validation images, in their order."""
        return self._loader(self.splits.val)

    def test_dataloader(self) -> DataLoader[Any]:
        """Returns the test images, in their order."""
        return self._loader(self.splits.test)

    def _loader(self, images: Any, **options: Any) -> DataLoader[Any]:
        return DataLoader(images, self.settings.trainer.batch_size, **loader_options(self.settings), **options)
