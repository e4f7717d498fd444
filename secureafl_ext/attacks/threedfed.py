"""3DFed for one update at a time: its six parts, without second derivatives and without an estimate of the noise."""

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from ..defenses.base import need, norm
from ..tasks.models import Net
from .base import Scene, View
from .local_steps import STEPS, local_steps
from .trigger import SHARE, TARGET, make_trigger, poison

TRIALS, RATE = 30, 0.1  # steps and step size of the search for masks
READABLE = 1e-5  # a smaller indicator is lost in the rounding of a weight
ENOUGH = 0.8  # a group counts as accepted if this share of its uploads was accepted


class Recipe(NamedTuple):
    """The constants that the original sets for each data set."""

    neurons: int  # rows of the output layer that carry noise
    spread: float  # of the noise
    group: int  # clients whose masks sum to zero
    change: float  # c_u: weight of an inconspicuous row sum
    size: float  # c_n: weight of a short mask
    sum: float  # c_l: weight of a small sum over the group
    fill: float  # an indicator where the update is zero
    heard: float  # an upload counts as accepted if the model moved by more than this share of its indicator


GREY = Recipe(8, 0.05, 2, 0.1, 0.08, 0.1, 1e-2, 1e-4)
COLOUR = Recipe(5, 0.01, 5, 0.1, 0.03, 0.01, 1e-3, 1e-5)
MANY = Recipe(100, 0.0005, 5, 5e-4, 0.03, 0.01, 1e-3, 1e-5)  # classes


class ThreeDFed:
    """1 constrained loss, 2 lifted norm, 3 indicator, 4 noise masks, 5 decoys, 6 adaptation.

    lift: the update is scaled up to the norm of the honest gradient, by at most this factor, and never scaled down
    indicator_gain, indicator_cap: amplification and bound of one weight of the last convolution; the attacker looks for
    that weight in the next model
    group: clients whose masks sum to zero. Default: 2 for grey images, 5 for others. They upload in different rounds,
    so that the masks cancel on average only. The mask of a client alone in its group is zero
    refresh: malicious rounds between two searches for masks
    decoys: send a decoy after a round in which all clients' last uploads were rejected
    push: shift of one output weight of a decoy    clean, backdoor, distance: weights of the constrained loss
    """

    honest = 0

    def __init__(
        self,
        scene: Scene,
        *,
        lift: float = 5.0,
        indicator_gain: float = 1e5,
        indicator_cap: float = 1e-2,
        group: int | None = None,
        refresh: int = 200,
        decoys: bool = True,
        push: float = 10.0,
        clean: float = 0.3,
        backdoor: float = 0.3,
        distance: float = 0.4,
        steps: int = STEPS,
        target: int = TARGET,
        share: float = SHARE,
    ):
        channels, classes = scene.data.shape[0], scene.data.classes
        self.recipe = MANY if classes > 100 else GREY if channels == 1 else COLOUR
        size = self.recipe.group if group is None else group
        need(size >= 1, "3dfed", "group", "1 or more", group)
        need(refresh >= 1, "3dfed", "refresh", "1 or more", refresh)
        need(steps >= 1, "3dfed", "steps", "1 or more", steps)
        need(lift >= 1, "3dfed", "lift", "1 or more", lift)
        need(indicator_cap > 0, "3dfed", "indicator_cap", "positive", indicator_cap)
        self.scene, self.own, self.trigger, self.share = scene, steps, make_trigger(scene, target, share), share
        self.lift, self.gain, self.cap, self.push = lift, indicator_gain, indicator_cap, push
        self.refresh, self.decoys, self.weights = refresh, decoys, (clean, backdoor, distance)
        self.output, self.quiet = output_layer(scene.net), quiet_layer(scene.net)

        f, neurons, (_, width) = len(scene.malicious), min(self.recipe.neurons, classes - 1), self.output.shape
        self.groups = torch.arange(f, device=scene.device) // size  # (f): the group of each malicious client
        count = -(-f // size)
        self.members = (torch.arange(count, device=scene.device)[:, None] == self.groups).float()  # (groups, f)
        self.random, self.rounds = scene.random(), 0
        self.alpha = scene.zeros(count).uniform_(generator=self.random)  # a group's weight of an inconspicuous row sum
        self.tally = scene.zeros(count, 2, dtype=torch.int64)  # uploads since the last refresh: accepted, all
        self.masks = scene.zeros(f, neurons, width)
        self.rows = scene.zeros(neurons, dtype=torch.int64)  # of the output layer
        self.fate = scene.zeros(f, dtype=torch.int64)  # last upload of each client: 1 accepted, -1 rejected, 0 unknown
        self.due = scene.zeros(1, dtype=torch.bool)  # the next upload is a decoy
        self.sent = scene.zeros(scene.net.size)  # the last update before mask and indicator
        self.place, self.value = scene.zeros(1, dtype=torch.int64), scene.zeros(1)  # of the last indicator

    def before(self) -> None:
        if self.rounds % self.refresh == 0 and len(self.fate):
            self._renew()
        self.rounds += 1

    def update(self, view: View) -> Tensor:
        net, data = self.scene.net, self.scene.data
        clean = net.gradient(view.model, *data.train(view.own[0]))
        moved = local_steps(self.scene.lr, view, lambda model, index: self._constrained(view.model, model, index))
        self.sent.copy_(moved * lifted(norm(clean), norm(moved), self.lift).to(moved.dtype))

        # The indicator comes last: the mask must not change the value that `after` looks for in the next model.
        mask = self.masks[self.scene.rank(view.client)].flatten()
        attack = self.sent.index_add(0, self._places().flatten(), mask)
        self.place.copy_(self.quiet.start + self.sent[self.quiet].abs().argmin())
        self.value.copy_(self._indicator(self.sent[self.place]))
        attack.index_copy_(0, self.place, self.value)
        return torch.where(self.due, self._decoy(clean, self.sent), attack)

    def after(self, view: View, model: Tensor) -> None:
        """Record whether the upload was accepted. A decoy does not count: the attack continues after it."""
        step = (view.current[self.place] - model[self.place]) / view.lr
        arrived, counts, rank = step / self.value > self.recipe.heard, ~self.due, self.scene.rank(view.client)
        self.tally.index_add_(0, self.groups[rank], torch.stack([arrived & counts, counts], 1).long())
        fate = torch.where(counts, 2 * arrived.long() - 1, self.fate[rank])
        self.fate.index_copy_(0, rank, fate)
        if self.decoys:
            refused = (self.fate < 0).any() & ~(self.fate > 0).any()
            self.due.copy_(counts & refused)

    def _constrained(self, start: Tensor, model: Tensor, index: Tensor) -> Tensor:
        """Gradient of clean CE(clean) + backdoor CE(poisoned) + distance |model - start|."""
        net, data, (clean, backdoor, distance) = self.scene.net, self.scene.data, self.weights
        honest = net.gradient(model, *data.train(index))
        poisoned = net.gradient(model, *poison(data, index, self.trigger, self.share))
        return clean * honest + backdoor * poisoned + distance * F.normalize(model - start, dim=0)

    def _places(self) -> Tensor:
        """(neurons, width): indices of the masked rows in the flat vector."""
        width = self.output.shape[1]
        return self.output.start + self.rows[:, None] * width + torch.arange(width, device=self.rows.device)

    def _indicator(self, update: Tensor) -> Tensor:
        value = self.gain * update
        return torch.where(value.abs() < READABLE, self.recipe.fill, value).clamp(-self.cap, self.cap)

    def _decoy(self, clean: Tensor, attack: Tensor) -> Tensor:
        """The honest update, except for one output weight: the one in which it differs least from the attack."""
        rows, columns = self.output.shape
        layer = slice(self.output.start, self.output.start + rows * columns)
        place = layer.start + (clean - attack)[layer].abs().argmin().reshape(1)
        return clean.index_add(0, place, torch.full_like(self.value, self.push))

    def _renew(self) -> None:
        """Adapt alpha to the verdicts on the last masks, and search new masks with autograd: not in a CUDA graph."""
        accepted, uploads = self.tally.unbind(1)
        chance = torch.rand(len(self.alpha), generator=self.random, device=self.alpha.device)
        adapted = adapt(self.alpha, (uploads > 0) & (accepted >= ENOUGH * uploads), chance)
        self.alpha.copy_(torch.where(uploads.sum() > 0, adapted, self.alpha))
        self.tally.zero_()

        others = torch.randperm(self.output.shape[0] - 1, generator=self.random, device=self.rows.device)
        others = others[: len(self.rows)]
        self.rows.copy_(others + (others >= self.trigger.target))  # all rows but the target's
        masks = torch.randn(self.masks.shape, generator=self.random, device=self.masks.device) * self.recipe.spread
        bias = self.sent[self.output.bias + self.rows].abs() if self.output.bias is not None else 0
        update = self.sent[self._places()]
        self.masks.copy_(search(masks, update, bias, self.alpha, self.members, self.recipe))


def search(masks: Tensor, update: Tensor, bias: Tensor | int, alpha: Tensor, members: Tensor, recipe: Recipe) -> Tensor:
    """Masks (f, neurons, width) that hide the change of the rows, have small norms and sum to zero over each group.

    update: (neurons, width) the rows that get the masks    bias: (neurons) absolute    members: (groups, f) 0 or 1
    """
    masks = centred(masks, members)
    mine = alpha @ members  # (f)
    mu = torch.ones_like(alpha)
    for _ in range(TRIALS):
        leaf = masks.detach().requires_grad_()
        with torch.enable_grad():
            change = ((update + leaf).abs().sum(2) + bias).clamp(min=1e-6)  # (f, neurons)
            length = torch.linalg.vector_norm(leaf.flatten(1), dim=1)  # (f)
            total = torch.linalg.vector_norm(members @ leaf.flatten(1), dim=1)  # (groups)
            each = mine * (recipe.change / change).sum(1) + (1 - mine) * recipe.size * length
            loss = (each / (1 + mu @ members)).sum() + (mu * recipe.sum * total / (1 + mu)).sum()
        masks = leaf.detach() - RATE * torch.autograd.grad(loss, leaf)[0]
        mu = mu + 0.1 * total.detach()
    return centred(masks, members)


def centred(masks: Tensor, members: Tensor) -> Tensor:
    """The masks (f, ..) minus the mean of their group, so that they sum to zero over each group."""
    means = (members / members.sum(1, keepdim=True)) @ masks.flatten(1)  # (groups, ..)
    return masks - (members.T @ means).view_as(masks)


def adapt(alpha: Tensor, accepted: Tensor, chance: Tensor) -> Tensor:
    """Next alphas (groups). All groups accepted: between the two smallest alphas. Some: just above the smallest alpha
    that was accepted. None: anywhere. chance: (groups) uniform draws
    """
    ranked = torch.where(accepted, alpha, torch.inf).sort().values
    low, second = ranked[0], ranked[min(1, len(ranked) - 1)]
    some = torch.where(accepted.all(), low + chance * (second - low), low + 0.1 * chance)
    return torch.where(accepted.any(), some, chance).clamp(0.01, 0.99)


def lifted(honest: Tensor, length: Tensor, cap: float) -> Tensor:
    """(): the factor that scales an update of norm `length` up to the norm `honest`: at least 1, at most `cap`."""
    return torch.where(length > 0, honest / length, 1).clamp(1, cap)


class Output(NamedTuple):
    """The place of the output layer in the flat vector."""

    start: int
    shape: tuple[int, int]  # rows, one per class, and their width
    bias: int | None


def output_layer(net: Net) -> Output:
    matrices = [layer for layer in layers(net) if len(layer[1]) == 2]
    if not matrices or matrices[-1][1][0] != net.classes:
        got = tuple(matrices[-1][1]) if matrices else "none"
        raise ValueError(f"3dfed: net must end in a linear layer of {net.classes} rows, got {got}")
    start, (rows, width) = matrices[-1]
    bias = start + rows * width
    return Output(start, (rows, width), bias if (bias, (net.classes,)) in layers(net) else None)


def quiet_layer(net: Net) -> slice:
    """The last convolution, or the first layer of a net without any."""
    convolutions = [layer for layer in layers(net) if len(layer[1]) == 4]
    start, shape = convolutions[-1] if convolutions else layers(net)[0]
    return slice(start, start + shape.numel())


def layers(net: Net) -> list[tuple[int, torch.Size]]:
    """The start of each parameter in the flat vector, and its shape."""
    return list(zip(accumulate(net.sizes, initial=0), net.shapes.values(), strict=False))
