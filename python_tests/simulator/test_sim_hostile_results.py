"""A results file of any content: it steers neither the terminal nor a picture, and an error is one line."""

import json

import pytest
from matplotlib.image import imread
from outcomes import outcome, written

from secureafl_ext.cli import main
from secureafl_ext.sim import results

NAMES = [
    "[/]",
    "[bold]x[/bold]",
    "[link=https://example.org]x[/link]",
    ":smile:",
    "\x1b]0;title\x07",
    "\x1b[2J",
    "\u202eabc",
    "\u2028",
    "\x9b2J",
    "$\\frac$",
    "$x$",
    "_hidden",
    "x" * 1_000,
]
LARGE = "9" * 400


def forged(folder, **settings):
    """A run whose line has these settings, whatever they are."""
    path = folder / results.NAME
    written(path, outcome(dataset="fashion-mnist"))
    line = json.loads(path.read_text())
    line["settings"] |= settings
    path.write_text(json.dumps(line) + "\n")
    return path


def called(capsys, *arguments) -> tuple[int, str, str]:
    """The exit code and what was written, which must steer no terminal."""
    code = main.main([str(each) for each in arguments])
    written = capsys.readouterr()
    for line in (written.out + written.err).split("\n"):
        assert line.isprintable(), line
    return code, written.out, written.err


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("setting", ["dataset", "attack", "defense"])
def test_names_are_shown_as_they_are_or_with_blanks(tmp_path, capsys, monkeypatch, setting, name):
    monkeypatch.setenv("COLUMNS", "2000")
    forged(tmp_path, **{setting: name})
    code, out, err = called(capsys, "results", tmp_path)
    assert code == 0 and not err
    assert "".join(c if c.isprintable() else " " for c in name).strip() in out


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("setting", ["dataset", "attack", "defense"])
@pytest.mark.filterwarnings("ignore:.*starts with '_'")
@pytest.mark.filterwarnings("ignore:.*constrained_layout not applied")
def test_names_in_a_picture_are_no_formulas(tmp_path, capsys, setting, name):
    forged(tmp_path, **{setting: name})
    assert called(capsys, "curves", tmp_path)[0] == 0
    assert imread(tmp_path / "curves.png").size


@pytest.mark.parametrize("old", ['"error": 0.9', '"error": 0.4', '"round": 10', '"rounds": 20000', '"malicious": 0.2'])
@pytest.mark.parametrize("command", ["results", "curves"])
def test_a_number_that_no_float_can_hold_is_refused(tmp_path, capsys, command, old):
    path = forged(tmp_path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, f"{old.partition(':')[0]}: {LARGE}", 1))
    code, out, err = called(capsys, command, tmp_path)
    assert (code, out) == (2, "")
    assert "line 1 was not written by this version" in err and "must have at most 64 bits, got 1329" in err


@pytest.mark.parametrize("command", ["results", "curves"])
def test_the_largest_seed_and_round_are_read(tmp_path, capsys, command):
    forged(tmp_path, seed=2**64 - 1, rounds=2**64 - 1)
    assert called(capsys, command, tmp_path)[0] == 0


@pytest.mark.parametrize("name", [*NAMES, "one\nsecureafl: two"])
def test_the_name_of_a_setting_is_one_line_of_the_error(tmp_path, capsys, name):
    forged(tmp_path, **{name: 1})
    code, out, err = called(capsys, "results", tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1) and "unexpected keyword argument" in err
    assert len(err) < 500 + len(str(tmp_path))


def test_warnings_are_printed_as_one_line_too(tmp_path, capsys):
    folder = tmp_path / "\x1b[2J"
    path = forged(folder)
    path.write_text(path.read_text() + "{torn")
    code, _, err = called(capsys, "results", folder)
    assert code == 0 and err.startswith("secureafl: ") and "line 2 is cut short and is left out" in err
