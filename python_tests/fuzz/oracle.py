"""One round of a server, told by the slow ones in NumPy from the server's own state before it."""

import warnings
from itertools import product

import numpy as np
import torch
from fuzz.cases import is_sound
from fuzz.dice import need
from slow_kinship import Twin
from slow_rows import TWINS, clipped, has_one_top_direction
from slow_server import SETTING_NAMES, SlowServer

from secureafl_ext.config import Config
from secureafl_ext.rules.row_rules import bucketed

LEAST, MOST = 1e-3, 1e3  # lengths between which float32 loses nothing that a comparison would see
NUDGES, OF_FACTORS = (1 - 1e-5, 1 + 1e-5), (1 - 1e-4, 1 + 1e-4)
warnings.filterwarnings(
    "ignore", "Mean of empty slice", RuntimeWarning
)  # where kinship keeps nobody: NaN, not compared


class SlowRows(SlowServer):
    """With a rule that weighs whole rows."""

    settled = True  # whether the server's iterations end where the definition does

    def combine(self, rows: np.ndarray) -> np.ndarray:
        c, draw = self.config, self.rounds
        if len(rows) == 0:
            return np.zeros_like(self.model)
        if not c.estimate:
            return rows[0]
        senders = self.senders
        rows = rows[np.argsort(senders)]
        if c.buckets > 1:
            mask = torch.from_numpy(np.isin(np.arange(self.clients), senders))
            deal = bucketed(mask, torch.tensor(draw), c.buckets)[:, mask].numpy()
            rows = deal[deal.any(1)] @ rows
        self.settled = c.rule != "spectral" or has_one_top_direction(rows)
        return TWINS[c.rule](rows, self.centre, c)

    def submit(self, client: int, update: np.ndarray, version: int) -> bool | None:
        self.client = client
        return super().submit(client, update, version)


class SlowKin(Twin):
    def __init__(self, slow: SlowServer, config: Config):
        self.slow, self.config = slow, config
        slow.combine = self.combine

    def combine(self, rows: np.ndarray) -> np.ndarray:
        if len(rows) == 0 or not self.config.estimate:
            return rows[0] if len(rows) else np.zeros_like(self.slow.model)
        return super().combine(rows)


class SlowSupport(SlowServer):
    """With the shifts that the server has."""

    def combine(self, rows: np.ndarray) -> np.ndarray:
        if len(rows) == 0 or not self.estimate:
            return rows[0] if len(rows) else np.zeros_like(self.model)
        weights = np.maximum(1 / len(rows) + self.shift[self.senders], 0)
        rows = weights[:, None] * clipped(rows, np.median(np.linalg.norm(rows, axis=1)))
        if self.step == "received":  # the last row, if it takes part
            return len(rows) * rows[-1] * self.taken
        return rows.sum(0)


class Before:
    """A server's state in float64, as the slow servers want it."""

    def __init__(self, config: Config, clients: int, state: dict[str, torch.Tensor | int]):
        self.config, self.clients, self.version = config, clients, state["version"]
        arrays = {name: value.double().numpy() for name, value in state.items() if isinstance(value, torch.Tensor)}
        self.arrays, self.seen = arrays, state["seen"].tolist()
        self.counts = state["pairs"].tolist()
        self.dw, self.dg = arrays["dw"], arrays["dg"]
        if config.history_dtype == "float16":
            m, oldest = config.memory, state["oldest"].numpy()
            slots = (oldest[:, None] + np.arange(m)) % m  # (n, m)
            self.dw = self.dw * np.take_along_axis(arrays["scales"][:, m:], slots, 1)[..., None]
            self.dg = self.dg * np.take_along_axis(arrays["scales"][:, :m], slots, 1)[..., None]

    def slow(self) -> SlowServer | SlowKin:
        c, a = self.config, self.arrays
        settings = {name: getattr(c, name) for name in SETTING_NAMES}
        settings["trim"] = c.trim if c.estimate else 0  # an update alone is not trimmed
        kind = {"kinship": SlowServer, "support": SlowSupport}.get(c.rule, SlowRows if c.row_wise else SlowServer)
        slow = kind(a["models"][0], self.clients, **settings)
        rows = len(a["models"])
        oldest = max(0, self.version - c.max_staleness)
        slow.models = [None] * oldest + [a["models"][v % rows] for v in range(oldest, self.version + 1)]
        for k in range(self.clients):
            if self.seen[k]:
                slow.last[k] = a["last_updates"][k], a["last_models"][k]
            slow.buffer[k] = [(self.dw[k, j], self.dg[k, j]) for j in range(self.counts[k])]
        slow.lists = self.lists()
        clock = slow.clock
        clock.epoch, clock.rounds, clock.applies = a["clock"].astype(int)
        clock.last = np.where(self.seen, a["last_epoch"], np.nan)
        clock.uploads, clock.recent, often = a["uploads"].T.astype(int)
        clock.often = often.tolist()
        clock.gone = a["last_epoch"] < 0
        if kind is SlowSupport:
            slow.shift = a["shift"]
        if kind is SlowRows:
            slow.config, slow.clients, slow.centre, slow.rounds = c, self.clients, a["centre"], int(a["rounds"])
        if c.rule != "kinship":
            return slow
        kin = SlowKin(slow, c)
        kin.means, kin.met, kin.centre = a["kinship"].copy(), a["met"].astype(int), a["kin_centre"].copy()
        return kin

    def lists(self) -> dict[object, list[float]]:
        """Of Q, the oldest factor first."""
        found, pooled = {}, self.config.factors == "pooled"
        room = self.arrays["factors"].shape[1]
        for k, (factors, recorded) in enumerate(zip(self.arrays["factors"], self.arrays["recorded"], strict=True)):
            count = int(recorded)
            if count:
                kept = factors[:count] if count <= room else np.roll(factors, -(count % room))
                found["all" if pooled else k] = kept.tolist()
        return found

    def rounding(self) -> float:
        """Of a direction: corrections from float32 products lose most."""
        if self.config.history_dtype == "float64":
            return 1e-6
        return 2e-3 if self.config.memory and self.config.trust else 1e-5

    def sound(self) -> bool:
        """Whether rounding stays small in every correction."""
        known = [k for k in range(self.clients) if self.seen[k]]
        return all(is_sound(self.dw[k, : self.counts[k]], self.dg[k, : self.counts[k]]) for k in known)

    def ordinary(self, update: np.ndarray) -> bool:
        if np.isfinite(update).all() and not LEAST < np.linalg.norm(update) < MOST:
            return False
        lengths = np.linalg.norm(self.arrays["last_updates"][self.seen], axis=1)
        steps = np.linalg.norm(self.dw, axis=2), np.linalg.norm(self.dg, axis=2)
        real = np.arange(self.dw.shape[1]) < np.array(self.counts)[:, None]
        fits = all(((one[real] > LEAST) & (one[real] < MOST)).all() for one in steps)
        return fits and ((lengths > LEAST) & (lengths < MOST)).all() and np.abs(self.arrays["models"]).max() < MOST


def told(before: Before, client: int, update: np.ndarray, version: int) -> tuple[bool, SlowServer]:
    slow = before.slow()
    with np.errstate(all="ignore"):
        accepted = slow.submit(client, update, version)
    return accepted, slow.slow if isinstance(slow, SlowKin) else slow


def compare(before: Before, client: int, update: np.ndarray, version: int, accepted: bool, after: Before) -> str:
    """What was compared; an error where the server and the slow one differ and rounding is no excuse."""
    if not before.ordinary(update):
        return "not compared"
    expected, slow = told(before, client, update, version)
    model = after.arrays["models"][after.version % len(after.arrays["models"])]
    size = (
        1 + np.abs(before.arrays["last_updates"]).max() + np.abs(np.nan_to_num(update)).max() + np.abs(slow.model).max()
    )
    bound = abs(before.config.lr) * before.rounding() * size + 1e-6 * size
    sound = before.sound() and np.isfinite(slow.model).all()
    try:
        need(accepted == expected, "verdict", accepted, "not", expected)
        need(not sound or np.abs(model - slow.model).max() <= bound, "model", model, "not", slow.model)
        if before.config.pairs == "received":
            _compare_client(client, after, slow, size)
    except AssertionError:
        if not getattr(slow, "settled", True) or tips(before, client, update, version, bound):
            return "on the edge"
        raise
    return "compared" if sound else "verdict compared"


def _compare_client(client: int, after: Before, slow: SlowServer, size: float) -> None:
    need(after.seen[client] == (client in slow.last), "seen", after.seen)
    if client not in slow.last:
        return
    for name, row in zip(("last_updates", "last_models"), slow.last[client], strict=True):
        need(np.abs(after.arrays[name][client] - row).max() <= 1e-4 * size, name, after.arrays[name][client], row)
    pairs = slow.buffer[client]
    need(after.counts[client] == len(pairs), "pairs", after.counts[client], len(pairs))
    for j, (s, y) in enumerate(pairs):
        for name, ours, theirs in (("dw", after.dw, s), ("dg", after.dg, y)):
            need(np.abs(ours[client, j] - theirs).max() <= 2e-3 * size, name, ours[client, j], theirs)
    ours = after.lists()
    need(ours.keys() == slow.lists.keys(), "lists", ours, slow.lists)
    for key, factors in slow.lists.items():
        same = len(factors) == len(ours[key]) and np.allclose(ours[key], factors, rtol=1e-3, atol=1e-6)
        need(same, "factors", ours[key], factors)


def tips(before: Before, client: int, update: np.ndarray, version: int, bound: float) -> bool:
    """Whether a change as small as rounding changes what the oracle says by more than it changes itself."""
    random = np.random.default_rng(0)
    first, slow = told(before, client, update, version)
    names = ("last_updates", "last_models", "kinship", "kin_centre", "factors")
    kept = {name: before.arrays[name] for name in names if name in before.arrays}
    try:
        for scale, of_factors in product(NUDGES, OF_FACTORS):
            for name, values in kept.items():
                noise = 1e-6 * random.standard_normal(values.shape)
                before.arrays[name] = values * (1 + (noise + noise.T if name == "kinship" else noise))
            before.arrays["factors"] = kept["factors"] * of_factors
            accepted, other = told(before, client, update * scale, version)
            moved = np.abs(other.model - slow.model).max()
            if accepted != first or not moved <= max(bound / 4, 1e-12) or _pairs(other) != _pairs(slow):
                return True
    finally:
        before.arrays.update(kept)
    return False


def _pairs(slow: SlowServer) -> list[int]:
    return [len(pairs) for pairs in slow.buffer.values()]
