"""Live progress on stderr: bars on a terminal, plain lines in a file or a pipe."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..report.console import digits
from ..sim.loop import Outcome, Point
from .errors import say

MOST_BARS = 16  # with more runs only the active ones have a bar
LINE_SECONDS = 2.0  # between two plain lines

Watch = Callable[[int, Point], None]
Done = Callable[[int, Outcome], None]


@contextmanager
def progress(labels: list[str], rounds: list[int]) -> Iterator[tuple[Watch, Done]]:
    """Gives the two callbacks of `runner.run_many`."""
    console = Console(stderr=True)
    with bars(console, labels, rounds) if console.is_terminal else lines(labels, rounds) as callbacks:
        yield callbacks


@contextmanager
def bars(console: Console, labels: list[str], rounds: list[int]) -> Iterator[tuple[Watch, Done]]:
    """One bar per run, and one for all runs."""
    few = len(labels) <= MOST_BARS
    texts = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[now]}"))
    columns = (*texts, TimeElapsedColumn(), TimeRemainingColumn())
    # Parallel runs reach their evaluations in bursts: only the speed over minutes predicts the time left.
    with Progress(*columns, console=console, speed_estimate_period=600) as shown:
        everything = shown.add_task(
            "all runs (time spent, time left)", total=sum(rounds), now=f"0 of {len(labels)}", visible=len(labels) > 1
        )
        tasks = [
            shown.add_task(label, total=total, now="", visible=few, start=False)
            for label, total in zip(labels, rounds, strict=True)
        ]
        reached = [0] * len(labels)
        finished: list[int] = []

        def advance(i: int, point: Point, visible: bool) -> None:
            reached[i] = point.round
            shown.update(tasks[i], completed=point.round, now=describe(point), visible=visible)
            shown.update(everything, completed=sum(reached), now=f"{len(finished)} of {len(labels)}")

        def watch(i: int, point: Point) -> None:
            shown.start_task(tasks[i])
            advance(i, point, True)

        def done(i: int, outcome: Outcome) -> None:
            finished.append(i)
            advance(i, outcome.curve[-1], few)

        yield watch, done


@contextmanager
def lines(labels: list[str], rounds: list[int]) -> Iterator[tuple[Watch, Done]]:
    """A line at every end of a run, and one at an evaluation if the last line is LINE_SECONDS old."""
    finished: list[int] = []
    last = -LINE_SECONDS

    def watch(i: int, point: Point) -> None:
        nonlocal last
        if point.round < rounds[i] and time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            say(f"{labels[i]}: {describe(point, rounds[i])}")

    def done(i: int, outcome: Outcome) -> None:
        nonlocal last
        last = time.monotonic()
        finished.append(i)
        count = f" ({len(finished)} of {len(labels)} runs finished)" if len(labels) > 1 else ""
        say(f"{labels[i]}: {describe(outcome.curve[-1], rounds[i])}{count}")

    yield watch, done


def describe(point: Point, rounds: int | None = None) -> str:
    success = "" if point.asr is None else f", attack success {digits(point.asr)}"
    total = "" if rounds is None else f" of {rounds}"
    return f"round {point.round}{total}: error {digits(point.error)}{success}"
