from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from secureafl_ext.tasks.models import MODELS, Net, build, cnn, resnet20

GREY, COLOUR = (1, 28, 28), (3, 32, 32)


def batch(random, shape, classes, size=4, dtype=torch.float32):
    x = torch.randn(size, *shape, generator=random, dtype=dtype)
    if classes:
        return x, torch.randint(classes, (size,), generator=random)
    return x, torch.randn(size, generator=random, dtype=dtype)


def test_sizes():
    assert cnn(GREY, 10).size == 139_960  # the paper says 140,000
    assert resnet20(COLOUR, 10).size == 269_722  # He et al. say 0.27 million
    # 32 -> 30 -> 15 -> 13 -> 6
    assert cnn(COLOUR, 100).size == (27 * 30 + 30) + (270 * 50 + 50) + (1800 * 100 + 100) + (100 * 100 + 100)
    assert resnet20(GREY, 1).size == resnet20((1, 66, 200), 0).size, "for images of any size; regression has one output"


def plain_cnn(vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The paper's table, layer by layer, with the weights cut out by hand."""
    at = 0

    def take(*shape):
        nonlocal at
        part = vector[at : at + torch.Size(shape).numel()].reshape(shape)
        at += part.numel()
        return part

    for channels, out in ((1, 30), (30, 50)):
        x = F.max_pool2d(F.conv2d(x, take(out, channels, 3, 3), take(out)).clamp(min=0), 2)
    x = F.linear(x.flatten(1), take(100, 1250), take(100)).clamp(min=0)
    out = F.linear(x, take(10, 100), take(10))
    assert at == len(vector)
    return out


def test_cnn_is_the_papers_table(random):
    net = cnn(GREY, 10)
    vector, (x, _) = net.start(0), batch(random, GREY, 10)
    torch.testing.assert_close(net.predict(vector, x), plain_cnn(vector, x))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("shape", "classes"), [(GREY, 10), (COLOUR, 100), ((3, 20, 24), 0)])
def test_gradient_is_that_of_a_module_with_weights_of_its_own(device, random, name, shape, classes):
    net = build(name, shape, classes)
    vector = net.start(3).to(device)
    x, y = (part.to(device) for part in batch(random, shape, classes))
    module = net.make().to(device)
    nn.utils.vector_to_parameters(vector, module.parameters())
    out = module(x)
    loss = F.cross_entropy(out, y) if classes else ((out[:, 0] - y) ** 2).mean()
    loss.backward()
    expected = nn.utils.parameters_to_vector([parameter.grad for parameter in module.parameters()])
    gradient = net.gradient(vector, x, y)
    assert gradient.shape == (net.size,) and gradient.device == vector.device and not gradient.requires_grad
    torch.testing.assert_close(net.loss(vector, x, y), loss.detach())
    if (name, shape, device) == ("resnet20", COLOUR, "cuda"):  # an op that rounds factors: test_resnet_op.py
        assert (gradient - expected).norm() < 0.05 * expected.norm()
    else:
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)
    assert net.predict(vector, x).shape == ((4, classes) if classes else (4,))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("classes", [10, 0])
def test_gradient_is_the_slope_of_the_loss(random, name, classes):
    net = build(name, (1, 12, 12), classes)
    vector = net.start(0).double()
    x, y = batch(random, (1, 12, 12), classes, dtype=torch.float64)
    along = torch.randn(net.size, generator=random, dtype=torch.float64)
    step = 1e-9 * along  # so short that hardly a ReLU changes sides, so long that float64 sees the difference
    slope = (net.loss(vector + step, x, y) - net.loss(vector - step, x, y)) / 2e-9
    assert float(slope) == pytest.approx(float(net.gradient(vector, x, y) @ along), rel=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_a_sample_is_judged_by_itself(random, name):
    """No statistics of the batch, none of earlier ones: the vector is all the state."""
    net = build(name, GREY, 10)
    vector, (x, y) = net.start(0), batch(random, GREY, 10)
    alone = torch.cat([net.predict(vector, x[i : i + 1]) for i in range(4)])
    net.gradient(vector, 100 * x, y)
    torch.testing.assert_close(net.predict(vector, x), alone)


@pytest.mark.parametrize("name", MODELS)
def test_start_is_fixed_by_its_seed_and_leaves_the_global_generator(name):
    net = build(name, GREY, 10)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = net.start(5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(net.start(5), first) and not torch.equal(net.start(6), first)
    assert first.dtype == torch.float32 and first.isfinite().all() and not first.requires_grad


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_views_and_the_vector_is_left_alone(random, name):
    net = build(name, GREY, 10)
    vector, (x, y) = net.start(0), batch(random, GREY, 10)
    assert {view.untyped_storage().data_ptr() for view in net.views(vector).values()} == {vector.data_ptr()}
    before = vector.clone()
    gradient = net.gradient(vector, x, y)
    assert torch.equal(vector, before) and vector.grad is None and not vector.requires_grad
    with torch.no_grad():
        assert torch.equal(net.gradient(vector, x, y), gradient), "repeats agree bit for bit"


@pytest.mark.parametrize("name", MODELS)
def test_it_learns(random, name):
    """Two classes, told apart by which half is bright."""
    net = build(name, (1, 12, 12), 2)
    y = torch.arange(16) % 2
    x = 0.3 * torch.randn(16, 1, 12, 12, generator=random)
    x[y == 1, :, :6] += 1
    x[y == 0, :, 6:] += 1
    vector = net.start(0)
    for _ in range(20):
        vector = vector - 0.1 * net.gradient(vector, x, y)
    assert (net.predict(vector, x).argmax(1) == y).all() and net.loss(vector, x, y) < 0.35


def test_refusals():
    with pytest.raises(ValueError, match="unknown model 'resnet'; choose from cnn, resnet20"):
        build("resnet", GREY, 10)
    with pytest.raises(ValueError, match="10 x 10 or larger, got 9 x 28"):
        cnn((1, 9, 28), 10)
    with pytest.raises(ValueError, match=r"vector must have shape \(139960,\), got \(5,\)"):
        cnn(GREY, 10).predict(torch.zeros(5), torch.zeros(1, *GREY))
    with pytest.raises(ValueError, match="module must have no buffers"):
        Net(lambda: nn.BatchNorm2d(3), 10)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("classes", [10, 0])
def test_a_cuda_graph_holds_a_gradient(random, name, classes):
    net = build(name, COLOUR, classes)
    vector = net.start(0).cuda()
    x, y = (part.cuda() for part in batch(random, COLOUR, classes))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            net.gradient(vector, x, y)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = net.gradient(vector, x, y)
    vector.copy_(net.start(1))
    graph.replay()
    torch.testing.assert_close(captured, net.gradient(vector, x, y), rtol=1e-3, atol=1e-5)


def test_threads_start_alike():
    """Initial weights come from torch's one global generator, which threads would share."""
    net = cnn((1, 28, 28), 10)
    with ThreadPoolExecutor(8) as pool:
        started = list(pool.map(lambda seed: (seed, cnn((1, 28, 28), 10).start(seed)), [*range(8)] * 4))
    for seed, start in started:
        assert torch.equal(start, net.start(seed))
