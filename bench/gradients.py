"""Time the simulator's nets: gradients and outputs by ops of their own against torch's.

python bench/gradients.py [--device cpu|cuda] [--quick] [--out DIR]
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from report import SEED, Row, head, options, ratio, table, write
from timing import Clock
from torch import Tensor
from tqdm import tqdm

from secureafl_ext.sim import loop, runner
from secureafl_ext.tasks.models import Net, build

CLASSES = 10
NETS = {"cnn": ((1, 28, 28), 32), "resnet20": ((3, 32, 32), 64)}  # images, and how many a minibatch of the paper has
# How far from a gradient in float64 each may be, in its norm. Factors of 11 bits turn a ReLU here and there.
OFF = {"op": 0.05, "torch": 1e-3, "torch, fastest": 0.05}


@dataclass(frozen=True)
class Sizes:
    batch: int  # at most
    together: int  # gradients side by side, on a GPU
    minibatches: int  # at one model, in one call
    images: int  # whose outputs are taken
    repeats: int


SIZES = {
    "full": Sizes(64, runner.SIDE_BY_SIDE, 40, 2_000, 20),
    "quick": Sizes(64, 4, 4, 200, 3),
    "tiny": Sizes(2, 2, 2, 3, 1),
}
ON_CPU = 2  # minibatches


@contextmanager
def fastest() -> Iterator[None]:
    """torch as fast as it goes: products in TF32, convolutions by whatever cuDNN finds quickest."""
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, True
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=True):
            yield
    finally:
        matmul.allow_tf32 = before


def ways(net: Net, plain: Net, device: str) -> Iterator[tuple[str, Net]]:
    """Each with torch set up for it, one after the other."""
    with loop.exact():
        yield "torch", plain
    if device == "cuda":
        with fastest():
            yield "torch, fastest", plain
        with loop.exact():
            yield "op", net


def times(net: Net, vector: Tensor, x: Tensor, y: Tensor, images: Tensor, sizes: Sizes, clock: Clock) -> list[float]:
    """ms: of one gradient alone, of one beside others, of one among many in a call, of all images' outputs."""

    def per_call(call: Callable[[], object]) -> float:
        return clock.graph_ms(call) or clock.ms(call)

    def one() -> Tensor:
        return net.gradient(vector, x[0], y[0])

    with torch.no_grad():
        return [
            per_call(one),
            clock.together_ms(one, sizes.together),
            per_call(lambda: net.gradients(vector, x, y)) / len(x),
            per_call(lambda: net.predict(vector, images)),
        ]


def main() -> None:
    chosen = options(__doc__.splitlines()[0], SIZES)
    sizes, device = SIZES[chosen.sizes], chosen.device
    count = min(sizes.minibatches, ON_CPU) if device == "cpu" else sizes.minibatches
    clock, random = Clock(device, sizes.repeats), torch.Generator().manual_seed(SEED)
    named = (
        ("one", "ms"),
        (f"{sizes.together} at a time", "ms each"),
        (f"{count} in a call", "ms each"),
        (f"outputs of {sizes.images:,} images", "ms"),
    )
    rows, parts = [], []
    for name, (shape, usual) in tqdm(NETS.items(), unit="net", leave=False):
        batch, measured = min(usual, sizes.batch), {}
        x = torch.randn(count, batch, *shape, generator=random).to(device)
        y = torch.randint(CLASSES, (count, batch), generator=random).to(device)
        images = torch.randn(sizes.images, *shape, generator=random).to(device)
        net = build(name, shape, CLASSES)
        plain, vector = Net(net.make, CLASSES), net.start(SEED).to(device)
        wanted = plain.gradient(vector.double(), x[0].double(), y[0])
        for how, way in ways(net, plain, device):
            off = ((way.gradient(vector, x[0], y[0]) - wanted).norm() / wanted.norm()).item()
            assert off < OFF[how], f"{name}, {how}: off by {off}"
            measured[how] = [*times(way, vector, x, y, images, sizes, clock), off]
        lines = []
        for how, (*taken, off) in measured.items():
            compared = zip(taken, measured["torch"][:-1], strict=True)
            cells = [None if ms is None else f"{ms:.4g} ({ratio(ms, to)})" for ms, to in compared]
            lines.append((how, *cells, f"{off:.1e}"))
            timed = [(label, ms) for (label, _), ms in zip(named, taken, strict=True) if ms is not None]
            rows += [Row(f"{name}, {label}", how, batch, net.size, 0, ms) for label, ms in timed]
        columns = ("how", *(f"{label}, {unit}" for label, unit in named), "off from float64")
        parts += [f"## {name}, minibatches of {batch}", table(columns, lines)]
    top = "In brackets: times torch's in float32. On a GPU all in CUDA graphs. In the CSV n is the minibatch."
    parts = [head("Gradients of the simulator's nets", device), top, *parts]
    write(chosen.out, "gradients", "\n\n".join(parts), rows, picture=False)


if __name__ == "__main__":
    main()
