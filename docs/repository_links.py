"""mkdocs hook: links that leave docs/ work in the site as they do in the repository.

Pages link to files such as ../results/x.md or ../SECURITY.md by relative paths, which GitHub follows. The site holds
docs/ alone, so each linked file joins it under repository/, and links are rewritten. Linked markdown becomes a page.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PREFIX = "repository/"
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")  # relative links: no scheme, not only an anchor
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages of the navigation that lie outside docs/, and all that is linked from a page."""
    waiting = [path for path in ("SECURITY.md", "CONTRIBUTING.md") if files.get_file_from_path(PREFIX + path) is None]
    for page in files.documentation_pages():
        waiting += [path for path in _targets(page) if not path.startswith("docs/")]
    while waiting:
        path = waiting.pop()
        if files.get_file_from_path(PREFIX + path) is None and (ROOT / path).is_file():
            file = File.generated(config, PREFIX + path, abs_src_path=str(ROOT / path))
            files.append(file)
            if file.is_documentation_page():
                waiting += [target for target in _targets(file) if not target.startswith("docs/")]
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    def rewritten(link: re.Match) -> str:
        target = _site(_resolve(page.file.src_uri, link[2]))
        return link[1] + posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or ".") + link[3]

    return _outside_code(markdown, lambda text: LINK.sub(rewritten, text))


def _targets(file: File) -> list[str]:
    found: list[str] = []
    _outside_code(file.content_string, lambda text: found.extend(link[1] for link in LINK.findall(text)) or text)
    return [_resolve(file.src_uri, target) for target in found]


def _resolve(src_uri: str, target: str) -> str:
    """The repository's path of a link in a page of the site; a folder stands for its README."""
    page = src_uri.removeprefix(PREFIX) if src_uri.startswith(PREFIX) else f"docs/{src_uri}"
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    return f"{path}/README.md" if (ROOT / path / "README.md").is_file() else path


def _site(path: str) -> str:
    return path.removeprefix("docs/") if path.startswith("docs/") else PREFIX + path


def _outside_code(markdown: str, change) -> str:
    """`change` applied to all text but fenced code."""
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [change(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(markdown[end:])])
