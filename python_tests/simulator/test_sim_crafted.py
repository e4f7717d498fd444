"""Crafted and its named points: what a client sends, against the formula in NumPy."""

import numpy as np
import pytest
import scenes
import torch
from places import ROOT

from secureafl_ext.attacks import ATTACKS, make
from secureafl_ext.attacks.crafted import PRESETS
from secureafl_ext.attacks.directions import DIRECTIONS, Sight, hidden
from secureafl_ext.attacks.timing import Timing
from secureafl_ext.attacks.trigger import poison
from secureafl_ext.tasks.models import cnn, resnet20


def sent(client=None, seed=0, progress=0.0, kind="grey", name="crafted", **options):
    """(scene, attack, view, update) of one round."""
    run = scenes.scene(kind)
    attack = make(name, run, **options)
    view = scenes.view(run, attack, client, seed, progress=progress)
    return run, attack, view, attack.update(view)


def honest(run, view):
    return run.net.gradient(view.model, *run.data.train(view.own[0])).double().numpy()


def seen(run, view):
    """(k, d): the honest gradients that the attackers compute."""
    return run.net.gradients(view.model, *run.data.train(view.honest)).double().numpy()


def median_norm(gradients):
    return np.sort(np.linalg.norm(gradients, axis=1))[len(gradients) // 2]


def push(run, view, update):
    """(d): what the client added to its own gradient, in medians of the honest norms."""
    return (update.double().numpy() - honest(run, view)) / median_norm(seen(run, view))


def cosine(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def test_up_makes_every_weight_grow_by_the_same():
    run, _, view, update = sent(strength=3.0)
    expected = honest(run, view) - 3.0 * median_norm(seen(run, view)) / np.sqrt(run.net.size)
    np.testing.assert_allclose(update.numpy(), expected, rtol=1e-4, atol=1e-6)


def test_dead_lowers_what_leads_into_the_last_hidden_layer():
    run, _, view, update = sent(direction="dead", strength=1.0)
    into = np.zeros(run.net.size)
    first, second = 4 * 9 + 4, 3 * 4 * 9 + 3  # the small net has two convolutions and no hidden linear layer
    into[first : first + second] = 1 / np.sqrt(second)
    np.testing.assert_allclose(push(run, view, update), into, atol=1e-5)


@pytest.mark.parametrize(
    ("net", "names"),
    [
        (cnn((1, 28, 28), 10), ["7.weight", "7.bias"]),
        (resnet20((3, 32, 32), 10), ["blocks.8.second_norm.bias"]),
        (scenes.small_net(scenes.dataset("grey")), ["2.weight", "2.bias"]),
    ],
)
def test_the_hidden_layer_of_each_net(net, names):
    starts = dict(zip(net.shapes, np.cumsum([0, *net.sizes[:-1]]), strict=True))
    expected = [slice(starts[name], starts[name] + net.shapes[name].numel()) for name in names]
    assert hidden(net) == expected


def test_dead_really_kills_the_units(random):
    """Far enough along the direction no hidden unit answers any image."""
    net = cnn((1, 12, 12), 10)
    model, images = net.start(0), torch.rand(20, 1, 12, 12, generator=random)
    for part in hidden(net):
        model[part] -= 10.0
    answers = net.predict(model, images)
    assert torch.equal(answers, answers[:1].expand_as(answers))  # the output layer's bias alone


def test_ascent_is_against_the_long_run_mean():
    run = scenes.scene()
    attack = make("crafted", run, direction="ascent", strength=2.0)
    mean = np.zeros(run.net.size)
    for seed in range(4):
        view = scenes.view(run, attack, seed=seed)
        update = attack.update(view)
        mean = 0.99 * mean + 0.01 * seen(run, view).mean(0)
        np.testing.assert_allclose(push(run, view, update), -2.0 * mean / np.linalg.norm(mean), atol=1e-4)


def test_std_is_the_spread_with_the_sign_of_the_mean():
    run, _, view, update = sent(direction="std", strength=1.0)
    gradients = seen(run, view)
    spread = gradients.std(0, ddof=1) * np.sign(gradients.mean(0))
    np.testing.assert_allclose(push(run, view, update), -spread / np.linalg.norm(spread), atol=1e-4)


def test_random_is_one_direction_for_all():
    pushes = [push(run, view, update) for run, _, view, update in (
        sent(client, seed, direction="random", strength=2.0) for client, seed in ((1, 0), (6, 5))
    )]  # fmt: skip
    np.testing.assert_allclose(pushes[0], pushes[1], atol=1e-4)
    assert np.linalg.norm(pushes[0]) == pytest.approx(2.0, rel=1e-4)
    assert pushes[0].std() == pytest.approx(2 / np.sqrt(len(pushes[0])), rel=0.01)


def test_backdoor_is_the_poisoned_gradient_and_ends_when_it_is_learned():
    run, attack, view, update = sent(direction="backdoor", strength=2.0, target=3)
    assert attack.trigger.target == 3
    x, y = poison(run.data, view.own[0], attack.trigger, 1.0)
    assert (y == 3).all()
    poisoned = run.net.gradient(view.model, x, y).double().numpy()
    unit = median_norm(seen(run, view))
    assert np.linalg.norm(poisoned) > unit
    np.testing.assert_allclose(push(run, view, update), 2 * poisoned / np.linalg.norm(poisoned), atol=1e-4)

    direction = DIRECTIONS["backdoor"](run, attack.trigger)
    long = Sight(view, torch.zeros(1, run.net.size), attack.mean, torch.tensor(1e6, dtype=torch.float64))
    np.testing.assert_allclose(direction(long).double().numpy(), poisoned / 1e6, atol=1e-8)


@pytest.mark.parametrize("wanted", [0.2, 0.45, 0.9])
def test_squads_keep_their_cosine(wanted):
    pushes = {}
    for client in scenes.MALICIOUS:  # ranks 0, 1, 2: squads 0, 1, 0
        run, _, view, update = sent(client, client, squads=2, cosine=wanted, strength=1.5)
        pushes[client] = push(run, view, update)
    first, second, third = (pushes[client] for client in scenes.MALICIOUS)
    np.testing.assert_allclose(first, third, atol=1e-4)
    assert cosine(first, second) == pytest.approx(wanted, abs=0.06)  # random vectors are nearly orthogonal
    up = -np.ones(len(first)) / np.sqrt(len(first))
    assert first @ up == pytest.approx(1.5, rel=0.2) and second @ up == pytest.approx(1.5, rel=0.2)


def test_mosaic_squads_share_no_coordinate():
    pushes = []
    for client in scenes.MALICIOUS:
        run, _, view, update = sent(client, squads=3, mosaic=True, strength=1.0)
        pushes.append(push(run, view, update))
    on = np.abs(np.stack(pushes)) > 1e-4
    assert (on.sum(0) == 1).all() and on.sum(1).min() > run.net.size / 4
    assert [np.linalg.norm(one) for one in pushes] == pytest.approx([1, 1, 1], rel=1e-3)
    assert all((one[kept] < 0).all() for one, kept in zip(pushes, on, strict=True))


def test_camouflage_is_a_vector_of_the_client_alone():
    extra = []
    for client in scenes.MALICIOUS:
        run, attack, view, update = sent(client, camouflage=0.5, strength=1.0)
        extra.append(push(run, view, update) + 1 / np.sqrt(run.net.size))
        np.testing.assert_allclose(extra[-1], 0.5 * attack.personal[len(extra) - 1].numpy(), atol=1e-4)
    assert [np.linalg.norm(one) for one in extra] == pytest.approx([0.5] * 3, rel=1e-3)
    assert abs(cosine(extra[0], extra[1])) < 0.2 and abs(cosine(extra[0], extra[2])) < 0.2


def test_the_honest_part_is_its_own_or_nothing_or_another_clients():
    run, _, view, update = sent(honest_part=False, strength=2.0)
    expected = -2.0 * median_norm(seen(run, view)) / np.sqrt(run.net.size)
    np.testing.assert_allclose(update.numpy(), expected, rtol=1e-4)
    run, attack, view, update = sent(imitate=3, strength=0.0)
    assert attack.honest == run.honest == len(view.honest)
    np.testing.assert_allclose(update.numpy(), seen(run, view)[3], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("progress", "attacks"),
    [(0.0, False), (0.19, False), (0.2, True), (0.24, True), (0.26, False), (0.31, True), (0.79, False), (0.8, False)],
)
def test_it_attacks_from_start_to_stop_in_the_first_part_of_a_period(progress, attacks):
    run, _, view, update = sent(start=0.2, stop=0.8, duty=0.5, period=0.1, progress=progress)
    assert np.array_equal(update.double().numpy(), honest(run, view)) != attacks


def test_directions_take_turns():
    got = {}
    for progress in (0.05, 0.15, 0.25):
        run, _, view, update = sent(direction="up+dead", period=0.1, progress=progress, strength=1.0)
        got[progress] = push(run, view, update)
    assert (got[0.05] < 0).all() and got[0.15].min() > -1e-4 and got[0.15].max() > 0.05
    np.testing.assert_allclose(got[0.05], got[0.25], atol=1e-5)


def test_a_gradient_that_is_not_finite_does_not_stay():
    run, attack, view, _ = sent(direction="ascent")
    kept = attack.mean.clone()
    assert kept.any()
    attack.update(scenes.view(run, attack, model=torch.full_like(view.model, torch.nan)))
    assert torch.equal(attack.mean, kept)


def test_presets_are_crafted_with_other_defaults():
    crafted = ATTACKS["crafted"].settings
    for name, preset in PRESETS.items():
        settings = ATTACKS[name].settings
        assert settings.keys() == crafted.keys() and settings == crafted | preset.keywords != crafted
        assert ATTACKS[name].optional == ATTACKS["crafted"].optional == {"imitate": int}
    assert PRESETS["ghost"].keywords["silence"] == PRESETS["freeze"].keywords["silence"] == 1
    made = make("freeze", scenes.scene(), start=0.75)  # an option of a preset can be changed
    assert made.timing == Timing(0.75, 1.0, 1.0, 0.05, 1)


def test_the_page_of_the_attacks_has_every_option_and_default():
    page = (ROOT / "docs/reference/attacks.md").read_text()
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    for name, kind in ATTACKS.items():
        assert name == "none" or name == "crafted" or name in rows, name
        if name in PRESETS:
            written = [f"`{key}={str(value).lower()}`" for key, value in PRESETS[name].keywords.items()]
            assert rows[name].endswith(f"| {', '.join(written)} |")
        elif name not in ("none", "crafted", "3dfed"):
            assert all(f"`{option}`" in rows[name] for option in kind.settings), name
    described = page[page.index("## Made to beat") :]
    assert all(f"`{option}`" in described for option in [*ATTACKS["crafted"].settings, *DIRECTIONS])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"direction": "down"}, "direction must be one or more of up.dead.*, got 'down'"),
        ({"direction": "up+"}, "direction must be .* got 'up.'"),
        ({"squads": 0}, "squads must be 1 or more, got 0"),
        ({"cosine": 0.0}, "cosine must be above 0, at most 1, got 0.0"),
        ({"camouflage": -1.0}, "camouflage must be 0 or more, got -1.0"),
        ({"imitate": 5}, "imitate must be 0 to 4, got 5"),
        ({"imitate": 1, "honest_part": False}, "imitate must be None without an honest part, got 1"),
        ({"start": 1.5}, "start must be 0 to 1, a share of the run, got 1.5"),
        ({"start": 0.5, "stop": 0.25}, r"stop must be start \(0.5\) to 1, a share of the run, got 0.25"),
        ({"duty": 0.0}, "duty must be above 0, at most 1, got 0.0"),
        ({"period": 0.0}, "period must be 0.000001 to 1, a share of the run, got 0.0"),
        ({"silence": -1}, "silence must be 0 or more uploads, got -1"),
    ],
)
def test_refusals(options, words):
    with pytest.raises(ValueError, match=f"crafted: {words}"):
        make("crafted", scenes.scene(), **options)


def test_a_regression_has_no_backdoor():
    with pytest.raises(ValueError, match=r"crafted: direction must be without backdoor .* got 'up.backdoor'"):
        make("crafted", scenes.scene("regression"), direction="up+backdoor")


def test_decoys_follow_each_push():
    """Two random vectors of the median norm, new ones each time."""
    run = scenes.scene()
    attack = make("crafted", run, strength=3.0, honest_part=False, decoys=2)
    sequence = []
    for t in range(6):
        view = scenes.view(run, attack, None, t, progress=t / 6)
        attack.before()
        sequence.append(attack.update(view).double().numpy() / median_norm(seen(run, view)))
    up = np.full(run.net.size, -3 / np.sqrt(run.net.size))
    for t in (0, 3):
        np.testing.assert_allclose(sequence[t], up, rtol=1e-4)
    decoys = [sequence[t] for t in (1, 2, 4, 5)]
    np.testing.assert_allclose([np.linalg.norm(decoy) for decoy in decoys], 1, rtol=1e-4)
    for i, one in enumerate(decoys):
        assert all(abs(cosine(one, other)) < 0.5 for other in (*decoys[:i], up))


def test_each_attacker_begins_with_a_push_when_another_has_fallen_silent():
    """With `silence=3` a client ends after push, decoy, push: the next one's first upload is no decoy."""
    run = scenes.scene()
    attack = make("crafted", run, strength=3.0, honest_part=False, decoys=1, silence=3)
    one, other = run.malicious[:2].tolist()
    pushes = []
    for t, client in enumerate((one, one, one, other, other)):
        view = scenes.view(run, attack, client, t, progress=t / 6)
        attack.before()
        pushes.append(np.linalg.norm(attack.update(view).double().numpy()) / median_norm(seen(run, view)) > 2)
    assert pushes == [True, False, True, True, False]


@pytest.mark.parametrize("decoys", [-1, 101])
def test_a_wrong_number_of_decoys_is_refused(decoys):
    with pytest.raises(ValueError, match=f"crafted: decoys must be 0 to 100, got {decoys}"):
        make("crafted", scenes.scene(), decoys=decoys)
