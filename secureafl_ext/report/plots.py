"""PNGs of the paper's tables: heat maps for tables, curves for figures."""

import math
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure  # draws with Agg: needs no display
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "matplotlib is missing; it draws the plots: pip install 'secureafl_ext[sim]'", name="matplotlib"
    ) from error

from . import labels, style
from .paper import OUR_RULE
from .paper_numbers import Numbers
from .tables import Cell, Grid, TablePlan


class Look(NamedTuple):
    """Colours of a heat map."""

    colors: str  # name of a colour map
    alpha: float
    dark: float  # cells above this value are too dark for black text


COLOURED = Look("RdYlGn_r", 0.8, 0.93)
ACROSS = 3  # panels of curves side by side
ERROR_STYLE, SUCCESS_STYLE, PAPER_STYLE = "o-", "o--", "x:"


def draw(path: Path, plan: TablePlan, grids: list[Grid]) -> None:
    """The plot of a table as a PNG."""
    figure = curves(plan, grids) if plan.table.curves else heat_maps(plan, grids)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def heat_maps(plan: TablePlan, grids: list[Grid]) -> Figure:
    """Our numbers, and below them the paper's for the rows that the paper has. A cell's worst number colours it."""
    panels: list[tuple[str, Grid, list[str], Numbers]] = []
    for grid in grids:
        ours = {key: cell.means() for key, cell in grid.cells.items() if cell.values}
        panels.append((f"{grid.title} ours".strip(), grid, grid.rows, ours))
        if grid.paper_rows():
            panels.append((f"{grid.title} paper".strip(), grid, grid.paper_rows(), grid.paper))
    width = max(7.0, 2.6 + 0.75 * max(len(grid.columns) for grid in grids))
    heights = [len(rows) + 2.5 for _, _, rows, _ in panels]
    figure = blank_figure(plan, width, 0.8 + 0.42 * sum(heights))
    all_axes = figure.subplots(len(panels), squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0].tolist()
    for axes, (title, grid, rows, values) in zip(all_axes, panels, strict=True):
        axes.set_title(title)
        image = heat_map(axes, rows, grid.columns, values)
        axes.set_xlabel(labels.axis(plan.column_axis))
        axes.set_ylabel(labels.axis(plan.row_axis))
    both = any(len(value) > 1 for _, _, _, values in panels for value in values.values())
    unit = labels.measure(plan) + (" or attack success, whichever is larger" if both else "")
    figure.colorbar(image, ax=all_axes, label=unit, shrink=0.6, extend="max", pad=0.02)
    return figure


def heat_map(axes: Axes, rows: list[str], columns: list[str], values: Numbers, look: Look = COLOURED) -> Any:
    known = [[values.get((row, column)) for column in columns] for row in rows]
    # One scale for all plots, so that they can be compared. Above 1, and for runs that diverged: the last colour.
    shades = [[math.nan if value is None else min(max(value), 1.0) for value in line] for line in known]
    image = axes.imshow(shades, vmin=0, vmax=1, cmap=look.colors, alpha=look.alpha, aspect="auto")
    axes.set_xticks(range(len(columns)), columns, rotation=30, ha="right")
    axes.set_yticks(range(len(rows)), rows)
    for y, line in enumerate(known):
        for x, value in enumerate(line):
            text = "-" if value is None else "\n".join(map(_short, value))
            color = "white" if shades[y][x] > look.dark else "black"
            axes.text(x, y, text, color=color, ha="center", va="center", fontsize="small", linespacing=0.95)
    if ours := style.highlighted(rows):
        y = rows.index(ours)
        axes.get_yticklabels()[y].set(color=style.HIGHLIGHT, fontweight="bold")
        size = len(columns), 1
        frame = Rectangle((-0.5, y - 0.5), *size, fill=False, edgecolor=style.HIGHLIGHT, linewidth=3, clip_on=False)
        axes.add_patch(frame)
    return image


def curves(plan: TablePlan, grids: list[Grid]) -> Figure:
    """A panel per grid, a curve per row over the columns, with standard deviations; one legend for all panels."""
    across = min(len(grids), ACROSS)
    down = -(-len(grids) // across)
    figure = blank_figure(plan, max(7.0, 4.0 * across), 1.6 + 3.2 * down)
    panels = figure.subplots(down, across, squeeze=False).flatten().tolist()
    for axes in panels[len(grids) :]:
        axes.set_axis_off()
    for axes, grid in zip(panels, grids, strict=False):
        for i, row in enumerate(grid.rows):
            _curve(axes, [grid.cells[row, column] for column in grid.columns], row, style.color(row, i))
            theirs = [grid.paper.get((row, column), (math.nan,))[0] for column in grid.columns]
            if not all(map(math.isnan, theirs)):
                axes.plot(range(len(theirs)), theirs, PAPER_STYLE, color=style.color(row, i))
        axes.set_title(grid.title)
        axes.set_xticks(range(len(grid.columns)), grid.columns)  # evenly spaced, whatever the numbers are
        axes.set_xlim(-0.3, len(grid.columns) - 0.7)
        axes.set_xlabel(labels.axis(plan.column_axis))
        axes.set_ylabel(_measures(plan, grid))
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    handles = _legend(plan, grids)
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 3 if across < 3 else 6))
    return figure


def _curve(axes: Axes, cells: list[Cell], name: str, color: str) -> None:
    """The error as a solid line, the attack success as a dashed one. Runs that diverged have no point."""
    shown = [(x, cell.means(), cell.deviations()) for x, cell in enumerate(cells) if cell.values]
    look: dict[str, Any] = {
        "color": color,
        "linewidth": style.line_width(name),
        "zorder": 10 if name == OUR_RULE else 2,
    }
    for k, line in enumerate((ERROR_STYLE, SUCCESS_STYLE)):
        points = [(x, means[k], spreads[k] or 0.0) for x, means, spreads in shown if len(means) > k]
        points = [point for point in points if math.isfinite(point[1])]
        if points:
            x, y, spread = zip(*points, strict=True)
            axes.errorbar(x, y, spread, fmt=line, capsize=2, markersize=3.5, **look)


def _legend(plan: TablePlan, grids: list[Grid]) -> list[Line2D]:
    """A line per row, then what the line styles mean. A single row needs no name."""
    rows = list(dict.fromkeys(row for grid in grids for row in grid.rows))
    handles = [
        Line2D([], [], color=style.color(row, i), linewidth=style.line_width(row), label=row)
        for i, row in enumerate(rows)
        if len(rows) > 1
    ]
    styles = [(ERROR_STYLE, labels.measure(plan))]
    if any(_has_success(grid) for grid in grids):
        styles.append((SUCCESS_STYLE, "attack success"))
    if any(grid.paper for grid in grids):
        styles.append((PAPER_STYLE, f"{labels.measure(plan)}, paper"))
    for line, name in styles if len(styles) > 1 or not handles else []:
        handles.append(Line2D([], [], color="black", marker=line[0], linestyle=line[1:], markersize=4, label=name))
    return handles


def _measures(plan: TablePlan, grid: Grid) -> str:
    return labels.measure(plan) + (", attack success" if _has_success(grid) else "")


def _has_success(grid: Grid) -> bool:
    return any(len(value) > 1 for cell in grid.cells.values() for value in cell.values)


def _short(number: float) -> str:
    """Text that fits into a cell of a heat map."""
    return f"{number:.2f}" if number < 100 or math.isinf(number) else f"{number:.0e}"


def blank_figure(plan: TablePlan, width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(fill(f"{plan.file}: {plan.table.about}", int(9 * width)))
    return figure
