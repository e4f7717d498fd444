"""The space of the search: the options of the attack `crafted`, and how often malicious clients upload. One table."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ..attacks import ATTACKS
from ..attacks.crafted import PRESETS
from ..attacks.directions import DIRECTIONS
from ..sim.options import get, put
from ..sim.settings import Settings
from ..tasks import datasets

ATTACK = "crafted"
DIGITS = 3  # of a number that is searched: a command line must stay readable


class Suggests(Protocol):
    """The part of an Optuna trial that picks values."""

    def suggest_categorical(self, name: str, choices: Any) -> Any: ...
    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float: ...


@dataclass(frozen=True)
class Axis:
    """One setting, or one option of the attack. It has a list of values, or a range."""

    name: str  # as in `secureafl sweep`: a setting, or attack_options.NAME
    choices: tuple[Any, ...] = ()
    low: float = 0.0  # of a range
    high: float = 0.0
    log: bool = False
    # Whether the value matters, by the values of the axes above it. An axis without effect only slows the search.
    when: Callable[[Mapping[str, Any]], bool] = lambda values: True

    @property
    def key(self) -> str:
        """The name without attack_options."""
        return self.name.rpartition(".")[2]

    def suggest(self, trial: Suggests) -> Any:
        if self.choices:
            return trial.suggest_categorical(self.name, self.choices)
        return float(f"{trial.suggest_float(self.name, self.low, self.high, log=self.log):.{DIGITS}g}")

    def has(self, value: Any) -> bool:
        return value in self.choices if self.choices else self.low <= value <= self.high


def several(values: Mapping[str, Any]) -> bool:
    return values["squads"] > 1


def periodic(values: Mapping[str, Any]) -> bool:
    return values["duty"] < 1 or "+" in values["direction"]


TURNS = ("up+dead", "up+dead+ascent", "backdoor+ascent")  # directions that take turns

# Start and the others that have an exact value which matters (first contact, never silent) are lists: a range would
# never meet it.
AXES = (
    Axis("attack_options.direction", (*DIRECTIONS, *TURNS)),
    Axis("attack_options.strength", low=0.1, high=1000.0, log=True),
    Axis("attack_options.squads", (1, 2, 3, 5, 10)),
    Axis("attack_options.cosine", low=0.02, high=1.0, when=several),
    Axis("attack_options.mosaic", (False, True), when=several),
    Axis("attack_options.honest_part", (True, False)),
    Axis("attack_options.imitate", (None, 0, 1, 2), when=lambda values: values["honest_part"]),
    Axis("attack_options.camouflage", (0.0, 0.5, 1.0, 2.0, 5.0)),
    Axis("attack_options.start", (0.0, 0.05, 0.1, 0.25, 0.5, 0.75)),
    Axis("attack_options.stop", (1.0, 0.9, 0.5, 0.1), when=lambda values: values["start"] == 0),
    Axis("attack_options.duty", (1.0, 0.5, 0.2, 0.05)),
    Axis("attack_options.period", (0.005, 0.02, 0.05, 0.2), when=periodic),
    Axis("attack_options.silence", (0, 1, 2, 5, 20)),
    Axis("attack_options.decoys", (0, 1, 3)),
    Axis("flood", (None, 0.33, 0.5, 0.75, 0.94)),
)

# Attacks that are known to hurt, tried first. The others of their kind differ in the direction.
KNOWN: tuple[dict[str, Any], ...] = (
    *(dict(preset.keywords) for preset in PRESETS.values()),
    {**PRESETS["ghost"].keywords, "direction": "dead"},
    {**PRESETS["freeze"].keywords, "direction": "dead"},
    {**PRESETS["squads"].keywords, "flood": 0.5},
)


def axes_for(base: Settings, without: Collection[str] = ()) -> list[Axis]:
    """The axes to search. A setting or option that `base` has is not searched, nor one of `without` (keys)."""
    keys = [axis.key for axis in AXES]
    for name in without:
        if name not in keys:
            raise ValueError(f"without: {name!r} is not searched; choose from {', '.join(keys)}")
    free = [axis for axis in AXES if axis.key not in without and get(base, axis.name) is None]
    if not free:
        raise ValueError("without must leave a setting or option to search, got all of them")
    return [
        replace(axis, choices=tuple(value for value in axis.choices if _can(base, axis.key, value))) for axis in free
    ]


def _can(base: Settings, key: str, value: Any) -> bool:
    """Whether the attack can be run with this value: a run that fails would end the search."""
    if key == "direction":  # a backdoor needs a label
        return "backdoor" not in value or not datasets.SOURCES[base.dataset].regression
    if key == "imitate" and value is not None:
        settings = replace(base, attack=ATTACK).resolve()
        return value < settings.clients - settings.attackers
    if key == "honest_part":
        return value or get(base, "attack_options.imitate") is None
    if key == "start":
        return value <= defaults(base)["stop"]
    return True


def defaults(base: Settings) -> dict[str, Any]:
    """The value of every key that is not searched: that of `base`, or the attack's own default."""
    given = {axis.key: get(base, axis.name) for axis in AXES}
    return dict(ATTACKS[ATTACK].settings) | {key: value for key, value in given.items() if value is not None}


def known(base: Settings, axes: Collection[Axis]) -> list[dict[str, Any]]:
    """KNOWN as values of these axes, by name. A known attack that `base` or `axes` rules out is left out."""
    found = []
    for attack in KNOWN:
        values = {"flood": None} | defaults(base) | attack
        free = {axis.key for axis in axes}
        fits = all(axis.has(values[axis.key]) for axis in axes)
        if fits and all(key in free or defaults(base).get(key) == value for key, value in attack.items()):
            found.append({axis.name: values[axis.key] for axis in axes if axis.when(values)})
    return found


def suggest(trial: Suggests, base: Settings, axes: Collection[Axis]) -> Settings:
    """The settings of one trial. Values that are the attack's default are not written down."""
    usual = defaults(base)
    values: dict[str, Any] = dict(usual)
    settings = replace(base, attack=ATTACK)
    for axis in axes:
        if not axis.when(values):
            continue
        value = values[axis.key] = axis.suggest(trial)
        if value != usual.get(axis.key):
            settings = put(settings, axis.name, value)
    return settings


def unsearched(settings: Settings) -> Settings:
    """The settings with every axis at its default: equal for all trials of one search on one seed."""
    changed: dict[str, Any] = {axis.name: None for axis in AXES if "." not in axis.name}
    return replace(settings, attack_options={}, **changed)
