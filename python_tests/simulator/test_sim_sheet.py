"""The cells of a table as Markdown, heat map and curves."""

import dataclasses
import math

import pytest

from secureafl_ext.report import markdown, paper, plots, style, tables
from secureafl_ext.report.tables import Cell, Grid
from secureafl_ext.sim.settings import Settings


@pytest.mark.parametrize(
    ("values", "theirs", "is_reached"),
    [
        ([(0.15,)], (0.12,), True),
        ([(0.1501,)], (0.12,), False),
        ([(0.01,)], (0.12,), True),
        ([(0.10,), (0.20,)], (0.12,), True),
        ([(0.10,), (0.21,)], (0.12,), False),
        ([(0.1, 0.10)], (0.12, 0.07), True),
        ([(0.1, 0.11)], (0.12, 0.07), False),
        ([(0.2, 0.07)], (0.12, 0.07), False),
        ([(0.5,)], (math.inf,), True),
        ([(math.inf,)], (math.inf,), True),
        ([(math.inf,)], (0.17,), False),
        ([(math.nan,)], (0.17,), False),
        ([(0.1,)], None, False),
        ([], (0.12,), False),
    ],
)
def test_reached_is_at_most_three_hundredths_above_the_paper(values, theirs, is_reached):
    assert markdown.is_reached(Cell(values), theirs, markdown.TOLERANCE) == is_reached


@pytest.mark.parametrize(
    ("values", "text", "apart"),
    [
        ([(math.inf,)], "inf", "+inf"),
        ([(math.inf,), (0.2,)], "inf", "+inf"),
        ([(0.25,), (0.35,)], "0.300 ± 0.071", "+0.130"),
        ([(0.25,)], "0.250 (1 of 2)", "+0.080"),
        ([], "-", "-"),
    ],
)
def test_what_diverged_or_is_missing_is_said(values, text, apart):
    seeds = 1 if values == [(math.inf,)] else 2
    assert markdown.cell_text(Cell(values), 3, seeds) == text
    assert markdown.difference(Cell(values), (0.17,), 3) == apart
    assert markdown.difference(Cell(values), None, 3) == "-"


def test_equal_infinities_do_not_differ():
    assert markdown.difference(Cell([(math.inf,)]), (math.inf,), 2) == "+0.00"


@pytest.mark.parametrize(
    ("column", "best"),
    [
        ({"a": [(0.2,)], "b": [(0.1,)]}, ["b"]),
        ({"a": [(0.2, 0.1)], "b": [(0.1, 0.9)]}, ["a"]),
        ({"a": [(0.2001,)], "b": [(0.2,)], "c": [(0.3,)]}, ["a", "b"]),
        ({"a": [(0.1,), (0.3,)], "b": [(0.19,)]}, ["b"]),
        ({"a": [(math.inf,)], "b": [(0.9,)], "c": []}, ["b"]),
        ({"a": [(math.nan,)], "b": [(0.9,)]}, ["b"]),
        ({"a": [(math.inf,)], "b": [(math.inf,)]}, []),
        ({"a": [(0.9,)], "b": [(0.9,)]}, []),
        ({"a": [(0.1,)], "b": []}, []),
    ],
)
def test_the_best_rows_have_the_smallest_sum_of_error_and_attack_success(column, best):
    cells = {(row, "x"): Cell(values) for row, values in column.items()}
    assert markdown.best_rows(Grid("", list(column), ["x"], cells, {}), "x", 3) == best


def plan(name: str = "main") -> tables.TablePlan:
    return tables.plan_table(name, Settings(dataset="fashion-mnist"), {}, {}, 1)


def test_a_heat_map_is_coloured_by_the_worst_number_and_has_no_colour_for_a_gap():
    cells = {("a", "x"): Cell([(0.2, 0.75)]), ("a", "y"): Cell([]), ("b", "x"): Cell([(math.inf,)])}
    cells["b", "y"] = Cell([(0.25,), (0.75,)])
    grid = Grid("", ["a", "b"], ["x", "y"], cells, {("a", "y"): (0.125,), ("b", "x"): (4e21,)})
    ours, theirs, _ = plots.heat_maps(plan(), [grid]).axes
    assert (ours.get_title(), theirs.get_title()) == ("ours", "paper")
    assert ours.images[0].get_array().filled(-1).tolist() == [[0.75, -1], [1.0, 0.5]]
    assert theirs.images[0].get_array().filled(-1).tolist() == [[-1, 0.125], [1.0, -1]]
    assert [text.get_text() for text in ours.texts] == ["0.20\n0.75", "-", "inf", "0.50"]
    assert [text.get_text() for text in theirs.texts] == ["-", "0.12", "4e+21", "-"]
    assert len(plots.heat_maps(plan(), [dataclasses.replace(grid, paper={})]).axes) == 2  # ours and the colour bar


def test_the_papers_heat_map_has_no_row_for_our_rule_which_stands_out_in_ours():
    rows = ["secureafl", paper.OUR_RULE]
    cells = {(row, "none"): Cell([(0.1,)]) for row in rows}
    grid = Grid("", rows, ["none"], cells, {("secureafl", "none"): (0.12,)}, {paper.OUR_RULE: "secureafl"})
    figure = plots.heat_maps(plan(), [grid])
    ours, theirs, _ = figure.axes
    assert [label.get_text() for label in ours.get_yticklabels()] == rows
    assert [label.get_text() for label in theirs.get_yticklabels()] == ["secureafl"]
    assert [label.get_color() for label in ours.get_yticklabels()] == ["black", style.HIGHLIGHT]
    assert len(ours.patches) == 1 and len(theirs.patches) == 0


def test_every_method_has_a_colour_of_its_own_in_all_plots():
    colors = [style.color(name, i) for i, name in enumerate(reversed(paper.METHODS))]
    assert colors[::-1] == [style.color(name) for name in paper.METHODS]
    assert len(set(colors)) == len(paper.METHODS)
    assert colors[0] == style.HIGHLIGHT and style.HIGHLIGHT not in style.MUTED


@pytest.mark.parametrize("name", ["main", "alpha", "malicious", "estimation-error", "runtime-clients"])
def test_every_panel_has_axis_labels_and_a_figure_has_one_legend(name):
    cells = {(row, column): Cell([(0.25, 0.5)]) for row in ("a", paper.OUR_RULE) for column in ("1", "2")}
    grids = [Grid(title, ["a", paper.OUR_RULE], ["1", "2"], cells, {("a", "1"): (0.1,)}) for title in ("none", "pgd")]
    made = plan(name)
    figure = plots.curves(made, grids) if made.table.curves else plots.heat_maps(made, grids)
    panels = [axes for axes in figure.axes if axes.get_title()]
    assert len(panels) == (2 if made.table.curves else 4)
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in panels)
    bars = [axes for axes in figure.axes if axes not in panels]
    assert len(figure.legends) + len(bars) == 1
    assert not any(axes.get_legend() for axes in panels)
    if made.table.curves:
        [legend] = figure.legends
        texts = [text.get_text() for text in legend.get_texts()]
        assert texts[:2] == ["a", paper.OUR_RULE] and "attack success" in texts and len(texts) == 5
        ours = legend.get_lines()[1]
        drawn = [line for line in panels[0].lines if line.get_color() == style.HIGHLIGHT]
        assert ours.get_color() == style.HIGHLIGHT and drawn
        assert min(line.get_linewidth() for line in drawn) > style.line_width("a")


def test_curves_have_their_deviations_and_leave_out_missing_values():
    cells = {("a", "5"): Cell([(0.25, 0.5), (0.75, 0.5)]), ("a", "7"): Cell([]), ("a", "9"): Cell([(math.inf, 1.0)])}
    grid = Grid("pgd", ["a"], ["5", "7", "9"], cells, {("a", "9"): (0.125,)})
    [panel] = plots.curves(plan("delay"), [grid]).axes
    error, success = panel.containers
    assert error.lines[0].get_xydata().tolist() == [[0, 0.5]]
    assert success.lines[0].get_xydata().tolist() == [[0, 0.5], [2, 1.0]]
    [bar] = error.lines[2][0].get_segments()
    deviation = math.sqrt(2) / 4  # of 0.25 and 0.75, as a sample
    assert bar[:, 1].tolist() == pytest.approx([0.5 - deviation, 0.5 + deviation])
    [theirs] = [line for line in panel.lines if line.get_linestyle() == ":"]
    assert theirs.get_ydata()[2] == 0.125 and math.isnan(theirs.get_ydata()[0])
    assert [label.get_text() for label in panel.get_xticklabels()] == ["5", "7", "9"]
