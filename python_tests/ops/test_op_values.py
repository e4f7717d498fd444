"""Ops on a server's state, called directly: no value that they are given makes them read or write elsewhere."""

import math

import pytest
import torch

from secureafl_ext import _C, SecureAFL

N, D, M = 5, 70, 3
HUGE = 2**62
ROUND = torch.ops.secureafl.step_.default
KIN = torch.ops.secureafl.kin_step_.default
SUPPORT = torch.ops.secureafl.support_step_.default
SKETCH = torch.ops.secureafl.sketch_step_.default
MEANS = torch.ops.secureafl.mean_step_.default
AVERAGED = {
    KIN: {"rule": "kinship", "memory": 0},
    SUPPORT: {"rule": "support", "memory": 0},
    MEANS: {"rule": "support", "memory": 0, "step": "received", "averages": "steps"},
    SKETCH: {"rule": "support", "memory": 0, "step": "received", "averages": "steps", "sketch": 64},
}


def arguments(device, op=ROUND, **settings):
    """By name, of a server that has been at work."""
    server = SecureAFL(torch.zeros(D, device=device), N, **AVERAGED.get(op, settings))
    random = torch.Generator().manual_seed(0)
    for i in range(4 * N):
        server.submit(i % N, torch.randn(D, generator=random).to(device), server.version)
    engine = server._engine
    judged = (
        engine.factors,
        engine.recorded,
        engine.factor_counts,
        engine.counts,
        *(() if op in AVERAGED else (engine._arrived,)),
    )
    now = server.version % len(server.models)
    given = torch.ones(D, device=device), torch.tensor([1], device=device), server.model_at(server.version - 1)
    values = (
        *(() if op in AVERAGED else (engine._verdict, engine._changes)),
        *given,
        now,
        (now + 1) % len(server.models),
        server.models,
        *engine._past,
        *judged,
        engine.lr,
        *engine._settings,
    )
    return dict(zip((argument.name for argument in op._schema.arguments), values, strict=True))


def changed(given, name, value):
    """Another number, every value of a tensor another, or what a function makes of it."""
    old = given[name]
    new = value(old) if callable(value) else torch.full_like(old, value) if isinstance(old, torch.Tensor) else value
    return {**given, name: new}


# What the host reads on a CPU, and a kernel clamps on a GPU.
INSIDE = {
    "client -1": ("client", -1, r"client must lie in 0..4, got -1"),
    "client huge": ("client", HUGE, r"client must lie in 0..4"),
    "pairs -1": ("pairs", -1, r"pairs must lie in 0 to 3, got -1"),
    "pairs 40": ("pairs", 40, r"pairs must lie in 0 to 3, got 40"),
    "pairs huge": ("pairs", HUGE, r"pairs must lie in 0 to 3"),
    "oldest -1": ("oldest", -1, r"oldest must lie in 0 to 2, got -1"),
    "oldest 1e6": ("oldest", 10**6, r"oldest must lie in 0 to 2, got 1000000"),
    "recorded -1e6": ("recorded", -(10**6), r"recorded must lie in 0 to \d+, got -1000000"),
    "clock -1": ("clock", -1, r"clock must lie in 0 to \d+, got -1"),
    "clock 2": ("clock", 2, r"the last value of clock must lie in 0 to 1, got 2"),
    "clock most": ("clock", 2**63 - 1, r"clock must lie in 0 to \d+"),
    "last_epoch -2": ("last_epoch", -2, r"last_epoch must lie in -1 to \d+, got -2"),
    "last_epoch huge": ("last_epoch", HUGE, r"last_epoch must lie in -1 to \d+"),
    "uploads -1": ("uploads", -1, r"uploads must lie in 0 to \d+, got -1"),
    "uploads most": ("uploads", 2**63 - 1, r"uploads must lie in 0 to \d+"),
    "met -5": ("met", -5, r"met must lie in 0 to \d+, got -5"),
    "places -71": ("places", -71, "places must lie in -70 to 69, got -71"),
    "places 70": ("places", 70, "places must lie in -70 to 69, got 70"),
    "verdict": ("verdict", 0x7F, "the client of verdict must lie in 0 to 4, got 2139062143"),  # and pending
    "verdict -1": ("verdict", 0xFF, "the client of verdict must lie in 0 to 4, got -1"),
    "norms -1": ("norms", -1.0, "norms must be 0 or more, got -1"),
    "total 1e6": ("total", 1e6, "total must lie in 0 to span, got 1"),
    "noise 2": ("noise", 2.0, "noise must lie in 0 to 1, got 2"),
}
# What the host knows everywhere.
OUTSIDE = {
    "trim -1": ("trim", -1, "trim must be 0 or more, got -1"),
    "quantile 2": ("quantile", 2.0, "quantile must lie in 0 to 1, got 2"),
    "quantile nan": ("quantile", math.nan, "quantile must lie in 0 to 1, got nan"),
    "lr inf": ("lr", math.inf, "lr must be finite, got inf"),
    "max_norm 0": ("max_norm", 0.0, "max_norm must be positive, got 0"),
    "trust -1": ("trust", -1.0, "trust must be 0 or more"),
    "trust nan": ("trust", math.nan, "trust must be 0 or more"),
    "rule": ("rule", "meidan", "rule must be median, trimmed_mean or mean, got 'meidan'"),
    "expiry 0": ("expiry", 0, "expiry must lie in 1 to"),
    "probation -1": ("probation", -1, "probation must lie in 0 to"),
    "quorum -1": ("quorum", -1, "quorum must lie in 0 to"),
    "quorum huge": ("quorum", HUGE, "quorum must lie in 0 to"),
    "clock of others": ("clock", lambda c: c[:2].contiguous(), r"clock must have shape \(3,\)"),
    "span 0": ("span", 0, "span must lie in 1 to"),
    "least_share 0": ("least_share", 0.0, "least_share must be above 0 and at most 1, got 0"),
    "noisy 1": ("noisy", 1.0, "noisy must be above 0 and below 1, got 1"),
    "every 0": ("every", 0, "every must lie in 1 to"),
    "every huge": ("every", HUGE, "every must lie in 1 to"),
    "basis of others": ("basis", lambda b: b[:2].contiguous(), r"basis must have shape \(3, n, n\)"),
    "shift of others": ("shift", lambda s: s[:2].contiguous(), r"shift must have shape \(n,\)"),
    "no room": ("seen_factors", lambda q: q[:, :0].contiguous(), r"seen_factors must have shape \(1, room\)"),
    "two lists": ("seen_factors", lambda q: q[:2].contiguous(), r"seen_factors must have shape \(1, room\)"),
    "flat factors": ("seen_factors", lambda q: q.flatten(), r"seen_factors must have shape \(lists, room\)"),
    "recorded of others": ("recorded", lambda r: r[:1].contiguous(), r"recorded must have shape \(lists,\)"),
    "three rows of counts": (
        "factor_counts",
        lambda c: c.new_zeros(3, 1024),
        r"factor_counts must have no rows, or 513",
    ),
    "counts and lists": ("factor_counts", lambda c: c.new_zeros(513, 1024), r".* single list .*, got 513 with 5 lists"),
    "narrow counts": ("factor_counts", lambda c: c.new_zeros(0, 7), r"factor_counts must have shape \(rows, 1024\)"),
    "no counts": ("factor_counts", lambda c: c.new_zeros(()), r"factor_counts must have shape \(rows, 1024\)"),
    "short verdict": ("verdict", lambda v: v[:-8], r"verdict must have shape \(bytes,\) = \(64,\), got \(56,\)"),
    "flat changes": ("changes", lambda c: c[:, :1].flatten(), r"changes must have shape"),
    "changes of others": ("changes", lambda c: c.new_zeros(len(c), 1000), r"changes must have shape"),
    "no words": ("arrived", lambda a: a[:2].contiguous(), r"arrived must have shape \(4,\) = \(4,\), got \(2,\)"),
    "now_row 99": ("now_row", 99, "now_row must lie in 0..11, got 99"),
    "next_row -1": ("next_row", -1, "next_row must lie in 0..11, got -1"),
    "odd planes": ("slots", lambda s: s.new_zeros(len(s), 5, *s.shape[2:]), "slots must hold 0 to 16 pairs"),
    # On a GPU another number of pairs has tiles of another size too.
    "others' planes": (
        "slots",
        lambda s: s.new_zeros(len(s), 4, *s.shape[2:]),
        r"(scales must have shape \(n, 2m\)|slots must have shape \(ceil\(d / columns\), 2m, n, columns\)) =",
    ),
}


CASES = {**INSIDE, **OUTSIDE}


def call(op, given):
    return op(*given.values())


@pytest.mark.parametrize("op", [ROUND, *AVERAGED], ids=lambda op: op.name().split("::")[1])
@pytest.mark.parametrize("case", CASES)
def test_a_round_refuses_or_survives_every_value(op, case, device):
    given, (name, _, words) = arguments(device, op), CASES[case]
    if name not in given or (name == "met" and not given[name].numel()):  # with averages of steps
        pytest.skip(f"{op.name()} has no {name}")
    refuses_or_survives(op, given, case, words)


@pytest.mark.parametrize("case", CASES)
def test_a_round_without_pairs_does_too(case, device):
    given, (name, _, words) = arguments(device, memory=0), CASES[case]
    if name not in given:
        pytest.skip(f"step_ has no {name}")
    if name in ("pairs", "oldest"):
        words = words.replace("0 to 3", "0 to 0").replace("0 to 2", "0 to 0")
    refuses_or_survives(ROUND, given, case, words)


def refuses_or_survives(op, given, case, words):
    device, (name, value, _) = given["models"].device.type, CASES[case]
    given = changed(given, name, value)
    before = {name: value.clone() for name, value in given.items() if isinstance(value, torch.Tensor)}
    if device == "cuda" and case in INSIDE:
        for _ in range(3):
            call(op, given)
        torch.cuda.synchronize()
        assert given["models"].isfinite().all()
        return
    with pytest.raises(RuntimeError, match=f"secureafl::{op.name().split('::')[1]}: {words}"):
        call(op, given)
    for name, value in before.items():
        assert torch.equal(given[name], value), name


@pytest.mark.parametrize("memory", [M, 0])
@pytest.mark.parametrize("pairs", [-1, 4, 1000, HUGE])
@pytest.mark.parametrize("name", ["pairs", "oldest"])
def test_refresh_and_renew_refuse_or_survive_them_too(name, pairs, memory, device):
    given = arguments(device, memory=memory)
    names = ("scales", "gram", "along", "factors", "status", "pairs", "oldest", "seen")
    state = {**{key: given[key] for key in names}, name: torch.full_like(given[name], pairs)}
    verdict = torch.zeros(_C.VERDICT_BYTES, dtype=torch.uint8, device=device)
    changes = torch.zeros(_C.pass_sums(N, memory), dtype=torch.float64, device=device)
    settled = given["verdict"], given["changes"]
    ops = torch.ops.secureafl
    for op, first in ((ops.refresh_, ()), (ops.renew_, (verdict, changes)), (ops.settle_, settled)):
        if device == "cuda":
            op(*first, *state.values(), 1.0)
            torch.cuda.synchronize()
            continue
        with pytest.raises(RuntimeError, match=f"{name} must lie in 0 to"):
            op(*first, *state.values(), 1.0)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_renew_refuses_or_survives_any_verdict(byte, device):
    given = arguments(device)
    state = [given[key] for key in ("scales", "gram", "along", "factors", "status", "pairs", "oldest", "seen")]
    verdict = torch.full((_C.VERDICT_BYTES,), byte, dtype=torch.uint8, device=device)
    changes = torch.zeros(_C.pass_sums(N, M), dtype=torch.float64, device=device)
    ops = torch.ops.secureafl
    for name, op, sums in (("renew_", ops.renew_, changes), ("settle_", ops.settle_, changes[:, None])):
        if device == "cuda":
            op(verdict, sums, *state, 1.0)
            torch.cuda.synchronize()
            continue
        with pytest.raises(RuntimeError, match=f"{name}: the client of verdict must lie in 0 to 4"):
            op(verdict, sums, *state, 1.0)


@pytest.mark.parametrize("value", [-1, 1, 7, 2**31 - 1])
def test_words_by_which_blocks_meet_may_have_any_value(value, device):
    """A GPU gives up waiting for another block; a CPU does not look at them."""
    given = changed(arguments(device), "arrived", value)
    call(ROUND, given)
    assert given["models"].isfinite().all()


@pytest.mark.parametrize(("d", "m", "size"), [(3, 5, 3e38), (5, 5, 1.0), (3, 5, 1.0), (2, 5, 1e-10)])
def test_no_correction_is_longer_than_allowed(d, m, size, device):
    """More pairs than coordinates depend on each other: their terms cancel up to rounding, which the cap must count."""
    worst = 0.0
    for seed in range(60):
        random = torch.Generator().manual_seed(seed)
        server = SecureAFL(torch.zeros(d, device=device), 2, memory=m, filter=False, lr=1e-3, max_norm=1e39)
        for i in range(2 * m + 4):
            update = torch.randn(d, generator=random).clamp(-1, 1) * size
            server.submit(i % 2, update.to(device), server.version)
        for k in range(2):
            last, _ = server.last(torch.tensor([k], device=device))
            estimate = server.estimates()[k]
            assert estimate.isfinite().all()
            length = float(torch.linalg.vector_norm((estimate - last).double()))
            worst = max(worst, length / float(torch.linalg.vector_norm(last.double())))
    assert worst < 1.02 and (worst > 0 or size > 1e30)  # near the largest float a correction may be given up
