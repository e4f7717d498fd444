"""3DFed part by part: constrained loss, lift, indicator, masks, decoys, adaptation."""

from dataclasses import replace
from itertools import pairwise

import pytest
import scenes
import torch
from torch import nn

from secureafl_ext.attacks import make
from secureafl_ext.attacks.threedfed import COLOUR, GREY, MANY, adapt, centred, layers, lifted, search
from secureafl_ext.attacks.trigger import poison
from secureafl_ext.tasks.models import Net, cnn, resnet20

FIVE = (0, 1, 2, 4, 6)


def start(kind="grey", malicious=FIVE, seed=0, **options):
    run = scenes.scene(kind, malicious=malicious, seed=seed)
    return run, make("3dfed", run, **options)


def gradient(run, model, index):
    return run.net.gradient(model, *run.data.train(index))


def test_layers_are_found_in_the_flat_vector():
    net = cnn((1, 28, 28), 10)
    run = scenes.scene(net=net)
    attack = make("3dfed", run)
    views = net.views(torch.arange(net.size))
    assert attack.quiet == slice(views["3.weight"][0, 0, 0, 0].item(), views["3.weight"][-1, -1, -1, -1].item() + 1)
    assert attack.output == (views["9.weight"][0, 0].item(), (10, 100), views["9.bias"][0].item())
    net = resnet20((3, 8, 8), 12)
    views = net.views(torch.arange(net.size))
    attack = make("3dfed", scenes.scene("colour", net=net))
    assert attack.quiet.start == views["blocks.8.second.weight"].min() and attack.output.bias == views["head.bias"][0]
    linear = Net(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Linear(5, 10, bias=False)), 10)
    attack = make("3dfed", scenes.scene(net=linear))
    assert attack.quiet == slice(0, 320) and attack.output == (325, (10, 5), None)
    assert layers(linear) == [(0, (5, 64)), (320, (5,)), (325, (10, 5))]


def test_refuses_a_net_without_an_output_layer():
    net = Net(lambda: nn.Sequential(nn.Conv2d(1, 10, 8), nn.Flatten()), 10)
    with pytest.raises(ValueError, match="3dfed: net must end in a linear layer of 10 rows, got none"):
        make("3dfed", scenes.scene(net=net))


def test_the_loss_is_the_weighted_sum_of_three():
    run, attack = start(lift=1.0, steps=2, clean=0.2, backdoor=0.5, distance=0.7)
    view = scenes.view(run, attack)

    def slope(model, index):
        leaf = model.clone().requires_grad_()
        clean = run.net.loss(leaf, *run.data.train(index))
        backdoor = run.net.loss(leaf, *poison(run.data, index, attack.trigger, 0.5))
        away = (leaf - view.model).norm()
        return torch.autograd.grad(0.2 * clean + 0.5 * backdoor + 0.7 * away, leaf)[0]

    first = slope(view.model, view.own[0])  # the norm has gradient 0 at 0
    both = first + slope(view.model - run.lr * first, view.own[1])
    attack.update(view)
    torch.testing.assert_close(attack.sent, both, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("honest", "length", "cap", "factor"), [(6, 2, 5, 3), (60, 2, 5, 5), (1, 2, 5, 1), (60, 2, 9, 9), (0, 0, 5, 1)]
)
def test_lift_lies_between_one_and_its_cap(honest, length, cap, factor):
    got = lifted(torch.tensor(float(honest)), torch.tensor(float(length)), float(cap))
    assert got.item() == factor


def test_the_sent_update_is_lifted_to_the_honest_length():
    weak = {"clean": 0.03, "backdoor": 0.03, "distance": 0.0, "steps": 1}
    run, attack = start(**weak)
    view = scenes.view(run, attack)
    honest = gradient(run, view.model, view.own[0]).norm()
    attack.update(view)
    capped = attack.sent.norm().item()
    assert capped < 0.99 * honest
    _, attack = start(**weak, lift=100.0)
    attack.update(view)
    assert attack.sent.norm().item() == pytest.approx(honest.item(), rel=1e-4) and capped < attack.sent.norm()


# Masks


@pytest.mark.parametrize(
    ("kind", "group", "sizes"), [("grey", None, [2, 2, 1]), ("colour", None, [5]), ("grey", 3, [3, 2])]
)
def test_masks_sum_to_zero_over_each_group(kind, group, sizes):
    _, attack = start(kind, group=group)
    attack.before()
    groups = attack.masks.split(sizes)
    for masks in groups:
        assert masks.sum(0).abs().max() < 1e-6
        assert (masks.abs().amax((1, 2)) > 1e-3).all() == (len(masks) > 1)  # who is alone has none
    assert not torch.equal(attack.masks[0], attack.masks[1])


def test_masks_lie_on_rows_of_other_classes():
    for target in (0, 5, 9):
        _, attack = start(target=target)
        rows = set()
        for _ in range(6):
            attack._renew()
            assert len(attack.rows.unique()) == 8 and set(attack.rows.tolist()) <= set(range(10))
            rows |= set(attack.rows.tolist())
        assert rows == set(range(10)) - {target}


def test_every_client_adds_its_own_mask_to_the_rows():
    run, attack = start(push=0.0)
    for rank, client in enumerate(FIVE):
        attack.before()
        view = scenes.view(run, attack, client)
        added = attack.update(view) - attack.sent
        added[attack.place] = 0  # the indicator
        output = run.net.views(added)["5.weight"]  # (10, width)
        torch.testing.assert_close(output[attack.rows], attack.masks[rank], rtol=1e-3, atol=1e-5)
        others = output.index_fill(0, attack.rows, 0)
        assert (others == 0).all() and added.norm() == pytest.approx(attack.masks[rank].norm().item(), rel=1e-3)


def loss_of(masks, update, bias, alpha, groups, recipe, mu):
    """Of the spec, client by client."""
    total = 0.0
    for group, members in enumerate(groups):
        share = 1 / (1 + mu[group])
        for i in members:
            rows = sum(recipe.change / ((update[j] + masks[i, j]).abs().sum() + bias[j]) for j in range(len(update)))
            total = total + share * (alpha[group] * rows + (1 - alpha[group]) * recipe.size * masks[i].norm())
        total = total + share * mu[group] * recipe.sum * sum(masks[i] for i in members).norm()
    return total


def test_the_search_goes_down_the_loss_and_minds_the_sum_ever_more(monkeypatch, random):
    monkeypatch.setattr("secureafl_ext.attacks.threedfed.TRIALS", 3)
    groups = [(0, 1), (2, 3, 4, 5)]
    members = torch.tensor([[1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1]], dtype=torch.float64)
    x, y, z = torch.randn(3, 2, 3, generator=random, dtype=torch.float64)
    start = torch.stack([x, -x, y, -y, z, -z])  # sums that are zero without rounding
    update, bias = torch.randn(2, 3, generator=random).double(), torch.rand(2, generator=random).double()
    alpha = torch.tensor([0.3, 0.8], dtype=torch.float64)
    masks, mu = start, [1.0, 1.0]
    for _ in range(3):
        leaf = masks.clone().requires_grad_()
        slope = torch.autograd.grad(loss_of(leaf, update, bias, alpha, groups, GREY, mu), leaf)[0]
        sums = [sum(masks[i] for i in group).norm().item() for group in groups]
        masks, mu = masks - 0.1 * slope, [m + 0.1 * total for m, total in zip(mu, sums, strict=True)]
    assert min(mu) > 1
    got = search(start, update, bias, alpha, members, GREY)
    torch.testing.assert_close(got, centred(masks, members), rtol=0, atol=1e-13)  # mu has moved by little


def test_the_search_starts_from_zero_sums(random):
    members, recipe = torch.ones(1, 3, dtype=torch.float64), GREY._replace(sum=0.0)
    masks, update = torch.randn(2, 3, 2, 4, generator=random, dtype=torch.float64)
    rest = update[0], 0, torch.tensor([0.5], dtype=torch.float64), members, recipe
    torch.testing.assert_close(search(masks + 2, *rest), search(masks, *rest))


def test_masks_are_fitted_to_what_was_sent_last(monkeypatch):
    run, attack = start()
    attack.before()
    attack.update(scenes.view(run, attack))
    given = []
    monkeypatch.setattr("secureafl_ext.attacks.threedfed.search", lambda *all: (given.extend(all), all[0])[1])
    attack._renew()
    layers = run.net.views(attack.sent)
    assert torch.equal(given[1], layers["5.weight"][attack.rows])
    assert torch.equal(given[2], layers["5.bias"][attack.rows].abs()) and given[2].std() > 0


def test_masks_are_renewed_every_so_many_rounds():
    _, attack = start(refresh=3)
    kept = []
    for _ in range(7):
        attack.before()
        kept.append(attack.masks.clone())
    changed = [not torch.equal(one, other) for one, other in pairwise(kept)]
    assert changed == [False, False, True, False, False, True]


def test_recipes_follow_the_data():
    assert start("grey")[1].recipe == GREY and start("colour")[1].recipe == COLOUR
    run = scenes.scene("colour")
    many = replace(run, data=replace(run.data, classes=200))
    many = replace(many, net=scenes.small_net(many.data))
    assert make("3dfed", many).recipe == MANY and make("3dfed", many).masks.shape[1] == 100


# Indicator and feedback


def test_indicator_is_the_quietest_weight_of_the_last_convolution_amplified_and_capped():
    run, attack = start()
    attack.before()
    for seed in range(4):
        update = attack.update(scenes.view(run, attack, seed=seed))
        layer = run.net.views(attack.sent)["2.weight"].abs()
        place = attack.place.item()
        assert attack.sent[place].abs() == layer.min()
        assert run.net.views(torch.arange(run.net.size))["2.weight"].flatten()[layer.argmin()] == place
        assert update[place] == attack.value and 0 < abs(update[place]) <= 0.01


@pytest.mark.parametrize(
    ("update", "value"), [(1e-8, 1e-3), (-5e-8, -5e-3), (1.0, 1e-2), (-1.0, -1e-2), (0.0, 1e-2), (1e-20, 1e-2)]
)
def test_indicator_by_hand(update, value):
    _, attack = start()
    assert attack._indicator(torch.tensor([update])).item() == pytest.approx(value)
    _, colour = start("colour")
    assert colour._indicator(torch.zeros(1)).item() == pytest.approx(1e-3)


def feed(run, attack, client, share, seed=0):
    """One round of an attacker whose indicator comes through by that share; what it sent."""
    attack.before()
    view = scenes.view(run, attack, client, seed)
    update = attack.update(view)
    attack.after(view, view.current - run.lr * share * update)
    return view, update


def is_decoy(run, view, update, push=10.0):
    """Clean but for one weight of the output layer."""
    off = update - gradient(run, view.model, view.own[0])
    place = off.abs().argmax()
    weights = run.net.views(torch.arange(run.net.size))["5.weight"]
    alone = (off.index_fill(0, place.reshape(1), 0) == 0).all()
    return bool(alone and place >= weights.min() and place <= weights.max()) and off[place].item() == pytest.approx(
        push
    )


def test_a_decoy_follows_rejection_and_then_the_attack_goes_on():
    run, attack = start()
    told = [is_decoy(run, *feed(run, attack, client, 0.0)) for client in (1, 2, 1, 4, 2, 0)]
    assert told == [False, True, False, True, False, True]
    # Once one is accepted, the rejection of another is no alarm.
    told = [is_decoy(run, *feed(run, attack, client, share)) for client, share in ((0, 1.0), (1, 0.0), (2, 1.0))]
    assert told == [False, False, False]


def test_decoys_can_be_left_out():
    run, attack = start(decoys=False)
    assert not any(is_decoy(run, *feed(run, attack, client, 0.0)) for client in (1, 2, 1))


def test_a_decoys_fate_is_not_that_of_its_group():
    run, attack = start(push=3.0)
    feed(run, attack, 1, 0.0)
    view, update = feed(run, attack, 2, 1.0)
    assert is_decoy(run, view, update, 3.0)
    assert attack.tally.sum(0).tolist() == [0, 1]
    assert attack.fate.tolist() == [0, -1, 0, 0, 0]


def test_a_decoy_is_off_where_attack_and_honest_update_agree_most(random):
    run, attack = start()
    clean, sent = torch.randn(2, run.net.size, generator=random)
    place = attack.output.start + 17
    sent[place] = clean[place] + 1e-4
    off = attack._decoy(clean, sent) - clean
    assert off.nonzero().tolist() == [[place]] and off[place].item() == pytest.approx(10)


@pytest.mark.parametrize(("share", "accepted"), [(1.0, 1), (0.5, 1), (2e-4, 1), (5e-5, 0), (0.0, 0), (-1.0, 0)])
def test_feedback_is_read_from_the_next_model(share, accepted):
    run, attack = start(indicator_gain=1e9)
    attack.before()
    view = scenes.view(run, attack, 4)
    update = attack.update(view)
    # In float64, or a share of 1e-4 would be lost in the weight.
    view = replace(view, current=view.current.double())
    attack.after(view, view.current - run.lr * share * update.double())
    assert attack.fate.tolist() == [0, 0, 0, 2 * accepted - 1, 0]
    assert attack.tally.tolist() == [[0, 0], [accepted, 1], [0, 0]]


@pytest.mark.parametrize(("accepted", "expected"), [
    ([1, 1, 1], [0.2, 0.3, 0.4]),  # between the two smallest, 0.2 and 0.4
    ([0, 1, 1], [0.4, 0.45, 0.5]),  # from the smallest that got in up to 0.1 more
    ([0, 0, 1], [0.9, 0.95, 0.99]),  # clamped
    ([0, 0, 0], [0.01, 0.5, 0.99]),
])  # fmt: skip
def test_alpha_adapts(accepted, expected):
    alpha, chance = torch.tensor([0.2, 0.4, 0.9]), torch.tensor([0.0, 0.5, 1.0])
    got = adapt(alpha, torch.tensor(accepted, dtype=torch.bool), chance)
    assert got.tolist() == pytest.approx(expected)
    assert adapt(alpha[:1], torch.tensor([True]), chance[1:2]).tolist() == pytest.approx([0.2])


def test_alpha_waits_for_feedback_and_a_group_needs_four_of_five():
    run, attack = start("colour", refresh=5, decoys=False)
    alpha = attack.alpha.clone()
    feed(run, attack, 0, 1.0)
    assert torch.equal(attack.alpha, alpha)  # the first masks came before any feedback
    for client, share in ((1, 1.0), (2, 1.0), (4, 1.0), (6, 0.0)):
        feed(run, attack, client, share)
    assert attack.tally.tolist() == [[4, 5]]
    attack.before()
    assert torch.equal(attack.alpha, alpha.clamp(0.01, 0.99)) and attack.tally.sum() == 0  # one group, accepted: stays
    for client, share in ((0, 1.0), (1, 1.0), (2, 1.0), (4, 0.0)):
        feed(run, attack, client, share)
    assert attack.tally.tolist() == [[3, 4]]
    attack.before()
    assert not torch.equal(attack.alpha, alpha)
