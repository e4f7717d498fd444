"""Defense: an entry of the registry, and how a rule becomes one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ..plugins import options_of
from ..validation import shown
from .base import Rule, Server, Trusted
from .rule_server import RuleServer, check_settings


@dataclass(frozen=True, eq=False)
class Start:
    """The arguments of `make`, from which a defense builds its server."""

    name: str
    model: Tensor  # (d)
    clients: int
    lr: float
    max_staleness: int
    trusted: Trusted | None
    settings: dict[str, object]


@dataclass(frozen=True)
class Defense:
    factory: Callable[[Start], Server]
    about: str
    needs_trusted: bool  # whether it judges updates by clean samples of the server
    settings: dict[str, object]  # its settings, with the defaults
    optional: dict[str, type]  # types of the settings whose default is None
    fixed: Mapping[str, object] = field(default_factory=dict)  # settings that nobody can change


def ruled(rule: Callable[..., Rule], about: str, needs_trusted: bool = False) -> Defense:
    """The defense that a rule makes. rule: a class or function (model, clients, *, settings), or, if it needs trusted
    samples, (model, clients, trusted, *, settings)"""

    def build(start: Start) -> Server:
        check_settings(start.name, start.model, start.clients, start.lr, start.max_staleness)
        trusted = (start.trusted,) if needs_trusted else ()
        made = rule(start.model, start.clients, *trusted, **start.settings)
        if not callable(getattr(made, "judge", None)) or not getattr(made, "REASONS", None):
            raise ValueError(f"{start.name}: the rule must have judge() and REASONS, got {shown(made)}")
        return RuleServer(made, start.name, start.model, start.clients, start.lr, start.max_staleness)

    options = options_of(rule)
    return Defense(build, about, needs_trusted, options.defaults, options.optional)
