"""What people see of runs: live progress, tables, pictures, a sentence."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..sim.loop import Outcome, Point
from ..sim.options import get
from ..sim.settings import Settings

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure  # draws with Agg, no display needed
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.table import Table
except ModuleNotFoundError as error:
    package = error.name.partition(".")[0]
    text = f"{package} is missing, which shows progress and results: pip install 'secureafl_ext[sim]'"
    raise ModuleNotFoundError(text, name=package) from error

ROWS = 16  # of live progress; of more runs only those under way are shown
# Of the summary: key, heading, digits. A column that would be empty is left out.
COLUMNS = (
    ("error", "error", 3),
    ("asr", "attack\nsuccess", 3),
    ("accepted", "accepted", 2),
    ("rejected_honest", "honest\nrejected", 2),
    ("rejected_malicious", "malicious\nrejected", 2),
    ("precision", "precision", 2),
    ("recall", "recall", 2),
    ("estimation_error", "estimation\nerror", 3),
    ("rounds_per_second", "rounds/s", 0),
)


@contextmanager
def live(
    labels: list[str], rounds: list[int]
) -> Iterator[tuple[Callable[[int, Point], None], Callable[[int, Outcome], None]]]:
    """One line of progress per run, on stderr, and one for all; gives the two functions that several.run_many calls."""
    few = len(labels) <= ROWS
    texts = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[now]}"))
    columns = (*texts, TimeElapsedColumn(), TimeRemainingColumn())
    # Runs side by side come to their evaluations in bursts: the speed of minutes tells the time left.
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=600) as progress:
        everything = progress.add_task(
            "all runs (time spent, time left)", total=sum(rounds), now=f"0 of {len(labels)}", visible=len(labels) > 1
        )
        tasks = [
            progress.add_task(label, total=total, now="", visible=few, start=False)
            for label, total in zip(labels, rounds, strict=True)
        ]
        reached, finished = [0] * len(labels), []

        def advance(i: int, point: Point, visible: bool) -> None:
            reached[i] = point.round
            progress.update(tasks[i], completed=point.round, now=now(point), visible=visible)
            progress.update(everything, completed=sum(reached), now=f"{len(finished)} of {len(labels)}")

        def watch(i: int, point: Point) -> None:
            progress.start_task(tasks[i])
            advance(i, point, True)

        def done(i: int, outcome: Outcome) -> None:
            finished.append(i)
            advance(i, outcome.curve[-1], few)

        yield watch, done


def now(point: Point) -> str:
    success = "" if point.asr is None else f", attack success {digits(point.asr)}"
    return f"round {point.round}: error {digits(point.error)}{success}"


def table(outcomes: list[Outcome], varied: list[str]) -> Table:
    """One row per run: the settings in which they differ, then the summary."""
    made = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in varied:
        made.add_column(name, no_wrap=True)
    columns = [column for column in COLUMNS if any(o.summary.get(column[0]) is not None for o in outcomes)]
    for _, heading, _ in columns:
        made.add_column(heading, justify="right")
    for outcome in outcomes:
        numbers = [digits(outcome.summary.get(key), places) for key, _, places in columns]
        made.add_row(*(words(get(outcome.settings, name)) for name in varied), *numbers)
    return made


def tell(made: Table) -> None:
    console = Console()
    # A file has no width: nothing there is to be cut to that of a terminal.
    (console if console.is_terminal else Console(width=200)).print(made)


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
                # Names have no order, hence no line between them.
                panel.plot(*zip(*shown, strict=True), "o-" if across in numbers else "o", label=name or None)
    _finish(path, figure, panels, across)


def sentence(outcomes: list[Outcome]) -> str:
    """What a comparison showed, best first; runs without attack are what attacked ones are held against."""
    attacked = [outcome for outcome in outcomes if outcome.settings.attack != "none"]
    clean = [outcome for outcome in outcomes if outcome.settings.attack == "none"]
    settings = (attacked or clean)[0].settings
    scene = f"Under {settings.attack} by {settings.attackers} of {settings.clients} clients"
    ranked = sorted(attacked or clean, key=lambda outcome: outcome.summary["error"] + (outcome.summary["asr"] or 0))
    ends = ", ".join(map(_ending, ranked))
    held_against = f"; without attack at {', '.join(map(_ending, clean))}" if attacked and clean else ""
    return f"{scene if attacked else 'Without attack'} the {measure(settings)} ends at {ends}{held_against}."


def _ending(outcome: Outcome) -> str:
    success = outcome.summary["asr"]
    note = "" if success is None else f" (attack success {digits(success)})"
    return f"{digits(outcome.summary['error'])} with {outcome.settings.defense}{note}"


def measure(settings: Settings) -> str:
    return "RMSE" if settings.dataset == "udacity" else "test error"


def digits(value: float | None, places: int = 3) -> str:
    return "-" if value is None else f"{value:.{places}f}"  # inf and nan come out as such


def words(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={inner}" for name, inner in value.items()) or "-"
    return "-" if value is None else str(value)


def label(settings: Settings, varied: list[str]) -> str:
    """Text as it is, numbers with their name."""
    values = [(name, get(settings, name)) for name in varied]
    return " ".join(
        words(value) if isinstance(value, (str, dict)) else f"{name}={words(value)}" for name, value in values
    )


def title(settings: Settings, varied: list[str]) -> str:
    """What the runs have in common."""
    parts = [f"{name} {getattr(settings, name)}" for name in ("dataset", "attack", "defense") if name not in varied]
    if "malicious" not in varied and "clients" not in varied and settings.attack != "none":
        parts.append(f"{settings.attackers} of {settings.clients} clients malicious")
    return ", ".join(parts)


def _panels(outcomes: list[Outcome], heading: str) -> tuple[Figure, list[tuple[Axes, str]]]:
    keys = ["error"] + ["asr"] * any(outcome.summary["asr"] is not None for outcome in outcomes)
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
