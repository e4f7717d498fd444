"""What a search for attacks has tried: a picture, a Markdown file, tables on the console, a sentence."""

from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from ..redteam.search import CONFIRM_SEEDS, CONFIRMED, SEEDS, Confirmed, Findings, Trial, late_error
from ..redteam.space import AXES, defaults
from ..sim import results
from ..sim.options import get
from ..sim.outcome import Outcome
from ..sim.settings import Settings
from . import style
from .console import SIMPLE_HEAD, Axes, Console, Figure, Table, digits, format_value, measure

DIRECTION = next(axis for axis in AXES if axis.key == "direction")
MARKERS = "os^Dv<>ph*X"  # beside the colour: the picture must be readable in grey
LISTED = 15  # trials in the Markdown file
HEADS = ("harm", "late error", "end error", "late attack success", "worst class")


def publish(picture: Path, findings: Findings, command: str, spelled: Callable[[Settings], str]) -> None:
    """Write the picture, and the Markdown file of the same name beside it."""
    results.replace_text(picture.with_suffix(".md"), document(findings, command, spelled))
    draw(picture, findings)


def document(findings: Findings, command: str, spelled: Callable[[Settings], str]) -> str:
    settings = findings.trials[0].outcome.settings
    worst = findings.worst(LISTED)
    blocks = [
        f"# redteam-{settings.defense}-{settings.dataset}: {len(findings.trials)} attacks tried",
        f"`{command}`; {results.device_name(settings.device)}; {results.spell(results.versions())}; "
        f"commit {results.commit() or 'unknown'}.",
        f"Search: seeds {SEEDS[0]} to {SEEDS[-1]}, tested on {settings.holdout:g} of the training data that was held "
        "out. Harm: late error above the late error without attack, or late attack success, whichever is larger. "
        f"Late: mean over the second half of the run. Late error without attack: {findings.clean_error:.3f}.",
    ]
    if findings.confirmed:
        found = findings.confirmed[0]
        blocks += [
            f"## Worst found, on seeds {', '.join(map(str, CONFIRM_SEEDS))} with the test set",
            sentence(findings),
            f"```\n{spelled(found.settings)}\n```",
            _markdown(["trial", *HEADS, "attack"], map(_confirmed_row, findings.confirmed)),
        ]
    blocks += [f"## The {len(worst)} worst of the search", _markdown(["trial", *HEADS, "attack"], map(_row, worst))]
    return "\n\n".join(blocks) + "\n"


def sentence(findings: Findings) -> str:
    found = findings.confirmed[0]
    settings = found.outcomes[0].settings
    error, late = (mean(found.outcomes, key) for key in ("error", "late_error"))
    success = mean(found.outcomes, "asr")
    backdoor = "" if success is None else f", the attack success at {digits(success)}"
    return (
        f"Worst of {len(findings.trials)} attacks on {settings.defense}: the {measure(settings)} ends at "
        f"{digits(error)} (late {digits(late)}){backdoor}, mean of seeds {', '.join(map(str, CONFIRM_SEEDS))}."
    )


def print_tables(findings: Findings) -> None:
    """The worst of the search, then the same attacks on the other seeds."""
    console = Console()
    if not console.is_terminal:  # a file has no width
        console = Console(width=100_000)
    worst = findings.worst(CONFIRMED)
    console.print(_table("search", map(_row, worst)))
    console.print(_table(f"seeds {', '.join(map(str, CONFIRM_SEEDS))}", map(_confirmed_row, findings.confirmed)))


def _table(title: str, rows: Any) -> Table:
    made = Table(box=SIMPLE_HEAD, title=title, title_justify="left", padding=(0, 1, 0, 0), pad_edge=False)
    for head in ("trial", *HEADS):
        made.add_column(head, justify="right")
    made.add_column("attack", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def _markdown(heads: list[str], rows: Any) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _row(trial: Trial) -> list[str]:
    return [str(trial.number), digits(trial.harm), *_numbers([trial.outcome]), attack_text(trial.settings)]


def _confirmed_row(found: Confirmed) -> list[str]:
    trial = found.trial
    return [str(trial.number), digits(found.harm), *_numbers(found.outcomes), attack_text(trial.settings)]


def _numbers(outcomes: list[Outcome]) -> list[str]:
    return [digits(mean(outcomes, key)) for key in ("late_error", "error", "late_asr", "worst_class_error")]


def mean(outcomes: list[Outcome], key: str) -> float | None:
    """Over the runs; None if one does not have it."""
    values = [outcome.summary.get(key) for outcome in outcomes]
    return None if None in values else fmean(value for value in values if value is not None)


def attack_text(settings: Settings) -> str:
    """The options of an attack that are not the defaults, with the direction always."""
    values = {axis.key: get(settings, axis.name) for axis in AXES}
    named = {key: value for key, value in values.items() if value is not None}
    return format_value({"direction": direction(settings)} | named)


def direction(settings: Settings) -> str:
    return str(defaults(settings)["direction"])


def draw(path: Path, findings: Findings) -> None:
    """PNG: late error over the number of the trial, attack success below it; a colour and a marker per direction."""
    trials = findings.trials
    settings = trials[0].outcome.settings
    measures = ["late_error"] + ["late_asr"] * any(trial.outcome.late_asr is not None for trial in trials)
    figure = Figure(figsize=(9, 3.6 * len(measures) + 0.6), layout="constrained")
    figure.suptitle(f"{settings.defense} on {settings.dataset}: {len(trials)} attacks that a search tried")
    panels = figure.subplots(len(measures), squeeze=False)[:, 0].tolist()
    used = [direction(trial.settings) for trial in trials]
    kinds = list(dict.fromkeys([*DIRECTION.choices, *used]))  # in every picture the same colours
    for panel, key in zip(panels, measures, strict=True):
        for i, kind in enumerate(kinds):
            its = [trial for trial in trials if direction(trial.settings) == kind]
            points = [(trial.number, value) for trial in its if (value := _value(trial.outcome, key)) is not None]
            if points:
                look = {"color": style.MUTED[i % len(style.MUTED)], "marker": MARKERS[i % len(MARKERS)]}
                panel.scatter(*zip(*points, strict=True), s=22, label=kind, **look)
        _worst_so_far(panel, trials, key)
        panel.set_ylabel(f"late {measure(settings)}" if key == "late_error" else "late attack success")
        panel.set_ylim(0, 1.02 if settings.dataset != "udacity" else None)
        panel.grid(alpha=0.3)
    if findings.clean is not None:
        panels[0].axhline(findings.clean_error, color="black", linestyle=":", linewidth=1, label="without attack")
    panels[-1].set_xlabel("trial")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _worst_so_far(panel: Axes, trials: list[Trial], key: str) -> None:
    highest, line = 0.0, []
    for trial in trials:
        highest = max(highest, _value(trial.outcome, key) or 0.0)
        line.append((trial.number, highest))
    panel.step(*zip(*line, strict=True), where="post", color=style.HIGHLIGHT, linewidth=1.6, label="worst so far")


def _value(outcome: Outcome, key: str) -> float | None:
    return late_error(outcome) if key == "late_error" else outcome.late_asr
