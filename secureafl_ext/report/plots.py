"""PNGs of the paper's tables: heat maps for tables, curves for figures."""

import math
from pathlib import Path
from textwrap import fill

from .console import Axes, Figure, digits
from .grids import Cell, Part
from .paper import Numbers

STYLES = ("-", "--")  # test error, attack success


def heat(path: Path, heading: str, parts: list[Part]) -> None:
    """Ours, and the paper's beside it if there is one. The colour is that of the worst number in a cell."""
    kinds = ["ours", "paper"] if any(part.paper for part in parts) else ["ours"]
    wide, high = (max(len(names) for names in each) for each in zip(*((p.columns, p.rows) for p in parts), strict=True))
    size = max(7.0, (1.5 + 0.7 * wide) * len(kinds)), (1.6 + 0.5 * high) * len(parts)
    figure, panels = _sheet(heading, size, len(parts), len(kinds))
    for part, row in zip(parts, panels, strict=True):
        ours = {key: cell.means() for key, cell in part.cells.items() if cell.values}
        for panel, kind in zip(row, kinds, strict=True):
            panel.set_title(f"{part.title} {kind}".strip())
            _map(panel, part, ours if kind == "ours" else part.paper)
    _save(path, figure)


def _map(panel: Axes, part: Part, values: Numbers) -> None:
    known = [[values.get((row, column)) for column in part.columns] for row in part.rows]
    # One scale for all, so that pictures can be compared; what diverged has its last colour, and a gap has none.
    shades = [[math.nan if value is None else min(max(value), 1.0) for value in line] for line in known]
    panel.imshow(shades, vmin=0, vmax=1, cmap="RdYlGn_r", alpha=0.8, aspect="auto")
    panel.set_xticks(range(len(part.columns)), part.columns, rotation=40, ha="right")
    panel.set_yticks(range(len(part.rows)), part.rows)
    for y, line in enumerate(known):
        for x, value in enumerate(line):
            text = "-" if value is None else "\n".join(digits(number, 2) for number in value)
            panel.text(x, y, text, ha="center", va="center", fontsize="x-small")


def curves(path: Path, heading: str, parts: list[Part]) -> None:
    """A panel per part, a line per row over the columns, with deviations; attack success dashed, the paper's dotted."""
    if any(len(value) > 1 for part in parts for cell in part.cells.values() for value in cell.values):
        heading += " (dashed: attack success)"
    across = min(len(parts), 4)
    down = -(-len(parts) // across)
    figure, panels = _sheet(heading, (max(7.0, 4.2 * across), 0.8 + 3.6 * down), down, across)
    flat = [panel for row in panels for panel in row]
    for panel in flat[len(parts) :]:
        panel.set_axis_off()
    for panel, part in zip(flat, parts, strict=False):
        for i, row in enumerate(part.rows):
            _line(panel, [part.cells[row, column] for column in part.columns], f"C{i}", row)
            theirs = [part.paper.get((row, column), (math.nan,))[0] for column in part.columns]
            if not all(map(math.isnan, theirs)):
                panel.plot(range(len(theirs)), theirs, "x:", color=f"C{i}", label=f"{row}, paper")
        panel.set_title(part.title)
        panel.set_xticks(range(len(part.columns)), part.columns)  # side by side, whatever numbers they are
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    flat[0].legend(fontsize="x-small")
    _save(path, figure)


def _line(panel: Axes, cells: list[Cell], color: str, name: str) -> None:
    shown = [(x, cell.means(), cell.deviations()) for x, cell in enumerate(cells) if cell.values]
    for k, style in enumerate(STYLES):
        points = [(x, means[k], spreads[k] or 0.0) for x, means, spreads in shown if len(means) > k]
        points = [point for point in points if math.isfinite(point[1])]  # others cannot be drawn
        if points:
            x, y, spread = zip(*points, strict=True)
            label = name if k == 0 else None
            panel.errorbar(x, y, spread, fmt=f"o{style}", color=color, label=label, capsize=2, markersize=3)


def _sheet(heading: str, size: tuple[float, float], down: int, across: int) -> tuple[Figure, list[list[Axes]]]:
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(fill(heading, int(10 * size[0])))
    return figure, figure.subplots(down, across, squeeze=False).tolist()


def _save(path: Path, figure: Figure) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
