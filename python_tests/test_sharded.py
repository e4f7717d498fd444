"""A server split over ranks against the whole one, in real processes: the same verdicts, models and checkpoints."""

import hashlib
import math
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from states import identical

from secureafl_ext import SecureAFL, checkpoint, gather, shard, sharded
from secureafl_ext.config import REASONS

D, N = 20_011, 9
# Steps so short that rounding stays rounding: in a livelier world the whole server, its coordinates merely in another
# order, is soon elsewhere too, since a near-singular correction or a factor at the quantile makes much of a last bit.
SETTINGS = {"lr": 0.005, "max_staleness": 4, "max_norm": 20.0}
KINDS = {
    "median": {},
    "float16": {"history_dtype": torch.float16},
    "trimmed mean": {"rule": "trimmed_mean", "trim": 2, "store": "accepted", "window": 40},
    "mean": {"rule": "mean", "memory": 1},
}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.fixture(scope="module")
def ranks():
    processes = Ranks()
    yield processes
    processes.close()


class World:
    """Quadratic clients, some of whom come late, send noise, what is not finite, or on a model no longer kept."""

    def __init__(self, d=D, seed=0):
        self.random = torch.Generator().manual_seed(seed)
        self.centres = torch.randn(N, d, generator=self.random)
        self.curvature = 0.5 + torch.rand(N, d, generator=self.random)
        self.rounds = 0

    def draw(self, below):
        return int(torch.randint(below, (), generator=self.random))

    def next(self, models):
        """(client, update, version), of a client that trained on one of the models so far (or as good as)."""
        self.rounds += 1
        client = self.draw(4 if self.rounds < 30 else N)
        newest = len(models) - 1
        version = max(0, newest - self.draw(7))
        update = self.curvature[client] * (models[version] - self.centres[client])
        noise = torch.randn(update.shape, generator=self.random)
        update = 3 * noise if client == N - 1 else update + 0.05 * noise
        if self.rounds % 17 == 9:
            update[self.draw(len(update))] = math.nan if self.rounds % 2 else math.inf
        return client, update, version


def history_of_arrivals(settings, rounds, d=D):
    """(arrivals, reasons and factors, the whole server behind them)"""
    world, server = World(d), SecureAFL(torch.zeros(d), N, **settings)
    models, arrivals, verdicts = [server.model.clone()], [], []
    while len(arrivals) < rounds:
        arrivals.append(world.next(models))
        receipt = server.submit(*arrivals[-1])
        verdicts.append((receipt.reason, float(receipt.factor), receipt.version))
        models += [server.model.clone()] if server.version == len(models) else []
    return arrivals, verdicts, server


def replay(server, arrivals, group):
    receipts = [server.submit(client, shard(update, group), version) for client, update, version in arrivals]
    return [(receipt.reason, float(receipt.factor), receipt.version) for receipt in receipts]


def digest(tensors):
    """Of what is the same on all ranks, and of the slices, bit for bit."""
    parts = {True: hashlib.sha256(), False: hashlib.sha256()}
    for name, value in sorted(tensors.items()):
        parts[name in sharded.SLICED].update(torch.as_tensor(value).contiguous().view(-1).view(torch.uint8).numpy())
    return parts[False].hexdigest(), parts[True].hexdigest()


def whole_state(server, group):
    """As the server that is not split would have it."""
    state = server.state_dict()
    return {name: gather(value, group) if name in sharded.SLICED else value for name, value in state.items()}


def start(settings, group, d=D, **more):
    return SecureAFL(shard(torch.zeros(d), group), N, **settings, process_group=group, **more)


def near(ours, theirs, bound=1e-4):
    for name in sharded.SLICED:
        difference = (ours[name].double() - theirs[name].double()).norm()
        assert difference <= bound * theirs[name].double().norm(), name


def agree(ours, theirs, bound=1e-4):
    """Two whole states but for rounding; where pairs lie in their ring, whom they are of, and all that is counted."""
    assert ours.keys() == theirs.keys()
    near(ours, theirs, bound)
    for name in ("pairs", "oldest", "seen", "recorded", "scales", "status", "version", "stale"):
        assert torch.equal(torch.as_tensor(ours[name]), torch.as_tensor(theirs[name])), name
    assert torch.allclose(ours["factors"], theirs["factors"], rtol=bound)


# Equal to the whole server


def two_hundred_rounds(group, settings, arrivals):
    server, sent = start(settings, group), []
    plain = dist.all_reduce
    dist.all_reduce = lambda message, **rest: sent.append(len(message)) or plain(message, **rest)
    try:
        verdicts = replay(server, arrivals, group)
    finally:
        dist.all_reduce = plain
    return verdicts, sent, server.stats(), digest(server.state_dict()), whole_state(server, group)


@pytest.mark.parametrize(
    ("kind", "count"), [("median", 2), ("median", 3), ("float16", 2), ("trimmed mean", 3), ("mean", 2)]
)
def test_equals_the_whole_server_over_200_rounds(ranks, kind, count):
    settings = {**SETTINGS, **KINDS[kind]}
    arrivals, expected, whole = history_of_arrivals(settings, 200)
    happened = {reason.split(" version")[0] for reason, *_ in expected}
    assert {*REASONS[:3], REASONS[4], "stale:"} <= happened
    assert any(torch.linalg.vector_norm(update) > SETTINGS["max_norm"] for _, update, _ in arrivals[:4])  # are clipped

    answers = ranks.run(count, two_hundred_rounds, settings, arrivals)
    for verdicts, sent, stats, (shared, _), state in answers:
        assert [(reason, version) for reason, _, version in verdicts] == [(r, v) for r, _, v in expected]
        factors = [factor for _, factor, _ in expected]
        assert [factor for _, factor, _ in verdicts] == pytest.approx(factors, rel=1e-4, nan_ok=True)
        assert stats == whole.stats()
        assert shared == answers[0][3][0]  # every rank has decided and knows the same
        agree(state, whole.state_dict())
        m = whole.config.memory
        assert sent == [4 * count + 5 + (2 * m + 1) * (N + 1) + 4 * m + 1] * 200  # one message a round, O(n m) numbers


def digests(group, settings, arrivals):
    server = start(settings, group)
    replay(server, arrivals, group)
    return digest(server.state_dict())


def test_repeats_bit_for_bit(ranks):
    arrivals, *_ = history_of_arrivals(SETTINGS, 80)
    assert ranks.run(3, digests, SETTINGS, arrivals) == ranks.run(3, digests, SETTINGS, arrivals)


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_one_is_the_whole_server_bit_for_bit(ranks, kind):
    settings = {**SETTINGS, **KINDS[kind]}
    arrivals, _, whole = history_of_arrivals(settings, 60)
    assert ranks.run(1, digests, settings, arrivals) == [digest(whole.state_dict())]


def forgetful(group, settings, arrivals):
    """Each of the clients is forgotten once, some right after their own round, whose sums are still on their way."""
    server = start(settings, group)
    for k, (client, update, version) in enumerate(arrivals):
        server.submit(client, shard(update, group), version)
        if k % 7 == 6:
            server.forget(client if k % 2 else (client + 1) % N)
    return whole_state(server, group)


def test_a_forgotten_client_is_forgotten_on_all_ranks(ranks):
    arrivals, *_ = history_of_arrivals(SETTINGS, 100)
    (whole,) = ranks.run(1, forgetful, SETTINGS, arrivals)
    plain = SecureAFL(torch.zeros(D), N, **SETTINGS)
    for k, (client, update, version) in enumerate(arrivals):
        plain.submit(client, update, version)
        if k % 7 == 6:
            plain.forget(client if k % 2 else (client + 1) % N)
    agree(whole, plain.state_dict())
    for state in ranks.run(2, forgetful, SETTINGS, arrivals):
        agree(state, whole)


def forgets_another(group):
    server = start(SETTINGS, group)
    server.forget(dist.get_rank(group))


def test_to_forget_different_clients_is_an_error_on_all_ranks(ranks):
    for error in ranks.run(2, forgets_another):
        assert "SecureAFL.forget: client must be the same on all ranks, got 0 on rank 0, 1 on rank 1" in str(error)


def onlooker(group, settings, arrivals):
    """Between rounds, on every rank; and on one of them, what takes no message."""
    server = start(settings, group)
    for arrival in arrivals[:-1]:
        replay(server, [arrival], group)
        server.estimates(), server.state_dict()
    replay(server, arrivals[-1:], group)
    known = None
    if dist.get_rank(group) == 0:
        server.threshold(), server.checkout(), server.last(torch.tensor([0]))
        known = server.stats(), server.seen.clone()
    return known, gather(server.estimates(), group), digest(server.state_dict())


def test_looking_changes_nothing(ranks):
    arrivals, _, whole = history_of_arrivals(SETTINGS, 40)
    answers = ranks.run(2, onlooker, SETTINGS, arrivals)
    assert [digest for *_, digest in answers] == ranks.run(2, digests, SETTINGS, arrivals)
    stats, seen = answers[0][0]
    assert stats == whole.stats() and torch.equal(seen, whole.seen)
    expected = whole.estimates()
    for _, estimates, _ in answers:
        assert (estimates - expected).norm() <= 1e-4 * expected.norm()


def small(group, arrivals, d):
    server = start(SETTINGS, group, d)
    return replay(server, arrivals, group), len(server.model), gather(server.model, group)


@pytest.mark.parametrize("d", [1, 2, 65])
def test_any_number_of_coordinates(ranks, d):
    """Fewer than ranks, and not a multiple: a rank may have none."""
    arrivals, expected, whole = history_of_arrivals(SETTINGS, 40, d)
    answers = ranks.run(3, small, arrivals, d)
    assert [length for _, length, _ in answers] == {1: [1, 0, 0], 2: [1, 1, 0], 65: [22, 22, 21]}[d]
    for verdicts, _, model in answers:
        assert [reason for reason, *_ in verdicts] == [reason for reason, *_ in expected]
        assert torch.allclose(model, whole.model, rtol=1e-4)


def there_and_back(group, tensors):
    return [(shard(tensor, group).shape[-1], gather(shard(tensor, group), group)) for tensor in tensors]


def test_gather_undoes_shard(ranks):
    tensors = [torch.arange(7.0), torch.randn(3, 2, 5).half(), torch.arange(2), torch.randn(4, 6).mT]
    answers = ranks.run(3, there_and_back, tensors)
    for i, tensor in enumerate(tensors):
        assert sum(answer[i][0] for answer in answers) == tensor.shape[-1]
        assert all(torch.equal(answer[i][1], tensor) and answer[i][1].dtype == tensor.dtype for answer in answers)


# Checkpoints


def save_after(group, settings, arrivals, path):
    server = start(settings, group)
    replay(server, arrivals, group)
    server.save(path)
    return digest(server.state_dict())


def load_and_go_on(group, path, arrivals):
    server = SecureAFL.load(path, process_group=group)
    before = digest(server.state_dict())
    verdicts = replay(server, arrivals, group)
    return before, verdicts, digest(server.state_dict()), whole_state(server, group)


@pytest.mark.parametrize(("kind", "saved", "loaded"), [("median", 2, 3), ("float16", 3, 2), ("float16", 2, 2)])
def test_saved_on_some_ranks_and_loaded_on_others(ranks, tmp_path, kind, saved, loaded):
    settings, path = {**SETTINGS, **KINDS[kind]}, tmp_path / "server.safetensors"
    arrivals, verdicts, whole = history_of_arrivals(settings, 120)
    states = ranks.run(saved, save_after, settings, arrivals[:80], path)
    shards = sorted(file.name for file in tmp_path.iterdir())
    assert len(shards) == 1 + saved and shards[0] == path.name
    answers = ranks.run(loaded, load_and_go_on, path, arrivals[80:])
    for before, went_on, _, state in answers:
        assert [reason for reason, *_ in went_on] == [reason for reason, *_ in verdicts[80:]]
        assert before[0] == states[0][0]
        agree(state, whole.state_dict())
    if saved == loaded:  # as if it had never stopped
        assert [before for before, *_ in answers] == states
        assert [after for *_, after, _ in answers] == ranks.run(saved, digests, settings, arrivals)


def test_saved_on_ranks_and_loaded_on_none_and_back(ranks, tmp_path):
    path = tmp_path / "server.safetensors"
    arrivals, verdicts, whole = history_of_arrivals(SETTINGS, 120)
    ranks.run(2, save_after, SETTINGS, arrivals[:60], path)
    alone = SecureAFL.load(path)
    for arrival in arrivals[60:90]:
        alone.submit(*arrival)
    alone.save(path)
    assert [file.name for file in tmp_path.iterdir()] == [
        path.name
    ]  # the shards have gone with the file that named them
    identical(SecureAFL.load(path), alone)
    for _, went_on, _, state in ranks.run(2, load_and_go_on, path, arrivals[90:]):
        assert [reason for reason, *_ in went_on] == [reason for reason, *_ in verdicts[90:]]
        agree(state, whole.state_dict())


def load_state_without_products(group, state, arrivals):
    server = start(SETTINGS, group)
    server.load_state_dict(
        {name: shard(value, group) if name in sharded.SLICED else value for name, value in state.items()}
    )
    return replay(server, arrivals, group), whole_state(server, group)


def test_products_that_a_state_lacks_are_those_of_all_ranks(ranks):
    """A composed server's state has none."""
    arrivals, verdicts, whole = history_of_arrivals(SETTINGS, 80)
    *_, before = history_of_arrivals(SETTINGS, 60)
    state = {name: before.state_dict()[name] for name in (*before._expected(), "version", "stale", "oldest")}
    for went_on, after in ranks.run(2, load_state_without_products, state, arrivals[60:]):
        assert [reason for reason, *_ in went_on] == [reason for reason, *_ in verdicts[60:]]
        near(after, whole.state_dict())


def dies_while_saving(group, path, arrivals, victim, moment):
    """One rank is gone at that moment of its second save."""
    server = start(SETTINGS, group)
    replay(server, arrivals[:20], group)
    server.save(path)
    first = whole_state(server, group)
    replay(server, arrivals[20:], group)
    second = whole_state(server, group)
    if dist.get_rank(group) == victim:
        function, plain = {
            "amid its shard": ("_to_disk", None),
            "after its shard": ("write_file", checkpoint.write_file),
            "before the index": ("write", None),
            "after the index": ("write", checkpoint.write),
        }[moment]

        def last_act(*arguments):
            if plain:
                plain(*arguments)
            os._exit(1)

        setattr(checkpoint, function, last_act)
    try:
        server.save(path)
    except RuntimeError as error:
        return str(error), first, second
    return "saved", first, second


@pytest.mark.parametrize(
    ("victim", "moment"),
    [
        (1, "amid its shard"),
        (1, "after its shard"),
        (0, "before the index"),
        (0, "after the index"),
    ],
)
def test_a_rank_that_dies_while_saving_leaves_a_whole_checkpoint(ranks, tmp_path, victim, moment):
    path = tmp_path / "server.safetensors"
    arrivals, *_ = history_of_arrivals(SETTINGS, 30)
    began = time.monotonic()
    answers = ranks.run(2, dies_while_saving, path, arrivals, victim, moment)
    assert time.monotonic() - began < 20  # the group's time-out
    assert answers.pop(victim) is None
    words, first, second = answers[0]
    assert "one of them has ended" in words and "load the last checkpoint" in words
    expected = second if moment == "after the index" else first
    found = SecureAFL.load(path).state_dict()
    assert all(torch.equal(torch.as_tensor(found[name]), torch.as_tensor(expected[name])) for name in expected)
    # and the next one that is whole takes away what was left lying
    ranks.run(2, save_after, SETTINGS, arrivals, path)
    assert len(list(tmp_path.iterdir())) == 3


def cannot_write(group, path, arrivals, victim, function):
    server = start(SETTINGS, group)
    replay(server, arrivals[:20], group)
    server.save(path)
    plain = getattr(checkpoint, function)

    def full(*_):
        raise OSError(28, "No space left on device")

    if dist.get_rank(group) == victim:
        setattr(checkpoint, function, full)
    try:
        with pytest.raises((OSError, ValueError)) as error:
            server.save(path)
    finally:
        setattr(checkpoint, function, plain)
    replay(server, arrivals[20:], group)
    return type(error.value).__name__, str(error.value), digest(server.state_dict())


@pytest.mark.parametrize(("victim", "function"), [(1, "_to_disk"), (0, "_to_disk"), (0, "write")])
def test_a_full_disk_on_one_rank_is_an_error_on_all(ranks, tmp_path, victim, function):
    path = tmp_path / "server.safetensors"
    arrivals, *_ = history_of_arrivals(SETTINGS, 30)
    *_, then = history_of_arrivals(SETTINGS, 20)
    answers = ranks.run(2, cannot_write, path, arrivals, victim, function)
    (kind, words, _), (other_kind, other_words, _) = answers[victim], answers[1 - victim]
    assert kind == "OSError" and "No space left" in words
    assert other_kind == "ValueError" and f"save: rank {victim} refused or failed, and says why itself" in other_words
    assert [state for *_, state in answers] == ranks.run(2, digests, SETTINGS, arrivals)  # nobody lost anything
    agree(SecureAFL.load(path).state_dict(), then.state_dict())
    if function != "write":
        assert len(list(tmp_path.iterdir())) == 3


# Mistakes and faults on one rank


def mistakes(group, arrivals):
    """Rank 1 errs in every way; what each rank was told, and whether all went on as if nothing had been."""
    server, rank, told = start(SETTINGS, group), dist.get_rank(group), {}
    replay(server, arrivals[:20], group)

    def err(name, call, wrong):
        try:
            (wrong if rank == 1 else call)()
        except Exception as error:
            told[name] = f"{type(error).__name__} {error}"

    good, now = torch.ones_like(server.model), server.version
    for name, *wrong in (
        ("shape", 3, torch.ones(D), now),
        ("dtype", 3, good.double(), now),
        ("no tensor", 3, [1.0], now),
        ("client", 4, good, now),
        ("no client", N, good, now),
        ("no number", "3", good, now),
        ("version", 3, good, now - 1),
        ("stale", 3, good, 2),
        ("future", 3, good, now + 1),
    ):
        err(name, lambda: server.submit(3, good, now), lambda wrong=wrong: server.submit(*wrong))
    err("call", lambda: server.submit(3, good, now), server.estimates)
    err("path", lambda: server.save("one"), lambda: server.save("other"))
    state = (
        server.state_dict()
    )  # not sooner: the last round's end, which waits for a message, must outlast all of these
    err("state", lambda: server.load_state_dict(state), lambda: server.load_state_dict({**state, "dw": good}))
    err("other state", lambda: server.load_state_dict(state), lambda: server.load_state_dict({**state, "version": 3}))
    whole = torch.zeros(D)
    err("settings", lambda: start(SETTINGS, group), lambda: start({**SETTINGS, "lr": 0.1}, group))
    err("setting", lambda: start(SETTINGS, group), lambda: start({**SETTINGS, "lr": math.nan}, group))
    err("slice", lambda: start(SETTINGS, group), lambda: SecureAFL(whole, N, **SETTINGS, process_group=group))
    err("model", lambda: start(SETTINGS, group), lambda: SecureAFL([0.0], N, **SETTINGS, process_group=group))
    err("file", lambda: start(SETTINGS, group), lambda: SecureAFL.load(os.devnull, process_group=group))
    replay(server, arrivals[20:], group)
    return told, now, digest(server.state_dict())


def test_a_mistake_on_one_rank_is_an_error_on_all_and_changes_nothing(ranks):
    arrivals, *_ = history_of_arrivals(SETTINGS, 40)
    answers = ranks.run(2, mistakes, arrivals)
    (right, now, _), (wrong, *_) = answers
    first, second = D // 2 + 1, D // 2
    tensor = f"ValueError SecureAFL.submit: update must be a tensor ({second},) float32, got"
    for name, words in {
        "shape": f"{tensor} ({D},) float32",
        "dtype": f"{tensor} ({second},) float64",
        "no tensor": f"{tensor} list",
        "no client": f"ValueError SecureAFL.submit: client must lie in 0..{N - 1}, got {N}",
        "no number": "TypeError 'str' object cannot be interpreted as an integer",
        "future": "ValueError SecureAFL.submit: version must lie in",
        "state": "ValueError SecureAFL.load_state_dict: dw must be",
        "setting": "ValueError SecureAFL: lr must be a finite number, got nan",
        "model": "ValueError SecureAFL: model must be a flat float32 or float64 tensor, got list",
    }.items():
        assert wrong[name].startswith(words), wrong[name]
        assert "rank 1 refused or failed, and says why itself; nothing has changed on any rank" in right[name]
    for name, words in {
        "client": "SecureAFL.submit: client must be the same on all ranks, got 3 on rank 0, 4 on rank 1; nothing has",
        "version": f"SecureAFL.submit: version must be the same on all ranks, got {now} on rank 0, {now - 1} on rank",
        "stale": f"SecureAFL.submit: version must be the same on all ranks, got {now} on rank 0, 2 on rank 1; nothing",
        "call": "call must be the same on all ranks, got submit on rank 0, estimates on rank 1; nothing has changed",
        "path": "SecureAFL.save: file must be the same on all ranks",
        "other state": "SecureAFL.load_state_dict: version must be the same on all ranks",
        "settings": "SecureAFL: settings must be the same on all ranks",
        "slice": f"SecureAFL: model must be the slices of {first + D} coordinates that shard gives",
    }.items():
        assert words in wrong[name] and words in right[name], (wrong[name], right[name])
    assert wrong["file"].startswith("OSError") and "refused or failed" in right["file"]
    assert [state for *_, state in answers] == ranks.run(2, digests, SETTINGS, arrivals)


def loses_a_rank(group, arrivals, how):
    dist.barrier()  # all are there before the short time-out counts
    group = dist.new_group(timeout=timedelta(seconds=3))
    server = start(SETTINGS, group)
    replay(server, arrivals[:5], group)
    if dist.get_rank(group) == 1:
        if how == "exits":
            os._exit(1)
        if how == "hangs":
            time.sleep(5)
        if how == "raises":
            raise KeyError("of the caller's own")
    version = server.version
    with pytest.raises(RuntimeError, match="a message between the ranks failed: one of them has ended, hangs or"):
        replay(server, arrivals[5:], group)
    return server.version == version


@pytest.mark.parametrize("how", ["exits", "hangs", "raises"])
def test_a_rank_that_is_lost_ends_the_others_within_the_time_out(ranks, how):
    arrivals, *_ = history_of_arrivals(SETTINGS, 10)
    began = time.monotonic()
    answers = ranks.run(3, loses_a_rank, arrivals, how)
    assert time.monotonic() - began < 20
    assert answers[0] is True and answers[2] is True
    assert {"exits": answers[1] is None, "raises": isinstance(answers[1], KeyError), "hangs": True}[how]


# What is not offered


def refusals(group):
    told = []
    for settings in ({"rule": "krum"}, {"memory": 0}, {"pairs": "rounds"}, {"history_dtype": torch.float64}):
        with pytest.raises(ValueError) as error:
            start({**SETTINGS, **settings}, group)
        told.append(str(error.value))
    server = start(SETTINGS, group)
    with pytest.raises(ValueError) as error:
        server.enqueue(torch.tensor([0]), torch.ones(D), server.model)
    return told, str(error.value), server.capturable, server.version


def test_what_is_not_split_is_refused_in_words(ranks):
    ((told, enqueue, capturable, version),) = ranks.run(1, refusals)
    for words in told:
        assert words == (
            'SecureAFL: process_group must come with a coordinate-wise rule, buckets=1, pairs="received" and '
            "history_dtype float32 or float16, at most 1024 clients and a memory of 1 to 16 (on a GPU 5), "
            "got another setting"
        )
    assert enqueue == "SecureAFL.enqueue: the server must have no process_group, got one; submit to it"
    assert not capturable and version == 0


def test_what_is_no_group_of_ours_is_refused():
    for other in ("gloo", dist.GroupMember.NON_GROUP_MEMBER):
        with pytest.raises(ValueError, match="process_group must be a group that this process is a member of, got"):
            SecureAFL(torch.zeros(4), 2, process_group=other)


# The ops beneath


def test_a_round_in_phases_is_a_round(device):
    """The ops alone, without a group: the same bits, and schemas that tell what is written to."""
    whole, other = (SecureAFL(torch.zeros(300, device=device), N, **SETTINGS) for _ in range(2))
    arrivals, *_ = history_of_arrivals(SETTINGS, 40, 300)
    op = torch.ops.secureafl
    engine = other._engine
    n, m = engine.slots.shape[2], other.config.memory
    sums, verdict = (
        (2 * m + 1) * (n + 1) + 4 * m + 1,
        torch.zeros(sharded._C.VERDICT_BYTES, dtype=torch.uint8, device=device),
    )
    changes = torch.zeros(sums, dtype=torch.float64, device=device)
    calls = {}

    def phases(update, client, trained_on, *rest):
        judged = calls["update_sums"] = update, client, trained_on, engine.last
        calls["apply_"] = op.update_sums(*judged), verdict, changes, update, client, trained_on, *rest
        outcome = op.apply_(*calls["apply_"])
        calls["renew_"] = verdict, changes, *engine._per_client, other.config.trust
        op.renew_(*calls["renew_"])
        return outcome

    for client, update, version in arrivals:
        whole.submit(client, update.to(device), version)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("secureafl_ext.fused.step", phases)
            other.submit(client, update.to(device), version)
    identical(other, whole)
    for name, arguments in calls.items():
        checks = torch.library.opcheck(
            getattr(op, name).default, arguments, test_utils=("test_schema", "test_faketensor")
        )
        assert set(checks.values()) == {"SUCCESS"}, name


def test_phases_refuse_what_does_not_fit():
    server = SecureAFL(torch.zeros(30), 4)
    engine, op, client = server._engine, torch.ops.secureafl, torch.tensor([1])
    update = torch.ones(30)
    with pytest.raises(RuntimeError, match=r"update_sums: last must have shape \(ceil\(d / columns\), 2, n, columns\)"):
        op.update_sums(torch.ones(65), client, torch.ones(65), engine.last)
    with pytest.raises(RuntimeError, match=r"update_sums: client must lie in 0..3, got 4"):
        op.update_sums(update, torch.tensor([4]), update, engine.last)
    with pytest.raises(RuntimeError, match="update_sums: update must have dtype float32, got float64"):
        op.update_sums(update.double(), client, update.double(), engine.last)
    judged = engine.factors, engine.recorded, engine.counts, engine._arrived
    arguments = update, client, server.model, 0, 1, server.models, *engine._past, *judged, *engine._settings
    sums = op.update_sums(update, client, server.model, engine.last)
    changes, verdict = torch.zeros(7, dtype=torch.float64), torch.zeros(sharded._C.VERDICT_BYTES, dtype=torch.uint8)
    words = r"changes must have shape \(\(2m \+ 1\) \(n \+ 1\) \+ 4m \+ 1,\) = \(48,\), got \(7,\)"
    with pytest.raises(RuntimeError, match=f"apply_: {words}"):
        op.apply_(sums, verdict, changes, *arguments)
    with pytest.raises(RuntimeError, match=r"apply_: sums must have shape \(5,\) = \(5,\), got \(4,\)"):
        op.apply_(sums[:4], verdict, changes, *arguments)
    with pytest.raises(RuntimeError, match=f"renew_: {words}"):
        op.renew_(verdict, changes, *engine._per_client, 1.0)
    assert not server.seen.any()


# On a GPU


def on_the_gpu(group, settings, arrivals):
    server = SecureAFL(shard(torch.zeros(D, device="cuda"), group), N, **settings, process_group=group)
    verdicts = replay(server, [(client, update.cuda(), version) for client, update, version in arrivals], group)
    state = {name: torch.as_tensor(value).cpu() for name, value in server.state_dict().items()}
    over_nccl = dist.get_backend(group) == "nccl"  # the only one that gathers on a GPU
    return verdicts, state, gather(server.model if over_nccl else server.model.cpu(), group).cpu()


@needs_gpu
@pytest.mark.parametrize(("backend", "count"), [("nccl", 1), ("gloo", 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu(ranks, kind, backend, count):
    """One rank over NCCL: bit for bit the whole server. Two on the same GPU, which only gloo allows: to rounding."""
    settings = {**SETTINGS, **KINDS[kind]}
    arrivals, *_ = history_of_arrivals(settings, 60)
    whole = SecureAFL(torch.zeros(D, device="cuda"), N, **settings)
    expected = [whole.submit(client, update.cuda(), version).reason for client, update, version in arrivals]
    theirs = {name: torch.as_tensor(value).cpu() for name, value in whole.state_dict().items()}
    answers = ranks.run(count, on_the_gpu, settings, arrivals, backend=backend)
    for verdicts, state, model in answers:
        assert [reason for reason, *_ in verdicts] == expected
        joined = {name: torch.cat([answer[1][name] for answer in answers], -1) for name in sharded.SLICED}
        agree({**state, **joined}, theirs)
        assert (model - whole.model.cpu()).norm() <= 1e-4 * model.norm()
        if count == 1:
            assert all(torch.equal(state[name], theirs[name]) for name in theirs)


# The example


def test_the_example_runs(tmp_path):
    script = Path(__file__).parents[1] / "examples" / "sharded" / "serve.py"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [*launch, script, "--rounds=100"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("round 100: 0.3") and len(done.stdout.splitlines()) == 1
    assert SecureAFL.load(tmp_path / "sharded.safetensors").version == 100
