"""A table as Markdown: our number, the paper's and the difference, one below the other."""

import math
from pathlib import Path

from ..sim import results
from . import labels, plots
from .paper_numbers import Value
from .tables import Cell, Grid, TablePlan

TOLERANCE = 0.03  # a number at most this much above the paper's counts as reached
REACHED = "†"


def publish(out: Path, command: str, plan: TablePlan, grids: list[Grid], provenance: str) -> None:
    """Write TABLE-DATASET.md into `out`, and its plot beside it."""
    results.replace_text(out / f"{plan.file}.md", document(plan, grids, f"`{command}`; {provenance}"))
    plots.draw(out / f"{plan.file}.png", plan, grids)


def document(plan: TablePlan, grids: list[Grid], about: str) -> str:
    """The whole file. The reasons for missing values stand below the tables."""
    table = plan.table
    blocks = [f"# {plan.file}: {table.about}", about.rstrip(".") + ".", legend(plan, grids)]
    if table.note:
        blocks.append(table.note)
    for grid in grids:
        blocks += [f"## {grid.title}"] * bool(grid.title)
        blocks.append(grid_text(plan, grid))
    reasons = dict.fromkeys(cell.missing_reason for grid in grids for cell in grid.cells.values() if not cell.values)
    if reasons:
        blocks.append("\n".join(f"- {reason}" for reason in reasons))
    return "\n\n".join(blocks) + "\n"


def tolerance(plan: TablePlan) -> float:
    """Seconds and GB have no tolerance: reached means at most the paper's number."""
    return TOLERANCE if plan.table.source == "runs" else 0.0


def legend(plan: TablePlan, grids: list[Grid]) -> str:
    """What the numbers and the marks of the table mean."""
    measure = labels.measure(plan)
    text = measure[0].upper() + measure[1:]
    best = f"smallest {measure}"
    if measure == "test error":
        text, best = f"{text}, or {measure} / attack success", f"{best}, plus attack success if there is one"
    if plan.table.source == "runs" and plan.seeds > 1:
        text += f"; mean over {plan.seeds} seeds ± standard deviation"
    text += "."
    if any(len(grid.rows) > 1 for grid in grids):
        text += f" **Bold**: best of the column ({best})."
    if any(grid.paper for grid in grids):
        bound = f"at most {tolerance(plan):g} above" if tolerance(plan) else "not above"
        text += f" {REACHED}: {bound} the paper's number."
    return f"{text} `-`: not run; `n/a`: undefined."


def grid_text(plan: TablePlan, grid: Grid) -> str:
    """One line per row; three if the paper has numbers: ours, the paper's, the difference."""
    decimals = plan.table.decimals
    best = {column: best_rows(grid, column, decimals) for column in grid.columns}
    whose = ["ours"] if grid.paper else []  # says whose numbers a line has
    lines = [[plan.row_axis, *[""] * len(whose), *grid.columns], ["---"] * (1 + len(whose) + len(grid.columns))]
    for row in grid.rows:
        cells = [grid.cells[row, column] for column in grid.columns]
        theirs = [grid.paper_value(row, column) for column in grid.columns]
        ours = []
        for column, cell, value in zip(grid.columns, cells, theirs, strict=True):
            text = cell_text(cell, decimals, plan.seeds)
            text = f"**{text}**" if row in best[column] else text
            ours.append(f"{text} {REACHED}" if is_reached(cell, value, tolerance(plan)) else text)
        lines.append([row, *whose, *ours])
        if grid.paper:
            other = grid.compared_with.get(row)
            lines.append(["", f"paper: {other}" if other else "paper", *map(paper_text, theirs)])
            differences = [difference(cell, value, decimals) for cell, value in zip(cells, theirs, strict=True)]
            lines.append(["", "difference", *differences])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def best_rows(grid: Grid, column: str, decimals: int) -> list[str]:
    """The rows with the smallest sum of error and attack success, as printed; none if all rows are equal."""
    sums = {}
    for row in grid.rows:
        cell = grid.cells[row, column]
        if cell.values:
            sums[row] = round(sum(round(mean, decimals) for mean in cell.means()), decimals)
    finite = [value for value in sums.values() if math.isfinite(value)]
    best = [row for row, value in sums.items() if finite and value == min(finite)]
    return best if len(best) < len(sums) else []


def cell_text(cell: Cell, decimals: int, seeds: int) -> str:
    """Mean ± standard deviation, and how many seeds there are if some are missing."""
    if not cell.values:
        return "n/a" if cell.undefined else "-"
    texts = [
        f"{mean:.{decimals}f}" + ("" if spread is None else f" ± {spread:.{decimals}f}")
        for mean, spread in zip(cell.means(), cell.deviations(), strict=True)
    ]
    return " / ".join(texts) + (f" ({len(cell.values)} of {seeds})" if 1 < seeds != len(cell.values) else "")


def paper_text(value: Value | None) -> str:
    """Two decimals, or all of them if the paper prints more."""
    if value is None:
        return "-"
    return " / ".join(f"{x:.2f}" if round(x, 2) == x else f"{x:g}" for x in value)


def is_reached(cell: Cell, theirs: Value | None, bound: float) -> bool:
    """True if neither error nor attack success is more than `bound` above the paper's."""
    if not cell.values or theirs is None:
        return False
    return all(mine <= other + bound + 1e-9 for mine, other in zip(cell.means(), theirs, strict=True))


def difference(cell: Cell, theirs: Value | None, decimals: int) -> str:
    """Ours minus the paper's."""
    if not cell.values or theirs is None:
        return "-"
    differences = [0.0 if mine == other else mine - other for mine, other in zip(cell.means(), theirs, strict=True)]
    return " / ".join(f"{x:+.{decimals}f}" if math.isfinite(x) else f"{x:+g}" for x in differences)
