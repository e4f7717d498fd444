"""The CNN's gradient in one op, against autograd in float64."""

import math

import pytest
import torch

from secureafl_ext.tasks.models import cnn

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

DEVICE = "cuda"
PAPER = (1, 32, 1, 28, 28, 100, 10)  # k, B, C, H, W, hidden, classes


def cnn_gradient(*arguments):
    return torch.ops.secureafl_sim.cnn_gradient(*arguments)


def net_of(sizes):
    _, _, *shape, hidden, classes = sizes
    return cnn(tuple(shape), classes, hidden)


def scene(random, sizes):
    """Arguments on a coarse grid: float32 holds every value before the hidden layer exactly, so that float64 takes the
    same way through each maximum and ReLU, and equal maxima are frequent."""
    k, size, *_, hidden, classes = sizes
    vector = torch.randint(-4, 5, (net_of(sizes).size,), generator=random) / 32
    x = torch.randint(-3, 4, sizes[:5], generator=random) / 4
    y = torch.randint(classes, (k, size), generator=random)
    return vector.to(DEVICE), x.to(DEVICE), y.to(DEVICE), hidden, classes


def assert_is_the_gradient(sizes, got, vector, x, y):
    net = net_of(sizes)
    assert got.shape == (len(x), net.size) and got.dtype == torch.float32
    for row, images, labels in zip(got, x, y, strict=True):
        expected = net.gradient(vector.double(), images.double(), labels)
        for name, value, wanted in zip(net.shapes, row.split(net.sizes), expected.split(net.sizes), strict=True):
            off = (value.double() - wanted).norm().item()
            assert off <= 1e-5 * wanted.norm().item() + 1e-9, f"{name} is off by {off:.1e} of {wanted.norm():.1e}"


@pytest.mark.parametrize(
    "sizes",
    [
        PAPER,
        (3, 32, 1, 28, 28, 100, 10),
        (1, 1, 1, 10, 10, 1, 2),  # the smallest: one window is left
        (2, 3, 2, 10, 13, 7, 3),
        (1, 5, 3, 32, 32, 33, 40),  # the largest image; one more than a tile
        (2, 33, 1, 12, 11, 32, 32),
        (1, 7, 3, 31, 17, 256, 256),
        (1, 256, 1, 10, 32, 20, 2),
    ],
)
def test_is_the_gradient_autograd_finds(random, sizes):
    arguments = scene(random, sizes)
    assert_is_the_gradient(sizes, cnn_gradient(*arguments), *arguments[:3])


def test_is_the_gradient_at_the_usual_start(random):
    vector = net_of(PAPER).start(3).to(DEVICE)
    x, y = torch.randn(PAPER[:5], generator=random), torch.randint(10, PAPER[:2], generator=random)
    x, y = x.to(DEVICE), y.to(DEVICE)
    assert_is_the_gradient(PAPER, cnn_gradient(vector, x, y, 100, 10), vector, x, y)


def test_equal_maxima_give_their_gradient_to_the_first(random):
    sizes = (1, 4, 1, 28, 28, 100, 10)
    vector, x, y, hidden, classes = scene(random, sizes)
    levels = torch.tensor([-0.75, 0.0, 0.25, 0.75], device=DEVICE)
    x = levels.view(1, 4, 1, 1, 1).expand(sizes[:5]).contiguous()  # each image of one grey: all windows tie
    vector[:270] = vector[:270].abs()  # positive ones, for two of the four
    assert_is_the_gradient(sizes, cnn_gradient(vector, x, y, hidden, classes), vector, x, y)


def test_zero_weights_leave_the_last_bias_alone(random):
    vector, x, y, hidden, classes = scene(random, PAPER)
    result = cnn_gradient(torch.zeros_like(vector), x, y, hidden, classes)[0]
    share = torch.bincount(y[0], minlength=classes) / len(y[0])
    torch.testing.assert_close(result[-classes:], 1 / classes - share)
    assert result[:-classes].count_nonzero() == 0


def test_large_logits_stay_finite(random):
    sizes = (1, 8, 1, 12, 12, 10, 5)
    vector, x, y, hidden, classes = scene(random, sizes)
    vector[-classes:] = torch.tensor([1e4, -1e4, 0, 300, 200], device=DEVICE)
    assert_is_the_gradient(sizes, cnn_gradient(vector, x, y, hidden, classes), vector, x, y)


def test_nan_spreads_as_in_torch_and_stays_in_its_minibatch(random):
    sizes = (2, 3, 1, 10, 10, 20, 4)
    vector, x, y, hidden, classes = scene(random, sizes)
    clean = cnn_gradient(vector, x, y, hidden, classes)
    x[0, 1, 0, 9, 9] = math.nan  # in the last corner: the last of four in one window of each pooling
    result = cnn_gradient(vector, x, y, hidden, classes)
    expected = net_of(sizes).gradient(vector.double(), x[0].double(), y[0])
    assert expected.isnan().any()
    assert torch.equal(result[0].isnan(), expected.isnan())
    assert torch.equal(result[1], clean[1])


@pytest.mark.parametrize("k", [3, 40])
def test_a_row_does_not_depend_on_the_other_minibatches(random, k):
    vector, x, y, *rest = scene(random, (k, *PAPER[1:]))
    together = cnn_gradient(vector, x, y, *rest)
    for i in {0, 1, k - 1}:
        assert torch.equal(together[i : i + 1], cnn_gradient(vector, x[i : i + 1], y[i : i + 1], *rest))


def test_repeats_are_bit_equal_whatever_ran_between(random):
    scenes = [scene(random, sizes) for sizes in (PAPER, (2, 5, 3, 32, 20, 64, 7), PAPER)]
    first = [cnn_gradient(*arguments) for arguments in scenes]
    assert not torch.equal(first[0], first[2])
    for _ in range(20):
        for arguments, result in zip(scenes, first, strict=True):
            assert torch.equal(cnn_gradient(*arguments), result)


def test_takes_views_and_no_minibatches(random):
    vector, x, y, *rest = scene(random, (2, 3, 2, 12, 10, 9, 4))
    expected = cnn_gradient(vector, x, y, *rest)
    views = vector.repeat(2, 1).T.contiguous()[:, 1], x.mT.contiguous().mT, y.T.contiguous().T
    assert not any(view.is_contiguous() for view in views)
    assert torch.equal(cnn_gradient(*views, *rest), expected)
    assert cnn_gradient(vector, x[:0], y[:0], *rest).shape == (0, len(vector))


def test_a_graph_replays_it_on_new_numbers(random):
    vector, x, y, *rest = scene(random, PAPER)
    cnn_gradient(vector, x, y, *rest)  # what is set up once is
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = cnn_gradient(vector, x, y, *rest)
    for _ in range(3):
        others = scene(random, PAPER)
        for buffer, other in zip((vector, x, y), others, strict=False):
            buffer.copy_(other)
        graph.replay()
        assert torch.equal(result, cnn_gradient(*others))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vector": lambda v: v.double()}, "vector must have dtype float32, got float64"),
        ({"vector": lambda v: v[1:]}, r"vector must have shape \(d,\) = \((\d+),\), got"),
        ({"x": lambda x: x.half()}, "x must have dtype float32 like vector, got float16"),
        ({"x": lambda x: x[0]}, r"x must have shape \(k, B, C, H, W\), got \(3, 1, 12, 12\)"),
        ({"x": lambda x: x.cpu()}, "x must be on cuda:0 like vector, got cpu"),
        ({"x": lambda x: x[:, :0], "y": lambda y: y[:, :0]}, "number of images B in 1 to 256, got 0"),
        ({"x": lambda x: x.expand(2, 3, 4, 12, 12)}, "number of channels C in 1 to 3, got 4"),
        ({"x": lambda x: x[..., :9, :]}, "height H in 10 to 32, got 9"),
        ({"x": lambda x: x.repeat(1, 1, 1, 1, 3)}, "width W in 10 to 32, got 36"),
        ({"y": lambda y: y.int()}, "y must have dtype int64, got int32"),
        ({"y": lambda y: y[:, :2]}, r"y must have shape \(k, B\) = \(2, 3\), got \(2, 2\)"),
        ({"hidden": lambda _: 257}, "hidden must lie in 1 to 256, got 257"),
        ({"classes": lambda _: 0}, "classes must lie in 1 to 256, got 0"),
    ],
)
def test_refusals_name_what_is_wrong(random, change, words):
    names = ("vector", "x", "y", "hidden", "classes")
    arguments = zip(names, scene(random, (2, 3, 1, 12, 12, 8, 4)), strict=True)
    with pytest.raises(RuntimeError, match=f"secureafl_sim::cnn_gradient: .*{words}"):
        cnn_gradient(*(change.get(name, lambda same: same)(value) for name, value in arguments))
