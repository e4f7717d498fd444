"""Calls of sketch_step_ and mean_step_ that must succeed; the oracle is the round of plain ops on the same state."""

import math

import torch
from fuzz.dice import Call, Dice, cast, names_of, need
from fuzz.scene import books, presence, settings_of
from torch import Tensor

from secureafl_ext.config import Config
from secureafl_ext.engines.averaged import Averaged, Sketched
from secureafl_ext.engines.base import Outcome
from secureafl_ext.engines.fused_averages import FusedAverages
from secureafl_ext.rules.mean_steps import SPAN
from secureafl_ext.rules.support import STAGES

WIDTH = 64  # numbers of a sketch
EQUAL = ("seen", "met", "rounds", "recorded", "clock", "last_epoch", "uploads", "counts")
KEPT = {
    "sketch_step_": ("update_sketches", "model_sketches", "means"),
    "mean_step_": ("last_updates", "last_models", "mean_updates"),
}
CLOSE = (*KEPT["sketch_step_"], *KEPT["mean_step_"], "squares", "total", "noise", "norms", "shift", "factors")


class AveragedScene:
    """A random state, one arrival, and the engine that holds the state."""

    def __init__(self, op: str, dice: Dice, device: str):
        n, d, rows = dice.choice((1, 2, 3, 4, 6, 9)), dice.choice((1, 2, 5, 33, 64, 65, 130, 200)), dice.choice((2, 3))
        sketched = {"sketch": WIDTH, "sketch_seed": dice.randrange(99)}
        steps = op == "mean_step_" or dice.chance(0.5)
        more = {"step": "received", "receive": True, "averages": "steps" if steps else "uploads"}
        more |= {"keep_last": dice.choice((None, True))}
        more |= sketched if op == "sketch_step_" else {}
        self.config = Config(**{**vars(settings_of(dice, n, "support")), **more})
        self.op, self.width = op, self.config.sketch or d
        self.n, self.d, self.device, self.sane = n, d, torch.device(device), True
        self.now = dice.randrange(rows)
        self.new = (self.now + dice.randrange(1, rows)) % rows
        self.client, self.models = dice.randrange(n), torch.from_numpy(dice.normal(rows, d)).float()
        self.update = torch.from_numpy(dice.normal(d)).float() * dice.choice((0.0, 0.1, 1.0, 1.0, 10.0))
        self.trained_on = self.models[self.now].clone()
        made = Sketched if op == "sketch_step_" else FusedAverages
        self.engine = made(self.config, n, d, self.device)
        self.state = self._draw(dice)
        if dice.chance(0.15):
            self.sane = False
            self.update = cast(dice.spoil(self.update.double().numpy()), torch.float32, "cpu")
        self.engine.load(self.state, self.models[self.now])
        self.start, self.models = self.models, self.models.to(self.device, copy=True)

    def _draw(self, dice: Dice) -> dict[str, Tensor]:
        n, state = self.n, self.engine.state(torch.device("cpu"))
        state |= books(dice, n if self.config.factors == "per_client" else 1, self.config)
        state["seen"] = torch.from_numpy(dice.bools(n))
        state |= presence(dice, n, state["seen"])
        of_update, of_model, means = KEPT[self.op]
        for name in KEPT[self.op]:
            if name == means or self.config.keeps_last:
                state[name] = torch.from_numpy(dice.normal(n, self.width)).float()
        kept = Averaged(self.config, n, self.d, torch.device("cpu"))._sketched
        if of_model in state and dice.chance(0.2):  # on the same model, perhaps the same update
            state[of_model][self.client] = kept(self.trained_on)
        if of_update in state and dice.chance(0.2):
            state[of_update][self.client] = kept(self.update)
        state["shift"] = torch.from_numpy(dice.normal(n)) / n
        if self.config.averages == "uploads":
            state["squares"] = torch.from_numpy(dice.normal(n)) / n
            state["met"] = torch.from_numpy(dice.numbers.integers(0, 80, n))
        else:
            state[means] /= self.width**0.5
            state["total"] = torch.from_numpy(dice.numbers.choice((0.0, 0.1, 1.0, 7.5, SPAN), n))
            state["noise"] = torch.from_numpy(dice.numbers.random(n))
        if self.op == "mean_step_":
            state[means] /= state[means].norm(dim=1, keepdim=True).clamp(min=1)  # as a server's own
            state["basis"] = torch.linalg.qr(torch.from_numpy(dice.normal(STAGES, n, n)))[0]
            rounds = dice.randrange(99)  # some rounds end with a refresh
            state["rounds"] = torch.tensor((1 + rounds) * self.engine.every - 1 if dice.chance(0.6) else rounds)
        state["norms"] = torch.from_numpy(dice.numbers.choice((0.0, 0.5, 1.0, 7.0, 1e200), n))
        if dice.chance(0.5):
            state["norms"] = torch.from_numpy(dice.numbers.random(n))
        return state

    def args(self, op: str, dice: Dice) -> dict[str, object]:
        e, sent = self.engine, (dice.laid_out(one.to(self.device)) for one in (self.update, self.trained_on))
        update, trained_on = sent
        client = torch.tensor([self.client], device=self.device)
        judged = e.factors, e.recorded, e.factor_counts, e.counts
        values = update, client, trained_on, self.now, self.new, self.models, *e._past, *judged, e.lr, *e._settings
        return dict(zip(names_of(op), values, strict=True))

    def expected(self, stretch: float = 1.0) -> tuple[dict[str, Tensor], Tensor, Outcome]:
        """(state, models, outcome) of plain ops; the update as much longer as `stretch` says."""
        oracle = Averaged(self.config, self.n, self.d, torch.device("cpu"))
        oracle.load(self.state, self.start[self.now])
        models = self.start.clone()
        run = oracle._one_round if self.op == "sketch_step_" else oracle.round  # a refresh is a part of mean_step_
        outcome = run(torch.tensor([self.client]), self.update * stretch, self.trained_on, models, self.now, self.new)
        return oracle.state(), models, outcome

    def check(self, outcome: tuple[Tensor, ...]) -> None:
        """Where a rounding error can tip the verdict the oracle itself tips."""
        need(self.models.isfinite().all(), "models left the floats")
        if not self.sane:
            return
        expected = self.expected()
        try:
            self._compare(outcome, *expected)
        except AssertionError:
            others = (self.expected(stretch)[2] for stretch in (1 - 3e-6, 1 + 3e-6))
            if all(int(other.reason) == int(expected[2].reason) for other in others):
                raise

    def _compare(self, outcome: tuple[Tensor, ...], state: dict[str, Tensor], models: Tensor, wanted: Outcome) -> None:
        need(int(outcome[2]) == int(wanted.reason), "reason", int(outcome[2]), "not", int(wanted.reason))
        assert wanted.weight is not None
        for name, ours, theirs in zip(("factor", "weight"), outcome[1::2], (wanted.factor, wanted.weight), strict=True):
            a, b = float(ours), float(theirs)
            close = math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-9) or (math.isnan(a) and math.isnan(b))
            need(close, name, a, "not", b)
        mine = self.engine.state(torch.device("cpu"))
        for name in (name for name in EQUAL if name in mine):
            need(torch.equal(mine[name], state[name]), name, mine[name], state[name])
        pairs = [(name, mine[name], state[name]) for name in CLOSE if name in mine]
        for name, a, b in (("models", self.models.cpu(), models), *pairs):
            need(torch.isclose(a, b, rtol=1e-4, atol=1e-5).all(), name, a, b)


def an_averaged_round(op: str, dice: Dice, device: str) -> Call:
    scene = AveragedScene(op, dice, device)
    facts = {"n": scene.n, "m": 0, "d": scene.d, "lists": len(scene.engine.recorded)}
    return Call(op, scene.args(op, dice), scene.check, facts)
