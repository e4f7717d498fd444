"""The ten attacks by name, and the simplest of them."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..defenses.base import keywords
from . import backdoors
from .adaptive import Adaptive
from .base import Attack, Scene, Simple, View
from .min_max import min_max
from .threedfed import ThreeDFed

__all__ = ["ATTACKS", "Attack", "Kind", "Scene", "View", "make"]


def none(scene: Scene) -> Simple:
    return Simple(lambda view: scene.net.gradient(view.model, *scene.data.train(view.own[0])))


def label_flip(scene: Scene) -> Simple:
    """y -> Z - 1 - y for Z classes"""

    def update(view: View) -> Tensor:
        x, y = scene.data.train(view.own[0])
        return scene.net.gradient(view.model, x, scene.data.classes - 1 - y)

    return Simple(update)


def sign_flip(scene: Scene, *, scale: float = 1.0) -> Simple:
    return Simple(lambda view: -scale * scene.net.gradient(view.model, *scene.data.train(view.own[0])))


def gaussian(scene: Scene, *, std: float = 200.0) -> Simple:
    noise, random = scene.zeros(scene.net.size), scene.random()
    return Simple(lambda view: std * noise, before=lambda: noise.normal_(generator=random))


@dataclass(frozen=True)
class Kind:
    factory: Callable[..., Attack]  # (scene, **options)
    about: str
    needs_labels: bool  # not defined for regression
    settings: dict[str, object]  # its options, with the defaults
    free: str | None  # the option to calibrate where the paper leaves a strength open


def _kind(factory: Callable[..., Attack], about: str, needs_labels: bool = False, free: str | None = None) -> Kind:
    return Kind(factory, about, needs_labels, keywords(factory), free)


ATTACKS = {
    "none": _kind(none, "everyone is honest"),
    "label-flip": _kind(label_flip, "labels y become Z - 1 - y", True),
    "sign-flip": _kind(sign_flip, "the honest gradient, turned round"),
    "gaussian": _kind(gaussian, "noise for a gradient"),
    "scaling": _kind(backdoors.scaling, "backdoor: a poisoned gradient, enlarged", True, "factor"),
    "dba": _kind(backdoors.dba, "backdoor: every attacker has a quarter of the trigger", True, "factor"),
    "pgd": _kind(backdoors.pgd, "backdoor: local steps that stay in a ball", True, "radius"),
    "neurotoxin": _kind(backdoors.neurotoxin, "backdoor: in weights that honest clients leave alone", True, "cap"),
    "3dfed": _kind(ThreeDFed, "backdoor: constrained, masked by noise, led by feedback", True, "lift"),
    "min-max": _kind(min_max, "as far from the honest mean as honest gradients are from each other", free="gamma0"),
    "adaptive": _kind(Adaptive, "knows the defense, and goes as far as that one lets it"),
}


def make(name: str, scene: Scene, **options: object) -> Attack:
    """The attack of that name; its options are those of ATTACKS[name].settings."""
    if name not in ATTACKS:
        raise ValueError(f"unknown attack {name!r}; choose from {', '.join(ATTACKS)}")
    kind = ATTACKS[name]
    for unknown in options.keys() - kind.settings.keys():
        raise ValueError(f"unknown option {unknown!r} of {name}; choose from {', '.join(kind.settings) or 'nothing'}")
    if kind.needs_labels and scene.data.classes == 0:
        raise ValueError(f"{name}: data must have classes, it changes labels, got the regression {scene.data.name!r}")
    return kind.factory(scene, **options)
