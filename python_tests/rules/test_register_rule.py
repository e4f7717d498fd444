"""Rules that a user or an installed package registers."""

import warnings
from importlib import metadata
from pathlib import Path

import pytest
import torch
from places import ROOT
from states import identical

from secureafl_ext import SecureAFL, entry_points, gather, shard
from secureafl_ext.audit import Audited, verify
from secureafl_ext.config import CHECKS, RULES, Config, one_of
from secureafl_ext.rules import register_rule
from secureafl_ext.rules.registry import RuleError
from secureafl_ext.rules.row_rules import WEIGHTS, mean


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Whatever a test registers is gone after it, and plug-ins are loaded anew."""
    monkeypatch.setattr(entry_points, "_loaded", set())
    rules, weights = dict(RULES), dict(WEIGHTS)
    yield
    for table, before in ((RULES, rules), (WEIGHTS, weights)):
        table.clear()
        table.update(before)
    CHECKS["rule"] = one_of(RULES)


def shortest(gram, mask, config):
    """All weight on the shortest update."""
    norms = gram.diagonal().masked_fill(~mask, torch.inf)
    return torch.zeros_like(norms).index_fill(0, norms.argmin(), 1.0) * mask


def make(device="cpu", group=None, **settings):
    settings = {"lr": 1.0, "memory": 0, "filter": False, "max_norm": 1e9, "max_staleness": 50, **settings}
    model = torch.zeros(5, device=device)
    return SecureAFL(shard(model, group) if group else model, 3, **settings, process_group=group)


def test_a_registered_rule_decides_the_step(device):
    register_rule("shortest", shortest)
    server = make(device, rule="shortest")
    for client, length in ((0, 3.0), (1, 1.0), (2, 2.0)):
        server.submit(client, torch.full((5,), length, device=device), server.version)
    # the steps: -3 (alone), then -1 twice: that of client 1 is the shortest
    assert server.model.tolist() == [-5.0] * 5


@pytest.mark.parametrize("settings", [{}, {"buckets": 2}, {"memory": 2}], ids=str)
def test_a_registered_mean_is_the_mean_of_a_built_in_row_wise_one(settings):
    """A copy of a built-in function gives the same bits as the built-in rule, with buckets and corrections too."""
    register_rule("copy_of_krum", WEIGHTS["krum"])
    random = torch.Generator().manual_seed(3)
    one, other = (make(rule=rule, **settings) for rule in ("copy_of_krum", "krum"))
    for k in range(12):
        update = torch.randn(5, generator=random)
        for server in (one, other):
            server.submit(k % 3, update, server.version)
    identical(one, other)


def test_the_function_gets_the_settings():
    seen = []
    register_rule("looks", lambda gram, mask, config: seen.append(config) or mean(gram, mask, config))
    server = make(rule="looks", remove=0.125)
    server.submit(0, torch.ones(5), 0)
    assert seen and all(config == server.config and config.remove == 0.125 for config in seen)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("krum", mean), "name must be new, got 'krum', which is built in"),
        (("median", mean), "name must be new, got 'median', which is built in"),
        (("mine", mean), "name must be new, got 'mine', which is registered already"),
        (("Best Rule", mean), "name must be 1 to 40 of a-z, 0-9 and _, a letter first, got 'Best Rule'"),
        (("a" * 41, mean), f"name must be 1 to 40 of a-z, 0-9 and _, a letter first, got '{'a' * 41}'"),
        ((7, mean), "name must be 1 to 40 of a-z, 0-9 and _, a letter first, got 7"),
        (("new", "mean"), "weights must be a function (gram, mask, config), got 'mean'"),
        (("new", None), "weights must be a function (gram, mask, config), got None"),
    ],
)
def test_what_cannot_be_registered_is_refused(arguments, words):
    register_rule("mine", mean)
    before = dict(RULES), dict(WEIGHTS)
    with pytest.raises(ValueError) as refusal:
        register_rule(*arguments)
    assert str(refusal.value) == f"register_rule: {words}"
    assert before == (RULES, WEIGHTS)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (lambda gram, mask, config: gram, r"must return weights \(3,\) float64 on cpu, got \(3, 3\) float64 on cpu"),
        (
            lambda gram, mask, config: mask.float(),
            r"must return weights \(3,\) float64 on cpu, got \(3,\) float32 on cpu",
        ),
        (lambda gram, mask, config: [1, 1, 0], r"must return weights \(3,\) float64 on cpu, got list"),
        (lambda gram, mask, config: mask.double().to("meta"), "float64 on cpu, got .* float64 on meta"),
        (lambda gram, mask, config: mask.double().to_sparse(), "must return weights"),
        (lambda gram, mask, config: {}["gone"], "raised KeyError: 'gone'"),
        (lambda gram, mask, config: torch.ones(3).double(), r"0 where mask is false, got \[1.0, 1.0, 1.0\]"),
        (lambda gram, mask, config: mask / 0 * mask.double(), "must return finite weights"),
    ],
)
def test_a_function_that_returns_no_weights_is_found_when_the_server_is_made(weights, words):
    register_rule("wrong", weights)
    with pytest.raises(
        (ValueError, RuntimeError), match=f"SecureAFL: rule='wrong' .*{words}|SecureAFL: rule='wrong' {words}"
    ):
        make(rule="wrong")


class Late:
    """A rule that is as `mean` until it is told to do otherwise."""

    does = staticmethod(mean)

    def __call__(self, gram, mask, config):
        return self.does(gram, mask, config)


def raises(gram, mask, config):
    raise ZeroDivisionError("no honest client")


LATE = [
    (raises, RuntimeError, "raised ZeroDivisionError: no honest client"),
    (
        lambda gram, mask, config: mask[:2].double(),
        ValueError,
        "must return weights (3,) float64 on cpu, got (2,) float64 on cpu",
    ),
    (
        lambda gram, mask, config: mask.float(),
        ValueError,
        "must return weights (3,) float64 on cpu, got (3,) float32 on cpu",
    ),
]
SERVERS = {
    "no pairs": {},
    "pairs": {"memory": 2},
    "pairs of rounds": {"memory": 2, "pairs": "rounds"},
    "pooled": {"factors": "pooled"},
    "expiry": {"expiry": 2, "probation": 1},
}


@pytest.mark.parametrize("settings", SERVERS.values(), ids=SERVERS)
@pytest.mark.parametrize(("does", "kind", "words"), LATE, ids=[words for *_, words in LATE])
def test_a_rule_that_fails_in_a_round_leaves_the_state_as_it_was(does, kind, words, settings):
    rule = Late()
    register_rule("late", rule)
    server, twin = (make(rule="late", **{"filter": True, **settings}) for _ in range(2))
    random = torch.Generator().manual_seed(5)
    for k in range(11):
        update = torch.randn(5, generator=random)
        for one in (server, twin):
            one.submit(k % 3, update, one.version)
        rule.does = does
        with pytest.raises(kind) as failure:
            server.submit((k + 1) % 3, update, server.version)
        assert str(failure.value) == f"SecureAFL: rule='late' {words}"
        rule.does = mean
        identical(server, twin)


def test_a_rule_that_fails_once_does_not_stop_an_audited_server(tmp_path):
    rule = Late()
    register_rule("late", rule)
    with Audited(make(rule="late"), tmp_path, keep="recent") as server:
        rule.does = raises
        with pytest.raises(RuleError, match="rule='late' raised ZeroDivisionError"):
            server.submit(0, torch.ones(5), 0)
        assert not list((tmp_path / "updates").iterdir())  # it is no round, so its update is not kept
        rule.does = mean
        assert server.submit(1, torch.ones(5), 0).version == 1
    assert verify(tmp_path).kinds["accepted"] == 1


def test_weights_that_require_a_gradient_do_not_reach_the_model(device):
    scale = torch.ones((), dtype=torch.float64, device=device, requires_grad=True)

    @torch.enable_grad()
    def learned(gram, mask, config):
        return scale * mean(gram, mask, config)

    register_rule("learned", learned)
    server = make(device, rule="learned")
    for k in range(4):
        receipt = server.submit(k % 3, torch.ones(5, device=device), server.version)
        assert not server.model.requires_grad and not receipt.weight.requires_grad
    assert server.model.tolist() == [-4.0] * 5 and not server.weights().requires_grad


def test_an_unknown_rule_lists_the_registered_ones():
    register_rule("mine", mean)
    with pytest.raises(ValueError, match=r"rule must be one of median, .*, support, mine, got 'yours'"):
        make(rule="yours")


def test_a_checkpoint_loads_only_where_its_rule_is_registered(tmp_path):
    register_rule("shortest", shortest)
    server = make(rule="shortest")
    server.submit(0, torch.ones(5), 0)
    server.save(tmp_path / "server")
    again = SecureAFL.load(tmp_path / "server")
    identical(server, again)
    for table in (RULES, WEIGHTS):
        del table["shortest"]
    CHECKS["rule"] = one_of(RULES)
    words = (
        r"SecureAFL\.load: the server has rule='shortest', which is not registered here; install its package or call"
    )
    with pytest.raises(ValueError, match=words):
        SecureAFL.load(tmp_path / "server")


def test_it_can_be_sharded_without_pairs(ranks):
    words = "SecureAFL: process_group does not support rule='shortest' with memory=3, only with memory=0"
    for refusal, model in ranks.run(2, sharded):
        assert refusal == words
        assert torch.equal(model, -5 * torch.ones(5))  # as in test_a_registered_rule_decides_the_step


def sharded(group):
    register_rule("shortest", shortest)
    try:
        with pytest.raises(ValueError) as refusal:
            make(group=group, rule="shortest", memory=3)
        server = make(group=group, rule="shortest")
        for client, length in ((0, 3.0), (1, 1.0), (2, 2.0)):
            server.submit(client, shard(torch.full((5,), length), group), server.version)
        return str(refusal.value), gather(server.model, group)
    finally:
        for table in (RULES, WEIGHTS):
            del table["shortest"]
        CHECKS["rule"] = one_of(RULES)


def test_the_example_of_the_page_runs():
    page = (ROOT / "docs" / "embedding.md").read_text()
    code = page.split("## Your own rule\n\n```python\n")[1].split("```")[0]
    scope = {}
    exec(code, scope)
    assert scope["server"].config.rule == "clipped_mean"
    scope["server"].submit(0, torch.ones(1_000), 0)
    assert (scope["server"].model < 0).all()


def installed(folder: Path, monkeypatch, source: str, points: dict[str, str]) -> None:
    """A package `plugged` on sys.path with these entry points, as pip would leave it."""
    (folder / "plugged.py").write_text(source)
    about = folder / "plugged-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (about / "entry_points.txt").write_text("\n".join(["[secureafl.rules]", *lines, ""]))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(__import__("sys").modules, "plugged", raising=False)


SOURCE = """
import asyncio
from secureafl_ext.rules import register_rule
from secureafl_ext.rules.row_rules import mean
calls = []

def register():
    calls.append(1)
    register_rule("plugged_in", mean)

def broken():
    raise OSError("no such disk")

def half():
    register_rule("half", mean)
    raise OSError("no such disk")

def cancelled():
    register_rule("half", mean)
    raise asyncio.CancelledError("gone")

number = 7
"""


def test_an_installed_package_is_found_and_called_once(tmp_path, monkeypatch):
    installed(tmp_path, monkeypatch, SOURCE, {"good": "plugged:register"})
    assert make(rule="median").config.rule == "median" and "plugged_in" not in RULES  # not loaded before it is needed
    for _ in range(2):
        assert make(rule="plugged_in").config.row_wise
        with pytest.raises(ValueError, match="support, plugged_in, got 'other'"):
            Config(rule="other")
    assert __import__("plugged").calls == [1]


@pytest.mark.parametrize(
    ("point", "words"),
    [
        ("plugged:broken", "OSError: no such disk"),
        ("plugged:half", "OSError: no such disk"),
        ("plugged:cancelled", "CancelledError: gone"),
        ("plugged:absent", "AttributeError"),
        ("not_there:register", "ModuleNotFoundError"),
        ("plugged:number", "TypeError: the entry point must be a function without arguments, got 7"),
    ],
)
def test_a_broken_package_gives_a_warning_that_names_it_and_breaks_nothing(tmp_path, monkeypatch, point, words):
    installed(tmp_path, monkeypatch, SOURCE, {"bad": point, "good": "plugged:register"})
    named = rf"plug-in 'bad' of the package 'plugged' \({point}\) is left out: {words}"
    with pytest.warns(entry_points.PluginWarning, match=named):
        assert make(rule="plugged_in").config.rule == "plugged_in"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="rule must be one of"):
            make(rule="other")  # said once
        with pytest.raises(ValueError, match="support, plugged_in, got 'half'"):  # what it registered is taken back
            make(rule="half")
    assert "half" not in WEIGHTS


def test_the_group_is_the_documented_one(monkeypatch):
    asked = []
    monkeypatch.setattr(entry_points, "entry_points", lambda group: asked.append(group) or metadata.EntryPoints())
    with pytest.raises(ValueError, match="rule must be one of"):
        Config(rule="other")
    assert asked == ["secureafl.rules"]
