"""Watched: observers know every call, in order, and nothing that they do reaches the server."""

import threading
import time
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from secureafl_ext import RECOMMENDED, SecureAFL
from secureafl_ext.operate import KINDS, Observer, Watched, watched
from secureafl_ext.operate.look import agreement

N, D = 6, 8


class Notes(Observer):
    def __init__(self):
        self.seen, self.looks, self.errors, self.lost, self.ended, self.threads = [], [], [], 0, 0, set()

    def verdicts(self, batch):
        self.threads.add(threading.get_ident())
        self.seen += batch

    def look(self, look):
        self.looks.append(look)

    def evaluated(self, at, version, error):
        self.errors.append((version, error))

    def dropped(self, count):
        self.lost += count

    def close(self):
        self.ended += 1


def make(device="cpu", **settings):
    settings = {"lr": 0.1, "max_staleness": 2, **settings}
    return SecureAFL(torch.zeros(D, device=device), N, **settings)


def uploads(rounds):
    random = torch.Generator().manual_seed(0)
    for t in range(rounds):
        update = 1 + 0.1 * torch.randn(D, generator=random)
        yield t % N, update * (torch.nan if t % 11 == 7 else 1)


@pytest.mark.parametrize("settings", [{}, {"rule": "support", "memory": 0}, {"spacing": 2}], ids=str)
def test_every_upload_is_told_and_none_is_changed(settings, device):
    notes, plain = Notes(), make(device, **settings)
    with Watched(make(device, **settings), [notes], every=0) as server:
        for client, update in uploads(40):
            for version in {server.version, max(0, server.version - 5)}:
                receipts = [each.submit(client, update.to(device), version) for each in (plain, server)]
                assert receipts[0].reason == receipts[1].reason
        assert torch.equal(server.model, plain.model) and server.stats() == plain.stats()
        assert server.flush()
    stats, kinds = plain.stats(), [verdict.kind for verdict in notes.seen]
    assert {kind: kinds.count(kind) for kind in ("accepted", "rejected", "stale", "too_soon")} == {
        name: stats[name] for name in ("accepted", "rejected", "stale", "too_soon")
    }
    assert stats["rejected"] and stats["stale"] and bool(stats["too_soon"]) == ("spacing" in settings)
    assert [verdict.version for verdict in notes.seen] == sorted(verdict.version for verdict in notes.seen)
    assert all(verdict.kind in KINDS and verdict.seconds > 0 for verdict in notes.seen)
    assert any(verdict.factor is not None for verdict in notes.seen)
    assert notes.ended == 1 and notes.threads.isdisjoint({threading.get_ident()})


def test_a_look_has_every_client(device):
    notes = Notes()
    with Watched(make(device, rule="support", memory=0), [notes], every=0.01) as server:
        for client, update in uploads(40):
            server.submit(client, update.to(device), server.version)
        server.leave(2)
        server.flush()
    look = notes.looks[-1]  # the last one comes with the end
    assert look.version == server.version and look.stats == server.stats()
    assert look.seen.all() and not look.live[2] and not look.present[2] and look.weights[2] == 0
    assert 0.9 < look.weights.sum() < 1.1 and look.left_out.dtype == bool and look.threshold > 0
    cosines = server.similarity([0, 1, 3])
    assert cosines.shape == (3, 3) and np.allclose(np.diag(cosines), 1) and cosines[0, 1] > 0.9
    plain = Watched(make(device), [], every=0)
    assert plain.similarity([0, 1]) is None and plain.look().with_others is None


@pytest.mark.parametrize("settings", [{}, {"rule": "support", "memory": 0}, RECOMMENDED, {"estimate": False}], ids=str)
def test_a_look_stays_as_it_was(settings, device):
    with Watched(make(device, **settings), [], every=0) as server:
        for client, update in uploads(20):
            server.submit(client % 4, update.to(device), server.version)
            look = server.look()
            before = {field.name: np.copy(getattr(look, field.name)) for field in fields(look)}
            server.submit(4 + client % 2, -update.to(device), server.version)
            server.leave(client % 4)
            for name, value in before.items():
                assert (value == getattr(look, name)).all() or np.array_equal(value, getattr(look, name), True), name
            server.forget(4)


class Other:
    """A server of which a call takes long, or waits for something."""

    def __init__(self, name, call):
        self.server, self.name, self.call = make(), name, call

    def __getattr__(self, name):
        if name != self.name:
            return getattr(self.server, name)

        def answer(*arguments):
            result = None if name == "stats" else getattr(self.server, name)(*arguments)
            self.call()
            return self.server.stats() if name == "stats" else result

        return answer


def test_a_look_is_of_one_version():
    """A round comes between two of its fields, if it can."""
    thread = threading.Thread(target=lambda: server.submit(1, torch.ones(D), 0))

    def meanwhile():
        if not server.version:
            thread.start()
            thread.join(0.5)

    with Watched(Other("stats", meanwhile), [], every=0) as server:
        look = server.look()
        thread.join()
        assert look.version == look.stats["accepted"] == look.seen.sum() == 0 and server.version == 1
        assert server.look().version == 1


def test_verdicts_of_two_threads_come_in_order():
    """The first upload has its receipt, and then its thread is stopped for a while."""
    notes, first = Notes(), threading.Event()

    def stopped():
        if not first.is_set():
            first.set()
            second.join(0.5)

    with Watched(Other("submit", stopped), [notes], every=0) as server:
        second = threading.Thread(target=lambda: first.wait(60) and server.submit(1, torch.ones(D), 0))
        second.start()
        server.submit(0, torch.ones(D), 0)
        second.join()
    assert [(verdict.client, verdict.version) for verdict in notes.seen] == [(0, 1), (1, 2)]


def test_a_look_comes_after_the_verdicts_before_it(monkeypatch):
    """The observer is behind, and a look is due after each verdict."""
    monkeypatch.setattr(watched, "LARGEST_BATCH", 1)
    versions, looks, go = [], [], threading.Event()

    class Slow(Observer):
        def verdicts(self, batch):
            go.wait(60)
            versions.extend(verdict.version for verdict in batch)

        def look(self, look):
            looks.append(look.version)
            versions.append(look.version)

        def evaluated(self, at, version, error):
            versions.append(version)

    with Watched(make(), [Slow()], every=1e-6) as server:
        for client, update in uploads(30):
            server.submit(client, update, server.version)
            server.evaluated(0.5)
        go.set()
        assert server.flush()
    assert versions == sorted(versions) and len(versions) == 60 + len(looks) and looks[-1] == 30
    assert len(looks) > 1


def test_a_look_is_told_even_if_verdicts_are_dropped(monkeypatch):
    monkeypatch.setattr(watched, "MOST_WAITING", 0)
    notes = Notes()
    with Watched(make(), [notes], every=0.01) as server:
        server.submit(0, torch.ones(D), 0)
        while not notes.looks:
            time.sleep(0.001)
    assert notes.seen == [] and notes.lost == 1


def test_a_closed_watched_keeps_nothing():
    notes = Notes()
    server = Watched(make(), [notes], every=0)
    server.submit(0, torch.ones(D), 0)
    server.close()
    server.close()
    for client, update in uploads(20):
        server.submit(client, update, server.version)
    server.leave(1)
    server.evaluated(0.5)
    assert server.flush(5) and server._waiting.qsize() == 0 and server.version == 21
    assert len(notes.seen) == 1 and notes.errors == [] and notes.lost == 0


@pytest.mark.parametrize("n", [8, 600])
def test_agreement_is_that_of_the_mean_updates(device, n):
    """600 clients: more than one block of rows. The last three: with one upload, only noise, and not present."""
    updates = torch.randn(n, 40, generator=torch.Generator().manual_seed(1)).double() + 1
    updates[3] *= -2
    means = updates @ updates.T
    means[-3] = means[:, -3] = 0
    means[-2, -2] = 1e-6
    present = torch.arange(n) != n - 1
    with_others, with_itself, group = agreement(means.to(device), present.to(device))
    good, norms = updates[:-3], updates.norm(dim=1)[:-3]
    unit = good / norms[:, None]
    rest = unit.sum(0) - unit
    assert np.allclose(with_others[:-3], (unit * rest).sum(1) / rest.norm(dim=1))
    assert np.isnan(with_others[-3:]).all() and with_others[3] < 0 < np.median(with_others[:-3])
    middle = torch.cat([norms, torch.tensor([1e-3]).double()]).median()
    assert np.allclose(with_itself[:-3], norms / middle)
    assert np.isnan(with_itself[[-3, -1]]).all() and with_itself[-2] < 0.01
    alike = unit @ unit.T > 0.3
    sizes = alike.sum(1)
    assert np.allclose(group[:-3], [min(sizes[k], sizes[alike[k]].double().mean()) for k in range(n - 3)])
    assert np.isnan(group[-3:]).all() and len(set(group[:-3])) > 1


def test_agreement_of_nobody_is_not_known(device):
    known = agreement(torch.zeros(3, 3, device=device).double(), torch.ones(3, device=device).bool())
    assert len(known) == 3 and np.isnan(known).all()


def test_names_events_and_evaluations():
    notes = Notes()
    with Watched(make(), [notes], every=0, names={3: "three"}) as server:
        server.submit(3, torch.ones(D), 0)
        event = SimpleNamespace(kind="joined", slot=1, node=77, version=1, reason="")
        server.event(event)
        server.submit(1, torch.ones(D), 1)
        server.event(SimpleNamespace(kind="accepted", slot=1, node=77, version=2, reason=""))  # submit told it
        server.evaluated(0.25)
        server.leave(1)
        server.forget(1)
        server.submit(1, torch.ones(D), 2)
    told = [(verdict.kind, verdict.client, verdict.who) for verdict in notes.seen]
    assert told == [
        ("accepted", 3, "three"),
        ("joined", 1, "77"),
        ("accepted", 1, "77"),
        ("left", 1, "77"),
        ("forgotten", 1, "77"),
        ("accepted", 1, ""),
    ]
    assert notes.errors == [(2, 0.25)]


def test_an_observer_that_fails_harms_nobody(caplog):
    class Broken(Observer):
        def verdicts(self, batch):
            raise OSError("disk full")

        look = evaluated = verdicts

    notes = Notes()
    with Watched(make(), [Broken(), notes], every=0.01) as server:
        for client, update in uploads(20):
            server.submit(client, update, server.version)
        assert server.flush()
    assert len(notes.seen) == 20 and server.version == 20 and notes.looks
    assert "Broken.verdicts failed" in caplog.text


def test_a_slow_observer_delays_no_submit_and_its_losses_are_counted(monkeypatch):
    monkeypatch.setattr(watched, "MOST_WAITING", 5)
    go = threading.Event()

    class Slow(Notes):
        def verdicts(self, batch):
            go.wait(60)
            super().verdicts(batch)

    notes = Slow()
    with Watched(make(), [notes], every=0) as server:
        server.submit(0, torch.ones(D), 0)
        while server._waiting.qsize():  # the thread has taken it and waits
            time.sleep(0.001)
        for client, update in uploads(30):
            server.submit(client, update, server.version)
        go.set()
        assert server.flush()
    assert (len(notes.seen), notes.lost) == (6, 25) and server.version == 31


def test_errors_of_a_call_are_the_servers():
    notes = Notes()
    with Watched(make(), [notes], every=0) as server:
        with pytest.raises(ValueError, match=r"SecureAFL.submit: client must lie in 0\.\.5, got 9"):
            server.submit(9, torch.ones(D), 0)
        with pytest.raises(ValueError, match=r"SecureAFL\.forget"):
            server.forget(-1)
    assert notes.seen == []
    with pytest.raises(ValueError, match="every must be a finite number of seconds, 0 or more, got -1"):
        Watched(make(), [], every=-1)


class Told(Observer):
    def __init__(self, enough=0):
        self.count, self.enough = 0, enough
        self.began, self.go, self.done = threading.Event(), threading.Event(), threading.Event()

    def verdicts(self, batch):
        self.began.set()
        assert self.go.wait(60)
        self.count += len(batch)
        if self.count >= self.enough:
            self.done.set()


def test_observers_gather_verdicts_but_no_one_waits_for_that(monkeypatch):
    """A day to gather: only `flush`, a full batch and `close` end it."""
    monkeypatch.setattr(watched, "GATHER", 86_400.0)
    monkeypatch.setattr(watched, "LARGEST_BATCH", 5)
    told = Told(enough=21)
    with Watched(make(), [told], every=0) as server:
        server.submit(0, torch.ones(D), 0)
        while not told.began.is_set():
            server.flush(0.01)
        for _ in range(23):
            server.submit(0, torch.ones(D), server.version)
        told.go.set()
        assert told.done.wait(60)  # full batches are told at once
        assert server.flush(60) and told.count == 24
        server.submit(0, torch.ones(D), server.version)
    assert told.count == 25
