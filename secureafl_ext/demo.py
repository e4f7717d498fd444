"""A federation under attack on data made on the spot: `python -m secureafl_ext.demo`.

Twenty clients hold slices of one noisy linear regression; six of them answer with large random vectors. They upload
one at a time, each computed on a model some rounds old. The server applies what arrives as it is, or asks the ops:
is the Lipschitz factor within the usual, and what do all clients together say, estimates standing in for the absent?
"""

import argparse

import torch
from torch import Tensor

from . import aggregate, build_info, lipschitz

CLIENTS, ATTACKERS, SIZE, SAMPLES, MEMORY, STALENESS = 20, 6, 200, 400, 3, 5
QUANTILE = 0.8  # share of past factors that a new one may top


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


class Memory:
    """What the ops need to know of the past, in their layout."""

    def __init__(self):
        self.last_updates, self.last_models = torch.zeros(2, CLIENTS, SIZE)
        self.dw, self.dg = torch.zeros(2, CLIENTS, MEMORY, SIZE)
        self.pairs = torch.zeros(CLIENTS, dtype=torch.int64)
        self.seen = torch.zeros(CLIENTS, dtype=torch.bool)
        self.factors: list[float] = []

    def accepts(self, client: int, update: Tensor, model: Tensor) -> bool:
        if not self.seen[client]:
            return True
        factor = float(lipschitz(update, self.last_updates[client], model, self.last_models[client]))
        self.factors.append(factor)
        return factor <= float(torch.tensor(self.factors).quantile(QUANTILE))

    def push(self, client: int, update: Tensor, model: Tensor) -> None:
        dw, dg = model - self.last_models[client], update - self.last_updates[client]
        if self.seen[client] and dw @ dg > 1e-8 * (dw @ dw):  # only a pair of positive curvature can be used
            count = int(self.pairs[client])
            if count == MEMORY:
                self.dw[client], self.dg[client] = self.dw[client].roll(-1, 0), self.dg[client].roll(-1, 0)
                count -= 1
            self.dw[client, count], self.dg[client, count] = dw, dg
            self.pairs[client] = count + 1
        self.last_updates[client], self.last_models[client], self.seen[client] = update, model, True


def train(rounds: int, seed: int, rule: str | None) -> list[float]:
    """Error every tenth of the way; rule None steps along whatever arrives."""
    federation, memory = Federation(seed), Memory()
    models, errors = [torch.zeros(SIZE)], []
    for step in range(1, rounds + 1):
        client = int(torch.randint(CLIENTS, (), generator=federation.random))
        delay = int(torch.randint(STALENESS + 1, (), generator=federation.random))
        seen_by_client = models[-1 - min(delay, len(models) - 1)]
        update = federation.upload(client, seen_by_client)
        direction = update
        if rule is not None:
            accepted = torch.tensor(memory.accepts(client, update, seen_by_client))
            history = memory.last_updates, memory.last_models, memory.dw, memory.dg, memory.pairs, memory.seen
            direction = aggregate(models[-1], update, client, accepted, *history, rule=rule)
            memory.push(client, update, seen_by_client)
        models = [*models[-STALENESS:], models[-1] - 0.05 * direction]
        if step % (rounds // 10) == 0:
            errors.append(federation.error(models[-1]))
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
    servers = {"AsyncSGD": None, "SecureAFL": "median", "with mean": "mean"}
    curves = {name: train(options.rounds, options.seed, rule) for name, rule in servers.items()}
    print("round".rjust(8), *(name.rjust(12) for name in curves))
    for i in range(10):
        print(f"{(i + 1) * (options.rounds // 10):8d}", *(f"{curve[i]:12.4f}" for curve in curves.values()))


if __name__ == "__main__":
    main()
