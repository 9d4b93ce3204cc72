"""Trains a residual network on images, on several processes.

    python recipes/resnet.py                                    # two processes on this CPU, about a minute
    python recipes/resnet.py data.name=cifar10 data.path=cifar-10-batches-py model.width=64
    python recipes/resnet.py config=a100_8x dry_run=true        # what would run on eight A100s

Read :func:`main` first. All settings are in ``conf/resnet.yaml``.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from images import ImageSplits, load_images
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from optimizer import make_sgd
from plan import Plan, activation_bytes, count_parameters, memory_bytes, num_processes, resolve_precision
from residual import ResNet, resnet, training_flops
from settings import SettingsError, load_settings
from throughput import Throughput
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import Metric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from ddp_plugin import CustomDDPStrategy
from ddp_plugin.callbacks.convert_sync_batchnorm import ConvertSyncBatchNorm
from ddp_plugin.callbacks.exact_evaluation import ExactEvaluation
from ddp_plugin.callbacks.per_rank_seed import PerRankSeed
from ddp_plugin.callbacks.sampler_epoch import SamplerEpoch
from ddp_plugin.callbacks.scale_learning_rate import ScaleLearningRate
from ddp_plugin.errors import DDPPluginError, explain

Batch = tuple[Tensor, Tensor]

say = rank_zero_only(print)


def main(argv: list[str]) -> None:
    """Trains, then measures the test images once; with ``dry_run=true`` only says what it would do."""
    settings = load_settings("resnet", argv)
    try:  # all that can be wrong with the settings or the images, before anything is started
        splits = find_images(settings)
        sizes = Sizes.stated(settings) if splits is None else Sizes.of(splits)
        plan, flops_per_image = make_plan(settings, sizes)
        strategy = CustomDDPStrategy.from_config(settings.strategy)
        schedule, throughput = make_schedule(settings, plan), make_throughput(settings, flops_per_image)
        checkpoint = find_checkpoint(settings, sizes, plan)
    except (ImportError, TypeError, ValueError) as error:
        raise SettingsError(str(error)) from error
    say(f"The plan\n{plan}\n{describe(sizes, splits, flops_per_image)}")
    if splits is None or settings.dry_run:
        return

    torch.set_num_threads(settings.trainer.threads_per_process)
    torch.set_float32_matmul_precision("high")  # tensor cores for what is left in fp32
    pl.seed_everything(settings.seed, workers=True, verbose=False)
    model = ImageClassifier(settings, sizes)
    if settings.compile:
        model.network.compile()  # in place: the names in checkpoints stay
    trainer = make_trainer(settings, plan, strategy, [schedule, throughput])
    images = ImageLoaders(settings, splits)
    trainer.fit(model, images, ckpt_path=checkpoint)
    result = trainer.test(model, images, verbose=False)[0]

    num_correct, num_images = round(result["test/num_correct"]), round(result["test/num_images"])
    if num_images != len(splits.test):
        raise DDPPluginError(explain(f"{len(splits.test)} test images, each once", str(num_images), "Report this"))
    say("The result")
    say(f"  training            {throughput.report(model.device) or 'too few steps to measure'}")
    say(f"  test accuracy       {num_correct / num_images:.2%} ({num_correct}/{num_images} images, each counted once)")
    say(f"  test top-5          {result['test/top5']:.2%}")
    if splits.test_is_val:
        say("  there is no folder test/, so these are the images of val/")


# --------------------------------------------------------------------------------------------------- model and data


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
    """

    def __init__(self, settings: DictConfig, sizes: Sizes) -> None:
        super().__init__()
        self.save_hyperparameters({"model": describe_model(settings, sizes)})
        self.settings = settings
        self.memory_format = torch.channels_last if settings.model.channels_last else torch.contiguous_format
        self.network = make_network(settings, sizes)
        self.network.to(memory_format=self.memory_format)  # type: ignore[call-overload]  # a form its stub lacks
        self.val_measures, self.test_measures = make_measures(sizes.num_classes), make_measures(sizes.num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits ``(N, num_classes)`` of images ``(N, C, H, W)``."""
        logits: Tensor = self.network(images.to(memory_format=self.memory_format))
        return logits

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


def describe_model(settings: DictConfig, sizes: Sizes) -> dict[str, Any]:
    """Returns what must be equal in a run and in the checkpoint it continues."""
    chosen = OmegaConf.to_container(settings.model)
    assert isinstance(chosen, dict)
    return {
        **{key: chosen[key] for key in ("name", "stem", "width")},
        "num_classes": sizes.num_classes,
        "in_channels": sizes.image_shape[0],
    }


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
        num_workers = self.settings.data.num_workers
        return DataLoader(
            images,
            self.settings.trainer.batch_size,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=self.settings.trainer.accelerator != "cpu" and torch.cuda.is_available(),
            **options,
        )


# ---------------------------------------------------------------------------------------------- trainer and the rest


def find_images(settings: DictConfig) -> ImageSplits | None:
    """Returns the images, or ``None`` for a dry run whose settings state the sizes of a folder that is not here.

    Raises:
        ValueError: broken or missing images.
        ImportError: a package that reads them is missing.
    """
    data = settings.data
    is_stated = None not in (data.num_classes, data.num_train_images)
    is_here = data.path is not None and Path(data.path).expanduser().is_dir()
    if settings.dry_run and data.name == "imagefolder" and is_stated and not is_here:
        return None
    splits = load_images(
        data.name,
        data.path,
        augment=data.augment,
        seed=settings.seed,
        validation_ratio=data.validation_ratio,
        test_ratio=data.test_ratio,
        image_size=data.image_size,
        num_classes=data.num_classes,
    )
    if data.num_train_images not in (None, len(splits.train)):
        raise ValueError(
            explain(
                f"data.num_train_images={data.num_train_images} training images",
                str(len(splits.train)),
                "Correct data.path, or set data.num_train_images=null",
            )
        )
    return splits


def make_plan(settings: DictConfig, sizes: Sizes) -> tuple[Plan, int]:
    """Resolves the settings; the network is built on the meta device and takes no memory.

    Returns:
        The plan, and the floating-point operations of one image in training.

    Raises:
        ValueError: settings that cannot be.
    """
    chosen, optimizer = settings.trainer, settings.optimizer
    processes = num_processes(chosen.accelerator, chosen.devices, chosen.num_nodes)
    precision = resolve_precision(chosen.precision, chosen.accelerator)
    per_epoch = steps_per_epoch(sizes.num_train, processes, chosen.batch_size, chosen.accumulate)
    num_steps = per_epoch * chosen.max_epochs
    if chosen.max_steps >= 0:
        num_steps = min(num_steps, chosen.max_steps)
    if num_steps < 1 or optimizer.warmup_epochs < 0:
        raise ValueError(
            explain(
                "trainer.max_epochs and trainer.max_steps of at least 1, and optimizer.warmup_epochs of at least 0",
                f"{chosen.max_epochs}, {chosen.max_steps} and {optimizer.warmup_epochs}",
                "Raise them",
            )
        )
    num_warmup_steps = round(optimizer.warmup_epochs * per_epoch)
    if num_warmup_steps >= num_steps:
        raise ValueError(
            explain(
                "a warm-up shorter than the run",
                f"{num_warmup_steps} of {num_steps} steps",
                "Lower optimizer.warmup_epochs, or train for longer",
            )
        )
    with torch.device("meta"):
        network = make_network(settings, sizes)
        images = torch.empty(chosen.batch_size, *sizes.image_shape, dtype=computes_in(precision))
        labels = torch.empty(chosen.batch_size, dtype=torch.int64)
    flops_per_image = training_flops(network, sizes.image_shape)
    network.to(images.dtype)  # as autocast does, but for the norms' few parameters
    plan = Plan(
        name=f"{settings.model.name} on {settings.data.name}, {sizes.num_classes} classes",
        batch_size=chosen.batch_size,
        num_processes=processes,
        num_accumulated=chosen.accumulate,
        learning_rate=optimizer.learning_rate
        * (chosen.batch_size * processes * chosen.accumulate / optimizer.base_batch_size),
        num_steps=num_steps,
        num_warmup_steps=num_warmup_steps,
        num_parameters=count_parameters(network),
        precision=precision,
        memory=memory_bytes(
            count_parameters(network),
            precision,
            "sgd_momentum" if optimizer.momentum else "sgd",
            distributed=processes > 1,
            gradient_as_bucket_view=bool(settings.strategy.gradient_as_bucket_view),
            activations=activation_bytes(network, lambda: F.cross_entropy(network(images), labels)),
        ),
        unit="images",
    )
    return plan, flops_per_image


def steps_per_epoch(num_images: int, num_ranks: int, batch_size: int, num_accumulated: int) -> int:
    """Counts optimizer steps: each rank takes an equal share, rounded up, in full batches only.

    Raises:
        ValueError: there is not a single full batch, or a count is below 1.
    """
    if min(batch_size, num_accumulated) < 1:
        raise ValueError(
            explain(
                "trainer.batch_size and trainer.accumulate of at least 1",
                f"{batch_size}, {num_accumulated}",
                "Raise them",
            )
        )
    num_batches = math.ceil(num_images / num_ranks) // batch_size
    if num_batches == 0:
        raise ValueError(
            explain(
                f"at least {batch_size} training images for each of {num_ranks} processes",
                f"{num_images} images",
                "Lower trainer.batch_size or trainer.devices, or give more images",
            )
        )
    return math.ceil(num_batches / num_accumulated)  # Lightning steps at the end of an epoch too


def computes_in(precision: str) -> torch.dtype:
    """Returns the type of the activations in a resolved precision."""
    bits = precision.partition("-")[0]
    return {"bf16": torch.bfloat16, "16": torch.float16, "32": torch.float32, "64": torch.float64}[bits]


def make_schedule(settings: DictConfig, plan: Plan) -> ScaleLearningRate:
    """Returns the linear scaling rule with a warm-up and a cosine, in optimizer steps.

    Raises:
        ValueError: settings that cannot be.
    """
    return ScaleLearningRate(
        settings.optimizer.base_batch_size,
        rule="linear",
        warmup_steps=plan.num_warmup_steps,
        warmup_from=settings.optimizer.warmup_from if plan.num_warmup_steps else "zero",
        schedule="cosine",
    )


def make_throughput(settings: DictConfig, flops_per_image: int) -> Throughput:
    """Returns what measures images per second.

    Raises:
        ValueError: a peak that is not positive.
    """
    return Throughput(unit="images", flops_per_unit=flops_per_image, peak_flops_per_s=settings.trainer.peak_flops_per_s)


def make_trainer(
    settings: DictConfig, plan: Plan, strategy: CustomDDPStrategy, measuring: list[Callback]
) -> pl.Trainer:
    """Returns the Trainer; its log is a CSV file, its checkpoints ``last`` and ``best``, all in ``output_dir``."""
    chosen, folder = settings.trainer, last_checkpoint(settings).parent
    callbacks: list[Callback] = [
        SamplerEpoch(),
        ExactEvaluation(),
        PerRankSeed(),
        *measuring,
        LearningRateMonitor("step"),
        ModelCheckpoint(folder, filename="last", enable_version_counter=False, save_on_train_epoch_end=True),
        ModelCheckpoint(
            folder,
            filename="best",
            monitor="val/top1",
            mode="max",
            enable_version_counter=False,
            save_on_train_epoch_end=False,
        ),
    ]
    if settings.sync_batchnorm:
        callbacks.append(ConvertSyncBatchNorm())
    if chosen.progress_bar:
        callbacks.append(TQDMProgressBar(refresh_rate=chosen.log_every))
    return pl.Trainer(
        accelerator=chosen.accelerator,
        devices=chosen.devices,
        num_nodes=chosen.num_nodes,
        precision=plan.precision,  # type: ignore[arg-type]
        strategy=strategy,
        callbacks=callbacks,
        max_epochs=chosen.max_epochs,
        max_steps=chosen.max_steps,
        accumulate_grad_batches=chosen.accumulate,
        num_sanity_val_steps=0,
        log_every_n_steps=chosen.log_every,
        logger=CSVLogger(settings.output_dir, name="logs"),
        enable_progress_bar=chosen.progress_bar,
        enable_model_summary=False,
        benchmark=chosen.accelerator
        != "cpu",  # all batches have one shape, so cuDNN may search for its fastest kernels
    )


def last_checkpoint(settings: DictConfig) -> Path:
    """Returns where the newest checkpoint of a run is written."""
    return Path(settings.output_dir) / "checkpoints" / "last.ckpt"


def find_checkpoint(settings: DictConfig, sizes: Sizes, plan: Plan) -> Path | None:
    """Returns the checkpoint to continue from, or ``None`` for a new run.

    Raises:
        SettingsError: there is none, it belongs to another model, or it has no step left to do.
    """
    if not settings.resume:
        return None
    path = last_checkpoint(settings) if settings.resume is True else Path(str(settings.resume))
    if not path.is_file():
        raise SettingsError(explain("resume= to name a checkpoint", f"{path}, which is no file", "Correct it"))
    found = torch.load(path, map_location="meta", weights_only=True, mmap=True)
    model, wanted = found["hyper_parameters"]["model"], describe_model(settings, sizes)
    if model != wanted:
        raise SettingsError(explain(f"a checkpoint of the model {wanted}", f"{model}", "Give that run's settings"))
    if found["global_step"] >= plan.num_steps:
        raise SettingsError(
            explain(
                "a run longer than its checkpoint",
                f"{plan.num_steps} steps and a checkpoint at {found['global_step']}",
                "Raise trainer.max_epochs, or leave resume out",
            )
        )
    return path


def describe(sizes: Sizes, splits: ImageSplits | None, flops_per_image: int) -> str:
    """Says what is trained on and what an image costs."""
    channels, height, width = sizes.image_shape
    held_out = (
        "as the settings state" if splits is None else f"{len(splits.val):,} to validate, {len(splits.test):,} to test"
    )
    rows = [
        ("images", f"{sizes.num_train:,} to train, {held_out}; {channels} x {height} x {width}"),
        ("arithmetic", f"{flops_per_image / 1e9:,.4g} GFLOP per image, forward and backward"),
    ]
    return "\n".join(f"  {label:<20}{text}" for label, text in rows)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SettingsError as mistake:
        sys.exit(f"error: {mistake}")
