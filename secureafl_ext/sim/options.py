"""Read settings from text: flags, a TOML file, the lists of a sweep."""

import logging
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from reprlib import repr  # short, and safe for deep nesting
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from .. import bounded_files
from ..attacks import ATTACKS, Kind
from ..defenses import DEFENSES, Defense
from ..defenses.tuned import tuned_options
from .effects import SETTINGS, Run, refuse_idle
from .settings import VARIANT_SETTINGS, Resolved, Settings, UndefinedError, variant_settings

log = logging.getLogger(__name__)

HELP = {
    "dataset": "data set",
    "data_dir": "folder that is searched for data first",
    "side": "average larger images to this many pixels a side; default: 32 for tiny-imagenet, else as they are",
    "model": "net to train; default: resnet20 for colour images, else cnn",
    "clients": "number of clients, n; default: 50, or 10 for tiny-imagenet and udacity, 20 on the embedded data",
    "malicious": "share of the clients that attack",
    "flood": "share of all uploads that the malicious clients make together; default: as many as other clients make",
    "attack": "attack of the malicious clients",
    "attack_options": "option of the attack",
    "defense": "defense of the server",
    "defense_options": "option of the defense",
    "rounds": "updates that the server receives; default: 20000, or 400 on the embedded data",
    "batch": "samples per gradient; default: 32, or 64 for colour images",
    "recipe": "how models train: the defaults of optimizer, lr, decay, clip, schedule, augment and calibrate",
    "optimizer": "scales gradients before a defense sees them; default: as the recipe says",
    "lr": "learning rate, eta; default: the recipe's; paper: 0.01, or 0.05 on the embedded data, 0.001 for udacity",
    "decay": "weight decay, with adam; default: as the recipe says",
    "clip": "clip gradients to this norm, 0: not; default: as the recipe says",
    "augment": "random crops and flips of the training images; default: as the recipe says",
    "schedule": "how the learning rate changes; default: as the recipe says",
    "calibrate": "honest clients correct their loss for the frequencies of their labels; default: as the recipe says",
    "delay": "tau_max: the server refuses an older upload; default: 10; for clock 4 per client, more in a flood",
    "arrivals": "which client uploads when, and how stale",
    "spread": "with --arrivals clock: standard deviation of the logarithm of the clients' speeds",
    "partition": "how the samples are split among the clients",
    "degree": "with --partition skewed: how skewed the labels are, 0 to 1; 0.1 with ten classes: all clients alike",
    "concentration": "with --partition dirichlet: a smaller value gives more different clients",
    "trusted": "clean samples of the server, for the defenses that need them",
    "holdout": "test on this share of the training data instead of the test set, to choose settings",
    "quantile": "SecureAFL's alpha: reject factors above this quantile of past ones; secureafl-support has no filter",
    "memory": "SecureAFL's epsilon: pairs kept of every client",
    "max_norm": "SecureAFL's G: a client's first update is clipped to this norm",
    "trust": "SecureAFL's cap on a correction, as a multiple of the norm of the corrected update; inf: no cap",
    "evaluations": "points of the curve",
    "estimation_error": "compare SecureAFL's estimates with true gradients at every evaluation",
    "seed": "seed of everything: same seed, device and number of threads, same result",
    "device": "cpu, cuda or cuda:N; default: cuda if there is a GPU and the extension was built for CUDA",
}


def _kind(hint: Any) -> type:
    if isinstance(hint, UnionType):
        return next(kind for kind in get_args(hint) if kind is not NoneType)
    return get_origin(hint) or hint


KINDS = {name: _kind(hint) for name, hint in get_type_hints(Settings).items()}
MOST_BYTES = 2**14  # of a TOML file: tomllib needs quadratic time for a dotted key
TYPE_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false", dict: "a table"}
# Field of Settings -> (the field that names its owner, the registry of the owners)
OPTIONS: dict[str, tuple[str, Mapping[str, Kind] | Mapping[str, Defense]]] = {
    "attack_options": ("attack", ATTACKS),
    "defense_options": ("defense", DEFENSES),
}


def options_of(field: str, name: str) -> dict[str, object]:
    """The options of an attack or a defense that can be set from the command line, with their defaults.

    A value that has a setting of its own (`--memory`) is not an option too: two names for one value could disagree.
    """
    ours = name.startswith("secureafl")
    entry = OPTIONS[field][1][name]
    return {
        key: value
        for key, value in entry.settings.items()
        if (type(value) in TYPE_NAMES or key in entry.optional) and not (ours and key in KINDS)
    }


def parse(name: str, text: str) -> Any:
    """The value of a setting, from the text of a flag or of a list."""
    kind = KINDS[name]
    try:
        return {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise ValueError(f"{name} must be {TYPE_NAMES[kind]}, got {text!r}") from None


def option(text: str) -> tuple[str, object]:
    """NAME=VALUE of an attack's or a defense's option."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"an option must be NAME=VALUE, got {text!r}")
    return name.replace("-", "_"), literal(value)


def literal(text: str) -> object:
    """The value that TOML gives this text. Also accepts `.5`; a bare word is a string."""
    readers: tuple[Callable[[str], object], ...] = (lambda text: tomllib.loads(f"value = {text}")["value"], float)
    for read in readers:
        try:
            return read(text)
        except (ValueError, RecursionError):
            pass
    return text


def from_toml(path: str | Path) -> dict[str, Any]:
    """The settings of a TOML file, by name. Unknown names and wrong types are errors."""
    try:
        text = bounded_files.text(Path(path), MOST_BYTES)
    except FileNotFoundError:
        raise ValueError(f"config must be a TOML file of settings, got {str(path)!r}: no such file") from None
    try:
        values = tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"{path} is not TOML for settings: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path} is not TOML: {str(error)[:300]}") from None
    for name, value in values.items():
        _check_name(f"setting in {path}:", name, KINDS)
        if not fits(KINDS[name], value):
            raise ValueError(f"{path}: {name} must be {TYPE_NAMES[KINDS[name]]}, got {repr(value)}")
    return {name: KINDS[name](value) for name, value in values.items()}


def axis(text: str) -> tuple[str, list[Any]]:
    """NAME=v1,v2,.. of a sweep. NAME is a setting, or attack_options.NAME or defense_options.NAME."""
    name, equals, values = text.partition("=")
    name = name.replace("-", "_")
    field, dot, _ = name.partition(".")
    sweepable = [name for name in KINDS if name not in OPTIONS] + [f"{field}.NAME" for field in OPTIONS]
    if not (dot and field in OPTIONS):
        _check_name("setting", name, sweepable)
    if not equals or not all(values.split(",")):
        raise ValueError(f"sweep: expected {name}=VALUE,VALUE,.., got {text!r}")
    return name, [literal(value) if dot else parse(name, value) for value in values.split(",")]


def grid(base: Settings, axes: dict[str, list[Any]]) -> list[Settings]:
    """Every combination of the values; the last axis changes fastest."""
    many = []
    for values in product(*axes.values()):
        settings = base
        for name, value in zip(axes, values, strict=True):
            settings = put(settings, name, value)
        many.append(settings)
    return many


def put(settings: Settings, name: str, value: object) -> Settings:
    """The settings with one setting, or one option, changed."""
    field, dot, inner = name.partition(".")
    change: dict[str, Any] = {field: {**getattr(settings, field), inner: value} if dot else value}
    return replace(settings, **change)


def get(settings: Settings, name: str) -> Any:
    """A setting, or an option; None if the run does not have this option."""
    field, dot, inner = name.partition(".")
    return getattr(settings, field).get(inner) if dot else getattr(settings, field)


def with_tuned_options(settings: Settings) -> Settings:
    """The options that were tuned for its defense on its data set. Options that are given win."""
    return replace(
        settings, defense_options=tuned_options(settings.defense, settings.dataset) | settings.defense_options
    )


def prepare(
    many: list[Settings], left_out: Callable[[str], None] = log.warning, searched: bool = False
) -> list[Resolved]:
    """The runs to make: resolved, without undefined pairs, each once.

    An option goes to every attack or defense in the list that has it, and so does a setting that only SecureAFL has.
    It is an error if no run has it, if it has no effect in any run, or if no run is defined.
    searched: the runs are part of a search for an attack; an attack option without effect here has one in other runs
    """
    defined: list[Resolved] = []
    undefined: list[UndefinedError] = []
    for settings in many:
        try:
            defined.append(settings.resolve())
        except UndefinedError as error:
            undefined.append(error)
    if not defined:
        raise undefined[-1] if undefined else ValueError("no run was asked for")
    for why in undefined:
        left_out(f"left out: {why}")
    for field in OPTIONS:
        defined = _distribute_options(defined, field)
    defined = _reset_unused(defined)
    refuse_idle(defined, free=("attack_options",) if searched else ())
    return [settings for i, settings in enumerate(defined) if settings not in defined[:i]]


def _distribute_options(many: list[Resolved], field: str) -> list[Resolved]:
    """Each run with those of its options that its attack (or defense) has. An option that no run has is an error."""
    owner = OPTIONS[field][0]
    used = {getattr(settings, owner): options_of(field, getattr(settings, owner)) for settings in many}
    known = list(dict.fromkeys(name for options in used.values() for name in options))
    distributed = []
    for settings in many:
        own, options = used[getattr(settings, owner)], getattr(settings, field)
        optional = OPTIONS[field][1][getattr(settings, owner)].optional
        for name, value in options.items():
            _check_name(f"{owner} option of {', '.join(used)}:", name, known)
            default = own.get(name)
            kind = optional.get(name) if default is None else type(default)
            if (kind and not fits(kind, value)) or value != value:  # not a number: every comparison would be false
                raise ValueError(f"{owner} option {name} must be {TYPE_NAMES[kind or float]}, got {repr(value)}")
        change: dict[str, Any] = {field: {name: value for name, value in options.items() if name in own}}
        distributed.append(replace(settings, **change))
    return distributed


def _reset_unused(many: list[Resolved]) -> list[Resolved]:
    """Refuse a setting that no run uses. Record the default in the runs that do not use it."""
    usual = Settings().resolve()
    used = [_used(settings) for settings in many]
    defenses = ", ".join(dict.fromkeys(settings.defense for settings in many))
    why = {name: f"defense {defenses} does not use it" for name in VARIANT_SETTINGS}
    why |= {name: SETTINGS[name].why for name in RESET}
    reset = []
    for settings, names in zip(many, used, strict=True):
        change: dict[str, Any] = {}
        for name in why:
            value, default = getattr(settings, name), getattr(usual, name)
            if value == default or name in names:
                continue
            if not any(name in others for others in used):
                raise ValueError(f"{name} must not be set, got {value}: {why[name]}")
            change[name] = default
        reset.append(replace(settings, **change))
    return reset


# Of effects.SETTINGS: a run in which one of these has no effect is recorded with its default. The others are recorded
# as they were set: to reset them too would hide older records.
RESET = ("spread", "degree", "concentration", "trusted", "estimation_error")


def _used(settings: Resolved) -> list[str]:
    """Of VARIANT_SETTINGS and RESET, those that this run uses."""
    run = Run(settings)
    return [*variant_settings(settings.defense), *(name for name in RESET if SETTINGS[name].met(run))]


def _check_name(what: str, name: str, choices: Collection[str]) -> None:
    if name not in choices:
        raise ValueError(f"unknown {what} {repr(name)}; choose from {', '.join(choices) or 'nothing'}")


def fits(kind: type, value: object) -> bool:
    """Whether the value has this type. A whole number is a number too; true and false are not numbers."""
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if kind is float else kind)
