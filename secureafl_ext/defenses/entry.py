"""Defense: an entry of the registry, and how a rule becomes one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..plugins import options_of
from ..validation import shown
from .base import Rule, Server, Trusted
from .rule_server import RuleServer, check_settings


class Factory(Protocol):
    """Makes the server of a defense."""

    def __call__(
        self,
        name: str,
        model: Tensor,
        clients: int,
        lr: float,
        max_staleness: int,
        trusted: Trusted | None,
        settings: dict[str, object],
    ) -> Server: ...


@dataclass(frozen=True)
class Defense:
    factory: Factory
    about: str
    needs_trusted: bool  # whether it judges updates by clean samples of the server
    settings: dict[str, object]  # its settings, with the defaults
    optional: dict[str, type]  # types of the settings whose default is None


def ruled(rule: Callable[..., Rule], about: str, needs_trusted: bool = False) -> Defense:
    """The defense that a rule makes. rule: a class or function (model, clients, *, settings), or, if it needs trusted
    samples, (model, clients, trusted, *, settings)"""

    def build(
        name: str,
        model: Tensor,
        clients: int,
        lr: float,
        max_staleness: int,
        trusted: Trusted | None,
        settings: dict[str, object],
    ) -> Server:
        check_settings(name, model, clients, lr, max_staleness)
        made = rule(model, clients, trusted, **settings) if needs_trusted else rule(model, clients, **settings)
        if not callable(getattr(made, "judge", None)) or not getattr(made, "REASONS", None):
            raise ValueError(f"{name}: the rule must have judge() and REASONS, got {shown(made)}")
        return RuleServer(made, name, model, clients, lr, max_staleness)

    options = options_of(rule)
    return Defense(build, about, needs_trusted, options.defaults, options.optional)
