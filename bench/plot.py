"""Draw a benchmark's CSV, log-log: milliseconds over the clients and over the parameters.

python bench/plot.py bench/out/scaling.csv
"""

import csv
import sys
from collections import Counter
from pathlib import Path

import matplotlib

matplotlib.use("agg")  # no window
from matplotlib import pyplot as plt

DRAWN = {"scaling": "round", "ops": "median"}  # which table of which CSV
AXES = {"n": "clients", "d": "parameters", "m": "pairs per client"}


def draw(data: Path) -> Path:
    """NAME.csv -> NAME.png beside it."""
    with data.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["table"] == DRAWN[data.stem]]
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    for axis, name in zip(panels, "nd", strict=True):
        _panel(axis, rows, name)
    panels[0].set_ylabel("ms")
    panels[1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle(DRAWN[data.stem])
    picture = data.with_suffix(".png")
    figure.savefig(picture, dpi=150)
    plt.close(figure)
    return picture


def _panel(axis: plt.Axes, rows: list[dict[str, str]], name: str) -> None:
    """Times over `name`, along the longest line of sizes that differ in it alone."""
    others = [other for other in AXES if other != name]

    def place(row: dict[str, str]) -> tuple[str, ...]:
        return tuple(row[other] for other in others)

    (common, _), *_ = Counter(place(row) for row in rows).most_common(1)
    for how in dict.fromkeys(row["how"] for row in rows):
        points = sorted(
            (int(row[name]), float(row["ms"])) for row in rows if row["how"] == how and place(row) == common
        )
        style = "k--" if how == "floor" else "o-"
        if points:
            axis.plot(*zip(*points, strict=True), style, label=how)
    sizes = sorted({int(row[name]) for row in rows if place(row) == common})
    axis.set(xscale="log", yscale="log", xlabel=AXES[name])
    axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axis.set_xticks([], minor=True)
    fixed = {other: int(value) for other, value in zip(others, common, strict=True)}
    axis.set_title(", ".join(f"{value:,} {AXES[other]}" for other, value in fixed.items() if value))
    axis.grid(alpha=0.3)


if __name__ == "__main__":
    print(draw(Path(sys.argv[1])))
