"""Choosing settings by measured times: which candidates there are, which is faster than the default, and the record.

Arithmetic only. The rule: a candidate is faster where the upper quartile of its paired ratios is below 1, a paired
ratio being its time over the default's in the same round. The fastest of these is measured again beside the default, in
as many fresh rounds, and chosen only if the rule holds there too; else the default is kept. The second measurement is
what makes the choice honest: the best of many noisy candidates looks faster than it is.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from omegaconf import OmegaConf

from ddp_plugin.config import StrategyConfig
from ddp_plugin.errors import counted
from ddp_plugin.tuning.layouts import arranged, check_layout

__all__ = ["MIN_ROUNDS", "Candidate", "Row", "Spread", "Tuning", "candidates", "fastest", "is_faster", "slowest"]

MIN_ROUNDS = 3
"""Rounds below which quartiles say nothing."""


@dataclass(frozen=True)
class Spread:
    """The middle of some measured values and the quartiles around it."""

    lower: float
    median: float
    upper: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Takes the quartiles of at least one value, by linear interpolation between the two nearest."""
        return cls(*(statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3))


@dataclass(frozen=True)
class Candidate:
    """Settings that compete.

    Attributes:
        settings: fields of :class:`~ddp_plugin.StrategyConfig`: those that compete, with this candidate's values.
        name: the same in words; ``"default"`` for the settings that were given.
        note: what a reader has to know before using it, such as that it changes numbers.
        may_win: whether it may be chosen; otherwise it is measured for comparison only.
        num_workers: data workers of each rank; ``None`` where the training loaders stay as they are.
    """

    settings: Mapping[str, Any]
    name: str
    note: str = ""
    may_win: bool = True
    num_workers: int | None = None


def candidates(base: StrategyConfig, values: Mapping[str, Sequence[Any]]) -> list[Candidate]:
    """Returns every combination of the values, each once; the given settings come first, as the default.

    Args:
        base: the settings that were given.
        values: by field of ``base``, what it may be changed to; a field without values does not compete.
    """
    competing = {name: [getattr(base, name), *others] for name, others in values.items() if others}
    found: list[Candidate] = []
    for combination in itertools.product(*competing.values()):
        settings = dict(zip(competing, combination, strict=True))
        if all(settings != other.settings for other in found):
            changed = {name: value for name, value in settings.items() if value != getattr(base, name)}
            name = ", ".join(f"{key}={_in_words(value)}" for key, value in changed.items()) or "default"
            if settings.get("bucket_cap_mb") is not None and base.bucket_cap_mb_list is not None:
                settings["bucket_cap_mb_list"] = None  # the two exclude each other
            found.append(Candidate(settings, name))
    return found


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        options = ", ".join(f"{key}={item}" for key, item in value.items() if key != "name")
        return f"{value.get('name')}({options})" if options else str(value.get("name"))
    return f"{value:g}" if isinstance(value, float) else str(value)


def slowest(by_rank: Sequence[float]) -> float:
    """Returns the time of the slowest rank: the one that all others wait for."""
    return max(by_rank)


def is_faster(ratios: Sequence[float]) -> bool:
    """Whether these paired ratios show a candidate to be faster than the default, beyond their spread.

    Args:
        ratios: time of the candidate over the default's, one for each round.
    """
    return len(ratios) >= MIN_ROUNDS and Spread.of(ratios).upper < 1.0


def fastest(ratios: Mapping[int, Sequence[float]]) -> int | None:
    """Returns the key with the smallest median among those that :func:`is_faster`; ``None`` where there is none."""
    medians = {key: statistics.median(values) for key, values in ratios.items() if is_faster(values)}
    return min(medians, key=medians.__getitem__) if medians else None


@dataclass(frozen=True)
class Row:
    """What was measured of one candidate.

    Attributes:
        candidate: the candidate.
        times_s: seconds of one optimizer step on the slowest rank, one for each round.
        ratios: these over the default's in the same round.
        failure: why it was left out; ``None`` where it ran.
    """

    candidate: Candidate
    times_s: tuple[float, ...] = ()
    ratios: tuple[float, ...] = ()
    failure: str | None = None

    @property
    def verdict(self) -> str:
        """What the rule says of the first rounds, in words."""
        if self.failure is not None:
            return f"left out: {self.failure}"
        if self.candidate.name == "default" or not self.ratios:
            return ""
        if not self.candidate.may_win:
            return "for comparison only"
        return "faster" if is_faster(self.ratios) else "not faster"


@dataclass(frozen=True)
class Tuning:
    """What :func:`ddp_plugin.tune` found; ``print`` shows it as a table.

    Attributes:
        config: the settings to train with: those that were given, with the chosen values put in.
        chosen: the candidate that they come from.
        reason: why it was chosen, in one sentence.
        rows: what was measured, the default first; empty where there was nothing to measure.
        confirmation: paired ratios of the chosen candidate, or of the one that was refused, in the fresh rounds; empty
            where no candidate was faster in the first ones.
        num_steps: optimizer steps in each measurement.
        world_size: number of processes.
        made_with: versions, machine and date, one line each.
        loaders: what was found of the number of data workers, with these settings; ``None`` where it did not compete.
        data_class: import path of the datamodule, where its constructor takes ``num_workers``; else ``None``.
    """

    config: StrategyConfig
    chosen: Candidate
    reason: str
    rows: tuple[Row, ...] = ()
    confirmation: tuple[float, ...] = ()
    num_steps: int = 0
    world_size: int = 1
    made_with: tuple[str, ...] = field(default=())
    loaders: "Tuning | None" = None
    data_class: str | None = None

    @property
    def num_workers(self) -> int | None:
        """Data workers to give each rank; ``None`` to leave the loaders as they are."""
        return self.loaders.chosen.num_workers if self.loaders is not None else None

    @property
    def is_default(self) -> bool:
        """Whether the settings that were given are kept."""
        return self.chosen.name == "default"

    def __str__(self) -> str:
        return "\n".join([*self._table(), self.reason, *([str(self.loaders)] if self.loaders is not None else [])])

    def to_yaml(self, section: str | None = None, layout: str = "strategy") -> str:
        """Returns the settings as YAML, below comments that say how they were found.

        Fields that competed are written out, also where they have their default; others only where they were given.

        Args:
            section: put them under this key; only where ``layout="strategy"``.
            layout: one of :data:`ddp_plugin.tuning.layouts.LAYOUTS`: ``"recipe"`` is a variant of a recipe's
                configuration, ``"lightning"`` and ``"lightning_fixed"`` are what LightningCLI reads on top of one.

        Raises:
            ValueError: an unknown layout, or a section of another than the strategy's.
        """
        check_layout(layout, section)
        usual = StrategyConfig()
        names = [f.name for f in fields(StrategyConfig)]
        values = {name: getattr(self.config, name) for name in names}
        written = {
            name: OmegaConf.structured(value) if name == "nccl" and value is not None else value
            for name, value in values.items()
            if name in self.chosen.settings or value != getattr(usual, name)
        }
        plain = OmegaConf.to_container(OmegaConf.create(written))
        assert isinstance(plain, dict)
        settings = arranged(
            {str(key): value for key, value in plain.items()}, self.num_workers, layout, self.data_class
        )
        comments = ["Written by ddp_plugin.tune().", *self.made_with, str(self)]
        if self.num_workers is not None and "data" not in settings:
            comments.append(f"Not in this file: num_workers={self.num_workers} for the training loader.")
        body = OmegaConf.to_yaml(OmegaConf.create({section: settings} if section is not None else settings))
        return "".join(f"# {line}".rstrip() + "\n" for line in "\n".join(comments).splitlines()) + body

    def _table(self) -> list[str]:
        if not self.rows:
            return []
        num_rounds = len(self.rows[0].times_s)
        lines = [
            f"{counted(self.world_size, 'process')}, {counted(num_rounds, 'round')} of "
            f"{counted(self.num_steps, 'step')}: time of a step on the slowest rank, and its ratio to the default's in "
            "the same round (median and quartiles)"
        ]
        cells = [("candidate", "step [ms]", "quartiles", "ratio", "quartiles", "")]
        for row in self.rows:
            measured = (*_shown(row.times_s, 1e3, 2), *_shown(row.ratios, 1.0, 3)) if row.times_s else ("-",) * 4
            remarks = "; ".join(text for text in (row.verdict, row.candidate.note) if text)
            cells.append((row.candidate.name, *measured, remarks))
        widths = [max(len(row[column]) for row in cells) for column in range(5)]
        for row_of_cells in cells:
            parts = [text.ljust(width) for text, width in zip(row_of_cells, widths, strict=False)]
            lines.append("  ".join([*parts, row_of_cells[5]]).rstrip())
        return lines


def _shown(values: Sequence[float], factor: float, num_digits: int) -> tuple[str, str]:
    spread = Spread.of(values)
    median, lower, upper = (f"{factor * value:.{num_digits}f}" for value in (spread.median, spread.lower, spread.upper))
    return median, f"{lower} to {upper}"
