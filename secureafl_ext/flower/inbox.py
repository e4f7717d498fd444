"""Open messages, and the replies that are pulled from Flower's grid."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from torch import Tensor


@dataclass(frozen=True)
class Sent:
    """A message without a reply so far."""

    node: int
    version: int  # noted by the server: a client cannot claim another one
    model: Tensor  # (d) of that version, as long as the server keeps it
    lr: float  # of the server at that time, as the message says
    deadline: float


@dataclass(frozen=True)
class Answer:
    """A reply that waits for its turn."""

    sent: Sent
    trained: Tensor  # (d) the client's model, on the CPU
    metrics: Mapping[str, object]
    since: float  # time of its arrival

    def update(self) -> Tensor:
        """(d): (model sent - model returned) / lr sent, so that `model - lr * update` is the client's model. Call it
        once only: it overwrites `trained`."""
        trained = self.trained.to(self.sent.model.device)
        return torch.sub(self.sent.model, trained, out=trained).div_(self.sent.lr)


def train_message(node: int, arrays: ArrayRecord, version: int, lr: float, ttl: float) -> Message:
    """The model for one node."""
    content = RecordDict({"arrays": arrays, "config": ConfigRecord({"version": version, "lr": lr})})
    return Message(content, node, MessageType.TRAIN, ttl=ttl)


def longest_wait(answers: Mapping[int, Answer], now: float) -> float:
    """Seconds since the first of them came; 0 if there is none. Another thread may change them meanwhile."""
    while True:
        try:
            return max(0.0, now - next(iter(answers.values())).since)
        except StopIteration:
            return 0.0
        except RuntimeError:  # changed between two steps of the line above
            continue


class Inbox:
    """Flower raises an error if it cannot unpack a reply, and all replies pulled with that one are lost. After the
    first such error replies are pulled one by one: then a node can lose only its own."""

    def __init__(self) -> None:
        self._one_by_one = False

    def pull(self, grid: Grid, messages: Collection[str]) -> tuple[list[Message], dict[str, str]]:
        """(replies to these message ids, the reason for each id whose reply cannot be unpacked)"""
        if not self._one_by_one:
            try:
                return list(grid.pull_messages(list(messages))), {}
            except Exception:
                grid.get_node_ids()  # raises if the connection fails, not a reply
                self._one_by_one = True
        pulled: list[Message] = []
        broken: dict[str, str] = {}
        for message in messages:
            try:
                pulled += grid.pull_messages([message])
            except Exception as problem:
                try:
                    grid.get_node_ids()  # raises if the connection fails, not a reply
                except Exception:
                    if not (pulled or broken):
                        raise
                    break  # Flower has handed these out and does not do so again. The next pull raises.
                broken[message] = f"Flower cannot unpack the reply: {type(problem).__name__}"
        return pulled, broken
