"""Crafted: an honest gradient and a push that the attackers agree on. Its options span the space of an attacker who
knows the defense; `ghost`, `freeze`, `squads` and others are points of it, in PRESETS.

A client of squad s sends b + u (gamma (p_s + sqrt(1 / c - 1) q_s) + kappa r_k). b: the honest part. u: the median norm
of honest gradients. p_s: the direction, all of it or the squad's coordinates. q_s, r_k: random unit vectors of squad s
and client k, fixed for the run. So the pushes of two squads have cosine c: a defense that looks for clients that are
alike sees small groups. Source: this project's own check of the kinship rule, 2026.
"""

import math
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from ..defenses.base import need, norm
from .base import Scene, View
from .directions import DIRECTIONS, Sight
from .timing import Timing
from .trigger import TARGET, make_trigger

HONEST, HONEST_STD = 3, 10  # honest clients whose gradients the attackers compute each round; more for a spread
MOST_DECOYS = 100
MOMENTUM = 0.99  # of the long-run mean of these gradients


class Crafted:
    """direction: up, dead, ascent, std, random or backdoor, see directions.py; several joined by + take turns, one a
    period    strength: gamma    squads: number of groups    cosine: c, between the pushes of two squads
    mosaic: each squad pushes coordinates of its own    honest_part: the update contains an honest gradient
    imitate: number of the honest client whose gradient that is; None: the attacker's own
    camouflage: kappa    start, stop, duty, period, silence: see timing.py; honest gradients at other times
    decoys: after each harmful upload a client sends so many random vectors of the median norm, before any other
    attacker uploads    target: label of the backdoor
    """

    own = 1

    def __init__(
        self,
        scene: Scene,
        *,
        direction: str = "up",
        strength: float = 2.0,
        squads: int = 1,
        cosine: float = 1.0,
        mosaic: bool = False,
        honest_part: bool = True,
        imitate: int | None = None,
        camouflage: float = 0.0,
        start: float = 0.0,
        stop: float = 1.0,
        duty: float = 1.0,
        period: float = 0.05,
        silence: int = 0,
        decoys: int = 0,
        target: int = TARGET,
    ):
        names = direction.split("+")
        for name in names:
            need(name in DIRECTIONS, "crafted", "direction", f"one or more of {'+'.join(DIRECTIONS)}", direction)
        no_backdoor = "without backdoor on a regression"
        need("backdoor" not in names or scene.data.classes > 0, "crafted", "direction", no_backdoor, direction)
        need(math.isfinite(strength), "crafted", "strength", "a finite number", strength)
        need(squads >= 1, "crafted", "squads", "1 or more", squads)
        need(0 < cosine <= 1, "crafted", "cosine", "above 0, at most 1", cosine)
        need(camouflage >= 0, "crafted", "camouflage", "0 or more", camouflage)
        need(scene.honest >= 1, "crafted", "honest", "1 or more, the honest clients", scene.honest)
        need(0 <= decoys <= MOST_DECOYS, "crafted", "decoys", f"0 to {MOST_DECOYS}", decoys)
        if imitate is not None:
            need(0 <= imitate < scene.honest, "crafted", "imitate", f"0 to {scene.honest - 1}", imitate)
            need(honest_part, "crafted", "imitate", "None without an honest part", imitate)
        self.timing = Timing(start, stop, duty, period, silence)
        self.timing.check("crafted")
        self.uploads = self.timing.uploads
        few = min(HONEST_STD if "std" in names else HONEST, scene.honest)
        self.honest = few if imitate is None else scene.honest  # all: in order of their numbers
        self.trigger = make_trigger(scene, target) if "backdoor" in names else None
        self.scene, self.strength, self.camouflage = scene, strength, camouflage
        self.honest_part, self.imitate = honest_part, imitate
        self.directions = [DIRECTIONS[name](scene, self.trigger) for name in names]
        self.mean = scene.zeros(scene.net.size)

        random, size = scene.random(), scene.net.size
        self.squads, self.apart = squads, (1 / cosine - 1) ** 0.5
        self.private = units(squads, size, random) if self.apart else None  # q (squads, d)
        self.personal = units(len(scene.malicious), size, random) if camouflage else None  # r (f, d)
        part = torch.randint(squads, (size,), generator=random, device=scene.device)
        self.part = part if mosaic else None  # (d): the squad that pushes a coordinate
        self.turns, self.random = decoys + 1, random  # uploads of a client in a row
        self.order = self._in_a_row if decoys else None
        self.sent = scene.zeros(len(scene.malicious), dtype=torch.int64)  # uploads of each attacker so far
        self.decoy = scene.zeros(size if decoys else 0)

    def before(self) -> None:
        if self.order:
            self.decoy.normal_(generator=self.random)

    def after(self, view: View, model: Tensor) -> None: ...

    def _in_a_row(self, clients: Tensor) -> Tensor:
        """See Attack.order. No attacker's harmful upload is the last one of its client when another's arrives. So a
        defense that compares an upload with the last ones of others never compares two harmful ones."""
        return clients[torch.arange(len(clients)) // self.turns * self.turns]

    def update(self, view: View) -> Tensor:
        net, data = self.scene.net, self.scene.data
        gradients = net.gradients(view.model, *data.train(view.honest))  # (k, d)
        lengths = torch.linalg.vector_norm(gradients, dim=1, dtype=torch.float64)
        unit = lengths.sort().values[len(lengths) // 2]
        mean = gradients.mean(0)
        # A gradient that is not finite would stay in the mean for ever.
        self.mean.lerp_(torch.where(mean.isfinite().all(), mean, self.mean), 1 - MOMENTUM)

        own = net.gradient(view.model, *data.train(view.own[0]))
        base = (
            torch.zeros_like(own) if not self.honest_part else own if self.imitate is None else gradients[self.imitate]
        )
        push = self._push(Sight(view, gradients, self.mean, unit))
        harmful = base + unit.to(push.dtype) * push
        if self.order:
            decoy = self.decoy * (unit / norm(self.decoy)).to(push.dtype)
            rank = self.scene.rank(view.client)
            harmful = torch.where(self.sent[rank] % self.turns == 0, harmful, decoy)
            self.sent.index_add_(0, rank, torch.ones_like(rank))
        return torch.where(self.timing.attacks(view.progress), harmful, own)

    def _push(self, sight: Sight) -> Tensor:
        """(d): the push that the client adds to its honest part, in units of `sight.unit`."""
        rank = self.scene.rank(sight.view.client)  # (1)
        squad = rank % self.squads
        choices = torch.stack([direction(sight) for direction in self.directions])  # (number, d)
        chosen = choices[self.timing.turn(sight.view.progress, len(choices)).reshape(1)][0]
        if self.part is not None:  # the squad's coordinates, at the norm of the whole
            chosen = F.normalize(chosen * (self.part == squad), dim=0) * norm(chosen).to(chosen.dtype)
        if self.private is not None:
            chosen = chosen + self.apart * self.private[squad][0]
        push = self.strength * chosen
        return push if self.personal is None else push + self.camouflage * self.personal[rank][0]


def units(rows: int, size: int, random: torch.Generator) -> Tensor:
    """(rows, size): random vectors of norm 1."""
    return F.normalize(torch.randn(rows, size, generator=random, device=random.device), dim=1)


# Attacks with a name of their own: Crafted with other defaults. All options can still be set.
PRESETS = {
    # One upload that the server remembers; huge, because nothing judges it at first contact.
    "ghost": partial(Crafted, strength=1000.0, honest_part=False, silence=1),
    "freeze": partial(Crafted, strength=1000.0, honest_part=False, silence=1, start=0.25),
    "squads": partial(Crafted, strength=2.0, squads=2, cosine=0.45),
    "mosaic": partial(Crafted, strength=2.0, squads=2, mosaic=True),
    "squad-backdoor": partial(Crafted, direction="backdoor", strength=1.0, squads=2, cosine=0.45),
    "sleeper": partial(Crafted, strength=10.0, start=0.5),
    "decoy": partial(Crafted, strength=2.0, honest_part=False, decoys=1),
    "rotate": partial(Crafted, direction="up+dead+ascent", strength=5.0),
}
