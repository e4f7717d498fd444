"""Random crops and flips of training images. The choice is part of a sample's number, so that whoever draws the numbers
draws it too, and a CUDA graph can read it."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

PAD = 4  # black pixels on every side before a crop: the usual choice for images of 32 x 32


@dataclass(frozen=True, eq=False)
class Crops:
    """padded: (N, C * (H + 8) * (W + 8)) uint8, the images with black margins
    places: (variants, C * H * W) int64, where the pixels of a crop lie in a padded image. Variant 0: the image itself
    """

    padded: Tensor
    places: Tensor

    @property
    def variants(self) -> int:
        return len(self.places)

    def pixels(self, number: Tensor, shape: tuple[int, int, int]) -> Tensor:
        """(.., C, H, W) uint8. number: (..) sample + N * variant"""
        count = len(self.padded)
        flat = number.flatten()
        chosen = self.padded[flat % count].gather(1, self.places[flat // count])
        return chosen.view(*number.shape, *shape)


def crops(images: Tensor) -> Crops:
    """Every crop of (N, C, H, W) uint8 images out of their padded ones, each also flipped from left to right."""
    height, width = images.shape[2:]
    padded = F.pad(images, (PAD,) * 4)
    grid = torch.arange(padded[0].numel(), device=images.device).view(padded.shape[1:])
    # The image itself comes first: a plain sample's number is its variant 0.
    shifts = sorted(((y, x) for y in range(2 * PAD + 1) for x in range(2 * PAD + 1)), key=lambda at: at != (PAD, PAD))
    places = torch.stack([grid[:, y : y + height, x : x + width] for y, x in shifts])
    return Crops(padded.flatten(1), torch.cat([places, places.flip(-1)]).flatten(1))
