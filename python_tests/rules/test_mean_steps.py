"""averages="steps": rule="support" by the mean of each client's updates, weighted by how far they moved the model."""

import numpy as np
import pytest
import torch
from groups import Fleet, resumes_bit_for_bit

from secureafl_ext import RECOMMENDED, SecureAFL
from secureafl_ext.rules.mean_steps import LEAST, SPAN, MeanSteps

N, D = 30, 4000
KINDS = {
    "whole": {},
    "two_bytes": {"history_dtype": torch.bfloat16},
    "sketched": {"sketch": 1024, "sketch_seed": 7},
}


def make(device="cpu", size=D, averages="steps", **settings):
    return SecureAFL(torch.zeros(size, device=device), N, **RECOMMENDED | {"lr": 0.1, "averages": averages} | settings)


def trained(server, rounds, **fleet):
    for _ in Fleet(N, server.model.numel(), **fleet).rounds(rounds, server):
        pass
    return server


def square_of(kept, client=0):
    return kept.squares(kept.means.double().square().sum(1))[client]


def the_same(one, other):
    return all(torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name])) for name in one | other)


def test_means_and_squares_are_those_of_the_formula():
    """In NumPy, from the list of all uploads: weights of the mean, and the square without its noise."""
    kept, random = MeanSteps(torch.zeros(3, 8).double(), basis=False), np.random.default_rng(1)
    rows, weights = [], np.zeros(0)
    total = 0.0
    for i in range(120):
        update, norm, usual, moved = random.normal(size=8), *random.uniform(0.5, 2, 2), random.uniform(0, 1.4)
        stored = i % 7 != 3
        numbers = (torch.tensor(v, dtype=torch.float64) for v in (norm, usual))
        last = torch.tensor(stored), torch.tensor(moved, dtype=torch.float64)
        kept.add(torch.tensor([1]), torch.tensor(update), *numbers, *last)
        if stored:
            share = LEAST + (1 - LEAST) * min(moved, 1)
            total = min(total + share, SPAN)
            weights = np.append(weights * (1 - share / total), share / total)
            rows.append(update / max(norm, usual))
    mean, noise = weights @ np.array(rows), weights @ weights
    np.testing.assert_allclose(kept.means[1].numpy(), mean)
    np.testing.assert_allclose(float(kept.noise[1]), noise)
    np.testing.assert_allclose(float(square_of(kept, 1)), max((mean @ mean - noise) / (1 - noise), 0))
    assert float(kept.total[1]) == pytest.approx(total)
    assert not kept.means[0].any() and not kept.total[0]


@pytest.mark.parametrize("length", [0.0, 0.5, 0.8])
def test_squares_have_no_noise_of_single_updates(length):
    """Updates of length 1, of which `length` is the same each time. The plain square has some."""
    random, found, plain = torch.Generator().manual_seed(0), [], []
    one, full = torch.tensor(1.0, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
    for _ in range(200):
        kept = MeanSteps(torch.zeros(1, 100).double(), basis=False)
        for _ in range(12):
            noise = torch.randn(100, generator=random, dtype=torch.float64)
            noise[0] = 0
            update = noise / noise.norm() * (1 - length**2) ** 0.5
            update[0] = length
            kept.add(torch.tensor([0]), update, one, one, torch.tensor(True), full)
        found.append(float(square_of(kept)))
        plain.append(float(kept.means[0].square().sum()))
    assert abs(np.mean(found) - length**2) < 0.02
    assert np.mean(plain) - length**2 > 0.02


def test_of_a_single_upload_nothing_is_known():
    kept, one = MeanSteps(torch.zeros(1, 8).double(), basis=False), torch.tensor(1.0, dtype=torch.float64)
    kept.add(torch.tensor([0]), torch.full((8,), 8**-0.5).double(), one, one, torch.tensor(True), one)
    assert float(square_of(kept)) == 0 and kept.means[0].norm() == pytest.approx(1)


def test_an_upload_that_moves_nothing_hardly_counts():
    """Ten decoys without effect beside five pushes."""
    kept, one = MeanSteps(torch.zeros(1, 2).double(), basis=False), torch.tensor(1.0, dtype=torch.float64)
    push, decoy = torch.eye(2, dtype=torch.float64)
    for _ in range(5):
        kept.add(torch.tensor([0]), push, one, one, torch.tensor(True), one)
        for _ in range(2):
            kept.add(torch.tensor([0]), decoy, one, one, torch.tensor(True), 0 * one)
    np.testing.assert_allclose(kept.means[0].numpy(), np.array([5, 10 * LEAST]) / (5 + 10 * LEAST))


@pytest.mark.parametrize("kind", KINDS)
def test_attackers_who_send_decoys_are_a_large_group(kind, device):
    """Half of their steps are pushes, so they are left with what a large group keeps."""
    server = trained(make(device, **KINDS[kind]), 40 * N, malicious=8, decoys=1)
    weights = server.weights() * N
    assert weights[:8].max() < 0.5 and weights[8:].min() > 1


def test_averages_of_uploads_do_not_find_them():
    """What the other setting misses: no two pushes are ever compared."""
    server = trained(make(averages="uploads"), 40 * N, malicious=8, decoys=1)
    assert (server.weights()[:8] * N).min() > 0.8


def test_plain_attackers_lose_their_weight_and_honest_clients_keep_theirs(device):
    weights = trained(make(device), 40 * N, malicious=6).weights() * N
    assert weights[:6].max() < 0.35 and weights[6:].mean() > 0.9
    weights = trained(make(device), 20 * N).weights() * N
    assert weights.min() > 0.4 and weights.sum() > 0.9 * N


@pytest.mark.parametrize("kind", KINDS)
def test_attackers_who_were_honest_for_long_lose_their_weight_soon(kind, device):
    """Six uploads each, give or take: a long window would take as many to forget the honest ones."""
    server = trained(make(device, **KINDS[kind]), 46 * N, malicious=6, honest=40 * N)
    assert (server.weights()[:6] * N).max() < 0.5


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_attackers_win_no_weight_back_by_silence(kind, leaves, device):
    """Refreshes pass while they do not count. Then they push again. They fall silent together: the last two of them
    would look like any pair."""
    server, fleet = make(device, expiry=3, trial=0, **KINDS[kind]), Fleet(N, D, malicious=6)
    for _ in fleet.rounds(40 * N, server):
        pass

    def submit(client):
        return float(server.submit(client, fleet.upload(client).to(server.model), server.version).weight) * N

    assert max([submit(client) for client in range(6)]) < 0.6
    for client in range(6 if leaves else 0):
        server.leave(client)
    for turn in range(8 * N):
        submit(6 + turn % (N - 6))
    assert not server.present[:6].any()
    assert max([submit(client) for client in range(6)]) < 0.6


def test_until_weights_are_computed_it_does_what_averages_of_uploads_do(device):
    steps, uploads = make(device, size=500), make(device, size=500, averages="uploads")
    for _, (a, b) in Fleet(N, 500).rounds(2 * N - 1, steps, uploads):
        assert (bool(a.accepted), a.reason) == (bool(b.accepted), b.reason)
        torch.testing.assert_close(a.weight, b.weight)
        torch.testing.assert_close(steps.model, uploads.model, rtol=1e-4, atol=1e-6)


def test_similarity_has_the_inner_products_of_the_means():
    server = trained(make(size=300), 10 * N)
    state, products = server.state_dict(), server.similarity
    means, noise = state["mean_updates"].double().numpy(), state["noise"].numpy()
    squares = np.maximum(((means * means).sum(1) - noise) / (1 - noise), 0)
    squares[noise > 0.75] = 0
    units = means / np.linalg.norm(means, axis=1, keepdims=True)
    lengths = np.minimum(np.sqrt(squares), np.linalg.norm(means, axis=1))
    np.testing.assert_allclose(products.numpy(), lengths[:, None] * (units @ units.T) * lengths, atol=1e-6)
    assert make(sketch=64).similarity is None


def test_similarity_is_computed_once_between_two_refreshes(device):
    """It costs as much as a refresh: an observer that looks often must not pay for it each time."""
    server = trained(make(device, size=300), 2 * N + 5)
    first = server.similarity
    server.submit(1, torch.ones(300, device=device), server.version)
    assert server.similarity is first
    server.forget(2)
    assert server.similarity is not first and not server.similarity[2].any()
    again = trained(server, 2 * N).similarity
    assert again is not first and not torch.equal(again, first)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_continues_bit_for_bit(kind, tmp_path, device):
    server, fleet = make(device, **KINDS[kind]), Fleet(N, D, malicious=6, decoys=1)
    resumes_bit_for_bit(server, fleet, tmp_path / "s.safetensors")


FORGED = {
    "mean_updates": lambda t: t.fill_(3),
    "total": lambda t: t.fill_(51),
    "noise": lambda t: t.fill_(-0.1),
    "norms": lambda t: t.fill_(-1),
    "shift": lambda t: t.fill_(torch.inf),
    "rounds": lambda t: t.fill_(-5),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_state_is_refused_and_nothing_changes(name):
    server = trained(make(size=100), 70)
    state, before = server.state_dict(), server.state_dict()
    FORGED[name](state[name])
    with pytest.raises(ValueError, match=f"{name} must be .* got other values"):
        server.load_state_dict(state)
    assert the_same(before, server.state_dict())


@pytest.mark.parametrize("value", [3.0, torch.nan, torch.inf])
def test_forged_means_in_two_bytes_are_refused_and_nothing_changes(value):
    """Also means of another type: bfloat16 into float32, and the other way round."""
    server = trained(make(size=100, history_dtype=torch.bfloat16), 70)
    state, before = server.state_dict(), server.state_dict()
    for other in (state["mean_updates"].float(), state["mean_updates"].half()):
        with pytest.raises(ValueError, match=r"mean_updates must be \(30, 100\) bfloat16, got"):
            server.load_state_dict({**state, "mean_updates": other})
    with pytest.raises(ValueError, match=r"mean_updates must be \(30, 100\) float32, got"):
        make(size=100).load_state_dict(state)
    state["mean_updates"][2, 7] = value
    with pytest.raises(ValueError, match="mean_updates must be rows of length 1 at most, got other values"):
        server.load_state_dict(state)
    assert the_same(before, server.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_the_version_before_is_taken(kind):
    """It had more numbers, longer windows and another name; the basis is a new one."""
    server = trained(make(size=100, **KINDS[kind]), 70)
    state = server.state_dict()
    old = {name: value for name, value in state.items() if name not in ("basis", "mean_updates")}
    old |= {"squares": torch.zeros(N, dtype=torch.float64), "met": torch.zeros(N, dtype=torch.int64)}
    old |= {"means": state["mean_updates"]} if kind != "sketched" else {}
    old["total"] = old["total"] + 30
    for total in (old["total"].to(torch.complex64), old["total"].to_sparse(), "15"):
        with pytest.raises(ValueError, match="total must be"):
            server.load_state_dict({**old, "total": total})
    server.load_state_dict(old)
    after = server.state_dict()
    assert after.keys() == state.keys() and after["total"].max() == SPAN
    assert the_same({**after, "basis": 0, "total": 0}, {**state, "basis": 0, "total": 0})


def test_means_in_two_bytes_change_little(device):
    """A number of a mean is rounded by up to 1 / 512 of itself; the mean over its numbers by far less."""
    whole, two_bytes = make(device), make(device, history_dtype=torch.bfloat16)
    for _ in Fleet(N, D, malicious=6).rounds(20 * N, whole, two_bytes):
        pass
    assert two_bytes.state_dict()["mean_updates"].dtype == torch.bfloat16
    assert ((whole.weights() - two_bytes.weights()).abs() * N).max() < 0.02
    assert (whole.model - two_bytes.model).norm() < 1e-3 * whole.model.norm()


def test_hostile_updates_leave_a_state_that_loads(device):
    """Garbage, zeros, huge ones, one upload again and again."""
    server, fleet = make(device, size=500), Fleet(N, 500)
    hostile = [torch.full((500,), v) for v in (0.0, 3e38, -3e38, 1e-40, torch.inf, torch.nan)]
    for i, _ in enumerate(fleet.rounds(10 * N, server)):
        server.submit(i % 7, hostile[i % len(hostile)].to(server.model), server.version)
    assert server.model.isfinite().all() and server.weights().isfinite().all()
    server.load_state_dict(server.state_dict())
    assert (server.weights()[7:] * N).mean() > 0.8


def test_a_client_that_is_forgotten_leaves_nothing():
    server = trained(make(size=100), 3 * N)
    server.forget(4)
    state = server.state_dict()
    for name in ("mean_updates", "total", "noise", "norms"):
        assert not state[name][4].any() and state[name].any()


def test_whole_updates_are_kept_if_wanted():
    server = make(size=100, keep_last=True)
    server.submit(3, torch.ones(100), 0)
    update, model = server.last(torch.tensor([3]))
    assert torch.equal(update, torch.ones(100)) and not model.any()
    assert torch.equal(server.estimates()[3], torch.ones(100))
    assert server.norms().tolist() == [10.0 * (k == 3) for k in range(N)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"averages": "both"}, "averages must be one of uploads, steps, got 'both'"),
        (
            {"step": "all"},
            "averages must be 'uploads' unless rule='support', step='received' and memory=0, got 'steps'",
        ),
        ({"rule": "kinship"}, "averages must be 'uploads' unless"),
        ({"memory": 2, "quorum": 0.0}, "averages must be 'uploads' unless"),
        (
            {"history_dtype": torch.bfloat16, "filter": True},
            "history_dtype must be float32, float16 or float64 unless averages='steps' with keep_last=False and "
            "sketch=0, got 'bfloat16'",
        ),
        ({"history_dtype": torch.bfloat16, "sketch": 64}, "history_dtype must be float32, float16 or float64 unless"),
        ({"history_dtype": torch.float16}, "history_dtype=float16 does not support rule='support'"),
    ],
)
def test_refusals(settings, message):
    with pytest.raises(ValueError, match=f"SecureAFL: {message}"):
        make(**settings)


@pytest.mark.parametrize("named", ["sketch=64", "history_dtype=float64", "spacing=3"])
def test_what_cannot_be_captured_is_named(named):
    name, value = named.split("=")
    value = torch.float64 if value == "float64" else int(value)
    with pytest.raises(ValueError, match=f"enqueue: not supported with {named}; use submit"):
        make(**{name: value}).enqueue(torch.tensor([0]), torch.ones(D), torch.zeros(D))
