"""One run: rounds from evaluation to evaluation. On a GPU each round is a CUDA graph."""

import gc
import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import SecureAFL, attacks, defenses
from ..attacks import View
from . import metrics
from .federation import Federation, stream
from .optimizer import Adam
from .outcome import Outcome, Point, late_mean
from .settings import Resolved, Settings, variant_settings

log = logging.getLogger(__name__)

# Columns of the plan before the samples: client, row in `past` of the model trained on and of the next one, staleness,
# round.
HEAD = 5
CAPTURE_LOCK, STREAMS = threading.Lock(), threading.local()


class Stop(Protocol):
    """An event of threads or of processes."""

    def is_set(self) -> bool: ...
    def set(self) -> None: ...


class Rounds:
    """A federation, a defense, an attack, and the tables on the device that the rounds read.

    past: (delay + 1, d) the last models, version v in row v % rows
    plan: (stretch, 5 + B) int64: client, row of the model trained on, row for the next one, staleness, round, samples
    extra: (malicious rounds of the stretch, own - 1 + honest, B) int64: further samples for the attack
    A stretch is the rounds between two evaluations. The host decides only whether a round is honest or malicious, so
    one captured graph of a kind serves all its rounds.
    """

    def __init__(self, settings: Resolved):
        self.federation = federation = Federation(settings)
        self.settings, self.net, self.data = settings, federation.net, federation.data
        trusted = federation.trusted() if defenses.DEFENSES[settings.defense].needs_trusted else None
        make = partial(defenses.make, settings.defense, federation.start, settings.clients, settings.lr)
        options = defense_settings(settings, self.data.classes)
        # The old models are in `past`. A server that keeps none has two phases to capture instead of delay + 2.
        self.server = make(0, trusted, **options)
        if not self.server.capturable:  # its submit() takes a version, so it must keep the models
            del self.server  # before the next one is allocated: a history can be large
            self.server = make(settings.delay, trusted, **options)
        model = self.server.model
        self.adam = Adam(model, settings.lr, settings.decay) if settings.optimizer == "adam" else None
        if self.adam and isinstance(self.server, defenses.RuleServer):
            self.server.scaled_lr = self.adam.rate
        self.net.scale, self.net.clip = self.adam.scale if self.adam else None, settings.clip
        self.past = model.repeat(settings.delay + 1, 1)
        self.attack = attacks.make(settings.attack, federation.scene, **settings.attack_options)
        self.priors = federation.log_frequencies().to(settings.device) if settings.calibrate else None
        self.done = 0
        self.is_malicious = torch.isin(federation.arrivals.client, federation.malicious)  # (rounds)
        if order := getattr(self.attack, "order", None):
            federation.reorder(order)
        if uploads := getattr(self.attack, "uploads", None):
            federation.silence(uploads(federation.arrivals.client, self.is_malicious))
            self.is_malicious = torch.isin(federation.arrivals.client, federation.malicious)
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
        """Run the next `rounds` rounds, at most a stretch. Does not wait for the device."""
        part = slice(self.done, self.done + rounds)
        self._follow_schedule((self.done + rounds / 2) / self.settings.rounds)
        client, staleness = (table[part] for table in self.federation.arrivals[:2])
        kinds = self.is_malicious[part]
        now = torch.arange(self.done, self.done + rounds)
        version = now - staleness
        head = torch.stack([client, version % len(self.past), (now + 1) % len(self.past), staleness, now], 1)
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

    def _follow_schedule(self, progress: float) -> None:
        """Set the learning rate of the next stretch. progress: the share of the run that is done in its middle"""
        if self.settings.schedule == "constant":
            return
        rate = self.settings.lr * (1 + math.cos(math.pi * progress)) / 2
        if self.adam:  # it changes the server's steps, so the server's own rate stays
            self.adam.rate.fill_(rate)
        else:
            self.server.lr = rate

    def _extra(self, clients: Tensor) -> Tensor:
        """(rounds, own - 1 + honest, B): further samples for the attacks of these malicious clients (rounds)."""
        own = clients[:, None].expand(-1, self.attack.own - 1)
        honest = self.federation.some_honest(len(clients), self.attack.honest)
        return self.federation.draw(torch.cat([own, honest], 1), "extra")

    def round(self, malicious: bool, client: int = -1, version: int = -1) -> None:
        """One round: the row of the plan that `at` points to. Only a server that is not capturable needs the numbers
        of the client and the version on the host."""
        server, before, row = self.server, self.server.model, self.plan.index_select(0, self.at)[0]
        number, samples = row[:1], row[HEAD:]
        trained_on = self.past.index_select(0, row[1:2])[0]
        if malicious:
            view = self._view(row, trained_on)
            update = self.attack.update(view)
        else:
            update = self.net.gradient(self._calibrated(trained_on, number), *self.data.train(samples))
        if server.capturable:
            receipt = server.enqueue(number, update, trained_on, row[3].double())
        else:
            receipt = server.submit(client, update, version)
        if self.adam:
            self.adam.step(before, server.model)
        if malicious:
            self.attack.after(view, server.model)
        self.past.index_copy_(0, row[2:3], server.model[None])
        self.verdicts.index_copy_(0, self.at, receipt.accepted.reshape(1))
        self.at += 1

    def _calibrated(self, model: Tensor, client: Tensor) -> Tensor:
        """The model (d) with the logarithms of the client's label frequencies added to the biases of its last layer.

        Its gradient is that of the model under a loss in which the client's labels are as frequent as everyone's.
        """
        if self.priors is None:
            return model
        prior = self.priors.index_select(0, client)[0]  # (classes)
        return torch.cat([model[: -len(prior)], model[-len(prior) :] + prior])

    def _view(self, row: Tensor, trained_on: Tensor) -> View:
        """The attacker's view of the round in this row (HEAD + B) of the plan. Uses up one row of `extra`."""
        more = self.extra.index_select(0, self.extra_at)[0]
        self.extra_at += 1
        own = torch.cat([row[HEAD:][None], more[: self.attack.own - 1]])
        honest, server = more[self.attack.own - 1 :], self.server
        progress, lr = row[4].double() / self.settings.rounds, self.adam.rate if self.adam else server.lr
        return View(row[:1], trained_on, server.model, own, honest, server, row[3].double(), progress, lr)

    def evaluate(self) -> Point:
        model, trigger = self.server.model, self.attack.trigger
        error = metrics.error(self.net, self.data, model)
        return Point(self.done, error, metrics.success(self.net, self.data, model, trigger) if trigger else None)

    def left_out(self) -> Tensor | None:
        """(2, n) bool: clients that count, and those of them with almost no weight; None if there are no weights."""
        server: Any = self.server
        without = server.left_out() if hasattr(server, "left_out") else None
        return None if without is None else torch.stack([server.present, without])

    def estimation_error(self) -> float | None:
        """Relative error of the server's estimates against new gradients of the honest clients that it has seen."""
        server = self.server
        if not isinstance(server, SecureAFL):  # no other defense estimates
            return None
        known = self.federation.honest[server.seen.cpu()[self.federation.honest]]
        if len(known) == 0:
            return None
        x, y = self.data.train(self.federation.draw(known, "look").to(self.settings.device))
        gradients = self.net.gradients(server.model, x, y)
        return metrics.estimation(server.estimates()[known.to(self.settings.device)], gradients)


class Captured:
    """Rounds as CUDA graphs, one per kind (honest, malicious) and phase of the server. The first round of a kind runs
    eagerly, because libraries allocate on first use. The graphs of a run share one memory pool: they never overlap."""

    def __init__(self) -> None:
        self.graphs: dict[tuple[bool, int], torch.cuda.CUDAGraph] = {}
        self.rates: dict[tuple[bool, int], float] = {}  # the learning rate that a graph captured, and keeps
        self.warm: set[bool] = set()
        self.pool = torch.cuda.graph_pool_handle()

    def round(self, rounds: Rounds, malicious: bool) -> None:
        server = rounds.server
        key = malicious, server.phase()
        if malicious not in self.warm:
            self.warm.add(malicious)
            rounds.round(malicious)
            return
        if self.rates.get(key) == server.lr:
            server.version += 1
        else:
            self.graphs[key] = self._capture(rounds, malicious)  # increments the version, but runs nothing yet
            self.rates[key] = server.lr
        self.graphs[key].replay()

    def _capture(self, rounds: Rounds, malicious: bool) -> torch.cuda.CUDAGraph:
        """Like torch.cuda.graph, but without its garbage collection, which takes longer than the capture.

        Garbage collection is off during the capture: it could free an older graph, which is not allowed meanwhile.
        """
        graph = torch.cuda.CUDAGraph()
        with CAPTURE_LOCK:
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
    stop: Stop | None = None,
    look: "Callable[[Rounds, Point], None] | None" = None,
) -> Outcome:
    """One run. `watch` gets every evaluation, `look` also the rounds so far; a set `stop` ends the run before the next
    stretch."""
    resolved = settings.resolve()
    with side_stream(resolved.device), exact():
        return _run(resolved, watch or (lambda point: None), stop, look)


def _run(
    settings: Resolved,
    watch: Callable[[Point], None],
    stop: Stop | None,
    look: Callable[[Rounds, Point], None] | None,
) -> Outcome:
    began = time.perf_counter()
    rounds = Rounds(settings)
    curve: list[Point] = []
    errors: list[float | None] = []
    left_out: list[Tensor | None] = []
    spent, stretch = 0.0, len(rounds.plan)
    while rounds.done < settings.rounds:
        if stop is not None and stop.is_set():
            raise KeyboardInterrupt
        before = time.perf_counter()
        rounds.advance(min(stretch, settings.rounds - rounds.done))
        rounds.at.item()  # waits for the device
        spent += time.perf_counter() - before
        curve.append(rounds.evaluate())
        log.debug("%s under %s: %s", settings.defense, settings.attack, curve[-1])
        if 2 * rounds.done > settings.rounds:
            left_out.append(rounds.left_out())
        if settings.estimation_error:
            errors.append(rounds.estimation_error())
        if look is not None:
            look(rounds, curve[-1])
        watch(curve[-1])
    known = [error for error in errors if error is not None]
    summary: dict[str, Any] = {
        "error": curve[-1].error,
        "asr": curve[-1].asr,
        "late_error": late_mean(curve, settings.rounds, "error"),
        "late_asr": late_mean(curve, settings.rounds, "asr"),
        "worst_class_error": metrics.worst_class_error(rounds.net, rounds.data, rounds.server.model),
        "diverged": diverged(curve[-1].error, rounds.data.classes),
        **metrics.verdicts(rounds.accepted.cpu(), rounds.is_malicious),
        **metrics.left_out(left_out, torch.isin(torch.arange(settings.clients), rounds.federation.malicious)),
        "late": rounds.federation.arrivals.late,
        "estimation_error": sum(known) / len(known) if known else None,
        "rounds_per_second": settings.rounds / spent,
        "seconds": time.perf_counter() - began,
    }
    return Outcome(settings, curve, summary)


def defense_settings(settings: Resolved, classes: int) -> dict[str, object]:
    """The keyword arguments of the defense: settings of the run that it needs, then its own options."""
    malicious = round(settings.malicious * settings.clients)
    # These rules are defined for fewer than half of the clients.
    minority: dict[str, object] = {"malicious": min(malicious, (settings.clients - 1) // 2)}
    shared: dict[str, dict[str, object]] = {
        "kardam": {"malicious": malicious},
        "sageflow": {"classes": classes},
        # The share of uploads that malicious clients make, which fluctuates.
        "weighted": {"trim": min((settings.flood or settings.malicious) + 0.1, 0.49)},
        **dict.fromkeys(("dnc", "nnm-trimmed-mean", "nnm-geometric-median", "krum", "demoa"), minority),
    }
    ours = {name: getattr(settings, name) for name in variant_settings(settings.defense)}
    if settings.defense_options.get("sketch"):
        ours["sketch_seed"] = stream(settings, "sketch")  # otherwise a random one
    return {**ours, **shared.get(settings.defense, {}), **settings.defense_options}


def diverged(error: float, classes: int) -> bool:
    """Whether a classifier is no better than a constant answer, or the error of a regression is infinite."""
    return error >= 1 - 1 / classes - 1e-9 if classes else math.isinf(error)


def side_stream(device: str) -> AbstractContextManager[object]:
    """A CUDA stream of this thread's own: runs in parallel need one each, and the default stream cannot be captured.
    A thread keeps its stream, because torch has only a few and would hand out one twice."""
    if not device.startswith("cuda"):
        return nullcontext()
    if device not in vars(STREAMS):
        setattr(STREAMS, device, torch.cuda.Stream(device))
    return torch.cuda.stream(getattr(STREAMS, device))


def exact() -> AbstractContextManager[object]:
    """Deterministic float32 arithmetic: the same seed gives the same result."""
    return torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False)
