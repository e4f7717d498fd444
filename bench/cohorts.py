"""A large fleet of which only a cohort's history is kept: how near the model comes to its optimum, under attack.

python bench/cohorts.py
"""

from math import comb

import torch

from secureafl_ext import SecureAFL

SIZE, ROUNDS, MALICIOUS, SEED = 500, 6_000, 0.2, 0
FLEETS, COHORTS, STAYS = (1_000, 10_000, 100_000), (50, 100, 1_000), (1_000, 3_000)


def distance(fleet: int, cohort: int, stay: int) -> float:
    """Of the model from the honest clients' mean, in units of their spread; a mean over the last third of the rounds.

    The cohort is drawn anew every `stay` rounds: a new server starts from the model, all its clients first contacts.
    Malicious clients, a fifth of the fleet, send the opposite of their gradient, five times as long.
    """
    random = torch.Generator().manual_seed(SEED)
    places = torch.randn(fleet, SIZE, generator=random)
    malicious = torch.rand(fleet, generator=random) < MALICIOUS
    optimum = places[~malicious].mean(0)
    model, found = 3 + torch.zeros(SIZE), []
    for t in range(ROUNDS):
        if t % stay == 0:
            members = torch.randperm(fleet, generator=random)[:cohort]
            server = SecureAFL(model, cohort, lr=0.01)
        slot = int(torch.randint(cohort, (), generator=random))
        who, version = members[slot], max(0, server.version - int(torch.randint(11, (), generator=random)))
        update = server.model_at(version) - places[who] + 0.3 * torch.randn(SIZE, generator=random)
        server.submit(slot, -5 * update if malicious[who] else update, version)
        model = server.model
        if 3 * t >= 2 * ROUNDS:
            found.append(float((model - optimum).norm() / SIZE**0.5))
    return sum(found) / len(found)


def captured(fleet: int, cohort: int) -> float:
    """The chance that half of a cohort, drawn at random, or more is malicious."""
    bad = round(MALICIOUS * fleet)
    ways = sum(comb(bad, k) * comb(fleet - bad, cohort - k) for k in range((cohort + 1) // 2, min(bad, cohort) + 1))
    return ways / comb(fleet, cohort)


def main():
    print(f"d = {SIZE}, {ROUNDS} rounds, {MALICIOUS:.0%} malicious, seed {SEED}; torch {torch.__version__}\n")
    columns = "".join(f" | distance, drawn anew every {stay:,} rounds" for stay in STAYS)
    print(f"| fleet | cohort | half of it malicious: chance{columns} |\n|{' --- |' * (3 + len(STAYS))}")
    for fleet in FLEETS:
        for cohort in COHORTS:
            found = "".join(f" | {distance(fleet, cohort, stay):.3f}" for stay in STAYS)
            print(f"| {fleet:,} | {cohort:,} | {captured(fleet, cohort):.0e}{found} |", flush=True)


if __name__ == "__main__":
    main()
