"""Replies of clients, read as untrusted input: bounded in size, printable, and never an error of the server."""

from collections.abc import Mapping

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.common.constant import SUPERLINK_NODE_ID
from torch import Tensor

from ..validation import printable
from .layout import GarbageError, Layout

# Kind of event by error code, for the error replies that Flower itself makes. A client's own error is always "failed".
ERRORS = {3: "vanished", 4: "late", 5: "left"}
LONGEST_TEXT = 500  # characters of a reason
LONGEST_NAME = 100  # characters of a metric's name
MOST_NUMBERS = 1000  # in the metrics of one reply; a list counts as many as it holds


def answers(reply: Message) -> tuple[str, int]:
    """(id of the message that it answers, id of its sender). In a deployment the sender claims both. Flower refuses a
    reply from another node than the one that was asked, and one from itself: SUPERLINK_NODE_ID is Flower."""
    about = reply.metadata
    message, node = about.reply_to_message_id, about.src_node_id
    return message if isinstance(message, str) else "", node if isinstance(node, int) else 0


def error(reply: Message) -> tuple[str, str]:
    """(kind, reason) of a reply that is an error."""
    code, reason = reply.error.code, reply.error.reason
    of_flower = reply.metadata.src_node_id == SUPERLINK_NODE_ID and isinstance(code, int)
    kind = ERRORS.get(code, "failed") if of_flower else "failed"
    return kind, one_line(reason) if isinstance(reason, str) else ""


def trained(reply: Message, layout: Layout) -> Tensor:
    """(d) the client's model."""
    try:
        records = [record for record in reply.content.values() if isinstance(record, ArrayRecord)]
        if len(records) != 1:
            raise GarbageError(f"a reply must have one ArrayRecord, got {len(records)}")
        return layout.read(records[0])
    except GarbageError:
        raise
    except Exception as problem:  # a broken reply can raise any error
        raise GarbageError(f"the reply cannot be read: {type(problem).__name__}") from None


def metrics(reply: Message) -> Mapping[str, int | float | list]:
    """Numbers and lists of numbers by name, the first that fit the bounds. Reported by the client, not verified."""
    kept: dict[str, int | float | list] = {}
    room = MOST_NUMBERS
    entries = (
        entry for record in reply.content.values() if isinstance(record, MetricRecord) for entry in record.items()
    )
    for name, value in entries:
        values = value if isinstance(value, list) else [value]
        room -= max(1, len(values))
        if room < 0:
            break
        if len(name) <= LONGEST_NAME and name.isprintable() and all(map(is_number, values)):
            kept[name] = value
    return kept


def is_number(value: object) -> bool:
    """A number that JSON and protobuf can hold. Python refuses to print longer integers."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**64)


def one_line(text: str) -> str:
    """At most LONGEST_TEXT characters: the begin and the end of the text."""
    if len(text) > LONGEST_TEXT:
        half = LONGEST_TEXT // 2 - 2
        text = f"{text[:half]} .. {text[-half:]}"
    return printable(text).strip()
