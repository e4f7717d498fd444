"""What is shown of runs: tables, curves, and the sentence below them."""

import math
import re

import pytest
from outcomes import outcome
from pretended import PNG

from secureafl_ext.report import console


def rows(table) -> list[list[str]]:
    return [list(map(str, row)) for row in zip(*(column.cells for column in table.columns), strict=True)]


def test_the_table_has_a_row_per_run_and_no_empty_column():
    clean, backdoor = outcome(errors=(0.1234,)), outcome(errors=(math.inf,), asr=0.5, attack="scaling", memory=2)
    made = console.table([clean, backdoor], ["attack", "memory"])
    assert [column.header for column in made.columns] == ["attack", "memory", "error", "attack\nsuccess", "rounds/s"]
    assert rows(made) == [["none", "3", "0.123", "-", "10"], ["scaling", "2", "inf", "0.500", "10"]]
    assert "attack\nsuccess" not in [column.header for column in console.table([clean], ["attack"]).columns]


def test_a_table_in_a_file_is_cut_nowhere(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    console.print_table([outcome(attack="gaussian", defense="async-defender")], ["dataset", "attack", "defense"])
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("fashion-mnist-small", "gaussian", "async-defender", "0.400"))


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_table_on_a_terminal_is_cut_nowhere(width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("FORCE_COLOR", "1")
    run = outcome(asr=0.125, attack="gaussian", defense="secureafl-paper", dataset="fashion-mnist")
    shares = {"accepted": 0.5, "rejected_honest": 0.25, "rejected_malicious": 0.75, "precision": 0.625}
    shares |= {"late_error": 0.3125, "late_asr": 0.4375, "worst_class_error": 0.5625}
    shares |= {"left_out_precision": 0.9375, "left_out_recall": 0.1875}
    run.summary.update(shares | {"estimation_error": 0.875, "rounds_per_second": 1234.0})
    console.print_table([run], ["attack", "defense"])
    printed = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    heads = [part for column in console.COLUMNS for part in column.heading.split("\n")]
    numbers = "0.125", "0.312", "0.438", "0.562", "0.62", "0.875", "1234", "0.94", "0.19"
    for text in (*heads, "gaussian", "secureafl-paper", *numbers):
        assert text in printed, text
    assert "…" not in printed and max(map(len, printed.splitlines())) <= width


def test_a_diverged_run_is_said_with_its_reason():
    def note(error=0.9, defense="async-sgd", accepted: float | None = 0.75, diverged=True, **settings) -> list[str]:
        run = outcome(errors=(error,), defense=defense, **settings)
        run.summary.update(accepted=accepted, diverged=diverged)
        return console.divergence_notes([run], ["defense"])

    (text,) = note()
    assert text.startswith("Diverged: async-sgd: the test error 0.900 is no better than that of a constant answer.")
    assert text.endswith("25.0% of the updates were not finite (NaN or inf) and were rejected.")
    (text,) = note(accepted=1.0)
    assert "rejected" not in text
    (text,) = note(defense="kardam")
    assert "25.0% of the updates were rejected; every defense rejects updates that are not finite." in text
    (text,) = note(error=math.inf, dataset="udacity")
    assert "the RMSE inf is infinite" in text
    assert note(diverged=False) == []


def lines(path) -> int:
    assert path.read_bytes().startswith(PNG)
    return len(drawn[path].axes[0].lines)


drawn = {}


@pytest.fixture(autouse=True)
def keep_figures(monkeypatch):
    save = console.Figure.savefig

    def keep(figure, path, **options):
        drawn[path] = figure
        save(figure, path, **options)

    monkeypatch.setattr(console.Figure, "savefig", keep)


def test_curves_draw_every_run_with_what_the_loop_measured(tmp_path):
    path = tmp_path / "new" / "curves.png"
    lost = outcome(errors=(0.9, math.inf), attack="gaussian", defense="kardam")
    console.curves(path, [outcome(asr=0.5, attack="scaling"), lost], ["attack", "defense"])
    assert lines(path) == 2
    above, below = drawn[path].axes
    assert [list(values) for values in above.lines[0].get_data()] == [[10, 20], [0.9, 0.4]]
    assert list(below.lines[0].get_ydata()) == [0.5, 0.5]
    assert len(below.lines) == 1
    assert {line.get_linestyle() for line in above.lines} == {"-"}
    assert [line.get_label() for line in above.lines] == ["scaling secureafl", "gaussian kardam (diverged)"]


def test_a_run_without_attack_is_dashed(tmp_path):
    path = tmp_path / "curves.png"
    console.curves(path, [outcome(attack="gaussian"), outcome()], ["attack"])
    assert [line.get_linestyle() for line in drawn[path].axes[0].lines] == ["-", "--"]


def test_a_sweep_is_drawn_over_its_first_number_with_a_line_per_rest(tmp_path):
    path = tmp_path / "sweep.png"
    many = [
        outcome(errors=(clients / 100 + lr,), defense=defense, clients=clients, lr=lr)
        for defense in ("kardam", "secureafl")
        for clients in (10, 20, 30)
        for lr in (0.1, 0.2)
    ]
    console.against(path, many, ["defense", "clients", "lr"])
    assert lines(path) == 4
    (panel,) = drawn[path].axes
    assert panel.get_xlabel() == "clients"
    line = {line.get_label(): line for line in panel.lines}["kardam lr=0.2"]
    assert list(line.get_xdata()) == [10, 20, 30]
    assert list(line.get_ydata()) == pytest.approx([0.3, 0.4, 0.5])


def test_a_sweep_of_names_is_drawn_without_lines_between_them(tmp_path):
    path = tmp_path / "sweep.png"
    console.against(path, [outcome(defense=name) for name in ("kardam", "secureafl")], ["defense"])
    assert lines(path) == 1
    assert drawn[path].axes[0].lines[0].get_linestyle() == "None"


def test_runs_that_an_option_does_not_concern_are_no_points(tmp_path):
    path = tmp_path / "sweep.png"
    strong = outcome(attack="gaussian", attack_options={"std": 5.0})
    console.against(path, [outcome(), strong], ["attack", "attack_options.std"])
    assert [list(line.get_xdata()) for line in drawn[path].axes[0].lines] == [[5.0]]


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d\.\d+", text)]


def test_the_sentence_is_made_of_the_numbers_best_first():
    def told(ours: float, theirs: float, clean: float) -> str:
        under = {"attack": "gaussian", "clients": 40, "malicious": 0.1}
        return console.sentence(
            [
                outcome(errors=(theirs,), defense="kardam", **under),
                outcome(errors=(ours,), **under),
                outcome(errors=(clean,), defense="async-sgd", clients=40),
            ]
        )

    text = told(0.25, 0.75, 0.125)
    assert "gaussian by 4 of 40 clients" in text
    assert numbers(text) == [0.25, 0.75, 0.125]
    assert text.index("secureafl") < text.index("kardam") < text.index("without attack") < text.index("async-sgd")
    text = told(0.875, 0.5, 0.25)
    assert numbers(text) == [0.5, 0.875, 0.25]
    assert text.index("kardam") < text.index("secureafl")


def test_the_sentence_ranks_backdoors_by_both_harms():
    quiet = outcome(errors=(0.25,), asr=0.875, attack="scaling", defense="kardam")
    text = console.sentence([quiet, outcome(errors=(0.375,), asr=0.125, attack="scaling")])
    assert numbers(text) == [0.375, 0.125, 0.25, 0.875]


def test_the_sentence_speaks_of_rmse_and_of_no_attack_where_it_is_so():
    text = console.sentence([outcome(errors=(math.inf,), dataset="udacity")])
    assert text.startswith("Without attack the RMSE ends at inf with secureafl")
    assert text.count("attack") == 1
