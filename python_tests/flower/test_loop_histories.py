"""Simulated faults of the Flower loop: a short run, a kill at every point, and proof that the check can fail."""

import math
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from loop.replies import KINDS as REPLIES
from loop_histories import check
from places import HERE

from secureafl_ext.checkpoint import files
from secureafl_ext.flower import KINDS, Loop, replies
from secureafl_ext.flower.slots import Slots
from secureafl_ext.flower.turns import Turns

HISTORIES = 170  # The last fault to happen does so in history 164, and every defect is found in the first 26.
SMALL = 27  # a history of about a hundred points, with a node that leaves
FAULTS = {
    *KINDS,
    *(f"reply {kind.__name__}" for kind in REPLIES),
    *(f"killed at {place}" for place in ("nodes", "push", "pull", "sleep", "event")),
    *(f"connection fails at {call}" for call in ("nodes", "push", "pull")),
    *(f"{what} disk {call}" for what in ("error of", "killed at") for call in ("list", "open", "write", "fsync")),
    *(f"{what} disk {call}" for what in ("error of", "killed at") for call in ("flush", "replace", "unlink")),
    "crowds",
    "lr set",
    "refused",
    "renames lost in a power cut",
}


def script(*arguments):
    return subprocess.run([sys.executable, HERE / "loop_histories.py", *arguments], capture_output=True, text=True)


def test_histories_with_every_fault_follow_the_model():
    done = script("--histories", str(HISTORIES), "--seed", "1", "--processes", "2")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    *_, counted, last = done.stdout.splitlines()
    assert last.startswith(f"{HISTORIES} histories, 0 failed")
    counts = dict(part.rsplit(" ", 1) for part in counted.split(", "))
    assert not FAULTS.difference(counts)  # each has happened


def test_a_kill_at_every_point_is_survived():
    """One history without other kills, once for each of its points."""
    seed, found = SMALL, Counter()
    _, counts, problem = check(seed, kill_at=10**9)
    assert not problem
    for point in range(1, counts["touches"] + 1):
        _, counts, problem = check(seed, kill_at=point)
        assert not problem, f"kill_at={point}: {problem}"
        found += Counter({name: count for name, count in counts.items() if name.startswith("killed at")})
    assert found.total() == point > 50
    assert len(found) == 12  # calls of the grid, pauses, events and calls of the disk


def test_one_seed_is_one_history():
    first, second = [], []
    assert check(3, first.append)[1] == check(3, second.append)[1]
    cut = [[re.sub(r"/\S*/loop", "", line) for line in lines] for lines in (first, second)]
    assert cut[0] == cut[1] and len(first) > 30


# Defects, each of which must be found


def smaller_gap(patch):
    plain = Turns.gap
    patch.setattr(Turns, "gap", lambda self, present: max(0, plain(self, present) - 1))


def larger_gap(patch):
    plain = Turns.gap
    patch.setattr(Turns, "gap", lambda self, present: plain(self, present) + 1)


def wrong_slot(patch):
    plain = Slots.admit

    def admit(self, node):
        given = plain(self, node)
        if given is None:
            return None
        self.of[node] = (given[0] + 1) % self.capacity
        return self.of[node], given[1]

    patch.setattr(Slots, "admit", admit)


def latest_away_loses_its_slot(patch):
    plain = Slots.admit

    def admit(self, node):
        if node not in self.of:
            self.away = dict.fromkeys(reversed(self.away))
        return plain(self, node)

    patch.setattr(Slots, "admit", admit)


def lost_tally(patch):
    plain = Loop._join

    def join(self, node):
        before, nodes = Counter(self.tally.get(None, ())), set(self.tally)
        plain(self, node)
        if nodes - set(self.tally):
            self.tally[None] = before

    patch.setattr(Loop, "_join", join)


def judged_twice(patch):
    plain = Loop._judge

    def judge(self, answer):
        trained = answer.trained.clone()
        plain(self, answer)
        answer.trained.copy_(trained)
        plain(self, answer)

    patch.setattr(Loop, "_judge", judge)


def late_taken(patch):
    plain = Loop._take

    def take(self, reply):
        asked, self._asked = self._asked, 0.0
        plain(self, reply)
        self._asked = asked

    patch.setattr(Loop, "_take", take)


def reply_of_a_node_that_left(patch):
    plain = Loop._left

    def left(self, node, reason=""):
        kept = dict(self.open)
        plain(self, node, reason)
        self.open = kept

    patch.setattr(Loop, "_left", left)


def nodes_that_left_count(patch):
    patch.setattr(Loop, "_stop_counting", lambda self, node: None)


def no_pause_after_a_failure(patch):
    patch.setattr(Turns, "failed", lambda self, node, now: self.ready(node))


def node_lost_with_a_push(patch):
    patch.setattr(Turns, "still_due", lambda self, node: None)


def counts_lost_at_a_restart(patch):
    plain = Loop.load

    def load(self):
        plain(self)
        self.tally = {}

    patch.setattr(Loop, "load", load)


def no_fsync(patch):
    patch.setattr(files, "to_disk", lambda path: None)


def checkpoint_too_rare(patch):
    plain = Loop.__init__

    def init(self, *arguments, every=100, **settings):
        plain(self, *arguments, every=every + 1, **settings)

    patch.setattr(Loop, "__init__", init)


def divided_by_the_lr_of_the_verdict(patch):
    plain = Loop._judge
    patch.setattr(
        Loop, "_judge", lambda self, one: plain(self, replace(one, sent=replace(one.sent, lr=self.server.lr)))
    )


def nodes_speak_for_flower(patch):
    plain = replies.error
    patch.setattr(replies, "error", lambda reply: (replies.ERRORS.get(reply.error.code, "failed"), plain(reply)[1]))


def ordered_by_the_senders_clocks(patch):
    plain = Loop._pull

    def made_at(reply):
        at = reply.metadata.created_at
        return at if isinstance(at, float) and math.isfinite(at) else math.inf

    patch.setattr(Loop, "_pull", lambda self: sorted(plain(self), key=made_at, reverse=True))


DEFECTS = [
    smaller_gap, larger_gap, wrong_slot, latest_away_loses_its_slot, lost_tally, judged_twice, late_taken,
    reply_of_a_node_that_left, nodes_that_left_count, no_pause_after_a_failure, node_lost_with_a_push,
    counts_lost_at_a_restart, no_fsync, checkpoint_too_rare, divided_by_the_lr_of_the_verdict, nodes_speak_for_flower,
    ordered_by_the_senders_clocks,
]  # fmt: skip


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_a_defect_is_found(monkeypatch, defect):
    defect(monkeypatch)
    assert any(check(seed)[2] for seed in range(1, HISTORIES + 1))
