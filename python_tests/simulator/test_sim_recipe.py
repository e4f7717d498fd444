"""What a recipe changes: random crops and flips, a schedule, a loss that knows how frequent a client's labels are."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from secureafl_ext.attacks.base import SIDE
from secureafl_ext.attacks.trigger import make_trigger, poison
from secureafl_ext.sim import results
from secureafl_ext.sim.federation import Federation
from secureafl_ext.sim.loop import Rounds, run
from secureafl_ext.sim.settings import Settings, UndefinedError, recorded
from secureafl_ext.tasks import datasets


@pytest.fixture(scope="module")
def data():
    return datasets.load().augmented()


def test_the_crops_of_an_image_are_all_there_are(data):
    count, image = len(data.train_y), 7
    padded = F.pad(data.train_x[image], (4,) * 4)
    height, width = data.shape[1:]
    whole = [padded[:, y : y + height, x : x + width] for y in range(9) for x in range(9)]
    wanted = [part.tolist() for one in whole for part in (one, one.flip(-1))]
    pixels, labels = data.train_pixels(image + count * torch.arange(data.crops.variants))
    assert len(pixels) == 162 and (labels == data.train_y[image]).all()
    assert sorted(pixels.tolist()) == sorted(wanted)


def test_a_plain_number_is_the_image_itself(data):
    numbers = torch.tensor([[3, 5], [0, len(data.train_y) - 1]])
    pixels, labels = data.train_pixels(numbers)
    assert torch.equal(pixels, data.train_x[numbers]) and torch.equal(labels, data.train_y[numbers])


def test_reduced_images_are_means_of_squares(data):
    wanted = data.train_x[:50].double().unfold(2, 4, 4).unfold(3, 4, 4).mean((-1, -2))
    small = data.reduced(7)
    assert small.shape == (1, 7, 7) and small.test_x.shape == (len(data.test_y), 1, 7, 7)
    assert (small.train_x[:50] - wanted).abs().max() <= 0.5 and len(small.train_x[:50].unique()) > 100
    with pytest.raises(ValueError, match="dataset 'fashion-mnist-small': side must divide 28 x 28, got 5"):
        data.reduced(5)


def test_tiny_imagenet_has_the_size_of_the_fused_op():
    assert Settings(dataset="tiny-imagenet").resolve().side == 32
    assert Settings(dataset="tiny-imagenet", side=64).resolve().side == 64
    assert Settings(dataset="cifar10").resolve().side is None
    federation = Federation(Settings(side=14, device="cpu").resolve())
    assert (
        federation.data.shape == (1, 14, 14)
        and federation.net.size < Federation(Settings(device="cpu").resolve()).net.size
    )


def test_every_draw_is_a_crop_of_the_same_sample():
    plain, cropped = (Federation(Settings(augment=augment, device="cpu").resolve()) for augment in (False, True))
    clients, count = torch.arange(20), len(plain.data.train_y)
    samples, numbers = (federation.draw(clients, "samples") for federation in (plain, cropped))
    assert torch.equal(numbers % count, samples)
    assert len((numbers // count).unique()) > 100


def test_the_trigger_lies_on_top_of_a_crop():
    scene = Federation(Settings(augment=True, attack="scaling", device="cpu").resolve()).scene
    trigger = make_trigger(scene, 0)
    numbers = len(scene.data.train_y) * torch.arange(162)
    x, y = poison(scene.data, numbers, trigger, 1.0)
    assert (x[..., -SIDE:, -SIDE:] == scene.data.inputs(trigger.values)).all() and (y == 0).all()
    assert not torch.equal(x[1], x[2])


def test_the_calibrated_gradient_is_that_of_the_calibrated_loss():
    rounds = Rounds(Settings(calibrate=True, defense="async-sgd", device="cpu").resolve())
    client = torch.tensor([3])
    samples = rounds.federation.draw(client, "samples")[0]
    x, y = rounds.data.train(samples)
    model = rounds.server.model.clone().requires_grad_()
    own = rounds.data.train_y[rounds.federation._order.split(rounds.federation._sizes.tolist())[3]]
    shares = torch.tensor([(own == label).sum() + 1.0 for label in range(10)])
    loss = F.cross_entropy(rounds.net._apply(model, x) + (shares / shares.sum()).log(), y)
    (wanted,) = torch.autograd.grad(loss, model)
    got = rounds.net.gradient(rounds._calibrated(rounds.server.model, client), x, y)
    assert torch.allclose(got, wanted, atol=1e-6) and got.norm() > 0.1
    assert not torch.allclose(got, rounds.net.gradient(rounds.server.model, x, y), atol=1e-3)


def test_calibration_trains_very_different_clients_better():
    base = Settings(defense="async-sgd", degree=0.9, batch=16, rounds=100, evaluations=3, device="cpu")
    plain, calibrated = (run(replace(base, calibrate=value)).summary["late_error"] for value in (False, True))
    assert calibrated < plain - 0.1


def test_a_recipe_sets_what_is_not_given():
    cifar = Settings(dataset="cifar10", recipe="augmented").resolve()
    assert (cifar.optimizer, cifar.lr, cifar.decay, cifar.clip) == ("adam", 1.5, 1e-4, 0.3)
    assert (cifar.schedule, cifar.augment, cifar.calibrate) == ("cosine", True, True)
    paper = Settings(dataset="cifar10").resolve()
    assert (paper.optimizer, paper.decay, paper.clip) == ("sgd", 0, 0)
    assert (paper.lr, paper.schedule, paper.augment, paper.calibrate) == (0.01, "constant", False, False)
    one = Settings(dataset="cifar10", recipe="augmented", lr=0.3, augment=False).resolve()
    assert (one.lr, one.schedule, one.augment) == (0.3, "cosine", False)
    assert Settings(dataset="udacity").resolve().lr == 0.001


def test_a_record_from_before_there_were_recipes_is_found(tmp_path):
    settings = Settings(rounds=4, evaluations=1, defense="async-sgd", device="cpu")
    outcome = run(settings)
    results.append(tmp_path / results.NAME, results.record(outcome))
    line = (tmp_path / results.NAME).read_text()
    assert "recipe" not in line and "schedule" not in line
    known = results.read(tmp_path / results.NAME)
    changed = Settings(**{**vars(settings), "schedule": "cosine"}).resolve()
    assert list(results.find(known, [changed, settings.resolve()])) == [1]
    assert recorded(vars(changed))["schedule"] == "cosine"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"recipe": "secret"}, "unknown recipe 'secret'; choose from paper, augmented"),
        ({"schedule": "linear"}, "unknown schedule 'linear'; choose from constant, cosine"),
        ({"optimizer": "adagrad"}, "unknown optimizer 'adagrad'; choose from sgd, adam"),
        ({"decay": -1.0}, "decay must be 0 or more, got -1.0"),
        ({"clip": -1.0}, "clip must be 0 or more, got -1.0"),
        ({"decay": 0.1}, "decay must be 0 with optimizer 'sgd', got 0.1"),
        ({"optimizer": "adam", "lr": 0.0}, "lr must be above 0 with optimizer 'adam', got 0.0"),
        ({"dataset": "udacity", "augment": True}, "augment must be false for udacity"),
        ({"dataset": "udacity", "calibrate": True}, "calibrate must be false for udacity"),
    ],
)
def test_bad_recipes_are_refused(wrong, message):
    with pytest.raises((ValueError, UndefinedError), match=message):
        Settings(**wrong).resolve()
