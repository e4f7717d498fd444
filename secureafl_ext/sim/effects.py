"""Valid settings and options that have no effect in a run. A run that sets one is refused.

The tables have only certain cases. `malicious` is not in them: a run without an attack is the baseline of runs that
have one, and has the same flags. The options of a plug-in's attack, defense or rule are never refused: it may use all
that it gets.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from .. import _C
from ..attacks import ATTACKS
from ..attacks.crafted import PRESETS
from ..defenses import DEFENSES
from ..defenses.secureafl import VARIANTS
from ..defenses.tuned import tuned_options
from ..rules.registry import BUILT_IN
from ..tasks.datasets import SOURCES
from .loop import defense_settings
from .settings import Resolved, Settings

OVER_TIME = ("kinship", "support")  # rules that judge clients by averages over many rounds


class Run:
    """A run, as the conditions of the tables below see it."""

    def __init__(self, settings: Resolved):
        self.settings = settings
        self.ours = settings.defense.startswith("secureafl")
        self.labels = not SOURCES[settings.dataset].regression

    @cached_property
    def attack(self) -> Mapping[str, Any]:
        """The options of the attack, with its defaults."""
        return ATTACKS[self.settings.attack].settings | self.settings.attack_options

    @cached_property
    def defense(self) -> Mapping[str, Any]:
        """The options of the defense, with its defaults and its fixed settings."""
        kind = DEFENSES[self.settings.defense]
        return {**kind.settings, **defense_settings(self.settings, 0), **kind.fixed}

    @property
    def corrects(self) -> bool:
        """Whether estimates with corrections are used."""
        used = self.ours and (self.defense["estimate"] or self.settings.estimation_error)
        return used and self.defense["memory"] > 0

    def rule(self, *names: str) -> bool:
        """Whether the rule is one of these, or one of a plug-in."""
        rule = self.defense["rule"]
        return self.defense["estimate"] and (rule in names or rule not in BUILT_IN)

    @property
    def enqueues(self) -> bool:
        """Whether a round is `enqueue`, as it is in a CUDA graph, and not `submit`."""
        return not self.defense["sketch"] and self.settings.clients <= _C.MOST_ROW_CLIENTS

    @property
    def chooses_gamma(self) -> bool:
        """Whether the attack `adaptive` chooses the strength of its push itself."""
        return self.ours and self.defense["estimate"] and self.defense["rule"] != "mean"

    @property
    def sends_trusted(self) -> bool:
        """Whether the attack `adaptive` sends the trusted gradient in place of a wish."""
        return self.settings.defense == "aflguard" and self.defense["test"] == "norm"


class Need(NamedTuple):
    """The condition under which a setting or an option has an effect."""

    met: Callable[[Run], bool]
    why: str  # the reason in the error message, if it is not met


SETTINGS: dict[str, Need] = {
    "spread": Need(lambda run: run.settings.arrivals == "clock", "it needs --arrivals clock"),
    "degree": Need(
        lambda run: run.labels and run.settings.partition == "skewed",
        "it needs --partition skewed and data with labels",
    ),
    "concentration": Need(
        lambda run: run.labels and run.settings.partition == "dirichlet",
        "it needs --partition dirichlet and data with labels",
    ),
    "trusted": Need(lambda run: DEFENSES[run.settings.defense].needs_trusted, "it needs a defense with clean samples"),
    "estimation_error": Need(lambda run: run.ours, "it needs a SecureAFL defense"),
    "partition": Need(lambda run: run.labels, "it needs data with labels"),
    "quantile": Need(lambda run: run.ours and run.defense["filter"], "it needs a SecureAFL defense with filter=true"),
    "trust": Need(lambda run: run.corrects, "it needs estimates with memory above 0"),
}

CRAFTED = {
    "squads": Need(lambda run: run.attack["cosine"] < 1 or run.attack["mosaic"], "it needs cosine below 1, or mosaic"),
    "mosaic": Need(lambda run: run.attack["squads"] > 1, "it needs squads above 1"),
    "period": Need(
        lambda run: run.attack["duty"] < 1 or "+" in run.attack["direction"],
        "it needs duty below 1, or directions that take turns",
    ),
    "target": Need(lambda run: "backdoor" in run.attack["direction"], "it needs the direction backdoor"),
}
OTHER = Need(lambda run: not run.sends_trusted, "against aflguard the attack sends its trusted gradient")
ATTACK: dict[str, dict[str, Need]] = {
    **dict.fromkeys(("crafted", *PRESETS), CRAFTED),
    "min-max": {"gamma0": Need(lambda run: run.attack["p"] != "unit", "it needs p=std or p=sign")},
    "pgd": {"radius": Need(lambda run: run.attack["eps"] is None, "eps replaces it")},
    "3dfed": {
        "push": Need(lambda run: run.attack["decoys"], "it needs decoys=true"),
        "distance": Need(lambda run: run.attack["steps"] > 1, "it needs steps above 1"),
    },
    "adaptive": {
        "gamma": Need(
            lambda run: not run.chooses_gamma and not run.sends_trusted, "against this defense the attack chooses it"
        ),
        "momentum": OTHER,
        "honest": OTHER,
        "saturation": Need(
            lambda run: run.chooses_gamma and not (run.defense["rule"] in OVER_TIME and run.defense["receive"]),
            "it needs a SecureAFL defense with estimates and another rule than mean, kinship and support",
        ),
        "camps": Need(
            lambda run: run.ours and run.defense["rule"] == "kinship", "it needs rule=kinship, as secureafl-kin has it"
        ),
    },
}

# Not refused of Variant III, which never filters: our tables run it with the paper's reading, as they do the others.
FILTER = Need(lambda run: run.defense["filter"] or run.settings.defense == "secureafl-iii", "it needs filter=true")
ESTIMATE = Need(lambda run: run.defense["estimate"], "it needs estimate=true")
CLIPPED = Need(lambda run: run.rule("centered_clip"), "it needs rule=centered_clip")
SECUREAFL = {
    "rule": ESTIMATE,
    "trim": Need(lambda run: run.rule("trimmed_mean"), "it needs rule=trimmed_mean"),
    "remove": Need(lambda run: run.rule("spectral", "krum"), "it needs rule=spectral or rule=krum"),
    "radius": CLIPPED,
    "iterations": CLIPPED,
    "pairs": Need(lambda run: run.corrects, "it needs estimates with memory above 0"),
    "store": FILTER,
    "factors": FILTER,
    "window": FILTER,
    "sketch_seed": Need(lambda run: run.defense["sketch"] > 0, "it needs sketch above 0"),
    # The loop could not go on: a refused upload is no round, and its plan has a round for every upload.
    "spacing": Need(lambda run: False, "the simulator draws who uploads when before the first round, and refuses none"),
    "trial": Need(
        lambda run: not run.enqueues, "a simulated round has no trials, because its server does not know who uploads"
    ),
}
DEFENSE: dict[str, dict[str, Need]] = {
    **dict.fromkeys(VARIANTS, SECUREAFL),
    "kardam": {
        "decay": Need(lambda run: run.defense["dampening"] == "exp", "it needs dampening=exp"),
        "malicious": Need(
            lambda run: run.defense["quantile"] is None or run.defense["frequency"] != "off",
            "it needs frequency=strict or frequency=lenient, or no quantile",
        ),
    },
    "sageflow": {"delta": Need(lambda run: run.defense["mode"] == "anchored", "it needs mode=anchored")},
    "aflguard": {"radius": Need(lambda run: run.defense["test"] == "norm", "it needs test=norm")},
    "demoa": {
        "malicious": Need(
            lambda run: run.defense["aggregator"] in ("krum", "trimmed_mean"),
            "it needs aggregator=krum or aggregator=trimmed_mean",
        )
    },
}


class Idle(NamedTuple):
    """A setting, or an option, that has no effect in a run."""

    field: str  # of Settings
    option: str | None
    value: object
    why: str

    @property
    def name(self) -> str:
        return self.field if self.option is None else f"{self.field.removesuffix('_options')} option {self.option}"


def idle(settings: Resolved) -> list[Idle]:
    """The settings and options without effect that this run sets. A default or tuned value does not count as set."""
    run = Run(settings)
    return [part for part, met in _parts(run) if not met and _is_set(settings, part)]


def refuse_idle(many: Sequence[Resolved], free: Collection[str] = ()) -> None:
    """Raise ValueError for a setting or option that some of these runs set and that has no effect in any of them.

    free: fields that are not checked
    """
    runs = [Run(settings) for settings in many]
    used = {part.name for run in runs for part, met in _parts(run) if met}
    for run in runs:
        for part, met in _parts(run):
            if not met and part.name not in used and part.field not in free and _is_set(run.settings, part):
                raise ValueError(f"{part.name} must not be set, got {part.value!r}: {part.why}")


def _parts(run: Run) -> Iterator[tuple[Idle, bool]]:
    """Every setting of the table and every option of this run, and whether it has an effect."""
    settings = run.settings
    for name, need in SETTINGS.items():
        yield Idle(name, None, getattr(settings, name), need.why), need.met(run)
    tables = (
        ("attack_options", ATTACK.get(settings.attack, {}), run.attack),
        ("defense_options", DEFENSE.get(settings.defense, {}), run.defense),
    )
    for field, table, values in tables:
        for name, value in values.items():
            need = table.get(name, ALWAYS)
            yield Idle(field, name, value, need.why), need.met(run)


ALWAYS = Need(lambda run: True, "")
USUAL = Settings()


def _is_set(settings: Resolved, part: Idle) -> bool:
    """Whether the run has another value there than the default and the tuned one."""
    if part.option is None:
        return bool(part.value != getattr(USUAL, part.field))
    if part.field == "attack_options":
        given, kind, tuned = settings.attack_options, ATTACKS[settings.attack].settings, {}
    else:
        given, kind = settings.defense_options, DEFENSES[settings.defense].settings
        tuned = tuned_options(settings.defense, settings.dataset)
    name = part.option
    return name in given and given[name] != kind.get(name) and not (name in tuned and given[name] == tuned[name])
