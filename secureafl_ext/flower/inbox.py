"""Open messages, and the replies that are pulled from Flower's grid."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from flwr.app import Message
from flwr.serverapp import Grid
from torch import Tensor


@dataclass(frozen=True)
class Sent:
    """A message without a reply so far."""

    node: int
    version: int  # noted by the server: a client cannot claim another one
    model: Tensor  # (d) of that version, as long as the server keeps it
    deadline: float


@dataclass(frozen=True)
class Answer:
    """A reply that waits for its turn."""

    sent: Sent
    trained: Tensor  # (d) the client's model, on the CPU
    metrics: Mapping[str, object]


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
