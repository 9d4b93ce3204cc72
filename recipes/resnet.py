"""Trains a residual network on images, on several processes.

    python recipes/resnet.py                                    # two processes on this CPU, about a minute
    python recipes/resnet.py data.name=cifar10 data.path=cifar-10-batches-py model.width=64
    python recipes/resnet.py config=a100_8x dry_run=true        # what would run on eight A100s

Read :func:`main` first. All settings are in ``conf/resnet.yaml``.
"""

import math
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from classifier import ImageClassifier, ImageLoaders, Sizes, describe_model, make_network
from images import ImageSplits, load_images
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from plan import Plan, activation_bytes, count_parameters, memory_bytes, num_processes, resolve_precision
from residual import training_flops
from settings import SettingsError, load_settings
from throughput import Throughput
from torch.nn import functional as F

from ddp_plugin import ConvertSyncBatchNorm, CustomDDPStrategy, ScaleLearningRate, default_callbacks
from ddp_plugin.errors import DDPPluginError, explain

say = rank_zero_only(print)


def main(argv: list[str]) -> None:
    """Trains, then measures the test images once; with ``dry_run=true`` only says what it would do."""
    settings = load_settings("resnet", argv)
    try:  # all that can be wrong with the settings or the images, before anything is started
        check_limits(settings)
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


# ---------------------------------------------------------------------------------------------------- before the run

LIMITS: dict[str, tuple[float, float]] = {
    "data.image_size": (1, math.inf),
    "data.num_workers": (0, math.inf),
    "optimizer.learning_rate": (0, math.inf),
    "optimizer.base_batch_size": (1, math.inf),
    "optimizer.momentum": (0, 1),
    "optimizer.weight_decay": (0, math.inf),
    "optimizer.label_smoothing": (0, 1),
    "optimizer.warmup_epochs": (0, math.inf),
    "trainer.batch_size": (1, math.inf),
    "trainer.accumulate": (1, math.inf),
    "trainer.max_epochs": (1, math.inf),
    "trainer.log_every": (1, math.inf),
    "trainer.threads_per_process": (1, math.inf),
}
"""Smallest and largest value of each number in the settings; networks and images check their own."""


def check_limits(settings: DictConfig) -> None:
    """Refuses numbers that would only be refused in the middle of the start.

    Raises:
        ValueError: a number outside its limits.
    """
    for key, (lowest, highest) in LIMITS.items():
        value = OmegaConf.select(settings, key)
        if not lowest <= value <= highest:
            limits = f"at least {lowest}" if highest == math.inf else f"between {lowest} and {highest}"
            raise ValueError(explain(f"{key} to be {limits}", str(value), "Correct the value"))


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


def computes_in(precision: str) -> torch.dtype:
    """Returns the type of the activations in a resolved precision."""
    bits = precision.partition("-")[0]
    return {"bf16": torch.bfloat16, "16": torch.float16, "32": torch.float32, "64": torch.float64}[bits]


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
        *default_callbacks(),
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
        benchmark=chosen.accelerator != "cpu",  # batches have one shape: let cuDNN search for its fastest kernels
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
