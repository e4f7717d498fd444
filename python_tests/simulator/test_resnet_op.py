"""ResNet-20 as two ops, its gradient and what it says of images, against torch in float64.

The kernels' source runs on an emulated GPU, whose products are exact, and the op on a real one, which rounds their
factors to 11 bits.
"""

import math
from functools import partial

import pytest
import torch
from emulated import library, pointers

from secureafl_ext.tasks.models import resnet20

GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"))
on_gpu = pytest.mark.parametrize("how", [GPU])
anywhere = pytest.mark.parametrize("how", ["emulated", GPU])


@pytest.fixture
def emulated():
    """(vector, x, y, classes, seed) -> (k, d)"""
    run = library("resnet").resnet_gradient

    def gradient(vector, x, y, classes, seed=0):
        result = torch.full((len(x), len(vector)), math.nan)
        *inputs, out = pointers(vector, x, y, y, result)
        assert run(*inputs, *x.shape[:3], classes, out, seed) == len(vector)
        return result

    return gradient


@pytest.fixture
def gradient(how, emulated):
    """The op, and where its arguments must be."""
    if how == "emulated":
        return emulated, "cpu"
    return torch.ops.secureafl_sim.resnet_gradient, "cuda"


@pytest.fixture
def predict(how):
    """(vector, x, classes) -> (B, outputs), and where its arguments must be."""
    if how == "cuda":
        return torch.ops.secureafl_sim.resnet_predict, "cuda"

    def emulated(vector, x, classes, seed=0):
        result = torch.full((len(x), classes or 1), math.nan)
        *inputs, out = pointers(vector, x, result)
        assert library("resnet").resnet_predict(*inputs, *x.shape[:2], classes, out, seed) == len(vector)
        return result

    return emulated, "cpu"


def scene(random, k, size, channels, classes, device="cpu"):
    """A net whose norms are not the usual ones, and images."""
    net = resnet20((channels, 32, 32), classes)
    vector = net.start(3)
    for name, part in zip(net.shapes, vector.split(net.sizes), strict=True):
        if "norm" in name:
            part += 0.3 * torch.randn(part.shape, generator=random)
    x = torch.randn(k, size, channels, 32, 32, generator=random)
    y = torch.randint(classes, (k, size), generator=random) if classes else torch.randn(k, size, generator=random)
    return net, vector.to(device), x.to(device), y.to(device)


def off(got, wanted):
    return ((got.double() - wanted).norm() / wanted.norm()).item()


SIZES = [(1, 2, 3, 10), (2, 1, 1, 2), (1, 1, 8, 256), (1, 3, 3, 0)]  # k, B, C, classes; 0 is a regression


@anywhere
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_is_the_gradient(random, how, gradient, sizes):
    op, device = gradient
    net, vector, x, y = scene(random, *sizes, device)
    got = op(vector, x, y, net.classes)
    assert got.shape == (len(x), net.size) and got.dtype == torch.float32
    for row, images, labels in zip(got, x, y, strict=True):
        wanted = net.gradient(vector.double(), images.double(), labels if net.classes else labels.double())
        apart = [off(a, b) for a, b in zip(row.split(net.sizes), wanted.split(net.sizes), strict=True)]
        # Rounding turns a ReLU here and there, in float32 seldom; of one image that is more than of a batch.
        whole, part = (5e-4, 5e-3) if how == "emulated" else (0.05, 0.3)
        assert off(row, wanted) < whole and max(apart) < part


@anywhere
@pytest.mark.parametrize(("what", "by"), [("x", 1e6), ("conv", 1e6), ("conv", 1e-5), ("norm", 1e4), ("norm", 1e-4)])
def test_no_size_is_too_large_or_too_small(random, how, gradient, what, by):
    """Half floats end at 65,504 and grow coarse below 6e-5."""
    op, device = gradient
    net, vector, x, y = scene(random, 1, 2, 3, 10, device)
    for name, part in zip(net.shapes, vector.split(net.sizes), strict=True):
        kind = next((kind for kind in ("norm", "head") if kind in name), "conv")
        if kind == what:
            part *= by
            part[-1] *= 100  # all others are not the largest
        elif (what, name) == ("norm", "head.weight"):  # so that it is unsure as before
            part /= by
    x *= by if what == "x" else 1
    wanted = net.gradient(vector.double(), x[0].double(), y[0])
    assert wanted.norm() > 0 and off(op(vector, x, y, 10)[0], wanted) < (5e-4 if how == "emulated" else 0.05)


@anywhere
@pytest.mark.parametrize("sizes", [(3, 10), (1, 2), (8, 256), (3, 0)], ids=str)  # C, classes
def test_is_what_the_net_says(random, how, predict, sizes):
    op, device = predict
    net, vector, x, _ = scene(random, 1, 3, *sizes, device)
    got, wanted = op(vector, x[0], net.classes), net.predict(vector.double(), x[0].double())
    assert got.shape == (3, net.classes or 1) and got.dtype == torch.float32
    assert off(got, wanted.reshape(got.shape)) < (1e-5 if how == "emulated" else 0.01)


@on_gpu
def test_what_it_says_of_an_image_does_not_depend_on_the_others(random, how):
    """More images than are worked on at a time; the way back starts from the same numbers; no images at all."""
    net, vector, x, y = scene(random, 1, 2100, 3, 10, how)
    op = partial(torch.ops.secureafl_sim.resnet_predict, vector, classes=10)
    together = op(x[0])
    assert torch.equal(net.predict(vector, x[0]), together)
    for i in (0, 1023, 1024, 2099):
        assert torch.equal(together[i : i + 1], op(x[0, i : i + 1]))
    bias = torch.ops.secureafl_sim.resnet_gradient(vector, x[:, :1], y[:, :1], 10)[0, -10:]
    torch.testing.assert_close(bias, together[0].softmax(0) - torch.eye(10, device=how)[y[0, 0]], rtol=1e-4, atol=1e-6)
    assert op(x[0, :0]).shape == (0, 10)
    leaf = vector.clone().requires_grad_()
    assert net.predict(leaf, x[0, :2]).requires_grad, "who asks for a gradient gets torch's own"


def test_no_thread_runs_ahead_of_the_others(random, emulated):
    """Warps in any order give the same bits: no barrier is missing."""
    _, vector, x, y = scene(random, 1, 1, 3, 10)
    results = [emulated(vector, x, y, 10, seed) for seed in range(3)]
    assert all(torch.equal(result, results[0]) for result in results)


@anywhere
def test_nan_of_an_image_stays_in_its_minibatch(random, gradient):
    op, device = gradient
    net, vector, x, y = scene(random, 2, 1, 3, 10, device)
    clean = op(vector, x, y, 10)
    x[0, 0, 1, 31, 31] = math.nan
    got = op(vector, x, y, 10)
    assert torch.equal(got[1], clean[1]) and got[0].isnan().any()
    assert torch.equal(got[0].isnan(), net.gradient(vector.double(), x[0].double(), y[0]).isnan())


@on_gpu
def test_a_whole_batch_at_the_usual_start(random, how):
    net = resnet20((3, 32, 32), 10)
    vector = net.start(5).to(how)
    x, y = torch.randn(1, 64, 3, 32, 32, generator=random).to(how), torch.randint(10, (1, 64), generator=random).to(how)
    got = torch.ops.secureafl_sim.resnet_gradient(vector, x, y, 10)[0]
    assert off(got, net.gradient(vector.double(), x[0].double(), y[0])) < 0.02
    assert torch.equal(net.gradient(vector, x[0], y[0]), got)  # which is the one that a simulation takes


@on_gpu
def test_a_row_does_not_depend_on_the_other_minibatches(random, how):
    """More images than are worked on at a time."""
    _, vector, x, y = scene(random, 40, 64, 3, 10, how)
    op = partial(torch.ops.secureafl_sim.resnet_gradient, vector, classes=10)
    together = op(x, y)
    for i in (0, 1, 15, 16, 39):
        assert torch.equal(together[i : i + 1], op(x[i : i + 1], y[i : i + 1]))


@on_gpu
def test_repeats_graphs_and_views_are_bit_equal(random, how):
    _, vector, x, y = scene(random, 2, 5, 3, 10, how)
    op = torch.ops.secureafl_sim.resnet_gradient
    expected = op(vector, x, y, 10)
    views = vector.repeat(2, 1).T.contiguous()[:, 1], x.mT.contiguous().mT, y.T.contiguous().T
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = op(vector, x, y, 10)
    for _ in range(10):
        graph.replay()
        assert torch.equal(captured, expected) and torch.equal(op(*views, 10), expected)
    assert op(vector, x[:0], y[:0], 10).shape == (0, len(vector))


@on_gpu
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vector": lambda v: v.double()}, "vector must have dtype float32, got float64"),
        ({"vector": lambda v: v[1:]}, r"vector must have shape \(d,\) = \((\d+),\), got"),
        ({"x": lambda x: x.half()}, "x must have dtype float32 like vector, got float16"),
        ({"x": lambda x: x[..., 1:]}, r"x must have shape \(k, B, C, 32, 32\).*, got \(2, 3, 3, 32, 31\)"),
        ({"x": lambda x: x.cpu()}, "x must be on cuda:0 like vector, got cpu"),
        ({"x": lambda x: x[:, :0], "y": lambda y: y[:, :0]}, "number of images B in 1 to 1024, got 0"),
        ({"x": lambda x: x.repeat(1, 1, 3, 1, 1)}, "number of channels C in 1 to 8, got 9"),
        ({"y": lambda y: y.float()}, "y must have dtype int64, got float32"),
        ({"y": lambda y: y[:, :2]}, r"y must have shape \(k, B\) = \(2, 3\), got \(2, 2\)"),
        ({"classes": lambda _: 257}, "classes must lie in 0 to 256, got 257"),
        ({"classes": lambda _: 0}, "y must have dtype float32, got int64"),
    ],
)
def test_refusals_name_what_is_wrong(random, how, change, words):
    names = ("vector", "x", "y", "classes")
    arguments = zip(names, (*scene(random, 2, 3, 3, 4, how)[1:], 4), strict=True)
    with pytest.raises(RuntimeError, match=f"secureafl_sim::resnet_gradient: .*{words}"):
        torch.ops.secureafl_sim.resnet_gradient(
            *(change.get(name, lambda same: same)(value) for name, value in arguments)
        )


@on_gpu
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vector": lambda v: v.double()}, "vector must have dtype float32, got float64"),
        ({"vector": lambda v: v[1:]}, r"vector must have shape \(d,\) = \((\d+),\), got"),
        ({"x": lambda x: x[0]}, r"x must have shape \(B, C, 32, 32\).*, got \(3, 32, 32\)"),
        ({"x": lambda x: x.repeat(1, 3, 1, 1)}, "number of channels C in 1 to 8, got 9"),
        ({"classes": lambda _: 257}, "classes must lie in 0 to 256, got 257"),
    ],
)
def test_refusals_of_what_the_net_says(random, how, change, words):
    _, vector, x, _ = scene(random, 1, 2, 3, 4, how)
    arguments = zip(("vector", "x", "classes"), (vector, x[0], 4), strict=True)
    with pytest.raises(RuntimeError, match=f"secureafl_sim::resnet_predict: .*{words}"):
        torch.ops.secureafl_sim.resnet_predict(
            *(change.get(name, lambda same: same)(value) for name, value in arguments)
        )
