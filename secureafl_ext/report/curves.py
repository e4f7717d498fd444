"""Curves of recorded runs: a panel per attack, a line per defense, beside the results of the paper."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ..attacks import ATTACKS
from ..sim.options import KINDS, get
from ..sim.outcome import Outcome
from ..sim.results import Record
from ..sim.settings import VARIANT_SETTINGS
from ..validation import printable
from . import console, paper_numbers, style
from .paper_numbers import Numbers

NAME = "curves.png"
ACROSS = 4  # panels side by side
LONGEST_NAME = 40  # characters
LINES = ("attack", "defense")  # what tells panels and lines apart
OPTIONS = ("attack_options", "defense_options")
PLACE = ("data_dir", "device")  # do not change a result
ALIKE_IN_A_LINE = (*OPTIONS, *VARIANT_SETTINGS)  # a defense may have its own
ALIKE = tuple(name for name in KINDS if name not in (*LINES, *ALIKE_IN_A_LINE, *PLACE, "seed"))

Panels = dict[str, dict[str, list[Outcome]]]  # attack -> defense -> a run per seed


def select(records: Iterable[Record], only: Mapping[str, Collection[Any]]) -> Panels:
    """The runs that have, for every setting of `only`, one of its values. Of equal runs the last one counts.

    ValueError if there is none, or if they differ in more than attack, defense and seed.
    """
    chosen = {}
    for record in records:
        settings = record.outcome.settings
        if all(get(settings, name) in values for name, values in only.items()):
            chosen[repr(replace(settings, data_dir=None, device="cpu"))] = record.outcome
    if not chosen:
        raise ValueError(f"curves: no run has {' and '.join(map(_spelled, only.items())) or 'a result'}")
    runs = list(chosen.values())
    _need_alike(runs, ALIKE)
    panels: Panels = {}
    attacks = {run.settings.attack: None for run in runs}
    for attack in [*filter(attacks.__contains__, ATTACKS), *(name for name in attacks if name not in ATTACKS)]:
        panels[attack] = {}
        for run in (run for run in runs if run.settings.attack == attack):
            panels[attack].setdefault(run.settings.defense, []).append(run)
        for line in panels[attack].values():
            _need_alike(line, ALIKE_IN_A_LINE)
    return panels


def _need_alike(runs: list[Outcome], names: Iterable[str]) -> None:
    one = runs[0].settings
    for name in names:
        values = list(dict.fromkeys(str(getattr(run.settings, name)) for run in runs))
        if len(values) > 1:
            whose = f"runs of {one.defense} under {one.attack}" if name in ALIKE_IN_A_LINE else "runs"
            how = "" if name in OPTIONS else f"; choose with --only {name}={values[0]}"
            raise ValueError(f"curves: the {whose} must have the same {name}, got {', '.join(values[:4])}{how}")


def _spelled(chosen: tuple[str, Collection[Any]]) -> str:
    return f"{chosen[0]}={','.join(map(str, chosen[1]))}"


def draw(path: Path, panels: Panels) -> None:
    """PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure(panels).savefig(path, dpi=90)


@rc_context(console.LITERAL)
def figure(panels: Panels) -> Figure:
    """A line is the mean over seeds; its band goes from the lowest to the highest seed. Dashes: attack success."""
    settings = next(iter(next(iter(panels.values())).values()))[0].settings
    defenses = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    highlighted = style.highlighted(defenses)
    colors = {
        name: style.HIGHLIGHT if name == highlighted else style.MUTED[i % len(style.MUTED)]
        for i, name in enumerate(defenses)
    }
    across = min(len(panels), ACROSS)
    down = -(-len(panels) // across)
    drawn = Figure(figsize=(max(6.0, 3.1 * across), 1.4 + 2.4 * down), layout="constrained")
    drawn.suptitle(f"{_name(settings.dataset)}: {console.measure(settings)} by round")
    grid = drawn.subplots(down, across, squeeze=False).flatten().tolist()
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    numbers = paper_numbers.MAIN.get(settings.dataset, {})
    top = 1.03 if console.measure(settings) == "test error" else _top(panels, numbers)
    for i, (axes, (attack, lines)) in enumerate(zip(grid, panels.items(), strict=False)):
        for name in sorted(lines, key=lambda name: name == highlighted):  # it lies on top of the others
            _line(axes, lines[name], colors[name], name == highlighted)
            # Our variants are compared with the paper's SecureAFL.
            theirs = numbers.get(("secureafl" if name.startswith("secureafl") else name, attack))
            if theirs is not None and theirs[0] < top:
                axes.plot(settings.rounds, theirs[0], "x", color=colors[name], markersize=8, clip_on=False, zorder=20)
        axes.set_title(_name(attack))
        axes.set_ylim(0, top)
        axes.set_xlim(0, settings.rounds)
        axes.xaxis.set_major_locator(MaxNLocator(3))
        axes.tick_params(labelbottom=i + across >= len(panels))  # there is no panel below
        axes.grid(alpha=0.3)
    handles = [Line2D([], [], color=colors[name], label=_name(name)) for name in defenses]
    if any(run.asr is not None for lines in panels.values() for runs in lines.values() for run in runs):
        handles.append(Line2D([], [], color="black", linestyle="--", label="attack success"))
    if numbers:
        handles.append(Line2D([], [], color="black", marker="x", linestyle="", label="end of the paper's run"))
    drawn.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 2 * across))
    return drawn


def _name(name: str) -> str:
    """For a picture. A results file may have any."""
    return printable(name, LONGEST_NAME)


def _line(axes: Axes, runs: list[Outcome], color: str, wide: bool) -> None:
    for key, dashes in (("error", "-"), ("asr", "--")):
        at: dict[int, list[float]] = {}
        for run in runs:
            for point in run.curve:
                if (value := getattr(point, key)) is not None and math.isfinite(value):
                    at.setdefault(point.round, []).append(value)
        if not at:
            continue
        rounds = sorted(at)
        means = [fmean(at[round_]) for round_ in rounds]
        axes.plot(rounds, means, dashes, color=color, linewidth=2.2 if wide else 1.3, zorder=10 if wide else 2)
        lowest, highest = [min(at[round_]) for round_ in rounds], [max(at[round_]) for round_ in rounds]
        axes.fill_between(rounds, lowest, highest, color=color, alpha=0.2, linewidth=0)


def _top(panels: Panels, numbers: Numbers) -> float:
    """Of the axis of a regression. Runs that diverge leave it, the paper's too; a constant answer is far below 1."""
    every = (run for lines in panels.values() for runs in lines.values() for run in runs)
    errors = [point.error for run in every for point in run.curve if math.isfinite(point.error)]
    theirs = [number[0] for (_, attack), number in numbers.items() if attack in panels and number[0] < 1]
    return max([3 * median(errors or [1.0]), *theirs])
