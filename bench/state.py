"""Servers that have been at work for a while, so that a round costs what it costs in the long run."""

import torch
from report import SEED
from torch import Tensor

from secureafl_ext import SecureAFL
from secureafl_ext.rules.sums import inner

PAST = 512  # rounds already done, and factors of a pooled Q
DERIVED = ("gram", "along", "oldest", "weights", "status")  # what a fused server works out from the rest


def fill(history: dict[str, Tensor], model: Tensor) -> None:
    """Random last_updates, last_models (n, d), dw, dg (n, m, d) in place: every client seen, with all its pairs."""
    random = torch.Generator(model.device).manual_seed(SEED)
    for name in ("last_updates", "last_models", "dw", "dg"):
        history[name].uniform_(-1, 1, generator=random)
    # Some clients trained near the model, some so far from it that the cap on their correction bites.
    distance = torch.linspace(0.1, 1.5, len(history["last_models"]), device=model.device)[:, None]
    history["last_models"].mul_(distance).add_(model)
    history["dg"].mul_(0.1).add_(history["dw"], alpha=1.5)  # curvature 1.5, and noise
    history["pairs"].fill_(history["dw"].shape[1])
    history["seen"].fill_(True)


def filled(model: Tensor, n: int, m: int, **settings) -> tuple[SecureAFL, dict]:
    """A server of n clients with m pairs each, and the state that it was given. Without a filter, unless it is asked
    for: a rejected update costs less than a round."""
    server = SecureAFL(model, n, memory=m, **{"filter": False, **settings})
    state = server.state_dict()
    fill(state, model)
    state["models"][:] = model
    held = min(PAST, state["factors"].shape[1])
    state["factors"][:, :held].uniform_(0, 100, generator=torch.Generator(model.device).manual_seed(SEED))
    state["recorded"].fill_(held)
    state["version"] = PAST
    if "products" in state:  # of a row-wise rule
        state["products"] = inner(state["last_updates"], state["last_updates"])
    for name in DERIVED:
        state.pop(name, None)
    server.load_state_dict(state)
    return server, state


def history_bytes(n: int, d: int, m: int) -> int:
    """What a round has to read: 2m differences, an update and a model per client."""
    return 4 * (2 * m + 2) * n * d
