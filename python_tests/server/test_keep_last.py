"""keep_last: with averages of steps and no filter nothing reads last updates. Without them all else is the same."""

import pytest
import torch
from kin_rounds import Arrivals, arguments_of_a_round
from states import identical

from secureafl_ext import RECOMMENDED, SecureAFL
from secureafl_ext.engines import fused_averages
from secureafl_ext.engines.averaged import LAST_NAMES

N, D = 12, 300
KINDS = {
    "whole": {},
    "float64": {"history_dtype": torch.float64},
    "sketched": {"sketch": 64, "sketch_seed": 7},
    "sketched_float64": {"sketch": 64, "sketch_seed": 7, "history_dtype": torch.float64},
}


def make(device="cpu", keep_last=None, d=D, **settings):
    dtype = settings.get("history_dtype", torch.float32)
    model = torch.zeros(d, dtype=dtype, device=device)
    return SecureAFL(model, N, **RECOMMENDED | {"lr": 0.1, "max_staleness": 4} | settings, keep_last=keep_last)


def state_without(server):
    return {name: value for name, value in server.state_dict().items() if name not in LAST_NAMES}


def same_state(ours, theirs):
    a, b = state_without(ours), state_without(theirs)
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(torch.as_tensor(a[name]), torch.as_tensor(b[name])), name


def drive(servers, rounds, arrivals):
    """All take the same; their verdicts and weights are equal. Only the first measures factors."""
    measured = 0
    for _ in range(rounds):
        client, update, version = arrivals.next(servers[0])
        first, *others = (server.submit(client, update.to(server.model), version) for server in servers)
        for other in others:
            assert (other.reason, other.staleness) == (first.reason, first.staleness)
            assert first.refused or torch.equal(other.weight, first.weight)
            assert other.factor.isnan().all()
        measured += int(not first.factor.isnan())
    return measured


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_else_depends_on_last_updates(kind, device):
    """Garbage, huge and zero updates, old versions, the same update on the same model; who leaves, who is forgotten."""
    servers = make(device, True, **KINDS[kind]), make(device, **KINDS[kind])
    arrivals, measured = Arrivals(N, D), 0
    for i in range(3):
        measured += drive(servers, 40, arrivals)
        for server in servers:
            server.leave(arrivals.active[i])
            server.forget(arrivals.active[-i])
    ours, theirs = (state_without(server) for server in servers)
    for name in ours.keys() - {"factors", "recorded"}:
        assert torch.equal(torch.as_tensor(ours[name]), torch.as_tensor(theirs[name])), name
    assert measured > 40 and theirs["shift"].any() and not theirs["recorded"].any()


@pytest.mark.parametrize("kind", KINDS)
def test_the_history_is_the_means_alone(kind):
    kept = make(**KINDS[kind])._engine._tensors()
    width, double = KINDS[kind].get("sketch", D), "history_dtype" in KINDS[kind]
    rows = [name for name, tensor in kept.items() if tensor.shape == (N, width)]
    assert rows == ["means" if "sketch" in kind else "mean_updates"] and kept[rows[0]].element_size() == 4 + 4 * double
    assert not kept.keys() & {*LAST_NAMES}


def test_what_needs_last_updates_is_refused(device):
    server = make(device)
    server.submit(3, torch.ones(D, device=device), 0)
    for call in ("last", "estimates"):
        with pytest.raises(ValueError, match=f"SecureAFL.{call}: keep_last must be true, .* got None"):
            server.last(3) if call == "last" else server.estimates()
    assert float(server.norms()[3]) == pytest.approx(D**0.5) and server.norms().count_nonzero() == 1


@pytest.mark.parametrize("settings", [{"filter": True}, {"averages": "uploads"}, {"averages": "uploads", "sketch": 64}])
def test_settings_that_compare_with_the_last_update_keep_it(settings):
    assert make(**settings).config.keeps_last
    with pytest.raises(ValueError, match="keep_last must be true unless averages='steps' and filter=False, got False"):
        make(keep_last=False, **settings)


def test_only_true_false_and_none_are_taken():
    with pytest.raises(ValueError, match="keep_last must be None, True or False, got 'no'"):
        make(keep_last="no")


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_continues_bit_for_bit(kind, tmp_path, device):
    server, arrivals = make(device, **KINDS[kind]), Arrivals(N, D)
    drive((server,), 50, arrivals)
    server.save(tmp_path / "s")
    again = SecureAFL.load(tmp_path / "s", device=device)
    assert again.config == server.config
    drive((server, again), 50, arrivals)
    identical(server, again)


def test_a_file_of_an_earlier_version_keeps_them(tmp_path, monkeypatch):
    """Its config does not name the setting, and its state has the last updates."""
    server, arrivals = make(keep_last=True), Arrivals(N, D)
    drive((server,), 40, arrivals)
    described = type(server)._described

    def before(self):
        tensors, about = described(self)
        about["config"].pop("keep_last")
        return tensors, about

    with monkeypatch.context() as patch:
        patch.setattr(SecureAFL, "_described", before)
        server.save(tmp_path / "s")
    loaded = SecureAFL.load(tmp_path / "s")
    assert loaded.config.keep_last is True
    identical(server, loaded)


def test_a_server_without_takes_the_state_of_one_with_them():
    """So an operator can change the setting. The other way round they are missing."""
    there, here, arrivals = make(keep_last=True), make(), Arrivals(N, D)
    drive((there,), 60, arrivals)
    here.load_state_dict(there.state_dict())
    same_state(here, there)
    with pytest.raises(ValueError, match="state must have last_models, last_updates, got none"):
        there.load_state_dict(here.state_dict())


def test_the_op_gets_no_rows(monkeypatch):
    arguments = arguments_of_a_round(make(), fused_averages, monkeypatch)
    names = [argument.name for argument in fused_averages.step._schema.arguments]
    assert [arguments[names.index(name)].shape for name in ("last_updates", "last_models")] == [(0, D)] * 2
