"""Adaptive against a rule of which it knows nothing, such as that of a plug-in."""

from dataclasses import replace

import pytest
import scenes
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from secureafl_ext.attacks import make
from secureafl_ext.attacks.evasion import WAYS, ball
from secureafl_ext.defenses import RuleServer, Verdict
from secureafl_ext.defenses.aflguard import AFLGuard


class Shell:
    """Accepts an update within `radius` of the last accepted one; counts what it judged, in a tensor and a number."""

    REASONS = ("accepted", "rejected: too far")

    def __init__(self, model, clients, radius=0.5):
        self.last, self.radius = torch.zeros_like(model), radius
        self.judged, self.calls, self.stale = torch.zeros((), dtype=torch.int64, device=model.device), 0, None

    def near(self, arrival):
        near = arrival.finite & ((arrival.update - self.last).norm() <= self.radius)
        return near & (arrival.staleness <= 2)

    def judge(self, arrival):
        accepted = self.near(arrival)
        self.last.copy_(torch.where(accepted, arrival.update, self.last))
        self.judged += 1
        self.calls, self.stale = self.calls + 1, arrival.staleness
        return Verdict(arrival.update, accepted, torch.zeros_like(arrival.staleness), (~accepted).long())


class WithTest(Shell):
    """Says itself whether it would accept."""

    def would_accept(self, arrival):
        return self.near(arrival)


class WithNearest(Shell):
    """Says itself how far one can go."""

    def nearest_accepted(self, arrival):
        return ball(arrival.update, self.last, torch.tensor(0.999 * self.radius, device=arrival.update.device))


RULES = (Shell, WithTest, WithNearest)


def at_shell(rule, device="cpu", radius=0.5, staleness=1.0):
    run = scenes.scene(device=device)
    model = run.net.start(0).to(device)
    attack, made = make("adaptive", run), rule(model, run.clients, radius)
    server = RuleServer(made, "shell", model, run.clients, run.lr, 4)
    view = scenes.view(run, attack, server=server, model=model, staleness=staleness)
    mean = run.net.gradients(view.model, *run.data.train(view.honest)).mean(0)
    made.last.copy_(mean)
    return attack, made, view, mean


@pytest.mark.parametrize("rule", RULES)
def test_an_unknown_rule_is_met_at_the_edge_of_what_it_accepts(rule, device):
    attack, made, view, mean = at_shell(rule, device)
    before = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in vars(made).items()}
    held = {name: id(value) for name, value in vars(made).items() if isinstance(value, torch.Tensor)}
    update = attack.update(view)
    assert (update - mean).norm().item() == pytest.approx(0.5, rel=2e-3)
    assert torch.cosine_similarity(update - mean, -attack.average.sign(), dim=0).item() == pytest.approx(1, abs=1e-4)
    # As if nothing had come: the same values in the same memory, and the number that is no tensor.
    assert vars(made).keys() == before.keys() and (made.calls, made.stale) == (0, None)
    assert all(id(vars(made)[name]) == place for name, place in held.items())
    assert torch.equal(made.last, before["last"]) and made.judged == 0
    assert view.server.submit(int(view.client), update, 0).accepted and made.calls == 1


@pytest.mark.parametrize("rule", [Shell, WithTest])
def test_an_unknown_rule_that_takes_the_wish_gets_it(rule):
    attack, _, view, mean = at_shell(rule, radius=1e6)
    update = attack.update(view)
    assert torch.equal(update, mean + 10 * -attack.average.sign())


@pytest.mark.parametrize("rule", [Shell, WithTest])
def test_an_unknown_rule_is_asked_with_the_true_staleness(rule):
    """An upload too stale for it is refused whatever it is: then the honest mean is as good as anything."""
    attack, _, view, mean = at_shell(rule, staleness=3.0)
    torch.testing.assert_close(attack.update(view), mean)


@pytest.mark.parametrize("rule", RULES)
def test_an_unknown_rule_is_met_without_waiting_for_the_device(rule):
    attack, _, view, mean = at_shell(rule)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {key: mode.from_tensor(x) for key, x in vars(view).items() if isinstance(x, torch.Tensor)}
        update = attack.update(replace(view, **fake))
        assert update.shape == mean.shape
        with pytest.raises(Exception, match=r"item|local_scalar"):
            bool(update.sum() > 0)


def test_a_rule_derived_from_a_compared_one_is_unknown():
    """What a subclass changes would escape the way that was made for its parent."""

    class Never(AFLGuard):
        def judge(self, arrival):
            return super().judge(arrival)._replace(accepted=torch.zeros_like(arrival.finite))

    assert Never not in WAYS
    run = scenes.scene()
    model = run.net.start(0)
    server = RuleServer(Never(model, 8, scenes.trusted(run)), "never", model, 8, run.lr, 4)
    attack = make("adaptive", run)
    view = scenes.view(run, attack, server=server, model=model)
    mean = run.net.gradients(view.model, *run.data.train(view.honest)).mean(0)
    torch.testing.assert_close(attack.update(view), mean)
