"""What must hold of a Flower loop: the model is told of everything that the loop does, in order.

It keeps a twin of the server and feeds it what the loop must have judged. Whatever is not allowed, or is missing when
the loop sleeps, raises DivergenceError.
"""

import copy
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import torch
from loop.tables import Open, Pulled, Tables, need, same


class Model(Tables):
    """Told by the world about each call of the loop, each event and each checkpoint."""

    # What the loop asks for

    def looked(self, nodes: list[int]) -> None:
        """The loop was told which nodes there are."""
        for node in self.missing.difference(nodes):
            self.twin.leave(self.slots[node])
        self.missing = set()
        self.listed, self.looking = nodes, True

    def _end_look(self) -> None:
        if not self.looking:
            return
        self.looking = False
        listed = set(self.listed)
        need(set(self.present) <= listed, "nodes that are gone have not left:", set(self.present) - listed)
        self.waiting &= listed
        outside = listed.difference(self.present)
        need(outside == self.waiting, "neither joined nor waiting:", outside ^ self.waiting)
        full = len(self.slots) == self.twin.clients and not self.away
        need(full or not self.waiting, "nodes wait although a slot is free:", self.waiting)
        if self.answers.get(self._due()) is not self.was_due:
            self.was_due = None  # nodes that joined took its turn away before it could be judged

    def pushed(self, node: int, vector: np.ndarray, config: dict, identifier: str | None, now: float) -> None:
        self._end_look()
        need(not self.save_due, "a message before the checkpoint of version", self.twin.version)
        need(self.refused is None, "no event for the message that was refused to", self.refused)
        need(node in self.present, "a message to a node without a slot:", node)
        need(not any(sent.node == node for sent in self.open.values()), "a second open message to", node)
        need(node not in self.answers, "a message to a node whose reply waits:", node)
        need(self.ask_at.get(node, math.inf) <= now + 1e-9, "a message too early to", node, self.ask_at.get(node))
        config_now = {"version": self.twin.version, "lr": self.twin.lr}
        need(config == config_now, "config", config, "in place of", config_now)
        whole = vector.tobytes() == self.twin.model.numpy().tobytes()
        need(whole, "another model than that of version", self.twin.version)
        del self.ask_at[node]
        self.owed = None if self.owed == node else self.owed
        if identifier is None:
            self.refused = node
        else:
            self.open[identifier] = Open(node, self.twin.version, vector.copy(), self.twin.lr, now + self.ttl)

    def asks(self, identifiers: list[str], now: float) -> None:
        """The loop begins to pull replies to these messages."""
        self._end_look()
        if not self.one_by_one or not self.asked_ids.isdisjoint(identifiers) or not self.asked_ids:
            self._settle()
            self.asked_ids, self.pulled_at = set(), now
        need(set(identifiers) <= self.open.keys(), "replies to messages that are not open", identifiers)
        need(not self.one_by_one or len(identifiers) == 1, "not one by one after a reply that could not be unpacked")
        self.asked_ids.update(identifiers)

    def got(self, replies: list[Pulled]) -> None:
        sent = list(self.open)
        for one in replies:
            place = sent.index(one.message) if one.message in sent else len(sent)
            self.pulled.append(replace(one, place=place))

    def set_lr(self, lr: float) -> None:
        """The owner of the loop has set the server's lr."""
        self.twin.lr = lr

    def pull_failed(self, identifiers: list[str]) -> None:
        """A reply could not be unpacked, and the connection is there."""
        if self.one_by_one:
            self.broken.update(identifiers)
        else:
            self.one_by_one, self.asked_ids = True, {"all at once"}

    # What the loop says

    def happened(self, event, now: float) -> None:
        self.asked_ids = set()
        need(event.reason.isprintable() and len(event.reason) <= 500, "reason", repr(event.reason))
        need(len(event.metrics) <= 1000, "metrics", len(event.metrics))
        self._expect(event, now)
        known = event.node in self.slots
        need(event.slot == self.slots.get(event.node), event.kind, "slot", event.slot, "of", event.node)
        self.tally.setdefault(event.node if known else None, Counter())[event.kind] += 1
        need(event.version == self.twin.version, event.kind, "version", event.version, "not", self.twin.version)

    def _expect(self, event, now: float) -> None:
        kind, node = event.kind, event.node
        if self.looking and (kind in ("joined", "waiting") or (kind == "left" and node not in self.listed)):
            return self._moves(event)
        self._end_look()
        need(kind not in ("joined", "waiting"), kind, node, "outside of a look at the nodes")
        if self.refused is not None:
            need((kind, node) == ("unsent", self.refused), kind, node, "in place of unsent", self.refused)
            self.refused, self.loosened = None, True
            return self._failed(node, now)
        if self.broken:
            message = next((one for one in self.broken if self.open[one].node == node), None)
            need(kind == "garbage" and message, kind, node, "in place of a reply that cannot be unpacked")
            self.broken.remove(message)
            self.loosened = True
            del self.open[message]
            return self._failed(node, now)
        expired = [message for message, sent in self.open.items() if sent.deadline < self.pulled_at]
        if kind == "vanished" and (self.done or not self.pulled):
            message = next((one for one in expired if self.open[one].node == node), None)
            need(message is not None, "vanished before its ttl:", node)
            del self.open[message]
            return self._failed(node, now)
        need(not self.done, kind, node, "after the last round")
        due = self._next()
        later = self.loosened and self.pulled and self._kind(self._head()) == (kind, node)
        if due is not None and not later:
            return self._judged(event, due, now)
        self.loosened = False
        if kind == "vanished" and not self.pulled:  # all that were left could be taken without an event
            return self._expect(event, now)
        need(bool(self.pulled), kind, node, "without a reason")
        head = self._head()
        need(self._kind(head) == (kind, node), kind, node, "in place of", *self._kind(head))
        self.pulled.remove(head)
        if kind == "twice":
            return None
        del self.open[head.message]
        return self._leaves(node) if kind == "left" else self._failed(node, now)

    def _judged(self, event, node: int, now: float) -> None:
        need(event.node == node, event.kind, event.node, "although it is the turn of", node)
        need(self.owed is None, "a round before the model was sent to", self.owed)
        self.loosened = False
        sent, vector = self.answers.pop(node)
        with np.errstate(all="ignore"):
            update = (sent.model - vector) / np.float32(sent.lr)
        if not np.isfinite(update).all():
            need(event.kind == "garbage", event.kind, node, "although its update is not finite")
            return self._failed(node, now)
        before = self.twin.version
        receipt = self.twin.submit(self.slots[node], torch.from_numpy(update), sent.version)
        kind = "stale" if self.twin.version == before else "accepted" if receipt.accepted else "rejected"
        told = event.kind, event.reason, event.staleness
        need(told == (kind, receipt.reason, receipt.staleness), *told, "in place of", kind, receipt.reason)
        need(same(event.factor, float(receipt.factor)), "factor", event.factor, "not", float(receipt.factor))
        self.failures.pop(node, None)
        self.ask_at[node], self.owed = -math.inf, node
        if kind != "stale":
            self.rounds.append(node)
            self.save_due = self.twin.version % self.every == 0
        return None

    # Moments at which nothing may be left to do

    def _settle(self) -> None:
        """Every reply that was pulled is dealt with."""
        if self.done:
            return
        while self.pulled:
            kind, node = self._kind(self._head())
            need(kind == "usable", "no event for a reply:", kind, node)
            need(self._due() is None, "not judged on its turn:", self._due())
            self._take()
            need(self._due() is None, "not judged on its turn:", self._due())

    def sleeps(self) -> None:
        self._end_look()
        self._settle()
        need(not (self.broken or self.save_due), "undone before a pause:", self.broken, self.save_due)
        need(self.refused is None, "no event for the message that was refused to", self.refused)
        expired = [sent.node for sent in self.open.values() if sent.deadline < self.pulled_at]
        need(not expired, "no reply within the ttl, and no event:", expired)
        forgotten = [node for node, at in self.ask_at.items() if at <= self.slept_at or at == -math.inf]
        need(not forgotten, "without a message although it is time:", forgotten)
        due = self.answers.get(self._due())
        need(due is None or due is not self.was_due, "not judged on its turn:", self._due())
        self.was_due, self.asked_ids = due, set()

    def ended(self) -> None:
        """`run` is through."""
        need(self.twin.version == self.target, "ended at", self.twin.version, "of", self.target)
        need(not self.save_due, "no checkpoint at the end")

    # Checkpoints

    def saved(self) -> None:
        need(self.save_due or self.done, "a checkpoint that nobody asked for, at", self.twin.version)
        self.save_due = False
        server = {k: v.clone() if torch.is_tensor(v) else v for k, v in self.twin.state_dict().items()}
        away = [node for node in self.away if node not in self.missing]
        snapshot = {"slots": dict(self.slots), "away": away, "tally": copy.deepcopy(self.tally), "server": server}
        self.snapshots = [*self.snapshots[-1:], snapshot]
