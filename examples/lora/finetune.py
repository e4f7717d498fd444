"""Fine-tune the LoRA adapters of a small language model with asynchronous clients, a fifth of them malicious.

python examples/lora/finetune.py

The base is pre-trained on this repository's documentation and then frozen. Each client has a Python file of the package
and uploads gradients of the adapters alone. Held-out text: the last tenth of every client's file.
"""

import argparse
import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from lora import Transformer, add_adapters, bits_per_byte
from torch import Tensor

from secureafl_ext import RECOMMENDED, Layout, SecureAFL
from secureafl_ext.config import Config

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = 10
LR, MAX_STALENESS = 0.1, 50
# max_norm, which clips first uploads, is about the norm of an honest gradient.
DEFENDED = Config(LR, **RECOMMENDED, max_norm=0.5, max_staleness=MAX_STALENESS)
# Plain asynchronous SGD: every upload is a step.
UNDEFENDED = Config(
    LR, rule="mean", memory=0, filter=False, estimate=False, max_norm=math.inf, max_staleness=MAX_STALENESS
)
ATTACK = -5  # what malicious clients multiply their gradient by


@dataclass(frozen=True)
class Texts:
    """Bytes as whole numbers, 0 to 255."""

    base: Tensor  # (length)
    clients: list[Tensor]  # (length) each
    held_out: Tensor  # (windows, context + 1)


@dataclass(frozen=True)
class Task:
    """What all runs share. Nothing here changes: a run changes only its server's vector."""

    net: Transformer  # frozen
    layout: Layout  # places of the adapters in the flat vector
    start: Tensor  # (d) the adapters before fine-tuning
    texts: Texts

    def loss(self, vector: Tensor, windows: Tensor) -> Tensor:
        """Bits per byte with the adapters of this vector (d)."""
        return bits_per_byte(self.net, windows, self.layout.unflatten(vector))

    def gradient(self, vector: Tensor, windows: Tensor) -> Tensor:
        """(d), flat as the vector, since the adapters are views of it."""
        vector = vector.detach().requires_grad_()
        return torch.autograd.grad(self.loss(vector, windows), vector)[0]

    @torch.no_grad()
    def held_out_loss(self, vector: Tensor) -> float:
        return float(self.loss(vector, self.texts.held_out))


def read_texts(context: int) -> Texts:
    def read(path: Path) -> Tensor:
        return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()

    pages = sorted((ROOT / "docs").rglob("*.md"))
    sources = sorted((ROOT / "secureafl_ext").rglob("*.py"), key=lambda path: (-path.stat().st_size, path))
    if not pages or len(sources) < CLIENTS:
        raise FileNotFoundError(f"the example must lie in a checkout with docs/ and secureafl_ext/, got {ROOT}")
    files = [read(path) for path in sources[:CLIENTS]]
    cuts = [len(file) * 9 // 10 for file in files]
    ends = [file[cut:].unfold(0, context + 1, context + 1) for file, cut in zip(files, cuts, strict=True)]
    trained_on = [file[:cut] for file, cut in zip(files, cuts, strict=True)]
    return Texts(torch.cat([read(page) for page in pages]), trained_on, torch.cat(ends))


def sample(text: Tensor, count: int, context: int, random: torch.Generator) -> Tensor:
    """Windows (count, context + 1) from random places of the text."""
    places = torch.randint(len(text) - context, (count, 1), generator=random)
    return text[places + torch.arange(context + 1)]


def pretrain(net: Transformer, text: Tensor, steps: int, random: torch.Generator) -> None:
    optimizer = torch.optim.AdamW(net.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.012, total_steps=steps)
    for _ in range(steps):
        optimizer.zero_grad()
        bits_per_byte(net, sample(text, 16, net.context, random)).backward()
        optimizer.step()
        schedule.step()


def make_task(pretraining: int, seed: int) -> Task:
    torch.manual_seed(seed)  # initial values of the base and of the adapters
    net = Transformer()
    texts = read_texts(net.context)
    pretrain(net, texts.base, pretraining, torch.Generator().manual_seed(seed))
    adapters = add_adapters(net)
    layout = Layout(adapters)
    return Task(net, layout, layout.flatten(adapters), texts)


def finetune(task: Task, server: SecureAFL, malicious: int, uploads: int, seed: int) -> list[int]:
    """Let the clients upload to the server in the order in which they are done. Returns the uploads' staleness.

    Clients 0 to malicious - 1 attack. Runs with the same seed have the same clients, batches and order.
    """
    random = torch.Generator().manual_seed(seed)
    pace = 1 + 2 * torch.rand(CLIENTS, generator=random)  # (n) the slowest client takes up to three times as long

    def done(client: int, now: float) -> float:
        return now + float(pace[client] * (0.5 + torch.rand((), generator=random)))

    at_work = [server.checkout() for _ in range(CLIENTS)]  # the model and the version that each client has
    queue = [(done(client, 0.0), client) for client in range(CLIENTS)]
    heapq.heapify(queue)
    staleness = []
    for _ in range(uploads):
        now, client = heapq.heappop(queue)
        model, version = at_work[client]
        update = task.gradient(model, sample(task.texts.clients[client], 4, task.net.context, random))
        if client < malicious:
            update = ATTACK * update
        staleness.append(server.version - version)
        server.submit(client, update, version)
        at_work[client] = server.checkout()
        heapq.heappush(queue, (done(client, now), client))
    return staleness


def whole(low: int, high: int) -> Callable[[str], int]:
    """A type for argparse: a whole number from low to high."""

    def convert(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = low - 1
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(f"must be a whole number from {low} to {high}, got {text!r}")
        return number

    return convert


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    clients = f"malicious clients of {CLIENTS} (2)"
    parser.add_argument("--malicious", type=whole(1, CLIENTS - 1), default=2, help=clients)
    parser.add_argument("--uploads", type=whole(1, 1_000_000), default=300, help="of all clients together (300)")
    parser.add_argument("--pretraining", type=whole(5, 1_000_000), default=150, help="steps on the documentation (150)")
    parser.add_argument("--seed", type=whole(0, 2**63 - 1), default=0, help="of everything random (0)")
    options = parser.parse_args(arguments)

    task = make_task(options.pretraining, options.seed)
    d, base = task.layout.size, sum(parameter.numel() for parameter in task.net.parameters())
    print(f"{base - d:,} frozen parameters, {d:,} in the adapters: an upload has {4 * d / 1e3:.0f} kB")
    print(f"{options.malicious} of {CLIENTS} clients malicious, {options.uploads} uploads, seed {options.seed}\n")
    print(f"{'held-out bits per byte':32}{'before':>8}{'after':>8}", flush=True)
    for name, config in (("no defense", UNDEFENDED), ("SecureAFL", DEFENDED)):
        for attack, malicious in (("attack", options.malicious), ("no attack", 0)):
            server = SecureAFL.from_config(task.start, CLIENTS, config)
            staleness = finetune(task, server, malicious, options.uploads, options.seed)
            before, after = task.held_out_loss(task.start), task.held_out_loss(server.model)
            print(f"{name + ', ' + attack:32}{before:8.2f}{after:8.2f}", flush=True)
    print(f"\nstaleness: {sum(staleness) / len(staleness):.0f} versions on average, {max(staleness)} at most")


if __name__ == "__main__":
    torch.set_num_threads(1)  # otherwise rounding, and so the table, would depend on the number of cores
    main()
