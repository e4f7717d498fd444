"""What the nodes of a simulated fleet send: one function per kind of reply, each with the truth about it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, MetricRecord, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from fuzz.dice import Dice

START = {"w": torch.zeros(2, 2), "count": torch.tensor(5), "b": torch.zeros(2)}
SIZE = 6
GOAL = np.linspace(-1, 1, SIZE).astype(np.float32)
LARGEST = np.finfo(np.float32).max
CODES = sorted(value for name, value in vars(ErrorCode).items() if name.isupper())  # all that Flower has
# What NumPy writes before the values: most of the time of a history would go into it.
HEADS = {shape: Array(np.zeros(shape, np.float32)).data[: -4 * math.prod(shape)] for shape in ((2, 2), (2,))}


@dataclass
class Reply:
    """vector: the model in it, None if it holds none    about: metadata that differ from those of an honest reply"""

    body: RecordDict | Error | Exception
    vector: np.ndarray | None = None
    about: dict[str, object] = field(default_factory=dict)


def arrays(vector: np.ndarray, **changed: np.ndarray | None) -> RecordDict:
    record = ArrayRecord()
    for name, shape, values in (("w", (2, 2), vector[:4]), ("b", (2,), vector[4:])):
        record[name] = Array("float32", shape, "numpy.ndarray", HEADS[shape] + values.astype("<f4").tobytes())
    for name, part in changed.items():
        record.pop(name, None)
        if part is not None:
            record[name] = Array(part)
    return RecordDict({"arrays": record})


def honest(dice: Dice, model: np.ndarray, lr: float) -> Reply:
    noise = np.array([dice.gauss(0, 0.1) for _ in range(SIZE)], np.float32)
    vector = model - np.float32(lr) * (model - GOAL + noise)
    return Reply(arrays(vector), vector)


def large(dice: Dice, model: np.ndarray, lr: float) -> Reply:
    """Finite values, most of them far from any honest model; some updates overflow."""
    vector = np.full(SIZE, dice.choice((1e-45, 1e3, -1e10, 1e30, LARGEST, -LARGEST)), np.float32)
    return Reply(arrays(vector), vector)


def not_finite(dice: Dice, model: np.ndarray, lr: float) -> Reply:
    vector = model.copy()
    vector[dice.randrange(SIZE)] = dice.choice((math.nan, math.inf, -math.inf))
    return Reply(arrays(vector), vector)


def with_metrics(dice: Dice, model: np.ndarray, lr: float) -> Reply:
    """An honest model with metrics of any size and name."""
    reply = honest(dice, model, lr)
    values = {"loss": 0.5, "a" * 1000: 1, "\x1b[2J": 2, "long": [0.0] * dice.choice((2, 1001)), "big": 10**100}
    reply.body["metrics"] = MetricRecord(values)
    return reply


def wrong_arrays(dice: Dice, model: np.ndarray, lr: float) -> Reply:
    wrong = {
        "shape": {"b": np.zeros(3, np.float32)},
        "dtype": {"w": np.zeros((2, 2))},
        "missing": {"b": None},
        "unknown": {"c": np.zeros(1, np.float32)},
        "oversized": {"w": np.zeros((100, 100), np.float32)},
    }
    return Reply(arrays(model, **dice.choice(list(wrong.values()))))


def no_arrays(dice: Dice, model: np.ndarray, lr: float) -> Reply:
    broken = Array("float32", (2, 2), "numpy.ndarray", dice.randbytes(60))
    forged = Array("float32", (2, 2), "pickle", b"")
    whole = arrays(model)["arrays"]
    bodies = [
        RecordDict(),
        RecordDict({"a": whole, "b": whole}),
        RecordDict({"arrays": ConfigRecord({"w": b"0" * 1000})}),
        RecordDict({"arrays": ArrayRecord({"w": dice.choice((broken, forged)), "b": whole["b"]})}),
    ]
    return Reply(dice.choice(bodies))


def error(dice: Dice, model: np.ndarray, lr: float) -> Reply:
    """The client's own, with any code, or one that Flower makes in its place."""
    reasons = ("", "raised", None, "x" * 10_000, "\x1b[2J\r\nfake")
    said = Error(dice.choice([*CODES, -1, 99, None]), dice.choice(reasons))
    return Reply(said, about=dice.choice(({}, {"src_node_id": SUPERLINK_NODE_ID})))


def not_unpacked(dice: Dice, model: np.ndarray, lr: float) -> Reply:
    return Reply(ValueError("Flower cannot unpack this"))


def odd_metadata(dice: Dice, model: np.ndarray, lr: float) -> Reply:
    reply = honest(dice, model, lr)
    odd = [{"created_at": value} for value in (None, math.nan, "now", math.inf)]
    reply.about = dice.choice([*odd, {"src_node_id": None}, {"src_node_id": 12345}, {"message_type": "query"}])
    return reply


def forged(dice: Dice, model: np.ndarray, lr: float) -> Reply:
    """An answer to a message of another node, or to none: the world fills in which."""
    reply = dice.choice((honest, not_finite, no_arrays, error))(dice, model, lr)
    reply.about = {"reply_to_message_id": dice.choice(("other", "other", "old", "nothing", 7))}
    return reply


KINDS: list[Callable[[Dice, np.ndarray, float], Reply]] = [
    honest, large, not_finite, with_metrics, wrong_arrays, no_arrays, error, not_unpacked, odd_metadata, forged,
]  # fmt: skip
