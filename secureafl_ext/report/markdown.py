"""Cells as markdown: ours, the paper's and the difference, one below the other."""

import math
from pathlib import Path

from ..sim import results
from ..sim.settings import Settings
from . import plots
from .grids import Cell, Part, Plan
from .paper import Value

NEAR = 0.03  # so much worse than the paper still counts as reached


def publish(out: Path, command: str, chosen: Plan, parts: list[Part], about: str) -> None:
    """The table as TABLE-DATASET.md in `out`, its picture beside it."""
    results.replace_text(out / f"{chosen.file}.md", markdown(chosen, parts, f"`{command}`; {about}"))
    draw = plots.curves if chosen.table.curves else plots.heat
    draw(out / f"{chosen.file}.png", f"{chosen.file}: {chosen.table.about}", parts)


def markdown(chosen: Plan, parts: list[Part], about: str) -> str:
    """The whole file; below the tables stands why values are missing."""
    table, bound = chosen.table, near(chosen)
    blocks = [
        f"# {chosen.file}: {table.about}",
        about.rstrip(".") + ".",
        legend(chosen, any(part.paper for part in parts)),
    ]
    if table.note:
        blocks.append(table.note)
    for part in parts:
        blocks += [f"## {part.title}"] * bool(part.title)
        corner = list(chosen.axes)[-2] if len(chosen.axes) > 1 else "measure"
        blocks.append(grid(corner, part, bound, table.places, chosen.seeds))
    reasons = dict.fromkeys(cell.why for part in parts for cell in part.cells.values() if not cell.values)
    if reasons:
        blocks.append("\n".join(f"- {why}" for why in reasons))
    return "\n\n".join(blocks) + "\n"


def near(chosen: Plan) -> float:
    """For seconds and GB there is no "about as good": at most the paper's."""
    return NEAR if chosen.table.how == "runs" else 0.0


def legend(chosen: Plan, compared: bool) -> str:
    what = {"error": error_name(chosen.base), "estimation_error": "Relative estimation error"}[chosen.table.measure]
    text = {"runs": what, "memory": "GB", "bench": "Seconds"}[chosen.table.how]
    if chosen.table.how == "runs" and chosen.seeds > 1:
        text += f"; mean over {chosen.seeds} seeds ± standard deviation"
    mark = f" Bold: at most {near(chosen):g} above the paper's." if compared and near(chosen) else ""
    mark = " Bold: no more than the paper's." if compared and not near(chosen) else mark
    return f"{text}.{mark} `-`: not run; `n/a`: undefined."


def error_name(settings: Settings) -> str:
    return "RMSE" if settings.dataset == "udacity" else "Test error, or test error / attack success"


def grid(corner: str, part: Part, bound: float, places: int, seeds: int) -> str:
    """A line per row where the paper has no number at all, else three."""
    lines = [[corner, "", *part.columns], ["---"] * (2 + len(part.columns))]
    for row in part.rows:
        cells = [part.cells[row, column] for column in part.columns]
        theirs = [part.paper.get((row, column)) for column in part.columns]
        ours = [spelled(cell, places, seeds) for cell in cells]
        marked = [
            f"**{text}**" if reached(cell, value, bound) else text
            for text, cell, value in zip(ours, cells, theirs, strict=True)
        ]
        lines.append([row, "ours", *marked])
        if part.paper:
            lines.append(["", "paper", *("-" if value is None else numbers(value, 2) for value in theirs)])
            apart = [difference(cell, value, places) for cell, value in zip(cells, theirs, strict=True)]
            lines.append(["", "difference", *apart])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spelled(cell: Cell, places: int, seeds: int) -> str:
    if not cell.values:
        return "n/a" if cell.undefined else "-"
    texts = [
        f"{mean:.{places}f}" + ("" if spread is None else f" ± {spread:.{places}f}")
        for mean, spread in zip(cell.means(), cell.deviations(), strict=True)
    ]
    return " / ".join(texts) + (f" ({len(cell.values)} of {seeds})" if 1 < seeds != len(cell.values) else "")


def numbers(value: Value, places: int) -> str:
    """With more digits where so few would hide some."""
    return " / ".join(f"{x:.{places}f}" if round(x, places) == x else f"{x:g}" for x in value)


def reached(cell: Cell, theirs: Value | None, bound: float) -> bool:
    """No number of ours, error or attack success, is more than `bound` above the paper's."""
    if not cell.values or theirs is None:
        return False
    return all(mine <= other + bound + 1e-9 for mine, other in zip(cell.means(), theirs, strict=True))


def difference(cell: Cell, theirs: Value | None, places: int) -> str:
    if not cell.values or theirs is None:
        return "-"
    apart = [0.0 if mine == other else mine - other for mine, other in zip(cell.means(), theirs, strict=True)]
    return " / ".join(f"{x:+.{places}f}" if math.isfinite(x) else f"{x:+g}" for x in apart)
