"""A pooled Q keeps all factors in bounded memory: the first as they are, later ones counted by their leading bits."""

import math

import numpy as np
import pytest
import torch
from emulated import emulate
from emulated_rounds import Emulated, on_gpu
from factor_oracle import LEAST, MOST, PAPER, STEP, Everything, play, upper_edge, with_factors
from kin_rounds import Emulated as EmulatedKin
from splits import KINDS, SETTINGS, agree, history_of_arrivals, replay, start, whole_state
from states import identical

from secureafl_ext import SecureAFL, config
from secureafl_ext.config import EXACT
from secureafl_ext.engines import kinship
from secureafl_ext.engines.factor_counts import COLUMNS, ROWS, count_factors, empty_counts, keys_of, largest_with
from secureafl_ext.engines.quantile import split_factors

ODD = [0.0, 5e-324, 1e-320, 2.3e-308, 1e-300, LEAST, 1.0, MOST, 1e300, 1.7e308]
ENGINES = {
    "fused": {},
    "kinship": {"rule": "kinship", "memory": 0},
    "support": {"rule": "support", "memory": 0},
    "composed": {"rule": "kinship", "memory": 2},
    "composed float64": {"rule": "centered_clip", "memory": 0, "history_dtype": torch.float64},
}


def make(device="cpu", clients=3, size=2, **settings):
    return SecureAFL(torch.zeros(size, device=device), clients, **{"lr": 0.0, **PAPER, **settings})


def sizes(rounds, seed=0, spread=1.0):
    """(rounds, 2): updates and models whose factors are spread over some powers of two, with ties and odd ones."""
    random = np.random.default_rng(seed)
    drawn = np.exp(spread * random.normal(size=(rounds, 2)))
    drawn[::7] = random.choice([0.5, 1.0, 3.0], (len(drawn[::7]), 2))  # the same factors again and again
    odd = [(0.0, 1.0), (1e-45, 1.0), (1e-45, 1e30), (3e38, 1.0), (3e38, 1e-45), (1.0, 2.0**-64), (2.0**-64, 1.0)]
    drawn[5::101] = np.resize(odd, drawn[5::101].shape)
    return drawn


def recorded(count, seed=0):
    """Factors of an earlier time, odd ones among them."""
    random = np.random.default_rng(seed)
    factors = np.exp(random.normal(size=count) * random.choice([0.1, 1.0, 30.0], count))
    factors[:: count // 40] = random.choice(ODD, len(factors[:: count // 40]))
    return factors


# Keys


def test_keys_are_in_the_order_of_the_factors():
    edges = np.nextafter(ODD[5:8], 0), np.nextafter(ODD[5:8], math.inf)
    factors = torch.from_numpy(np.sort(np.concatenate([recorded(20_000), ODD, *edges])))
    keys = keys_of(factors)
    assert (keys.diff() >= 0).all() and keys.min() == 0 and keys.max() == ROWS * COLUMNS - 1
    ends = largest_with(keys)
    assert (ends >= factors).all()
    inside = (factors >= LEAST) & (factors < MOST * (1 - STEP / 2))
    assert (ends[inside] < factors[inside] * (1 + STEP)).all()
    after_ends = ends.nextafter(torch.tensor(math.inf).double())
    assert after_ends.tolist() == [upper_edge(factor) for factor in factors.tolist()]


def test_an_end_is_the_last_factor_with_its_key():
    keys = torch.arange(ROWS * COLUMNS)
    ends = largest_with(keys)
    assert torch.equal(keys_of(ends), keys)
    assert torch.equal(keys_of(ends[:-1].nextafter(torch.tensor(math.inf).double())), keys[1:])


# Verdicts


def test_20_000_rounds_against_all_factors():
    """Up to EXACT factors every verdict is that of all factors. Later ones differ only where factors almost tie."""
    server, everything = make(), Everything(0.8)
    assert play(server, everything, sizes(EXACT), looks=101)[1] == 0
    rejected, other = play(server, everything, sizes(20_000 - EXACT, 1), looks=2999)
    assert everything.count == int(server.state_dict()["recorded"]) == 20_000
    assert rejected > 1000 and other < 20


@pytest.mark.parametrize("spread", [1e-5, 8.0])
def test_narrow_and_wide_factors(spread):
    """Narrow: nearly all have the same key, and are accepted as ties are."""
    server, everything = make(), Everything(0.8)
    play(server, everything, sizes(3 * EXACT, 2, spread), looks=307)


@pytest.mark.parametrize("quantile", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_after_100_000_factors(engine, quantile, device):
    """From the state of an earlier version, which has them in one list."""
    server, factors = make(device, quantile=quantile, **ENGINES[engine]), recorded(100_000)
    server.load_state_dict(with_factors(server.state_dict(), factors))
    play(server, Everything(quantile, factors=factors), sizes(80), looks=10)
    state = server.state_dict()
    assert int(state["recorded"]) == 100_080 and int(state["factor_counts"][0].sum()) == 100_080 - EXACT
    assert torch.equal(state["factor_counts"][0, :ROWS], state["factor_counts"][1:].sum(1))


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_on_its_way_past_the_exact_factors(engine, device, monkeypatch):
    monkeypatch.setattr(config, "EXACT", 20)
    server = make(device, **ENGINES[engine])
    play(server, Everything(0.8, exact=20), sizes(120), looks=7)


def test_a_window_still_is_a_ring():
    server = make(window=5)
    assert play(server, Everything(0.8), sizes(5))[1] == 0  # from here on the two differ
    assert "factor_counts" not in server.state_dict() and not len(server._engine.factor_counts)


# The GPU's kernels on a CPU


@pytest.mark.parametrize("phases", [False, True], ids=["whole", "in phases"])
def test_the_kernels_of_the_fused_round(monkeypatch, phases):
    servers = make(size=300), on_gpu(monkeypatch, 3, 300, Emulated(1, phases), lr=0.0, **PAPER)
    factors = recorded(30_000)
    for server in servers:
        server.load_state_dict(with_factors(server.state_dict(), factors))
        play(server, Everything(0.8, factors=factors), sizes(12))
    ours, plain = (server.state_dict() for server in servers)
    for name in ("factors", "recorded", "factor_counts"):
        assert torch.equal(ours[name], plain[name]), name


def test_the_kernels_on_their_way_past_the_exact_factors(monkeypatch):
    monkeypatch.setattr(config, "EXACT", 20)
    server = on_gpu(monkeypatch, 3, 2, Emulated(2), lr=0.0, **PAPER)
    play(server, Everything(0.8, exact=20), sizes(60))


def test_the_kernels_of_the_kinship_round(monkeypatch):
    server, factors = make(rule="kinship", memory=0), recorded(30_000)
    emulate(monkeypatch, server, EmulatedKin(1), kinship)
    server.load_state_dict(with_factors(server.state_dict(), factors))
    play(server, Everything(0.8, factors=factors), sizes(40))


# Ranks


def counting(group, settings, arrivals):
    config.EXACT = 16
    try:
        server = start(settings, group)
        return replay(server, arrivals, group), whole_state(server, group)
    finally:
        config.EXACT = EXACT


@pytest.mark.parametrize("count", [1, 2])
def test_ranks_count_the_same(ranks, monkeypatch, count):
    monkeypatch.setattr(config, "EXACT", 16)
    settings = {**SETTINGS, **KINDS["float16"]}
    arrivals, expected, whole = history_of_arrivals(settings, 80)
    assert int(whole.state_dict()["factor_counts"][0].sum()) > 20
    for verdicts, state in ranks.run(count, counting, settings, arrivals):
        assert [reason for reason, *_ in verdicts] == [reason for reason, *_ in expected]
        agree(state, whole.state_dict())


# States


def test_saved_and_resumed_it_goes_on_bit_for_bit(tmp_path):
    whole, half, drawn, factors = make(clients=4), make(clients=4), sizes(200), recorded(EXACT + 400)
    for server in (whole, half):
        server.load_state_dict(with_factors(server.state_dict(), factors))
    everything = Everything(0.8, factors=factors)
    play(whole, Everything(0.8, factors=factors), drawn), play(half, everything, drawn[:100])
    half.save(tmp_path / "server")
    resumed = SecureAFL.load(tmp_path / "server")
    identical(resumed, half)
    play(resumed, everything, drawn[100:])
    identical(resumed, whole)


@pytest.mark.parametrize("count", [0, 7, EXACT - 1, EXACT, EXACT + 1, 5000])
def test_a_list_of_an_earlier_version_is_split(count):
    """It loads, and its server is the one that recorded them in this version."""
    factors = recorded(5000)[:count]
    server = make()
    server.load_state_dict(with_factors(server.state_dict(), factors))
    state = server.state_dict()
    kept = torch.from_numpy(factors)
    assert torch.equal(state["factors"][0, : min(count, EXACT)], kept[:EXACT])
    assert state["factors"][0, count:].isinf().all() and int(state["recorded"]) == count
    expected = empty_counts(True)
    for factor in kept[EXACT:].tolist():
        count_factors(expected, torch.tensor([factor], dtype=torch.float64), torch.tensor([True]))
    assert torch.equal(state["factor_counts"], expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state["factor_counts"][1:, 3].add_(1), "factor_counts must have the sums of its rows in row 0"),
        (lambda state: state["factor_counts"][0, ROWS:].add_(1), "factor_counts must have the sums of its rows"),
        (lambda state: state["factor_counts"][:2, 0].add_(1), "factor_counts must count 952 factors, got 953"),
        (lambda state: state["factor_counts"][0, 0].sub_(10**6), "factor_counts must be 0 or more"),
        (lambda state: state["factor_counts"][1:].fill_(2**53), "factor_counts must have the sums of its rows"),
        (lambda state: state["factor_counts"].fill_(2**62), "factor_counts must be 0 or more"),
        (lambda state: state["recorded"].add_(1), "factor_counts must count 953 factors, got 952"),
        (lambda state: state["recorded"].fill_(EXACT), "factor_counts must count 0 factors, got 952"),
        (lambda state: state["recorded"].fill_(7), "factors must be `recorded` finite values"),
        (lambda state: state.pop("factor_counts"), "factor_counts must count 952 factors, got 0"),
    ],
)
def test_counts_that_do_not_fit_are_refused(change, words):
    server, other = make(), make()
    server.load_state_dict(with_factors(server.state_dict(), recorded(3000)))
    state = server.state_dict()
    change(state)
    with pytest.raises(ValueError, match=f"load_state_dict: {words}"):
        other.load_state_dict(state)
    identical(other, make())


@pytest.mark.parametrize("value", [-1.0, math.nan, -math.inf])
def test_a_list_with_odd_values_is_refused(value):
    server, factors = make(), recorded(3000)
    factors[2500] = value
    with pytest.raises(ValueError, match=r"factors must be 0 or more, not NaN"):
        server.load_state_dict(with_factors(server.state_dict(), factors))


def test_a_list_with_a_hole_is_refused():
    server, factors = make(), recorded(3000)
    factors[2500] = math.inf
    with pytest.raises(ValueError, match="factor_counts must count 952 factors, got 951"):
        server.load_state_dict(with_factors(server.state_dict(), factors))


def test_no_memory_is_asked_for_in_a_round():
    """Neither Q nor its counts move: a captured graph goes on using them."""
    server = make()
    kept = [getattr(server._engine, name).data_ptr() for name in ("factors", "recorded", "factor_counts")]
    play(server, Everything(0.8), sizes(EXACT + 50))
    assert kept == [getattr(server._engine, name).data_ptr() for name in ("factors", "recorded", "factor_counts")]


def test_a_pooled_list_is_not_changed_by_forgetting():
    server = make()
    server.load_state_dict(with_factors(server.state_dict(), recorded(3000)))
    before = server.state_dict()
    server.forget(1)
    for name in ("factors", "recorded", "factor_counts"):
        assert torch.equal(server.state_dict()[name], before[name])


def test_a_split_keeps_every_factor():
    listed = torch.from_numpy(recorded(4000))[None]
    factors, counts = split_factors(listed, 10)
    assert torch.equal(factors, listed[:, :10])
    expected = np.bincount(keys_of(listed[0, 10:]).numpy(), minlength=ROWS * COLUMNS)
    assert (counts[1:].flatten().numpy() == expected).all()
