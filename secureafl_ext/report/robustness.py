"""The table of robustness: defenses under all attacks, and under the worst attack that a search found."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from ..attacks import ATTACKS
from ..defenses import DEFENSES
from ..redteam.found import worst_found
from ..redteam.space import ATTACK as SEARCHED
from ..sim import results
from ..sim.options import with_tuned_options
from ..sim.outcome import Outcome
from ..sim.results import Record
from ..sim.settings import Settings
from ..tasks import datasets
from . import labels, markdown, plots
from .paper import TABLES, Table
from .paper_numbers import Numbers
from .tables import Cell, Grid, TablePlan, measured

NAME = "robustness"
WORST_FOUND = "worst found"
# Variants that show what a part of SecureAFL does: no defenses of their own.
ABLATIONS = {*TABLES["variants"].axes["defense"], "secureafl-paper"} - {"secureafl"}
WORST_NOTE = (
    f"{WORST_FOUND}: the attack with the highest late error or attack success that `secureafl redteam` found against "
    "this defense. The search used other seeds and held-out data."
)
NOT_SEARCHED = "not searched: `secureafl redteam --defense NAME` finds the worst attack on a defense"
# Light is good and dark is bad, also without colours: the lightness of this colour map falls steadily.
GREY_SAFE = plots.Look("YlOrRd", 1.0, 0.62)


def table(dataset: str) -> Table:
    """All attacks and defenses that are registered now. The attack of the search has its own column."""
    by_class = () if datasets.SOURCES[dataset].regression else ("worst_class_error",)
    return Table(
        "every defense under every attack",
        {
            "defense": tuple(name for name in DEFENSES if name not in ABLATIONS),
            "attack": tuple(name for name in ATTACKS if name != SEARCHED),
        },
        more_measures=("late_error", *by_class),
    )


def with_worst_found(plan: TablePlan, grids: list[Grid], records: Sequence[Record]) -> list[Grid]:
    """The grids with one more column, if a search has found something for one of the rows."""
    late = next(grid for grid, measure in zip(grids, measures(plan), strict=True) if measure == "late_error")
    found = {row: _found(plan, row, late, records) for row in grids[0].rows}
    if not any(found.values()):
        return grids
    made = []
    for grid, measure in zip(grids, measures(plan), strict=True):
        cells = dict(grid.cells)
        for row in grid.rows:
            values = [value for outcome in found[row] if (value := measured(outcome, measure))]
            cells[row, WORST_FOUND] = Cell(values, NOT_SEARCHED)
        made.append(replace(grid, columns=[*grid.columns, WORST_FOUND], cells=cells))
    return made


def measures(plan: TablePlan) -> tuple[str, ...]:
    return plan.table.measure, *plan.table.more_measures


def _found(plan: TablePlan, defense: str, late: Grid, records: Sequence[Record]) -> list[Outcome]:
    clean = late.cells.get((defense, "none"), Cell([]))
    base: Settings = with_tuned_options(replace(plan.base, defense=defense, attack=SEARCHED))
    return worst_found(records, base, plan.seeds, clean.means()[0] if clean.values else 0.0)


def publish(out: Path, searched: Path, command: str, plan: TablePlan, grids: list[Grid], provenance: str) -> None:
    """Write robustness-DATASET.md and its heat map into `out`. searched: the results folder of `secureafl redteam`"""
    records = results.read(searched / results.NAME, lambda text: None)
    grids = with_worst_found(plan, grids, records)
    if WORST_FOUND in grids[0].columns:
        plan = replace(plan, table=replace(plan.table, note=WORST_NOTE))
    text = markdown.document(plan, grids, f"`{command}`; {provenance}")
    results.replace_text(out / f"{plan.file}.md", text)
    draw(out / f"{plan.file}.png", plan, grids[0])


def draw(path: Path, plan: TablePlan, grid: Grid) -> None:
    """PNG: one number per cell, the larger of error and attack success at the end. The best defense is on top."""
    values: Numbers = {key: (max(cell.means()),) for key, cell in grid.cells.items() if cell.values}
    rows = sorted(grid.rows, key=lambda row: _mean(row, values))
    width, height = 3.2 + 0.52 * len(grid.columns), 2.0 + 0.36 * len(rows)
    figure = plots.blank_figure(plan, max(7.0, width), height)
    axes = figure.subplots()
    image = plots.heat_map(axes, rows, grid.columns, values, GREY_SAFE)
    axes.set_xticks(range(len(grid.columns)), grid.columns, rotation=40, ha="right")
    axes.set_xlabel(labels.axis(plan.column_axis))
    axes.set_ylabel(labels.axis(plan.row_axis))
    if WORST_FOUND in grid.columns:
        axes.axvline(len(grid.columns) - 1.5, color="black", linewidth=2)
    unit = f"{labels.measure(plan)} or attack success, whichever is larger"
    figure.colorbar(image, ax=axes, label=unit, extend="max", pad=0.02)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _mean(row: str, values: Numbers) -> float:
    its = [value[0] for (name, _), value in values.items() if name == row]
    return fmean(its) if its else math.inf
