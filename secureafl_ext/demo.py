"""A federation under attack on data made on the spot: `python -m secureafl_ext.demo`.

Twenty clients hold slices of one noisy linear regression; six of them answer with large random vectors. They upload
one at a time, each computed on a model some rounds old, to servers that differ in their settings alone.
"""

import argparse

import torch
from torch import Tensor

from . import SecureAFL, build_info

CLIENTS, ATTACKERS, SIZE, SAMPLES, STALENESS = 20, 6, 200, 400, 5

# Without estimates and filter the server steps along whatever arrives: plain asynchronous SGD.
SERVERS = {
    "AsyncSGD": {"estimate": False, "filter": False},
    "filter alone": {"estimate": False},
    "mean": {"rule": "mean"},
    "SecureAFL": {},
}


class Federation:
    """Linear regression y = x.truth + noise, every client with inputs of its own scale."""

    def __init__(self, seed: int):
        self.random = torch.Generator().manual_seed(seed)
        self.truth = torch.randn(SIZE, generator=self.random)
        scale = 0.7 + 0.6 * torch.rand(CLIENTS, 1, 1, generator=self.random)
        self.x = scale * torch.randn(CLIENTS, SAMPLES, SIZE, generator=self.random)
        self.y = self.x @ self.truth + 0.1 * torch.randn(CLIENTS, SAMPLES, generator=self.random)

    def upload(self, client: int, model: Tensor) -> Tensor:
        if client < ATTACKERS:
            return 20 * torch.randn(SIZE, generator=self.random)
        return self.x[client].T @ (self.x[client] @ model - self.y[client]) / SAMPLES

    def error(self, model: Tensor) -> float:
        return float((model - self.truth).norm() / self.truth.norm())


def train(rounds: int, seed: int, settings: dict) -> list[float]:
    """Error of the model every tenth of the way."""
    federation, errors = Federation(seed), []
    server = SecureAFL(torch.zeros(SIZE), CLIENTS, lr=0.05, max_staleness=STALENESS, **settings)
    handed_out = [server.checkout()]
    for step in range(1, rounds + 1):
        client = int(torch.randint(CLIENTS, (), generator=federation.random))
        delay = int(torch.randint(STALENESS + 1, (), generator=federation.random))
        model, version = handed_out[-1 - min(delay, len(handed_out) - 1)]
        server.submit(client, federation.upload(client, model), version)
        handed_out = [*handed_out[-STALENESS:], server.checkout()]
        if step % (rounds // 10) == 0:
            errors.append(federation.error(server.model))
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m secureafl_ext.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=500, help="server rounds, at least 10 (default: 500)")
    parser.add_argument("--seed", type=int, default=0, help="fixes data, attack and arrivals (default: 0)")
    options = parser.parse_args()
    if options.rounds < 10:
        parser.error(f"--rounds must be 10 or more, got {options.rounds}")

    print(", ".join(f"{key} {value}" for key, value in build_info().items()))
    print(f"{CLIENTS} clients, {ATTACKERS} of them send noise; relative error of the model:\n")
    curves = {name: train(options.rounds, options.seed, settings) for name, settings in SERVERS.items()}
    print("round".rjust(8), *(name.rjust(12) for name in curves))
    for i in range(10):
        print(f"{(i + 1) * (options.rounds // 10):8d}", *(f"{curve[i]:12.4f}" for curve in curves.values()))


if __name__ == "__main__":
    main()
