"""Every attack through the table, the simple ones by hand, and Min-Max against the original's search."""

import math
from dataclasses import replace
from functools import cache

import pytest
import scenes
import torch
from scenes import KINDS
from torch._subclasses.fake_tensor import FakeTensorMode

from secureafl_ext.attacks import ATTACKS, make
from secureafl_ext.attacks.crafted import PRESETS
from secureafl_ext.attacks.min_max import DIRECTIONS, largest
from secureafl_ext.defenses import DEFENSES
from secureafl_ext.tasks.models import cnn, resnet20


def defined(kind):
    return [name for name, about in ATTACKS.items() if kind != "regression" or not about.needs_labels]


@cache
def rounds(name, kind="grey", device="cpu", seed=0, number=3, **options):
    """What an attack sends, on AsyncSGD, each of its clients in turn."""
    run = scenes.scene(kind, device, seed)
    attack, server = make(name, run, **options), scenes.server(scenes.scene(kind, device), "async-sgd")
    sent = []
    clients = torch.tensor([scenes.MALICIOUS[t % 3] for t in range(number)])
    if order := getattr(attack, "order", None):
        clients = order(clients)
    for t, client in enumerate(clients.tolist()):
        view = scenes.view(run, attack, client, t, server)
        attack.before()
        sent.append(attack.update(view))
        server.submit(client, sent[-1], server.version)
        attack.after(view, server.model)
    return torch.stack(sent)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in defined(kind)])
def test_sends_finite_updates_of_the_models_shape(device, kind, name):
    sent = rounds(name, kind, device)
    assert sent.shape == (3, scenes.small_net(scenes.dataset(kind)).size)
    assert sent.dtype == torch.float32 and sent.device.type == device and not sent.requires_grad
    assert sent.isfinite().all() and (sent != 0).any(1).all()


@pytest.mark.parametrize("name", ATTACKS)
def test_same_seed_same_bits(device, name):
    first, other = (rounds(name, device=device, seed=seed) for seed in (0, 4))
    again = rounds.__wrapped__(name, device=device, seed=0)
    assert torch.equal(first, again)
    draws = name in ("gaussian", "3dfed", "squads", "mosaic", "decoy") or make(name, scenes.scene()).trigger is not None
    assert torch.equal(first, other) != draws


OTHERS = [name for name in DEFENSES if name != "async-sgd" and "-i" not in name]  # one attack looks at the defense


@pytest.mark.parametrize(
    ("name", "defense"), [(name, "async-sgd") for name in ATTACKS] + [("adaptive", name) for name in OTHERS]
)
def test_a_round_never_waits_for_the_device(name, defense):
    """Fake tensors have no values: whoever reads one on the host gets an error."""
    run = scenes.scene()
    attack, server = make(name, run), scenes.server(run, defense)
    view = scenes.view(run, attack, server=server)
    attack.before()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {key: mode.from_tensor(x) for key, x in vars(view).items() if isinstance(x, torch.Tensor)}
        update = attack.update(replace(view, **fake))
        attack.after(replace(view, **fake), fake["current"])
        assert update.shape == (run.net.size,)
        with pytest.raises(Exception, match=r"item|local_scalar"):
            bool(update.sum() > 0)


@pytest.mark.parametrize("name", ATTACKS)
def test_what_was_sent_keeps_its_values(name):
    run = scenes.scene()
    attack = make(name, run)
    view = scenes.view(run, attack, server=scenes.server(run, "async-sgd"))
    attack.before()
    update = attack.update(view)
    kept, model = update.clone(), view.model.clone()
    attack.before()
    attack.update(replace(view, model=view.model + 1))
    assert torch.equal(update, kept) and torch.equal(view.model, model)


CRAFTED = {"direction": "ascent", "strength": 3.0, "squads": 3, "cosine": 0.6, "mosaic": True,
           "honest_part": False, "imitate": 2, "camouflage": 0.5, "start": 0.5, "stop": 0.0,
           "target": 3}  # fmt: skip
OTHER_OPTIONS = {
    "sign-flip": {"scale": 3.0},
    "gaussian": {"std": 1.0},
    "scaling": {"factor": 2.0, "target": 3, "share": 1.0},
    "dba": {"factor": 1.0, "target": 3, "share": 1.0},
    "pgd": {"radius": 0.2, "eps": 1e-3, "steps": 2, "target": 3, "share": 1.0},
    "neurotoxin": {"cap": 0.5, "keep": 0.5, "steps": 2, "target": 3, "share": 1.0},
    "3dfed": {"indicator_gain": 1.0, "indicator_cap": 1e-4, "group": 3, "clean": 0.0, "backdoor": 0.0,
              "distance": 0.0, "steps": 2, "target": 3, "share": 1.0},
    "min-max": {"p": "sign", "gamma0": 1e-3, "honest": 2},
    "adaptive": {"gamma": 1.0, "momentum": 0.0, "honest": 2},
    "alie": {"z": 1.0, "honest": 2},
    "ipm": {"epsilon": 1.0, "honest": 2},
    "mimic": {"victim": 2, "factor": -1.0},
    **{name: CRAFTED for name in ("crafted", *PRESETS)},
}  # fmt: skip
# Told apart where they matter, in files of their own.
ELSEWHERE = {"3dfed": {"lift", "refresh", "decoys", "push"}, "adaptive": {"saturation", "camps"}}
ELSEWHERE |= {name: {"duty", "period", "silence", "decoys"} for name in ("crafted", *PRESETS)}
# An option of crafted matters only together with some others.
TOGETHER = {"squads": {"cosine": 0.5}, "mosaic": {"squads": 2}, "target": {"direction": "backdoor"}}


@pytest.mark.parametrize(
    ("name", "option"), [(name, option) for name, all in OTHER_OPTIONS.items() for option in all if name not in PRESETS]
)
def test_every_option_matters(name, option):
    others = TOGETHER.get(option, {}) if name == "crafted" else {}
    assert not torch.equal(rounds(name, **others), rounds(name, **others, **{option: OTHER_OPTIONS[name][option]}))


def test_every_option_is_covered_above():
    for name, kind in ATTACKS.items():
        assert set(kind.settings) == set(OTHER_OPTIONS.get(name, {})) | ELSEWHERE.get(name, set())


def test_the_table_says_which_option_is_free_and_which_attacks_need_labels():
    assert next(iter(ATTACKS)) == "none" and len(ATTACKS) == 1 + 10 + 4 + len(PRESETS)
    for kind in ATTACKS.values():
        assert kind.free is None or kind.free in kind.settings
    grey = {name: make(name, scenes.scene()) for name in ATTACKS}
    targeted = {name for name, attack in grey.items() if attack.trigger is not None}
    assert targeted == {"scaling", "dba", "pgd", "neurotoxin", "3dfed", "squad-backdoor"}
    assert targeted | {"label-flip"} == {name for name, kind in ATTACKS.items() if kind.needs_labels}


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("signflip", {}, "unknown attack 'signflip'; choose from none, label-flip, sign-flip"),
        ("pgd", {"factor": 1}, "unknown option 'factor' of pgd; choose from radius, eps, steps, target, share"),
        ("none", {"scale": 1}, "unknown option 'scale' of none; choose from nothing"),
        ("min-max", {"p": "mean"}, "min-max: p must be one of std, unit, sign, got 'mean'"),
        ("min-max", {"honest": 6}, "min-max: honest must be 1 to 5, the honest clients, got 6"),
        ("scaling", {"target": 10}, "Trigger: target must be 0 to 9, got 10"),
        ("3dfed", {"refresh": 0}, "3dfed: refresh must be 1 or more, got 0"),
        ("neurotoxin", {"keep": 0}, "neurotoxin: keep must be above 0, at most 1, got 0"),
        ("adaptive", {"momentum": 1}, "adaptive: momentum must be 0 or more, below 1, got 1"),
    ],
)
def test_refusals(name, options, words):
    with pytest.raises(ValueError, match=words):
        make(name, scenes.scene(), **options)


@pytest.mark.parametrize("name", [name for name, kind in ATTACKS.items() if kind.needs_labels])
def test_regression_has_no_labels_to_change(name):
    with pytest.raises(ValueError, match=f"{name}: data must have classes, .* got the regression 'regression'"):
        make(name, scenes.scene("regression"))


@pytest.mark.parametrize("name", ATTACKS)
def test_can_be_set_up_without_attackers(name):
    attack = make(name, scenes.scene(malicious=()))
    attack.before()
    assert attack.own >= 1


# By hand


def gradient(run, view, labels=None):
    x, y = run.data.train(view.own[0])
    return run.net.gradient(view.model, x, y if labels is None else labels(y))


def sent(name, kind="grey", **options):
    run = scenes.scene(kind)
    attack = make(name, run, **options)
    view = scenes.view(run, attack)
    attack.before()
    return run, view, attack.update(view)


def test_none_is_the_honest_gradient():
    run, view, update = sent("none")
    assert torch.equal(update, gradient(run, view))


@pytest.mark.parametrize(("kind", "classes"), [("grey", 10), ("colour", 12)])
def test_label_flip_counts_labels_from_the_other_end(kind, classes):
    run, view, update = sent("label-flip", kind)
    swap = torch.arange(classes).flip(0)  # 0 <-> Z - 1
    assert torch.equal(update, gradient(run, view, lambda y: swap[y]))
    assert not torch.equal(update, gradient(run, view))


def test_sign_flip_turns_round():
    run, view, update = sent("sign-flip")
    assert torch.equal(update, -gradient(run, view))
    _, _, longer = sent("sign-flip", scale=10.0)
    torch.testing.assert_close(longer, -10 * gradient(run, view))


def test_gaussian_is_fresh_noise_of_the_given_deviation():
    noise = rounds("gaussian", number=40)
    assert noise.std().item() == pytest.approx(200, rel=0.03) and abs(noise.mean().item()) < 5
    assert abs(torch.corrcoef(noise[:2])[0, 1]) < 0.2


@pytest.mark.parametrize(("model", "shape"), [(cnn, (1, 12, 12)), (resnet20, (3, 8, 8))])
def test_gradients_are_the_gradient_of_each_minibatch(device, random, model, shape):
    net = model(shape, 10)
    x, y = torch.randn(3, 4, *shape, generator=random), torch.randint(10, (3, 4), generator=random)
    vector, x, y = net.start(0).to(device), x.to(device), y.to(device)
    each = torch.stack([net.gradient(vector, *batch) for batch in zip(x, y, strict=True)])
    got = net.gradients(vector, x, y)
    assert not got.requires_grad
    torch.testing.assert_close(got, each, rtol=1e-3, atol=1e-4 * each.abs().max().item())


# Min-Max


def searched(gradients, p, gamma=10.0, step=5.0, tolerance=1e-5):
    """The original's halving search, trial by trial."""
    mean, best = gradients.mean(0), 0.0
    bound = max((one - other).norm() for one in gradients for other in gradients)
    while abs(best - gamma) > tolerance:
        fits = max((mean - gamma * p - one).norm() for one in gradients) <= bound
        best, gamma = (gamma, gamma + step) if fits else (best, gamma - step)
        step /= 2
    return best


@pytest.mark.parametrize("p", DIRECTIONS)
def test_min_max_ends_where_the_search_of_the_original_does(random, p):
    for scale in (0.1, 1.0):
        gradients = scale * torch.randn(6, 30, generator=random, dtype=torch.float64) + 0.3
        direction = DIRECTIONS[p](gradients, gradients.mean(0))
        gamma = largest(gradients, gradients.mean(0), direction)
        assert searched(gradients, direction) == pytest.approx(gamma.item() - 1e-5, abs=1e-5)


def test_min_max_by_hand():
    gradients = torch.tensor([[0.0, 0.0], [2.0, 0.0]], dtype=torch.float64)  # diameter 2, mean (1, 0)
    mean = gradients.mean(0)
    across = largest(gradients, mean, torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert across.item() == pytest.approx(math.sqrt(3))  # an equilateral triangle
    assert largest(gradients, mean, DIRECTIONS["unit"](gradients, mean)).item() == pytest.approx(1)
    assert DIRECTIONS["std"](gradients, mean).tolist() == pytest.approx([math.sqrt(2), 0])  # unbiased
    assert DIRECTIONS["sign"](gradients, mean).tolist() == [1, 0]
    assert largest(gradients, mean, torch.zeros(2, dtype=torch.float64)).item() == 0


@pytest.mark.parametrize("p", DIRECTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_min_max_is_as_far_away_as_the_honest_are_from_each_other(kind, p):
    run, view, update = sent("min-max", kind, p=p)
    honest = run.net.gradients(view.model, *run.data.train(view.honest)).double()
    assert len(honest) == 5
    diameter = torch.cdist(honest, honest).max()
    farthest = (update - honest).norm(dim=1).max()
    assert farthest <= diameter * (1 + 1e-5)
    more = honest.mean(0) + 1.001 * (update - honest.mean(0))  # a little more gamma
    assert (more - honest).norm(dim=1).max() > diameter * (1 + 1e-5)


def test_min_max_of_the_spec():
    """Sections 3.9 and 7.7: 40 honest of deviation 0.05, d 2000; a mean of deviation 0.02 gives their numbers."""
    random = torch.Generator().manual_seed(0)
    mu = 0.02 * torch.randn(2000, generator=random)
    gradients = mu + 0.05 * torch.randn(40, 2000, generator=random)
    mean = gradients.mean(0)
    ends = {"unit": (-1.0, 1.4), "sign": (-0.54, 1.7), "std": (0.40, 2.7)}
    for p, (cosine, length) in ends.items():
        direction = DIRECTIONS[p](gradients, mean)
        update = mean - largest(gradients, mean, direction).float() * direction
        assert torch.cosine_similarity(update, mean, dim=0).item() == pytest.approx(cosine, abs=0.05), p
        assert (update.norm() / mean.norm()).item() == pytest.approx(length, rel=0.08), p


def test_min_max_stops_where_the_search_would_but_for_a_unit_vector():
    run = scenes.scene()
    for p, capped in (("std", True), ("sign", True), ("unit", False)):
        attack = make("min-max", run, p=p, gamma0=1e-4)
        view = scenes.view(run, attack)
        honest = run.net.gradients(view.model, *run.data.train(view.honest))
        direction = DIRECTIONS[p](honest, honest.mean(0))
        gamma = (honest.mean(0) - attack.update(view)).norm() / direction.norm()
        assert (gamma.item() == pytest.approx(2e-4, rel=1e-2)) == capped


def test_min_max_of_one_honest_client_is_that_client():
    run, view, update = sent("min-max", honest=1)
    torch.testing.assert_close(update, run.net.gradients(view.model, *run.data.train(view.honest))[0])
