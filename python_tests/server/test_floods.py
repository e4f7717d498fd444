"""What one client can do by uploading often: garbage, replays, steep updates, many ids. The model must not notice."""

import pytest
import torch

from secureafl_ext import SecureAFL

SIZE, CLIENTS = 40, 10
ENGINES = {
    "fused": {},
    "fused without pairs": {"memory": 0},
    "composed": {"memory": 0, "pairs": "rounds"},
    "kinship": {"rule": "kinship", "memory": 0},
    "row-wise": {"rule": "geometric_median", "memory": 0},
    "float64": {"history_dtype": torch.float64},
}
BAD = {
    "nan": lambda model: torch.full_like(model, torch.nan),
    "inf": lambda model: model.index_fill(0, torch.tensor([3], device=model.device), torch.inf),
    "steep": lambda model: 1e6 * (model + 1),
}


class Fleet:
    """Honest clients with quadratic losses and noisy gradients."""

    def __init__(self, device="cpu", clients=CLIENTS, **settings):
        self.random = torch.Generator().manual_seed(0)
        self.targets = torch.randn(clients, SIZE, generator=self.random)
        self.server = SecureAFL(torch.zeros(SIZE, device=device), clients, **{"lr": 0.05, **settings})

    def upload(self, client):
        model, version = self.server.checkout()
        noise = 0.1 * torch.randn(SIZE, generator=self.random)
        return self.server.submit(client, model - (self.targets[client] + noise).to(model), version)

    def train(self, rounds, clients=None):
        """How many uploads were accepted."""
        clients = clients or range(len(self.targets))
        return sum(bool(self.upload(clients[i % len(clients)]).accepted) for i in range(rounds))

    def distance(self):
        return float((self.server.model.cpu() - self.targets.mean(0)).norm())


def whole_state(server):
    return {name: torch.as_tensor(value).cpu().clone() for name, value in server.state_dict().items()}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("engine", ENGINES)
def test_rejected_uploads_leave_the_model_and_the_memory_alone(engine, bad, device):
    fleet = Fleet(device, **ENGINES[engine])
    fleet.train(60)
    server, before = fleet.server, whole_state(fleet.server)
    model = server.model.clone()
    for _ in range(30):
        assert not server.submit(4, BAD[bad](server.model), server.version).accepted
        assert torch.equal(server.model, model)
    after = whole_state(server)
    for name in ("last_updates", "last_models", "pairs", "seen", "products", "kinship", "met"):
        assert name not in before or torch.equal(before[name], after[name]), name
    if bad != "steep":
        assert torch.equal(before["factors"], after["factors"])


def test_the_papers_reading_steps_on_and_drifts_away():
    """The named setting that keeps what the paper prints: the test above can fail."""
    fleet = Fleet(rule="kinship", memory=0, on_reject="step", store="all", factors="pooled")
    fleet.train(60)
    before = fleet.distance()
    for _ in range(300):
        fleet.server.submit(4, torch.full((SIZE,), torch.nan), fleet.server.version)
    assert fleet.distance() > 3 * before


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("clients", [1, 2, 3])
def test_a_small_fleet_is_never_stuck(engine, clients, device):
    """A rejected update that were stored at a model that then stays would make the client's next factor undefined."""
    fleet = Fleet(device, clients, **ENGINES[engine])
    fleet.train(150)
    for _ in range(3):
        assert fleet.train(30) > 3


def test_hold_and_store_all_are_refused_together():
    with pytest.raises(ValueError, match="on_reject must be 'step' with store='all', got 'hold'"):
        Fleet(store="all")


def weighted_quantile(lists, share):
    """The factor that a share of the lists, each of the same weight, lies below."""
    values = torch.cat(lists)
    weights = torch.cat([torch.full_like(one, 1 / len(one)) for one in lists])
    order = values.argsort()
    place = torch.searchsorted(weights[order].cumsum(0), share * len(lists))
    return float(values[order][place.clamp(max=len(values) - 1)])


@pytest.mark.parametrize("rule", [{}, {"rule": "kinship", "memory": 0}, {"memory": 0}], ids=str)
@pytest.mark.parametrize("steep", [False, True])
def test_one_client_moves_the_quantile_by_its_share_alone(rule, steep, device):
    """Between any two honest uploads it repeats its update on newer versions (factor 0), or sends ever steeper ones."""
    fleet = Fleet(device, **rule)
    fleet.train(100)
    server, last = fleet.server, -fleet.targets[0].to(fleet.server.model)
    for i in range(60):
        for j in range(6):
            server.submit(0, last * 10.0 ** (i % 30) * (j + 1) if steep else last, server.version)
        fleet.upload(1 + i % (CLIENTS - 1))
    state = whole_state(server)
    lists = [row[: min(int(count), len(row))] for row, count in zip(state["factors"], state["recorded"], strict=True)]
    assert (lists[0].max() > 1e6) if steep else (lists[0] == 0).all()
    alpha, share, own = server.config.quantile, 1 / CLIENTS, 0.5 / CLIENTS
    least = weighted_quantile(lists[1:], (alpha - share) / (1 - share) - own)
    most = weighted_quantile(lists[1:], alpha / (1 - share) + own)
    assert least <= float(server.threshold(torch.tensor([1], device=device))) <= most


def test_a_pooled_quantile_can_be_chosen():
    """The paper's Q, a named setting: the test above can fail."""
    fleet = Fleet(factors="pooled")
    fleet.train(100)
    for _ in range(500):
        fleet.server.submit(0, -fleet.targets[0], fleet.server.version)
    assert fleet.train(90, list(range(1, CLIENTS))) < 20


@pytest.mark.parametrize("spacing", [0, 3, CLIENTS - 1])
def test_spacing_makes_clients_take_turns(spacing, device):
    fleet = Fleet(device, spacing=spacing)
    server, rounds = fleet.server, []
    for i in range(120):
        client = 0 if i % 2 else (i // 2) % CLIENTS  # client 0 uploads every second time
        version, state = server.version, server.model.clone()
        receipt = fleet.upload(client)
        if server.version > version:
            rounds.append(client)
        else:
            assert receipt.reason.startswith("too soon: ") and receipt.reason.endswith(f"spacing is {spacing}")
            assert not receipt.accepted and torch.equal(server.model, state)
    windows = [rounds[i : i + spacing + 1] for i in range(len(rounds) - spacing)]
    assert all(len(set(window)) == spacing + 1 for window in windows)
    assert server.stats()["too_soon"] == 120 - len(rounds) and (len(rounds) < 120) == (spacing > 0)


def test_turns_outlive_a_checkpoint_and_forget(tmp_path):
    fleet = Fleet(spacing=2)
    fleet.upload(0)
    fleet.server.save(tmp_path / "server")
    fleet.server = SecureAFL.load(tmp_path / "server")
    fleet.server.forget(0)
    assert fleet.upload(0).reason.startswith("too soon")
    fleet.train(2, [1, 2])
    assert fleet.upload(0).reason == "accepted: first contact"


def test_a_refused_call_takes_no_turn():
    fleet = Fleet(spacing=2)
    with pytest.raises(ValueError):
        fleet.server.submit(0, torch.zeros(SIZE + 1), 0)
    assert fleet.upload(0).accepted


def test_spacing_that_nobody_could_keep_is_refused():
    with pytest.raises(ValueError, match="spacing must be less than clients = 10, got 10"):
        Fleet(spacing=10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # fused, composed
def test_who_is_new_or_comes_again_waits_until_it_is_known(dtype, device):
    """Kinship counts nobody whom it has not judged, once it knows half of the clients."""
    fleet = Fleet(device, rule="kinship", memory=0, history_dtype=dtype)
    fleet.train(80)
    server = fleet.server
    for _ in range(3):
        server.forget(0)
        model = server.model.clone()
        other = SecureAFL(model, CLIENTS, rule="kinship", memory=0, history_dtype=dtype, lr=0.05)
        other.load_state_dict(server.state_dict())
        big = torch.full((SIZE,), 5.0, device=device)
        assert server.submit(0, big, server.version).accepted
        assert other.submit(0, -big, other.version).accepted
        assert torch.equal(server.model, other.model) and not torch.equal(server.model, model)


@pytest.mark.parametrize("engine", ENGINES)
def test_memory_and_cost_of_q_do_not_grow(engine):
    fleet = Fleet(**ENGINES[engine], filter=False)
    fleet.train(50)
    before = {name: tensor.shape for name, tensor in whole_state(fleet.server).items()}
    fleet.train(1200)
    after = {name: tensor.shape for name, tensor in whole_state(fleet.server).items()}
    assert before == after
