"""The command line, around a loop that only pretends to learn."""

import os
import sys
from dataclasses import fields

import pytest
from pretended import PNG, failure, kept

import secureafl_ext
from secureafl_ext import report
from secureafl_ext.attacks import ATTACKS
from secureafl_ext.cli import commands, lists, main, names
from secureafl_ext.defenses import DEFENSES
from secureafl_ext.defenses.tuned import TUNED, TUNED_FASHION_MNIST, TUNED_RESNET, tuned_options
from secureafl_ext.sim import results
from secureafl_ext.sim.settings import CHOICES, Settings, UndefinedError, recorded
from secureafl_ext.tasks import datasets

pytestmark = pytest.mark.usefixtures("pretended")


def test_run_keeps_a_line_and_a_picture(tmp_path, pretended, capsys):
    pretended.error = lambda settings: 0.375
    assert main.main(["run", "--out", "here", "--attack", "gaussian", "--attack-option", "std=.5"]) == 0
    wanted = Settings(attack="gaussian", attack_options={"std": 0.5}).resolve()
    assert pretended.ran == [wanted]
    assert [line["settings"] for line in kept("here")] == [recorded(vars(wanted))]
    picture = tmp_path / "here" / "run-fashion-mnist-small-gaussian-secureafl-std=0.5.png"
    assert picture.read_bytes().startswith(PNG)
    assert "0.375" in capsys.readouterr().out


def test_a_finished_run_is_shown_again_and_fresh_repeats_it(pretended, capsys):
    pretended.error = lambda settings: 0.375
    assert main.main(["run"]) == 0
    first = capsys.readouterr()
    pretended.error = lambda settings: 0.25
    assert main.main(["run"]) == 0
    again = capsys.readouterr()
    assert len(pretended.ran) == 1 and again.out == first.out
    assert "1 of 1 runs are in secureafl-results/results.jsonl already; --fresh runs them again" in again.err
    assert "already" not in first.err
    assert main.main(["run", "--fresh"]) == 0
    assert len(pretended.ran) == len(kept()) == 2 and "0.250" in capsys.readouterr().out
    assert main.main(["run"]) == 0
    assert "0.250" in capsys.readouterr().out, "the newest of equal runs counts"


def test_a_run_by_other_code_is_repeated(pretended, capsys, monkeypatch):
    pretended.error = lambda settings: 0.375
    assert main.main(["run"]) == 0 and kept()[0]["code"] == results.code()
    monkeypatch.setattr(results, "code", lambda: "another code")
    assert main.main(["run", "--any-code"]) == 0
    assert len(pretended.ran) == 1 and "1 of 1 runs are in" in capsys.readouterr().err
    pretended.error = lambda settings: 0.25
    assert main.main(["run"]) == 0
    said = capsys.readouterr()
    assert len(pretended.ran) == 2 and "0.250" in said.out
    assert "1 of 1 runs are in secureafl-results/results.jsonl, by other code, and run again" in said.err
    assert main.main(["run"]) == 0 and len(pretended.ran) == 2


def test_the_place_of_the_data_makes_no_other_run(pretended, tmp_path):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        assert main.main(["run", "--data-dir", str(tmp_path / name)]) == 0
    assert len(pretended.ran) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("run", "run --dataset fashion-mnist"),
        ("run", "run --rounds 9"),
        ("run --attack gaussian", "run --attack gaussian --attack-option std=3"),
        ("compare", "compare --dataset fashion-mnist"),
        ("compare", "compare --defenses kardam"),
        ("compare --defenses kardam,basgd", "compare --defenses kardam"),
        ("sweep seed=0,1", "sweep seed=0,1 --dataset cifar10"),
        ("sweep seed=0,1", "sweep seed=0,1 --defense kardam"),
        ("sweep seed=0,1 --memory 1", "sweep seed=0,1 --memory 2"),
    ],
)
def test_pictures_of_other_runs_have_other_names(one, other, tmp_path):
    for argv in (one, other):
        assert main.main(argv.split()) == 0
    assert len(list((tmp_path / "secureafl-results").glob("*.png"))) == 2


def test_a_long_name_of_a_picture_is_cut_and_stays_its_own():
    one, other = (names.picture_name("run", ["a/b"], {"x": "y" * 300 + end}, ()) for end in "12")
    assert one != other and one.startswith("run-a_b-x=yyy") and len(one) <= names.LONGEST + len(".png")
    places = {"device": "cpu", "data_dir": "here", "seed": 3}
    assert names.picture_name("run", ["a"], places, ()) == "run-a-seed=3.png"


def test_tuned_options_are_used_said_and_recorded(pretended, capsys):
    argv = ["compare", "--dataset", "fashion-mnist", "--attack", "none", "--defenses", "aflguard,zeno++,kardam"]
    assert main.main(argv) == 0
    assert [line["settings"]["defense_options"] for line in kept()] == [TUNED["aflguard"], TUNED["zeno++"], {}]
    said = capsys.readouterr().err
    assert "tuned options: aflguard radius=2.5, zeno++ eps=0.1, zeno++ every=1; --untuned" in said
    assert main.main([*argv, "--defense-option", "radius=4"]) == 0
    assert pretended.ran[-1].defense_options == {"radius": 4}, "zeno++ and kardam ran already"
    said = capsys.readouterr().err
    assert "radius" not in said.partition("tuned options")[2].partition("\n")[0]
    assert main.main(["run", "--dataset", "fashion-mnist", "--defense", "aflguard", "--untuned"]) == 0
    assert pretended.ran[-1].defense_options == {} and "tuned options" not in capsys.readouterr().err
    assert main.main(["sweep", "defense_options.radius=1,2", "--defense", "aflguard"]) == 0
    assert [settings.defense_options for settings in pretended.ran[-2:]] == [{"radius": 1}, {"radius": 2}]


def test_tuned_options_exist_for_data_sets_that_they_fit():
    for name, options_ in TUNED.items():
        assert options_.keys() <= DEFENSES[name].settings.keys()
        assert tuned_options(name, "cifar10") == options_ and tuned_options(name, "a plug-in's") == {}
    for name, options_ in TUNED_FASHION_MNIST.items():
        assert options_.keys() <= DEFENSES[name].settings.keys() and name not in TUNED
        assert tuned_options(name, "fashion-mnist") == options_
        assert tuned_options(name, "cifar10") == tuned_options(name, datasets.DEFAULT) == {}
    for name, options_ in TUNED_RESNET.items():
        assert options_.keys() <= DEFENSES[name].settings.keys() and name not in TUNED
        assert tuned_options(name, "cifar100") == options_ and tuned_options(name, "fashion-mnist") == {}
    assert tuned_options("aflguard", datasets.DEFAULT) == TUNED["aflguard"]
    assert tuned_options("sageflow", datasets.DEFAULT) == {}, "its warm-up is longer than a run"


def test_the_version_is_that_of_the_package(capsys):
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"secureafl {secureafl_ext.__version__} (torch ")


def test_compare_without_flags_is_the_tour(tmp_path, pretended, capsys):
    pretended.error = lambda settings: 0.25 if settings.defense == "secureafl-support" else 0.875
    assert main.main(["compare"]) == 0
    assert [(s.attack, s.defense) for s in pretended.ran[:-1]] == [("gaussian", name) for name in commands.COMPARED]
    assert {"async-sgd", "secureafl-support"} <= set(commands.COMPARED) <= set(DEFENSES)
    assert (pretended.ran[-1].attack, pretended.ran[-1].defense) == ("none", "async-sgd")
    assert {settings.dataset for settings in pretended.ran} == {datasets.DEFAULT}
    assert (tmp_path / "secureafl-results" / "compare-fashion-mnist-small-gaussian.png").read_bytes().startswith(PNG)
    last = capsys.readouterr().out.splitlines()[-1]
    who = "Under gaussian by 4 of 20 clients"
    assert last.startswith(f"{who} the test error ends at 0.250 with secureafl-support, 0.875 with")


def test_compare_all_is_every_defense(pretended):
    assert main.main(["compare", "--defenses", "all"]) == 0
    assert [settings.defense for settings in pretended.ran[:-1]] == list(DEFENSES)


def test_compare_without_attack_needs_nothing_to_be_held_against(pretended):
    assert main.main(["compare", "--defenses", "kardam", "--attack", "none"]) == 0
    assert [settings.defense for settings in pretended.ran] == ["kardam"]


def test_processes_are_as_many_as_the_line_says(pretended):
    assert main.main(["sweep", "seed=0,1", "--processes", "2"]) == 0
    assert len(pretended.ran) == 2 and pretended.processes == 2


def test_undefined_pairs_are_left_out_and_said(pretended, capsys):
    with pytest.raises(UndefinedError):
        Settings(dataset="udacity", defense="sageflow").resolve()
    assert main.main(["compare", "--defenses", "all", "--dataset", "udacity"]) == 0
    ran = {settings.defense for settings in pretended.ran}
    assert ran == set(DEFENSES) - {"sageflow"}
    assert "left out: defense 'sageflow'" in capsys.readouterr().err


def test_options_go_to_every_defense_that_knows_them(pretended):
    argv = "--defenses kardam,sageflow,secureafl --defense-option decay=0.75 --defense-option quantile=0.5"
    assert main.main(["compare", *argv.split(), "--attack-option", "std=5"]) == 0
    given = {(s.attack, s.defense): (s.attack_options, s.defense_options, s.quantile) for s in pretended.ran}
    assert given == {
        ("gaussian", "kardam"): ({"std": 5}, {"decay": 0.75, "quantile": 0.5}, 0.8),
        ("gaussian", "sageflow"): ({"std": 5}, {"decay": 0.75}, 0.8),
        ("gaussian", "secureafl"): ({"std": 5}, {}, 0.8),  # has --quantile
        ("none", "async-sgd"): ({}, {}, 0.8),
    }


def test_settings_of_secureafl_go_to_the_variants_that_use_them(pretended):
    assert (
        main.main(["compare", "--defenses", "kardam,secureafl,secureafl-kin", "--memory", "5", "--quantile", "0.5"])
        == 0
    )
    recorded = {(s.attack, s.defense): (s.memory, s.quantile) for s in pretended.ran}
    assert recorded == {
        ("gaussian", "kardam"): (3, 0.8),
        ("gaussian", "secureafl"): (5, 0.5),
        ("gaussian", "secureafl-kin"): (3, 0.5),
        ("none", "async-sgd"): (3, 0.8),
    }


def test_compare_goes_on_from_a_torn_line(pretended, capsys, tmp_path):
    assert main.main(["compare"]) == 0
    path = tmp_path / "secureafl-results" / "results.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    before = list(pretended.ran)
    assert main.main(["compare"]) == 0
    assert pretended.ran == [*before, before[-1]]
    assert "cut short" in capsys.readouterr().err
    assert len(kept()) == len(before)


def test_an_interrupted_run_promises_nothing(pretended, capsys):
    pretended.stop_after = 0
    assert main.main(["run"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "secureafl: interrupted; nothing is kept, start it again"


def test_an_interrupted_list_is_no_crash(monkeypatch, capsys):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setitem(lists.LISTS, "models", interrupt)
    assert main.main(["list", "models"]) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["list"], ["list", "models"], ["--help"]])
def test_a_reader_that_has_ended_is_no_error(argv, monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)  # as `head` does when it has enough
    with open(writer, "w") as out:  # at its end it is flushed, as stdout is when Python ends
        monkeypatch.setattr(sys, "stdout", out)
        assert main.main(argv) == 141
    assert capsys.readouterr().err == ""


def test_a_description_keeps_the_case_of_its_words(capsys):
    assert main.main(["report", "--help"]) == 0
    assert "One HTML page of a results folder" in capsys.readouterr().out


@pytest.mark.parametrize("what", [[], *([name] for name in lists.LISTS)])
def test_list_names_everything_with_its_options(what, capsys):
    assert main.main(["list", *what]) == 0
    printed = capsys.readouterr().out
    starts = [line.split()[0] for line in printed.splitlines()]
    tables = {
        "attacks": ATTACKS,
        "defenses": DEFENSES,
        "datasets": datasets.SOURCES,
        "models": CHOICES["model"],
        "arrivals": CHOICES["arrivals"],
        "partitions": CHOICES["partition"],
        "settings": [field.name for field in fields(Settings)],
    }
    assert list(lists.LISTS) == list(tables)
    assert starts == [name for head in what or tables for name in (f"{head}:", *tables[head])]
    if not what:
        assert all(ATTACKS[name].about in printed for name in ATTACKS)
        assert all(f"{key}={value}" in printed for key, value in ATTACKS["gaussian"].settings.items())
        assert all(f"{key}={value}" in printed for key, value in DEFENSES["aflguard"].settings.items())


def test_data_says_what_is_where_and_how_to_get_the_rest(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(datasets, "USUAL", ("./data",))
    monkeypatch.delenv(datasets.VARIABLE, raising=False)
    folder = tmp_path / "mine" / "fashion-mnist"
    folder.mkdir(parents=True)
    (folder / "fashion_mnist.npz").touch()
    assert main.main(["data", "--data-dir", str(tmp_path / "mine")]) == 0
    printed = capsys.readouterr().out
    assert f"fashion-mnist: npz in {folder}\n" in printed
    assert "./data: not there" in printed
    assert f"{tmp_path / 'mine'} (data_dir)\n" in printed
    assert all(
        f"{name}: missing. To get it: {datasets.SOURCES[name].hint}" in printed for name in ("cifar10", "udacity")
    )
    assert f"{datasets.DEFAULT}: npz in the package" in printed


@pytest.mark.parametrize("package", ["rich", "matplotlib"])
def test_a_missing_package_is_named_before_anything_runs(package, pretended, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)  # as if not installed
    monkeypatch.delitem(sys.modules, "secureafl_ext.report.console", raising=False)
    monkeypatch.delattr(report, "console", raising=False)
    said = failure(capsys, "compare")
    assert f"{package} is missing" in said
    assert "pip install 'secureafl_ext[sim]'" in said
    assert pretended.ran == []
    assert main.main(["list"]) == 0
