"""Live: shows a run of the simulator on the live page. It is updated after every evaluation; rounds cost no more."""

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import SecureAFL
from ..operate import Look, Verdict, View, look, serve
from .loop import Rounds
from .outcome import Point


class Live:
    """The page of one run. Give `look` to `loop.run`."""

    def __init__(self, title: str, port: int = 0):
        self.view = View(title)
        self._done, self._at = 0, time.time()
        self._heat: tuple[list[int], np.ndarray] | None = None
        self.page = serve(self.view, self, port=port)

    def __enter__(self) -> "Live":
        return self

    def __exit__(self, *_: object) -> None:
        self.page.close()

    def look(self, rounds: Rounds, point: Point) -> None:
        """Show the uploads since the last evaluation, spread evenly over that time, and the state of all clients."""
        now, part = time.time(), slice(self._done, rounds.done)
        client, staleness = (table[part].tolist() for table in rounds.federation.arrivals[:2])
        accepted, malicious = rounds.accepted[part].tolist(), rounds.is_malicious[part].tolist()
        times = np.linspace(self._at, now, len(client) + 1)[1:].tolist()
        self.view.verdicts(
            [
                Verdict(
                    at=times[i],
                    kind="accepted" if accepted[i] else "rejected",
                    client=client[i],
                    who="malicious" if malicious[i] else "honest",
                    version=self._done + i + 1,
                    staleness=staleness[i],
                )
                for i in range(len(client))
            ]
        )
        self._done, self._at = rounds.done, now
        found = look_at(rounds.server, now)
        if found is not None:
            self.view.look(found)
        self.view.evaluated(now, rounds.done, point.error)
        self._heat = heat_map(rounds.server, self.view.suspects())

    def similarity(self, clients: Sequence[int]) -> np.ndarray | None:
        """As of the last evaluation: only the thread of the run uses the device."""
        if self._heat is None:
            return None
        known, cosines = self._heat
        place = {client: i for i, client in enumerate(known)}
        index = np.array([place.get(client, -1) for client in clients])
        return np.where((index[:, None] < 0) | (index < 0), np.nan, cosines[np.ix_(index, index)])


def look_at(server: Any, now: float) -> Look | None:
    """The state of all clients; None for a defense that has no weights."""
    if isinstance(server, SecureAFL):
        return look.look_at(server)
    without, weights = server.left_out(), server.weights()
    if without is None:
        return None
    present = server.present.cpu().numpy()
    masks = {"seen": present, "live": present, "present": present, "left_out": without.cpu().numpy()}
    return Look(now, server.version, {}, **masks, weights=weights.cpu().numpy(), threshold=math.inf)


def heat_map(server: Any, clients: list[int]) -> tuple[list[int], np.ndarray] | None:
    """(clients, (k, k) cosines of their mean updates); None if the server keeps no similarities."""
    if not isinstance(server, SecureAFL) or not clients:
        return None
    cosines = look.similarity(server, clients)
    return None if cosines is None else (clients, cosines)
