"""A table's cells in words and in pictures."""

import dataclasses
import math
from pathlib import Path

import pytest

from secureafl_ext.report import grids, markdown, plots
from secureafl_ext.report.grids import Cell


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
    assert markdown.reached(Cell(values), theirs, markdown.NEAR) == is_reached


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
    assert markdown.spelled(Cell(values), 3, seeds) == text
    assert markdown.difference(Cell(values), (0.17,), 3) == apart
    assert markdown.difference(Cell(values), None, 3) == "-"


def test_equal_infinities_do_not_differ():
    assert markdown.difference(Cell([(math.inf,)]), (math.inf,), 2) == "+0.00"


@pytest.fixture
def drawn(monkeypatch) -> list:
    """The figures that would be saved."""
    figures = []
    monkeypatch.setattr(plots, "_save", lambda path, figure: figures.append(figure))
    return figures


def test_a_heat_map_is_coloured_by_the_worst_number_and_has_no_colour_for_a_gap(drawn):
    cells = {("a", "x"): Cell([(0.2, 0.75)]), ("a", "y"): Cell([]), ("b", "x"): Cell([(math.inf,)])}
    cells["b", "y"] = Cell([(0.25,), (0.75,)])
    part = grids.Part("", ["a", "b"], ["x", "y"], cells, {("a", "y"): (0.125,)})
    plots.heat(Path("unused.png"), "a heading", [part])
    ours, theirs = drawn[0].axes
    assert (ours.get_title(), theirs.get_title()) == ("ours", "paper")
    assert ours.images[0].get_array().filled(-1).tolist() == [[0.75, -1], [1.0, 0.5]]
    assert theirs.images[0].get_array().filled(-1).tolist() == [[-1, 0.125], [-1, -1]]
    assert [text.get_text() for text in ours.texts] == ["0.20\n0.75", "-", "inf", "0.50"]
    plots.heat(Path("unused.png"), "a heading", [dataclasses.replace(part, paper={})])
    assert len(drawn[1].axes) == 1


def test_curves_have_their_deviations_and_leave_out_what_is_not_there(drawn):
    cells = {("a", "5"): Cell([(0.25, 0.5), (0.75, 0.5)]), ("a", "7"): Cell([]), ("a", "9"): Cell([(math.inf, 1.0)])}
    part = grids.Part("pgd", ["a"], ["5", "7", "9"], cells, {("a", "9"): (0.125,)})
    plots.curves(Path("unused.png"), "a heading", [part])
    [panel] = drawn[0].axes
    error, success = panel.containers
    assert error.lines[0].get_xydata().tolist() == [[0, 0.5]]
    assert success.lines[0].get_xydata().tolist() == [[0, 0.5], [2, 1.0]]
    [bar] = error.lines[2][0].get_segments()
    deviation = math.sqrt(2) / 4  # of 0.25 and 0.75, as a sample
    assert bar[:, 1].tolist() == pytest.approx([0.5 - deviation, 0.5 + deviation])
    paper_line = next(line for line in panel.lines if line.get_label() == "a, paper")
    assert paper_line.get_ydata()[2] == 0.125 and math.isnan(paper_line.get_ydata()[0])
    assert [label.get_text() for label in panel.get_xticklabels()] == ["5", "7", "9"]
