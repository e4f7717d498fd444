"""HTML fragments of the report page. All text comes from files that anyone may have written: it is always escaped."""

import base64
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from .. import bounded_files
from . import style

try:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markdown_it import MarkdownIt
    from markdown_it.renderer import RendererHTML
    from markdown_it.token import Token
    from markupsafe import Markup
except ModuleNotFoundError as error:
    package = (error.name or "a package").partition(".")[0]
    raise ModuleNotFoundError(
        f"{package} is missing; it writes the report page: pip install 'secureafl_ext[sim]'", name=package
    ) from error

IMAGE_BYTES = 2**26  # at most, per image
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Of Markdown only what our tables use. HTML, links and images stay plain text: the page loads and runs nothing.
RULES = ["heading", "table", "list", "fence", "backticks", "emphasis"]
NUMBER = re.compile(r"([\d.]+|inf|nan) ± ([\d.]+|inf|nan)")  # its matches have nothing to escape
SPACE = "\N{NO-BREAK SPACE}"
SCROLL_BOX = Markup('<div class="scroll" role="region" tabindex="0" aria-label="{}">\n')


def environment() -> Environment:
    """Jinja2 with the templates of this folder. Autoescape is on for all of them."""
    loader = FileSystemLoader(Path(__file__).parent)
    return Environment(autoescape=True, loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def from_markdown(text: str) -> tuple[str, Markup]:
    """The title, which is the text of the first heading or empty, and the HTML. Headings go one level down."""
    parser = MarkdownIt("zero").enable(RULES)
    tokens = parser.parse(text)
    title, name = "", "table"
    for i, token in enumerate(tokens):
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(6, int(token.tag[1]) + 1)}"
        if token.type == "heading_open":
            name = _plain(tokens[i + 1])
            title = title or name
        elif token.type == "table_open":
            token.meta["name"] = name
            _mark_up_table(tokens[i : _closing(tokens, i, "table_close") + 1])
    parser.add_render_rule("table_open", _open_table)
    parser.add_render_rule("table_close", _close_table)
    tokens = [token for token in tokens if not token.meta.get("dropped")]
    return title, Markup(parser.renderer.render(tokens, parser.options, {}))


def _mark_up_table(tokens: Sequence[Token]) -> None:
    """Make the first cell of a row its header. A row with an empty first cell belongs to the header above it."""
    header: Token | None = None
    begins = [i for i, token in enumerate(tokens) if token.type == "tr_open" and tokens[i + 1].type == "td_open"]
    ours = style.highlighted([_plain(tokens[i + 2]) for i in begins])
    for i, token in enumerate(tokens):
        if token.type == "th_open":
            token.attrSet("scope", "col")
        elif token.type == "inline" and tokens[i - 1].type in ("td_open", "th_open"):
            _set_numbers(token)
        elif i in begins:
            first = tokens[i + 1 : _closing(tokens, i, "td_close") + 1]
            text = _plain(first[1])
            if header is not None and not text:
                header.attrSet("rowspan", str(int(header.attrGet("rowspan") or 1) + 1))
                token.attrSet("class", "detail")
                for each in first:
                    each.meta["dropped"] = True
            else:
                header = first[0]
                header.attrSet("scope", "row")
                if text == ours:
                    header.attrSet("class", "ours")
                first[0].tag = first[-1].tag = "th"


def _set_numbers(cell: Token) -> None:
    """Set deviations smaller, as in 0.123 ± 0.004. A narrow cell breaks its line behind a slash, else before the ±."""
    span = '<span class="number">{}</span>' if "/" in cell.content else "{}"
    children: list[Token] = []
    for token in cell.children or []:
        if token.type != "text":
            children.append(token)
            continue
        text, mean, deviation, *rest = (*NUMBER.split(token.content.replace(" †", f"{SPACE}†")), "", "")
        while deviation:
            number = span.format(f"{mean} <small>±{SPACE}{deviation}</small>")
            children += [Token("text", "", 0, content=text), Token("html_inline", "", 0, content=number)]
            text, mean, deviation, *rest = rest
        children.append(Token("text", "", 0, content=text))
    cell.children = children


def _closing(tokens: Sequence[Token], start: int, kind: str) -> int:
    return next(i for i in range(start, len(tokens)) if tokens[i].type == kind)


def _plain(inline: Token) -> str:
    return "".join(token.content for token in inline.children or [])


def _open_table(self: RendererHTML, tokens: Sequence[Token], i: int, options: object, env: object) -> str:
    return SCROLL_BOX.format(tokens[i].meta["name"]) + Markup("<table>\n")


def _close_table(self: RendererHTML, tokens: Sequence[Token], i: int, options: object, env: object) -> str:
    return "</table>\n</div>\n"


def table(name: str, heads: Iterable[str], rows: Iterable[Iterable[str]]) -> Markup:
    """A table of plain text, in the same box as those of Markdown."""
    head = Markup("").join(Markup('<th scope="col">{}</th>').format(text) for text in heads)
    cells = (Markup("").join(map(_text_cell, row)) for row in rows)
    body = Markup("\n").join(Markup("<tr>{}</tr>").format(row) for row in cells)
    made = Markup("<table>\n<thead><tr>{}</tr></thead>\n<tbody>\n{}\n</tbody>\n</table>\n</div>").format(head, body)
    return SCROLL_BOX.format(name) + made


def _text_cell(text: str) -> Markup:
    kind = Markup(' class="long"') if len(text) > 40 else ""
    return Markup("<td{}>{}</td>").format(kind, text)


def image(path: Path) -> Markup:
    """The PNG as part of the page. It scrolls in its own box on a narrow screen."""
    data = bounded_files.contents(path, IMAGE_BYTES)
    if not data.startswith(PNG_SIGNATURE):
        raise ValueError(f"report: {path} must be a PNG image, got a file that begins with {data[:8]!r}")
    text, name = base64.b64encode(data).decode(), f"plot of {path.stem}"
    return SCROLL_BOX.format(name) + Markup('<img src="data:image/png;base64,{}" alt="{}">\n</div>\n').format(
        text, name
    )


def heading(level: int, text: str) -> Markup:
    return Markup("<h{}>{}</h{}>\n").format(level, text, level)
