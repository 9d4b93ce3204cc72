"""Trains a small language model on real text, on several processes.

    python recipes/llm.py                                    # two processes on this CPU, a few minutes
    python recipes/llm.py data.path=my_texts trainer.max_steps=2000
    python recipes/llm.py config=a100_8x dry_run=true        # what would run on eight A100s

Read :func:`main` first. All settings are in ``conf/llm.yaml``.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from omegaconf import DictConfig
from optimizer import make_adamw
from plan import (
    Plan,
    compute_dtype,
    count_parameters,
    effective_batch,
    memory_bytes,
    resolve_precision,
    stored_dtype,
    table,
)
from run import (
    CHECKPOINT_LIMITS,
    checkpoint_to_load,
    describe_output,
    facts_of,
    loader_options,
    make_saving,
    mistakes_of_settings,
    refuse_other_run,
    run,
    say,
    say_if_finished,
    trainer_options,
    tuning_options,
)
from settings import Limits, SettingsError, check_limits, load_settings
from text import Corpus, TokenFiles, bits_per_byte, find_corpus, order0_bits_per_byte
from throughput import Throughput
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset
from torchmetrics import Metric
from transformer import IGNORED, Transformer, TransformerConfig, generate, token_nats

from ddp_plugin import CustomDDPStrategy, ScaleLearningRate
from ddp_plugin.errors import explain
from ddp_plugin.learning_rate import scale_ratio
from ddp_plugin.planning.described import DescribedRun


def main(argv: list[str]) -> None:
    """Trains, evaluates and samples; with ``dry_run=true`` only says what it would do."""
    settings = load_settings("llm", argv)
    with mistakes_of_settings():
        check_limits(settings, LIMITS)
        config = TransformerConfig(vocab_size=settings.tokenizer.vocab_size, **settings.model)
        plan = make_plan(settings, config)
        strategy = CustomDDPStrategy.from_config(settings.strategy)
        schedule, throughput = make_schedule(settings), make_throughput(settings, config)
        saving = make_saving(settings, every_steps=settings.trainer.validate_every)
    say(f"The plan\n{plan}\n{table([describe_output(settings)])}")
    if settings.dry_run:
        return

    chosen = settings.data
    with mistakes_of_settings():
        corpus = find_corpus(chosen.path, list(chosen.patterns), chosen.max_bytes, chosen.validation_ratio)
        files = TokenFiles(corpus, config.vocab_size, chosen.cache_dir)
        facts = facts_of(settings, plan, FACTS)
        checkpoint = checkpoint_to_load(settings, facts, plan.num_steps, "trainer.max_steps")
    say(f"The corpus\n{describe(corpus)}")

    pl.seed_everything(settings.seed, workers=True, verbose=False)
    model = LanguageModel(settings, config, files, facts).to(stored_dtype(plan.precision))
    if settings.compile:
        model.network.compile()  # in place: the names in checkpoints stay
    trainer = make_trainer(settings, plan, strategy, [schedule, throughput, *saving])
    data = TextData(settings, plan, files)
    trainer.fit(model, data, ckpt_path=checkpoint)
    say_if_finished(trainer)
    if "val_bits_per_byte" not in trainer.callback_metrics:  # the last step's validation was before this start
        trainer.validate(model, data, verbose=False)

    result = [
        ("validation", f"{trainer.callback_metrics['val_bits_per_byte']:.4f} bits per byte"),
        *yardsticks(files, config),
        ("training", str(throughput.report() or "too few steps to measure")),
    ]
    say(f"The result\n{table(result)}")
    if trainer.is_global_zero and settings.sample.num_tokens:
        print(f"A sample\n{sample(model, settings.sample, settings.seed)}")


def for_tuning(argv: list[str]) -> dict[str, Any]:
    """Returns arguments of :func:`ddp_plugin.tune`, as ``ddp-plugin tune --recipe recipes/llm.py`` asks for them.

    Args:
        argv: settings as for :func:`main`.

    Raises:
        SettingsError: settings that cannot be, or a corpus that is not there.
    """
    settings = load_settings("llm", argv)
    chosen = settings.data
    with mistakes_of_settings():
        check_limits(settings, LIMITS)
        config = TransformerConfig(vocab_size=settings.tokenizer.vocab_size, **settings.model)
        plan = make_plan(settings, config)
        corpus = find_corpus(chosen.path, list(chosen.patterns), chosen.max_bytes, chosen.validation_ratio)
        files = TokenFiles(corpus, config.vocab_size, chosen.cache_dir)
    pl.seed_everything(settings.seed, workers=True, verbose=False)
    return {
        **tuning_options(settings, plan),
        "model": LanguageModel(settings, config, files).to(stored_dtype(plan.precision)),
        "datamodule": TextData(settings, plan, files),
        "gradient_clip_val": settings.optimizer.clip_norm or None,
    }


def describe_run(argv: list[str]) -> DescribedRun:
    """Says what a run with these arguments would be, for ``ddp-plugin plan --recipe``; nothing is read or started."""
    settings = load_settings("llm", argv)
    with mistakes_of_settings():
        check_limits(settings, LIMITS)
        config = TransformerConfig(vocab_size=settings.tokenizer.vocab_size, **settings.model)
        plan = make_plan(settings, config)

    def make_loss(network: nn.Module, device: torch.device) -> Callable[[], Tensor]:
        tokens = torch.randint(config.vocab_size, (plan.batch.batch_size, config.block_size + 1), device=device)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        return lambda: token_nats(network(inputs), targets) / targets.numel()

    return plan.described(settings, lambda: Transformer(config), make_loss, "adamw")


# --------------------------------------------------------------------------------------------------- model and data


class LanguageModel(pl.LightningModule):
    """A transformer with its loss, its optimizer and its measure.

    Args:
        settings: the recipe's settings.
        config: sizes of the network.
        files: tokenizer and tokens; they need not exist before the data is prepared.
        facts: what has to be equal in a run and in one that continues it, see :func:`run.facts_of`; ``None`` for a
            module that is not continued.
    """

    def __init__(
        self, settings: DictConfig, config: TransformerConfig, files: TokenFiles, facts: dict[str, Any] | None = None
    ) -> None:
        super().__init__()
        if facts is not None:
            self.save_hyperparameters({"run": facts})
        self.settings = settings
        self.facts = facts
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
        return configure_adamw(self.network, self.settings)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keeps the tokenizer with the weights, which mean nothing without it."""
        checkpoint["tokenizer"] = self.files.tokenizer.to_str()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuses another run's checkpoint, and weights that were trained with other tokens."""
        if self.facts is not None:
            refuse_other_run(checkpoint, self.facts)
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
        step = self.plan.batch.total
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
        return DataLoader(blocks, self.plan.batch.batch_size, shuffle=shuffle, **loader_options(self.settings))


# ---------------------------------------------------------------------------------------------- trainer and the rest


FACTS = ("seed", "model", "tokenizer", "optimizer", "data.patterns", "data.max_bytes", "data.validation_ratio")
"""Settings that a run and one that continues it must share; the tokenizer tells one text from another."""

LIMITS: Limits = {
    **CHECKPOINT_LIMITS,
    "seed": (0, 2**32 - 1),
    "data.max_bytes": (0, math.inf),
    "data.num_workers": (0, math.inf),
    "tokenizer.vocab_size": (257, math.inf),
    "model.rope_base": (1.0, math.inf),
    "model.init_std": (0.0, math.inf),
    "optimizer.learning_rate": (0.0, math.inf),
    "optimizer.base_batch_size": (1, math.inf),
    "optimizer.weight_decay": (0.0, math.inf),
    "optimizer.eps": (0.0, math.inf),
    "optimizer.warmup_steps": (0, math.inf),
    "optimizer.final_ratio": (0.0, 1.0),
    "optimizer.clip_norm": (0.0, math.inf),
    "trainer.batch_size": (1, math.inf),
    "trainer.accumulate": (1, math.inf),
    "trainer.global_batch_size": (1, math.inf),
    "trainer.max_steps": (1, math.inf),
    "trainer.validate_every": (1, math.inf),
    "trainer.log_every": (1, math.inf),
    "trainer.peak_flops_per_s": (1.0, math.inf),
    "sample.num_tokens": (0, math.inf),
    "sample.temperature": (0.0, math.inf),
    "sample.top_k": (0, math.inf),
}
"""Of each number in the settings; the network's sizes and the corpus check their own."""


def make_plan(settings: DictConfig, config: TransformerConfig) -> Plan:
    """Resolves the settings; network and optimizer are built on the meta device and take no memory.

    Raises:
        ValueError: settings that cannot be.
    """
    chosen = settings.trainer
    if chosen.max_steps % chosen.validate_every:
        raise ValueError(
            explain(
                "trainer.max_steps to be a multiple of trainer.validate_every, so that the end is validated and saved",
                f"{chosen.max_steps} and {chosen.validate_every}",
                "Change one of them",
            )
        )
    with torch.device("meta"):
        network = Transformer(config)
    configure_adamw(network, settings)  # torch refuses here what is wrong with its numbers
    batch = effective_batch(settings)
    precision = resolve_precision(chosen.precision, chosen.accelerator)
    plan = Plan(
        name=f"{config.num_layers} layers of width {config.dim}",
        batch=batch,
        learning_rate=settings.optimizer.learning_rate,
        num_steps=chosen.max_steps,
        num_warmup_steps=settings.optimizer.warmup_steps,
        num_parameters=count_parameters(network),
        precision=precision,
        memory=memory_bytes(
            count_parameters(network),
            precision,
            "adamw",
            distributed=batch.num_processes > 1,
            gradient_as_bucket_view=bool(settings.strategy.gradient_as_bucket_view),
            activations=config.activation_bytes(batch.batch_size, compute_dtype(precision).itemsize),
        ),
        units_per_sample=config.block_size,
        unit="tokens",
    )
    base = settings.optimizer.base_batch_size
    if base is None:
        return plan
    ratio = scale_ratio("sqrt", batch.total / base)
    return dataclasses.replace(plan, learning_rate=plan.learning_rate * ratio)


def configure_adamw(network: Transformer, settings: DictConfig) -> torch.optim.AdamW:
    """Returns the optimizer that the settings describe.

    Raises:
        ValueError: numbers that AdamW cannot use.
    """
    chosen = settings.optimizer
    beta1, beta2 = chosen.betas
    return make_adamw(network, chosen.learning_rate, chosen.weight_decay, (beta1, beta2), chosen.eps)


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


def make_throughput(settings: DictConfig, config: TransformerConfig) -> Throughput:
    """Returns what measures tokens per second."""
    peak_flops_per_s = settings.trainer.peak_flops_per_s
    return Throughput(config.block_size, "tokens", config.training_flops_per_token, peak_flops_per_s)


def make_trainer(
    settings: DictConfig, plan: Plan, strategy: CustomDDPStrategy, callbacks: list[Callback]
) -> pl.Trainer:
    """Returns the Trainer."""
    chosen = settings.trainer
    return pl.Trainer(
        **trainer_options(settings, plan, callbacks),
        strategy=strategy,
        max_steps=chosen.max_steps,
        max_epochs=-1,
        gradient_clip_val=settings.optimizer.clip_norm or None,
        val_check_interval=chosen.validate_every * plan.batch.num_accumulated,
        check_val_every_n_epoch=None,
    )


def describe(corpus: Corpus) -> str:
    """Says what is trained on and what is held out."""
    rows = [("source", corpus.name)]
    for name, pieces in (("training", corpus.train), ("validation", corpus.validation)):
        rows.append((name, f"{sum(piece.num_bytes for piece in pieces):,} bytes in {len(pieces):,} documents"))
    return table(rows)


def yardsticks(files: TokenFiles, config: TransformerConfig) -> list[tuple[str, str]]:
    """Says what a model reaches on the validation text that has learnt nothing, and one that sees no context."""
    pieces = files.corpus.validation
    num_targets = files.blocks("validation", config.block_size, keep_tail=True).num_targets
    untrained = bits_per_byte(num_targets * math.log(config.vocab_size), sum(piece.num_bytes for piece in pieces))
    return [
        ("without context", f"{order0_bits_per_byte(pieces):.4f} bits per byte: the entropy of single bytes"),
        ("untrained", f"{untrained:.4f} bits per byte: all tokens equally likely"),
    ]


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


if __name__ == "__main__":
    run(main)
