"""A server of plain ops split over ranks, against the whole one, in real processes."""

import pytest
import torch
import torch.distributed as dist
from splits import ROW_KINDS, SETTINGS, N, agree, digest, digests, history_of_arrivals, replay, start, whole_state

from secureafl_ext import SecureAFL, gather, shard
from secureafl_ext.config import REASONS
from secureafl_ext.engines.composed import Composed
from secureafl_ext.engines.row_wise import refresh_rounds
from secureafl_ext.rules import support

D = 2_003
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def settings_of(kind):
    return {**SETTINGS, **ROW_KINDS[kind]}


def comings_and_goings(server, k):
    if k % 50 == 33:
        server.forget(k % N)
    if k % 50 == 45:
        server.leave((k + 3) % N)


def counted(server, k, counts):
    comings_and_goings(server, k)
    if k % 8 == 0:
        counts.append(server.stats())


def observed(group, settings, arrivals):
    server, sent, counts = start(settings, group, D), [], []
    plain = dist.all_reduce
    dist.all_reduce = lambda message, **rest: sent.append(len(message)) or plain(message, **rest)
    try:
        verdicts = replay(server, arrivals, group, lambda *now: counted(*now, counts))
    finally:
        dist.all_reduce = plain
    return verdicts, sent, counts, server.weights(), digest(server.state_dict()), whole_state(server, group)


@pytest.mark.parametrize(
    ("kind", "count", "length"),
    [
        *(("support", 2, 300), ("support", 3, 300), ("kinship", 2, 300), ("steps", 3, 300)),
        *(("float64", 2, 200), ("krum in buckets", 2, 100), ("median with a quorum", 3, 100)),
    ],
)
def test_equals_the_whole_server(ranks, kind, count, length):
    settings, expected_counts = settings_of(kind), []
    arrivals, expected, whole = history_of_arrivals(settings, length, D, lambda *now: counted(*now, expected_counts))
    assert whole.version >= 200 or length < 300
    happened = {reason.split(" version")[0] for reason, *_ in expected}
    assert {*REASONS[:3], REASONS[4], "stale:"} <= happened
    assert any(torch.linalg.vector_norm(update) > SETTINGS["max_norm"] for _, update, _ in arrivals[:4])  # are clipped
    if "expiry" in settings:
        assert all(any(counts[name] for counts in expected_counts) for name in ("expired", "on_probation"))
    if settings.get("rule") == "support":
        assert whole.state_dict()["shift"].abs().max() > 0.03  # a third of a mean weight

    answers = ranks.run(count, observed, settings, arrivals)
    for verdicts, sent, counts, weights, (shared, _), state in answers:
        assert [(reason, version) for reason, _, version in verdicts] == [(r, v) for r, _, v in expected]
        factors = [factor for _, factor, _ in expected]
        assert [factor for _, factor, _ in verdicts] == pytest.approx(factors, rel=1e-4, nan_ok=True)
        assert counts == expected_counts
        assert shared == answers[0][4][0]  # every rank has decided and knows the same
        agree(state, whole.state_dict())
        assert torch.allclose(weights, whole.weights(), rtol=1e-4, atol=1e-6)
        row_wise = settings.get("rule") is not None
        refreshes = whole.version // refresh_rounds(N) if settings.get("rule") == "support" else 0
        gone = sum(k % 50 in (33, 45) for k in range(length))
        # one message a submission, forget or leave, of n numbers; one more for a refresh, three with all products
        products = settings.get("averages") == "steps"
        usual, large = 4 * count + 5 + N * row_wise, 4 * count + N * N
        assert sent.count(usual) == length + gone + refreshes * (1 + products)
        assert sent.count(large) == len(sent) - sent.count(usual) == refreshes * products


@pytest.mark.parametrize("kind", ["support", "kinship", "steps"])
def test_repeats_bit_for_bit(ranks, kind):
    settings = settings_of(kind)
    arrivals, *_ = history_of_arrivals(settings, 40, D)
    once, again = (ranks.run(3, digests, settings, arrivals, D, comings_and_goings) for _ in range(2))
    assert once == again


def test_a_group_of_one_is_the_composed_server_bit_for_bit(ranks):
    settings = settings_of("float64")
    arrivals, _, whole = history_of_arrivals(settings_of("float64"), 60, D)
    assert type(whole._engine) is Composed
    assert ranks.run(1, digests, settings, arrivals, D) == [digest(whole.state_dict())]


def saved_and_loaded(group, settings, arrivals, path):
    server = start(settings, group, D)
    replay(server, arrivals[:-20], group, comings_and_goings)
    server.save(path)
    loaded = SecureAFL.load(path, process_group=group)
    for one in (server, loaded):
        replay(one, arrivals[-20:], group)
    return digest(server.state_dict()), digest(loaded.state_dict()), server.norms(), whole_state(loaded, group)


@pytest.mark.parametrize("more", [{}, {"history_dtype": torch.bfloat16}], ids=["float32", "bfloat16"])
def test_means_alone_equal_those_of_the_whole_server(ranks, more, tmp_path):
    """As in the recommended settings: no filter, no last updates. A checkpoint of two ranks loads on two or none."""
    settings = settings_of("steps") | {"filter": False} | more
    path, after = tmp_path / "checkpoint", lambda server, k: comings_and_goings(server, k) if k < 100 else None
    arrivals, _, whole = history_of_arrivals(settings, 120, D, after)
    assert "last_updates" not in whole.state_dict() and whole.state_dict()["shift"].any()
    bound = 2**-7 if more else 1e-4
    for shared, loaded, norms, state in ranks.run(2, saved_and_loaded, settings, arrivals, path):
        assert shared == loaded
        agree(state, whole.state_dict(), bound)
        assert torch.allclose(norms, whole.norms(), rtol=bound)
    there = SecureAFL.load(path)
    for arrival in arrivals[-20:]:
        there.submit(*arrival)
    agree(there.state_dict(), whole.state_dict(), bound)


def disagree(group, arrivals):
    """Rank 1 finds other shifts at every refresh."""
    plain = support.shifts
    if dist.get_rank(group) == 1:
        support.shifts = lambda means: plain(means) + 0.01
    try:
        return digests(group, settings_of("support"), arrivals, D)
    finally:
        support.shifts = plain


def test_all_ranks_take_the_shifts_of_the_first(ranks):
    """Eigenvectors of equal eigenvalues are arbitrary."""
    arrivals, *_ = history_of_arrivals(settings_of("support"), 40, D)
    assert ranks.run(2, disagree, arrivals) == ranks.run(2, digests, settings_of("support"), arrivals, D)


def onlooker(group, settings, arrivals):
    server = start(settings, group, D)
    for arrival in arrivals[:-1]:
        replay(server, [arrival], group)
        server.estimates(), server.state_dict()
    replay(server, arrivals[-1:], group)
    known = None
    if dist.get_rank(group) == 0:  # calls without a message
        server.threshold(), server.checkout(), server.last(torch.tensor([0])), server.left_out()
        known = server.stats(), server.weights(), server.similarity.clone(), server.present.clone()
    return known, gather(server.estimates(), group), digest(server.state_dict())


def test_looking_changes_nothing(ranks):
    settings = settings_of("support")
    arrivals, _, whole = history_of_arrivals(settings_of("support"), 40, D)
    answers = ranks.run(2, onlooker, settings, arrivals)
    assert [state for *_, state in answers] == ranks.run(2, digests, settings, arrivals, D)
    stats, weights, similarity, present = answers[0][0]
    assert stats == whole.stats() and torch.equal(present, whole.present)
    assert torch.allclose(weights, whole.weights(), rtol=1e-4) and weights.any()
    assert torch.allclose(similarity, whole.similarity, atol=1e-6) and similarity.any()
    for _, estimates, _ in answers:
        assert torch.allclose(estimates, whole.estimates(), rtol=1e-4, atol=1e-6)


def small(group, settings, arrivals, d):
    server = start(settings, group, d)
    return replay(server, arrivals, group), len(server.model), gather(server.model, group)


@pytest.mark.parametrize("kind", ["kinship", "steps"])
def test_a_rank_may_have_no_coordinates(ranks, kind):
    settings = settings_of(kind)
    arrivals, expected, whole = history_of_arrivals(settings, 30, 2)
    answers = ranks.run(3, small, settings, arrivals, 2)
    assert [length for _, length, _ in answers] == [1, 1, 0]
    for verdicts, _, model in answers:
        assert [reason for reason, *_ in verdicts] == [reason for reason, *_ in expected]
        assert torch.allclose(model, whole.model, rtol=1e-4)


def huge_first_update(group, settings):
    """Its square overflows on one rank alone."""
    server = start(settings, group, 4)
    update = torch.tensor([1e200, 2e200] if dist.get_rank(group) == 0 else [1.0, 2.0], dtype=torch.float64)
    receipts = [server.submit(0, update, 0), server.submit(1, update / update.norm(), 0)]
    return [receipt.reason for receipt in receipts], whole_state(server, group)


def test_a_norm_that_overflows_is_one_on_all_ranks(ranks):
    settings = {**settings_of("float64"), "expiry": 12}
    whole = SecureAFL(torch.zeros(4, dtype=torch.float64), N, **settings)
    small = torch.tensor([1.0, 2.0], dtype=torch.float64)
    first = torch.cat([1e200 * small, small])
    second = torch.cat([part / part.norm() for part in (first[:2], small)])
    expected = [whole.submit(0, first, 0).reason, whole.submit(1, second, 0).reason]
    for reasons, state in ranks.run(2, huge_first_update, settings):
        assert reasons == expected == [REASONS[1]] * 2
        agree(state, whole.state_dict())


# On a GPU


def on_the_gpu(group, settings, arrivals):
    server = SecureAFL(shard(torch.zeros(D, device="cuda"), group), N, **settings, process_group=group)
    verdicts = replay(server, [(client, update.cuda(), version) for client, update, version in arrivals], group)
    return [reason for reason, *_ in verdicts], server.model.cpu()


@needs_gpu
@pytest.mark.parametrize(("backend", "count"), [("nccl", 1), ("gloo", 2)])
@pytest.mark.parametrize("kind", ["support", "kinship"])
def test_on_a_gpu(ranks, kind, backend, count):
    arrivals, expected, whole = history_of_arrivals(settings_of(kind), 60, D)
    answers = ranks.run(count, on_the_gpu, settings_of(kind), arrivals, backend=backend)
    assert all(verdicts == [reason for reason, *_ in expected] for verdicts, _ in answers)
    model = torch.cat([part for _, part in answers])
    assert (model - whole.model).norm() <= 1e-4 * model.norm()
