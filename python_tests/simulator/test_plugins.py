"""Registration of attacks, defenses and data sets, by hand and by installed packages."""

import asyncio
import re
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
import torch

from secureafl_ext import attacks, defenses, entry_points, plugins, tasks
from secureafl_ext.attacks import ATTACKS, register_attack
from secureafl_ext.cli import main
from secureafl_ext.defenses import DEFENSES, register_defense
from secureafl_ext.sim import federation
from secureafl_ext.sim.loop import run
from secureafl_ext.sim.options import options_of, prepare
from secureafl_ext.sim.settings import Settings, UndefinedError
from secureafl_ext.tasks import Arrays, datasets, register_dataset

TABLES = {"attack": ATTACKS, "defense": DEFENSES, "dataset": datasets.SOURCES}


@pytest.fixture(autouse=True)
def undone(monkeypatch):
    """No test leaves a registration behind, and no plug-in of this machine takes part."""
    monkeypatch.setattr(plugins, "_loaded", True)
    for table in TABLES.values():
        monkeypatch.setattr(table, "_added", {})
    yield
    federation.loaded.cache_clear()


def honest(scene, *, scale: float = 1.0, times: "int | None" = None):
    return attacks.make("none", scene)


class AcceptAll:
    REASONS = ("accepted",)

    def __init__(self, model, clients, *, scale: float = 1.0):
        self.nothing = torch.zeros((), dtype=torch.float64)

    def judge(self, arrival):
        return defenses.Verdict(arrival.update, arrival.finite, self.nothing, self.nothing.long())


def noise(data_dir):
    random = np.random.default_rng(0)
    x = random.integers(100, 200, (120, 1, 12, 12), dtype=np.uint8)
    y = random.integers(3, size=120)
    return Arrays(x[:90], y[:90], x[90:], y[90:], classes=3)


REGISTER = {
    "attack": lambda name="new", thing=honest, about="a test": register_attack(name, thing, about=about),
    "defense": lambda name="new", thing=AcceptAll, about="a test": register_defense(name, thing, about=about),
    "dataset": lambda name="new", thing=noise, about="a test": register_dataset(name, thing, about=about),
}
BUILT_IN = {"attack": "gaussian", "defense": "kardam", "dataset": "cifar10"}


@pytest.mark.parametrize("kind", TABLES)
def test_a_registered_name_comes_after_the_built_in_ones(kind):
    before = list(TABLES[kind])
    REGISTER[kind]("new-1+")
    assert list(TABLES[kind]) == [*before, "new-1+"] and len(TABLES[kind]) == len(before) + 1
    assert TABLES[kind]["new-1+"].about == "a test"
    TABLES[kind].remove("new-1+")
    assert list(TABLES[kind]) == before
    REGISTER[kind]("new-1+")


@pytest.mark.parametrize("kind", TABLES)
def test_nothing_replaces_a_built_in_or_a_registered_one(kind):
    built_in, table = BUILT_IN[kind], TABLES[kind]
    kept = table[built_in]
    with pytest.raises(ValueError, match=f"register_{kind}: name must be new, got '{built_in}', which is built in"):
        REGISTER[kind](built_in)
    REGISTER[kind]("mine")
    with pytest.raises(ValueError, match="name must be new, got 'mine', which is registered already"):
        REGISTER[kind]("mine")
    with pytest.raises(TypeError):
        table[built_in] = None
    with pytest.raises(ValueError, match=rf"name must be a registered {kind} \(mine\), got '{built_in}'"):
        table.remove(built_in)
    assert table[built_in] is kept


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize(
    "name", ["", "-a", "A", "a b", "a/b", "../a", "a,b", "a.b", "ä", "a\n", "a" * 41, "all", "secureafl-mine", 5, None]
)
def test_bad_names_are_refused(kind, name):
    with pytest.raises(ValueError, match=rf"register_{kind}: name must .*, got {re.escape(repr(name))}"):
        REGISTER[kind](name)
    assert not TABLES[kind]._added


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("about", ["", "two\nlines", "\x1b[31mred", "x" * 201, None])
def test_an_about_that_would_spoil_the_list_is_refused(kind, about):
    with pytest.raises(ValueError, match=f"register_{kind}: about must be one line"):
        REGISTER[kind](about=about)


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        (5, "factory must be callable as factory(scene, *, options with defaults), got 5"),
        ("gaussian", "got 'gaussian'"),
        (lambda: None, "too many positional arguments"),
        (lambda scene, other: None, "missing a required argument: 'other'"),
        (lambda scene, *, scale: None, "missing a required argument: 'scale'"),
    ],
)
def test_a_factory_that_cannot_be_called_is_refused(thing, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        REGISTER["attack"](thing=thing)


def test_a_defense_with_trusted_samples_takes_one_argument_more():
    with pytest.raises(ValueError, match=r"factory\(model, clients, trusted, \*"):
        register_defense("new", AcceptAll, about="a test", needs_trusted=True)
    asked = []

    def rule(model, clients, trusted):
        asked.append(trusted)
        return AcceptAll(model, clients)

    register_defense("new", rule, about="a test", needs_trusted=True)
    trusted = defenses.Trusted(None, None)
    defenses.make("new", torch.zeros(3), 2, 0.1, 1, trusted)
    assert asked == [trusted]
    with pytest.raises(ValueError, match="new: trusted must be given"):
        defenses.make("new", torch.zeros(3), 2, 0.1, 1)


@pytest.mark.parametrize("made", [None, object(), type("Silent", (), {"judge": print})()])
def test_a_rule_without_its_parts_is_refused(made):
    register_defense("new", lambda model, clients: made, about="a test")
    with pytest.raises(ValueError, match=r"new: the rule must have judge\(\) and REASONS, got "):
        defenses.make("new", torch.zeros(3), 2, 0.1, 1)


def test_options_come_from_the_keyword_only_parameters():
    register_attack("new", honest, about="a test")
    assert options_of("attack_options", "new") == {
        "scale": 1.0,
        "times": None,
    }  # times: text
    settings = Settings(attack="new", device="cpu")
    for options in ({"scale": 2.0, "times": 3}, {"scale": 1}):
        given = Settings(attack="new", attack_options=options, device="cpu")
        assert prepare([given], print)[0].attack_options == options
    for options, words in (
        ({"times": 0.5}, "times must be a whole number"),
        ({"other": 1}, "choose from scale, times"),
    ):
        with pytest.raises(ValueError, match=words):
            prepare([Settings(attack="new", attack_options=options, device="cpu")], print)
    assert settings.resolve().attack == "new"


# Installed packages


@pytest.fixture
def installed(monkeypatch):
    """Pretends that entry points are installed: group, name, function."""
    points = []

    class Point(EntryPoint):
        def load(self):
            return functions[self.value]

    functions = {}

    def add(name, function, group="secureafl.attacks", value=None):
        value = value or f"{name}:register"
        functions[value] = function
        points.append(Point(name, value, group))

    monkeypatch.setattr(plugins, "entry_points", lambda group: [point for point in points if point.group == group])
    monkeypatch.setattr(plugins, "_loaded", False)
    return add


def test_an_entry_point_is_called_once_at_the_first_look(installed):
    calls = []

    def register():
        calls.append(list(ATTACKS)[:1])  # a plug-in may read the tables
        REGISTER["attack"]("mine")
        REGISTER["defense"]("mine")

    for group in plugins.GROUPS:
        installed("both", register, group, "package:register")
    assert calls == []
    assert "mine" in DEFENSES and "mine" in ATTACKS and "mine" not in datasets.SOURCES
    assert calls == [["none"]]


def fails(error):
    def register():
        REGISTER["attack"]("half")
        REGISTER["dataset"]("half")
        raise error

    return register


@pytest.mark.parametrize(
    ("register", "words"),
    [
        (fails(ImportError("no module\nnamed x")), "ImportError: no module named x"),
        (fails(SystemExit(3)), "SystemExit: 3"),
        (fails(asyncio.CancelledError("gone")), "CancelledError: gone"),
        (fails(GeneratorExit()), "GeneratorExit"),
        (fails(RuntimeError("\x1b[31m" + "x" * 10_000)), "RuntimeError"),
        (lambda needed: None, "TypeError"),
        ("text", "TypeError: the entry point must be a function without arguments, got 'text'"),
        (lambda: REGISTER["attack"]("gaussian"), "name must be new, got 'gaussian', which is built in"),
        (lambda: REGISTER["attack"]("good"), "name must be new, got 'good', which is registered already"),
    ],
)
def test_a_broken_plug_in_is_left_out_with_a_warning_that_names_it(installed, register, words, capsys):
    gaussian = ATTACKS._built_in["gaussian"]
    installed("good", lambda: REGISTER["attack"]("good"))
    installed("broken", register)
    installed("late", lambda: REGISTER["defense"]("late"), "secureafl.defenses")
    with pytest.warns(entry_points.PluginWarning) as warned:
        assert main.main(["list", "attacks"]) == 0
    (message,) = [str(one.message) for one in warned]
    assert message.startswith("plug-in 'broken' of the package 'unknown' (broken:register) is left out: ")
    assert words in message and len(message) < 500 and message.isprintable()
    assert "good" in capsys.readouterr().out
    assert list(ATTACKS._added) == ["good"] and list(DEFENSES._added) == ["late"] and not datasets.SOURCES._added
    assert ATTACKS["gaussian"] is gaussian


def test_an_interrupt_is_no_broken_plug_in(installed):
    installed("slow", fails(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        list(ATTACKS)


# Data sets


def test_a_registered_data_set_is_normalized_and_can_be_trained_on(tmp_path):
    asked = []

    def load(data_dir):
        asked.append(data_dir)
        return noise(data_dir)

    register_dataset("noise", load, about="random images")
    data = datasets.load("noise", tmp_path)
    assert asked == [tmp_path] and data.shape == (1, 12, 12) and data.classes == 3
    inputs = data.inputs(data.train_x)
    assert inputs.mean().item() == pytest.approx(0, abs=1e-4) and inputs.std().item() == pytest.approx(1, abs=1e-3)
    assert datasets.Found("noise", "plug-in", Path(__name__)) in datasets.found()
    settings = Settings(dataset="noise", model="cnn", clients=4, rounds=4, evaluations=1, batch=4, device="cpu")
    outcome = run(settings)
    assert 0 <= outcome.summary["error"] <= 1 and asked == [tmp_path, None]


def test_mean_and_std_can_be_given():
    register_dataset("noise", noise, about="random images", mean=(0.5,), std=(0.25,))
    data = datasets.load("noise")
    assert data.scale.item() == pytest.approx(1 / (255 * 0.25)) and data.shift.item() == pytest.approx(-2)
    with pytest.raises(ValueError, match=r"mean and std must be given both or not at all, got \(0.5,\) and None"):
        register_dataset("other", noise, about="random images", mean=(0.5,))
    register_dataset("other", noise, about="random images", mean=(0.5, 0.5), std=(1.0, 1.0))
    with pytest.raises(ValueError, match=r"dataset 'other': mean and std must be 1 numbers each, std positive"):
        datasets.load("other")


def test_a_regression_leaves_out_attacks_on_labels():
    def road(data_dir):
        x = np.zeros((20, 1, 12, 12), np.uint8)
        return Arrays(x, np.linspace(0, 1, 20), x, np.linspace(0, 1, 20), classes=0)

    register_dataset("road", road, about="a regression", regression=True)
    with pytest.raises(UndefinedError, match="attack 'label-flip' changes labels, and road has none"):
        Settings(dataset="road", attack="label-flip", device="cpu").resolve()
    with pytest.raises(UndefinedError, match="road is a regression"):
        Settings(dataset="road", defense="sageflow", device="cpu").resolve()
    assert datasets.load("road").train_y.dtype == torch.float32


ARRAYS = noise(None)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (None, "load must return Arrays, got None"),
        (tuple(ARRAYS), "load must return Arrays, got tuple"),
        (ARRAYS._replace(classes=0), "regression is False, but classes is 0"),
        (ARRAYS._replace(train_x=ARRAYS.train_x.astype(float)), "train has images of float64"),
        (ARRAYS._replace(test_x=ARRAYS.test_x[:, :, 1:]), r"test has images of uint8 and shape \(30, 1, 11, 12\)"),
        (ARRAYS._replace(train_x=ARRAYS.train_x[:, 0], test_x=ARRAYS.test_x[:, 0]), "train has images of uint8"),
        (ARRAYS._replace(test_y=ARRAYS.test_y + 1), "test has labels 1 to 3, expected 0 to 2"),
        (ARRAYS._replace(train_y=list(ARRAYS.train_y)), "train has ndarray and list, expected two numpy arrays"),
    ],
)
def test_arrays_of_a_plug_in_are_checked_like_files(made, words):
    register_dataset("noise", lambda data_dir: made, about="random images")
    with pytest.raises(ValueError, match=f"dataset 'noise': {words}"):
        datasets.load("noise")


def test_the_public_names_are_documented():
    for function in (attacks.register_attack, defenses.register_defense, tasks.register_dataset):
        names = function.__code__.co_varnames[: function.__code__.co_argcount + function.__code__.co_kwonlyargcount]
        assert all(re.search(rf"\b{name}\b", function.__doc__) for name in names)
