"""A server at work for long: does a round stay as fast, does memory stay flat, do the carried products stay right?

    python bench/soak.py --rounds 1000000                                   # median, then kinship, on small sizes
    python bench/soak.py --device cuda --clients 300 --size 140000 --seconds 600 --rule kinship
    python bench/soak.py --rounds 10000000 --settings factors=pooled        # Q keeps all factors
    python bench/soak.py --rounds 100000 --settings memory=5 history_dtype=float16

Honest clients with quadratic losses upload noisy gradients of models up to max_staleness rounds old. One of them falls
silent before the first window: what is carried of it is never taken afresh, the worst case for drift. Rounds are timed
in windows, and the host waits for the device once at the end of each. A window that another process disturbed is no
sign of a slow server, so the best of several counts. At the end the old server and a new one take turns. Ends with 1
if a bound below is broken.
"""

import argparse
import ast
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from report import SEED, head
from torch import Tensor

from secureafl_ext import SecureAFL
from secureafl_ext.engines.fused import Fused

WINDOWS = 200
LOOKS = 20  # windows between two looks at what is carried
FILLED = 64  # rounds per client before the first window: Q, pairs and meetings are then filled
SHORT, TURNS = 50, 20  # rounds of a turn at the end, and turns of each server
MOST_GROWTH, MOST_SLOWDOWN, MOST_AGING = 0.01, 0.1, 0.05
# Largest error of a carried inner product, in products of the two norms. Fused rounds add float32 products of every
# step to it until the client uploads again; kinship takes it once, in float64.
MOST_DRIFT = {"fused": 1e-4, "rows": 1e-6}
DEFAULTS = {"median": {}, "kinship": {"memory": 0}}


@dataclass
class Soaked:
    """What one run gave. Times are of the best of several windows, in us a round; memory is in MiB."""

    settings: dict
    rounds: int
    accepted: int
    new_us: float  # of a new server at the end
    old_us: float  # of the old one, in turns with it
    first_us: float
    middle_us: float
    last_us: float
    resident: tuple[float, float]  # early, late
    device: tuple[float, float]  # what torch has allocated on the GPU
    drift: tuple[float, float]  # largest of the first and of the second half
    drift_bound: float
    finite: bool

    def failures(self) -> list[str]:
        found = []
        for name, (early, late) in (("resident memory", self.resident), ("device memory", self.device)):
            if late > early * (1 + MOST_GROWTH):
                found.append(f"{name} grew from {early:.1f} to {late:.1f} MiB, more than {MOST_GROWTH:.0%}")
        if self.last_us > self.first_us * (1 + MOST_SLOWDOWN):
            found.append(
                f"a round took {self.first_us:.1f} us, then {self.last_us:.1f}: {MOST_SLOWDOWN:.0%} slower or more"
            )
        if self.old_us > self.new_us * (1 + MOST_AGING):
            found.append(
                f"a round of the new server took {self.new_us:.1f} us, of the old one {self.old_us:.1f}: "
                f"more than {MOST_AGING:.0%} slower"
            )
        if not max(self.drift) <= self.drift_bound:
            found.append(f"a carried product is off by {max(self.drift):.1e}, more than {self.drift_bound:.0e}")
        return found if self.finite else [*found, "the model is not finite"]


class Fleet:
    """A server, and honest clients for it."""

    def __init__(self, clients: int, size: int, device: str, settings: dict):
        draw = torch.Generator(device).manual_seed(SEED)
        self.targets = torch.randn(clients, size, device=device, generator=draw)
        self.noise = 0.3 * torch.randn(61, size, device=device, generator=draw)
        self.server = SecureAFL(torch.zeros(size, device=device), clients, **{"lr": 0.05, **settings})
        self.random, self.active = random.Random(SEED), clients

    def rounds(self, count: int) -> float:
        """Seconds for so many rounds."""
        server, draw, staleness = self.server, self.random.randrange, self.server.config.max_staleness
        start = self._now()
        for _ in range(count):
            client = draw(self.active)
            version = server.version - draw(min(staleness, server.version) + 1)
            update = server.model_at(version) - self.targets[client]
            server.submit(client, update.add_(self.noise[draw(len(self.noise))]), version)
        return self._now() - start

    def _now(self) -> float:
        if self.targets.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def memory(self) -> tuple[float, float]:
        """MiB in use by the process, and by torch on the GPU."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        on_gpu = torch.cuda.memory_allocated() if self.targets.is_cuda else 0
        return pages * 4096 / 2**20, on_gpu / 2**20


def drift(server: SecureAFL) -> float:
    """The largest error of a carried inner product, over the product of the norms; 0 where nothing is carried."""
    engine = server._engine
    if isinstance(engine, Fused):
        return _drift_of_fused(engine, server.model)
    corrected = server.config.memory > 0 and server.config.trust > 0
    if not engine.rows or corrected:  # taken anew in every round
        return 0.0
    rows = engine.history.last_updates
    fresh = sum(part.double() @ part.double().T for part in rows.split(2**14, 1))
    return _relative(engine.rows.products - fresh, fresh.diagonal().sqrt()[:, None] * fresh.diagonal().sqrt())


def _drift_of_fused(engine: Fused, model: Tensor) -> float:
    engine._settle()  # a GPU may have left the end of the last round
    carried = [tensor.clone() for tensor in (engine.gram, engine.along)]
    engine._take_products(model)
    fresh = [tensor.clone() for tensor in (engine.gram, engine.along)]
    for tensor, before in zip((engine.gram, engine.along), carried, strict=True):
        tensor.copy_(before)
    planes = 2 * engine.config.memory
    rows, columns = torch.tril_indices(planes, planes, device=engine.gram.device)
    lengths = fresh[0][:, rows == columns].sqrt()  # (n, 2m): of the slots
    x, g = fresh[1][:, planes].sqrt(), fresh[1][:, planes + 1].sqrt()
    of_along = torch.cat([lengths * x[:, None], (x * x)[:, None], (g * g)[:, None]], 1)
    of_gram = lengths[:, rows] * lengths[:, columns]
    return max(_relative(a - b, size) for a, b, size in zip(carried, fresh, (of_gram, of_along), strict=True))


def _relative(error: Tensor, size: Tensor) -> float:
    return float((error.abs() / size.clamp(min=1e-30)).nan_to_num(nan=torch.inf).max())


def in_turns(*fleets: Fleet) -> Iterator[tuple[float, ...]]:
    """Seconds of every turn of every fleet."""
    return zip(*[[fleet.rounds(SHORT) for fleet in fleets] for _ in range(TURNS)], strict=True)


def soak(clients: int, size: int, device: str, rounds: int | None, seconds: float, settings: dict) -> Soaked:
    fleet = Fleet(clients, size, device, settings)
    filled = FILLED * clients
    each = fleet.rounds(filled) / filled
    fleet.active = max(1, clients - 1)
    drift(fleet.server)  # once before memory is looked at: it needs some of its own
    window = max(1, round(rounds / WINDOWS if rounds else seconds / WINDOWS / each))
    windows = -(-rounds // window) if rounds else sys.maxsize
    times, memory, drifts, finite, end = [], [], [], True, time.monotonic() + seconds
    while len(times) < windows and (rounds or time.monotonic() < end):
        times.append(1e6 * fleet.rounds(window) / window)
        memory.append(fleet.memory())
        if len(times) % LOOKS == 0:
            drifts.append(drift(fleet.server))
            finite &= bool(fleet.server.model.isfinite().all())
    drifts.append(drift(fleet.server))
    finite &= bool(fleet.server.model.isfinite().all())

    new = Fleet(clients, size, device, settings)
    new.rounds(filled)
    new_us, old_us = (1e6 * min(turns) / SHORT for turns in in_turns(new, fleet))
    several, middle, half = max(1, len(times) // 10), len(times) // 2, (len(drifts) + 1) // 2
    early, late = (
        [max(column) for column in zip(*part, strict=True)] for part in (memory[:several], memory[-several:])
    )
    return Soaked(
        settings=settings,
        rounds=window * len(times),
        accepted=fleet.server.stats()["accepted"],
        new_us=new_us,
        old_us=old_us,
        first_us=min(times[:several]),
        middle_us=min(times[middle - several // 2 : middle + several // 2 + 1]),
        last_us=min(times[-several:]),
        resident=(early[0], late[0]),
        device=(early[1], late[1]),
        drift=(max(drifts[:half]), max(drifts[half:] or drifts)),
        drift_bound=MOST_DRIFT["fused" if isinstance(fleet.server._engine, Fused) else "rows"],
        finite=finite,
    )


def summary(run: Soaked) -> str:
    return (
        f"{run.settings or 'default settings'}: {run.rounds:,} rounds, {run.accepted:,} accepted; us a round: new "
        f"{run.new_us:.1f}, old {run.old_us:.1f}; first {run.first_us:.1f}, middle {run.middle_us:.1f}, last "
        f"{run.last_us:.1f}; resident MiB {run.resident[0]:.1f} "
        f"-> {run.resident[1]:.1f}; device MiB {run.device[0]:.1f} -> {run.device[1]:.1f}; drift {run.drift[0]:.1e}, "
        f"then {run.drift[1]:.1e} (at most {run.drift_bound:.0e}); {'finite' if run.finite else 'NOT finite'}"
    )


def parsed(words: list[str]) -> dict:
    """name=value, the value as Python writes it, or a plain word."""
    settings = {}
    for word in words:
        name, given, value = word.partition("=")
        if not given:
            raise SystemExit(f"soak.py: --settings must be name=value, got {word!r}")
        try:
            settings[name] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            settings[name] = getattr(torch, value) if name == "history_dtype" else value
    return settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--size", type=int, default=1000, help="parameters of the model (default: 1000)")
    how_long = parser.add_mutually_exclusive_group(required=True)
    how_long.add_argument("--rounds", type=int, help="of each run")
    how_long.add_argument("--seconds", type=float, default=0.0, help="of each run")
    parser.add_argument("--rule", choices=list(DEFAULTS), help="default: first median, then kinship without memory")
    parser.add_argument("--settings", nargs="*", default=[], metavar="NAME=VALUE", help="of the server, for one run")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()

    settings = parsed(options.settings)
    rules = [options.rule or "median"] if options.rule or settings else list(DEFAULTS)
    print(head("Soak", options.device), flush=True)
    runs = []
    for rule in rules:
        own = {**({"rule": rule} if rule != "median" else {}), **DEFAULTS[rule], **settings}
        run = soak(options.clients, options.size, options.device, options.rounds, options.seconds, own)
        print(summary(run), flush=True)
        runs.append(run)
    if options.out:
        found = [{**asdict(run), "settings": {k: str(v) for k, v in run.settings.items()}} for run in runs]
        options.out.write_text(json.dumps({"head": head("Soak", options.device), "runs": found}, indent=1) + "\n")
    failures = [failure for run in runs for failure in run.failures()]
    for failure in failures:
        print(f"FAILED: {failure}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
