"""Every refusal, by its words: op, argument, expected, got."""

import pytest
import torch
from oracles import make_history

ops = torch.ops.secureafl
X = torch.ones(3, 4)
V = torch.ones(4)
MASK = torch.ones(3, dtype=torch.bool)


def estimate(trust=1.0, **changes):
    return lambda: ops.estimate(*make_history(torch.Generator(), 3, 2, 4).but(**changes).tensors(), trust)


def aggregate(update=None, client=0, accepted=None, seen=MASK, options=None, **changes):
    history = make_history(torch.Generator(), 3, 2, 4).but(**changes)
    update = history.model if update is None else update
    accepted = torch.tensor(True) if accepted is None else accepted
    return lambda: ops.aggregate(history.model, update, client, accepted, *history.rest(), seen, **(options or {}))


D = torch.double
REFUSALS = [
    (lambda: ops.median(V), "median: updates must have shape (n, d), got (4,)"),
    (lambda: ops.median(torch.ones(2, 3, 4)), "median: updates must have shape (n, d), got (2, 3, 4)"),
    (lambda: ops.median(X.int()), "median: updates must have dtype float32, float64, float16 or bfloat16, got int32"),
    (
        lambda: ops.median(X.cfloat()),
        "median: updates must have dtype float32, float64, float16 or bfloat16, got complex64",
    ),
    (lambda: ops.median(X, MASK[:2]), "median: mask must have shape (n,) = (3,), got (2,)"),
    (lambda: ops.median(X, MASK.int()), "median: mask must have dtype bool, got int32"),
    (lambda: ops.trimmed_mean(V, 1), "trimmed_mean: updates must have shape (n, d), got (4,)"),
    (lambda: ops.trimmed_mean(X, -1), "trimmed_mean: trim must be 0 or more, got -1"),
    (lambda: ops.trimmed_mean(X, 2), "trimmed_mean: trim must leave a row, 2 * trim < 3, got trim = 2"),
    (
        lambda: ops.trimmed_mean(X, 2**62),
        "trimmed_mean: trim must leave a row, 2 * trim < 3, got trim = 4611686018427387904",
    ),
    (lambda: ops.trimmed_mean(X, 0, ~MASK), "trimmed_mean: trim must leave a row, 2 * trim < 0, got trim = 0"),
    (lambda: ops.trimmed_mean(X, 0, MASK[:1]), "trimmed_mean: mask must have shape (n,) = (3,), got (1,)"),
    (lambda: ops.lipschitz(X, X, X, X), "lipschitz: update must have shape (d,), got (3, 4)"),
    (lambda: ops.lipschitz(V.half(), V, V, V), "lipschitz: update must have dtype float32 or float64, got float16"),
    (lambda: ops.lipschitz(V, V[:2], V, V), "lipschitz: last_update must have shape (d,) = (4,), got (2,)"),
    (lambda: ops.lipschitz(V, V, V.double(), V), "lipschitz: model must have dtype float32 like update, got float64"),
    (lambda: ops.lipschitz(V, V, V, X), "lipschitz: last_model must have shape (d,) = (4,), got (3, 4)"),
    (estimate(model=V.bfloat16()), "estimate: model must have dtype float32 or float64, got bfloat16"),
    (estimate(model=X.to(D)), "estimate: model must have shape (d,), got (3, 4)"),
    (estimate(last_updates=V.to(D)), "estimate: last_updates must have shape (n, d), got (4,)"),
    (estimate(last_updates=X), "estimate: last_updates must have dtype float64 like model, got float32"),
    (estimate(last_models=X[:2].to(D)), "estimate: last_models must have shape (n, d) = (3, 4), got (2, 4)"),
    (estimate(dw=X.to(D)), "estimate: dw must have shape (n, m, d), got (3, 4)"),
    (estimate(dw=torch.ones(3, 2, 5, dtype=D)), "estimate: dw must have shape (n, m, d), got (3, 2, 5)"),
    (estimate(dw=torch.ones(3, 17, 4, dtype=D)), "estimate: dw must hold at most 16 pairs per client, got 17"),
    (estimate(dg=torch.ones(3, 3, 4, dtype=D)), "estimate: dg must have shape (n, m, d) = (3, 2, 4), got (3, 3, 4)"),
    (estimate(pairs=torch.ones(2, dtype=torch.int64)), "estimate: pairs must have shape (n,) = (3,), got (2,)"),
    (estimate(pairs=torch.ones(3, dtype=torch.int32)), "estimate: pairs must have dtype int64, got int32"),
    (estimate(pairs=torch.tensor([0, 3, 2])), "estimate: pairs must lie in 0..2, got 3 for client 1"),
    (estimate(pairs=torch.tensor([0, 2, -1])), "estimate: pairs must lie in 0..2, got -1 for client 2"),
    (estimate(trust=-0.5), "estimate: trust must be 0 or more (inf: no cap), got -0.5"),
    (estimate(trust=float("nan")), "estimate: trust must be 0 or more (inf: no cap), got nan"),
    (aggregate(update=V), "aggregate: update must have dtype float64 like model, got float32"),
    (aggregate(update=X.to(D)), "aggregate: update must have shape (d,) = (4,), got (3, 4)"),
    (aggregate(client=3), "aggregate: client must lie in 0..2, got 3"),
    (aggregate(client=-1), "aggregate: client must lie in 0..2, got -1"),
    (aggregate(accepted=MASK[:1]), "aggregate: accepted must have shape (), got (1,)"),
    (aggregate(accepted=torch.tensor(1)), "aggregate: accepted must have dtype bool, got int64"),
    (aggregate(seen=MASK[:2]), "aggregate: seen must have shape (n,) = (3,), got (2,)"),
    (aggregate(seen=MASK.byte()), "aggregate: seen must have dtype bool, got uint8"),
    (aggregate(dg=X.to(D)), "aggregate: dg must have shape (n, m, d) = (3, 2, 4), got (3, 4)"),
    (aggregate(pairs=torch.tensor([9, 3, 2])), "aggregate: pairs must lie in 0..2, got 3 for client 1"),
    (aggregate(options={"trust": -1.0}), "aggregate: trust must be 0 or more (inf: no cap), got -1"),
    (aggregate(options={"rule": "krumm"}), "aggregate: rule must be median, trimmed_mean or mean, got 'krumm'"),
    (
        aggregate(options={"rule": "trimmed_mean", "trim": 2}),
        "aggregate: trim must leave a row, 2 * trim < 3, got trim = 2",
    ),
    (aggregate(options={"rule": "trimmed_mean", "trim": -2}), "aggregate: trim must be 0 or more, got -2"),
]


@pytest.mark.parametrize(("call", "words"), REFUSALS, ids=[words for _, words in REFUSALS])
def test_refused_in_these_words(call, words):
    with pytest.raises(RuntimeError) as refusal:
        call()
    assert str(refusal.value) == f"secureafl::{words}"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_tensors_on_two_devices_are_refused():
    with pytest.raises(RuntimeError, match="median: mask must be on cuda:0 like updates, got cpu"):
        ops.median(X.cuda(), MASK)
    with pytest.raises(RuntimeError, match="lipschitz: last_update must be on cpu like update, got cuda:0"):
        ops.lipschitz(V, V.cuda(), V, V)
    history = make_history(torch.Generator(), 3, 2, 4).to("cuda")
    with pytest.raises(RuntimeError, match="aggregate: accepted must be on cuda:0 like model, got cpu"):
        ops.aggregate(history.model, history.model, 0, torch.tensor(True), *history.rest(), MASK.cuda())
