"""`secureafl report`: the page as a parser reads it, and as a browser shows it."""

import base64
import re
import shutil
from dataclasses import fields
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from browser import BROWSER
from matplotlib.figure import Figure
from measured_page import measured
from places import ROOT

from secureafl_ext.cli import main
from secureafl_ext.report import page, tables
from secureafl_ext.sim import results
from secureafl_ext.sim.loop import Outcome, Point
from secureafl_ext.sim.results import Record
from secureafl_ext.sim.settings import Settings

VOID = {"meta", "img"}
EVIL = "<script>alert('x')</script> & \"quoted\""
RESULTS = ROOT / "results"


class Tree(HTMLParser):
    """Refuses what is not nested as it should be; keeps tags, attributes and the text of every tag."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts = [], [], [], {}
        self.sizes = []  # cells of every table
        self.feed(text)
        self.close()
        assert self.open == []

    @property
    def rows(self) -> dict[str, dict[str, str]]:
        """Of the tables with two columns, by their names."""
        boxes = [(attributes["aria-label"], i) for i, (tag, attributes) in enumerate(self.attributes) if tag == "div"]
        names = [name for name, i in boxes if self.tags[i + 1] == "table"]  # the others hold images
        cells, result = iter(self.texts["td"]), {}
        for name, size in zip(names, self.sizes, strict=True):
            mine = [next(cells) for _ in range(size)]
            result[name] = dict(zip(mine[::2], mine[1::2], strict=False))
        return result

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "table":
            self.sizes.append(0)
        self.sizes[-1:] = [size + (tag == "td") for size in self.sizes[-1:]]
        self.attributes.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        for tag in set(self.open):
            self.texts[tag][-1] += data


def kept(folder: Path, commit: str = "abc123", **changed: object) -> None:
    settings = Settings(device="cpu", **changed).resolve()
    summary = {"error": 0.25, "asr": None, "accepted": 0.5, "seconds": 2.0}
    outcome = Outcome(settings, [Point(400, 0.25, None)], summary)
    record = Record(outcome, "2026-01-02T03:04:05+00:00", commit, "a machine", {"torch": "2.9"})
    results.append(folder / results.NAME, record)


def picture(path: Path) -> bytes:
    Figure(figsize=(9, 1)).savefig(path)
    return path.read_bytes()


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two runs, a table with its picture, and a picture without a table."""
    made = tmp_path / "some results"
    made.mkdir()
    kept(made, attack="none")
    kept(made, attack="gaussian", attack_options={"std": 3.0})
    wide = "| defense | " + " | ".join(f"column {i}" for i in range(40)) + " |"
    rule = "|" + " --- |" * 41
    row = "| secureafl | **0.125** † | 0.12 |" + " |" * 38
    text = f"# main: a title\n\n`secureafl paper`; here.\n\n{wide}\n{rule}\n{row}\n\n- not run: {EVIL}\n"
    (made / "main.md").write_text(text, encoding="utf-8")
    picture(made / "main.png")
    picture(made / "sweep.png")
    return made


@pytest.fixture
def tree(folder) -> Tree:
    assert main.main(["report", str(folder)]) == 0
    return Tree((folder / "report.html").read_text(encoding="utf-8"))


def test_the_page_is_one_whole_html5_document(folder, tree):
    assert (folder / "report.html").read_text(encoding="utf-8").startswith('<!DOCTYPE html>\n<html lang="en">')
    assert tree.tags[:5] == ["html", "head", "meta", "meta", "title"]
    assert [tree.tags.count(tag) for tag in ("html", "head", "body", "main", "h1", "title")] == [1] * 6
    assert ("meta", {"charset": "utf-8"}) in tree.attributes
    assert any(attrs.get("name") == "viewport" for tag, attrs in tree.attributes if tag == "meta")
    assert tree.texts["h1"] == tree.texts["title"] == ["Results: some results"]
    levels = [int(tag[1]) for tag in tree.tags if re.fullmatch(r"h[1-6]", tag)]
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_nothing_is_loaded_from_elsewhere_and_nothing_runs(tree):
    assert not {"script", "link", "iframe", "object"} & set(tree.tags)
    for _, attributes in tree.attributes:
        assert not any(name.startswith("on") for name in attributes)
        assert attributes.get("src", "data:").startswith("data:")
    assert "url(" not in tree.texts["style"][0] and "@import" not in tree.texts["style"][0]


def test_pictures_are_inside_the_page_each_once_and_described(folder, tree):
    images = [attributes for tag, attributes in tree.attributes if tag == "img"]
    head = "data:image/png;base64,"
    inside = [base64.b64decode(image["src"].removeprefix(head), validate=True) for image in images]
    assert inside == [(folder / name).read_bytes() for name in ("main.png", "sweep.png")]
    assert [image["alt"] for image in images] == ["plot of main", "plot of sweep"]


def test_a_picture_follows_its_own_table(tree):
    sections = [i for i, tag in enumerate(tree.tags) if tag == "section"]
    first = tree.tags[sections[0] : sections[1]]
    assert first.index("table") < first.index("img") and first.count("img") == 1


def test_markdown_becomes_tables_lists_bold_and_code(tree):
    assert "main: a title" in tree.texts["h2"]
    assert "secureafl paper" in tree.texts["code"]
    assert tree.texts["strong"] == ["0.125"]
    assert tree.texts["th"][:2] == ["defense", "column 0"]
    assert tree.texts["th"][41:42] == ["secureafl"], "the first cell of a row is its header"
    assert tree.texts["td"][:3] == ["0.125\N{NO-BREAK SPACE}†", "0.12", ""]
    assert tree.texts["li"][-1] == f"not run: {EVIL}"


def test_whatever_looks_like_html_is_shown_and_not_obeyed(folder):
    folder = folder.rename(folder.with_name("<i> & co"))
    kept(folder, commit=EVIL, data_dir=EVIL)
    (folder / f"{EVIL.replace('/', '')}.md").write_text(f"# {EVIL}\n\n{EVIL}\n\n| {EVIL} |\n| --- |\n| `{EVIL}` |\n")
    made = Tree(page.render(folder))
    assert "script" not in made.tags
    assert EVIL in made.texts["h2"] and EVIL in made.texts["th"] and EVIL in made.texts["code"]
    assert any(EVIL in text for text in made.texts["p"])
    labels = [attributes["aria-label"] for tag, attributes in made.attributes if tag == "section"]
    assert EVIL in labels and EVIL in made.texts["a"], "in the table of contents too"
    assert all(re.fullmatch("[a-z0-9-]+", attrs["id"]) for tag, attrs in made.attributes if tag == "section")
    assert made.texts["title"] == made.texts["h1"] == ["Results: <i> & co"]
    assert made.rows["origin"]["commit"] == f"abc123, {EVIL}"
    assert EVIL in made.rows["settings that differ"]["data_dir"]


def test_configuration_tells_what_runs_share_and_what_they_differ_in(tree):
    differ, common = (tree.rows[f"settings {which}"] for which in ("that differ", "in common"))
    assert differ == {"attack": "none, gaussian", "attack_options": "-, std=3.0"}
    settings = {field.name for field in fields(Settings)}
    assert set(common) == settings - set(differ)
    assert (common["dataset"], common["rounds"], common["lr"]) == ("fashion-mnist-small", "400", "0.05")


def test_origin_names_commit_hardware_versions_and_date(tree):
    assert tree.rows["origin"] == {
        "runs": "2",
        "started": "2026-01-02T03:04:05+00:00 to 2026-01-02T03:04:05+00:00",
        "commit": "abc123",
        "hardware": "a machine",
        "versions": "torch=2.9",
    }


def test_every_run_is_a_line_of_what_differs_and_what_came_of_it(tree):
    at = tree.texts["th"].index("attack")
    assert tree.texts["th"][at:] == ["attack", "attack options", "error", "accepted", "seconds"]
    assert tree.texts["td"][-10:] == ["none", "-", "0.25", "0.5", "2", "gaussian", "std=3.0", "0.25", "0.5", "2"]


def test_every_table_scrolls_by_itself_and_is_named(tree):
    regions = [attributes for tag, attributes in tree.attributes if attributes.get("class") == "scroll"]
    assert len(regions) == tree.tags.count("table") + tree.tags.count("img") >= 6
    assert all(region["tabindex"] == "0" and region["aria-label"] for region in regions)
    assert "overflow-x: auto" in tree.texts["style"][0]
    assert "prefers-color-scheme: dark" in tree.texts["style"][0]


@pytest.mark.parametrize(
    "text",
    [
        "![x](http://example.com/x.png)",
        "[x](javascript:alert(1))",
        "<http://example.com>",
        "[x]: http://example.com",
        "&lt;b&gt;",
        "<b>bold</b>",
        "| a |\n| --- |\n| <img src=x> ± <b>1</b> |",
        '| 0.1 ± 0.2" onclick=x |\n| --- |\n| 1 |',
    ],
)
def test_markdown_brings_no_links_images_or_html(tmp_path, text):
    (tmp_path / "a.md").write_text(f"# title\n\n{text}\n", encoding="utf-8")
    made = Tree(page.render(tmp_path))
    links = [attributes["href"] for tag, attributes in made.attributes if tag == "a"]
    assert links == ["#a"]
    assert not {"img", "b", "script"} & set(made.tags)
    assert not any("onclick" in attributes for _, attributes in made.attributes)
    shown = made.texts["main"][0].replace("\N{NO-BREAK SPACE}", " ")
    assert all(word in shown for line in text.splitlines() for word in line.strip("| -").split(" | ") if word)


def test_rows_without_a_name_belong_to_the_row_above(tmp_path):
    lines = [
        "| defense | | x |",
        "| - | - | - |",
        "| a | ours | 1 |",
        "| | paper | 2 |",
        "| secureafl-kin | ours | 3 |",
    ]
    (tmp_path / "a.md").write_text("\n".join(lines))
    made = Tree(page.render(tmp_path))
    heads = [attributes for tag, attributes in made.attributes if tag == "th" and attributes.get("scope") == "row"]
    assert heads == [{"scope": "row", "rowspan": "2"}, {"scope": "row", "class": "ours"}]
    assert made.texts["th"][3:] == ["a", "secureafl-kin"]
    assert made.texts["td"] == ["ours", "1", "paper", "2", "ours", "3"]
    assert [attrs.get("class") for tag, attrs in made.attributes if tag == "tr"] == [None, None, "detail", None]


def test_the_main_table_comes_first_and_every_section_is_in_the_contents(folder):
    for name in ("alpha-fashion-mnist", "about", "main-udacity", "zz/main-fashion-mnist"):
        (folder / f"{name}.md").parent.mkdir(exist_ok=True)
        (folder / f"{name}.md").write_text(f"# heading of {name}\n")
    kept(folder / "zz", attack="none")
    made = Tree(page.render(folder))
    names = [attributes["id"] for tag, attributes in made.attributes if tag == "section"]
    assert names[:5] == ["main", "main-fashion-mnist", "main-udacity", "alpha-fashion-mnist", "about"]
    assert names[5:] == ["sweep", "configuration", "runs", "configuration-zz", "runs-zz"]
    assert [attributes["href"] for tag, attributes in made.attributes if tag == "a"] == [f"#{name}" for name in names]
    assert made.texts["a"][1:3] == ["heading of zz/main-fashion-mnist", "heading of main-udacity"]
    assert made.texts["a"][-2:] == ["Configuration: zz", "All runs: zz"]


def test_sections_of_one_name_have_links_of_their_own(tmp_path):
    for name in ("a/x", "b/x", "c/x-1"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / f"{name}.md").write_text("text\n")
    made = Tree(page.render(tmp_path))
    names = [attributes["id"] for tag, attributes in made.attributes if tag == "section"]
    assert len(set(names)) == 3


def test_a_folder_without_runs_still_shows_its_tables(tmp_path):
    (tmp_path / "a.md").write_text("# only this\n")
    made = Tree(page.render(tmp_path))
    assert made.texts["h2"] == ["only this"]


def test_the_page_goes_where_it_is_told(folder, tmp_path, capsys):
    target = tmp_path / "deep" / "page.html"
    assert main.main(["report", str(folder), "--html", str(target)]) == 0
    assert capsys.readouterr().out == f"Report: {target}\n"
    assert target.read_text(encoding="utf-8") == page.render(folder)
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("nowhere", "report: FOLDER must be a folder of results, got 'nowhere'"),
        (".", "report: expected results.jsonl, .md or .png in '.', got none of them"),
        ("", "report: FOLDER must be a folder of results, got 'secureafl-results'"),
        (". --htm x", "unknown argument '--htm'; choose from --html"),
    ],
)
def test_mistakes_are_named(argv, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main.main(["report", *argv.split()]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(BROWSER is None, reason="needs chromium, chromium-browser or google-chrome on PATH")
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)])
def test_a_browser_shows_the_page(folder, tree, tmp_path, width, dark):
    """Only a box with a wide table scrolls, links of the contents lead somewhere, and text can be read."""
    facts = measured((folder / "report.html").read_text(encoding="utf-8"), tmp_path, width, dark)
    assert (facts["overflow"], facts["images"], facts["dead"]) == (0, 2, 0)
    assert facts["links"] == tree.tags.count("section") == 4
    assert facts["contrast"] >= 4.5, "WCAG AA"
    assert facts["smallest"] >= 10
    assert facts["scrolling"][:1] == ["main: a title"], "40 columns"
    assert facts["counts"] == [tree.tags.count(tag) for tag in ("table", "tr", "td", "img")], "nothing was repaired"


@pytest.mark.skipif(BROWSER is None, reason="needs chromium, chromium-browser or google-chrome on PATH")
@pytest.mark.skipif(not RESULTS.is_dir(), reason="needs the results folder of the source tree")
@pytest.mark.parametrize(("width", "dark"), [(1280, True), (400, False)])
def test_our_own_results_fit_on_the_screen(tmp_path, width, dark):
    """All columns of the paper's tables are visible at 1280 px. Others scroll in their box, never the page."""
    facts = measured(page.render(RESULTS), tmp_path, width, dark)
    assert (facts["overflow"], facts["dead"]) == (0, 0)
    assert facts["contrast"] >= 4.5
    assert facts["smallest"] >= 10
    if width == 1280:
        assert set(facts["scrolling"]) <= set(tables.TITLES.values()), "the table of robustness has 21 columns"
    else:
        assert "main-fashion-mnist: every method under every attack" in facts["scrolling"]


@pytest.mark.parametrize("name", ["notes.md", "plot.png", results.NAME, "deep/notes.md"])
@pytest.mark.parametrize("to", ["file", "folder"])
def test_nothing_outside_the_folder_gets_into_the_page(folder, tmp_path, capsys, name, to):
    secret = tmp_path / "secret"
    secret.mkdir()
    shutil.copy(folder / "sweep.png", secret / "plot.png")
    shutil.copy(folder / results.NAME, secret / results.NAME)
    (secret / "notes.md").write_text("private")
    link = folder / name
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    if to == "file":
        link.symlink_to(secret / link.name)
        assert main.main(["report", str(folder)]) == 2
        said = capsys.readouterr().err
        assert str(link) in said and "got a link to" in said and said.count("\n") == 1
        assert not (folder / "report.html").exists()
    else:
        (folder / "linked").symlink_to(secret)
        assert main.main(["report", str(folder)]) == 0
        assert "private" not in (folder / "report.html").read_text(encoding="utf-8")


def test_links_within_the_folder_are_shown(folder):
    (folder / "again.md").symlink_to(folder / "main.md")
    assert main.main(["report", str(folder)]) == 0


def test_what_only_has_the_name_of_a_picture_is_refused(folder, capsys):
    (folder / "sweep.png").write_bytes(b"root:x:0:0")
    assert main.main(["report", str(folder)]) == 2
    assert "sweep.png must be a PNG image" in capsys.readouterr().err
