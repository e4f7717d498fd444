"""`secureafl report`: one HTML page of a results folder. Everything is inside it, without scripts: it can be mailed."""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from .. import bounded_files
from ..sim import results
from ..sim.results import Record
from ..sim.settings import Settings
from . import html
from .html import Markup
from .paper import FASHION, TABLES

TABLE_BYTES = 2**24  # at most, per Markdown file
SETTINGS = [field.name for field in fields(Settings)]
# Keys of a run's summary, for the list of all runs.
SUMMARY_KEYS = (
    "error",
    "asr",
    "late_error",
    "late_asr",
    "worst_class_error",
    "accepted",
    "precision",
    "recall",
    "left_out_precision",
    "left_out_recall",
    "estimation_error",
    "rounds_per_second",
    "seconds",
)


@dataclass(frozen=True)
class Section:
    """A part of the page, with the entry for the table of contents."""

    id: str
    title: str
    body: Markup


def write(folder: Path, target: Path) -> Path:
    """Write the page, completely or not at all."""
    if not folder.is_dir():
        raise ValueError(f"report: FOLDER must be a folder of results, got {str(folder)!r}")
    results.replace_text(target, render(folder))
    return target


def render(folder: Path) -> str:
    """Tables with their plots, the main table first; then the other images, the configuration and all runs."""
    documents, images = sorted(folder.rglob("*.md"), key=_order), sorted(folder.rglob("*.png"))
    runs_files = sorted(path for path in folder.rglob(results.NAME))
    for path in (*documents, *images, *runs_files):
        if not path.resolve().is_relative_to(folder.resolve()):  # the page may be mailed: no file from elsewhere
            raise ValueError(f"report: {path} must be a file of the folder, got a link to {path.resolve()}")
    records = {path.parent.relative_to(folder): results.read(path) for path in runs_files}
    if not (documents or images or any(records.values())):
        raise ValueError(f"report: expected {results.NAME}, .md or .png in {str(folder)!r}, got none of them")
    sections: list[Section] = []

    def add(name: str, title: str, body: Markup) -> None:
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "section"
        taken = {section.id for section in sections}
        unique = slug if slug not in taken else f"{slug}-{len(sections)}"  # a count that only grows
        sections.append(Section(unique, title, body))

    for document in documents:
        plots = [path for path in images if path.with_suffix("") == document.with_suffix("")]
        title, body = html.from_markdown(bounded_files.text(document, TABLE_BYTES))
        add(document.stem, title or document.stem, body + Markup("").join(map(html.image, plots)))
        images = [path for path in images if path not in plots]
    for path in images:
        add(path.stem, path.stem, html.heading(2, path.stem) + html.image(path))
    for where, many in records.items():
        suffix = "" if where == Path() else f": {where}"
        if many:
            add(f"configuration {where}", f"Configuration{suffix}", configuration(f"Configuration{suffix}", many))
            add(f"runs {where}", f"All runs{suffix}", all_runs(f"All runs{suffix}", many))
    title = f"Results: {folder.resolve().name}"
    return html.environment().get_template("page.html").render(title=title, sections=sections)


def _order(path: Path) -> tuple[int, Path]:
    """The paper's order of tables and data sets, which begins with the main table; then all other files."""
    files = [f"{name}-{dataset}" for name in TABLES for dataset in TABLES["main"].datasets]
    stem = f"{path.stem}-{FASHION}" if path.stem in TABLES else path.stem
    return files.index(stem) if stem in files else len(files), path


def configuration(title: str, records: list[Record]) -> Markup:
    """Where the runs come from, the settings in which they differ, and the settings that they share."""

    def distinct(value: Callable[[Record], object]) -> str:
        return ", ".join(dict.fromkeys(value_text(value(record)) for record in records))

    started = sorted(record.started for record in records)
    origin = [
        ("runs", str(len(records))),
        ("started", started[0] if len(started) == 1 else f"{started[0]} to {started[-1]}"),
        ("commit", distinct(lambda record: record.commit)),
        ("hardware", distinct(lambda record: record.device)),
        ("versions", distinct(lambda record: record.versions)),
    ]
    values = {
        name: list(dict.fromkeys(value_text(getattr(record.outcome.settings, name)) for record in records))
        for name in SETTINGS
    }
    differing = [(name, ", ".join(texts)) for name, texts in values.items() if len(texts) > 1]
    shared = [(name, texts[0]) for name, texts in values.items() if len(texts) == 1]
    parts = [html.heading(2, title), html.table("origin", ("", "value"), origin)]
    if differing:
        parts += [html.heading(3, "Settings that differ")]
        parts += [html.table("settings that differ", ("setting", "values"), differing)]
    parts += [html.heading(3, "Settings in common")]
    parts += [html.table("settings in common", ("setting", "value"), shared)]
    return Markup("\n").join(parts)


def all_runs(title: str, records: list[Record]) -> Markup:
    """One line per run: the settings in which the runs differ, and the summary."""
    settings = [{name: value_text(getattr(record.outcome.settings, name)) for name in SETTINGS} for record in records]
    varied = [name for name in SETTINGS if len({line[name] for line in settings}) > 1]
    keys = [key for key in SUMMARY_KEYS if any(record.outcome.summary.get(key) is not None for record in records)]
    lines = [
        [*(line[name] for name in varied), *(value_text(record.outcome.summary.get(key)) for key in keys)]
        for line, record in zip(settings, records, strict=True)
    ]
    heads = [name.replace("_", " ") for name in (*varied, *keys)]
    made = html.table("all runs", heads, lines)
    details = Markup("<details>\n<summary>{} runs</summary>\n{}\n</details>").format(len(records), made)
    return html.heading(2, title) + details


def value_text(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={inner}" for name, inner in value.items()) or "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)
