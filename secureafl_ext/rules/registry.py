"""register_rule: makes a function a row-wise rule."""

import re
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ..config import CHECKS, RULES, Config, add_rule, one_of
from ..entry_points import undo
from ..validation import describe, shown
from .row_rules import WEIGHTS

NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
BUILT_IN = frozenset(RULES)


class WeightsFunction(Protocol):
    """A row-wise rule: the weights of the updates in the aggregate, from their inner products.

    gram: (r, r) float64, inner products of the r updates; zero in rows and columns where mask is false
    mask: (r) bool, updates that take part    config: the server's settings
    returns: (r) float64, zero where mask is false; any finite numbers if mask is false everywhere

    The tensors are on the server's device. To be usable in a CUDA graph, the function must not read them on the host
    (`if mask.any()`, `.item()`), and it must be deterministic if runs are to be repeated.
    """

    def __call__(self, gram: Tensor, mask: Tensor, config: Config, /) -> Tensor: ...


def register_rule(name: str, weights: WeightsFunction) -> None:
    """Make `SecureAFL(rule=name)` valid: it aggregates with these weights.

    name: 1 to 40 of a-z, 0-9 and _, a letter first; not in use    weights: see WeightsFunction
    A package registers its rules through the entry point group "secureafl.rules": each entry point names a function
    without arguments that calls register_rule. It is called when a rule is used that is not known.
    A checkpoint names its rule, and loads only where that rule is registered.
    """
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"register_rule: name must be 1 to 40 of a-z, 0-9 and _, a letter first, got {shown(name)}")
    if name in RULES:
        owner = "built in" if name in BUILT_IN else "registered already"
        raise ValueError(f"register_rule: name must be new, got {name!r}, which is {owner}")
    if not callable(weights):
        raise ValueError(f"register_rule: weights must be a function (gram, mask, config), got {shown(weights)}")
    WEIGHTS[name] = weights
    add_rule(name)


def _undo_rules() -> Callable[[], None]:
    before = frozenset(RULES)

    def take_back() -> None:
        for name in set(RULES) - before:
            del RULES[name], WEIGHTS[name]
        CHECKS["rule"] = one_of(RULES)

    return take_back


undo["secureafl.rules"] = _undo_rules


def check_weights(config: Config, device: torch.device) -> None:
    """Call a registered rule once on three orthogonal updates, so that a mistake shows when the server is made."""
    if config.rule in BUILT_IN:
        return
    mask = torch.tensor([True, True, False], device=device)
    weights = WEIGHTS[config.rule](mask.double().diag(), mask, config)
    if not isinstance(weights, Tensor) or weights.shape != (3,) or weights.dtype != torch.float64:
        raise ValueError(f"SecureAFL: rule={config.rule!r} must return weights (r) float64, got {describe(weights)}")
    if not weights.isfinite().all() or weights[2] != 0:
        got = weights.tolist()
        raise ValueError(
            f"SecureAFL: rule={config.rule!r} must return finite weights, 0 where mask is false, got {got}"
        )
