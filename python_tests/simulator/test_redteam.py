"""`secureafl redteam`, around a loop that only pretends to learn."""

import json
import math
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from pretended import PNG, Pretended, failure

from secureafl_ext.attacks import ATTACKS
from secureafl_ext.cli import main, simulate, spelled
from secureafl_ext.redteam import search, space
from secureafl_ext.sim.options import get, options_of, prepare
from secureafl_ext.sim.outcome import Outcome, Point
from secureafl_ext.sim.settings import Settings

pytest.importorskip("optuna", reason="the extra `redteam` is not installed")


def strength(settings: Settings) -> float:
    return float(settings.attack_options.get("strength", 2.0))


@pytest.fixture
def pretended(pretended) -> Pretended:
    """The error has its highest value, 0.8, for two squads at a strength of 30; a backdoor has a success."""

    def error(settings: Settings) -> float:
        if settings.attack != "crafted":
            return 0.1
        far = abs(math.log10(strength(settings) / 30))
        return 0.1 + max(0.0, 0.5 - 0.2 * far) + 0.2 * (settings.attack_options.get("squads") == 2)

    def asr(settings: Settings) -> float | None:
        return 0.05 if "backdoor" in str(settings.attack_options.get("direction")) else None

    pretended.error, pretended.asr = error, asr
    pretended.more = lambda settings: {
        "late_error": error(settings) + 0.01,
        "late_asr": asr(settings),
        "worst_class_error": 0.9,
    }
    return pretended


def call(line: str) -> int:
    return main.main(["redteam", *line.split()])


def repeated(out: str) -> Settings:
    """The settings of the command that the output gives to repeat the worst attack."""
    (line,) = [line for line in out.splitlines() if line.startswith("To repeat it: ")]
    words = shlex.split(line.removeprefix("To repeat it: "))
    assert words[:2] == ["secureafl", "run"]
    arguments = main.parse_arguments(words[1:])
    (settings,) = prepare(simulate.tuned([simulate.settings_of(arguments)], arguments))
    return settings


def test_the_table_of_the_space_names_options_and_settings_that_exist():
    options = options_of("attack_options", space.ATTACK)
    for axis in space.AXES:
        field, dot, inner = axis.name.partition(".")
        assert (field == "attack_options" and inner in options) if dot else hasattr(Settings(), field), axis.name
        assert axis.choices or axis.low < axis.high
        default = ATTACKS[space.ATTACK].settings.get(axis.key)
        assert axis.has(default), f"{axis.key}: the search must be able to leave it out"


def test_every_known_attack_is_a_point_of_the_space():
    base = Settings(attack=space.ATTACK)
    starts = space.known(base, space.axes_for(base))
    assert len(starts) == len(space.KNOWN) >= 9
    study = search.make_study(0)
    for values in starts:
        study.enqueue_trial(values)
    for attack in space.KNOWN:
        settings = space.suggest(study.ask(), base, space.axes_for(base))
        values = space.defaults(settings) | {"flood": settings.flood}
        assert {key: values[key] for key in attack} == attack
        prepare([settings])


def test_an_option_that_is_given_or_excluded_is_not_searched():
    base = Settings(attack=space.ATTACK, attack_options={"direction": "dead", "squads": 1})
    axes = space.axes_for(base, ["flood"])
    assert {axis.key for axis in space.AXES} - {axis.key for axis in axes} == {"direction", "squads", "flood"}
    study = search.make_study(0)
    many = [space.suggest(study.ask(), base, axes) for _ in range(30)]
    assert {settings.attack_options["direction"] for settings in many} == {"dead"}
    assert {settings.flood for settings in many} == {None}
    assert not any("cosine" in settings.attack_options for settings in many), "one squad has no cosine to another"
    for known in space.known(base, axes):
        assert "attack_options.direction" not in known


@pytest.mark.parametrize("clients, honest", [(4, 3), (3, 2)])
def test_no_trial_asks_for_what_the_attack_refuses(clients, honest):
    base = Settings(attack=space.ATTACK, clients=clients, malicious=1 / clients, attack_options={"stop": 0.3})
    axes = {axis.key: axis for axis in space.axes_for(base)}
    assert max(axes["start"].choices) <= 0.3
    assert [value for value in axes["imitate"].choices if value is not None] == list(range(honest))
    framing = replace(base, attack_options={"imitate": 1})
    assert next(axis for axis in space.axes_for(framing) if axis.key == "honest_part").choices == (True,)
    road = Settings(attack=space.ATTACK, dataset="udacity")
    directions = next(axis for axis in space.axes_for(road) if axis.key == "direction").choices
    assert "up" in directions and not any("backdoor" in name for name in directions)


def test_harm_is_the_error_above_the_clean_one_or_the_success():
    def ended(error: float, asr: float | None = None, **late: float) -> Outcome:
        return Outcome(Settings().resolve(), [Point(1, error, asr)], {"error": error, "asr": asr, **late})

    assert search.harm(ended(0.9, late_error=0.3), 0.1) == pytest.approx(0.2)
    assert search.harm(ended(0.2, 0.9, late_error=0.2, late_asr=0.6), 0.1) == pytest.approx(0.6)
    assert search.harm(ended(0.4), 0.1) == pytest.approx(0.3), "a record without the late error"
    assert search.harm(ended(0.1, late_error=0.05), 0.1) == pytest.approx(-0.05), "the sampler learns from that too"
    assert search.harm(ended(math.inf, late_error=math.inf), 0.1) == 1.0


def test_the_search_finds_the_worst_and_confirms_it_on_other_seeds(pretended, capsys):
    assert call("--defense kardam --budget 60 --out x") == 0
    clean, *tried = pretended.ran[:61]
    assert (clean.attack, clean.attack_options, clean.seed, clean.holdout) == ("none", {}, 100, 0.25)
    assert [settings.seed for settings in tried] == [100 + i % 10 for i in range(60)]
    assert {(s.attack, s.defense, s.holdout) for s in tried} == {("crafted", "kardam", 0.25)}
    confirmed = pretended.ran[61:]
    assert [settings.seed for settings in confirmed] == [0, 1, 2] * search.CONFIRMED
    assert {settings.holdout for settings in confirmed} == {0.0}
    worst = max(tried, key=pretended.error)
    out = capsys.readouterr().out
    assert get(repeated(out), "attack_options") == worst.attack_options
    assert repeated(out) in confirmed
    assert f"the test error ends at {pretended.error(worst):.3f} (late {pretended.error(worst) + 0.01:.3f})" in out
    # It learns: by chance a trial has two squads in 1 of 5 cases, and a strength near 30 in fewer.
    first, last = ([pretended.error(s) for s in part] for part in (tried[:20], tried[-20:]))
    assert sum(last) > sum(first) + 2
    text = Path("x/redteam-kardam-fashion-mnist-small.md").read_text(encoding="utf-8")
    assert "60 attacks tried" in text and "Late error without attack: 0.110." in text
    assert spelled.command_line(repeated(out)).split("--attack-option")[1] in text
    assert Path("x/redteam-kardam-fashion-mnist-small.png").read_bytes().startswith(PNG)


def test_a_search_that_is_cut_short_continues_as_if_it_was_not(pretended, capsys):
    assert call("--defense kardam --budget 30 --out whole") == 0
    whole, asked = capsys.readouterr().out.replace("whole/", "x/"), list(pretended.ran)
    pretended.ran.clear()
    pretended.stop_after = 21  # in the third batch
    assert call("--defense kardam --budget 30 --out x") == 130
    assert "continues from there" in capsys.readouterr().err
    assert "16 attacks tried" in Path("x/redteam-kardam-fashion-mnist-small.md").read_text(encoding="utf-8")
    pretended.stop_after = None
    assert call("--defense kardam --budget 30 --out x") == 0
    assert pretended.ran == asked, "no run twice, none left out"
    assert capsys.readouterr().out == whole
    lines = Path("x/results.jsonl").read_text().splitlines()
    assert len(lines) == len(asked) and all(json.loads(line)["summary"]["late_error"] for line in lines)


def test_a_larger_budget_goes_on_from_a_smaller_one(pretended):
    assert call("--defense kardam --budget 12 --out x") == 0
    first = list(pretended.ran)
    assert call("--defense kardam --budget 20 --out x") == 0
    more = [settings for settings in pretended.ran[len(first) :] if settings.holdout]
    assert len(more) == 8 and not any(settings in first for settings in more)
    assert [settings.seed for settings in more] == [100 + i % 10 for i in range(12, 20)]
    assert call("--defense kardam --budget 20 --search-seed 1 --out x") == 0
    other = [settings for settings in pretended.ran[len(first) + len(more) :] if settings.holdout]
    assert len(other) >= 20 - len(space.KNOWN), "another seed asks for other attacks, but for those known before"


def test_the_command_line_repeats_all_that_was_set(pretended, capsys):
    flags = "--malicious 0.3 --lr 0.5 --dataset fashion-mnist --flood 0.5 --untuned"
    assert call(f"--defense aflguard {flags} --attack-option direction=backdoor --budget 9 --out x") == 0
    settings = repeated(capsys.readouterr().out)
    assert settings in pretended.ran and settings.defense_options == {}
    assert (settings.malicious, settings.lr, settings.flood) == (0.3, 0.5, 0.5)
    assert settings.attack_options["direction"] == "backdoor"
    assert call("--defense aflguard --dataset fashion-mnist --budget 9 --out x") == 0
    settings = repeated(capsys.readouterr().out)
    assert settings in pretended.ran and settings.defense_options == {"radius": 2.5}


def test_mistakes_cost_one_line_and_no_run(pretended, capsys, monkeypatch):
    words = {
        "--budget 0": "budget must be 1 or more, got 0",
        "--at-once 0": "at_once must be 1 or more, got 0",
        "--without depth": "without: 'depth' is not searched; choose from direction, strength",
        "--defense nobody": "unknown defense 'nobody'",
        "--dataset nowhere": "unknown dataset 'nowhere'",
        "--attack-option depth=3": "unknown attack option of crafted: 'depth'",
    }
    for flags, text in words.items():
        assert text in failure(capsys, "redteam", *flags.split())
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert "redteam needs the package optuna: pip install 'secureafl_ext[redteam]'" in failure(capsys, "redteam")
    assert pretended.ran == [] and not Path("secureafl-results").exists()
