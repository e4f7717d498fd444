"""SecureAFL and the paper's variants of it as defenses: one server, other settings."""

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, get_type_hints

import torch

from ..config import RECOMMENDED, Config
from ..plugins import optional_types
from ..server.server import SecureAFL
from .base import Server
from .entry import Defense, Start


def variant(about: str, usual: Mapping[str, object] = MappingProxyType({}), **fixed: object) -> Defense:
    """SecureAFL with these settings. The caller sets the others. usual: defaults of its own for some of those"""

    def build(start: Start) -> Server:
        exact = {"history_dtype": torch.float64} if start.model.dtype == torch.float64 else {}
        own = {"lr": start.lr, "max_staleness": start.max_staleness}
        everything: dict[str, Any] = {**own, **exact, **usual, **start.settings, **fixed}
        if everything.get("step") == "all":  # there are no averages of steps then, and no trials
            everything["averages"] = start.settings.get("averages", "uploads")
            everything["trial"] = start.settings.get("trial", 0)
        return SecureAFL(start.model, start.clients, **everything)

    # A dtype, not its name: the command line does not offer it.
    defaults = {field.name: field.default for field in fields(Config)} | {"history_dtype": torch.float32} | dict(usual)
    free = {name: value for name, value in defaults.items() if name not in {"lr", "max_staleness", *fixed}}
    return Defense(build, about, False, free, optional_types(get_type_hints(Config)), fixed)


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
        "weighs clients by the directions that many of them support; steps along the received update. RECOMMENDED: "
        "rule, memory, expiry and quorum are fixed, and --quantile needs filter=true",
        {name: RECOMMENDED[name] for name in ("step", "averages", "filter", "trial")},
        **{name: RECOMMENDED[name] for name in ("rule", "memory", "expiry", "quorum")},
    ),
    "secureafl-i": variant("Variant I: mean instead of median", rule="mean"),
    "secureafl-ii": variant("Variant II: no estimates", estimate=False),
    "secureafl-iii": variant("Variant III: no filter", filter=False),
    "secureafl-iv": variant("Variant IV: estimates alone", receive=False),
}
