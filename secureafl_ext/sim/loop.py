"""One run: rounds in stretches from evaluation to evaluation; on a GPU each round is a CUDA graph."""

import gc
import math
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .. import attacks, defenses
from ..attacks import View
from . import metrics
from .federation import Federation
from .settings import Settings

HEAD = 4  # columns of a plan's row before the samples: client, row of the model trained on and of the next, staleness
CAPTURING, STREAMS = threading.Lock(), threading.local()


@dataclass(frozen=True)
class Point:
    """One evaluation."""

    round: int
    error: float  # share of wrong classes, or root mean squared error; inf where a regression has diverged
    asr: float | None  # how often a backdoor opens; None without one


@dataclass(frozen=True)
class Outcome:
    settings: Settings  # resolved
    curve: list[Point]
    summary: dict[str, float | int | bool | None]


class Rounds:
    """A federation, a defense and an attack, and the tables on the device that one round after the other reads.

    past: (delay + 1, d) the last models, version v in row v % rows
    plan: (stretch, 4 + B) int64: client, row of the model trained on, row for the next one, staleness, samples
    extra: (malicious rounds of the stretch, own - 1 + honest, B) int64: what else an attack asks for
    Nothing of a round is decided on the host but its kind, honest or malicious, so that a captured one serves for all.
    """

    def __init__(self, settings: Settings):
        self.federation = federation = Federation(settings)
        self.settings, self.net, self.data = settings, federation.net, federation.data
        trusted = federation.trusted() if defenses.DEFENSES[settings.defense].needs_trusted else None
        make = partial(defenses.make, settings.defense, federation.start, settings.clients, settings.lr)
        options = defense_settings(settings, self.data.classes)
        # With models kept here the server needs no old ones, and a round has two phases to capture, not one for each.
        self.server = make(0, trusted, **options)
        if not self.server.capturable:  # asked by version, it does
            del self.server  # before the other one is there: a history can be large
            self.server = make(settings.delay, trusted, **options)
        self.server.reserve(settings.rounds)
        self.past = self.server.model.repeat(settings.delay + 1, 1)
        self.attack = attacks.make(settings.attack, federation.scene, **settings.attack_options)
        self.done = 0
        self.is_malicious = torch.isin(federation.arrivals.client, federation.malicious)  # (rounds)
        stretch = -(-settings.rounds // settings.evaluations)
        most = max((int(part.sum()) for part in self.is_malicious.split(stretch)), default=0)
        batches = self.attack.own - 1 + self.attack.honest

        def table(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=settings.device)

        self.plan = table(stretch, HEAD + settings.batch)
        self.extra = table(most, batches, settings.batch)
        self.accepted = table(settings.rounds, dtype=torch.bool)
        self.verdicts = table(stretch, dtype=torch.bool)  # of this stretch
        self.at, self.extra_at = table(1), table(1)
        self.captured = Captured() if settings.device.startswith("cuda") and self.server.capturable else None

    def advance(self, rounds: int) -> None:
        """The next so many rounds, a stretch at most. Does not wait for the device."""
        part = slice(self.done, self.done + rounds)
        client, staleness = (table[part] for table in self.federation.arrivals[:2])
        kinds = self.is_malicious[part]
        now = torch.arange(self.done, self.done + rounds)
        version = now - staleness
        head = torch.stack([client, version % len(self.past), (now + 1) % len(self.past), staleness], 1)
        self.plan[:rounds].copy_(torch.cat([head, self.federation.draw(client, "samples")], 1))
        self.extra[: int(kinds.sum())].copy_(self._extra(client[kinds]))
        self.at.zero_()
        self.extra_at.zero_()
        for i, malicious in enumerate(kinds.tolist()):
            if malicious:
                self.attack.before()
            if self.captured:
                self.captured.round(self, malicious)
            else:
                self.round(malicious, int(client[i]), int(version[i]))
        self.accepted[part] = self.verdicts[:rounds]
        self.done += rounds

    def _extra(self, clients: Tensor) -> Tensor:
        """Samples for the attacks of these malicious clients (rounds), in the order in which they come."""
        own = clients[:, None].expand(-1, self.attack.own - 1)
        honest = self.federation.some_honest(len(clients), self.attack.honest)
        return self.federation.draw(torch.cat([own, honest], 1), "extra")

    def round(self, malicious: bool, client: int | None = None, version: int | None = None) -> None:
        """One round: the row of the plan that `at` points to. Without numbers for the host it can be captured."""
        server, row = self.server, self.plan.index_select(0, self.at)[0]
        who, samples = row[:1], row[HEAD:]
        trained_on = self.past.index_select(0, row[1:2])[0]
        if malicious:
            view = self._view(row, trained_on)
            update = self.attack.update(view)
        else:
            update = self.net.gradient(trained_on, *self.data.train(samples))
        if server.capturable:
            receipt = server.enqueue(who, update, trained_on, row[3].double())
        else:
            receipt = server.submit(client, update, version)
        if malicious:
            self.attack.after(view, server.model)
        self.past.index_copy_(0, row[2:3], server.model[None])
        self.verdicts.index_copy_(0, self.at, receipt.accepted.reshape(1))
        self.at += 1

    def _view(self, row: Tensor, trained_on: Tensor) -> View:
        more = self.extra.index_select(0, self.extra_at)[0]
        self.extra_at += 1
        own = torch.cat([row[HEAD:][None], more[: self.attack.own - 1]])
        honest, server = more[self.attack.own - 1 :], self.server
        return View(row[:1], trained_on, server.model, own, honest, server, row[3].double())

    def evaluate(self) -> Point:
        model, trigger = self.server.model, self.attack.trigger
        error = metrics.error(self.net, self.data, model)
        return Point(self.done, error, metrics.success(self.net, self.data, model, trigger) if trigger else None)

    def estimation_error(self) -> float | None:
        """How far the server's estimates of the honest clients it knows are from gradients of theirs, now."""
        known = self.federation.honest[self.server.seen.cpu()[self.federation.honest]]
        if len(known) == 0:
            return None
        x, y = self.data.train(self.federation.draw(known, "look").to(self.settings.device))
        return metrics.estimation(
            self.server.estimates()[known.to(self.settings.device)], self.net.gradients(self.server.model, x, y)
        )


class Captured:
    """Rounds as CUDA graphs, one for each kind and phase of the server; the first of a kind runs as it is, for what
    libraries set up on first use. All of one run share their memory: they are replayed one after the other."""

    def __init__(self):
        self.graphs, self.warm = {}, set()
        self.pool = torch.cuda.graph_pool_handle()

    def round(self, rounds: Rounds, malicious: bool) -> None:
        server = rounds.server
        key = malicious, server.phase()
        if malicious not in self.warm:
            self.warm.add(malicious)
            rounds.round(malicious)
            return
        if key in self.graphs:
            server.version += 1
        else:
            self.graphs[key] = self._capture(rounds, malicious)  # which counts the version on, but runs nothing yet
        self.graphs[key].replay()

    def _capture(self, rounds: Rounds, malicious: bool) -> torch.cuda.CUDAGraph:
        """Without what torch.cuda.graph does around it: to collect garbage each time would take longer than the rest.

        But none may be collected meanwhile: a graph of an earlier run must not be freed while this thread captures.
        """
        graph = torch.cuda.CUDAGraph()
        with CAPTURING:
            collects = gc.isenabled()
            gc.disable()
            graph.capture_begin(self.pool, capture_error_mode="thread_local")
            try:
                rounds.round(malicious)
            finally:
                graph.capture_end()
                if collects:
                    gc.enable()
        return graph


def run(
    settings: Settings,
    watch: Callable[[Point], None] | None = None,
    stop: threading.Event | None = None,
) -> Outcome:
    """One run from its first round to its last; `watch` sees every evaluation, `stop` ends it before the next."""
    settings = settings.resolve()
    with side_stream(settings.device), exact():
        return _run(settings, watch, stop)


def _run(settings: Settings, watch: Callable[[Point], None] | None, stop: threading.Event | None) -> Outcome:
    began = time.perf_counter()
    rounds, curve, errors, spent = Rounds(settings), [], [], 0.0
    stretch = len(rounds.plan)
    while rounds.done < settings.rounds:
        if stop is not None and stop.is_set():
            raise KeyboardInterrupt
        before = time.perf_counter()
        rounds.advance(min(stretch, settings.rounds - rounds.done))
        rounds.at.item()  # waits
        spent += time.perf_counter() - before
        curve.append(rounds.evaluate())
        if settings.estimation_error and hasattr(rounds.server, "estimates"):
            errors.append(rounds.estimation_error())
        if watch is not None:
            watch(curve[-1])
    known = [error for error in errors if error is not None]
    summary = {
        "error": curve[-1].error,
        "asr": curve[-1].asr,
        "diverged": diverged(curve[-1].error, rounds.data.classes),
        **metrics.verdicts(rounds.accepted.cpu(), rounds.is_malicious),
        "late": rounds.federation.arrivals.late,
        "estimation_error": sum(known) / len(known) if known else None,
        "rounds_per_second": settings.rounds / spent,
        "seconds": time.perf_counter() - began,
    }
    return Outcome(settings, curve, summary)


def defense_settings(settings: Settings, classes: int) -> dict[str, object]:
    """What a defense is set to: what it shares with the run, then its own options."""
    shared = {
        "kardam": {"malicious": round(settings.malicious * settings.clients)},
        "sageflow": {"classes": classes},
    }
    takes = defenses.DEFENSES[settings.defense].settings  # a variant may have fixed one
    ours = {name: getattr(settings, name) for name in ("quantile", "memory", "max_norm", "trust") if name in takes}
    common = ours if settings.defense.startswith("secureafl") else shared.get(settings.defense, {})
    return {**common, **settings.defense_options}


def diverged(error: float, classes: int) -> bool:
    """No better than one answer to all questions; a regression: infinitely wrong."""
    return error >= 1 - 1 / classes - 1e-9 if classes else math.isinf(error)


def side_stream(device: str):
    """Runs side by side need a stream each, and the default one cannot be captured. A thread keeps its own: torch hands
    out the same few again and again."""
    if not device.startswith("cuda"):
        return nullcontext()
    if device not in vars(STREAMS):
        setattr(STREAMS, device, torch.cuda.Stream(device))
    return torch.cuda.stream(getattr(STREAMS, device))


def exact():
    """The same sums in the same order, in float32, from every library: one seed, one result."""
    return torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False)
