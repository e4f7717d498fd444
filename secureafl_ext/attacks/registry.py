"""Every attack by name. To add an attack: one file, and one line in the table below."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ..plugins import Registry, check_about, check_factory, options_of
from .adaptive import Adaptive
from .alie import alie
from .base import Attack, Scene
from .crafted import PRESETS, Crafted
from .dba import dba
from .gaussian import gaussian
from .honest import none
from .ipm import ipm
from .label_flip import label_flip
from .mimic import mimic
from .min_max import min_max
from .neurotoxin import neurotoxin
from .pgd import pgd
from .scaling import scaling
from .sign_flip import sign_flip
from .threedfed import ThreeDFed


@dataclass(frozen=True)
class Kind:
    factory: Callable[..., Attack]  # (scene, **options)
    about: str
    needs_labels: bool  # not defined for a regression
    settings: dict[str, object]  # its options, with the defaults
    optional: dict[str, type]  # types of the options whose default is None
    free: str | None  # the option that `secureafl calibrate` fits, if the paper leaves the strength open
    needs_honest: bool  # uses gradients of honest clients, so that one client must be honest


def kind(
    factory: Callable[..., Attack],
    about: str,
    needs_labels: bool = False,
    free: str | None = None,
    needs_honest: bool = False,
) -> Kind:
    options = options_of(factory)
    return Kind(factory, about, needs_labels, options.defaults, options.optional, free, needs_honest)


seeing = partial(kind, needs_honest=True)  # an attack that sees what honest clients compute

ATTACKS = Registry(
    "attack",
    {
        "none": kind(none, "all clients are honest"),
        "label-flip": kind(label_flip, "labels y become Z - 1 - y", True),
        "sign-flip": kind(sign_flip, "the honest gradient with the opposite sign"),
        "gaussian": kind(gaussian, "noise in place of a gradient"),
        "scaling": kind(scaling, "backdoor: a poisoned gradient, scaled up", True, "factor"),
        "dba": kind(dba, "backdoor: each attacker has a quarter of the trigger", True, "factor"),
        "pgd": kind(pgd, "backdoor: local steps that stay in a ball", True, "radius"),
        "neurotoxin": kind(neurotoxin, "backdoor: in weights that honest clients hardly change", True, "cap"),
        "3dfed": kind(ThreeDFed, "backdoor: constrained, masked by noise, led by feedback", True, "lift"),
        "min-max": seeing(
            min_max, "as far from the honest mean as honest gradients are from each other", free="gamma0"
        ),
        "adaptive": seeing(Adaptive, "knows the defense and sends the worst update that it accepts"),
        "alie": seeing(alie, "the honest mean, shifted within the spread of honest gradients"),
        "ipm": seeing(ipm, "minus the honest mean, times epsilon"),
        "mimic": seeing(mimic, "all attackers send what one honest client would send"),
        "crafted": seeing(Crafted, "an honest gradient and a common push; every option open"),
        "ghost": seeing(PRESETS["ghost"], "crafted: one huge upload at first contact, then silence"),
        "freeze": seeing(PRESETS["freeze"], "crafted: honest for a quarter of the run, one huge upload, then silence"),
        "squads": seeing(PRESETS["squads"], "crafted: one push by two groups that do not look alike"),
        "mosaic": seeing(PRESETS["mosaic"], "crafted: groups push different coordinates of one direction"),
        "squad-backdoor": seeing(PRESETS["squad-backdoor"], "backdoor, crafted: carried by two groups", True),
        "sleeper": seeing(PRESETS["sleeper"], "crafted: honest for half of the run, then a strong push"),
        "rotate": seeing(PRESETS["rotate"], "crafted: the direction of the push changes again and again"),
        "decoy": seeing(PRESETS["decoy"], "crafted: a harmless upload right after each harmful one"),
    },
)


def register_attack(name: str, factory: Callable[..., Attack], *, about: str, needs_labels: bool = False) -> None:
    """Add an attack under a new name. `secureafl run --attack NAME` then runs it.

    name: 1 to 40 of a-z, 0-9, + and -    about: one line for `secureafl list`
    factory: a class or function that returns an Attack, called as factory(scene, **options)
    Its keyword-only parameters are the attack's options; each must have a default. `--attack-option NAME=VALUE` sets
    those whose default is a bool, int, float or str, or that are annotated `T | None` with such a type T.
    needs_labels: the attack changes labels or has a trigger, so that it is not defined for a regression
    """
    check_factory("register_attack", factory, ("scene",))
    check_about("register_attack", about)
    ATTACKS.add(name, kind(factory, about, needs_labels))


def make(name: str, scene: Scene, **options: object) -> Attack:
    """The attack of that name. options: those of ATTACKS[name].settings"""
    if name not in ATTACKS:
        raise ValueError(f"unknown attack {name!r}; choose from {', '.join(ATTACKS)}")
    found = ATTACKS[name]
    for unknown in options.keys() - found.settings.keys():
        choices = ", ".join(found.settings) or "nothing"
        raise ValueError(f"unknown option {unknown!r} of {name}; choose from {choices}")
    if found.needs_labels and scene.data.classes == 0:
        raise ValueError(f"{name}: data must have classes, it changes labels, got the regression {scene.data.name!r}")
    return found.factory(scene, **options)
