"""`secureafl calibrate`, around a loop that only pretends to learn."""

import json

import pytest
from pretended import failure

from secureafl_ext.attacks import ATTACKS
from secureafl_ext.cli import calibrate, main
from secureafl_ext.sim import options
from secureafl_ext.sim.loop import Outcome
from secureafl_ext.sim.settings import Settings, recorded

pytestmark = pytest.mark.usefixtures("pretended")


def test_calibrate_takes_the_strength_nearest_to_the_paper(pretended, tmp_path, capsys):
    """Error and success grow with the factor; the target lies where factor 10 ends."""
    target = calibrate.TARGETS["fashion-mnist"]["scaling"]
    pretended.error = lambda settings: target.error * settings.attack_options["factor"] / 10
    pretended.asr = lambda settings: target.asr * settings.attack_options["factor"] / 10
    assert main.main(["calibrate", "--attacks", "scaling", "--out", "here"]) == 0
    assert [s.attack_options["factor"] for s in pretended.ran] == list(calibrate.STRENGTHS["scaling"])
    assert "scaling: factor=10.0, 0.000 from the paper" in capsys.readouterr().out

    report = json.loads((tmp_path / "here" / "calibration-fashion-mnist.json").read_text())
    assert report["chosen"] == {"scaling": {"options": {"factor": 10.0}, "distance": 0.0}}
    assert [trial["settings"] for trial in report["trials"]] == [recorded(vars(settings)) for settings in pretended.ran]
    assert all({"versions", "commit", "device", "summary", "distance"} <= trial.keys() for trial in report["trials"])


def test_calibrate_leaves_other_options_as_given(pretended):
    assert main.main(["calibrate", "--attacks", "min-max,gaussian", "--attack-option", "honest=4"]) == 0
    assert [(s.attack, s.attack_options) for s in pretended.ran] == [
        *(("min-max", {"honest": 4, "gamma0": strength}) for strength in calibrate.STRENGTHS["min-max"]),
        ("gaussian", {}),
    ]


def test_calibrate_refuses_a_value_for_what_it_chooses(pretended, capsys):
    """It was replaced by the strengths that are tried, in silence."""
    said = failure(capsys, "calibrate", "--attacks", "scaling,gaussian", "--attack-option", "factor=7")
    assert "calibrate: attack option factor must not be set, calibrate chooses it, got 7" in said
    said = failure(capsys, "calibrate", "--attacks", "pgd", "--attack-option", "eps=0.1")
    assert "attack option radius must not be set, got 0.1: eps replaces it" in said
    assert pretended.ran == []
    # Only pgd leaves its radius open, and it is not among these.
    assert main.main(["calibrate", "--attacks", "gaussian", "--attack-option", "std=7"]) == 0


def test_distance_adds_the_error_and_what_is_missing_of_the_attack_success():
    def apart(error: float, asr: float | None, attack: str, dataset: str = "cifar10", **more: float) -> float:
        settings = Settings(dataset=dataset, attack=attack, defense="async-sgd").resolve()
        return calibrate.distance(Outcome(settings, [], {"error": error, "asr": asr, **more}))

    assert apart(0.70, 1.0, "pgd") == pytest.approx(0)  # more success than in the paper is no fault
    assert apart(0.28, 0.36, "pgd", "fashion-mnist") == pytest.approx(0.14)  # the paper's own does not bite
    assert apart(0.70, 0.0, "pgd", late_asr=0.77) == pytest.approx(0.20)
    assert apart(0.80, 0.97, "pgd") == pytest.approx(0.10)
    assert apart(0.60, 0.47, "pgd") == pytest.approx(0.60)
    assert apart(0.90, None, "gaussian") == pytest.approx(0.10)
    assert apart(float("nan"), None, "gaussian") == float("inf")


def test_calibrate_never_runs_a_defense(pretended, capsys, tmp_path):
    pretended.asr = lambda settings: 0.5
    assert main.main(["calibrate"]) == 0
    assert {settings.defense for settings in pretended.ran} == {"async-sgd"}
    assert {settings.attack for settings in pretended.ran} == set(calibrate.free())
    pretended.ran.clear()
    capsys.readouterr()

    (tmp_path / "a.toml").write_text('defense = "secureafl"')
    assert "defense must be async-sgd" in failure(capsys, "calibrate", "--config", "a.toml")
    assert "unknown argument '--defense'" in failure(capsys, "calibrate", "--defense", "secureafl")
    assert pretended.ran == []
    defended = Settings(dataset="fashion-mnist", attack="pgd").resolve()
    with pytest.raises(ValueError, match="defense must be async-sgd"):
        calibrate.trials(defended, ["pgd"])
    with pytest.raises(ValueError, match="defense must be async-sgd"):
        calibrate.choose([Outcome(defended, [], {"error": 0.28, "asr": 0.36})])


def test_calibrate_refuses_what_it_has_no_targets_for(capsys):
    said = failure(capsys, "calibrate", "--dataset", "cifar100")
    assert "dataset must be one of fashion-mnist, cifar10, got 'cifar100'" in said
    assert "unknown attack 'pdg'; choose from none" in failure(capsys, "calibrate", "--attacks", "pdg")


def test_every_free_strength_has_values_to_try_and_every_attack_a_target():
    assert {name for name, kind in ATTACKS.items() if kind.free} == set(calibrate.STRENGTHS)
    assert all(kind.free in (None, *kind.settings) for kind in ATTACKS.values())
    paper = list(ATTACKS)[:11]  # the others are not in the paper
    assert all(list(targets) == paper for targets in calibrate.TARGETS.values())
    many = calibrate.trials(Settings(dataset="cifar10", defense="async-sgd"), paper)
    assert options.prepare(many, pytest.fail) == [settings.resolve() for settings in many]
