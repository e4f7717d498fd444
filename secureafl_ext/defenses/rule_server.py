"""RuleServer: a server that judges each update with a rule. Versions and receipts work as in SecureAFL."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..rules.row_rules import left_out
from ..server.receipt import Receipt, stale_receipt
from ..validation import check, check_kept, check_start, describe, plain
from .base import Arrival, Rule, need


class RuleServer:
    """A flat model that moves along the steps of a rule."""

    capturable = True
    # (): the step size of this round if the caller scales the steps afterwards, as the simulator's Adam does
    scaled_lr: Tensor | None = None

    def __init__(self, rule: Rule, name: str, model: Tensor, clients: int, lr: float, max_staleness: int):
        self.rule, self.name, self.clients, self.lr, self.max_staleness = rule, name, clients, lr, max_staleness
        self.version = 0
        self._reasons = (*rule.REASONS, "rejected: not finite")
        # Ring buffer: version v is in row v % rows.
        self.models = torch.zeros(max_staleness + 2, len(model), dtype=model.dtype, device=model.device)
        self.models[0] = model.detach()
        # Every number that a rule can get, as a tensor: a copy from the host could not be captured in a CUDA graph.
        self._clients = torch.arange(clients, device=model.device).split(1)
        self._delays = torch.arange(max_staleness + 1, dtype=torch.float64, device=model.device).unbind()

    @property
    def step_size(self) -> float | Tensor:
        return self.lr if self.scaled_lr is None else self.scaled_lr

    @property
    def model(self) -> Tensor:
        """The current model (d). Do not write to it. It keeps its values for the next max_staleness rounds."""
        return self.models[self.version % len(self.models)]

    def model_at(self, version: int) -> Tensor:
        """The model of one of the last max_staleness + 1 versions (d). Do not write to it."""
        version = check_kept(f"{self.name}.model_at", version, self.version, self.max_staleness)
        return self.models[version % len(self.models)]

    def submit(self, client: int, update: Tensor, version: int) -> Receipt:
        """One round, whether the update is accepted or not.

        Invalid arguments raise an error. An update on a version that is no longer kept returns a receipt with reason
        "stale". Neither counts as a round.
        """
        who, models = f"{self.name}.submit", self.models
        client, version = check(who, models, models.dtype, self.clients, self.version, client, update, version)
        staleness = self.version - version
        if staleness > self.max_staleness:
            return stale_receipt(version, self.version, self.max_staleness, update.device)
        trained_on = models[version % len(models)]
        receipt = self.enqueue(self._clients[client], plain(update), trained_on, self._delays[staleness])
        return replace(receipt, staleness=staleness)

    def enqueue(self, client: Tensor, update: Tensor, trained_on: Tensor, staleness: Tensor) -> Receipt:
        model = self.model
        arrival = self.arrival(client, update, trained_on, staleness)
        step, accepted, factor, reason = self.rule.judge(arrival)
        stepped = model - self.lr * step
        # As in SecureAFL, a coordinate that overflows keeps its value: a diverged model ends in huge finite numbers.
        new = torch.where(accepted & stepped.isfinite(), stepped, model)
        self.version += 1
        self.model.copy_(new)
        factor = torch.where(arrival.finite, factor, torch.nan)
        reason = torch.where(arrival.finite, reason, len(self._reasons) - 1)
        return Receipt(accepted, factor, None, self.version, reason, self._reasons)

    def arrival(self, client: Tensor, update: Tensor, trained_on: Tensor, staleness: Tensor) -> Arrival:
        """The update as the rule receives it in this round."""
        finite = update.isfinite().all()
        known = torch.where(finite, update, 0)  # a rule never evaluates a NaN on trusted samples
        return Arrival(client, known, finite, self.model, trained_on, staleness, self.refreshes(), self.step_size)

    def forget(self, client: int) -> None:
        """Erase the memory of a client, so that another client can take its number."""
        if hasattr(self.rule, "forget"):
            self.rule.forget(client)

    @property
    def present(self) -> Tensor:
        """(n) bool: clients with a remembered update, if the rule remembers updates; otherwise all."""
        seen = getattr(self.rule, "seen", None)
        return torch.ones(self.clients, dtype=torch.bool, device=self.models.device) if seen is None else seen

    def weights(self) -> Tensor | None:
        """(n) float64: the weights of the clients' remembered updates in the last step; None if the rule has none."""
        return getattr(self.rule, "weights", None) if getattr(self.rule, "weighs", False) else None

    def left_out(self) -> Tensor | None:
        """(n) bool: as SecureAFL.left_out; None if the rule has no weights."""
        weights = self.weights()
        return None if weights is None else left_out(weights, self.present)

    def state_dict(self) -> dict[str, Tensor | int]:
        """Copies of the models and of the rule's tensors."""
        return {**{name: tensor.clone() for name, tensor in self._tensors().items()}, "version": self.version}

    def load_state_dict(self, state: dict[str, Tensor | int]) -> None:
        """Continue from the state of a server with the same settings. A state that does not fit changes nothing."""
        loaded = {}
        for name, tensor in self._tensors().items():
            got = state.get(name)
            if not isinstance(got, Tensor) or got.shape != tensor.shape or got.dtype != tensor.dtype:
                raise ValueError(f"{self.name}: {name} must be {describe(tensor)}, got {describe(got)}")
            loaded[name] = got
        self.version = int(state["version"])
        for name, tensor in self._tensors().items():
            tensor.copy_(loaded[name])

    def _tensors(self) -> dict[str, Tensor]:
        remembered = {f"rule.{key}": value for key, value in vars(self.rule).items() if isinstance(value, Tensor)}
        return {"models": self.models, **remembered}

    def phase(self) -> int:
        return self.version % len(self.models) + len(self.models) * self.refreshes()

    def refreshes(self) -> bool:
        """Whether a rule with trusted samples renews its gradient in this round."""
        return self.version % getattr(self.rule, "every", 1) == 0


def check_settings(name: str, model: Tensor, clients: int, lr: float, max_staleness: int) -> None:
    """Refuse invalid arguments of a RuleServer."""
    check_start(name, model, clients)
    need(math.isfinite(lr), name, "lr", "a finite number", lr)
    need(max_staleness >= 0, name, "max_staleness", "0 or more", max_staleness)
