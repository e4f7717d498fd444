"""Many cases in child processes: one that crashes or hangs is reported by its number, and the next goes on."""

import faulthandler
import multiprocessing
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable

BATCH = 20_000  # cases of one child
SECONDS = 60  # for one case: more is a hang


def _work(case: Callable[[int], Counter], first: int, last: int, at, pipe) -> None:
    faulthandler.enable()
    counts, findings, index = Counter(), [], first
    while index < last:
        at.value = index
        try:
            counts += case(index)
        except Exception:
            findings.append((index, traceback.format_exc(limit=-3)))
            if len(findings) >= 20:
                index += 1
                break
        index += 1
    pipe.send((index, counts, findings))


def _received(pipe, at, seconds: float) -> tuple | None:
    """What the child sends at its end; None if it ended without, or stayed too long at one case."""
    before, waited = None, 0.0
    while waited < seconds:
        if pipe.poll(1):
            try:
                return pipe.recv()
            except EOFError:
                return None
        before, waited = at.value, waited + 1 if at.value == before else 0.0
    return None


def run_cases(
    case: Callable[[int], Counter], first: int, count: int, device: str, seconds: float = SECONDS, batch: int = BATCH
):
    """(counts, findings (number, words)) of the cases first .. first + count - 1

    case: of module level where the device is a GPU: a child cannot inherit its parent's use of one.
    """
    context = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
    counts, findings, end = Counter(), [], first + count
    while first < end:
        at = context.Value("q", first, lock=False)
        here, there = context.Pipe(duplex=False)
        child = context.Process(target=_work, args=(case, first, min(first + batch, end), at, there))
        child.start()
        there.close()
        got = _received(here, at, seconds)
        if got is None:
            child.join(1)
            words = f"ended by {signal.Signals(-child.exitcode).name}" if (child.exitcode or 0) < 0 else "hung"
            child.kill()
            findings.append((at.value, f"the process {words}"))
            first = at.value + 1
        else:
            first, more, found = got
            counts += more
            findings += found
            for index, words in found[:1]:  # now: a run that is cut short should not take it along
                print(f"case {index}: {words}", file=sys.stderr, flush=True)
        child.join()
        last = f", the last in case {findings[-1][0]}" if findings else ""
        print(f"{first - end + count} of {count}: {len(findings)} findings{last}", file=sys.stderr, flush=True)
        if len(findings) > 100:
            break
    return counts, findings


def told(findings: list, kind: str) -> int:
    """Print the first findings; the exit status of a run with these."""
    for index, words in findings[:20]:
        print(f"{kind} {index}: {words}")
    return 1 if findings else 0
