"""The backdoor's trigger: how it is drawn, and how it poisons a batch."""

import torch
from torch import Tensor

from ..defenses.base import need
from ..tasks.datasets import Dataset
from .base import SIDE, Scene, Trigger

TARGET = 0  # default target class
SHARE = 0.5  # default share of a batch that is poisoned


def make_trigger(scene: Scene, target: int, share: float = SHARE) -> Trigger:
    """Drawn on the CPU, so that every device has the same one. share: of a batch that is poisoned, only checked here"""
    channels, height, width = scene.data.shape
    need(min(height, width) >= SIDE, "Trigger", "images", f"{SIDE} x {SIDE} or larger", (height, width))
    need(0 <= target < scene.data.classes, "Trigger", "target", f"0 to {scene.data.classes - 1}", target)
    need(0 < share <= 1, "Trigger", "share", "above 0, at most 1, of a batch", share)
    random = torch.Generator().manual_seed(scene.seed)
    values = torch.randint(256, (channels, SIDE, SIDE), dtype=torch.uint8, generator=random)
    half = torch.arange(SIDE) // (SIDE // 2)
    return Trigger(values.to(scene.device), target, (2 * half[:, None] + half).to(scene.device))


def poison(
    data: Dataset, index: Tensor, trigger: Trigger, share: float, part: Tensor | int | None = None
) -> tuple[Tensor, Tensor]:
    """The batch of these training samples (B). Its first `share` gets the trigger and the target's label."""
    pixels, labels = data.train_pixels(index)
    count = round(share * len(index))
    pixels[:count] = trigger.apply(pixels[:count], part)
    labels[:count] = trigger.target
    return data.inputs(pixels), labels
