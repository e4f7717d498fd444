"""What f clients can do to one step by uploads that the server judges, and how they move the quantile and take turns.

As test_influence.py, through the filter. SECUREAFL_SEARCH and `-s` as there.
"""

from itertools import count

import pytest
import torch
from influence import ATTACKERS, BOUNDS, HONEST, LONGER, D, N, Rows, normal, number, rows_of, search, step_of
from presence_oracle import PAPER

from secureafl_ext import SecureAFL
from secureafl_ext.engines.factor_counts import empty_counts
from secureafl_ext.engines.quantile import largest_accepted

FLEETS = {
    **{rule: {"rule": rule, "memory": 0} for rule in BOUNDS},
    "trimmed_mean": {"rule": "trimmed_mean", "memory": 0, "trim": 3},
    "centered_clip": {"rule": "centered_clip", "memory": 0, "radius": 1.0},
    "fused median": {},
    "fused trimmed_mean": {"rule": "trimmed_mean", "trim": 3},
    "corrected krum": {"rule": "krum", "memory": 2},
    "mean": {"rule": "mean", "memory": 0},
    "support, received": {"rule": "support", "memory": 0, "step": "received"},
    "support, received, averages of steps": {"rule": "support", "memory": 0, "step": "received", "averages": "steps"},
    "kinship, received": {"rule": "kinship", "memory": 0, "step": "received"},
}


class Fleet:
    """A server that honest clients have trained, and the attackers too, but for the last of them."""

    def __init__(self, random, **settings):
        self.server = SecureAFL(torch.zeros(D), N, **{"lr": 0.1, "max_norm": 3.0, **PAPER, **settings})
        self.targets = torch.randn(N, D, generator=random) + 1
        for i in range(10 * N):
            client = i % N
            if client != ATTACKERS[-1]:
                self.server.submit(client, self.honest(client, random), self.server.version)
        self.state = self.server.state_dict()

    def honest(self, client, random):
        return self.server.model - self.targets[client] + 0.1 * torch.randn(D, generator=random)

    def ratio(self, uploads):
        """The largest ratio of any step while the attackers upload and once an honest client has."""
        server = self.server
        server.load_state_dict(self.state)
        largest = 0.0
        for who, lag, update in uploads:
            client = torch.tensor([ATTACKERS[who]])
            update = server.last(client)[0] if update is None else update  # a replay
            largest = max(largest, self.step(int(client), update.float(), server.version - lag))
        honest = self.honest(HONEST[0], torch.Generator().manual_seed(1))
        return max(largest, self.step(HONEST[0], honest, server.version))

    def step(self, client, update, version):
        server, who = self.server, torch.tensor([client])
        known, threshold = bool(server.seen[client]), float(server.threshold(who))
        last, last_model = server.last(who)
        moved = float((server.model_at(version).double() - last_model.double()).norm())
        before = server.estimates().double()
        averaged = server.config.averaging
        rows = averaged_rows(server, client, update) if averaged else rows_of(server, ATTACKERS, client, update)
        sent = last_updates(server)
        corrections = (before - sent).norm(dim=1)
        assert (corrections <= server.config.trust * sent.norm(dim=1) * (1 + 1e-4) + 1e-6).all()

        aggregate, accepted = step_of(server, client, update, version)
        if not accepted:
            assert not aggregate.any()  # the model is the same
            return 0.0
        taken = server.last(who)[0].double()
        if not known:
            assert taken.norm() <= server.config.max_norm * (1 + 1e-6)
            change, most = taken.norm(), server.config.max_norm
        else:
            change, most = (taken - last.double()).norm(), threshold * moved
            assert change <= most * (1 + 1e-6) + 1e-6
        if server.config.rule != "mean":
            return BOUNDS[server.config.rule](rows, aggregate)
        if client in HONEST:
            return 0.0
        seen = server.seen.clone()
        without = before[seen].sum(0) / seen.sum()  # as if it had repeated its last one, or zero
        assert (aggregate - without).norm() <= change / seen.sum() + 1e-5
        return float((aggregate - without).norm() / (most / seen.sum() + 1e-5))


def averaged_rows(server, client, update):
    """As rows_of, for a server that keeps no products of updates, and so no centre."""
    rows, takes_part = last_updates(server), server.seen.clone()
    rows[client], takes_part[client] = update.double(), True
    bad = torch.zeros_like(takes_part)
    bad[ATTACKERS] = True
    return Rows(rows[takes_part & ~bad], int((takes_part & bad).sum()), server.config, torch.zeros(D))


def last_updates(server):
    return server.state_dict()["last_updates"].double()


def upload_start(random):
    update = 10 ** (3 * torch.rand((), generator=random) - 1) * normal(random, D)
    choices = [update, update, None, torch.full_like(update, torch.nan)]
    return number(random, len(ATTACKERS)), number(random, 4), choices[number(random, 4)]


def uploads_start(random):
    return [upload_start(random) for _ in range(1 + number(random, 3))]


def uploads_change(uploads, size, random):
    uploads, place = list(uploads), number(random, len(uploads))
    who, lag, update = uploads[place]
    if number(random, 4) == 0 or update is None or update.isnan().any():
        uploads[place] = upload_start(random)
    elif number(random, 2):
        uploads[place] = who, lag, update * (size * normal(random)).clamp(-5, 5).exp()
    else:
        uploads[place] = who, lag, update + size * update.abs().mean() * normal(random, D)
    return uploads


@pytest.mark.parametrize("name", FLEETS)
def test_no_sequence_of_uploads_is_found_to_break_the_bound(name, random):
    """Through the filter: new, repeated and rejected updates, on old versions, of known clients and of a new one."""
    fleet = Fleet(random, **FLEETS[name])
    best = search(fleet.ratio, uploads_start, uploads_change, random, LONGER, 40)
    print(f"\nlargest ratio after uploads, {name}: {best:.4f}")
    assert (0.9 if name == "mean" else 0) <= best <= 1


def quantile(values, weights, least):
    """The smallest value that more than `least` of the weights lies at or below."""
    order = values.argsort()
    above = weights[order].cumsum(0) > least
    return float(values[order][above][0]) if above.any() else float("inf")


@pytest.mark.parametrize("alpha", [0.5, 0.8])
def test_the_threshold_stays_between_two_quantiles_of_the_honest_factors(alpha, random):
    """Shares (alpha - f/n) / (1 - f/n) and alpha / (1 - f/n), each client one share; the extremes are reached."""
    for case in range(200 * LONGER):
        n, room = 3 + number(random, 20), 4
        f = number(random, max(1, int((1 - alpha) * n))) if case % 4 else 0
        factors, recorded = torch.rand(n, room, dtype=torch.float64, generator=random) + 1, torch.full((n,), 100)
        honest = factors[f:].clone()
        # the client that is judged is honest: the factor that its next one replaces weighs nothing
        weights = torch.full_like(honest, 1 / room)
        weights[0, 0] = 0
        all_honest, client = float(weights.sum()), torch.tensor([f])
        share = f / (all_honest + f)
        tiny = 1e-6
        least = quantile(honest.flatten(), weights.flatten(), ((alpha - share) / (1 - share) - tiny) * all_honest)
        most = quantile(honest.flatten(), weights.flatten(), (alpha / (1 - share) + tiny) * all_honest)
        for attack, reached in ((0.0, least), (1e9, most), (None, None)):
            factors[:f] = 3 * torch.rand(f, room, dtype=torch.float64, generator=random) if attack is None else attack
            found = float(largest_accepted(factors, recorded, empty_counts(False), client, alpha))
            assert least <= found <= most
            assert reached is None or found == pytest.approx(reached) or abs(alpha * (all_honest + f) % 0.25) < 1e-6


@pytest.mark.parametrize(("spacing", "f"), [(3, 1), (5, 3), (N - 1, 3), (4, 0)])
def test_spacing_bounds_the_rounds_per_honest_upload(spacing, f, random):
    """Attackers who come whenever they may get (s + 1) / (s + 1 - f) rounds per honest one, and no more."""
    server, rounds = SecureAFL(torch.zeros(2), N, spacing=spacing, memory=0), []
    turns = [[*range(f)], [*range(f, N)]]
    for i in count():
        if len(rounds) >= 20 * (spacing + 1):
            break
        for client in [*turns[0], turns[1][i % (N - f)]]:
            before = server.version
            server.submit(client, torch.randn(2, generator=random), before)
            rounds += [client] * (server.version - before)
    honest = sum(client >= f for client in rounds)
    most = (spacing + 1) / (spacing + 1 - f)
    assert 0.9 * most <= len(rounds) / honest <= most * (1 + (spacing + 1) / len(rounds))


def test_a_quarter_of_the_clients_cannot_set_the_median_norm_by_uploading_often(random):
    """All others have been heard once. Attackers are past probation first, and half of those who are."""
    clients, attackers = 20, range(5)
    server = SecureAFL(torch.zeros(D), clients, rule="kinship", memory=0, lr=0.05)
    targets = torch.randn(clients, D, generator=random) + 1

    def honest():
        for client in range(len(attackers), clients):
            update = server.model - targets[client] + 0.1 * torch.randn(D, generator=random)
            rows = rows_of(server, [*attackers], client, update)
            aggregate, accepted = step_of(server, client, update, server.version)
            assert not accepted or BOUNDS["kinship"](rows, aggregate) <= 1

    honest()
    for i in range(6):
        for client in attackers:  # unlike each other, so no crowd; nobody else has a factor, so none is too steep
            update = torch.randn(D, generator=random)
            server.submit(client, update * (1e6 if i else 1) / update.norm(), server.version)
    for _ in range(5):
        honest()
