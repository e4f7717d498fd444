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


class RuleError(RuntimeError):
    """A registered rule raised an error. The call is no round and changes nothing."""


class WeightsFunction(Protocol):
    """A row-wise rule: the weights of the updates in the aggregate, from their inner products.

    gram: (r, r) float64, inner products of the r updates; zero in rows and columns where mask is false
    mask: (r) bool, updates that take part    config: the server's settings
    returns: (r) float64, zero where mask is false; any finite numbers if mask is false everywhere

    The tensors are on the server's device. The function runs under torch.no_grad(). If it raises an error, or returns
    another shape, dtype or device, the call raises an error that names the rule, and is no round. To be usable in a
    CUDA graph, the function must not read the tensors on the host (`if mask.any()`, `.item()`), and it must be
    deterministic if runs are to be repeated.
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
    WEIGHTS[name] = _checked(name, weights)
    add_rule(name)


def _undo_rules() -> Callable[[], None]:
    before = frozenset(RULES)

    def take_back() -> None:
        for name in set(RULES) - before:
            del RULES[name], WEIGHTS[name]
        CHECKS["rule"] = one_of(RULES)

    return take_back


undo["secureafl.rules"] = _undo_rules


def _checked(name: str, weights: WeightsFunction) -> WeightsFunction:
    """This function with the checks that do not wait for the device. Its weights never require a gradient: the model
    would, too, and the next round could not write into it."""

    def call(gram: Tensor, mask: Tensor, config: Config, /) -> Tensor:
        shape, device = mask.shape, mask.device
        try:
            with torch.no_grad():
                found = weights(gram, mask, config)
        except Exception as error:
            raise RuleError(f"SecureAFL: rule={name!r} raised {type(error).__name__}: {error}") from error
        plain = isinstance(found, Tensor) and found.layout == torch.strided
        if not plain or (found.shape, found.dtype, found.device) != (shape, torch.float64, device):
            got = f"{describe(found)} on {found.device}" if isinstance(found, Tensor) else describe(found)
            expected = f"weights {tuple(shape)} float64 on {device}"
            raise ValueError(f"SecureAFL: rule={name!r} must return {expected}, got {got}")
        return found.detach()

    return call


def check_weights(config: Config, device: torch.device) -> None:
    """Call a registered rule once on three orthogonal updates, so that a mistake shows when the server is made."""
    if config.rule in BUILT_IN:
        return
    mask = torch.tensor([True, True, False], device=device)
    weights = WEIGHTS[config.rule](mask.double().diag(), mask, config)
    if not weights.isfinite().all() or weights[2] != 0:
        got = weights.tolist()
        raise ValueError(
            f"SecureAFL: rule={config.rule!r} must return finite weights, 0 where mask is false, got {got}"
        )
