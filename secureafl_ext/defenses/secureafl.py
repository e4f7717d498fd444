"""SecureAFL and the paper's variants of it as defenses: one server, other settings."""

from dataclasses import fields
from typing import Any, get_type_hints

import torch

from ..config import Config
from ..plugins import optional_types
from ..server.server import SecureAFL
from .base import Server
from .entry import Defense, Start


def variant(about: str, **fixed: object) -> Defense:
    """SecureAFL with these settings. The caller sets the others."""

    def build(start: Start) -> Server:
        exact = {"history_dtype": torch.float64} if start.model.dtype == torch.float64 else {}
        own = {"lr": start.lr, "max_staleness": start.max_staleness}
        everything: dict[str, Any] = {**own, **exact, **start.settings, **fixed}
        return SecureAFL(start.model, start.clients, **everything)

    # A dtype, not its name: the command line does not offer it.
    defaults = {field.name: field.default for field in fields(Config)} | {"history_dtype": torch.float32}
    free = {name: value for name, value in defaults.items() if name not in {"lr", "max_staleness", *fixed}}
    return Defense(build, about, False, free, optional_types(get_type_hints(Config)))


VARIANTS = {
    "secureafl": variant("Lipschitz filter, estimates of absent clients, coordinate-wise median"),
    "secureafl-paper": variant(
        "as the paper prints it: one quantile over all uploads, memory without an end; "
        "a rejected upload is stored, and the model still steps",
        factors="pooled",
        on_reject="step",
        store="all",
        expiry=None,
        probation=0,
    ),
    "secureafl-kin": variant(
        "drops groups of clients that are too similar over time or oppose all others; mean of the rest",
        rule="kinship",
        memory=0,
    ),
    "secureafl-support": variant(
        "the mean of all clients, without the directions that only a few of them support",
        rule="support",
        memory=0,
        # One upload, then silence: nothing is known of such a client, so its upload must end soon, and the very first
        # uploads must not be theirs alone.
        expiry=4,
        quorum=0.65,
    ),
    "secureafl-i": variant("Variant I: mean instead of median", rule="mean"),
    "secureafl-ii": variant("Variant II: no estimates", estimate=False),
    "secureafl-iii": variant("Variant III: no filter", filter=False),
    "secureafl-iv": variant("Variant IV: estimates alone", receive=False),
}
