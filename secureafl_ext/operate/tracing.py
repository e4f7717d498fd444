"""Traces: one OpenTelemetry span per upload."""

from collections.abc import Sequence
from typing import Any

from ..validation import printable
from .json_lines import LONGEST_REASON
from .observer import Observer
from .verdict import UPLOADS, Verdict

ATTRIBUTES = ("kind", "client", "who", "version", "staleness", "factor", "reason")


class Traces(Observer):
    """A span "secureafl.submit" per upload, with the time that `submit` took and the fields of its verdict.

    tracer: of OpenTelemetry; default: the one of the global provider. Spans are made in the observers' thread.
    """

    def __init__(self, tracer: Any = None):
        if tracer is None:
            try:
                from opentelemetry import trace
            except ModuleNotFoundError as error:
                words = "Traces needs the package opentelemetry-sdk: pip install 'secureafl_ext[otel]'"
                raise ModuleNotFoundError(words, name=error.name) from error
            tracer = trace.get_tracer("secureafl_ext")
        self.tracer = tracer

    def verdicts(self, batch: Sequence[Verdict]) -> None:
        for verdict in batch:
            if verdict.kind in UPLOADS:
                end = int(1e9 * verdict.at)  # nanoseconds since 1970
                begin = end - int(1e9 * (verdict.seconds or 0))
                span = self.tracer.start_span("secureafl.submit", start_time=begin, attributes=attributes(verdict))
                span.end(end_time=end)


def attributes(verdict: Verdict) -> dict[str, Any]:
    """Without those that are not known, for OpenTelemetry has no null."""
    values = {f"secureafl.{name}": getattr(verdict, name) for name in ATTRIBUTES}
    return {
        name: printable(value, LONGEST_REASON) if isinstance(value, str) else value
        for name, value in values.items()
        if value not in (None, "")
    }
