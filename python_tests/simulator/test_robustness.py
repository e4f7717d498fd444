"""`secureafl robustness`, around a loop that only pretends to learn."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib import colormaps
from pretended import BACKDOORS, PNG, Pretended, failure

from secureafl_ext.attacks import ATTACKS
from secureafl_ext.cli import main
from secureafl_ext.defenses import DEFENSES
from secureafl_ext.defenses.tuned import TUNED, TUNED_FASHION_MNIST
from secureafl_ext.redteam.found import worst_found
from secureafl_ext.report import plots, robustness
from secureafl_ext.sim import results
from secureafl_ext.sim.options import prepare
from secureafl_ext.sim.outcome import Outcome, Point
from secureafl_ext.sim.settings import Settings

FASHION = "fashion-mnist"
FILE = f"robustness-{FASHION}"


@pytest.fixture
def pretended(pretended) -> Pretended:
    """kardam ends at 0.4, the others at 0.2, 0.1 more with seed 1; late numbers are 0.01 higher."""

    def error(settings: Settings) -> float:
        return (0.4 if settings.defense == "kardam" else 0.2) + 0.1 * (settings.seed == 1)

    pretended.error = error
    pretended.asr = lambda settings: 0.6 if settings.attack in BACKDOORS else None
    pretended.more = lambda settings: {
        "late_error": error(settings) + 0.01,
        "late_asr": 0.61 if settings.attack in BACKDOORS else None,
        "worst_class_error": 0.8,
    }
    return pretended


@pytest.fixture
def drawn(monkeypatch) -> dict:
    """The figures by the name of their file."""
    figures, save = {}, plots.Figure.savefig

    def keep(figure, path, **options):
        figures[Path(path).name] = figure
        save(figure, path, **options)

    monkeypatch.setattr(plots.Figure, "savefig", keep)
    return figures


def call(line: str) -> int:
    return main.main(["robustness", *line.split()])


def parts(path: str) -> dict[str, dict[str, dict[str, str]]]:
    """Title -> row -> column -> text, of the tables of a Markdown file."""
    made: dict[str, dict[str, dict[str, str]]] = {}
    title, heads = "", []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("## "):
            title, heads = line[3:], []
        elif line.startswith("|") and not heads:
            heads = cells
        elif line.startswith("|") and cells[0] != "---":
            made.setdefault(title, {})[cells[0]] = dict(zip(heads[1:], cells[1:], strict=True))
    return made


def crafted(out: str, error: float, seeds: tuple[int, ...] = (0, 1), **changed: object) -> None:
    """Runs of the attack of the search in a results file."""
    base = Settings(dataset=FASHION, attack="crafted", defense="kardam")
    for seed in seeds:
        (settings,) = prepare([replace(base, seed=seed, **changed)])
        summary = {"error": error, "asr": None, "late_error": error, "late_asr": None, "seconds": 1.0}
        ended = Outcome(settings, [Point(settings.rounds, error, None)], summary | {"worst_class_error": 0.99})
        results.append(Path(out) / results.NAME, results.record(ended))


def test_it_runs_every_registered_attack_against_every_defense(pretended):
    assert call("--seeds 1 --rounds 7 --out x") == 0
    attacks = [name for name in ATTACKS if name != "crafted"]
    ran = [(settings.defense, settings.attack) for settings in pretended.ran]
    assert {defense for defense, _ in ran} == set(DEFENSES) - robustness.ABLATIONS
    assert {"secureafl", "secureafl-kin", "kardam"} <= {defense for defense, _ in ran}
    assert ran == [(defense, attack) for defense in dict.fromkeys(d for d, _ in ran) for attack in attacks]
    options = {settings.defense: settings.defense_options for settings in pretended.ran}
    tuned = {**TUNED, **TUNED_FASHION_MNIST}
    assert {name: value for name, value in options.items() if value} == {
        name: value for name, value in tuned.items() if name in options
    }
    assert Path(f"x/robustness-rounds=7-{FASHION}.png").read_bytes().startswith(PNG)


def test_a_plug_in_appears_by_itself(pretended):
    ATTACKS.add("mine", ATTACKS["gaussian"])
    try:
        assert call("--seeds 1 --defense kardam --out x") == 0
    finally:
        ATTACKS.remove("mine")
    assert pretended.ran[-1].attack == "mine"


def test_the_grids_have_end_late_and_worst_class(pretended):
    assert call("--seeds 2 --only defense=kardam,zeno++ --only attack=none,scaling --out x") == 0
    made = parts(f"x/{FILE}.md")
    end, late, by_class = made.values()
    assert list(made) == [
        "end of the run",
        "second half of the run (mean)",
        "class with the highest error, end of the run",
    ]
    assert end["kardam"] == {"none": "0.450 ± 0.071", "scaling": "0.450 ± 0.071 / 0.600 ± 0.000"}
    assert late["kardam"]["scaling"] == "0.460 ± 0.071 / 0.610 ± 0.000"
    assert late["zeno++"]["none"] == "**0.260 ± 0.071**"
    assert by_class["kardam"] == {"none": "0.800 ± 0.000", "scaling": "0.800 ± 0.000"}
    assert "paper" not in Path(f"x/{FILE}.md").read_text(encoding="utf-8")


def test_it_continues_and_fills_the_gaps(pretended, capsys):
    command = "--seeds 1 --only defense=kardam,zeno++ --only attack=none,gaussian --out x"
    pretended.stop_after = 3
    assert call(command) == 130
    assert "continues from there" in capsys.readouterr().err
    assert parts(f"x/{FILE}.md")["end of the run"]["zeno++"] == {"none": "**0.200**", "gaussian": "-"}
    pretended.stop_after = None
    assert call(command) == 0
    assert len(pretended.ran) == 4
    assert parts(f"x/{FILE}.md")["end of the run"]["zeno++"]["gaussian"] == "**0.200**"


def test_where_the_data_lay_makes_no_difference(pretended):
    """Runs that were recorded with another --data-dir are not repeated, and are in the table."""
    command = "--seeds 1 --only defense=kardam --only attack=none --out x"
    assert call(f"{command} --data-dir elsewhere") == 0
    crafted("x", 0.7, seeds=(0,), attack_options={"strength": 5.0}, data_dir="elsewhere")
    assert call(command) == 0
    assert len(pretended.ran) == 1
    assert parts(f"x/{FILE}.md")["end of the run"]["kardam"] == {"none": "0.400", robustness.WORST_FOUND: "0.700"}


def test_the_last_column_is_the_worst_attack_that_was_found(pretended, drawn):
    command = "--seeds 2 --only defense=kardam,zeno++ --only attack=none,gaussian --out x"
    assert call(command) == 0
    assert robustness.WORST_FOUND not in parts(f"x/{FILE}.md")["end of the run"]["kardam"]
    crafted("x", 0.5, attack_options={"strength": 3.0})
    crafted("x", 0.7, attack_options={"strength": 5.0}, flood=0.5)
    crafted("x", 0.95, seeds=(0,), attack_options={"strength": 7.0})  # one seed is missing
    crafted("x", 0.96, attack_options={"strength": 8.0}, malicious=0.3)  # another setting
    crafted("x", 0.97, attack_options={"strength": 9.0}, holdout=0.25)  # not the test set
    assert call(command) == 0
    for title, value in zip(parts(f"x/{FILE}.md"), ("0.700 ± 0.000", "0.700 ± 0.000", "0.990 ± 0.000"), strict=True):
        made = parts(f"x/{FILE}.md")[title]
        assert list(made["kardam"])[-1] == robustness.WORST_FOUND
        assert (made["kardam"][robustness.WORST_FOUND], made["zeno++"][robustness.WORST_FOUND]) == (value, "-")
    assert "- not searched: `secureafl redteam" in Path(f"x/{FILE}.md").read_text(encoding="utf-8")
    assert len(pretended.ran) == 8
    # The picture: zeno++ is better and stands on top; the last column of kardam has the number of the search.
    axes = drawn[f"{FILE}.png"].axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["zeno++", "kardam"]
    assert [label.get_text() for label in axes.get_xticklabels()][-1] == robustness.WORST_FOUND
    shades = np.ma.filled(axes.images[0].get_array(), np.nan)
    np.testing.assert_allclose(shades, [[0.25, 0.25, np.nan], [0.45, 0.45, 0.7]])


def test_the_results_of_the_search_may_be_in_another_folder(pretended):
    crafted("found", 0.7, seeds=(0,), attack_options={"strength": 5.0})
    assert call("--seeds 1 --defense kardam --attack none --redteam found --out x") == 0
    assert parts(f"x/{FILE}.md")["end of the run"]["kardam"] == {"none": "0.400", robustness.WORST_FOUND: "0.700"}


def test_the_worst_is_by_late_error_above_the_clean_one_or_by_success(tmp_path):
    base = Settings(dataset=FASHION, attack="crafted", defense="kardam")

    def ended(strength: float, late: float, success: float | None) -> results.Record:
        (settings,) = prepare([replace(base, attack_options={"strength": strength})])
        summary = {"error": 0.0, "asr": 0.0, "late_error": late, "late_asr": success, "seconds": 1.0}
        return results.record(Outcome(settings, [Point(1, 0.0, None)], summary))

    records = [ended(1.0, 0.5, None), ended(2.0, 0.1, 0.45)]
    for clean, strength in ((0.0, 1.0), (0.2, 2.0)):
        (worst,) = worst_found(records, base, 1, clean)
        assert worst.settings.attack_options["strength"] == strength
    assert worst_found([], base, 1, 0.0) == []


def test_a_backdoor_colours_its_cell_and_grey_keeps_the_order(pretended, drawn):
    assert call("--seeds 1 --defense kardam --only attack=none,scaling --out x") == 0
    axes = drawn[f"{FILE}.png"].axes[0]
    np.testing.assert_allclose(axes.images[0].get_array(), [[0.4, 0.6]])
    assert sorted(text.get_text() for text in axes.texts) == ["0.40", "0.60"]
    colors = colormaps[robustness.GREY_SAFE.colors](np.linspace(0, 1, 50))[:, :3]
    grey = colors @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(grey) < 0).all() and grey[0] - grey[-1] > 0.6


def test_other_settings_go_to_another_file_and_a_regression_has_no_classes(pretended):
    assert call("--seeds 1 --defense kardam --attack none --malicious 0.3 --out x") == 0
    assert call("--seeds 1 --defense kardam --dataset udacity --out x") == 0
    assert sorted(path.name for path in Path("x").glob("*.md")) == [
        f"robustness-malicious=0.3-{FASHION}.md",
        "robustness-udacity.md",
    ]
    made = parts("x/robustness-udacity.md")
    assert len(made) == 2 and "label-flip" not in made["end of the run"]["kardam"]
    assert main.main(["report", "x"]) == 0
    page = Path("x/report.html").read_text(encoding="utf-8")
    assert "every defense under every attack" in page and page.count("data:image/png") == 2


def test_mistakes_cost_one_line_and_no_run(pretended, capsys):
    words = {
        "--only lr=1,2": "only: robustness does not vary 'lr'; choose from defense, attack",
        "--seeds 0": "seeds must be 1 or more, got 0",
        "--dataset nowhere": "unknown dataset 'nowhere'",
        "--redteam nowhere": "redteam must be a folder with a results.jsonl, got 'nowhere'",
    }
    for flags, text in words.items():
        assert text in failure(capsys, "robustness", *flags.split())
    assert pretended.ran == []
