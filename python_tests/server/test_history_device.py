"""history_device="cpu": the history is in page-locked memory of the host, and nothing else changes."""

import gc

import pytest
import torch
from engines import ENGINES, make, run

from secureafl_ext import RECOMMENDED, SecureAFL
from secureafl_ext.config import Config
from secureafl_ext.engines import check_engine, host_memory

EVERY = pytest.mark.parametrize("engine", ENGINES)
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
LARGE = 2**20


def same(one, other):
    one, other = (server.state_dict() for server in (one, other))
    assert one.keys() == other.keys()
    return all(
        torch.equal(*(torch.as_tensor(state[name]).cpu().nan_to_num() for state in (one, other))) for name in one
    )


@EVERY
def test_results_are_the_same_bit_for_bit(engine, device):
    servers = [make(engine, device, history_device=where) for where in ("model", "cpu")]
    for server in servers:
        run(server, 30)
    assert servers[0].version == servers[1].version == 30 and same(*servers)
    for server in servers:
        server.forget(1)
        server.leave(2)
        run(server, 12)
    assert same(*servers)
    assert torch.equal(*(server.norms() for server in servers))
    if servers[0].config.keeps_last:
        assert torch.equal(*(server.estimates() for server in servers))
        assert all(torch.equal(*pair) for pair in zip(*(server.last(3) for server in servers), strict=True))


@EVERY
def test_checkpoints_go_from_one_place_to_the_other(engine, device, tmp_path):
    there, here = make(engine, device, history_device="cpu"), make(engine, device)
    run(there, 20)
    there.save(tmp_path / "there")
    here.load_state_dict(there.state_dict())
    loaded = SecureAFL.load(tmp_path / "there", device)
    assert loaded.config.history_device == "cpu"
    for server in (there, here, loaded):
        run(server, 15)
    assert same(there, here) and same(there, loaded)
    there.load_state_dict(here.state_dict())
    assert same(there, here)


def test_a_file_from_before_the_setting_keeps_its_history_with_the_model():
    config = make("averaged").config
    assert config.history_device == "model"


@NEEDS_GPU
def test_the_history_takes_no_memory_of_the_gpu():
    settings = RECOMMENDED | {"max_staleness": 1, "keep_last": True}
    torch.cuda.empty_cache()
    used = []
    for where in ("model", "cpu"):
        before = torch.cuda.memory_allocated()
        server = SecureAFL(torch.zeros(LARGE, device="cuda"), 40, **settings, history_device=where)
        used.append(torch.cuda.memory_allocated() - before)
        rows = server._engine.history.last_updates, server._engine.history.last_models
        assert all(row.is_cuda and row.shape == (40, LARGE) for row in rows)
        del server, rows
    assert used[0] - used[1] >= 2 * 40 * LARGE * 4
    states = SecureAFL(torch.zeros(100, device="cuda"), 3, **settings, history_device="cpu").state_dict()
    assert {value.device.type for value in states.values() if isinstance(value, torch.Tensor)} == {"cpu"}


@NEEDS_GPU
def test_memory_is_returned_with_the_server():
    def resident():
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    settings = RECOMMENDED | {"keep_last": True, "history_device": "cpu"}
    server = SecureAFL(torch.zeros(LARGE, device="cuda"), 40, **settings)
    for client in range(3):
        server.submit(client, torch.ones(LARGE, device="cuda"), 0)
    size = 2 * 40 * LARGE * 4
    assert resident() - before > 0.9 * size
    del server
    assert resident() - before < 0.5 * size


@NEEDS_GPU
def test_a_captured_round_uses_it():
    models = []
    for where in ("model", "cpu"):
        settings = RECOMMENDED | {"keep_last": True, "history_device": where, "max_staleness": 0, "lr": 0.1}
        server = SecureAFL(torch.zeros(500, device="cuda"), 8, **settings)
        client, update = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.zeros(500, device="cuda")
        start = server.model.clone()
        server.enqueue(client, update, start)
        server.enqueue(client, update, start)
        torch.cuda.synchronize()
        graphs = {}
        for k in range(60):
            client.fill_(k % 8)
            update.copy_(torch.randn(500, generator=torch.Generator().manual_seed(k)).cuda())
            phase = server.phase()
            if phase not in graphs:
                graphs[phase] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graphs[phase]):
                    server.enqueue(client, update, start)
                server.version -= 1
            graphs[phase].replay()
            server.version += 1
        models.append(server.model.clone())
    assert torch.equal(*models) and models[0].abs().sum() > 0


def test_another_place_is_refused():
    with pytest.raises(ValueError, match="SecureAFL: history_device must be one of model, cpu, got 'disk'"):
        SecureAFL(torch.zeros(3), 4, history_device="disk")
    with pytest.raises(ValueError, match="history_device must be 'model' with sketch=64, got 'cpu'"):
        SecureAFL(torch.zeros(3), 4, **RECOMMENDED, sketch=64, history_device="cpu")
    with pytest.raises(ValueError, match="history_device must be 'model' for a model on mps, got 'cpu'"):
        check_engine(Config(history_device="cpu"), 4, torch.float32, torch.device("mps"), sharded=False)


def test_more_than_the_host_has_is_refused_before_it_is_taken(monkeypatch):
    monkeypatch.setattr(host_memory, "free_memory", lambda: 999)
    with pytest.raises(torch.OutOfMemoryError, match=r"fit into the host's memory, got 1e-06 GB where 9.99e-07 GB"):
        host_memory.history_zeros("cpu", 250, 1, dtype=torch.float32, device=torch.device("cuda"))


@pytest.mark.parametrize(
    "limit, used, expected", [("5000", "1200", 3800), ("max", "1200", None), (None, None, None), ("5000", None, None)]
)
def test_the_limit_of_a_container_counts(monkeypatch, tmp_path, limit, used, expected):
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    for name, value in {"memory.max": limit, "memory.current": used}.items():
        if value is not None:
            (tmp_path / name).write_text(value + "\n")
    free = host_memory.free_memory()
    assert free == expected if expected else free > 2**20
