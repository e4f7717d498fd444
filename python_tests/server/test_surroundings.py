"""A server in other surroundings: default dtypes, inference mode, CUDA streams and threads, GPUs with less memory."""

import threading

import pytest
import torch

from secureafl_ext import RECOMMENDED, SecureAFL
from secureafl_ext.config import EXACT
from secureafl_ext.engines import fused
from secureafl_ext.engines.composed import Composed

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
SIZE, CLIENTS = 300, 6
KINDS = {
    "fused": {},
    "half": {"history_dtype": torch.float16},
    "composed": {"pairs": "rounds"},
    "kinship": {"rule": "kinship", "memory": 0},
    "row-wise": {"rule": "centered_clip", "memory": 0},
    "counts": {"factors": "pooled"},
}


def make(device, **settings):
    return SecureAFL(torch.zeros(SIZE, dtype=torch.float32, device=device), CLIENTS, **settings)


def run(server, rounds=30):
    random = torch.Generator().manual_seed(server.version)
    for i in range(rounds):
        update = torch.randn(SIZE, generator=random, dtype=torch.float32).to(server.models.device)
        server.submit(i % CLIENTS, update, max(0, server.version - i % 3))
    return server


def same(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    for name, value in ours.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(theirs[name])), name


@pytest.mark.parametrize("kind", KINDS)
def test_the_default_dtype_does_not_matter(kind, device, tmp_path):
    expected = run(make(device, **KINDS[kind]))
    try:
        torch.set_default_dtype(torch.float64)
        server = run(make(device, **KINDS[kind]))
        server.forget(2)
        server.save(tmp_path / "server")
        again = SecureAFL.load(tmp_path / "server", device)
        server.estimates(), server.threshold(), server.stats()
    finally:
        torch.set_default_dtype(torch.float32)
    expected.forget(2)
    same(server, expected), same(again, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_built_and_run_in_inference_mode_and_used_outside(kind, device, tmp_path):
    expected = run(run(make(device, **KINDS[kind])), EXACT + 100 if kind == "counts" else 30)
    with torch.inference_mode():
        server = run(make(device, **KINDS[kind]))
        server.load_state_dict(server.state_dict())
    run(server, 1)  # outside
    server = run(make(device, **KINDS[kind]))
    with torch.inference_mode():
        run(server, EXACT + 100 if kind == "counts" else 30)  # factors are counted here
    same(server, expected)
    run(server, 5)


def test_what_a_float32_model_is_handed_stays_within_float32(device):
    server = SecureAFL(
        torch.zeros(4, device=device), 2, history_dtype=torch.float64, filter=False, lr=1.0, max_norm=1e40
    )
    for i in range(12):
        server.submit(i % 2, torch.full((4,), 3e38, device=device), server.version)
        assert server.model.isfinite().all() and server.checkout()[0].isfinite().all()
    assert server.model.abs().max() > 1e38


def test_what_does_not_fit_a_gpus_shared_memory_is_known_when_the_server_is_made(device, monkeypatch):
    """GPUs of capability 8.6, 8.9 and 12.0 give a block 99 KiB; others 163 or 227."""
    small = torch.ops.secureafl.round_fits.default
    monkeypatch.setattr(fused, "round_fits", lambda *a: small(*a, 2**10) if device == "cuda" else False)
    server = make(device, memory=5)
    assert isinstance(server._engine, Composed)
    run(server)
    with pytest.raises(ValueError, match=r"float16 does not support clients=.* \(too little shared memory\)"):
        make(device, history_dtype=torch.float16)


@needs_gpu
def test_most_servers_fit_99_kilobytes():
    like, fits = torch.empty(0, device="cuda"), torch.ops.secureafl.round_fits
    for n in (10, 50, 100, 300, 448):
        assert fits(like, n, 3, False) and fits(like, n, 3, False, 99 * 1024), n
    assert fits(like, 1024, 3, False) and not fits(like, 1024, 5, False, 20 * 1024)
    for n in (1028, 2048, 4096):
        assert not fits(like, n, 3, False, 99 * 1024) and fits(like, n, 3, False, 227 * 1024), n


@needs_gpu
def test_rounds_on_several_streams_follow_each_other():
    """Each round is queued on another stream behind long work: without an event it would overtake the one before."""
    expected, server = run(make("cuda"), 40), make("cuda")
    streams = [torch.cuda.Stream() for _ in range(4)]
    busy = torch.randn(3000, 3000, device="cuda")
    random = torch.Generator().manual_seed(0)
    for i in range(40):
        update = torch.randn(SIZE, generator=random).cuda()
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[i % 4]):
            for _ in range(3 * (i % 2)):
                busy @ busy
            server.submit(i % CLIENTS, update, max(0, server.version - i % 3))
    same(server, expected)


@needs_gpu
def test_servers_of_different_sizes_in_threads():
    """The shared memory that a kernel may use is set once, not to what one launch needs."""
    failed = []

    def serve(clients):
        try:
            server = SecureAFL(torch.zeros(2000, device="cuda"), clients)
            update = torch.ones(2000, device="cuda")
            for i in range(300):
                server.submit(i % clients, update * (i % 7), server.version)
            torch.cuda.synchronize()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=serve, args=(clients,)) for clients in (33, 60, 64, 34, 61, 63)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_a_server_that_does_not_fit_says_how_much_it_needs(monkeypatch):
    def full(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(fused, "Fused", full)
    words = r"SecureAFL: 7.2e-05 GB do not fit cpu: 1.44e-05 GB for the last update and model of 6 clients, "
    words += r"4.32e-05 GB for 3 pairs of each in float32, 1.44e-05 GB for 12 models of 300 parameters; memory=0, "
    with pytest.raises(torch.OutOfMemoryError, match=words):
        make("cpu")


@pytest.mark.parametrize("clients", [10**13, 2**53])  # more than any address space
@pytest.mark.parametrize(
    "settings", [{}, {"pairs": "rounds"}, {"sketch": 64, **RECOMMENDED}], ids=["fused", "composed", "sketch"]
)
def test_a_server_larger_than_the_memory_is_refused_in_words(clients, settings):
    """On the CPU torch has no class for this, and an overflow of the size is not out of memory for it."""
    with pytest.raises(torch.OutOfMemoryError, match=rf"SecureAFL: .* GB do not fit cpu: .* of {clients} clients"):
        SecureAFL(torch.zeros(10**6), clients, **settings)


def test_other_errors_of_a_start_stay_what_they_are(monkeypatch):
    def broken(*arguments):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(fused, "Fused", broken)
    with pytest.raises(RuntimeError, match=r"^no such kernel$"):
        make("cpu")


def test_a_sketch_needs_a_parameter():
    with pytest.raises(ValueError, match="SecureAFL: model must have a parameter with sketch=64, got none"):
        SecureAFL(torch.zeros(0), 4, sketch=64, **RECOMMENDED)


@needs_gpu
def test_a_server_larger_than_the_gpu_is_refused_in_words():
    with pytest.raises(torch.OutOfMemoryError, match=r"984 GB do not fit cuda:0: 164 GB for the last update and model"):
        SecureAFL(torch.zeros(20_000_000, device="cuda"), 1024, memory=5)
    assert SecureAFL(torch.zeros(100, device="cuda"), 4).submit(0, torch.ones(100, device="cuda"), 0).accepted
