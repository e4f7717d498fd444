"""Runs for people: tables, pictures, a sentence."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..sim.loop import Outcome
from ..sim.options import get
from ..sim.settings import Resolved
from ..validation import printable

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure  # draws with Agg, no display needed
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as error:
    package = (error.name or "").partition(".")[0]
    text = f"the package {package} is missing: pip install 'secureafl_ext[sim]'"
    raise ModuleNotFoundError(text, name=package) from error


LITERAL = {"text.parse_math": False}  # of a picture: a name with dollars is not a formula


class Column(NamedTuple):
    key: str  # of the summary
    heading: str
    places: int  # digits after the point


# Without "recall": it is the share of the malicious uploads that were rejected, which has a column.
COLUMNS = (
    Column("error", "error", 3),
    Column("asr", "attack\nsuccess", 3),
    Column("late_error", "late\nerror", 3),
    Column("late_asr", "late attack\nsuccess", 3),
    Column("worst_class_error", "worst\nclass", 3),
    Column("accepted", "accepted", 2),
    Column("rejected_honest", "honest\nrejected", 2),
    Column("rejected_malicious", "malicious\nrejected", 2),
    Column("precision", "precision", 2),
    Column("left_out_precision", "left out:\nprecision", 2),
    Column("left_out_recall", "left out:\nrecall", 2),
    Column("estimation_error", "estimation\nerror", 3),
    Column("rounds_per_second", "rounds/s", 0),
)


def print_table(outcomes: list[Outcome], varied: list[str]) -> None:
    """One row per run. A terminal that is too narrow gets the columns in several tables; nothing is cut."""
    console = Console()
    if not console.is_terminal:  # a file has no width
        console = Console(width=100_000)
    for columns in _fitting(outcomes, varied, console.width):
        console.print(table(outcomes, varied, columns))


def table(outcomes: list[Outcome], varied: list[str], columns: Sequence[Column] | None = None) -> Table:
    """One row per run: the settings in which the runs differ, then the summary."""
    made = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in varied:
        made.add_column(name, overflow="fold")
    columns = filled_columns(outcomes) if columns is None else columns
    for column in columns:
        made.add_column(column.heading, justify="right")
    for outcome in outcomes:
        numbers = [digits(outcome.summary.get(column.key), column.places) for column in columns]
        # Text, not str: rich would obey [markup] in a name, and a results file may have any.
        made.add_row(*(Text(printable(format_value(get(outcome.settings, name)))) for name in varied), *numbers)
    return made


def filled_columns(outcomes: list[Outcome]) -> list[Column]:
    """The columns in which at least one run has a value."""
    return [column for column in COLUMNS if any(o.summary.get(column.key) is not None for o in outcomes)]


def _fitting(outcomes: list[Outcome], varied: list[str], width: int) -> list[list[Column]]:
    """The columns, split so that each part fits into the width beside the settings."""
    measure = Console(width=100_000)
    parts: list[list[Column]] = [[]]
    for column in filled_columns(outcomes):
        wide = measure.measure(table(outcomes, varied, [*parts[-1], column])).maximum > width
        if wide and parts[-1]:
            parts.append([column])
        else:
            parts[-1].append(column)
    return parts


def divergence_notes(outcomes: list[Outcome], varied: list[str]) -> list[str]:
    """A sentence for each run that diverged, with the share of rejected uploads."""
    notes = []
    for outcome in outcomes:
        if not outcome.diverged:
            continue
        settings, accepted = outcome.settings, outcome.summary.get("accepted")
        rejected = 0.0 if accepted is None else 1 - accepted
        limit = "is infinite" if math.isinf(outcome.error) else "is no better than that of a constant answer"
        text = f"Diverged: {label(settings, varied)}: the {measure(settings)} {digits(outcome.error)} {limit}."
        if rejected and settings.defense == "async-sgd":  # it has no other reason to reject
            text += f" {rejected:.1%} of the updates were not finite (NaN or inf) and were rejected."
        elif rejected:
            text += f" {rejected:.1%} of the updates were rejected; every defense rejects updates that are not finite."
        notes.append(text)
    return notes


@rc_context(LITERAL)
def curves(path: Path, outcomes: list[Outcome], varied: list[str]) -> None:
    """PNG: error against the round, a line per run; attack success below where there is one."""
    figure, panels = _panels(outcomes, title(outcomes[0].settings, varied))
    for outcome in outcomes:
        rounds = [point.round for point in outcome.curve]
        for panel, key in panels:
            values = [getattr(point, key) for point in outcome.curve]
            if None not in values:
                dashes = "--" if outcome.settings.attack == "none" else "-"
                panel.plot(rounds, values, dashes, label=_legend(outcome, varied))
    _finish(path, figure, panels, "round")


@rc_context(LITERAL)
def against(path: Path, outcomes: list[Outcome], varied: list[str]) -> None:
    """PNG: final error against the first setting of numbers, a line per combination of the others."""
    numbers = [name for name in varied if any(isinstance(get(o.settings, name), (int, float)) for o in outcomes)]
    across = (numbers or varied)[0]
    others = [name for name in varied if name != across]
    figure, panels = _panels(outcomes, title(outcomes[0].settings, varied))
    lines: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        lines.setdefault(label(outcome.settings, others), []).append(outcome)
    for name, line in lines.items():
        for panel, key in panels:
            shown = [(get(outcome.settings, across), outcome.summary[key]) for outcome in line]
            shown = [pair for pair in shown if None not in pair]
            if shown:
                # Names have no order: no line between them.
                panel.plot(*zip(*shown, strict=True), "o-" if across in numbers else "o", label=name or None)
    _finish(path, figure, panels, across)


def sentence(outcomes: list[Outcome]) -> str:
    """The result of a comparison, best defense first, then the runs without attack as a baseline."""
    attacked = [outcome for outcome in outcomes if outcome.settings.attack != "none"]
    clean = [outcome for outcome in outcomes if outcome.settings.attack == "none"]
    settings = (attacked or clean)[0].settings
    scene = f"Under {settings.attack} by {settings.attackers} of {settings.clients} clients"
    ranked = sorted(attacked or clean, key=lambda outcome: outcome.error + (outcome.asr or 0))
    ends = ", ".join(map(_ending, ranked))
    baseline = f"; without attack at {', '.join(map(_ending, clean))}" if attacked and clean else ""
    return f"{scene if attacked else 'Without attack'} the {measure(settings)} ends at {ends}{baseline}."


def _ending(outcome: Outcome) -> str:
    note = "" if outcome.asr is None else f" (attack success {digits(outcome.asr)})"
    return f"{digits(outcome.error)} with {outcome.settings.defense}{note}"


def measure(settings: Resolved) -> str:
    return "RMSE" if settings.dataset == "udacity" else "test error"


def digits(value: float | None, places: int = 3) -> str:
    return "-" if value is None else f"{value:.{places}f}"  # inf and nan as such


def format_value(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={inner}" for name, inner in value.items()) or "-"
    return "-" if value is None else str(value)


def label(settings: Resolved, varied: list[str]) -> str:
    """The varied settings: text as it is, numbers with their name."""
    values = [(name, get(settings, name)) for name in varied]
    return " ".join(
        format_value(value) if isinstance(value, (str, dict)) else f"{name}={format_value(value)}"
        for name, value in values
    )


def title(settings: Resolved, varied: list[str]) -> str:
    """The settings that the runs have in common."""
    parts = [f"{name} {getattr(settings, name)}" for name in ("dataset", "attack", "defense") if name not in varied]
    if "malicious" not in varied and "clients" not in varied and settings.attack != "none":
        parts.append(f"{settings.attackers} of {settings.clients} clients malicious")
    return ", ".join(parts)


def _panels(outcomes: list[Outcome], heading: str) -> tuple[Figure, list[tuple[Axes, str]]]:
    keys = ["error"] + ["asr"] * any(outcome.asr is not None for outcome in outcomes)
    figure = Figure(figsize=(7, 4 * len(keys)), layout="constrained")
    figure.suptitle(heading)
    axes = figure.subplots(len(keys), squeeze=False)[:, 0]
    for panel, key in zip(axes, keys, strict=True):
        panel.set_ylabel(measure(outcomes[0].settings) if key == "error" else "attack success")
        panel.grid(alpha=0.3)
    return figure, list(zip(axes, keys, strict=True))


def _finish(path: Path, figure: Figure, panels: list[tuple[Axes, str]], across: str) -> None:
    for panel, _ in panels:
        panel.set_ylim(bottom=0)
        if panel.get_legend_handles_labels()[1]:
            panel.legend(fontsize="small")
    panels[-1][0].set_xlabel(across)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _legend(outcome: Outcome, varied: list[str]) -> str:
    lost = not all(math.isfinite(point.error) for point in outcome.curve)  # such points cannot be drawn
    return label(outcome.settings, varied) + " (diverged)" * lost
