"""Runs as the loop returns them, and files of their results."""

import math

from secureafl_ext.sim import results
from secureafl_ext.sim.loop import Outcome, Point
from secureafl_ext.sim.settings import Settings


def outcome(errors=(0.9, 0.4), asr=None, seconds=2.0, **settings) -> Outcome:
    """A run as the loop returns it; the rest of the summary is what a run without a filter has."""
    curve = [Point(10 * i, error, asr) for i, error in enumerate(errors, 1)]
    summary = dict.fromkeys(("accepted", "rejected_honest", "rejected_malicious", "precision", "recall"))
    summary |= {"error": errors[-1], "asr": asr, "diverged": not math.isfinite(errors[-1])}
    summary |= {"estimation_error": None, "rounds_per_second": 10.0, "seconds": seconds}
    return Outcome(Settings(**settings).resolve(), curve, summary)


def written(path, *outcomes) -> list[results.Record]:
    records = [results.record(each) for each in outcomes]
    for record in records:
        results.append(path, record)
    return records


def never(text: str) -> None:
    raise AssertionError(f"warned: {text}")
