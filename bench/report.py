"""What a benchmark leaves behind: markdown with a head that says how it came about, the rows as CSV, a picture."""

import argparse
import csv
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from timing import hardware

import secureafl_ext

HERE = Path(__file__).parent
SEED = 0


@dataclass(frozen=True)
class Row:
    """One figure."""

    table: str
    how: str
    n: int  # clients
    d: int  # parameters
    m: int  # pairs per client
    ms: float


def options(description: str, sizes: Iterable[str]) -> argparse.Namespace:
    """The command line that the benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", choices=list(sizes), default="full", help="tiny is for the tests (default: full)")
    parser.add_argument("--quick", dest="sizes", action="store_const", const="quick", help="short for --sizes quick")
    parser.add_argument("--out", type=Path, default=HERE / "out", help="where the report goes (default: bench/out)")
    return parser.parse_args()


def head(title: str, device: str) -> str:
    command = " ".join(["python", f"bench/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    versions = f"torch {torch.__version__}, secureafl_ext {secureafl_ext.__version__}, commit {_commit()}"
    return f"# {title}\n\n`{command}`; {hardware(device)}; {versions}; float32, seed {SEED}."


def table(columns: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    cells = [columns, ["---"] * len(columns), *lines]
    return "\n".join("| " + " | ".join(_text(cell) for cell in line) + " |" for line in cells)


def ratio(ms: float | None, to: float | None) -> str:
    return "-" if ms is None or to is None else f"{ms / to:.3g}"


def skipped(sizes: Iterable[tuple[int, ...]]) -> str:
    names = ", ".join(" x ".join(f"{k:,}" for k in size) for size in sizes)
    return f"Skipped, twice their state being more than 60 % of the free memory: {names or 'none'}."


def write(out: Path, name: str, text: str, rows: Sequence[Row], picture: bool = True) -> None:
    """NAME.md, which is printed too, NAME.csv and, of what is timed over sizes, NAME.png."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.md").write_text(text + "\n")
    print(text)
    data = out / f"{name}.csv"
    with data.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    if not picture:
        return
    try:
        import plot  # only now, and not at any price: a machine with a GPU often has no matplotlib
    except ImportError:
        print(f"\nNo picture: matplotlib is not installed. Where it is: python bench/plot.py {data}", file=sys.stderr)
    else:
        plot.draw(data)


def _text(cell: object) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, int):
        return f"{cell:,}"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=HERE, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + (" and changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
