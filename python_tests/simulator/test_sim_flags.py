"""Settings from flags and from a TOML file: every one of them can be given, and every mistake is named."""

import json
from dataclasses import fields, replace

import pytest
from pretended import failure

from secureafl_ext.cli import main, simulate
from secureafl_ext.sim import options, runner
from secureafl_ext.sim.settings import Settings

pytestmark = pytest.mark.usefixtures("pretended")
# A value of every setting that is not its default.
OTHER = {
    "dataset": "udacity",
    "data_dir": "elsewhere",
    "side": 14,
    "model": "resnet20",
    "clients": 7,
    "malicious": 0.25,
    "flood": 0.5,
    "attack": "gaussian",
    "attack_options": {"std": 3.5},
    "defense": "kardam",
    "defense_options": {"dampening": "inverse", "kept": 5},
    "rounds": 11,
    "batch": 3,
    "recipe": "augmented",
    "optimizer": "adam",
    "lr": 0.5,
    "decay": 0.25,
    "clip": 0.75,
    "augment": True,
    "schedule": "cosine",
    "calibrate": True,
    "delay": 4,
    "arrivals": "clock",
    "spread": 0.75,
    "partition": "dirichlet",
    "degree": 0.125,
    "concentration": 2.5,
    "trusted": 9,
    "holdout": 0.25,
    "quantile": 0.375,
    "memory": 1,
    "max_norm": 6.5,
    "trust": float("inf"),
    "evaluations": 2,
    "estimation_error": True,
    "seed": 8,
    "device": "cuda:1",
}


def flags(settings: dict[str, object]) -> list[str]:
    result = []
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, dict):
            result += [text for key, inner in value.items() for text in (flag.removesuffix("s"), f"{key}={inner}")]
        else:
            result += [flag] if value is True else [flag, str(value)]
    return result


def toml(settings: dict[str, object]) -> str:
    """Tables last, as TOML wants it."""
    plain = [f"{name} = {json.dumps(value)}" for name, value in settings.items() if not isinstance(value, dict)]
    tables = [
        "\n".join([f"[{name}]", *(f"{key} = {json.dumps(inner)}" for key, inner in value.items())])
        for name, value in settings.items()
        if isinstance(value, dict)
    ]
    return "\n".join(plain + tables).replace("Infinity", "inf")


def settings_of(*argv: str) -> Settings:
    return simulate.settings_of(main.parse_arguments(list(argv)))


def test_the_values_to_try_are_of_every_setting_and_no_default():
    assert list(OTHER) == [field.name for field in fields(Settings)] == list(options.HELP)
    assert all(getattr(Settings(), name) != value for name, value in OTHER.items())


@pytest.mark.parametrize("name", OTHER)
def test_every_setting_is_a_flag(name):
    assert settings_of("run", *flags({name: OTHER[name]})) == replace(Settings(), **{name: OTHER[name]})


@pytest.mark.parametrize("name", OTHER)
def test_every_setting_is_in_the_help(name, capsys):
    assert main.main(["run", "--help"]) == 0
    assert "--" + name.replace("_", "-") in capsys.readouterr().out


def test_a_toml_file_gives_every_setting(tmp_path):
    (tmp_path / "all.toml").write_text(toml(OTHER))
    assert settings_of("run", "--config", "all.toml") == Settings(**OTHER)


def test_flags_win_over_the_file_options_one_by_one(tmp_path):
    (tmp_path / "a.toml").write_text(toml({"rounds": 5, "delay": 2, "defense_options": {"kept": 5, "decay": 0.5}}))
    made = settings_of("run", "--config", "a.toml", "--rounds", "6", "--defense-option", "kept=7")
    assert made == Settings(rounds=6, delay=2, defense_options={"kept": 7, "decay": 0.5})


def test_whole_numbers_in_a_file_are_numbers_too(tmp_path):
    (tmp_path / "a.toml").write_text("lr = 1")
    lr = settings_of("run", "--config", "a.toml").lr
    assert (lr, type(lr)) == (1.0, float)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("round = 5", "unknown setting in a.toml: 'round'; choose from dataset, data_dir, side, model"),
        ("rounds = 5.5", "a.toml: rounds must be a whole number, got 5.5"),
        ("rounds = true", "a.toml: rounds must be a whole number, got True"),
        ("attack_options = 5", "a.toml: attack_options must be a table, got 5"),
        ("rounds = ", "a.toml is not TOML: "),
        ("[defense_options]\nradiu = 2", "'radiu'; choose from rule, trim"),
    ],
)
def test_mistakes_in_a_file_are_named(content, said, tmp_path, capsys):
    (tmp_path / "a.toml").write_text(content)
    assert said in failure(capsys, "run", "--config", "a.toml")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            "run --round 5",
            "unknown argument '--round'; choose from --untuned, --config, --out, --fresh, --any-code, --processes",
        ),
        ("run more", "unknown argument 'more'; choose from --untuned, --config"),
        ("run --rounds 5.5", "rounds must be a whole number, got '5.5'"),
        ("run --malicious 2", "malicious must be 0 to 1, got 2.0"),
        ("run --attack gausian", "unknown attack 'gausian'; choose from none, label-flip"),
        ("run --attack gaussian --attack-option sd=5", "unknown attack option of gaussian: 'sd'; choose from std"),
        ("run --attack gaussian --attack-option std=x", "attack option std must be a number, got 'x'"),
        ("run --attack gaussian --attack-option std", "an option must be NAME=VALUE, got 'std'"),
        ("run --attack-option std=5", "unknown attack option of none: 'std'; choose from nothing"),
        ("run --defense-option memory=2", "unknown defense option of secureafl: 'memory'"),
        ("run --dataset udacity --attack label-flip", "udacity has none"),
        ("run --config nowhere.toml", "nowhere.toml"),
        ("data --data-dir nowhere", "data_dir: no folder 'nowhere'"),
        ("compare --defenses kardan", "unknown defense 'kardan'; choose from async-sgd"),
        ("compare --defense kardam", "unknown argument '--defense'; choose from --defenses"),
        ("sweep malicius=1,2", "unknown setting 'malicius'; choose from dataset"),
        ("sweep malicious=0.1,x", "malicious must be a number, got 'x'"),
        ("sweep malicious=", "expected malicious=VALUE,VALUE,.., got 'malicious='"),
        ("sweep rounds", "expected rounds=VALUE,VALUE,.., got 'rounds'"),
        ("sweep", "required: NAME=VALUE"),
        ("list attack", "invalid choice: 'attack' (choose from"),
        ("", "required: COMMAND"),
    ],
)
def test_mistakes_on_the_line_are_named(argv, said, capsys, pretended):
    assert said in failure(capsys, *argv.split())
    assert pretended.ran == []


def test_what_the_loop_refuses_is_one_line_and_no_traceback(monkeypatch, capsys):
    def refuse(*_):
        raise FileNotFoundError("dataset 'cifar10' not found")

    monkeypatch.setattr(runner, "run_many", refuse)
    assert failure(capsys, "run").splitlines()[-1] == "secureafl: dataset 'cifar10' not found"
