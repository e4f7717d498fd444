"""A random state of a server's engine and one arrival; the oracle is the composed round in float64."""

import math

import numpy as np
import torch
from fuzz.cases import TRUSTS, past
from fuzz.dice import OPS, Dice, cast, need
from torch import Tensor

from secureafl_ext.config import Config
from secureafl_ext.engines import row_rules, support
from secureafl_ext.engines.base import Outcome
from secureafl_ext.engines.composed import Composed
from secureafl_ext.engines.fused import Fused, padded
from secureafl_ext.engines.fused_rows import FusedRows
from secureafl_ext.engines.kinship import BOUNDS, FusedKinship
from secureafl_ext.engines.presence import settings_of as of_presence
from secureafl_ext.engines.quantile import split_factors
from secureafl_ext.engines.row_rules import FusedRowRules
from secureafl_ext.engines.row_wise import refresh_rounds
from secureafl_ext.engines.support import FusedSupport
from secureafl_ext.rules.similarity import SPAN
from secureafl_ext.rules.support import STAGES

PER_CLIENT = ("scales", "gram", "along", "factors", "status", "pairs", "oldest", "seen")
SETTINGS = ("lr", "quantile", "max_norm", "trust", "rule", "trim", "filter", "estimate", "receive")
BOUND_NAMES = ("span", "known", "kin", "crowd", "turned", "least", "least_sum", "least_apart", "near")
SUPPORT_NAMES = (
    "cut", "crowd", "crowd_least", "odd", "odd_least", "kin", "short_square", "few_kin", "short_level", "fade", "again",
    "most", "group", "group_spreads", "group_least", "group_end", "group_left", "opposed", "opposed_end", "fill",
    "apart", "apart_end",
)  # fmt: skip
AVERAGED = {"kinship": FusedKinship, "support": FusedSupport}  # rules
ROW_OPS = {"kin_step_": ("kinship",), "support_step_": ("support",), "row_step_": row_rules.RULES}


def settings_of(dice: Dice, n: int, rule: str | None) -> Config:
    kin, rule = rule is not None, rule or dice.choice(("median", "trimmed_mean", "mean"))
    hold = dice.chance(0.6)
    estimate = kin or dice.chance(0.9)
    receive = not estimate or dice.chance(0.8)
    return Config(
        rule=rule,
        step=dice.choice(("all", "received")) if rule in AVERAGED and receive else "all",
        trim=dice.randrange((n + 1) // 2) if rule == "trimmed_mean" else 0,
        memory=0 if kin else dice.choice((0, 1, 1, 2, 3, 5)),
        lr=dice.choice((0.1, 1.0, -0.5, 0.0)),
        quantile=dice.choice((0.0, 0.25, 0.5, 0.8, 1.0)),
        max_norm=dice.choice((0.5, 50.0, math.inf)),
        trust=dice.choice(TRUSTS),
        on_reject="hold" if hold else "step",
        store="accepted" if hold else dice.choice(("all", "accepted")),
        factors=dice.choice(("per_client", "pooled")),
        window=dice.choice((1, 2, 5, 40, None)),
        expiry=dice.choice((None, 1, 3, 12)),
        probation=dice.choice((0, 0, 1, 3)),
        quorum=dice.choice((0.0, 0.0, 0.5, 1.0)) if kin else 0.0,
        remove=dice.choice((0.0, 0.25, 0.6)),
        radius=dice.choice((None, 0.3, math.inf)),
        iterations=dice.choice((1, 2, 5)),
        filter=dice.chance(0.8),
        estimate=estimate,
        receive=receive,
    )


def books(dice: Dice, lists: int, config: Config) -> dict[str, Tensor]:
    """Q and the counts."""
    room = config.room
    recorded = dice.numbers.integers(0, 2 * room + 1, lists)
    places = 2 * room if config.keeps_all else room
    factors = np.where(np.arange(places) < recorded[:, None], np.exp(dice.normal(lists, places)), np.inf)
    counts = torch.from_numpy(dice.numbers.integers(0, 100, 5))
    state = {"factors": torch.from_numpy(factors), "recorded": torch.from_numpy(recorded), "counts": counts}
    if config.keeps_all:
        state["factors"], state["factor_counts"] = split_factors(state["factors"], room)
    return state


def presence(dice: Dice, n: int, seen: Tensor) -> dict[str, Tensor]:
    """The clock, and uploads of clients that are live, expired, on probation or gone."""
    epoch = dice.randrange(20)
    last = torch.from_numpy(dice.numbers.integers(-1, epoch + 1, n))
    uploads = torch.from_numpy(dice.numbers.integers(0, (9, 9, 9_000), (n, 3)))
    clock = torch.tensor([epoch, dice.randrange(40), dice.randrange(2)])
    return {"clock": clock, "last_epoch": last * seen, "uploads": uploads * seen[:, None]}


class Scene:
    """One state, one arrival, and the engine of a server that holds the state; its oracle has the same in float64."""

    def __init__(self, dice: Dice, device: str, rule: str | None):
        """rule: a row-wise one, or none for a round of a coordinate-wise rule"""
        n, d = dice.choice((1, 2, 3, 4, 6, 9)), dice.choice((0, 1, 2, 5, 8, 33, 65, 130))
        self.config = c = settings_of(dice, n, rule)
        kin = rule is not None
        self.device, self.kin, self.half = torch.device(device), kin, c.memory > 0 and dice.chance(0.3)
        n = n if kin else padded(n, c, self.device)
        self.n, self.m, self.d = n, c.memory, d
        drawn = past(dice, n, c.memory, d)
        self.sane = drawn.sane
        # Rows of those who are not seen may be anything.
        state = {
            name: torch.from_numpy(np.nan_to_num(values, posinf=3e38, neginf=-3e38)).float()
            for name, values in drawn.values.items()
        }
        model = state.pop("model")
        state |= books(dice, n if c.factors == "per_client" else 1, c)
        state["pairs"], state["seen"] = torch.from_numpy(drawn.pairs), torch.from_numpy(dice.bools(n))
        state |= presence(dice, n, state["seen"])
        rows = dice.choice((2, 3, 5))
        models = torch.from_numpy(dice.normal(rows, d)).float()
        self.now = dice.randrange(rows)
        self.new = (self.now + dice.randrange(1, rows)) % rows
        models[self.now] = model
        self.client = dice.randrange(n)
        self._arrive(dice, state, models)
        if kin:
            self._draw_averages(dice, state)
        self.engine = self._fill(dice, state, models)
        self.models = models.to(self.device)
        self.oracle, self.state = None, state

    def _arrive(self, dice: Dice, state: dict[str, Tensor], models: Tensor) -> None:
        """An honest update, one that was sent before, one on the same model, or odd numbers."""
        row = dice.choice([k for k in range(len(models)) if k != self.new])
        self.trained_on = models[row].clone()
        sent = torch.from_numpy(dice.normal(self.d)).float() * dice.choice((0.1, 1.0, 1.0, 10.0))
        kind = dice.randrange(8)
        if kind == 0:
            sent = state["last_updates"][self.client].clone()
        if kind in (0, 1) and dice.chance(0.5):
            state["last_models"][self.client] = self.trained_on
        if kind == 2:
            values = dice.spoil(sent.numpy().astype(np.float64))
            sent, self.sane = cast(values, torch.float32, "cpu"), self.sane and not np.abs(values).max(initial=0) > 1e15
        self.update = sent

    def _draw_averages(self, dice: Dice, state: dict[str, Tensor]) -> None:
        n, rows = self.n, state["last_updates"].double()
        seen = state["seen"]
        rows[~seen] = 0
        state["last_updates"] = rows.float()
        towards = torch.from_numpy(dice.normal(n, 3))
        centre = torch.from_numpy(dice.numbers.random(n))
        rounds, means, support = dice.randrange(99), towards @ towards.T, self.config.rule == "support"
        state |= {"products": rows @ rows.T, "centre": torch.from_numpy(dice.normal(self.d)).float()}
        if self.config.rule in AVERAGED:
            state["similarity" if support else "kinship"] = means
            state["met"] = torch.from_numpy(dice.numbers.integers(0, 8, n))
        if support:
            every = refresh_rounds(n)
            rounds = every * (1 + rounds) - 1 if dice.chance(0.6) else rounds  # this round ends with a refresh
            size = dice.choice((1.0, 1.0, 0.1, 0.0, 1e300))
            self.sane = self.sane and size <= 1  # clipped to 1, their eigenvectors are not unique
            state["similarity"] = means / means.abs().max() * size
            state["shift"] = torch.from_numpy(dice.normal(n)) / n
            state["basis"] = torch.linalg.qr(torch.from_numpy(dice.normal(STAGES, n, n)))[0]
        elif self.config.rule == "kinship":
            state["kin_centre"] = centre / centre.sum() if dice.chance(0.7) else 0 * centre
        state["rounds"] = torch.tensor(rounds)

    def _fill(self, dice: Dice, state: dict[str, Tensor], models: Tensor) -> Fused | FusedRows:
        if self.kin:
            made = AVERAGED.get(self.config.rule, FusedRowRules)
            engine = made(self.config, self.n, self.d, self.device)
            engine.load(state, models[self.now])
            return engine
        c = Config(**{**vars(self.config), "history_dtype": "float16"}) if self.half else self.config
        engine, here = Fused(c, self.n, self.d, self.device), dict(state)
        if self.half:
            powers = 2.0 ** torch.from_numpy(dice.numbers.integers(-3, 4, (self.n, 2 * self.m)))
            here["scales"] = powers.float()
            for name, scales in (("dg", powers[:, : self.m]), ("dw", powers[:, self.m :])):
                here[name] = (state[name] / scales[..., None]).half()
                state[name] = here[name].double() * scales[..., None]
        engine.load(here, models[self.now].to(self.device))
        full = (engine.pairs == self.m).nonzero()[:, 0].tolist()
        if full and self.m > 1:  # rings that have gone round
            for k in full:
                turned = dice.randrange(self.m)
                for planes in (slice(0, self.m), slice(self.m, None)):
                    engine.slots[:, planes, k] = engine.slots[:, planes, k].roll(turned, 1)
                    engine.scales[k, planes] = engine.scales[k, planes].roll(turned)
                engine.oldest[k] = turned
            engine._take_products(models[self.now].to(self.device))
            OPS.refresh_(*engine._per_client, c.trust)
        return engine

    def args(self, dice: Dice) -> dict[str, object]:
        e, c, to = self.engine, self.config, self.device
        args = {"update": dice.laid_out(self.update.to(to)), "trained_on": dice.laid_out(self.trained_on.to(to))}
        args |= {"client": torch.tensor([self.client], device=to), "now_row": self.now, "next_row": self.new}
        args |= {"models": self.models, "seen_factors": e.factors, "recorded": e.recorded, "counts": e.counts}
        args["factor_counts"] = e.factor_counts
        args |= {name: getattr(c, name) for name in SETTINGS}
        args |= {"store_all": c.store == "all", "hold": c.on_reject == "hold"}
        args |= {**e.presence.tensors(), **dict(zip(("expiry", "probation"), of_presence(c), strict=True))}
        if not self.kin:
            args |= {"slots": e.slots, "last": e.last, **dict(zip(PER_CLIENT, e._per_client, strict=True))}
            return args | {"arrived": e._arrived, "verdict": e._verdict, "changes": e._changes}
        h, rows, kin = e.history, e.rows, e.rows.similarity
        args |= {"last_updates": h.last_updates, "last_models": h.last_models, "seen": h.seen}
        args |= {"products": rows.products, "rounds": rows.rounds, "quorum": e.quorum, "alone": c.step == "received"}
        if kin is None:
            args |= {"centre": rows.centre, "radius": -1.0 if c.radius is None else c.radius}
            return args | {"rule": c.rule, "remove": c.remove, "iterations": c.iterations}
        args["met"] = kin.met
        if c.rule == "support":
            args |= {"similarity": kin.means, "basis": kin.basis, "shift": kin.shift, "span": SPAN, "every": rows.every}
            return args | dict(zip(SUPPORT_NAMES, support.bounds(), strict=True))
        args |= {"kinship": kin.means, "centre": kin.centre}
        return args | dict(zip(BOUND_NAMES, BOUNDS, strict=True))

    def expected(self, stretch: float = 1.0) -> tuple[Composed, Tensor, Outcome]:
        """(engine, models, outcome) after this round in float64; the update as much longer as `stretch` says."""
        oracle = Composed(
            Config(**{**vars(self.config), "history_dtype": "float64"}), self.n, self.d, torch.device("cpu")
        )
        wide_state = {name: t.double() if t.is_floating_point() else t for name, t in self.state.items()}
        oracle.load(wide_state, None)
        models = self.start.double()
        moved = (self.update * stretch).double(), self.trained_on.double()
        return oracle, models, oracle.round(self.client, *moved, models, self.now, self.new)

    def check(self, outcome: tuple[Tensor, ...]) -> None:
        """Against the oracle; where a rounding error can tip a decision the oracle itself tips."""
        accepted, _, reason, *_ = outcome
        need(self.models.isfinite().all(), "models left the floats")
        need(0 <= int(reason) <= 4 and bool(accepted) == (int(reason) <= 1), "reason", reason)
        if not self.sane:
            return
        try:
            self._compare(outcome, self.expected())
        except AssertionError:
            others = [self.expected(stretch) for stretch in (1 - 3e-6, 1 + 3e-6)]
            first = self.expected()
            for _, models, other in others:
                moved = not torch.allclose(models, first[1], rtol=1e-4, atol=1e-4)
                if moved or int(other.reason) != int(first[2].reason):
                    return
            rows = first[0].presence.mask(first[0].seen)
            rows[self.client] &= first[2].accepted & self.config.receive
            if self.config.rule == "spectral" and rows.sum() <= 2:
                return  # two rows are equally far from their mean: rounding errors decide which of them is dropped
            raise

    def _compare(self, outcome: tuple[Tensor, ...], expected: tuple[Composed, Tensor, Outcome]) -> None:
        oracle, models, (_, factor, reason, weight) = expected
        need(int(outcome[2]) == int(reason), "reason", int(outcome[2]), "not", int(reason))
        ours, theirs = float(outcome[1]), float(factor)
        need(math.isclose(ours, theirs, rel_tol=1e-4) or ours == theirs or math.isnan(theirs), "factor", ours, theirs)
        if weight is not None:
            ours, theirs = float(outcome[3]), float(weight)
            need(math.isclose(ours, theirs, rel_tol=1e-4, abs_tol=1e-6), "weight", ours, theirs)
        size = 1 + self.update.nan_to_num().abs().max() if self.d else torch.tensor(1.0)
        size = size + 3 * oracle.history.last_updates.abs().max() if self.d else size
        error = (self.models.cpu().double() - models).abs()
        need((error <= 1e-4 * (1 + abs(self.config.lr)) * size).all(), "models differ by", error)
        mine, other = self.engine.state(torch.device("cpu")), oracle.state()
        for name in ("pairs", "seen", "recorded", "met", "rounds", "clock", "last_epoch", "uploads"):
            need(name not in other or torch.equal(mine[name], other[name]), name, mine.get(name), other.get(name))
        need(torch.equal(mine["counts"][:3], other["counts"][:3]), "counts", mine["counts"], other["counts"])
        averages = "kinship", "similarity", "kin_centre", "shift"
        for name in ("last_updates", "last_models", "centre", *averages, "factors"):
            if name in other and other[name].numel():
                close = torch.isclose(mine[name].double(), other[name], rtol=1e-4, atol=1e-5 * float(size))
                need(close.all(), name, mine[name], other[name])
        if not self.half and self.m and self.d:
            real = (torch.arange(self.m) < other["pairs"][:, None]) & other["seen"][:, None]
            for name in ("dw", "dg"):
                error = (mine[name].double() - other[name])[real]
                need(not error.numel() or error.abs().max() <= 1e-5 * size, name, error)
