"""A stretch of the log is decided again, alike or with the first difference; and the command `secureafl audit`."""

import re

import pytest
import torch
from audits import calls, lines, start
from engines import D, make
from places import ROOT

from secureafl_ext import SecureAFL
from secureafl_ext.audit import Audited, DifferenceError, audited, facts, find, replay, replays, verify
from secureafl_ext.audit.facts import bytes_of, changed_settings, config_from, digest, settings_of, sha256
from secureafl_ext.cli.main import main


def test_other_settings_are_refused_while_calls_must_be_repeated(tmp_path):
    path = tmp_path / "checkpoint"
    with start(tmp_path, keep="all") as server:
        calls(server, 0, 10)
        server.save(path)
        calls(server, 10, 15)
    state = SecureAFL.load(path).state_dict()
    with Audited(make("fused", quantile=0.5), tmp_path, keep="all") as server:
        server.load_state_dict(state)
        with pytest.raises(ValueError, match=r"5 calls were made with other settings: quantile=0.8 became 0.5"):
            server.recover()
    with Audited(SecureAFL.load(path), tmp_path, keep="all") as server:
        server.recover()
        server.save(path)
        state = server.state_dict()
    with Audited(make("fused", quantile=0.5, trust=float("inf")), tmp_path, keep="all") as server:
        server.load_state_dict(state)
        assert server.recover() == 0
        calls(server, 15, 20)
        config = server.config
    named = lines(tmp_path, "state")
    assert named[-1].state == named[-2].state and config_from(named[-1].settings) == config
    with pytest.raises(ValueError, match=r"other settings from here on: quantile=0.8 became 0.5"):
        replay(make("fused"), tmp_path, find(tmp_path, named[0].state))


@pytest.mark.parametrize("engine", ["fused", "means alone"])
def test_the_log_of_an_earlier_version_lacks_settings(engine, tmp_path, monkeypatch):
    """Its servers kept last updates, so factors are in the log."""
    path, plain = tmp_path / "checkpoint", facts.settings_of

    def of_then(server):
        return {name: value for name, value in plain(server).items() if name not in ("keep_last", "history_device")}

    with monkeypatch.context() as patch:
        patch.setattr(audited, "settings_of", of_then)
        with Audited(make(engine, keep_last=True), tmp_path, keep="all") as server:
            calls(server, 0, 10)
            server.save(path)
            calls(server, 10, 40)
            last = server.state_dict()
    again, _ = replays.load(path, tmp_path)
    assert again.config.keep_last is True
    with Audited(again, tmp_path, keep="all") as server:
        assert server.recover() == 30
    assert digest(again.state_dict()) == digest(last)
    if engine == "means alone":
        changed = changed_settings(of_then(again), settings_of(make(engine)))
        assert changed == "keep_last=True became False"


def test_replay_decides_alike_and_finds_another_setting(tmp_path, monkeypatch):
    with start(tmp_path, keep="all", weights=True) as server:
        calls(server, 0, 60)
        began, ended = lines(tmp_path, "state")[0].state, digest(server.server.state_dict())
    place, again = find(tmp_path, began), make("fused")
    repeated = replay(again, tmp_path, place)
    assert repeated.calls == 60 > repeated.uploads and digest(again.state_dict()) == ended
    with pytest.raises(DifferenceError, match=r"line \d+, \w+ of client \d: \w+ is .* in the log, decided again it is"):
        replay(make("fused", quantile=0.1), tmp_path, place)
    with pytest.raises(DifferenceError, match=r"the server refuses the call: .*client must lie in"):
        replay(SecureAFL(torch.zeros(D), 2, lr=0.05, max_staleness=4), tmp_path, place)
    monkeypatch.setattr(replays, "weight_of", lambda server, client: 0.125)
    with pytest.raises(DifferenceError, match=r"weight is .* in the log, decided again it is 0\.125"):
        replay(make("fused"), tmp_path, place)


def test_the_command(tmp_path, capsys, monkeypatch):
    folder, path = tmp_path / "audit", str(tmp_path / "checkpoint")
    with start(folder, keep="all") as server:
        calls(server, 0, 20)
        server.save(path)
        calls(server, 20, 50)
        model, version, middle = server.model, server.version, lines(folder, "state")[-1].version + 5
        head = server.head

    assert main(["audit", "verify", str(folder), "--expect", head]) == 0
    said = capsys.readouterr().out
    count = len(lines(folder, "accepted", "rejected", "stale", "too_soon"))
    assert f"head     {head}\n" in said and f"uploads  {count}: " in said and said.isascii()
    assert main(["audit", "verify", str(folder), "--expect", "0" * 64]) == 1

    assert main(["audit", "replay", str(folder), "--checkpoint", path]) == 0
    said = capsys.readouterr().out
    assert "uploads decided again, all equal" in said and f"version  {version}" in said
    assert sha256(bytes_of(model)) in said
    assert main(["audit", "replay", str(folder), "--checkpoint", path, "--until", str(middle)]) == 0
    assert f"version  {middle}\n" in capsys.readouterr().out

    state = SecureAFL.load(path).state_dict()
    changed = make("fused", quantile=0.1)
    changed.load_state_dict(state)
    changed.save(path)
    assert main(["audit", "replay", str(folder), "--checkpoint", path]) == 1
    assert "quantile=0.8 became 0.1" in capsys.readouterr().err
    monkeypatch.setattr("secureafl_ext.audit.facts.settings_of", lambda server: settings_of(make("fused")))
    assert main(["audit", "replay", str(folder), "--checkpoint", path]) == 1
    assert "decided again it is" in capsys.readouterr().err
    monkeypatch.undo()

    changed.submit(0, torch.ones(D), changed.version)
    changed.save(path)
    assert main(["audit", "replay", str(folder), "--checkpoint", path]) == 2
    assert "expected a checkpoint of a state that the log" in capsys.readouterr().err
    assert main(["audit", "replay", str(folder)]) == 2
    assert main(["audit", "verify", str(tmp_path / "none")]) == 1


def test_the_code_of_the_guide_runs_again_and_again(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "guides" / "audit.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    for _ in range(3):
        exec(compile(block, "audit.md", "exec"), {})
    *_, head = capsys.readouterr().out.split()
    assert verify("audit", head).kinds["accepted"] == 3 and SecureAFL.load("server.safetensors").version == 3


def test_forged_settings_cannot_move_the_cursor():
    forged = {**settings_of(make("fused")), "\x1b[2J": "\x1b[2J"}
    assert changed_settings(settings_of(make("fused")), forged).isprintable()
    with pytest.raises(ValueError, match="settings must be those of a server of this version") as refusal:
        config_from(forged)
    assert str(refusal.value).isprintable()
