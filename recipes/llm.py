"""Trains a small language model on real text, on several processes.

    python recipes/llm.py                                    # two processes on this CPU, a few minutes
    python recipes/llm.py data.path=my_texts trainer.max_steps=2000
    python recipes/llm.py config=a100_8x dry_run=true        # what would run on eight A100s

Read :func:`main` first. All settings are in ``conf/llm.yaml``.
"""

import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from optimizer import make_adamw
from plan import Plan, memory_bytes, num_processes, resolve_precision
from settings import SettingsError, load_settings
from text import Corpus, TokenFiles, bits_per_byte, find_corpus, order0_bits_per_byte
from throughput import Throughput
from torch import Tensor
from torch.utils.data import DataLoader, Subset
from torchmetrics import Metric
from transformer import IGNORED, Transformer, TransformerConfig, generate, token_nats

from ddp_plugin import CustomDDPStrategy, ScaleLearningRate, default_callbacks
from ddp_plugin.errors import explain
from ddp_plugin.learning_rate import scale_ratio

say = rank_zero_only(print)


def main(argv: list[str]) -> None:
    """Trains, evaluates and samples; with ``dry_run=true`` only says what it would do."""
    settings = load_settings("llm", argv)
    with mistakes_of_settings():
        config = TransformerConfig(vocab_size=settings.tokenizer.vocab_size, **settings.model)
        plan = make_plan(settings, config)
        strategy = CustomDDPStrategy.from_config(settings.strategy)
        schedule = make_schedule(settings)
    say(f"The plan\n{plan}")
    if settings.dry_run:
        return

    chosen = settings.data
    corpus = find_corpus(chosen.path, list(chosen.patterns), chosen.max_bytes, chosen.validation_ratio)
    files = TokenFiles(corpus, config.vocab_size, chosen.cache_dir)
    checkpoint = find_checkpoint(settings)
    say(f"The corpus\n{describe(corpus)}")

    pl.seed_everything(settings.seed, workers=True, verbose=False)
    model = LanguageModel(settings, config, files)
    if settings.compile:
        model.network.compile()  # in place: the names in checkpoints stay
    throughput = Throughput(
        config.block_size, "tokens", config.training_flops_per_token, settings.trainer.peak_flops_per_s
    )
    trainer = make_trainer(settings, strategy, [schedule, throughput])
    trainer.fit(model, TextData(settings, plan, files), ckpt_path=checkpoint)

    say("The result")
    say(f"  validation          {trainer.callback_metrics['val_bits_per_byte']:.4f} bits per byte; the entropy of its")
    say(f"                      single bytes is {order0_bits_per_byte(corpus.validation):.4f}")
    say(f"  training            {throughput.report(model.device) or 'too few steps to measure'}")
    if trainer.is_global_zero and settings.sample.num_tokens:
        print(f"A sample\n{sample(model, settings.sample, settings.seed)}")


# --------------------------------------------------------------------------------------------------- model and data


class LanguageModel(pl.LightningModule):
    """A transformer with its loss, its optimizer and its measure.

    Args:
        settings: the recipe's settings.
        config: sizes of the network.
        files: tokenizer and tokens; they need not exist before the data is prepared.
    """

    def __init__(self, settings: DictConfig, config: TransformerConfig, files: TokenFiles) -> None:
        super().__init__()
        self.save_hyperparameters({"model": OmegaConf.to_container(settings.model)})
        self.settings = settings
        self.files = files
        self.network = Transformer(config)
        self.val_bits_per_byte = BitsPerByte()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns the mean loss in nats per token; blocks are full, so the mean over ranks is the mean over tokens."""
        inputs, targets = batch
        loss = token_nats(self.network(inputs), targets) / targets.numel()
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def on_validation_start(self) -> None:
        """Learns how long each token is."""
        self.token_bytes = self.files.token_bytes().to(self.device)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Adds the nats and the bytes of a batch to what all ranks sum up."""
        inputs, targets = batch
        num_bytes = self.token_bytes[targets[targets != IGNORED]].sum()
        self.val_bits_per_byte.update(token_nats(self.network(inputs), targets), num_bytes)
        self.log("val_bits_per_byte", self.val_bits_per_byte, on_epoch=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns AdamW with decay groups; ``ScaleLearningRate`` moves its learning rate."""
        chosen = self.settings.optimizer
        return make_adamw(self.network, chosen.learning_rate, chosen.weight_decay, tuple(chosen.betas), chosen.eps)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keeps the tokenizer with the weights, which mean nothing without it."""
        checkpoint["tokenizer"] = self.files.tokenizer.to_str()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuses weights that were trained with other tokens."""
        if checkpoint["tokenizer"] != self.files.tokenizer.to_str():
            raise SettingsError(
                explain(
                    "a checkpoint that was trained with this corpus's tokenizer",
                    "one with another tokenizer",
                    "Give the data and tokenizer settings of that run, or leave resume out",
                )
            )


class BitsPerByte(Metric):
    """All nats and all bytes of an evaluation, summed over batches and ranks in float64.

    Each token is predicted from those before it in its own block only, never from the block before: with blocks of 128
    tokens a token sees 64 of them on average. Longer blocks give a lower number for the same weights.

    Collectives:
        torchmetrics' gathering of two scalars in ``compute``, on all ranks.
    """

    full_state_update = False
    higher_is_better = False
    nats: Tensor
    num_bytes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("nats", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("num_bytes", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, nats: Tensor, num_bytes: Tensor) -> None:
        """Adds a batch: its nats, and the bytes that its targets stand for; both scalars."""
        self.nats += nats.double()
        self.num_bytes += num_bytes

    def compute(self) -> Tensor:
        """Returns bits per byte, a float64 scalar."""
        return torch.tensor(bits_per_byte(self.nats.item(), int(self.num_bytes)), dtype=torch.float64)


class TextData(pl.LightningDataModule):
    """Blocks of tokens. Rank 0 of each node makes the files, the others wait for it.

    Training leaves out the last blocks, fewer than a global batch, so that all steps are full ones. Validation leaves
    out nothing.

    Args:
        settings: the recipe's settings.
        plan: for the size of a step.
        files: what to make and to read.
    """

    def __init__(self, settings: DictConfig, plan: Plan, files: TokenFiles) -> None:
        super().__init__()
        self.settings = settings
        self.plan = plan
        self.files = files

    def prepare_data(self) -> None:
        """Trains the tokenizer and writes the token files, unless they are in the cache."""
        self.files.build()

    def setup(self, stage: str) -> None:
        """Maps the token files and refuses those that are too small."""
        block_size = self.settings.model.block_size
        train = self.files.blocks("train", block_size, keep_tail=False)
        self.validation = self.files.blocks("validation", block_size, keep_tail=True)
        step = self.plan.effective_batch_size
        for name, blocks, least in (("training", train, step), ("validation", self.validation, 1)):
            if blocks.num_targets < least * block_size:
                raise SettingsError(
                    explain(
                        f"{name} text of at least {least} x {block_size} tokens",
                        f"{blocks.num_targets:,} tokens",
                        "Give more text, raise data.max_bytes, or lower model.block_size or the batch",
                    )
                )
        self.train = Subset(train, range(len(train) - len(train) % step))

    def train_dataloader(self) -> DataLoader[Any]:
        """Returns the training blocks, in a new order each epoch."""
        return self._loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Returns the validation blocks, in their order, the short last one too."""
        return self._loader(self.validation, shuffle=False)

    def _loader(self, blocks: Any, shuffle: bool) -> DataLoader[Any]:
        num_workers = self.settings.data.num_workers
        return DataLoader(
            blocks,
            self.plan.batch_size,
            shuffle=shuffle,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=self.settings.trainer.accelerator != "cpu" and torch.cuda.is_available(),
        )


# ---------------------------------------------------------------------------------------------- trainer and the rest


def make_plan(settings: DictConfig, config: TransformerConfig) -> Plan:
    """Resolves the settings; the network is built on the meta device and takes no memory.

    Raises:
        ValueError: settings that cannot be.
    """
    chosen = settings.trainer
    if chosen.max_steps < 1 or chosen.validate_every < 1 or chosen.max_steps % chosen.validate_every:
        raise ValueError(
            explain(
                "trainer.max_steps to be a multiple of trainer.validate_every, so that the end is validated and saved",
                f"{chosen.max_steps} and {chosen.validate_every}",
                "Change one of them",
            )
        )
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in Transformer(config).parameters())
    processes = num_processes(chosen.accelerator, chosen.devices, chosen.num_nodes)
    precision = resolve_precision(chosen.precision, chosen.accelerator)
    memory = memory_bytes(
        num_parameters,
        precision,
        "adamw",
        distributed=processes > 1,
        gradient_as_bucket_view=bool(settings.strategy.gradient_as_bucket_view),
        activations=config.activation_bytes(chosen.batch_size, 2 if "16" in precision else 4),
    )
    plan = Plan(
        name=f"{config.num_layers} layers of width {config.dim}",
        batch_size=chosen.batch_size,
        num_processes=processes,
        num_accumulated=chosen.accumulate,
        learning_rate=settings.optimizer.learning_rate,
        num_steps=chosen.max_steps,
        num_warmup_steps=settings.optimizer.warmup_steps,
        num_parameters=num_parameters,
        precision=precision,
        memory=memory,
        units_per_sample=config.block_size,
        unit="tokens",
    )
    base = settings.optimizer.base_batch_size
    if base is None:
        return plan
    ratio = scale_ratio("sqrt", plan.effective_batch_size / base)
    return dataclasses.replace(plan, learning_rate=plan.learning_rate * ratio)


def make_schedule(settings: DictConfig) -> ScaleLearningRate:
    """Returns the warm-up and the cosine, and the square-root rule if the learning rate is for another batch."""
    chosen = settings.optimizer
    return ScaleLearningRate(
        base_batch_size=chosen.base_batch_size,
        rule="none" if chosen.base_batch_size is None else "sqrt",
        warmup_steps=chosen.warmup_steps,
        schedule="cosine",
        total_steps=settings.trainer.max_steps,
        final_ratio=chosen.final_ratio,
    )


def make_trainer(settings: DictConfig, strategy: CustomDDPStrategy, callbacks: list[Callback]) -> pl.Trainer:
    """Returns the Trainer; its log is a CSV file, its newest checkpoint ``last.ckpt``, both in ``output_dir``."""
    chosen = settings.trainer
    save = ModelCheckpoint(
        last_checkpoint(settings).parent,
        filename="last",
        every_n_train_steps=chosen.validate_every,
        save_top_k=1,
        enable_version_counter=False,
    )
    bar: list[Callback] = [TQDMProgressBar(refresh_rate=chosen.log_every)] if chosen.progress_bar else []
    return pl.Trainer(
        accelerator=chosen.accelerator,
        devices=chosen.devices,
        num_nodes=chosen.num_nodes,
        precision=resolve_precision(chosen.precision, chosen.accelerator),  # type: ignore[arg-type]
        strategy=strategy,
        callbacks=[*default_callbacks(), *callbacks, save, *bar],
        max_steps=chosen.max_steps,
        max_epochs=-1,
        accumulate_grad_batches=chosen.accumulate,
        gradient_clip_val=settings.optimizer.clip_norm or None,
        val_check_interval=chosen.validate_every * chosen.accumulate,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=chosen.log_every,
        logger=CSVLogger(settings.output_dir, name="logs"),
        enable_progress_bar=chosen.progress_bar,
        enable_model_summary=False,
    )


def last_checkpoint(settings: DictConfig) -> Path:
    """Returns where the newest checkpoint of a run is written."""
    return Path(settings.output_dir) / "checkpoints" / "last.ckpt"


def find_checkpoint(settings: DictConfig) -> Path | None:
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
    model, wanted = found.get("hyper_parameters", {}).get("model"), OmegaConf.to_container(settings.model)
    if model != wanted:
        raise SettingsError(explain(f"a checkpoint of the model {wanted}", f"{model}", "Give that run's settings"))
    if found["global_step"] >= settings.trainer.max_steps:
        raise SettingsError(
            explain(
                "trainer.max_steps beyond the checkpoint's step",
                f"{settings.trainer.max_steps} and a checkpoint at {found['global_step']}",
                "Raise trainer.max_steps, or leave resume out",
            )
        )
    return path


def describe(corpus: Corpus) -> str:
    """Says what is trained on and what is held out."""
    rows = [("source", corpus.name)]
    for name, pieces in (("training", corpus.train), ("validation", corpus.validation)):
        rows.append((name, f"{sum(piece.num_bytes for piece in pieces):,} bytes in {len(pieces):,} documents"))
    return "\n".join(f"  {label:<20}{text}" for label, text in rows)


def sample(model: LanguageModel, settings: DictConfig, seed: int) -> str:
    """Lets the model continue a prompt; on this process alone."""
    tokenizer, end = model.files.tokenizer, model.files.end_id
    tokens = generate(
        model.network,
        [end, *tokenizer.encode(settings.prompt).ids],
        settings.num_tokens,
        num_usable=tokenizer.get_vocab_size(),
        temperature=settings.temperature,
        top_k=settings.top_k,
        seed=seed,
    )
    text: str = tokenizer.decode(tokens[1:])
    return text


@contextlib.contextmanager
def mistakes_of_settings() -> Any:
    """Shows a value that a constructor refuses as what it is here: a mistake in the settings."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise SettingsError(str(error)) from error


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SettingsError as mistake:
        sys.exit(f"error: {mistake}")
