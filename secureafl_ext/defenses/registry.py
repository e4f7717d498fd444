"""Every defense by name. To add a defense: one file with its rule, and one line in the table below."""

from collections.abc import Callable

from torch import Tensor

from ..plugins import Registry, check_about, check_factory
from .aflguard import AFLGuard
from .async_defender import AsyncDefender
from .async_sgd import AsyncSGD
from .base import Rule, Server, Trusted
from .basgd import BASGD
from .centered_clip import CenteredClip
from .demoa import DeMoA
from .dnc import DnC
from .entry import Start, ruled
from .fedbuff import FedBuffTrimmedMean
from .flame import FLAME
from .fltrust import FLTrust
from .foolsgold import FoolsGold
from .kardam import Kardam
from .krum import Krum
from .nnm import NNMGeometricMedian, NNMTrimmedMean
from .sageflow import Sageflow
from .secureafl import VARIANTS
from .weighted import Weighted
from .zeno import Zeno

DEFENSES = Registry(
    "defense",
    {
        "async-sgd": ruled(AsyncSGD, "no defense: every update is a step"),
        "kardam": ruled(Kardam, "Lipschitz filter against the last applied gradient, damped by staleness"),
        "basgd": ruled(BASGD, "median over buffers of averaged updates"),
        "sageflow": ruled(Sageflow, "entropy filter on trusted samples, damped by staleness", needs_trusted=True),
        "zeno++": ruled(Zeno, "score against a trusted gradient, rescaled to its length", needs_trusted=True),
        "aflguard": ruled(AFLGuard, "distance to a trusted gradient", needs_trusted=True),
        "async-defender": ruled(AsyncDefender, "cosine-weighted baseline after AsyncDefender, reduced"),
        "foolsgold": ruled(FoolsGold, "weights by the cosines of summed updates: similar clients lose theirs"),
        "fltrust": ruled(FLTrust, "last updates weighted by cosine to a trusted gradient", needs_trusted=True),
        "flame": ruled(FLAME, "majority cluster of last updates by cosine, clipped to the median norm, with noise"),
        "dnc": ruled(DnC, "last updates without the outliers along the top singular direction (DnC)"),
        "nnm-trimmed-mean": ruled(NNMTrimmedMean, "nearest neighbor mixing of last updates, then trimmed mean"),
        "nnm-geometric-median": ruled(NNMGeometricMedian, "nearest neighbor mixing, then geometric median"),
        "krum": ruled(Krum, "the last update with the nearest neighbors; Multi-Krum with selected above 1"),
        "centered-clip": ruled(CenteredClip, "last updates clipped around the last aggregate"),
        "demoa": ruled(DeMoA, "robust rule over the cached momenta of all clients (DeMoA)"),
        "weighted": ruled(Weighted, 'last updates weighted by upload counts ("Weight for Robustness")'),
        "fedbuff-trimmed-mean": ruled(FedBuffTrimmedMean, "trimmed mean of a buffer of updates (FedBuff)"),
        **VARIANTS,
    },
)


def register_defense(name: str, rule: Callable[..., Rule], *, about: str, needs_trusted: bool = False) -> None:
    """Add a defense under a new name. `secureafl run --defense NAME` then runs it.

    name: 1 to 40 of a-z, 0-9, + and -    about: one line for `secureafl list`
    rule: a class or function that returns a Rule, called as rule(model, clients, **settings) or, with needs_trusted, as
    rule(model, clients, trusted, **settings). model: (d) the flat start model    trusted: the server's clean samples
    Its keyword-only parameters are the defense's settings; each must have a default. `--defense-option NAME=VALUE` sets
    those whose default is a bool, int, float or str, or that are annotated `T | None` with such a type T.
    """
    arguments = ("model", "clients", "trusted") if needs_trusted else ("model", "clients")
    check_factory("register_defense", rule, arguments)
    check_about("register_defense", about)
    DEFENSES.add(name, ruled(rule, about, needs_trusted))


def make(
    name: str,
    model: Tensor,
    clients: int,
    lr: float,
    max_staleness: int,
    trusted: Trusted | None = None,
    **settings: object,
) -> Server:
    """The defense of that name at a flat start model (d). settings: those of DEFENSES[name]"""
    if name not in DEFENSES:
        raise ValueError(f"unknown defense {name!r}; choose from {', '.join(DEFENSES)}")
    defense = DEFENSES[name]
    for unknown in settings.keys() - defense.settings.keys():
        choices = ", ".join(defense.settings) or "nothing"
        raise ValueError(f"unknown setting {unknown!r} of {name}; choose from {choices}")
    if defense.needs_trusted and trusted is None:
        raise ValueError(f"{name}: trusted must be given, it judges updates by clean samples of the server, got None")
    return defense.factory(Start(name, model, clients, lr, max_staleness, trusted, settings))
