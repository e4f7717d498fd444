"""secureafl sweep: a grid of runs, around a loop that only pretends to learn."""

import pytest
from pretended import PNG, failure, kept

from secureafl_ext.cli import main
from secureafl_ext.sim import options

pytestmark = pytest.mark.usefixtures("pretended")


def test_sweep_runs_the_grid_and_draws_it(tmp_path, pretended):
    argv = ["sweep", "malicious=0.1,.3", "--attack", "gaussian", "defense=kardam,secureafl", "--max-norm", "7"]
    assert main.main(argv) == 0
    assert [(s.malicious, s.defense) for s in pretended.ran] == [
        (0.1, "kardam"),
        (0.1, "secureafl"),
        (0.3, "kardam"),
        (0.3, "secureafl"),
    ]
    assert {(s.attack, s.defense, s.max_norm) for s in pretended.ran} == {
        ("gaussian", "kardam", 50.0),  # does not use it
        ("gaussian", "secureafl", 7.0),
    }
    assert (
        (tmp_path / "secureafl-results" / "sweep-malicious-defense-fashion-mnist-small-gaussian-max_norm=7.0.png")
        .read_bytes()
        .startswith(PNG)
    )


@pytest.mark.parametrize(
    ("axis", "values"),
    [
        ("max-norm=1,2.5", [1.0, 2.5]),
        ("memory=0,4", [0, 4]),
        ("estimation_error=true,false", [True, False]),
        ("partition=skewed,dirichlet", ["skewed", "dirichlet"]),
        ("attack_options.std=1,20.5", [1, 20.5]),
    ],
)
def test_any_setting_and_any_option_can_be_swept(axis, values, pretended):
    assert main.main(["sweep", axis, "--attack", "gaussian"]) == 0
    name = axis.partition("=")[0].replace("-", "_")
    assert [options.get(settings, name) for settings in pretended.ran] == values


def test_a_swept_option_leaves_the_others_as_given(pretended):
    argv = "sweep attack-options.factor=2,3 --attack scaling --attack-option share=0.25"
    assert main.main(argv.split()) == 0
    assert [s.attack_options for s in pretended.ran] == [{"share": 0.25, "factor": 2}, {"share": 0.25, "factor": 3}]


@pytest.mark.parametrize(
    ("text", "value"),
    [("5", 5), (".5", 0.5), ("1e3", 1000.0), ("true", True), ("std", "std"), ('"5"', "5"), ("inf", float("inf"))],
)
def test_an_option_has_the_value_that_toml_gives_it(text, value):
    name, got = options.option(f"some-name={text}")
    assert (name, got, type(got)) == ("some_name", value, type(value))


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("malicious=0.1,0.3 --attack gaussian --malicious 0.4", "malicious must not have a flag, the sweep varies it"),
        (
            "attack_options.std=1,2 --attack gaussian --attack-option std=5",
            "attack_options.std must not have a flag, the sweep varies it, got 5",
        ),
    ],
)
def test_a_flag_that_the_sweep_overrides_is_refused(argv, expected, capsys, pretended):
    assert expected in failure(capsys, "sweep", *argv.split())
    assert pretended.ran == []


def test_a_sweep_overrides_the_file(tmp_path, pretended):
    (tmp_path / "a.toml").write_text("seed = 5\nattack = 'gaussian'\n[attack_options]\nstd = 5.0\n")
    assert main.main(["sweep", "seed=1,2", "attack_options.std=1,2", "--config", str(tmp_path / "a.toml")]) == 0
    assert [(run.seed, run.attack_options["std"]) for run in pretended.ran] == [(1, 1), (1, 2), (2, 1), (2, 2)]


def test_equal_runs_of_a_grid_run_once(pretended):
    """The noise's strength is nothing to label flip."""
    assert main.main(["sweep", "attack=gaussian,label-flip", "attack_options.std=1,2"]) == 0
    assert [(s.attack, s.attack_options) for s in pretended.ran] == [
        ("gaussian", {"std": 1}),
        ("gaussian", {"std": 2}),
        ("label-flip", {}),
    ]


def test_an_interrupted_sweep_goes_on_where_it_stopped(pretended, capsys, tmp_path):
    argv = ["sweep", "delay=1,2,3,4", "--out", "here"]
    pretended.stop_after = 2
    assert main.main(argv) == 130
    last = capsys.readouterr().err.splitlines()[-1]
    assert "here/results.jsonl" in last
    assert "continues from there" in last

    pretended.stop_after = None
    assert main.main(argv) == 0
    assert [settings.delay for settings in pretended.ran] == [1, 2, 3, 4]
    assert [line["settings"]["delay"] for line in kept("here")] == [1, 2, 3, 4]
    said = capsys.readouterr()
    assert "2 of 4 runs" in said.err
    assert len([line for line in said.out.splitlines() if "0.500" in line]) == 4

    assert main.main(argv) == 0
    assert main.main([*argv, "--seed", "1"]) == 0
    assert [(settings.delay, settings.seed) for settings in pretended.ran[4:]] == [(d, 1) for d in (1, 2, 3, 4)]
