"""The support rule's round as one op against the composed one: same arrivals, same verdicts, averages and models."""

import pytest
import torch
from kin_rounds import VARIED, Arrivals, agree, drive, newest_only, resumed_crosswise, take_turns, with_dtypes
from states import enqueued_like_submitted, identical
from support_oracle import shifts

from secureafl_ext import SecureAFL
from secureafl_ext.engines import support
from secureafl_ext.engines.support import FusedSupport
from secureafl_ext.rules import support as rule

F32, F64 = torch.float32, torch.float64
NAN = float("nan")
SETTINGS = {"rule": "support", "memory": 0, "lr": 0.1, "max_staleness": 4}


def make(device, n, d, **settings):
    server = SecureAFL(torch.zeros(d, device=device), n, **{**SETTINGS, **settings})
    assert isinstance(server._engine, FusedSupport)
    return server


def composed(create):
    """The server that `create` makes, its rounds of plain ops."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(support, "fits", lambda *_: False)
        server = create()
    assert not isinstance(server._engine, FusedSupport)
    return server


def oracle(n, d, dtype=F64, device="cpu", **settings):
    settings = {**SETTINGS, "history_dtype": dtype, **settings}
    return composed(lambda: SecureAFL(torch.zeros(d, dtype=dtype, device=device), n, **settings))


def shift_of(server):
    return server.state_dict()["shift"].cpu()


def present_products(server):
    """(c, c) averaged inner products of the clients that count, and who they are (n) bool."""
    mask = server.present.cpu()
    return server.state_dict()["similarity"].cpu()[mask][:, mask], mask


@pytest.mark.parametrize(
    ("settings", "dtype"),
    with_dtypes([*VARIED, {"expiry": 4, "probation": 2}, {"expiry": None, "probation": 0}]),
    ids=str,
)
def test_every_setting_over_hundreds_of_rounds(device, settings, dtype):
    plain, ours = oracle(16, 60, dtype, **settings), make(device, 16, 60, **settings)
    reasons = drive((plain, ours), Arrivals(16, 60), 200)
    agree(ours, plain)
    assert shift_of(ours).abs().max() > 0.01
    assert len({reason.split(",")[0] for reason in reasons}) >= (3 if settings.get("filter") is False else 4)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 31, 32, 33, 50])
def test_any_number_of_clients(device, n):
    plain, ours = oracle(n, 40), make(device, n, 40)
    drive((plain, ours), Arrivals(n, 40), max(80, 4 * n))
    agree(ours, plain)
    assert n < 8 or shift_of(ours).any()


def test_everybody_talks(device):
    """All take turns, and all their averages count. The last refresh is that of the oracle in NumPy."""
    n, d = 70, 24
    plain, ours = oracle(n, d, filter=False), make(device, n, d, filter=False)
    take_turns(n, d, plain, ours)
    agree(ours, plain)
    products, mask = present_products(ours)
    assert mask.all() and int(ours.state_dict()["rounds"]) % (2 * n) == 0
    expected = torch.from_numpy(shifts(products.numpy()))
    assert torch.allclose(shift_of(ours), expected, rtol=0, atol=1e-9) and expected.abs().max() > 0.3 / n


def test_a_refresh_comes_every_2n_rounds_and_changes_nothing_between(device):
    n, changes = 7, []
    server, arrivals = make(device, n, 30, filter=False), Arrivals(n, 30, strange=False)
    before = shift_of(server)
    while (rounds := int(server.state_dict()["rounds"])) < 12 * n:
        drive((server,), arrivals, 1)
        after, now = shift_of(server), int(server.state_dict()["rounds"])
        if not torch.equal(before, after):
            changes.append(now)
        assert now in (rounds, rounds + 1)
        before = after
    assert len(changes) >= 3 and all(round % (2 * n) == 0 for round in changes)


@pytest.mark.parametrize("crowd", [0.1, 0.5, 1.0, 3.0])
def test_the_basis_is_orthogonal_and_holds_the_eigenvectors_that_are_used(crowd, device, monkeypatch):
    """Those of eigenvalues above the bound. With the lowest bound these are nearly all, with the highest none."""
    monkeypatch.setattr(rule, "CROWD", crowd)
    n = 12
    server, arrivals = make(device, n, 50, filter=False), Arrivals(n, 50, strange=False)
    while int(server.state_dict()["rounds"]) % (2 * n) or int(server.state_dict()["rounds"]) < 40 * n:
        drive((server,), arrivals, 1)
    basis, (products, mask) = server.state_dict()["basis"].cpu(), present_products(server)
    assert (basis.mT @ basis - torch.eye(n, dtype=F64)).abs().max() < 1e-12
    whole = torch.zeros(n, n, dtype=F64)
    whole[mask[:, None] & mask] = products.flatten()
    turned = basis[0].T @ whole @ basis[0]
    least = max(rule.CROWD_LEAST, crowd * float(rule.level(rule.centered(products))))
    used, values = turned.diagonal() > least, torch.linalg.eigvalsh(whole)
    assert torch.allclose(turned.diagonal()[used].sort().values, values[values > least], rtol=1e-9)
    assert (turned - turned.diagonal().diag())[used].abs().sum() < 1e-8 * turned.abs().max()
    assert used.any() == (crowd < 3)


def with_shift(server, value):
    """Its shifts as given, and the next round a refresh."""
    state = server.state_dict()
    state["shift"][:] = value
    state["rounds"].fill_(2 * server.clients - 1)
    server.load_state_dict(state)


@pytest.mark.parametrize("made", [make, lambda device, *sizes, **more: oracle(*sizes, device=device, **more)])
def test_who_sends_nan_in_the_round_of_a_refresh_still_counts_if_it_is_known(made, device):
    """A client could otherwise choose to be left out of the refresh."""
    known, new = made(device, 6, 30, probation=0), made(device, 6, 30, probation=0)
    random = torch.Generator().manual_seed(1)
    base = torch.randn(30, generator=random)
    for t in range(60):
        for server in (known, new):
            if server is new and t % 6 == 5:
                continue
            update = base * (1 + (t % 6 == 5)) + 0.1 * torch.randn(30, generator=random)
            server.submit(t % 6, update.to(server.model), server.version)
    for server, counting in ((known, 6), (new, 5)):
        with_shift(server, 0.01)
        assert not server.submit(5, torch.full_like(server.model, NAN), server.version).accepted
        products, mask = present_products(server)
        assert int(mask.sum()) == counting
        expected = torch.zeros(6, dtype=F64)
        expected[mask] = torch.from_numpy(shifts(products.numpy()))
        assert torch.allclose(shift_of(server), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("made", [make, lambda device, *sizes, **more: oracle(*sizes, device=device, **more)])
def test_no_weight_falls_below_zero_when_more_clients_count(made, device):
    """Two clients count, one without weight; then three do. Its update must not be turned around."""
    server = made(device, 8, 3, probation=0, filter=False, lr=1.0)
    for client in (0, 1):
        server.submit(client, torch.tensor([1.0, 0, 0]).roll(client).to(server.model), server.version)
    state = server.state_dict()
    state["shift"][1] = -0.5  # 1 / 2 less: no weight
    server.load_state_dict(state)
    before = server.model.clone()
    server.submit(2, torch.tensor([0, 0, 1.0]).to(server.model), server.version)
    assert torch.allclose(before - server.model, torch.tensor([1 / 3, 0, 1 / 3]).to(before))


@pytest.mark.parametrize("store", ["all", "accepted"])
def test_forgotten_and_left_clients(device, store):
    settings = {"store": store, "on_reject": "step"}
    servers = oracle(16, 60, **settings), make(device, 16, 60, **settings)
    arrivals = Arrivals(16, 60)
    for i, client in enumerate((*arrivals.active[:3], arrivals.active[-1])):
        drive(servers, arrivals, 60)
        for server in servers:
            server.leave(client) if i % 2 else server.forget(client)
    agree(servers[1], servers[0])
    drive(servers, arrivals, 100)
    agree(servers[1], servers[0])


def test_expired_clients_gain_nothing_in_a_refresh(device):
    servers = oracle(10, 40, expiry=5, filter=False), make(device, 10, 40, expiry=5, filter=False)
    arrivals = Arrivals(10, 40, strange=False)
    drive(servers, arrivals, 80)
    arrivals.active = arrivals.active[:7]
    drive(servers, arrivals, 120)
    agree(servers[1], servers[0])
    assert servers[1].stats()["expired"] >= 3 and not servers[1].present[7:].any()
    assert shift_of(servers[1])[7:].max() <= 0 and shift_of(servers[1])[:7].any()


@pytest.mark.parametrize("settings", [{}, {"memory": 2}, {"history_dtype": F64}], ids=str)
@pytest.mark.parametrize("more", [0, 9])
def test_resumed_between_two_refreshes_is_bit_identical(settings, more, device, tmp_path):
    """more: rounds after the refresh at 64 = 4 n"""
    n = 16
    server = SecureAFL(torch.zeros(60, device=device), n, **{**SETTINGS, **settings, "filter": False})
    arrivals = Arrivals(n, 60, strange=False)
    while int(server.state_dict()["rounds"]) < 4 * n + more:
        drive((server,), arrivals, 1)
    server.save(tmp_path / "server")
    resumed = SecureAFL.load(tmp_path / "server", device=device)
    identical(resumed, server)
    drive((server, resumed), arrivals, 5 * n)
    identical(resumed, server)
    assert shift_of(server).any()


def test_saved_by_one_engine_resumed_by_the_other(device, tmp_path):
    resumed_crosswise(oracle(16, 60, F32), make(device, 16, 60), composed, tmp_path, device)


@pytest.mark.parametrize("made", [make, lambda device, *sizes, **more: oracle(*sizes, device=device, **more)])
@pytest.mark.parametrize("value", [1e150, -1e150, 2.0])  # the largest that load takes
def test_a_file_with_huge_averages_gives_finite_shifts(made, value, device):
    server, arrivals = made(device, 6, 20, filter=False), Arrivals(6, 20, strange=False)
    drive((server,), arrivals, 60)
    state = server.state_dict()
    state["similarity"][:4, :4] = value
    server.load_state_dict(state)
    with_shift(server, 0)
    drive((server,), arrivals, 24)
    assert shift_of(server).isfinite().all() and server.model.isfinite().all() and shift_of(server).abs().max() <= 1


def test_enqueued_rounds_are_submitted_ones(device):
    """On a GPU they are replayed from a captured graph, the refresh too."""
    one, twin = (make(device, 9, 40, filter=False) for _ in range(2))
    enqueued_like_submitted(one, twin, newest_only(Arrivals(9, 40, strange=False), twin, 120))
    assert shift_of(one).any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("n", "d"), [(1, 8), (20, 4096), (50, 4099), (100, 256), (129, 64)])
def test_cpu_and_gpu_agree(n, d):
    """From 129 clients on, the refresh is a kernel of many blocks."""
    cpu, gpu = make("cpu", n, d), make("cuda", n, d)
    drive((cpu, gpu), Arrivals(n, d), max(150, 4 * n))
    agree(gpu, cpu)
    assert n == 1 or shift_of(gpu).any()
