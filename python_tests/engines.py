"""One small server of every engine, and rounds for it."""

import torch

from secureafl_ext import SecureAFL

N, D = 5, 7
ENGINES = {
    "fused": {},
    "fused float16": {"history_dtype": torch.float16},
    "paper": {"factors": "pooled", "on_reject": "step", "store": "all"},
    "fused window": {"window": 9, "memory": 2, "rule": "mean"},
    "fused without pairs": {"memory": 0},
    "composed": {"pairs": "rounds"},
    "composed float64": {"history_dtype": torch.float64},
    "kinship": {"rule": "kinship", "memory": 0},
    "composed kinship": {"rule": "kinship", "memory": 2},
    "support": {"rule": "support", "memory": 0},
    "composed support": {"rule": "support", "memory": 2},
    "averaged": {"rule": "support", "memory": 0, "step": "received", "averages": "steps", "trial": 5},
    "means alone": {"rule": "support", "memory": 0, "step": "received", "averages": "steps", "filter": False},
    "means in two bytes": {
        **{"rule": "support", "memory": 0, "step": "received", "averages": "steps", "filter": False},
        "history_dtype": torch.bfloat16,
    },
    "row-wise": {"rule": "centered_clip", "memory": 0},
    "row-wise buckets": {"rule": "krum", "buckets": 2, "memory": 1},
}


def make(engine, device="cpu", **more):
    settings = {"lr": 0.05, "max_staleness": 4, **ENGINES[engine], **more}
    return SecureAFL(torch.zeros(D, device=device), N, **settings)


def run(server, rounds):
    """The same uploads for the same rounds, so that a resumed run is the uninterrupted one."""
    for _ in range(rounds):
        random = torch.Generator().manual_seed(server.version)
        client = int(torch.randint(server.clients, (), generator=random))
        version = max(0, server.version - int(torch.randint(server.config.max_staleness + 1, (), generator=random)))
        model = server.model_at(version)
        noise = torch.randn(len(model), generator=random).to(model)
        server.submit(client, (0.5 + client) * (model - client) + 0.1 * noise, version)
