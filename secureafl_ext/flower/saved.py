"""The checkpoint of a loop: one file. It is read as untrusted input, and checked before anything changes."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..checkpoint import files
from ..validation import describe
from .events import KINDS
from .layout import Layout

FIELDS = {"server": dict, "slots": list, "away": list, "tally": list}
LARGEST = 2**64  # node ids are below it, and so are counts


@dataclass(frozen=True)
class Saved:
    server: dict[str, Tensor | int]  # its state_dict
    carried: dict[str, Tensor]  # of the layout
    slots: dict[int, int]  # node -> slot
    away: list[int]  # absent nodes that have a slot, in the order in which they left
    tally: dict[int | None, Counter[str]]  # node -> counts by kind


def write(path: Path, saved: Saved, layout: Layout) -> None:
    tensors = {f"server.{name}": value for name, value in saved.server.items() if isinstance(value, Tensor)}
    carried = {f"carried.{name}": value for name, value in saved.carried.items()}
    about = {
        "flower": shapes(layout),
        "server": {name: value for name, value in saved.server.items() if not isinstance(value, Tensor)},
        "slots": list(saved.slots.items()),
        "away": saved.away,
        "tally": [[node, dict(counts)] for node, counts in saved.tally.items()],
    }
    files.write(path, {**tensors, **carried}, about)


def read(path: Path, layout: Layout, clients: int) -> Saved:
    """Refuse a file that does not fit a loop with this layout and number of clients. The server checks its own part."""
    tensors, about = files.read(path)
    found = about.get("flower")
    if found != shapes(layout):
        got = "a file of SecureAFL.save" if found is None else f"the layout {found!r:.200}"
        raise ValueError(f"Loop.load: {path} must be a checkpoint of a loop with this layout, got {got}")
    for field, type_ in FIELDS.items():
        need(isinstance(about.get(field), type_), path, field, f"a {type_.__name__}", about.get(field))
    slots = read_slots(path, about["slots"], clients)
    away = about["away"]
    fits = all(is_count(node) and node in slots for node in away) and len(set(away)) == len(away)
    need(fits, path, "away", "nodes that have a slot, each once", away)
    carried = parts(tensors, "carried.")
    check_carried(path, carried, layout.carried)
    server = parts(tensors, "server.")
    unknown = sorted(name for name in tensors if not name.startswith(("server.", "carried.")))
    need(not unknown, path, "tensors", "named server.* or carried.*", unknown)
    twice = sorted(server.keys() & about["server"].keys())
    need(not twice, path, "server", "names that no tensor has", twice)
    return Saved({**server, **about["server"]}, carried, slots, away, read_tally(path, about["tally"], slots))


def read_slots(path: Path, rows: list, clients: int) -> dict[int, int]:
    for row in rows:
        fits = isinstance(row, list) and len(row) == 2 and all(map(is_count, row))
        need(fits, path, "slots", "pairs of a node and its slot", row)
    slots = {node: slot for node, slot in rows}
    used = max(slots.values(), default=-1) + 1
    if used > clients:
        raise ValueError(f"Loop: {path} has {used} slots in use, the server {clients} clients")
    different = len(slots) == len(set(slots.values())) == len(rows)
    need(different, path, "slots", "different nodes with different slots", rows)
    return slots


def read_tally(path: Path, rows: list, slots: Mapping[int, int]) -> dict[int | None, Counter[str]]:
    tally: dict[int | None, Counter[str]] = {}
    for row in rows:
        fits = isinstance(row, list) and len(row) == 2 and isinstance(row[1], dict)
        need(fits, path, "tally", "pairs of a node and its counts", row)
        node, counts = row
        known = node is None or (is_count(node) and node in slots)
        need(known and node not in tally, path, "tally", "nodes that have a slot, or null, each once", node)
        for kind, count in counts.items():
            need(kind in KINDS and is_count(count), path, "tally", "counts by kind of event", {kind: count})
        tally[node] = Counter(counts)
    return tally


def check_carried(path: Path, carried: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    names = sorted(carried.keys() ^ expected.keys())
    need(not names, path, "carried", "the layout's names", f"{names} missing or unknown")
    for name, value in expected.items():
        need(describe(carried[name]) == describe(value), path, name, describe(value), describe(carried[name]))


def parts(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < LARGEST


def need(fits: bool, path: Path, field: str, expected: str, got: object) -> None:
    if not fits:
        raise ValueError(f"Loop.load: {path}: {field} must be {expected}, got {got!r:.200}")


def shapes(layout: Layout) -> list:
    return [[name, list(entry.shape)] for name, entry in layout.entries.items()]
