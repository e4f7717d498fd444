"""Adaptive against the rules over last updates: the push that moves their step the most, and no trace of the trials."""

import pytest
import scenes
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from secureafl_ext.attacks import make
from secureafl_ext.attacks.evasion import BEST, SHARES, WAYS, rehearsed, strongest
from secureafl_ext.defenses.base import dot

BY_TRIALS = {
    "foolsgold": {}, "flame": {}, "dnc": {"malicious": 3}, "nnm-trimmed-mean": {"malicious": 3},
    "nnm-geometric-median": {"malicious": 3}, "krum": {"malicious": 3}, "centered-clip": {"radius": 1.0}, "demoa": {},
    "weighted": {},
}  # fmt: skip


def met(name, rounds=20, **settings):
    """A server that has heard from every client, and what adaptive sends it next."""
    run = scenes.scene(lr=0.05)
    server, attack = scenes.server(run, name, **settings), make("adaptive", run)
    for t in range(rounds):
        scenes.honest_round(run, server, t % scenes.CLIENTS, t)
    view = scenes.view(run, attack, scenes.MALICIOUS[0], rounds, server, server.model.clone())
    mean = run.net.gradients(view.model, *run.data.train(view.honest)).mean(0)
    update = attack.update(view)
    return server, view, mean, -10 * attack.average.sign(), update


def reach(server, view, update, push):
    arrival = server.arrival(view.client, update, view.model, view.staleness)
    return float(dot(rehearsed(server.rule, arrival).step, push))


@pytest.mark.parametrize("name", BY_TRIALS)
def test_no_other_share_of_the_push_moves_the_step_farther(name):
    server, view, mean, push, update = met(name, **BY_TRIALS[name])
    assert WAYS[type(server.rule)] is strongest
    others = [reach(server, view, mean + share * push, push) for share in SHARES]
    assert reach(server, view, update, push) == pytest.approx(max(others), rel=1e-6)
    assert max(others) > others[0], "a push must pay"
    assert reach(server, view, update, push) > reach(server, view, mean, push)


@pytest.mark.parametrize("name", ["krum", "dnc", "flame", "nnm-trimmed-mean", "nnm-geometric-median"])
def test_these_rules_leave_the_whole_wish_without_effect(name):
    """So adaptive must not send it: the share that it sends moves the step farther."""
    server, view, mean, push, update = met(name, **BY_TRIALS[name])
    assert (update - mean).norm() < 0.5 * push.norm()
    assert reach(server, view, update, push) > reach(server, view, mean + push, push)


@pytest.mark.parametrize("name", BY_TRIALS)
def test_trials_leave_no_trace(name):
    server, view, mean, push, _ = met(name, **BY_TRIALS[name])
    before = server.state_dict()
    strongest(server.rule, server, view, mean, push)
    for key, value in server.state_dict().items():
        torch.testing.assert_close(torch.as_tensor(value), torch.as_tensor(before[key]), rtol=0, atol=0, equal_nan=True)


def test_fltrust_is_met_at_45_degrees():
    server, view, _, _, update = met("fltrust")
    trusted = server.rule.trusted.gradient(view.current)
    assert torch.cosine_similarity(update, trusted, dim=0).item() == pytest.approx(BEST["positive"], abs=1e-3)


def test_fedbuff_is_sent_what_its_trimmed_mean_keeps():
    """Alone in a buffer of which one value is trimmed on either side, any longer push is cut to the same value."""
    server, _, mean, push, update = met("fedbuff-trimmed-mean", 9, buffer=4, trim=1)
    rule = server.rule
    assert int(rule.count) == 1

    def middle(sent):
        rows = rule.buffered.clone()
        rows[1] = sent
        return float(dot(rows.sort(0).values[1:3].mean(0), push))

    assert middle(update) == pytest.approx(max(middle(mean + share * push) for share in SHARES), rel=1e-6)
    assert (update - mean).norm() < 0.5 * push.norm() and middle(update) > middle(mean)


@pytest.mark.parametrize("name", ["krum", "fltrust", "fedbuff-trimmed-mean"])  # one for each way
def test_trials_never_wait_for_the_device(name):
    server, view, mean, push, _ = met(name, **BY_TRIALS.get(name, {}))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        way = WAYS[type(server.rule)]
        sent = way(server.rule, server, view, mode.from_tensor(mean), mode.from_tensor(push))
        assert sent.shape == mean.shape
        with pytest.raises(Exception, match=r"item|local_scalar"):
            bool(sent.sum() > 0)
