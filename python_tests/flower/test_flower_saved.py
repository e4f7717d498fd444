"""A killed loop goes on from its checkpoint, which is untrusted input."""

import pytest
import torch

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from fleets import GOAL, LR, START, honest, says, server, simulated, start
from states import identical

from secureafl_ext.checkpoint import files
from secureafl_ext.defenses import DEFENSES, Trusted, make
from secureafl_ext.flower import Layout


@pytest.fixture
def clock(monkeypatch):
    return simulated(monkeypatch)


def test_killed_and_resumed_goes_on_with_the_same_state(clock, tmp_path):
    path = tmp_path / "loop.safetensors"
    fleet = {2**63 + 9: honest(1.0, 0.1, 1), 8: honest(1.6, 0.1, 2), 7: says(2)}
    one, _, _ = start(fleet, clock, checkpoint=path, every=10)
    with pytest.raises(KeyboardInterrupt):
        one.watch = lambda event: interrupt() if event.version == 27 else None
        one.run(100)
    again, _, events = start(fleet, clock, checkpoint=path, every=10)
    assert again.server.version == 20  # of 27 rounds, the last whole ten
    assert again.slots.of == one.slots.of == {2**63 + 9: 0, 8: 1, 7: 2}
    assert again.totals()["accepted"] + again.totals()["rejected"] == 20
    assert torch.equal(again.server.model, one.server.model_at(20))
    again.run(40)
    back = [event for event in events if event.node == 8 and event.kind != "joined"]
    assert back[0].reason != "accepted: first contact" and again.server.version == 40
    final, _, _ = start(fleet, clock, checkpoint=path)
    identical(final.server, again.server)
    assert final.server.version == 40 and final.tally == again.tally


def interrupt():
    raise KeyboardInterrupt


def test_after_a_resume_slots_of_nodes_that_do_not_come_back_are_given_away(clock, tmp_path):
    path = tmp_path / "loop.safetensors"
    one, _, _ = start({9: honest(), 8: honest(), 7: honest()}, clock, checkpoint=path)
    one.run(9)
    again, _, events = start({9: honest(), 5: honest(), 4: honest()}, clock, checkpoint=path)
    again.run(30)
    assert again.slots.of == {9: 0, 5: 1, 4: 2}
    assert next(event for event in events if event.node == 9 and event.kind != "joined").reason == "accepted"
    assert "first contact" in next(event for event in events if event.node == 5 and event.kind != "joined").reason


def test_carried_buffers_are_in_the_checkpoint(clock, tmp_path):
    path = tmp_path / "loop.safetensors"
    one, _, _ = start({9: honest()}, clock, checkpoint=path)
    one.layout.carried["count"].fill_(11)
    one.run(1)
    again, grid, _ = start({9: honest()}, clock, checkpoint=path)
    assert again.state_dict()["count"] == 11
    again.run(2)
    assert grid.pushed[0][2].content["arrays"]["count"].numpy() == 11


def test_a_file_that_does_not_fit_is_refused(clock, tmp_path):
    path = tmp_path / "loop.safetensors"
    server().save(path)
    with pytest.raises(ValueError, match=r"must be a checkpoint of a loop .*, got a file of SecureAFL\.save"):
        start({}, clock, checkpoint=path)
    one, _, _ = start({9: honest(), 8: honest(), 7: honest()}, clock, checkpoint=tmp_path / "other")
    one.run(3)
    with pytest.raises(ValueError, match="has 3 slots in use, the server 2 clients"):
        start({}, clock, server(clients=2), checkpoint=tmp_path / "other")


TRUSTED = Trusted(lambda model: model - GOAL, lambda model: (torch.tensor(1.0), torch.tensor(0.5)))


# One takes a step per ten uploads, the other averages each client's last ten: they are on their way after 120 rounds.
SLOW = {"fedbuff-trimmed-mean", "demoa"}


@pytest.mark.parametrize("name", DEFENSES)
def test_every_defense_can_be_the_server_and_resumes(clock, tmp_path, name):
    def judge():
        trusted = TRUSTED if DEFENSES[name].needs_trusted else None
        return make(name, Layout(START).flatten(START), 4, LR, 50, trusted)

    path = tmp_path / "loop.safetensors"
    fleet = {9: honest(1.0, 0.1), 8: honest(1.3, 0.1), 7: honest(1.9, 0.1), 6: honest(2.3, 0.1)}
    one, _, _ = start(fleet, clock, judge(), checkpoint=path)
    one.run(120)
    left = (one.server.model - GOAL).norm() / GOAL.norm()
    assert one.server.version == 120 and left < (0.75 if name in SLOW else 0.5)
    again, _, _ = start(fleet, clock, judge(), checkpoint=path)
    identical(again.server, one.server)


def changed(path, change):
    """The checkpoint, after `change` of its tensors and of the rest."""
    tensors, about = files.read(path)
    change(tensors, about)
    files.write(path, tensors, about)


def setting(field, value):
    return lambda tensors, about: about.update({field: value})


def tensor(name, value=None):
    return lambda tensors, about: tensors.pop(name) if value is None else tensors.update({name: value})


DAMAGED = {
    "no server": (setting("server", None), "server must be a dict, got None"),
    "no slots": (lambda tensors, about: about.pop("slots"), "slots must be a list, got None"),
    "slots that are no list": (setting("slots", {"9": 0}), "slots must be a list"),
    "a slot that is no pair": (setting("slots", [[9, 0], [8]]), r"slots must be pairs .* got \[8\]"),
    "a slot that is no number": (setting("slots", [[9, "0"]]), "slots must be pairs"),
    "a slot that is a truth": (setting("slots", [[9, True]]), "slots must be pairs"),
    "a negative slot": (setting("slots", [[9, -1]]), "slots must be pairs"),
    "a slot out of range": (setting("slots", [[9, 3]]), "has 4 slots in use, the server 3 clients"),
    "one slot for two": (setting("slots", [[9, 0], [8, 0]]), "different nodes with different slots"),
    "two slots for one": (setting("slots", [[9, 0], [9, 1]]), "different nodes with different slots"),
    "a node that is no number": (setting("slots", [[[], 0]]), "slots must be pairs"),
    "away without a slot": (setting("away", [5]), r"away must be nodes that have a slot, each once, got \[5\]"),
    "away twice": (setting("away", [9, 9]), "away must be"),
    "away as a list": (setting("away", [[9]]), "away must be"),
    "a tally of no pairs": (setting("tally", [9]), "tally must be pairs"),
    "a tally of a stranger": (setting("tally", [[5, {}]]), "tally must be nodes that have a slot"),
    "a tally of a list": (setting("tally", [[[], {}]]), "tally must be nodes that have a slot"),
    "a tally twice": (setting("tally", [[9, {}], [9, {}]]), "each once, got 9"),
    "an unknown kind": (setting("tally", [[9, {"hacked": 1}]]), "tally must be counts by kind"),
    "a negative count": (setting("tally", [[None, {"late": -1}]]), "tally must be counts by kind"),
    "half a count": (setting("tally", [[9, {"late": 0.5}]]), "tally must be counts by kind"),
    "a long count": (setting("tally", [[9, {"late": 2**64}]]), "tally must be counts by kind"),
    "carried with another shape": (tensor("carried.count", torch.zeros(2, dtype=torch.int64)), r"count must be \(\)"),
    "carried with another dtype": (tensor("carried.count", torch.tensor(1.0)), r"count must be \(\) int64"),
    "carried missing": (tensor("carried.count"), "carried must be the layout's names, got .*count"),
    "carried unknown": (tensor("carried.w", torch.zeros(4, 3)), "carried must be the layout's names, got .*w"),
    "a tensor of nobody": (tensor("other", torch.zeros(1)), r"tensors must be named .* got \['other'\]"),
    "a tensor and a number": (setting("server", {"models": 1}), r"server must be names that no tensor has"),
    "a server that does not fit": (tensor("server.models", torch.zeros(1, 14)), "models must be"),
    "a server without its models": (tensor("server.models"), "models"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused_and_nothing_changes(clock, tmp_path, name):
    change, words = DAMAGED[name]
    path = tmp_path / "loop.safetensors"
    one, _, _ = start({9: honest(), 8: honest()}, clock, checkpoint=path)
    one.run(3)
    one.path = None
    one.run(5)
    one.path = path
    changed(path, change)
    before = one.server.state_dict(), *map(dict, (one.layout.carried, one.slots.of, one.slots.away, one.tally))
    with pytest.raises(ValueError, match=words) as refusal:
        one.load()
    assert str(path) in str(refusal.value) and str(refusal.value).startswith("Loop")
    assert one.server.version == before[0]["version"] == 5
    for key, value in one.server.state_dict().items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(before[0][key])), key
    assert before[1:] == (one.layout.carried, one.slots.of, one.slots.away, one.tally)
    with pytest.raises(ValueError, match=words):
        start({}, clock, checkpoint=path)
