"""A finished run: its curve and its summary."""

from dataclasses import dataclass
from typing import Any

from .settings import Resolved


@dataclass(frozen=True)
class Point:
    """One evaluation."""

    round: int
    error: float  # share of wrong classes, or root mean squared error; inf if a regression has diverged
    asr: float | None  # attack success rate of a backdoor; None without one


@dataclass(frozen=True)
class Outcome:
    settings: Resolved
    curve: list[Point]
    summary: dict[str, Any]  # numbers, booleans, or None where a measure is undefined

    @property
    def error(self) -> float:
        return self.summary["error"]

    @property
    def asr(self) -> float | None:
        return self.summary.get("asr")

    @property
    def late_error(self) -> float | None:
        """None in records that were written before the summary had it."""
        return self.summary.get("late_error")

    @property
    def late_asr(self) -> float | None:
        return self.summary.get("late_asr")

    @property
    def diverged(self) -> bool:
        return bool(self.summary.get("diverged"))


def late_mean(curve: list[Point], rounds: int, key: str) -> float | None:
    """Mean over the evaluations of the second half of a run: the last evaluation alone is noisy. None if undefined."""
    values = [getattr(point, key) for point in curve if 2 * point.round > rounds]
    return None if None in values else sum(values) / len(values)
