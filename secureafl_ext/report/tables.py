"""A table of the paper: plan its runs, collect their results, cell by cell."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev

from ..sim import results
from ..sim.options import get, grid, prepare, with_tuned_options
from ..sim.outcome import Outcome
from ..sim.results import Record
from ..sim.settings import Settings, UndefinedError
from . import server_tables
from .paper import SETUP, TABLES, Table
from .paper_numbers import Numbers, Value

NOT_RUN, UNDEFINED = "not run", "undefined"
SUCCESS = {"error": "asr", "late_error": "late_asr"}  # measure -> the attack success that stands beside it
# Titles of the grids, where a table has more than one measure.
TITLES = {
    "error": "end of the run",
    "late_error": "second half of the run (mean)",
    "worst_class_error": "class with the highest error, end of the run",
}


@dataclass(frozen=True)
class Cell:
    """Our result: one value per seed, or the reason why there is none."""

    values: list[Value]
    missing_reason: str = NOT_RUN

    @property
    def undefined(self) -> bool:
        return self.missing_reason.startswith(UNDEFINED)

    def means(self) -> Value:
        return tuple(fmean(numbers) for numbers in zip(*self.values, strict=True))

    def deviations(self) -> tuple[float | None, ...]:
        """Sample standard deviations; None for a single seed, and where a run diverged."""
        by_number = list(zip(*self.values, strict=True))
        return tuple(stdev(x) if len(x) > 1 and all(map(math.isfinite, x)) else None for x in by_number)


@dataclass(frozen=True)
class Grid:
    """Cells by row and column: a whole table, or one attack of a figure."""

    title: str
    rows: list[str]
    columns: list[str]
    cells: dict[tuple[str, str], Cell]
    paper: Numbers  # only rows that the paper has
    compared_with: Mapping[str, str] = field(default_factory=dict)  # our row -> the paper's row to compare it with

    def paper_value(self, row: str, column: str) -> Value | None:
        """The paper's number to compare a cell with, if there is one."""
        return self.paper.get((self.compared_with.get(row, row), column))

    def paper_rows(self) -> list[str]:
        """The rows that the paper has itself."""
        return [row for row in self.rows if any((row, column) in self.paper for column in self.columns)]


@dataclass(frozen=True)
class TablePlan:
    """A table with the settings from the command line applied."""

    name: str
    table: Table
    base: Settings
    axes: dict[str, list]
    seeds: int

    @property
    def file(self) -> str:
        """Name of the output files, without the suffix."""
        return f"{self.name}-{self.base.dataset}"

    @property
    def row_axis(self) -> str:
        """What the rows are."""
        return list(self.axes)[-2] if len(self.axes) > 1 else "measure"

    @property
    def column_axis(self) -> str:
        """What the columns are."""
        return list(self.axes)[-1]

    def runs(self) -> list[Settings]:
        """All runs. A compared defense has its tuned options, unless the command line gives others."""
        runs = grid(self.base, self.axes | {"seed": list(range(self.seeds))})
        return [with_tuned_options(settings) for settings in runs]

    def paper_numbers(self) -> Numbers:
        return self.table.paper.get(self.base.dataset, {})


def plan_table(
    name: str,
    base: Settings,
    given: dict[str, object],
    only: dict[str, list],
    seeds: int,
    table: Table | None = None,
) -> TablePlan:
    """`given` settings override the table's, also on an axis of the table; `only` gives an axis other values.

    table: one that is not the paper's; None: the paper's table of that name
    """
    if seeds < 1:
        raise ValueError(f"seeds must be 1 or more, got {seeds}")
    table, dataset = table or TABLES[name], str(given.get("dataset", base.dataset))
    settings: dict = {**SETUP.get(dataset, {}), **table.fixed, **given}
    axes = {axis: list(values) for axis, values in table.axes.items()}
    if table.source == "runs":
        axes |= {axis: [given[axis]] for axis in axes if axis in given}
        axes |= {axis: only[axis] for axis in axes if axis in only}
    return TablePlan(name, table, replace(base, **settings), axes, seeds if table.source == "runs" else 1)


def make_table(
    plan: TablePlan,
    simulate: Callable[[list[Settings], list[str]], object],
    publish: Callable[[TablePlan, list[Grid], str], None],
    out: Path,
) -> None:
    """Run what the results file lacks, then publish. A table that is cut short is published with what it has."""
    if plan.table.source != "runs":
        results.ready(out)
        values, about, reason = server_tables.MEASURED[plan.table.source](plan.base, plan.axes, out)
        rows, columns = plan.axes.values()
        cells = {(row, column): Cell(values.get((row, column), []), reason) for row in rows for column in columns}
        publish(plan, [Grid("", rows, columns, cells, plan.paper_numbers())], about)
        return
    # An invalid setting raises here, before any file is written.
    wanted = {results.run_of(settings) for settings in prepare(plan.runs(), lambda text: None)}
    results.ready(out)
    reason = NOT_RUN
    try:
        simulate(plan.runs(), [*plan.axes, "seed"])
    except BaseException as stop:
        reason = f"{NOT_RUN}: {str(stop) or type(stop).__name__}"
        raise
    finally:
        known = results.read(out / results.NAME, lambda text: None)
        records = [record for record in known if results.run_of(record.outcome.settings) in wanted]
        publish(plan, collect(plan, records, reason), provenance(plan, records))


def collect(plan: TablePlan, records: Sequence[Record], missing_reason: str) -> list[Grid]:
    """The grids of a table, measure by measure. Rows and columns without any defined cell are left out, as in the
    paper."""
    measures = (plan.table.measure, *plan.table.more_measures)
    return [grid for measure in measures for grid in _collect(plan, records, missing_reason, measure)]


def _collect(plan: TablePlan, records: Sequence[Record], missing_reason: str, measure: str) -> list[Grid]:
    names = list(plan.axes)
    outer, inner = names[:-2], names[-2:]

    def place(settings: Settings) -> tuple:
        return tuple(get(settings, name) for name in names)

    found: dict[tuple, dict[int, Value]] = {}  # place -> seed -> value; the last of equal runs counts
    for record in records:
        run, value = record.outcome.settings, measured(record.outcome, measure)
        if value:
            found.setdefault(place(run), {})[run.seed] = value

    def cell(settings: Settings) -> Cell:
        try:
            settings.resolve()
        except UndefinedError as error:
            return Cell([], f"{UNDEFINED}: {error}")
        return Cell(list(found.get(place(settings), {}).values()), missing_reason)

    grids = []
    for outer_settings in grid(plan.base, {name: plan.axes[name] for name in outer}):
        cells = {}
        for settings in grid(outer_settings, {name: plan.axes[name] for name in inner}):
            key = [label(get(settings, name)) for name in inner]
            cells[key[0] if len(inner) > 1 else measure, key[-1]] = cell(settings)
        kept = [key for key, cell in cells.items() if not cell.undefined] or list(cells)
        rows, columns = (list(dict.fromkeys(labels)) for labels in zip(*kept, strict=True))
        title = " ".join(label(get(outer_settings, name)) for name in outer)
        if plan.table.more_measures:
            title = f"{title} {TITLES[measure]}".strip()
        grids.append(Grid(title, rows, columns, cells, plan.paper_numbers(), plan.table.compared_with))
    return grids


def measured(outcome: Outcome, measure: str) -> Value:
    """The measure, with the attack success if there is one; empty if the run does not have the measure."""
    summary = outcome.summary
    if summary.get(measure) is None:
        return ()
    values = (summary[measure], summary.get(SUCCESS.get(measure, "")))
    return tuple(value for value in values if value is not None)


def provenance(plan: TablePlan, records: Sequence[Record]) -> str:
    """Hardware, versions, commits, seeds, rounds, dates and options of the runs; different values with commas."""

    def distinct(values: Sequence[str | None]) -> str:
        return ", ".join(dict.fromkeys(value or "unknown" for value in values))

    if not records:
        return f"{len(plan.runs())} runs wanted, none finished"
    parts = [
        distinct([record.device for record in records]),
        distinct([results.spell(record.versions) for record in records]),
        f"commit {distinct([record.commit for record in records])}",
        f"seeds {', '.join(map(str, range(plan.seeds)))}",
        f"rounds {distinct([str(record.outcome.settings.rounds) for record in records])}",
        f"{min(record.started for record in records)} to {max(record.started for record in records)}",
    ]
    options = [(record.outcome.settings.defense, record.outcome.settings.defense_options) for record in records]
    spelled = [f"{defense} {key}={value}" for defense, values in options for key, value in values.items()]
    if spelled:
        parts.append(f"with {distinct(spelled)}")
    return "; ".join(parts)


def label(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
