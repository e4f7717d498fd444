"""README and docs are true: their code runs, their numbers are those of the results, their links lead somewhere."""

import os
import re
import tomllib
from collections import Counter, defaultdict
from contextlib import chdir
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from flower_processes import free_port
from places import ROOT

from secureafl_ext.sim import results

TABLE = ROOT / "results/fashion-mnist/robustness"
README = (ROOT / "README.md").read_text()
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "examples").glob("*/README.md"),
]
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def code(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def readme_code(word: str) -> str:
    """The one block of README that has this word."""
    (block,) = [block for block in code(README) if word in block]
    return block


def test_readme_is_short_and_begins_with_three_numbers():
    lines = README.splitlines()
    assert len(lines) <= 120
    numbers = [line for line in lines[:15] if re.search(r"\*\*\d[\d.]*[^*]*\*\*", line)]
    assert len(numbers) == 3 and all("](" in line for line in numbers), "three numbers, each with its source"
    assert any(line.startswith("![") for line in lines[:20])
    assert len(code(README)) == 4


def test_readme_has_the_worst_cases_of_the_picture():
    """Of the defenses that ran under all attacks. The picture is the one of the table."""
    records = results.read(TABLE / results.NAME, pytest.fail)
    worst, ran = defaultdict(float), Counter(record.outcome.settings.defense for record in records)
    for record in records:
        summary = record.outcome.summary
        harm = max(summary["error"], summary.get("asr") or 0.0)  # 1.0 if the model is no longer finite
        worst[record.outcome.settings.defense] = max(worst[record.outcome.settings.defense], harm)
    complete = {name: worst[name] for name in worst if ran[name] == ran["secureafl-support"]}
    ours = complete.pop("secureafl-support")
    del complete["secureafl"], complete["secureafl-kin"]  # stand in the table of rules
    assert ran["secureafl-support"] == 21 and len(complete) == 6
    assert f"**{ours:.2f}** | {min(complete.values()):.2f} to {max(complete.values()):.1f}: five other" in README
    assert (ROOT / "docs/robustness.png").read_bytes() == (TABLE / "robustness-fashion-mnist.png").read_bytes()


def test_readme_has_the_times_of_the_benchmarks():
    row = next(
        line.split("|")
        for line in (ROOT / "bench/results/h200/scaling.md").read_text().splitlines()
        if line.startswith("| 50 | 140,000 | 3 |")
    )
    assert f"**{float(row[4]):.3f} ms** | {float(row[-3]):.2f} ms" in README


@pytest.mark.parametrize("page, word", [("README.md", "trimmed_mean"), ("README.md", "checkout"), ("docs", "")])
def test_code_runs_as_it_stands(page, word, tmp_path, monkeypatch):
    (tmp_path / "secureafl-results").symlink_to(ROOT / "results/fashion-mnist")
    monkeypatch.chdir(tmp_path)
    if word:
        blocks = [readme_code(word)]
    else:
        blocks = code((ROOT / "docs/guides/operate.md").read_text())
        blocks += code((ROOT / "docs/guides/read-results.md").read_text())
        blocks += code((ROOT / "docs/reference/server.md").read_text())
        assert len(blocks) == 4
    for block in blocks:
        exec(compile(block, page, "exec"), {})


@pytest.mark.parametrize(
    ("page", "updates", "files"),
    [
        ("README.md", 1_000, ["server.safetensors"]),
        ("docs/flower.md", 5_000, ["model.pt", "server.safetensors"]),
        ("docs/guides/load.md", 5_000, []),
    ],
)
def test_flower_code_runs_as_it_stands(page, updates, files, tmp_path, monkeypatch):
    pytest.importorskip("flwr", reason="the extra `flower` is not installed")
    from fleets import simulated
    from flwr.app import RecordDict
    from memory_grid import MemoryGrid

    from secureafl_ext.flower import Loop

    monkeypatch.chdir(tmp_path)
    names: dict = {}
    (block,) = [block for block in code((ROOT / page).read_text()) if "ServerApp()" in block]
    exec(compile(block, page, "exec"), names)
    loops, run = [], Loop.run

    def shorter(loop, updates):
        loops.append((loop, updates))
        run(loop, 30)

    def client(message):
        return [(1.0, RecordDict({"arrays": message.content["arrays"]}))]  # trains nothing, but answers

    monkeypatch.setattr(Loop, "run", shorter)
    names["main"](MemoryGrid(dict.fromkeys(range(1, 4), client), simulated(monkeypatch)), None)
    ((loop, asked),) = loops
    assert asked == updates and loop.server.version == 30
    assert sorted(path.name for path in tmp_path.iterdir()) == files


def as_torchrun_does(group, block, folder, port):
    told = {"RANK": str(group.rank()), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.destroy_process_group()
    with chdir(folder), patch.dict(os.environ, told):
        exec(compile(block, "README.md", "exec"), {})
    return "ran"


def test_sharded_code_runs_as_it_stands(ranks, tmp_path):
    """test_sharded.py runs an example under torchrun itself."""
    block = readme_code("init_process_group")
    assert ranks.run(2, as_torchrun_does, block, tmp_path, free_port()) == ["ran"] * 2
    assert (tmp_path / "server.safetensors").exists()


def slugs(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.is_relative_to(ROOT) and there.exists(), f"{target} is not in the repository"
        assert not anchor or anchor in slugs(there), f"{target}: no such heading"


def test_paths_of_architecture_exist():
    page = (ROOT / "docs" / "architecture.md").read_text()
    for path in re.findall(r"`((?:csrc|secureafl_ext|python_tests|examples|bench|results|docs)/[\w./]*)`", page):
        assert (ROOT / path).exists(), path
    for row in re.findall(r"^\| (`csrc/\w+/`|`[\w/]+\.?\w*`[^|]*) \|", page.split("### Python")[1], re.MULTILINE):
        for name in re.findall(r"`([\w./]+)`", row):
            assert (ROOT / "secureafl_ext" / name).exists() or (ROOT / name).exists(), name


def test_pages_of_the_navigation_are_there_once():
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1]
    pages = re.findall(r": (\S+\.md)$", nav, re.MULTILINE)
    for page in pages:
        outside = page.startswith("repository/")
        assert (ROOT / page.removeprefix("repository/") if outside else ROOT / "docs" / page).is_file(), page
    assert all(one != other for one, other in pairwise(sorted(pages)))
    own = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert own <= set(pages), "a page that no menu leads to"


def test_ci_builds_the_site_with_the_tools_of_the_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extra = {re.match(r"[\w-]+", line)[0] for line in project["project"]["optional-dependencies"]["docs"]}
    ci = (ROOT / ".ci" / "run").read_text()
    assert f"-c .ci/tools.txt {' '.join(sorted(extra))}\n" in ci and "mkdocs build --quiet --strict" in ci


def test_the_citation_names_the_paper():
    cited = (ROOT / "CITATION.cff").read_text()
    names = re.findall(r"given-names: (\w+)\n\s+family-names: (\w+)", cited)
    assert len(names) == 6 and ", ".join(" ".join(name) for name in names) in README
    doi = re.search(r"^  doi: (\S+)$", cited, re.MULTILINE)[1]
    assert f"https://doi.org/{doi}" in README
