"""Small nets whose whole state is one flat vector, the vector that the server sees."""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F  # noqa: N812

from .. import _sim  # noqa: F401 - importing it registers torch.ops.secureafl_sim

STARTING = threading.Lock()  # modules draw their initial weights from torch's global generator


@dataclass(frozen=True)
class Fused:
    """The fused ops of a net, for float32 on a GPU."""

    gradients: Callable[..., Tensor]  # as Net.gradients, for up to 256 images each
    predict: Callable[..., Tensor] | None = None  # (vector, x) -> (B, outputs)
    shared: int = 0  # bytes of shared memory that a block needs


class Net:
    """A module without weights, applied to views of a vector. Shapes: vector (d), x (B, C, H, W), y (B).

    classes=0 is a regression: one output, mean squared error. No method waits for the device, so that all can be
    captured in a CUDA graph. A call changes the module for its duration: each thread needs a Net of its own.
    scale: (d) factor of all gradients, or None    clip: norm that they are clipped to after that, or 0
    """

    scale: Tensor | None = None
    clip = 0.0

    def __init__(self, make: Callable[[], nn.Module], classes: int, fused: Fused | None = None):
        self.make, self.classes, self.fused = make, classes, fused
        with torch.device("meta"):
            self.module = make()
        if next(self.module.buffers(), None) is not None:
            raise ValueError("Net: module must have no buffers, a flat vector of parameters does not contain them")
        self.shapes = {name: parameter.shape for name, parameter in self.module.named_parameters()}
        self.sizes = [shape.numel() for shape in self.shapes.values()]
        self.size = sum(self.sizes)

    def start(self, seed: int) -> Tensor:
        """The module's initial weights, on the CPU. The state of torch's global generators does not change."""
        with STARTING, torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs too
            return torch.cat([parameter.detach().flatten() for parameter in self.make().parameters()])

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        if vector.shape != (self.size,):
            raise ValueError(f"Net: vector must have shape ({self.size},), got {tuple(vector.shape)}")
        # One split instead of slices: its backward is one cat instead of one vector of zeros per parameter.
        parts = vector.split(self.sizes)
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def predict(self, vector: Tensor, x: Tensor) -> Tensor:
        """(B, classes) logits, or (B) values."""
        fused = self._fused_for(vector)
        if fused and fused.predict and not vector.requires_grad:
            return self._shaped(fused.predict(vector, x))
        if not vector.is_cuda:  # torch's pooling on a CPU is three times as fast in this order
            x = x.to(memory_format=torch.channels_last)
        return self._apply(vector, x)

    def loss(self, vector: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Mean over the batch of cross entropy or squared error."""
        out = self._apply(vector, x)  # not the fused op, which has no gradient
        return F.cross_entropy(out, y) if self.classes else F.mse_loss(out, y)

    def gradient(self, vector: Tensor, x: Tensor, y: Tensor) -> Tensor:
        if fused := self._fused_for(vector, len(x)):
            return self._scaled(fused.gradients(vector.detach(), x[None], y[None])[0])
        leaf = vector.detach().requires_grad_()
        with torch.enable_grad():
            return self._scaled(torch.autograd.grad(self.loss(leaf, x, y), leaf)[0])

    def gradients(self, vector: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """(k, d): the gradients of k minibatches, x (k, B, C, H, W) and y (k, B), at one vector and in one call."""
        if fused := self._fused_for(vector, x.shape[1]):
            return self._scaled(fused.gradients(vector.detach(), x, y))
        return self._scaled(vmap(grad(self.loss), in_dims=(None, 0, 0))(vector.detach(), x, y))

    def _scaled(self, gradients: Tensor) -> Tensor:
        """(.., d): gradients (.., d) as clients send them."""
        scaled = gradients if self.scale is None else gradients * self.scale
        if not self.clip:
            return scaled
        return scaled * (self.clip / scaled.norm(dim=-1, keepdim=True)).clamp(max=1)  # of a zero: inf, clamped to 1

    def _apply(self, vector: Tensor, x: Tensor) -> Tensor:
        return self._shaped(functional_call(self.module, self.views(vector), (x,)))

    def _shaped(self, out: Tensor) -> Tensor:
        return out if self.classes else out[:, 0]

    def _fused_for(self, vector: Tensor, batch: int = 0) -> Fused | None:
        """The fused ops if they support this vector. batch: images of a gradient"""
        if self.fused is None or not vector.is_cuda or vector.dtype != torch.float32 or batch > 256:
            return None
        device = torch.cuda.get_device_properties(vector.device)
        shared: int = device.shared_memory_per_block_optin  # type: ignore[attr-defined]  # missing in torch's stubs
        return self.fused if shared >= self.fused.shared else None


def cnn(shape: tuple[int, int, int], classes: int, hidden: int = 100) -> Net:
    """The paper's CNN, without padding: 139,960 parameters for 28 x 28 x 1; the paper says 140,000."""
    channels, height, width = shape
    if min(height, width) < 10:
        raise ValueError(f"cnn: images must be 10 x 10 or larger, got {height} x {width}")
    left = math.prod(((side - 2) // 2 - 2) // 2 for side in (height, width))

    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(channels, 30, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(30, 50, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(50 * left, hidden),
            nn.ReLU(),
            nn.Linear(hidden, classes or 1),
        )

    # One call instead of about forty kernels, in less than a third of their time on an H200. Only for small sizes.
    fits = 2 <= classes <= 256 and hidden <= 256 and channels <= 3 and max(height, width) <= 32
    fused = Fused(partial(torch.ops.secureafl_sim.cnn_gradient, hidden=hidden, classes=classes))
    return Net(make, classes, fused if fits else None)


class Block(nn.Module):
    """Two 3 x 3 convolutions and a shortcut without parameters: every second pixel, zeros for new channels.

    Group norm instead of batch norm: it has no running statistics, which no gradient would send to the server, and the
    output for a sample does not depend on the other samples of a client's skewed batch.
    """

    def __init__(self, channels: int, out: int, stride: int):
        super().__init__()
        self.first = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.first_norm = nn.GroupNorm(out // 8, out)
        self.second = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(out // 8, out)
        self.stride, self.new = stride, out - channels

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y))
        if self.stride > 1:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.new // 2, self.new // 2))
        return F.relu(x + y)


class ResNet20(nn.Module):
    """Three times three blocks of 16, 32 and 64 channels, for images of any size."""

    def __init__(self, channels: int, outputs: int):
        super().__init__()
        widths = [16] * 4 + [32] * 3 + [64] * 3
        self.stem = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.stem_norm = nn.GroupNorm(2, 16)
        blocks = [Block(before, after, 1 if before == after else 2) for before, after in pairwise(widths)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(64, outputs)
        for module in self.modules():
            # Not for a module without weights: torch would import its whole compiler to draw what nobody sees.
            if isinstance(module, nn.Conv2d) and not module.weight.is_meta:
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.stem_norm(self.stem(x))))
        return self.head(x.mean((2, 3)))


def resnet20(shape: tuple[int, int, int], classes: int) -> Net:
    """ResNet-20 with group norm and shortcuts without parameters, for images of any size."""
    # A few kernels instead of about 380. The factors of products are rounded to 11 bits.
    fits = shape[0] <= 8 and shape[1:] == (32, 32) and classes <= 256
    ops = torch.ops.secureafl_sim.resnet_gradient, torch.ops.secureafl_sim.resnet_predict
    gradients, predict = (partial(op, classes=classes) for op in ops)
    fused = Fused(gradients, predict, shared=194_336)
    return Net(lambda: ResNet20(shape[0], classes or 1), classes, fused if fits else None)


MODELS = {"cnn": cnn, "resnet20": resnet20}


def build(name: str, shape: tuple[int, int, int], classes: int) -> Net:
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; choose from {', '.join(MODELS)}")
    return MODELS[name](shape, classes)
