"""One HTML page of a results folder, with all that it shows inside it: it can be mailed, and needs no script."""

import base64
import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path

from .. import bounded_files
from ..sim import results
from ..sim.options import KINDS
from ..sim.results import Record

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --line: #d0d7de; --soft: #f3f5f7; --link: #0757b8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e8ee; --paper: #14171b; --line: #3a424c; --soft: #1f242b; --link: #7db4ff; }
}
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 76rem; margin: 0 auto; padding: 1rem; overflow-wrap: break-word; }
a { color: var(--link); }
code { font-size: .9em; background: var(--soft); padding: .1em .3em; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .875rem; }
th, td { border: 1px solid var(--line); padding: .25rem .5rem; text-align: left; white-space: nowrap; }
td.wrap { white-space: normal; min-width: 14rem; }
thead th { background: var(--soft); }
img { display: block; max-width: 100%; height: auto; margin: 1rem 0; background: #fff; }
summary { cursor: pointer; }
"""

PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
{body}
</main>
</body>
</html>
"""

SHEET, PICTURE = 2**24, 2**26  # bytes of one at most
# Of the summary, for the list of all runs.
SHOWN = ("error", "asr", "accepted", "precision", "recall", "estimation_error", "rounds_per_second", "seconds")


def write(folder: Path, target: Path) -> Path:
    """The page, there whole or not at all."""
    if not folder.is_dir():
        raise ValueError(f"report: FOLDER must be a folder of results, got {str(folder)!r}")
    results.replace_text(target, render(folder))
    return target


def render(folder: Path) -> str:
    """Tables with their pictures first, then pictures of their own, the configuration and every run."""
    sheets, pictures = sorted(folder.rglob("*.md")), sorted(folder.rglob("*.png"))
    for path in (folder / results.NAME, *sheets, *pictures):
        if not path.resolve().is_relative_to(folder.resolve()):  # the page may be mailed: it shows this folder alone
            raise ValueError(f"report: {path} must be a file of the folder, got a link to {path.resolve()}")
    records = results.read(folder / results.NAME)
    if not (records or sheets or pictures):
        raise ValueError(f"report: expected {results.NAME}, .md or .png in {str(folder)!r}, got none of them")
    sections = []
    for sheet in sheets:
        beside = [picture for picture in pictures if picture.with_suffix("") == sheet.with_suffix("")]
        body = markdown(bounded_files.text(sheet, SHEET), below=1) + "".join(map(image, beside))
        sections.append(section(sheet.stem, body))
        pictures = [picture for picture in pictures if picture not in beside]
    sections += [section(picture.stem, f"<h2>{escape(picture.stem)}</h2>\n{image(picture)}") for picture in pictures]
    if records:
        sections += [section("configuration", configuration(records)), section("runs", runs(records))]
    title = f"Results: {folder.resolve().name}"
    return PAGE.format(title=escape(title), style=STYLE, body="\n".join(sections))


def section(name: str, body: str) -> str:
    return f'<section aria-label="{escape(name)}">\n{body}\n</section>'


def image(path: Path) -> str:
    data = bounded_files.contents(path, PICTURE)
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        raise ValueError(f"report: {path} must be a PNG picture, got {data[:8]!r}")
    text = base64.b64encode(data).decode()
    return f'<img src="data:image/png;base64,{text}" alt="{escape(f"picture of {path.stem}")}">\n'


def configuration(records: list[Record]) -> str:
    """How the runs came about, what they have in common, and what they differ in."""

    def each(value: Callable[[Record], object]) -> str:
        return ", ".join(dict.fromkeys(spell(value(record)) for record in records))

    began = sorted(record.started for record in records)
    origin = [
        ("runs", str(len(records))),
        ("begun", began[0] if len(began) == 1 else f"{began[0]} to {began[-1]}"),
        ("commit", each(lambda record: record.commit)),
        ("hardware", each(lambda record: record.device)),
        ("versions", each(lambda record: record.versions)),
    ]
    values = {name: list(dict.fromkeys(spell(getattr(r.outcome.settings, name)) for r in records)) for name in KINDS}
    common = [(name, spelled[0]) for name, spelled in values.items() if len(spelled) == 1]
    differing = [(name, ", ".join(spelled)) for name, spelled in values.items() if len(spelled) > 1]
    parts = ["<h2>Configuration</h2>", table(("what", "value"), origin, "origin")]
    if differing:
        parts += [
            "<h3>What the runs differ in</h3>",
            table(("setting", "values"), differing, "what the runs differ in"),
        ]
    parts += ["<h3>What they have in common</h3>", table(("setting", "value"), common, "what the runs have in common")]
    return "\n".join(parts)


def runs(records: list[Record]) -> str:
    """Every run on a line: the settings in which they differ, and what came of it."""
    spelled = [{name: spell(getattr(r.outcome.settings, name)) for name in KINDS} for r in records]
    varied = [name for name in KINDS if len({line[name] for line in spelled}) > 1]
    keys = [key for key in SHOWN if any(record.outcome.summary.get(key) is not None for record in records)]
    lines = [
        [*(line[name] for name in varied), *(spell(record.outcome.summary.get(key)) for key in keys)]
        for line, record in zip(spelled, records, strict=True)
    ]
    made = table((*varied, *keys), lines, "all runs")
    return f"<h2>All runs</h2>\n<details>\n<summary>{len(records)} runs</summary>\n{made}\n</details>"


def spell(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={inner}" for name, inner in value.items()) or "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)


def table(heads: Sequence[str], lines: Iterable[Sequence[str]], name: str) -> str:
    """Of plain text. On a narrow screen it scrolls by itself, also by the keyboard."""
    return _table(list(map(escape, heads)), [list(map(escape, line)) for line in lines], name)


def _table(heads: list[str], lines: list[list[str]], name: str) -> str:
    head = "".join(f'<th scope="col">{text}</th>' for text in heads)
    rows = "\n".join(f"<tr>{''.join(map(_cell, line))}</tr>" for line in lines)
    about = f'class="scroll" role="region" tabindex="0" aria-label="{escape(name)}"'
    return f"<div {about}>\n<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>\n</div>"


def _cell(text: str) -> str:
    return f'<td class="wrap">{text}</td>' if len(text) > 60 else f"<td>{text}</td>"


def markdown(text: str, below: int = 0) -> str:
    """The markdown that this project writes: headings, paragraphs, lists, tables, bold, code. Headings go `below` by
    so many levels."""
    blocks, name = [], "table"
    for block in re.split(r"\n\s*\n", text.strip()):
        lines = block.splitlines()
        heading = re.fullmatch(r"(#{1,5}) (.*)", block)
        if heading:
            level, name = min(6, len(heading[1]) + below), heading[2]
            blocks.append(f"<h{level}>{inline(name)}</h{level}>")
        elif len(lines) > 1 and all(line.startswith("|") for line in lines):
            bare = (line.strip().removeprefix("|").removesuffix("|") for line in lines)
            heads, _, *rows = ([inline(cell.strip()) for cell in line.split("|")] for line in bare)
            blocks.append(_table(heads, rows, name))
        elif all(line.startswith("- ") for line in lines):
            blocks.append("<ul>\n" + "\n".join(f"<li>{inline(line[2:])}</li>" for line in lines) + "\n</ul>")
        else:
            blocks.append(f"<p>{inline(' '.join(lines))}</p>")
    return "\n".join(blocks) + "\n"


def inline(text: str) -> str:
    """Bold and code; whatever else looks like HTML is shown as it is written."""
    parts = re.split(r"`([^`]*)`", text)
    for i, part in enumerate(map(escape, parts)):
        parts[i] = f"<code>{part}</code>" if i % 2 else re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", part)
    return "".join(parts)
