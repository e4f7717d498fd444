"""A table of the paper: what to run for it, and what came of the runs, cell by cell."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev

from ..sim import results
from ..sim.options import get, grid, prepare
from ..sim.results import Record
from ..sim.settings import Settings, UndefinedError
from . import server_tables
from .paper import CHOSEN, SETUP, TABLES, Numbers, Table, Value

NOT_RUN, UNDEFINED = "not run", "undefined"


@dataclass(frozen=True)
class Cell:
    """Ours: a value per seed, or why there is none."""

    values: list[Value]
    why: str = NOT_RUN

    @property
    def undefined(self) -> bool:
        return self.why.startswith(UNDEFINED)

    def means(self) -> Value:
        return tuple(fmean(numbers) for numbers in zip(*self.values, strict=True))

    def deviations(self) -> tuple[float | None, ...]:
        """Of a sample; None where there is none, of a single seed or of what diverged."""
        each = list(zip(*self.values, strict=True))
        return tuple(stdev(x) if len(x) > 1 and all(map(math.isfinite, x)) else None for x in each)


@dataclass(frozen=True)
class Part:
    """One grid of cells: a whole table, or the curves of a figure under one attack."""

    title: str
    rows: list[str]
    columns: list[str]
    cells: dict[tuple[str, str], Cell]
    paper: Numbers


@dataclass(frozen=True)
class Plan:
    """A table with what the command line changed of it."""

    name: str
    table: Table
    base: Settings
    axes: dict[str, list]
    seeds: int

    @property
    def file(self) -> str:
        return f"{self.name}-{self.base.dataset}"

    def runs(self) -> list[Settings]:
        """With the values chosen for a compared defense, unless the command line gives others."""
        return [
            replace(settings, defense_options=CHOSEN.get(settings.defense, {}) | settings.defense_options)
            for settings in grid(self.base, self.axes | {"seed": list(range(self.seeds))})
        ]


def plan(name: str, base: Settings, given: dict[str, object], only: dict[str, list], seeds: int) -> Plan:
    """A setting that is given has the last word, also where the table varies it; `only` gives an axis other values."""
    if seeds < 1:
        raise ValueError(f"seeds must be 1 or more, got {seeds}")
    table, dataset = TABLES[name], given.get("dataset", base.dataset)
    whole = replace(base, **SETUP.get(dataset, {}) | table.fixed | given)
    axes = {axis: list(values) for axis, values in table.axes.items()}
    if table.how == "runs":
        axes |= {axis: [given[axis]] for axis in axes if axis in given}
        axes |= {axis: only[axis] for axis in axes if axis in only}
    return Plan(name, table, whole, axes, seeds if table.how == "runs" else 1)


def make(
    chosen: Plan,
    simulate: Callable[[list[Settings], list[str]], object],
    publish: Callable[[Plan, list[Part], str], None],
    out: Path,
) -> None:
    """Run what the results file does not have yet, and publish; also what there is of a table that is cut short."""
    if chosen.table.how != "runs":
        results.ready(out)
        values, about, why = server_tables.MEASURED[chosen.table.how](chosen.base, chosen.axes, out)
        rows, columns = chosen.axes.values()
        cells = {(row, column): Cell(values.get((row, column), []), why) for row in rows for column in columns}
        publish(chosen, [Part("", rows, columns, cells, paper(chosen))], about)
        return
    wanted = prepare(chosen.runs(), lambda text: None)  # a mistake ends here, and leaves no file
    results.ready(out)
    why = NOT_RUN
    try:
        simulate(chosen.runs(), [*chosen.axes, "seed"])
    except BaseException as stop:
        why = f"{NOT_RUN}: {str(stop) or type(stop).__name__}"
        raise
    finally:
        known = results.read(out / results.NAME, lambda text: None)
        records = [record for record in known if record.outcome.settings in wanted]
        publish(chosen, collect(chosen, records, why), provenance(chosen, records))


def collect(chosen: Plan, records: list[Record], why: str) -> list[Part]:
    table, names = chosen.table, list(chosen.axes)
    outer, inner = names[:-2], names[-2:]

    def place(settings: Settings) -> tuple:
        return tuple(get(settings, name) for name in names)

    found: dict[tuple, dict[int, Value]] = {}  # by place, then by seed; the last run of equals counts
    for record in records:
        settings, value = record.outcome.settings, measured(record, table.measure)
        if value:
            found.setdefault(place(settings), {})[settings.seed] = value

    def cell(settings: Settings) -> Cell:
        try:
            settings.resolve()
        except UndefinedError as error:
            return Cell([], f"{UNDEFINED}: {error}")
        return Cell(list(found.get(place(settings), {}).values()), why)

    parts = []
    for under in grid(chosen.base, {name: chosen.axes[name] for name in outer}):
        cells = {}
        for settings in grid(under, {name: chosen.axes[name] for name in inner}):
            key = [label(get(settings, name)) for name in inner]
            cells[key[0] if len(inner) > 1 else table.measure, key[-1]] = cell(settings)
        # As in the paper, no row or column without any meaning; why there is none can be read off the cells.
        kept = [key for key, cell in cells.items() if not cell.undefined] or list(cells)
        rows, columns = (list(dict.fromkeys(names)) for names in zip(*kept, strict=True))
        parts.append(Part(" ".join(label(get(under, name)) for name in outer), rows, columns, cells, paper(chosen)))
    return parts


def measured(record: Record, measure: str) -> Value:
    """Empty where the run has no such measure."""
    summary = record.outcome.summary
    values = (summary.get(measure), summary.get("asr") if measure == "error" else None)
    return tuple(value for value in values if value is not None)


def paper(chosen: Plan) -> Numbers:
    return chosen.table.paper.get(chosen.base.dataset, {})


def provenance(chosen: Plan, records: list[Record]) -> str:
    """On what, when and from which source: every different answer, once."""

    def each(values: list[str | None]) -> str:
        return ", ".join(dict.fromkeys(value or "unknown" for value in values))

    if not records:
        return f"{len(chosen.runs())} runs wanted, none finished"
    parts = [
        each([record.device for record in records]),
        each([results.spell(record.versions) for record in records]),
        f"commit {each([record.commit for record in records])}",
        f"seeds {', '.join(map(str, range(chosen.seeds)))}",
        f"rounds {each([str(record.outcome.settings.rounds) for record in records])}",
        f"{min(record.started for record in records)} to {max(record.started for record in records)}",
    ]
    options = [(record.outcome.settings.defense, record.outcome.settings.defense_options) for record in records]
    spelled = [f"{defense} {key}={value}" for defense, values in options for key, value in values.items()]
    if spelled:
        parts.append(f"with {each(spelled)}")
    return "; ".join(parts)


def label(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
