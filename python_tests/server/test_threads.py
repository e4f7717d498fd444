"""64 threads on one server and on several: nothing fails, nothing is lost, and the end is that of a serial replay."""

import threading
from contextlib import nullcontext

import pytest
import torch

from secureafl_ext import SecureAFL, ops

THREADS, UPLOADS, CLIENTS, SIZE = 64, 6, 16, 33
ENGINES = {
    "fused": {},
    "float16": {"history_dtype": torch.float16},
    "no pairs": {"memory": 0},
    "composed": {"memory": 0, "pairs": "rounds"},
    "kinship": {"rule": "kinship", "memory": 0},
    "row-wise": {"rule": "centered_clip", "memory": 0},
    "spacing": {"spacing": 3},
}


def make(engine, device):
    return SecureAFL(torch.zeros(SIZE, device=device), CLIENTS, lr=0.05, max_staleness=1000, **ENGINES[engine])


def stream(device):
    """A stream of the thread's own, on a GPU."""
    return torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext()


def together(work, device):
    """work(thread) in THREADS threads that start at once; the first error of any is raised."""
    errors, start = [], threading.Barrier(THREADS)

    def run(thread):
        try:
            with stream(device), torch.no_grad():
                start.wait()
                work(thread)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if device == "cuda":
        torch.cuda.synchronize()  # what follows runs on another stream
    if errors:
        raise errors[0]


def upload(server, thread, i, log):
    """One upload of what this thread's client would send; every ninth is garbage."""
    model, version = server.checkout()
    client = (thread + i) % CLIENTS
    update = model - client + 0.01 * thread if (thread + i) % 9 else torch.full_like(model, torch.nan)
    receipt = server.submit(client, update, version)
    log.append((receipt, client, update, version))


def replayed(log, engine, device):
    """A server that got the same rounds one after the other, in the order that the receipts tell."""
    server = make(engine, device)
    rounds = sorted((entry for entry in log if not entry[0].reason.startswith("too soon")), key=lambda e: e[0].version)
    assert [receipt.version for receipt, *_ in rounds] == list(range(1, len(rounds) + 1))
    for receipt, client, update, version in rounds:
        again = server.submit(client, update, version)
        assert (again.reason, again.version) == (receipt.reason, receipt.version)
        assert torch.equal(again.factor, receipt.factor) or (again.factor.isnan() and receipt.factor.isnan())
    return server, len(rounds)


def assert_same(server, serial, rounds, refused):
    assert server.version == serial.version == rounds
    assert server.model.isfinite().all()
    stats = server.stats()
    assert stats == {**serial.stats(), "too_soon": refused}
    assert stats["accepted"] + stats["rejected"] == rounds
    ours, theirs = server.state_dict(), serial.state_dict()
    for name in ours.keys() - {"too_soon"}:
        assert torch.equal(torch.as_tensor(ours[name]), torch.as_tensor(theirs[name])), name


def test_ops_side_by_side(device, random):
    """On the same tensors: every thread gets what one alone gets."""
    rows = torch.randn(9, 6_000, generator=random).to(device)
    pairs = torch.randn(9, 2, 6_000, generator=random).to(device)
    counts, seen, yes = (
        torch.full(shape, fill, device=device) for shape, fill in (((9,), 2), ((9,), True), ((), True))
    )

    def results():
        history = rows, rows.flip(0), pairs, pairs + 1, counts
        yield ops.median(rows)
        yield ops.trimmed_mean(rows, 2)
        yield ops.lipschitz(*rows[:4])
        yield ops.estimate(rows[0], *history)
        yield ops.aggregate(rows[0], rows[1], 3, yes, *history, seen)

    alone = list(results())
    together(
        lambda thread: [
            torch.testing.assert_close(*pair, rtol=0, atol=0) for pair in zip(results(), alone, strict=True)
        ],
        device,
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_one_server(engine, device, tmp_path):
    """Beside the uploads every thread looks: at the model, the counts, a checkpoint. None of that changes a bit."""
    server, log = make(engine, device), []

    def work(thread):
        for i in range(UPLOADS):
            upload(server, thread, i, log)
            stats = server.stats()
            assert 0 < stats["accepted"] + stats["rejected"] <= THREADS * UPLOADS
            assert server.model.isfinite().all()
        server.estimates(), server.threshold(), server.last(torch.tensor([thread % CLIENTS], device=device))
        if thread % 8 == 0:
            server.save(tmp_path / f"{thread % 16}")  # two paths, four threads each

    together(work, device)
    assert len(log) == THREADS * UPLOADS
    serial, rounds = replayed(log, engine, device)
    assert (rounds < len(log)) == (engine == "spacing")
    assert_same(server, serial, rounds, len(log) - rounds)
    saved = [SecureAFL.load(tmp_path / name, device) for name in ("0", "8")]
    assert all(one.clients == CLIENTS and one.model.isfinite().all() for one in saved)


def test_several_servers(device):
    """A server of each kind and every thread on all of them: no state is shared."""
    servers, logs = {engine: make(engine, device) for engine in ENGINES}, {engine: [] for engine in ENGINES}

    def work(thread):
        engines = list(ENGINES)
        for i in range(UPLOADS):
            engine = engines[(thread + i) % len(engines)]
            upload(servers[engine], thread, i, logs[engine])

    together(work, device)
    for engine, server in servers.items():
        serial, rounds = replayed(logs[engine], engine, device)
        assert_same(server, serial, rounds, len(logs[engine]) - rounds)


@pytest.mark.parametrize("engine", ENGINES)
def test_clients_are_forgotten_meanwhile(engine, device):
    """When a client is forgotten no receipt tells, so there is nothing to replay; but nothing may fail or get lost."""
    server, log = make(engine, device), []

    def work(thread):
        for i in range(UPLOADS):
            upload(server, thread, i, log)
            if thread % 4 == 0:
                server.forget(thread % CLIENTS)

    together(work, device)
    rounds = [receipt.version for receipt, *_ in log if not receipt.reason.startswith("too soon")]
    assert sorted(rounds) == list(range(1, server.version + 1))
    stats = server.stats()
    assert stats["accepted"] + stats["rejected"] == server.version
    assert stats["too_soon"] == len(log) - len(rounds)
    assert server.model.isfinite().all() and server.estimates().isfinite().all()
    state = server.state_dict()
    assert not torch.as_tensor(state["last_updates"])[~server.seen.to(state["last_updates"].device)].any()
