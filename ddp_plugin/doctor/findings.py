"""What the doctor has to say: a warning and its remedy, and the report that holds all of it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Finding", "Report"]


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, or will be.

    Attributes:
        is_error: whether training cannot work, or not give right numbers, as long as it stays.
        problem: one sentence without a full stop.
        remedy: what to do, one sentence without a full stop.
    """

    is_error: bool
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{'ERROR' if self.is_error else 'warning'}: {self.problem}. {self.remedy}."


@dataclass
class Report:
    """Everything that was looked at.

    Attributes:
        sections: names and values by title, in the order of printing.
        findings: what is wrong, errors first when printed.
    """

    sections: dict[str, Mapping[str, str]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def has_errors(self) -> bool:
        """Whether any finding is an error."""
        return any(finding.is_error for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON can hold it."""
        return {
            "sections": {title: dict(rows) for title, rows in self.sections.items()},
            "findings": [asdict(finding) for finding in self.findings],
        }

    def __str__(self) -> str:
        blocks = []
        for title, rows in self.sections.items():
            width = max((len(name) for name in rows), default=0)
            blocks.append("\n".join([title, *(f"  {name.ljust(width)}  {value}" for name, value in rows.items())]))
        ordered: Sequence[Finding] = sorted(self.findings, key=lambda finding: not finding.is_error)
        told = [str(finding) for finding in ordered] or ["nothing to complain about"]
        return "\n\n".join([*blocks, "\n".join(told)]) + "\n"
