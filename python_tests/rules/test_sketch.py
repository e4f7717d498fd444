"""sketch=k: rule="support" that keeps k numbers of an update in place of all."""

import numpy as np
import pytest
import torch
from groups import Fleet, resumes_bit_for_bit

from secureafl_ext import RECOMMENDED, SecureAFL
from secureafl_ext.engines.sketch import Sketch, hashed
from secureafl_ext.rules import sketched_support, support
from secureafl_ext.sim.loop import Rounds
from secureafl_ext.sim.settings import Settings

CPU = torch.device("cpu")
N, D = 30, 500


def make(device="cpu", clients=N, size=D, sketch=64, **settings):
    settings = {**RECOMMENDED, "averages": "uploads", "sketch": sketch, "sketch_seed": 7, "lr": 0.1, **settings}
    return SecureAFL(torch.zeros(size, device=device), clients, **settings)


def split_mix(x):
    """SplitMix64's finalizer in Python's whole numbers."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> shift)) * factor % 2**64
    return x ^ (x >> 31)


def test_the_random_numbers_are_those_of_splitmix(device):
    """By definition, not by a version of torch: sketches in a checkpoint depend on them."""
    got = hashed(50, 12345, torch.device(device)).tolist()
    start = split_mix(12345)
    assert [x % 2**64 for x in got] == [split_mix((start + i * 0x9E3779B97F4A7C15) % 2**64) for i in range(50)]


def test_every_coordinate_is_in_one_bucket_with_a_sign():
    sketch = Sketch(1000, 64, 3, CPU)
    columns = torch.stack([sketch.of(unit) for unit in torch.eye(1000, dtype=torch.float64)])  # (1000, 64)
    assert ((columns != 0).sum(1) == 1).all() and set(columns.abs().unique().tolist()) == {0.0, 1.0}
    assert (columns != 0).sum(0).max() <= 16  # 1000 of the 16 * 64 places
    assert 400 < (columns == 1).sum() < 600


def test_inner_products_are_nearly_those_of_the_vectors():
    """Without bias, and with an error of 1 / sqrt(k), also if all weight lies on coordinates of one structure."""
    random = np.random.default_rng(0)
    for structured in (False, True):
        x, y = random.normal(size=(2, 8192))
        y = 0.5 * x + y
        if structured:
            x, y = (np.where(np.arange(8192) % 256 == 5, v, 0) for v in (x, y))
        scale = np.linalg.norm(x) * np.linalg.norm(y)
        errors = []
        for seed in range(200):
            sketch = Sketch(8192, 256, 2 * seed, CPU)
            errors.append((float(sketch.of(torch.tensor(x)) @ sketch.of(torch.tensor(y))) - x @ y) / scale)
        assert abs(np.mean(errors)) < 4 * 256**-0.5 / 200**0.5
        assert np.std(errors) < 1.6 * 256**-0.5


def test_a_sketch_stays_finite_and_garbage_stays_garbage():
    sketch = Sketch(300, 64, 0, CPU)
    assert sketch.of(torch.full((300,), 3.4e38)).isfinite().all()
    assert not sketch.of(torch.full((300,), torch.nan)).isfinite().any()


@pytest.mark.parametrize(("block", "kept"), [(1, 0), (700, 0), (700, 2**27), (2**24, 2**27)])
@pytest.mark.parametrize(("clients", "width", "groups"), [(40, 16, 5), (90, 24, 6), (64, 64, 1)])
def test_shifts_are_those_of_the_inner_products(clients, width, groups, block, kept, monkeypatch):
    """Directions from k x k products and blocks of rows, against support.shifts of the whole n x n products."""
    monkeypatch.setattr(sketched_support, "BLOCK", block)
    monkeypatch.setattr(sketched_support, "KEPT", kept)
    random = torch.Generator().manual_seed(clients)
    noise = torch.randn(clients + groups, width, generator=random, dtype=torch.float64) / width**0.5
    rows = 0.6 * noise[:groups].repeat(clients // groups + 1, 1)[:clients] + 0.3 * noise[groups:]
    rows[: clients // 5] += 0.9 * width**-0.5
    got, wanted = sketched_support.shifts(rows), support.shifts(rows @ rows.T)
    torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-12)
    assert got.std() > 0.1 / clients


def test_means_and_squares_are_those_of_the_formula():
    """In NumPy: a plain mean of the first 50 uploads, then a moving one; products of consecutive uploads."""
    averages, random = sketched_support.SketchedSupport(3, 8, torch.float64, CPU), np.random.default_rng(1)
    client, mean, square, last, norm_before = torch.tensor([1]), np.zeros(8), 0.0, np.zeros(8), 0.0
    for i in range(120):
        sketch, norm, usual = random.normal(size=8), random.uniform(0.5, 2), random.uniform(0.5, 2)
        stored = i % 7 != 3
        numbers = (torch.tensor(v, dtype=torch.float64) for v in (norm, usual))
        averages.add(client, torch.tensor(sketch), torch.tensor(last), *numbers, torch.tensor(stored))
        if stored:
            count = sum(j % 7 != 3 for j in range(i + 1))
            now = sketch / max(norm, usual)
            mean += (now - mean) / min(count, 50)
            if count > 1:
                square += (now @ last / max(norm_before, usual) - square) / min(count - 1, 50)
            last, norm_before = sketch, norm
    np.testing.assert_allclose(averages.means[1].numpy(), mean)
    np.testing.assert_allclose(float(averages.squares[1]), square)
    assert int(averages.met[1]) == count - 1 and float(averages.norms[1]) == norm_before
    assert not averages.means[0].any()


def test_a_wide_sketch_does_what_whole_updates_do(device):
    """It only turns the vectors: until weights are computed for the first time, both servers do the same."""
    sketched, whole = make(device, sketch=512), make(device, sketch=0, sketch_seed=None)
    for _, (a, b) in Fleet(N, D).rounds(2 * N - 1, sketched, whole):
        assert (bool(a.accepted), a.reason) == (bool(b.accepted), b.reason)
        torch.testing.assert_close(a.factor, b.factor, rtol=1e-4, atol=1e-6, equal_nan=True)
        torch.testing.assert_close(a.weight, b.weight)
        torch.testing.assert_close(sketched.model, whole.model, rtol=1e-4, atol=1e-6)


def test_attackers_lose_their_weight(device):
    """Six of 30 push the same way: sketches find them as whole updates do."""
    sketched, whole = (
        make(device, size=4000, sketch=1024, filter=False),
        make(device, size=4000, sketch=0, filter=False),
    )
    for _ in Fleet(N, 4000, malicious=6).rounds(40 * N, sketched, whole):
        pass
    for server in (sketched, whole):
        weights = server.weights() * N
        assert weights[:6].max() < 0.35 and weights[6:].mean() > 0.9
    assert sketched.stats()["left_out"] == int(sketched.left_out().sum())


def test_honest_clients_keep_their_weight(device):
    server = make(device, size=4000, sketch=1024)
    for _ in Fleet(N, 4000).rounds(20 * N, server):
        pass
    weights = server.weights() * N
    assert weights.min() > 0.4 and weights.sum() > 0.9 * N


def test_more_clients_than_numbers(device):
    """150 clients and 64 numbers: the weights come from the k x k products."""
    server, fleet = make(device, clients=150, filter=False), Fleet(150, D, malicious=30)
    for _ in fleet.rounds(8 * 150, server):
        pass
    weights = server.weights() * 150
    assert weights[:30].mean() < 0.35 < 0.8 < weights[30:].mean()


def test_nothing_of_the_size_of_all_updates_is_kept():
    state = make(clients=2000, size=3000).state_dict()
    largest = max(tensor.numel() for name, tensor in state.items() if isinstance(tensor, torch.Tensor))
    assert largest < 2000 * 3000 / 10


def test_a_checkpoint_continues_bit_for_bit(tmp_path, device):
    resumes_bit_for_bit(make(device), Fleet(N, D, malicious=6), tmp_path / "s.safetensors")


FORGED = {
    "norms": lambda t: t.fill_(-1),
    "squares": lambda t: t.fill_(torch.nan),
    "means": lambda t: t.fill_(1e30),
    "met": lambda t: t.fill_(-1),
    "shift": lambda t: t.fill_(torch.inf),
    "rounds": lambda t: t.fill_(-5),
    "sketch_seed": lambda t: t.add_(1),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_state_is_refused_and_nothing_changes(name):
    server = make()
    for _ in Fleet(N, D).rounds(70, server):
        pass
    state, before = server.state_dict(), server.state_dict()
    FORGED[name](state[name])
    with pytest.raises(ValueError, match=f"{name} must be") as refusal:
        server.load_state_dict(state)
    assert "got other values" in str(refusal.value)
    after = server.state_dict()
    assert all(torch.equal(torch.as_tensor(before[key]), torch.as_tensor(after[key])) for key in before)


def test_sketches_of_another_seed_are_refused():
    """They would be noise. And the message does not tell the seed."""
    with pytest.raises(ValueError, match="sketch_seed must be the seed of this server, got other values"):
        make(sketch_seed=8).load_state_dict(make(sketch_seed=7).state_dict())


def test_the_seed_is_random_unless_given():
    first, second = (make(sketch_seed=None).config.sketch_seed for _ in range(2))
    assert first != second and make(sketch_seed=3).config.sketch_seed == 3
    assert SecureAFL(torch.zeros(4), 3).config.sketch_seed is None


def test_hostile_updates_leave_a_state_that_loads(device):
    """Garbage, zeros, huge ones, one upload again and again."""
    server, fleet = make(device, filter=False), Fleet(N, D)
    hostile = [torch.full((D,), v) for v in (0.0, 3e38, -3e38, 1e-40, torch.inf, torch.nan)]
    for i, _ in enumerate(fleet.rounds(5 * N, server)):
        server.submit(i % 7, hostile[i % len(hostile)].to(server.model), server.version)
    assert server.model.isfinite().all() and server.weights().isfinite().all()
    server.load_state_dict(server.state_dict())
    weights = server.weights() * N
    assert weights[7:].mean() > 0.5


def test_an_update_whose_norm_overflows_is_not_averaged():
    """In float64: the products of its sketch would be infinite, and computing the weights would fail."""
    model = torch.zeros(D, dtype=torch.float64)
    settings = {"sketch": 64, "sketch_seed": 7, "history_dtype": torch.float64}
    server, random = SecureAFL(model, 4, **RECOMMENDED, **settings), torch.Generator().manual_seed(0)
    for i in range(40):
        update = torch.randn(D, generator=random, dtype=torch.float64)
        server.submit(i % 4, update * 1e300 if i > 8 and i % 4 == 0 else update, server.version)
    assert server.weights()[1:].min() > 0 and server.model.isfinite().all()
    server.load_state_dict(server.state_dict())


def test_a_client_that_is_forgotten_leaves_nothing():
    server = make()
    for _ in Fleet(N, D).rounds(3 * N, server):
        pass
    server.forget(4)
    state = server.state_dict()
    for name in ("means", "squares", "met", "norms", "shift", "update_sketches", "model_sketches"):
        assert not state[name][4].any() and state[name].any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rule": "median", "step": "all"}, "sketch must be 0 unless rule='support', step='received' and memory=0"),
        ({"step": "all"}, "sketch must be 0 unless"),
        ({"memory": 2, "quorum": 0.0}, "sketch must be 0 unless"),
        ({"sketch": 63}, "sketch must be 0, or a whole number 64 to 65536, got 63"),
        ({"sketch": 1.5}, "sketch must be 0, or a whole number 64 to 65536, got 1.5"),
        ({"sketch_seed": -1}, "sketch_seed must be None or a whole number, 0 or more, got -1"),
    ],
)
def test_refusals(settings, message):
    with pytest.raises(ValueError, match=f"SecureAFL: {message}".replace("(", r"\(")):
        make(**settings)


def test_whole_updates_are_not_there():
    server = make()
    server.submit(0, torch.ones(D), 0)
    for call in (server.estimates, lambda: server.last(torch.tensor([0]))):
        with pytest.raises(ValueError, match="sketch must be 0, whole updates are not kept, got 64"):
            call()
    assert server.similarity is None


def test_the_simulators_seed_decides_the_sketches():
    """A random one would make every run a different one."""

    def sketch_seed(seed):
        options = {"sketch": 64}
        settings = Settings(defense="secureafl-support", defense_options=options, seed=seed, device="cpu")
        return Rounds(settings.resolve()).server.config.sketch_seed

    assert sketch_seed(1) == sketch_seed(1) != sketch_seed(2)
