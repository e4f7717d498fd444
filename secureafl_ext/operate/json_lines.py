"""read_line: one line of a JsonLog. The file may be damaged or forged: types and bounds of every field are checked."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..validation import MOST, converted, number, or_none, shown, text, whole
from .verdict import KINDS, MEAN_UPDATES, Look, Queue, Verdict
from .watched import Evaluation

LONGEST_NAME, LONGEST_REASON = 100, 500  # characters
LONGEST_LINE = 2**26  # characters, or bytes: a look at MOST_CLIENTS clients has fewer
LONGEST_SHORT = 2**17  # of lines that are no look; the longest verdict of a JsonLog has some 8,000
MOST_CLIENTS = 1_000_000
# In a long line, and so in a look. One of `[],[],...` would need 24 times its length as Python's lists, and a minute.
MOST_OBJECTS = 10_000  # quotes, brackets and braces; a JsonLog writes some hundreds
MOST_VALUES = 8 * MOST_CLIENTS + MOST_OBJECTS  # a look has eight lists
MOST_STATS = 100
LATEST = 1e11  # seconds since 1970: the year 5138


@dataclass(frozen=True, slots=True)
class Dropped:
    """This many verdicts were lost, because the observers were too slow."""

    at: float
    count: int


def read_line(line: str) -> Verdict | Look | Evaluation | Dropped | None:
    """The content of a line of JsonLog; None if it is blank. A line that JsonLog would not write is a ValueError.

    Unknown fields are ignored: log collectors may add some.
    """
    if len(line) > LONGEST_LINE:
        raise ValueError(f"read_line: line must have at most {LONGEST_LINE} characters, got {len(line)}")
    if not line or line.isspace():
        return None
    need_cheap(line)
    try:
        fields = json.loads(line, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"read_line: line must be JSON, got {start_of(line)}: {str(error)[:100]}") from None
    event = fields.get("event") if isinstance(fields, dict) else None
    if not isinstance(event, str) or event not in READERS:
        names = ", ".join(READERS)
        raise ValueError(f'read_line: line must be an object with "event" one of {names}, got {start_of(line)}')
    if event != "look" and len(line) > LONGEST_SHORT:
        expected = f"at most {LONGEST_SHORT} characters"
        raise ValueError(f"read_line: line of the event {event} must have {expected}, got {len(line)}")
    return READERS[event](fields)


def need_cheap(line: str) -> None:
    """Refuse a long line whose parsed objects would need much more memory than the line. Call it before parsing."""
    if len(line) <= LONGEST_SHORT:
        return
    objects, values = (sum(map(line.count, marks)) for marks in ('"[{', ","))
    if objects > MOST_OBJECTS or values > MOST_VALUES:
        most = f"{MOST_OBJECTS} quotes, brackets and braces, and {MOST_VALUES} commas"
        raise ValueError(f"read_line: line must have at most {most}, got {objects} and {values}")


def start_of(line: str) -> str:
    return shown(line[:100])  # escaped, a whole line could be several times as long


def refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def not_negative(value: float) -> bool:
    return 0 <= value < math.inf


def none_or(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or holds(value)


def short(most: int) -> Callable[[str], bool]:
    return lambda words: len(words) <= most and words.isprintable()


# name: (conversion, expected values in words, check)
FIELDS: dict[str, tuple[Callable[[Any], Any], str, Callable[[Any], bool]]] = {
    "at": (number, f"seconds from 0 to {LATEST:.0e}", lambda at: 0 <= at <= LATEST),
    "kind": (text, f"one of {', '.join(KINDS)}", lambda kind: kind in KINDS),
    "client": (
        or_none(whole),
        f"a whole number below {MOST_CLIENTS} or null",
        none_or(lambda client: 0 <= client < MOST_CLIENTS),
    ),
    "who": (text, f"printable text of at most {LONGEST_NAME} characters", short(LONGEST_NAME)),
    "version": (whole, f"a whole number from 0 to {MOST}", not_negative),
    "staleness": (or_none(whole), f"a whole number from 0 to {MOST} or null", none_or(not_negative)),
    "factor": (or_none(number), "a finite number, 0 or more, or null", none_or(not_negative)),
    "seconds": (or_none(number), "a finite number, 0 or more, or null", none_or(not_negative)),
    "reason": (text, f"printable text of at most {LONGEST_REASON} characters", short(LONGEST_REASON)),
    "threshold": (or_none(number), "a finite number, 0 or more, or null", none_or(not_negative)),
    "error": (or_none(number), "a finite number or null", none_or(math.isfinite)),
    "count": (whole, f"a whole number from 1 to {MOST}", lambda count: count >= 1),
}


def field(fields: dict[str, Any], name: str) -> Any:
    convert, expected, holds = FIELDS[name]
    return converted("read_line", name, given(fields, name), convert, expected, holds)


def given(fields: dict[str, Any], name: str) -> Any:
    if name not in fields:
        raise ValueError(f"read_line: {name} must be in a line of the event {fields['event']}, got none")
    return fields[name]


def read_verdict(fields: dict[str, Any]) -> Verdict:
    return Verdict(**{name: field(fields, name) for name in Verdict.__dataclass_fields__})


def read_look(fields: dict[str, Any]) -> Look:
    seen = read_list(fields, "seen", MOST_CLIENTS)
    n, threshold = len(seen), field(fields, "threshold")
    return Look(
        at=field(fields, "at"),
        version=field(fields, "version"),
        stats=read_stats(fields),
        seen=seen,
        live=read_list(fields, "live", n, n),
        present=read_list(fields, "present", n, n),
        weights=read_numbers(fields, "weights", n),
        left_out=None if given(fields, "left_out") is None else read_list(fields, "left_out", n, n),
        threshold=math.inf if threshold is None else threshold,
        # Lines of version 0.1 have none of these.
        **{name: read_numbers(fields, name, n) for name in MEAN_UPDATES if fields.get(name) is not None},
        queue=read_queue(fields),
    )


def read_list(fields: dict[str, Any], name: str, most: int, least: int = 0) -> np.ndarray:
    """(n) bool: a field that is a list of `least` to `most` numbers 0 or 1."""
    values = given(fields, name)
    if (
        not isinstance(values, list)
        or not least <= len(values) <= most
        or not set(map(type, values)) <= {int, bool}
        or not set(values) <= {0, 1}
    ):
        length = f"{least}" if least == most else f"at most {most}"
        raise ValueError(f"read_line: {name} must be a list of {length} numbers 0 or 1, got {shown(values)}")
    return np.array(values, dtype=bool)


def read_numbers(fields: dict[str, Any], name: str, n: int) -> np.ndarray:
    """(n) float64: a field that is a list of n finite numbers or null, which becomes NaN."""
    values = given(fields, name)
    if isinstance(values, list) and len(values) == n and set(map(type, values)) <= {int, float, type(None)}:
        try:
            numbers = np.array(values, dtype=np.float64)
        except OverflowError:
            numbers = np.array([math.inf])
        if not np.isinf(numbers).any():
            return numbers
    raise ValueError(f"read_line: {name} must be a list of {n} finite numbers or null, got {shown(values)}")


def read_stats(fields: dict[str, Any]) -> dict[str, int]:
    stats = given(fields, "stats")
    if not isinstance(stats, dict) or len(stats) > MOST_STATS or not all(map(short(LONGEST_NAME), stats)):
        raise ValueError(f"read_line: stats must be an object of at most {MOST_STATS} names, got {shown(stats)}")
    return {
        name: converted("read_line", f"stats[{name}]", value, whole, f"a whole number from 0 to {MOST}", not_negative)
        for name, value in stats.items()
    }


def read_queue(fields: dict[str, Any]) -> Queue | None:
    queue = fields.get("queue")
    if queue is None:
        return None
    names = Queue.__dataclass_fields__
    if not isinstance(queue, dict) or not queue.keys() >= names.keys():
        raise ValueError(f"read_line: queue must be null or an object with {', '.join(names)}, got {shown(queue)}")

    def part(name: str) -> Any:
        convert, expected = (number, "a finite number") if name == "longest_wait" else (whole, "a whole number")
        return converted("read_line", f"queue[{name}]", queue[name], convert, f"{expected}, 0 or more", not_negative)

    return Queue(**{name: part(name) for name in names})


def read_evaluation(fields: dict[str, Any]) -> Evaluation:
    error = field(fields, "error")
    return Evaluation(field(fields, "at"), field(fields, "version"), math.nan if error is None else error)


def read_dropped(fields: dict[str, Any]) -> Dropped:
    return Dropped(field(fields, "at"), field(fields, "count"))


READERS: dict[str, Callable[[dict[str, Any]], Verdict | Look | Evaluation | Dropped]] = {
    "verdict": read_verdict,
    "look": read_look,
    "evaluation": read_evaluation,
    "dropped": read_dropped,
}
