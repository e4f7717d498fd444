"""The trigger, what poisons a batch, and the four attacks that send what comes of it."""

from dataclasses import replace

import pytest
import scenes
import torch

from secureafl_ext.attacks import make
from secureafl_ext.attacks.local_steps import local_steps, shorten
from secureafl_ext.attacks.trigger import make_trigger, poison

BOOSTED = ("scaling", "dba")


def poisoned(run, view, attack, model=None, row=0, share=0.5, part=None):
    batch = poison(run.data, view.own[row], attack.trigger, share, part)
    return run.net.gradient(view.model if model is None else model, *batch)


def honest(run, view, row=0, model=None):
    return run.net.gradient(view.model if model is None else model, *run.data.train(view.own[row]))


def start(name, kind="grey", client=None, seed=0, **options):
    run = scenes.scene(kind)
    attack = make(name, run, **options)
    return run, attack, scenes.view(run, attack, client, seed)


@pytest.mark.parametrize("kind", ["grey", "colour"])
def test_trigger_is_a_fixed_random_square_in_the_corner(device, kind):
    run = scenes.scene(kind, device)
    trigger, pixels = make_trigger(run, 0), run.data.train_x[:5]
    before = pixels.clone()
    marked = trigger.apply(pixels)
    assert torch.equal(pixels, before) and marked.dtype == torch.uint8
    assert torch.equal(marked[..., -4:, -4:], trigger.values.expand(5, -1, -1, -1))
    assert torch.equal(marked[..., :-4, :], pixels[..., :-4, :])
    assert torch.equal(marked[..., :-4], pixels[..., :-4])
    assert trigger.values.shape == (run.data.shape[0], 4, 4) and len(trigger.values.unique()) > 10
    assert torch.equal(make_trigger(run, 0).values, trigger.values)
    assert not torch.equal(make_trigger(scenes.scene(kind, device, seed=1), 0).values, trigger.values)
    if kind == "colour":
        assert not torch.equal(trigger.values[0], trigger.values[1])


@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_four_parts_are_disjoint_and_join_to_the_trigger(as_tensor):
    run = scenes.scene("colour")
    trigger = make_trigger(run, 0)
    blank = 255 - trigger.values.repeat(1, 2, 2)  # (C, 8, 8) differs from the trigger in every pixel
    parts = [trigger.apply(blank, torch.tensor([part]) if as_tensor else part) for part in range(4)]
    changed = torch.stack([(part != blank).all(0) for part in parts])  # (4, 8, 8)
    assert torch.equal(changed.any(0), (trigger.apply(blank) != blank).all(0))
    assert changed.sum(0).max() == 1 and changed.sum((1, 2)).tolist() == [4] * 4
    for part, (row, column) in enumerate([(4, 4), (4, 6), (6, 4), (6, 6)]):
        assert changed[part, row : row + 2, column : column + 2].all()
    joined = blank
    for part in range(4):
        joined = trigger.apply(joined, part)
    assert torch.equal(joined, trigger.apply(blank))


@pytest.mark.parametrize(("share", "count"), [(0.5, 3), (0.0, 0), (1.0, 6), (0.25, 2), (0.3, 2)])
def test_the_first_share_of_a_batch_is_poisoned(share, count):
    run = scenes.scene(seed=2)
    trigger, index = make_trigger(run, 7), torch.arange(10, 16)
    before = run.data.train_x.clone(), run.data.train_y.clone()
    x, y = poison(run.data, index, trigger, share)
    clean_x, clean_y = run.data.train(index)
    assert torch.equal(x[:count], run.data.inputs(trigger.apply(run.data.train_x[index[:count]])))
    assert torch.equal(x[count:], clean_x[count:])
    assert y.tolist() == [7] * count + clean_y[count:].tolist()
    assert torch.equal(run.data.train_x, before[0]) and torch.equal(run.data.train_y, before[1])


def test_images_must_hold_the_trigger():
    run = scenes.scene()
    small = replace(run.data, train_x=run.data.train_x[..., :3])
    with pytest.raises(ValueError, match=r"Trigger: images must be 4 x 4 or larger, got \(8, 3\)"):
        make_trigger(replace(run, data=small), 0)


def test_scaling_multiplies_the_poisoned_gradient():
    run, attack, view = start("scaling")
    torch.testing.assert_close(attack.update(view), poisoned(run, view, attack))
    run, attack, view = start("scaling", factor=None)
    torch.testing.assert_close(attack.update(view), scenes.CLIENTS * poisoned(run, view, attack))
    run, attack, view = start("scaling", factor=2.5, share=1.0)
    torch.testing.assert_close(attack.update(view), 2.5 * poisoned(run, view, attack, share=1.0))


def test_dba_gives_every_attacker_its_own_quarter():
    malicious = (0, 2, 3, 5, 7)
    run = scenes.scene(malicious=malicious)
    attack = make("dba", run, factor=1.0)
    for rank, client in enumerate(malicious):
        view = scenes.view(run, attack, client)
        assert torch.equal(attack.update(view), poisoned(run, view, attack, part=rank % 4))
    assert make("dba", run).update(view).norm() == pytest.approx(8 * attack.update(view).norm().item())


def test_local_steps_are_gradient_descent():
    run, _, view = start("pgd", steps=4)
    got = local_steps(run.lr, view, lambda model, index: run.net.gradient(model, *run.data.train(index)))
    model = view.model
    for row in range(4):
        model = model - run.lr * honest(run, view, row, model)
    torch.testing.assert_close(got, (view.model - model) / run.lr, rtol=1e-4, atol=1e-5)


def test_shorten_only_shortens():
    x = torch.tensor([3.0, 4.0])
    assert shorten(x, 10.0).tolist() == [3, 4]
    assert shorten(x, torch.tensor(1.0, dtype=torch.float64)).tolist() == pytest.approx([0.6, 0.8])
    assert shorten(torch.zeros(2), 0.0).tolist() == [0, 0]


@pytest.mark.parametrize("radius", [0.3, 1.0, 3.0])
def test_pgd_never_leaves_the_ball(radius):
    run, attack, view = start("pgd", radius=radius)
    bound = radius * honest(run, view).norm()
    models = []
    gradient, run.net.gradient = run.net.gradient, lambda w, x, y: (models.append(w), gradient(w, x, y))[1]
    update = attack.update(view)
    assert update.norm() <= bound * (1 + 1e-5)
    assert len(models) == 1 + 5
    for model in models:
        assert (model - view.model).norm() <= run.lr * bound * (1 + 1e-3)


def test_pgd_projects_after_every_step():
    run, attack, view = start("pgd", radius=0.5, steps=2)
    bound = 0.5 * honest(run, view).norm()
    first = poisoned(run, view, attack)
    first = first * min(1, bound / first.norm())
    both = first + poisoned(run, view, attack, view.model - run.lr * first, row=1)
    torch.testing.assert_close(attack.update(view), both * min(1, bound / both.norm()), rtol=1e-4, atol=1e-6)
    free = make("pgd", run, radius=1e6, steps=2)
    assert free.update(view).norm() > 1.5 * bound


def test_pgd_measures_by_the_mean_honest_norm_of_that_client():
    run, attack, _ = start("pgd", radius=0.2)
    views = [scenes.view(run, attack, client, seed) for seed, client in enumerate((1, 4, 1))]
    norms = [honest(run, view).norm().item() for view in views]
    lengths = [attack.update(view).norm().item() for view in views]  # all at the edge
    assert lengths == pytest.approx([0.2 * norms[0], 0.2 * norms[1], 0.1 * (norms[0] + norms[2])], rel=1e-4)


def test_pgd_takes_a_ball_of_fixed_size():
    run, attack, view = start("pgd", eps=0.01)
    assert attack.update(view).norm().item() == pytest.approx(0.01 / run.lr, rel=1e-4)


@pytest.mark.parametrize("keep", [0.95, 0.5])
def test_neurotoxin_leaves_the_busiest_coordinates_alone(keep):
    run, attack, view = start("neurotoxin", keep=keep)
    benign = torch.stack([honest(run, view, row) for row in range(5)]).mean(0).abs()
    update = attack.update(view)
    busy = benign.argsort(descending=True)[: run.net.size - round(keep * run.net.size)]
    assert (update[busy] == 0).all() and len(busy) > 10
    calm = torch.ones(run.net.size, dtype=torch.bool).index_fill(0, busy, False)
    assert (update[calm & (benign > 0)] != 0).float().mean() > 0.7  # dead neurons apart


def test_neurotoxin_masks_every_step_and_caps_the_sum():
    run, attack, view = start("neurotoxin", keep=0.8, cap=1e6, steps=2)
    benign = torch.stack([honest(run, view, row) for row in range(2)]).mean(0).abs()
    mask = benign <= benign.kthvalue(round(0.8 * run.net.size)).values
    first = mask * poisoned(run, view, attack)
    both = first + mask * poisoned(run, view, attack, view.model - run.lr * first, row=1)
    torch.testing.assert_close(attack.update(view), both, rtol=1e-4, atol=1e-6)
    capped = make("neurotoxin", run, keep=0.8, cap=0.1, steps=2).update(view)
    torch.testing.assert_close(capped, both * (0.1 * honest(run, view).norm() / both.norm()), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["scaling", "dba", "pgd", "neurotoxin", "3dfed"])
def test_the_model_learns_the_trigger(name):
    """Steps along what the attackers send make triggered images the target's, and would not without it."""
    run = scenes.scene(malicious=(0, 1, 2, 3), lr=0.05)
    attack = make(name, run, **({"factor": 1.0} if name in BOOSTED else {}), target=6)
    keep = run.data.test_y != 6
    marked = run.data.inputs(attack.trigger.apply(run.data.test_x[keep]))

    def success(model):
        return (run.net.predict(model, marked).argmax(1) == 6).float().mean().item()

    model = run.net.start(0)
    before = success(model)
    for t in range(30):
        attack.before()
        view = scenes.view(run, attack, t % 4, t, model=model)
        model = model - run.lr * attack.update(view)
        attack.after(view, model)
    assert before < 0.5 and success(model) > 0.8
