"""A server split over ranks against the whole one, in real processes: the same verdicts and models."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from places import ROOT
from splits import KINDS, SETTINGS, D, N, agree, digest, digests, history_of_arrivals, replay, start, whole_state
from states import identical

from secureafl_ext import SecureAFL, gather, shard
from secureafl_ext.config import REASONS
from secureafl_ext.engines import sharded
from secureafl_ext.engines.ranks import SLICED

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


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
    ("kind", "count"), [("median", 2), ("median", 3), ("float16", 2), ("trimmed mean", 3), ("mean", 2), ("no pairs", 2)]
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
        carried = (2 * m + 1) * (N + 1) + 4 * m + 1 if m else 0
        assert sent == [4 * count + 5 + carried] * 200  # one message a round, O(n m) numbers


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


# The ops beneath


@pytest.mark.parametrize("memory", [3, 0])
def test_a_round_in_phases_is_a_round(device, memory):
    """The ops alone, without a group: the same bits, and schemas that tell what is written to."""
    whole, other = (SecureAFL(torch.zeros(300, device=device), N, **SETTINGS, memory=memory) for _ in range(2))
    arrivals, *_ = history_of_arrivals(SETTINGS, 40, 300)
    op = torch.ops.secureafl
    engine = other._engine
    n, m = engine.slots.shape[2], other.config.memory
    sums, verdict = (
        (2 * m + 1) * (n + 1) + 4 * m + 1 if m else 0,
        torch.zeros(sharded._C.VERDICT_BYTES, dtype=torch.uint8, device=device),
    )
    changes = torch.zeros(sums, dtype=torch.float64, device=device)
    calls = {}

    def phases(unused_verdict, unused_changes, update, client, trained_on, *rest):
        judged = calls["update_sums"] = update, client, trained_on, engine.last
        calls["apply_"] = op.update_sums(*judged), verdict, changes, update, client, trained_on, *rest
        outcome = op.apply_(*calls["apply_"])
        calls["renew_"] = verdict, changes, *engine._per_client, other.config.trust
        op.renew_(*calls["renew_"])
        return outcome

    for client, update, version in arrivals:
        whole.submit(client, update.to(device), version)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("secureafl_ext.engines.fused.step", phases)
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
    judged = engine.factors, engine.recorded, engine.factor_counts, engine.counts, engine._arrived
    arguments = update, client, server.model, 0, 1, server.models, *engine._past, *judged, engine.lr, *engine._settings
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
        joined = {name: torch.cat([answer[1][name] for answer in answers], -1) for name in set(SLICED) & set(theirs)}
        agree({**state, **joined}, theirs)
        assert (model - whole.model.cpu()).norm() <= 1e-4 * model.norm()
        if count == 1:
            assert all(torch.equal(state[name], theirs[name]) for name in theirs)


# The example


ENDS_WITH_WORK_IN_FLIGHT = """
import torch, torch.distributed as dist
from secureafl_ext import SecureAFL

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
server = SecureAFL(torch.zeros(10), 3, process_group=dist.group.WORLD)
for tensor in [torch.ones(20_000_000) for _ in range(4)]:
    dist.all_reduce(tensor, async_op=True)
dist.destroy_process_group()
try:
    server.submit(0, torch.ones(10), 0)
except RuntimeError as error:
    print(error, server.version, server.model.any().item())
"""


def test_a_server_does_not_keep_its_group_alive():
    """Otherwise the group's threads run on until Python ends, and abort it if they hold a tensor then."""
    done = subprocess.run([sys.executable, "-c", ENDS_WITH_WORK_IN_FLIGHT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    expected = "SecureAFL: process_group has been destroyed; load the last checkpoint with a new one 0 False"
    assert done.stdout.strip() == expected


def test_the_example_runs(tmp_path):
    script = ROOT / "examples" / "sharded" / "serve.py"
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
