"""Settings from what people write: flags, a TOML file, the lists of a sweep."""

import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from reprlib import repr  # short, and of any depth
from types import NoneType, UnionType
from typing import get_args, get_origin, get_type_hints

from .. import bounded_files
from ..attacks import ATTACKS, Kind
from ..defenses import DEFENSES, Defense
from .settings import Settings, UndefinedError

HELP = {
    "dataset": "what is learned",
    "data_dir": "folder to look for data in first",
    "model": "net that is trained; unset: resnet20 for colour images, else cnn",
    "clients": "n; unset: 50, or 10 for tiny-imagenet and udacity, 20 on the embedded data",
    "malicious": "share of the clients that attack",
    "attack": "what malicious clients do",
    "attack_options": "strengths of the attack",
    "defense": "what the server does",
    "defense_options": "parameters of the defense",
    "rounds": "updates that the server receives; unset: 20000, or 400 on the embedded data",
    "batch": "samples per gradient; unset: 32, or 64 for colour images",
    "lr": "eta, the learning rate; unset: 0.01, or 0.05 on the embedded data, whose runs are short",
    "delay": "tau_max: an upload on an older version is refused; unset: 10, or 4 per client with clock arrivals",
    "arrivals": "who comes when, and how stale",
    "spread": "of clock arrivals: standard deviation of the logarithm of the clients' speeds",
    "partition": "which client holds which samples",
    "degree": "of the skewed partition: how far from alike the clients' labels are, 0 to 1",
    "concentration": "of the dirichlet partition: the smaller, the less alike",
    "trusted": "clean samples of the server, for the defenses that need them",
    "holdout": "share of the training data that is the test instead, so that a choice never sees the test set",
    "quantile": "SecureAFL's alpha: share of past factors that a new one may not top",
    "memory": "SecureAFL's epsilon: pairs kept of every client",
    "max_norm": "SecureAFL's G: a first update is clipped to this norm",
    "trust": "SecureAFL's cap on a correction, in norms of the update it corrects; inf: none",
    "evaluations": "points of the curve",
    "estimation_error": "compare SecureAFL's estimates with true gradients at every evaluation",
    "seed": "fixes everything: same seed, same device, same result",
    "device": "cpu, cuda or cuda:N; unset: cuda where there is one and the extension was built for it",
}


def _kind(hint: object) -> type:
    if isinstance(hint, UnionType):
        return next(kind for kind in get_args(hint) if kind is not NoneType)
    return get_origin(hint) or hint


KINDS = {name: _kind(hint) for name, hint in get_type_hints(Settings).items()}
CONFIG = 2**14  # bytes of a file of settings; a key of many parts takes tomllib the square of their number
CALLED = {int: "a whole number", float: "a number", str: "text", bool: "true or false", dict: "a table"}
OPTIONS: dict[str, tuple[str, Mapping[str, Kind] | Mapping[str, Defense]]] = {
    "attack_options": ("attack", ATTACKS),
    "defense_options": ("defense", DEFENSES),
}


def knobs(field: str, name: str) -> dict[str, object]:
    """The options of that attack or defense with their defaults, as far as words can give them.

    What SecureAFL has settings of its own for is no option: two names for one thing could disagree.
    """
    ours = name.startswith("secureafl")
    entry = OPTIONS[field][1][name]
    return {
        key: value
        for key, value in entry.settings.items()
        if (type(value) in CALLED or key in entry.optional) and not (ours and key in KINDS)
    }


def parse(name: str, text: str) -> object:
    """The value of a setting as a flag or a list gives it."""
    kind = KINDS[name]
    try:
        return {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise ValueError(f"{name} must be {CALLED[kind]}, got {text!r}") from None


def option(text: str) -> tuple[str, object]:
    """NAME=VALUE of an attack's or a defense's option."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"an option must be NAME=VALUE, got {text!r}")
    return name.replace("-", "_"), literal(value)


def literal(text: str) -> object:
    """What the same characters mean in a TOML file; also .5, and a bare word is a string."""
    for read in (lambda text: tomllib.loads(f"value = {text}")["value"], float):
        try:
            return read(text)
        except (ValueError, RecursionError):
            pass
    return text


def from_toml(path: str | Path) -> dict[str, object]:
    """The settings that a file gives, by name; unknown ones and wrong types are errors."""
    try:
        text = bounded_files.text(Path(path), CONFIG)
    except FileNotFoundError:
        raise ValueError(f"config must be a file of settings, got {str(path)!r}, which is not there") from None
    try:
        given = tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"{path} is not TOML that settings need: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path} is not TOML: {str(error)[:300]}") from None
    for name, value in given.items():
        _known(f"setting in {path}:", name, KINDS)
        if not fits(KINDS[name], value):
            raise ValueError(f"{path}: {name} must be {CALLED[KINDS[name]]}, got {repr(value)}")
    return {name: KINDS[name](value) for name, value in given.items()}


def axis(text: str) -> tuple[str, list[object]]:
    """NAME=v1,v2,.. of a sweep. NAME is a setting, or attack_options.NAME or defense_options.NAME."""
    name, equals, values = text.partition("=")
    name = name.replace("-", "_")
    field, dot, _ = name.partition(".")
    sweepable = [name for name in KINDS if name not in OPTIONS] + [f"{field}.NAME" for field in OPTIONS]
    if not (dot and field in OPTIONS):
        _known("setting", name, sweepable)
    if not equals or not all(values.split(",")):
        raise ValueError(f"sweep: expected {name}=VALUE,VALUE,.., got {text!r}")
    return name, [literal(value) if dot else parse(name, value) for value in values.split(",")]


def grid(base: Settings, axes: dict[str, list[object]]) -> list[Settings]:
    """Every combination; the last axis runs fastest."""
    many = []
    for values in product(*axes.values()):
        settings = base
        for name, value in zip(axes, values, strict=True):
            settings = put(settings, name, value)
        many.append(settings)
    return many


def put(settings: Settings, name: str, value: object) -> Settings:
    field, dot, inner = name.partition(".")
    return replace(settings, **{field: {**getattr(settings, field), inner: value} if dot else value})


def get(settings: Settings, name: str) -> object:
    """None for an option that this run has no use for."""
    field, dot, inner = name.partition(".")
    return getattr(settings, field).get(inner) if dot else getattr(settings, field)


def prepare(many: list[Settings], left_out: Callable[[str], None]) -> list[Settings]:
    """Resolved, each once, without undefined pairs; options go to every attack and defense that knows them.

    An option that none of them knows is an error, as is a list of which nothing is defined.
    """
    defined, why = [], None
    for settings in many:
        try:
            defined.append(settings.resolve())
        except UndefinedError as error:
            why = error
            left_out(f"left out: {error}")
    if not defined:
        raise why or ValueError("no run was asked for")
    for field in OPTIONS:
        defined = _share_out(defined, field)
    return [settings for i, settings in enumerate(defined) if settings not in defined[:i]]


def _share_out(many: list[Settings], field: str) -> list[Settings]:
    owner = OPTIONS[field][0]
    used = {getattr(settings, owner): knobs(field, getattr(settings, owner)) for settings in many}
    known = list(dict.fromkeys(name for options in used.values() for name in options))
    shared = []
    for settings in many:
        own, given = used[getattr(settings, owner)], getattr(settings, field)
        optional = OPTIONS[field][1][getattr(settings, owner)].optional
        for name, value in given.items():
            _known(f"{owner} option of {', '.join(used)}:", name, known)
            kind = optional.get(name) if own.get(name) is None else type(own[name])
            if kind and not fits(kind, value):
                raise ValueError(f"{owner} option {name} must be {CALLED[kind]}, got {repr(value)}")
        shared.append(replace(settings, **{field: {name: value for name, value in given.items() if name in own}}))
    return shared


def _known(what: str, name: str, choices: Collection[str]) -> None:
    if name not in choices:
        raise ValueError(f"unknown {what} {repr(name)}; choose from {', '.join(choices) or 'nothing'}")


def fits(kind: type, value: object) -> bool:
    """A whole number is a number too; true and false are no numbers."""
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if kind is float else kind)
