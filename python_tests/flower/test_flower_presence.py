"""A node that leaves stops pulling the model at once, and serves its probation again when it comes back."""

import pytest
import torch

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from fleets import GOAL, honest, kinds, server, simulated, start, trained

from secureafl_ext.defenses import make
from secureafl_ext.flower import Layout


@pytest.fixture
def clock(monkeypatch):
    return simulated(monkeypatch)


def harmful(message):
    return [(1.0, trained(message, lambda model: torch.full_like(model, 5.0)))]


def fleet(clock, **more):
    nodes = {9: honest(1.0, 0.1, 1), 8: honest(1.1, 0.1, 2), 7: honest(1.2, 0.1, 3), 6: harmful}
    return start(nodes, clock, server(4, rule="mean", filter=False), turns=1.0, **more)


def test_a_node_that_leaves_pulls_no_more(clock):
    one, grid, events = fleet(clock)
    one.run(40)
    assert one.server.present.all() and (one.server.model - GOAL).norm() > 3
    del grid.nodes[6]
    one._next_look = -torch.inf  # at once
    one.run(43)
    assert kinds(events, 6)[-1] == "left"
    assert one.server.present.tolist() == [True, True, True, False] and one.server.seen.all()
    one.run(160)
    assert (one.server.model - GOAL).norm() < 0.5
    grid.nodes[6] = harmful
    one.run(one.server.version + 8)
    accepted = kinds(events, 6)[kinds(events, 6).index("left") :].count("accepted")
    assert 0 < accepted < 3 and not one.server.present[3]
    one.run(one.server.version + 12)
    assert one.server.present.all()


def test_after_a_resume_a_node_that_is_gone_pulls_no_more(clock, tmp_path):
    one, _, _ = fleet(clock, checkpoint=tmp_path / "loop")
    one.run(40)
    again, grid, _ = fleet(clock, checkpoint=tmp_path / "loop")
    assert again.server.present.all()
    del grid.nodes[6]
    again.run(42)
    assert again.server.present.tolist() == [True, True, True, False]


def test_a_resume_that_has_nothing_to_do_does_not_take_present_nodes_for_absent_ones(clock, tmp_path):
    """It writes the checkpoint again before it has looked for any node."""
    one, _, _ = fleet(clock, checkpoint=tmp_path / "loop")
    one.run(40)
    done, _, _ = fleet(clock, checkpoint=tmp_path / "loop")
    done.run(40)
    again, grid, _ = fleet(clock, checkpoint=tmp_path / "loop")
    del grid.nodes[6]
    again.run(42)
    assert again.server.present.tolist() == [True, True, True, False]


def test_a_server_that_remembers_nobody_needs_no_leave(clock):
    """Other defenses than SecureAFL."""
    start_model = Layout({"w": torch.zeros(4, 3), "count": torch.tensor(5), "b": torch.zeros(2)})
    model = start_model.flatten({"w": torch.zeros(4, 3), "count": torch.tensor(5), "b": torch.zeros(2)})
    one, grid, events = start({9: honest(), 8: honest()}, clock, make("async-sgd", model, 3, 0.1, 50))
    one.run(6)
    del grid.nodes[8]
    one.run(10)
    assert kinds(events, 8)[-1] == "left" and one.server.version == 10
