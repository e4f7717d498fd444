"""What makes no sense is refused before the first run, and what an outside check of attacks and defenses found."""

import pytest
import scenes
import torch
from compared import pair
from pretended import failure

from secureafl_ext.attacks import make
from secureafl_ext.cli import main
from secureafl_ext.defenses import make as make_defense
from secureafl_ext.defenses.kardam import lower_quantile
from secureafl_ext.sim import loop, runner
from secureafl_ext.sim.settings import Settings


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("run --spread 2", "spread must not be set, got 2.0: it needs --arrivals clock"),
        ("sweep spread=1,2", "spread must not be set, got 2.0"),
        ("run --concentration 0.1", "concentration must not be set, got 0.1: it needs --partition dirichlet"),
        ("run --degree 0.9 --partition dirichlet", "degree must not be set, got 0.9: it needs --partition skewed"),
        ("run --degree 0.9 --dataset udacity", "degree must not be set, got 0.9: it needs"),
        ("run --trusted 5", "trusted must not be set, got 5: it needs a defense with clean samples"),
        ("run --estimation-error --defense krum", "estimation_error must not be set, got True: it needs a SecureAFL"),
        ("run --attack ghost --malicious 1", "attack 'ghost' uses gradients of honest clients, got 20 malicious of 20"),
        ("run --attack min-max --malicious 1", "attack 'min-max' uses gradients of honest clients"),
        ("run --attack gaussian --malicious 0.01", "malicious must be 0 or make at least one of 20 clients malicious"),
        ("run --attack sign-flip --attack-option scale=nan", "attack option scale must be a number, got nan"),
        ("run --defense kardam --defense-option decay=nan", "defense option decay must be a number, got nan"),
        ("run --attack alie --attack-option z=nan", "attack option z must be a number, got nan"),
    ],
)
def test_a_setting_without_effect_is_one_line_and_nothing_runs(argv, expected, capsys, pretended):
    text = failure(capsys, *argv.split())
    assert expected in text and text.count("\n") == 1
    assert pretended.ran == []


def test_a_setting_counts_where_it_is_used_and_the_other_runs_are_not_repeated(pretended):
    assert main.main(["sweep", "spread=1,2", "arrivals=uniform,clock"]) == 0
    assert [(run.arrivals, run.spread) for run in pretended.ran] == [("uniform", 1.0), ("clock", 1.0), ("clock", 2.0)]
    pretended.ran.clear()
    assert main.main(["compare", "--trusted", "5", "--defenses", "async-sgd,zeno++", "--attack", "none"]) == 0
    assert [(run.defense, run.trusted) for run in pretended.ran] == [("async-sgd", 100), ("zeno++", 5)]


def test_no_attackers_at_all_are_a_point_of_a_sweep(pretended):
    assert main.main(["sweep", "malicious=0,0.01,0.2", "--attack", "sign-flip"]) == 0
    assert [run.malicious for run in pretended.ran] == [0, 0.2]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("sign-flip", {"scale": float("inf")}, "scale must be a finite number, got inf"),
        ("gaussian", {"std": -1.0}, "std must be 0 or more, finite, got -1"),
        ("scaling", {"factor": float("inf")}, "factor must be a finite number, got inf"),
        ("dba", {"share": 2.0}, "share must be above 0, at most 1, of a batch, got 2"),
        ("scaling", {"share": -1.0}, "share must be above 0"),
        ("pgd", {"share": 0.0}, "share must be above 0"),
        ("neurotoxin", {"share": 1.5}, "share must be above 0"),
        ("3dfed", {"share": 1.5}, "share must be above 0"),
        ("pgd", {"radius": -1.0}, "radius must be positive, got -1"),
        ("pgd", {"eps": 0.0}, "eps must be positive, got 0"),
        ("neurotoxin", {"cap": -1.0}, "cap must be positive, got -1"),
        ("3dfed", {"indicator_cap": -1.0}, "indicator_cap must be positive, got -1"),
        ("min-max", {"gamma0": -3.0}, "gamma0 must be positive, got -3"),
        ("adaptive", {"gamma": float("inf")}, "gamma must be a finite number, got inf"),
        ("ipm", {"epsilon": float("inf")}, "epsilon must be a finite number, got inf"),
        ("alie", {"z": float("inf")}, "z must be a finite number, got inf"),
        ("crafted", {"strength": float("inf")}, "strength must be a finite number, got inf"),
    ],
)
def test_a_strength_without_meaning_is_refused(name, options, words):
    with pytest.raises(ValueError, match=words):
        make(name, scenes.scene(), **options)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("sageflow", {"warmup": -1}, "warmup must be 0 or more, got -1"),
        ("sageflow", {"threshold": 0.0}, "threshold must be positive, got 0"),
        ("dnc", {"remove": 5.0}, r"remove must be 0 or more, with remove \* 2 below 10, the clients, got 5"),
        ("dnc", {"remove": float("nan")}, "remove must be 0 or more"),
        ("flame", {"noise": float("inf")}, "noise must be 0 or more, finite, got inf"),
    ],
)
def test_a_defense_that_could_never_step_is_refused(name, options, words):
    with pytest.raises(ValueError, match=words):
        make_defense(name, torch.zeros(3), 10, 0.1, 4, scenes.trusted(scenes.scene()), **options)


@pytest.mark.parametrize(
    "argv", ["defense=async-sgd,krum --defense-option selected=99", "attack=none,ipm --attack-option honest=99"]
)
def test_a_wrong_option_of_the_last_run_is_found_before_the_first(argv, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loop, "run", lambda *_, **__: pytest.fail("it ran"))
    assert main.main(["sweep", *argv.split(), "--rounds", "2", "--device", "cpu"]) == 2
    assert "got 99" in capsys.readouterr().err


def test_each_attack_and_each_defense_is_set_up_once(monkeypatch):
    made = []
    monkeypatch.setattr(loop, "Rounds", lambda settings: made.append((settings.attack, settings.defense)))
    pairs = [(attack, defense) for attack in ("none", "ipm", "alie") for defense in ("krum", "dnc")]
    runner.set_up([Settings(attack=attack, defense=defense, seed=seed) for attack, defense in pairs for seed in (0, 1)])
    assert made == [("none", "krum"), ("none", "dnc"), ("ipm", "krum"), ("alie", "krum")]


def test_the_weighted_rule_is_told_the_share_of_uploads_in_a_flood():
    """Its trim is the share of uploads that malicious clients make, not of clients."""
    for settings, trim in (
        (Settings(), 0.3),
        (Settings(attack="sign-flip", flood=0.33), 0.43),
        (Settings(attack="sign-flip", flood=0.5), 0.49),
    ):
        resolved = settings.resolve()
        changed = type(resolved)(**vars(resolved) | {"defense": "weighted"})
        assert loop.defense_settings(changed, 10)["trim"] == pytest.approx(trim)


def test_kardams_lenient_filter_passes_all_if_nobody_is_malicious():
    """At most f of the last 2 f + 1 may come from one client. Without f that is no bound: it rejected every update."""
    server, send = pair("kardam", [3.0, 4.0], malicious=0, frequency="lenient", dampening="off")
    assert all(send(version % 2, [0.5, 0.5], version).accepted for version in range(6))
    assert server.model.tolist() == pytest.approx([0.0, 1.0])


@pytest.mark.parametrize(("clients", "malicious"), [(10, 3), (10, 4), (10, 6), (10, 9), (10, 10), (50, 20)])
def test_kardam_runs_with_any_number_of_malicious_clients(clients, malicious):
    """Its source requires n > 3 f. docs/reference/defenses.md says what happens here otherwise."""
    rule = make_defense("kardam", torch.zeros(3), clients, 0.1, 4, None, malicious=malicious).rule
    largest = torch.arange(clients, dtype=torch.float64)[torch.randperm(clients)]
    smallest = max(clients - malicious, 1)  # the bound is so many from below
    assert lower_quantile(largest, rule.quantile) == smallest - 1
    settings = Settings(defense="kardam", clients=clients, malicious=malicious / clients, device="cpu").resolve()
    assert loop.defense_settings(settings, 10) == {"malicious": malicious}


@pytest.mark.parametrize(
    ("frequency", "clients", "malicious", "ends"),
    [
        ("strict", 10, 4, False),
        ("strict", 10, 5, True),
        ("strict", 10, 6, True),
        ("lenient", 10, 6, False),
        ("lenient", 2, 1, True),
        ("lenient", 3, 2, False),
    ],
)
def test_kardams_frequency_filter_stops_all_if_half_of_the_clients_are_malicious(frequency, clients, malicious, ends):
    send = pair("kardam", [1.0, 1.0], clients, 0.01, malicious=malicious, frequency=frequency, patience=1)[1]
    order = torch.randint(clients, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    accepted = [bool(send(client, [1.0 + 0.01 * i, 1.0], i).accepted) for i, client in enumerate(order)]
    assert any(accepted[100:]) is not ends
    if ends:
        assert sum(accepted) == clients


def test_kardams_strict_filter_leaves_n_minus_2_f_clients():
    server, send = pair("kardam", [1.0, 1.0], 10, 0.01, malicious=4, frequency="strict", patience=1)
    for i, client in enumerate([*range(10), *range(10)]):
        send(client, [1.0 + 0.01 * i, 1.0], i)
    assert server.rule.recent.unique().numel() == 8 and (server.rule.recent >= 0).all()


def test_pgd_keeps_its_ball_after_a_model_that_diverged():
    """A norm that is not finite stayed in the client's mean norm, and nothing bounded the attack from then on."""
    run = scenes.scene()
    attack, usual = make("pgd", run, radius=0.5), make("pgd", run, radius=0.5)
    broken = run.net.start(1) * 1e30
    attack.update(scenes.view(run, attack, 1, 1, model=broken))
    for seed in (2, 3):
        view = scenes.view(run, attack, 1, seed)
        assert torch.equal(attack.update(view), usual.update(view))


def test_adaptive_goes_on_after_a_model_that_diverged():
    run = scenes.scene()
    attack = make("adaptive", run)
    server = make_defense("async-sgd", torch.zeros(run.net.size), run.clients, 0.1, 4, None)
    broken = run.net.start(1) * 1e30
    attack.update(scenes.view(run, attack, 1, 1, model=broken, server=server))
    sent = attack.update(scenes.view(run, attack, 1, 2, server=server))
    assert sent.isfinite().all() and attack.average.isfinite().all() and attack.average.any()
