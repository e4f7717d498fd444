"""A fleet of clients in six groups with different data; some of them are malicious and push the same way."""

import torch
from states import identical

from secureafl_ext import SecureAFL


class Fleet:
    """Client c is of group c % 6; the first `malicious` clients push, after `honest` rounds of the fleet. decoys: after
    each push the same client sends so many random vectors, and only then another malicious one uploads."""

    def __init__(self, clients, size, malicious=0, seed=0, decoys=0, honest=0):
        self.random = torch.Generator().manual_seed(seed)
        self.clients, self.size, self.malicious, self.decoys = clients, size, malicious, decoys
        self.honest = honest  # rounds that are left of these
        self.groups, self.push = self.noise(6), self.noise(1)[0]
        self.turn, self.pusher = 0, 0  # malicious uploads so far, and whose turn it is

    def noise(self, rows):
        return torch.randn(rows, self.size, generator=self.random) / self.size**0.5

    def upload(self, client):
        self.honest -= 1
        if client < self.malicious and self.honest < 0:
            return 0.3 * self.noise(1)[0] - 1.0 * self.push
        return 0.7 * self.groups[client % 6] + self.noise(1)[0]

    def rounds(self, count, *servers):
        """The same uploads for all servers, on the newest version."""
        for _ in range(count):
            client = int(torch.randint(self.clients, (1,), generator=self.random))
            update = self.upload(client)
            if self.decoys and client < self.malicious:
                harmful = self.turn % (self.decoys + 1) == 0
                self.turn, self.pusher = self.turn + 1, client if harmful else self.pusher
                client, update = self.pusher, update if harmful else self.noise(1)[0]
            yield client, [server.submit(client, update.to(server.model), server.version) for server in servers]


def resumes_bit_for_bit(server, fleet, path):
    """A server that was saved and loaded goes on as the one that it was saved from."""
    n, device = fleet.clients, server.model.device
    for _ in fleet.rounds(3 * n + 7, server):
        pass
    server.save(path)
    again = SecureAFL.load(path, device=device)
    for _, (a, b) in fleet.rounds(4 * n, server, again):
        assert a.reason == b.reason and torch.equal(a.weight, b.weight)
    assert torch.equal(server.model, again.model)
    identical(server, again)
