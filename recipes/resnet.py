"""Trains a residual network on images, on several processes.

    python recipes/resnet.py                                    # two processes on this CPU, about a minute
    python recipes/resnet.py data.name=cifar10 data.path=cifar-10-batches-py model.width=64
    python recipes/resnet.py config=a100_8x dry_run=true        # what would run on eight A100s

Read :func:`main` first. All settings are in ``conf/resnet.yaml``.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from classifier import ImageClassifier, ImageLoaders, Sizes, make_network
from images import ImageSplits
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from omegaconf import DictConfig
from plan import (
    Plan,
    activation_bytes,
    compute_dtype,
    count_parameters,
    effective_batch,
    memory_bytes,
    resolve_precision,
    stored_dtype,
    table,
)
from residual import training_flops
from run import (
    CHECKPOINT_LIMITS,
    checkpoint_to_load,
    describe_output,
    facts_of,
    make_saving,
    mistakes_of_settings,
    run,
    say,
    say_if_finished,
    trainer_options,
    tuning_options,
)
from settings import Limits, check_limits, load_settings
from sources import load_images
from throughput import Throughput
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_plugin import ConvertSyncBatchNorm, CustomDDPStrategy, ScaleLearningRate
from ddp_plugin.errors import DDPPluginError, explain
from ddp_plugin.learning_rate import scale_ratio
from ddp_plugin.planning.described import DescribedRun


def main(argv: list[str]) -> None:
    """Trains, then measures the test images once; with ``dry_run=true`` only says what it would do."""
    settings = load_settings("resnet", argv)
    with mistakes_of_settings():  # all that can be wrong with the settings or the images, before anything is started
        check_limits(settings, LIMITS)
        splits = find_images(settings)
        sizes = Sizes.stated(settings) if splits is None else Sizes.of(splits)
        plan, flops_per_image = make_plan(settings, sizes)
        strategy = CustomDDPStrategy.from_config(settings.strategy)
        schedule, throughput = make_schedule(settings, plan), make_throughput(settings, flops_per_image)
        saving = make_saving(settings, every_steps=None, at_epoch_end=True)
        facts = find_facts(settings, plan, sizes)
        checkpoint = checkpoint_to_load(settings, facts, plan.num_steps, "trainer.max_epochs")
    rows = [*describe(sizes, splits, flops_per_image), describe_output(settings)]
    say(f"The plan\n{plan}\n{table(rows)}")
    if splits is None or settings.dry_run:
        return

    torch.set_num_threads(settings.trainer.threads_per_process)
    torch.set_float32_matmul_precision("high")  # tensor cores for what is left in fp32
    pl.seed_everything(settings.seed, workers=True, verbose=False)
    model = ImageClassifier(settings, sizes, facts).to(stored_dtype(plan.precision))
    if settings.compile:
        model.network.compile()  # in place: the names in checkpoints stay
    trainer = make_trainer(settings, plan, strategy, [schedule, throughput, *saving])
    images = ImageLoaders(settings, splits)
    trainer.fit(model, images, ckpt_path=checkpoint)
    say_if_finished(trainer)
    result = trainer.test(model, images, verbose=False)[0]

    num_correct, num_images = round(result["test/num_correct"]), round(result["test/num_images"])
    if num_images != len(splits.test):
        raise DDPPluginError(explain(f"{len(splits.test)} test images, each once", str(num_images), "Report this"))
    measured = f"{num_correct / num_images:.2%} ({num_correct}/{num_images} images, each counted once)"
    rows = [
        ("training", str(throughput.report() or "too few steps to measure")),
        ("test accuracy", measured),
        ("test top-5", f"{result['test/top5']:.2%}"),
    ]
    if splits.test_is_val:
        rows.append(("test images", "those of val/, because there is no folder test/"))
    say(f"The result\n{table(rows)}")


def for_tuning(argv: list[str]) -> dict[str, Any]:
    """Returns arguments of :func:`ddp_plugin.tune`, as ``ddp-plugin tune --recipe recipes/resnet.py`` asks for them.

    Args:
        argv: settings as for :func:`main`.

    Raises:
        SettingsError: settings that cannot be, or images that are not there.
    """
    settings = load_settings("resnet", argv)
    with mistakes_of_settings():
        check_limits(settings, LIMITS)
        if (splits := find_images(settings)) is None:
            raise ValueError(explain("images", "dry_run=true", "Leave it out: tuning trains"))
        sizes = Sizes.of(splits)
        plan, _ = make_plan(settings, sizes)
    torch.set_num_threads(settings.trainer.threads_per_process)
    torch.set_float32_matmul_precision("high")
    pl.seed_everything(settings.seed, workers=True, verbose=False)
    return {
        **tuning_options(settings, plan),
        "model": ImageClassifier(settings, sizes).to(stored_dtype(plan.precision)),
        "datamodule": ImageLoaders(settings, splits),
        "callbacks": [ConvertSyncBatchNorm()] if settings.sync_batchnorm else [],
        "benchmark": settings.trainer.accelerator != "cpu",
    }


def describe_run(argv: list[str]) -> DescribedRun:
    """Says what a run with these arguments would be, for ``ddp-plugin plan --recipe``; nothing is started."""
    settings = load_settings("resnet", ["dry_run=true", *argv])
    with mistakes_of_settings():
        check_limits(settings, LIMITS)
        splits = find_images(settings)
        sizes = Sizes.stated(settings) if splits is None else Sizes.of(splits)
        plan, _ = make_plan(settings, sizes)

    def make_loss(network: nn.Module, device: torch.device) -> Callable[[], Tensor]:
        images = torch.randn(plan.batch.batch_size, *sizes.image_shape, device=device).to(stored_dtype(plan.precision))
        labels = torch.randint(sizes.num_classes, (plan.batch.batch_size,), device=device)
        return lambda: F.cross_entropy(network(images), labels)

    return plan.described(settings, lambda: make_network(settings, sizes), make_loss, optimizer_name(settings))


# ---------------------------------------------------------------------------------------------------- before the run

FACTS = (
    "seed",
    "sync_batchnorm",
    "model.name",
    "model.stem",
    "model.width",
    "model.zero_init_residual",
    "optimizer",
    "data.name",
    "data.image_size",
    "data.validation_ratio",
    "data.test_ratio",
    "data.augment",
)
"""Settings that a run and one that continues it must share."""

LIMITS: Limits = {
    **CHECKPOINT_LIMITS,
    "seed": (0, 2**32 - 1),
    "data.num_classes": (1, math.inf),
    "data.num_train_images": (1, math.inf),
    "data.image_size": (1, math.inf),
    "data.num_workers": (0, math.inf),
    "optimizer.learning_rate": (0.0, math.inf),
    "optimizer.base_batch_size": (1, math.inf),
    "optimizer.momentum": (0.0, 1.0),
    "optimizer.weight_decay": (0.0, math.inf),
    "optimizer.label_smoothing": (0.0, 1.0),
    "optimizer.warmup_epochs": (0.0, math.inf),
    "trainer.batch_size": (1, math.inf),
    "trainer.accumulate": (1, math.inf),
    "trainer.global_batch_size": (1, math.inf),
    "trainer.max_epochs": (1, math.inf),
    "trainer.log_every": (1, math.inf),
    "trainer.threads_per_process": (1, math.inf),
    "trainer.peak_flops_per_s": (1.0, math.inf),
}
"""Of each number in the settings; networks and images check their own."""


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


def find_facts(settings: DictConfig, plan: Plan, sizes: Sizes) -> dict[str, Any]:
    """Returns what must be equal in a run and in one that continues it: settings, images, and steps of an epoch."""
    batch = plan.batch
    return {
        **facts_of(settings, plan, FACTS),
        "training images": sizes.num_train,
        "classes": sizes.num_classes,
        "channels": sizes.image_shape[0],
        "steps per epoch": steps_per_epoch(
            sizes.num_train, batch.num_processes, batch.batch_size, batch.num_accumulated
        ),
    }


def make_plan(settings: DictConfig, sizes: Sizes) -> tuple[Plan, int]:
    """Resolves the settings; the network is built on the meta device and takes no memory.

    Returns:
        The plan, and the floating-point operations of one image in training.

    Raises:
        ValueError: settings that cannot be.
    """
    chosen, optimizer = settings.trainer, settings.optimizer
    batch = effective_batch(settings)
    precision = resolve_precision(chosen.precision, chosen.accelerator)
    per_epoch = steps_per_epoch(sizes.num_train, batch.num_processes, batch.batch_size, batch.num_accumulated)
    num_steps = per_epoch * chosen.max_epochs
    if chosen.max_steps >= 0:
        num_steps = min(num_steps, chosen.max_steps)
    if num_steps < 1:
        raise ValueError(explain("trainer.max_steps to be at least 1, or -1", str(chosen.max_steps), "Raise it"))
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
        images = torch.empty(batch.batch_size, *sizes.image_shape, dtype=compute_dtype(precision))
        labels = torch.empty(batch.batch_size, dtype=torch.int64)
    flops_per_image = training_flops(network, sizes.image_shape)
    network.to(images.dtype)  # as autocast does, but for the norms' few parameters
    plan = Plan(
        name=f"{settings.model.name} on {settings.data.name}, {sizes.num_classes} classes",
        batch=batch,
        learning_rate=optimizer.learning_rate * scale_ratio("linear", batch.total / optimizer.base_batch_size),
        num_steps=num_steps,
        num_warmup_steps=num_warmup_steps,
        num_parameters=count_parameters(network),
        precision=precision,
        memory=memory_bytes(
            count_parameters(network),
            precision,
            optimizer_name(settings),
            distributed=batch.num_processes > 1,
            gradient_as_bucket_view=bool(settings.strategy.gradient_as_bucket_view),
            activations=activation_bytes(network, lambda: F.cross_entropy(network(images), labels)),
        ),
        unit="images",
    )
    return plan, flops_per_image


def optimizer_name(settings: DictConfig) -> str:
    """Returns what the optimizer is called where its memory is counted."""
    return "sgd_momentum" if settings.optimizer.momentum else "sgd"


def steps_per_epoch(num_images: int, num_ranks: int, batch_size: int, num_accumulated: int) -> int:
    """Counts optimizer steps: each rank takes an equal share, rounded up, in full batches only.

    Raises:
        ValueError: there is not a single full batch.
    """
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


# ------------------------------------------------------------------------------------------------------- the run itself


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
        total_steps=plan.num_steps,  # so that a longer run than its checkpoint's ends where its own plan says
    )


def make_throughput(settings: DictConfig, flops_per_image: int) -> Throughput:
    """Returns what measures images per second."""
    return Throughput(unit="images", flops_per_unit=flops_per_image, peak_flops_per_s=settings.trainer.peak_flops_per_s)


def make_trainer(settings: DictConfig, plan: Plan, strategy: CustomDDPStrategy, others: list[Callback]) -> pl.Trainer:
    """Returns the Trainer; beside the newest checkpoints it keeps ``best.ckpt`` in ``output_dir``."""
    chosen = settings.trainer
    callbacks: list[Callback] = [
        *others,
        LearningRateMonitor("step"),
        ModelCheckpoint(
            settings.output_dir,
            filename="best",
            monitor="val/top1",
            mode="max",
            enable_version_counter=False,
            save_on_train_epoch_end=False,
        ),
    ]
    if settings.sync_batchnorm:
        callbacks.append(ConvertSyncBatchNorm())
    return pl.Trainer(
        **trainer_options(settings, plan, callbacks),
        strategy=strategy,
        max_epochs=chosen.max_epochs,
        max_steps=chosen.max_steps,
        benchmark=chosen.accelerator != "cpu",  # batches have one shape: let cuDNN search for its fastest kernels
    )


def describe(sizes: Sizes, splits: ImageSplits | None, flops_per_image: int) -> list[tuple[str, str]]:
    """Says what is trained on and what an image costs."""
    channels, height, width = sizes.image_shape
    held_out = (
        "as the settings state" if splits is None else f"{len(splits.val):,} to validate, {len(splits.test):,} to test"
    )
    return [
        ("images", f"{sizes.num_train:,} to train, {held_out}; {channels} x {height} x {width}"),
        ("arithmetic", f"{flops_per_image / 1e9:,.4g} GFLOP per image, forward and backward"),
    ]


if __name__ == "__main__":
    run(main)
