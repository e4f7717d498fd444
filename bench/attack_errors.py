"""Draw the picture of README: every defense under every attack, from the runs in results/fashion-mnist.

python bench/attack_errors.py [docs/attack-errors.png]
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from PIL import Image

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "fashion-mnist"
ATTACKS = {
    "none": "no attack",
    "label-flip": "label flip",
    "sign-flip": "sign flip",
    "gaussian": "Gaussian",
    "scaling": "scaling",
    "dba": "DBA",
    "pgd": "PGD",
    "neurotoxin": "Neurotoxin",
    "3dfed": "3DFed",
    "min-max": "Min-Max",
    "adaptive": "Adaptive",
}
# Rows, each with the options that the main table of docs/results.md has for it.
DEFENSES = {
    "secureafl-support": ("SecureAFL, support (recommended)", {}),
    "secureafl-kin": ("SecureAFL, kinship", {}),
    "secureafl": ("SecureAFL, median (default)", {}),
    "aflguard": ("AFLGuard (has clean data)", {"radius": 2.5}),
    "zeno++": ("Zeno++ (has clean data)", {"eps": 0.1, "every": 1}),
    "kardam": ("Kardam", {}),
    "basgd": ("BASGD", {"buffers": 3}),
    "sageflow": ("Sageflow (has clean data)", {"warmup": 2000}),
    "async-sgd": ("AsyncSGD, no defense", {}),
}
MAIN = {
    "malicious": 0.2,
    "delay": 10,
    "degree": 0.5,
    "rounds": 20_000,
    "max_norm": 50.0,
    "clients": 50,
}


QUANTILES = {"secureafl-support": 0.95}  # of the others: 0.8


def records() -> list[str]:
    """The lines of the main table, and of the rule that is newer than it."""
    files = RESULTS / "results.jsonl", RESULTS / "support" / "results.jsonl"
    return [line for file in files for line in file.read_text().splitlines()]


def harms(lines: list[str]) -> dict[tuple[str, str], float]:
    """(defense, attack) -> the larger of test error and attack success, each a mean over seeds 0 to 2."""
    runs = defaultdict(dict)
    for line in lines:
        run = json.loads(line)
        settings, summary = run["settings"], run["summary"]
        name = settings["defense"]
        if name not in DEFENSES or settings["defense_options"] != DEFENSES[name][1] or settings["seed"] > 2:
            continue
        wanted = MAIN | {"quantile": QUANTILES.get(name, 0.8), "holdout": 0}
        if all(settings[key] == value for key, value in wanted.items()):
            runs[name, settings["attack"]][settings["seed"]] = summary["error"], summary["asr"] or 0.0
    for defense in DEFENSES:
        for attack in ATTACKS:
            if len(runs[defense, attack]) != 3:
                seeds = sorted(runs[defense, attack])
                raise ValueError(f"{RESULTS}: {defense} under {attack} must have seeds 0, 1, 2, got {seeds}")
    return {cell: max(map(mean, zip(*seeds.values(), strict=True))) for cell, seeds in runs.items()}


def draw(cells: dict[tuple[str, str], float], path: Path) -> None:
    """A white background of its own, so that it reads the same on a light and on a dark page."""
    figure, axis = plt.subplots(figsize=(9.6, 4.0), facecolor="white")
    values = [[cells[defense, attack] for attack in ATTACKS] for defense in DEFENSES]
    axis.imshow(values, cmap="YlOrRd", vmin=0.1, vmax=1.0, aspect="auto")
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            ours = {"weight": "bold"} if y == 0 else {}
            axis.text(x, y, f"{value:.2f}", ha="center", va="center", color="white" if value > 0.6 else "black", **ours)
    axis.set_xticks(range(len(ATTACKS)), ATTACKS.values(), rotation=30, ha="left", rotation_mode="anchor")
    axis.xaxis.tick_top()
    axis.set_yticks(range(len(DEFENSES)), [label for label, _ in DEFENSES.values()])
    axis.get_yticklabels()[0].set_fontweight("bold")
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    axis.set_xticks([x + 0.5 for x in range(len(ATTACKS) - 1)], minor=True)
    axis.set_yticks([y + 0.5 for y in range(len(DEFENSES) - 1)], minor=True)
    axis.grid(which="minor", color="white", linewidth=2)
    axis.tick_params(which="minor", length=0)
    about = (
        "Test error, or attack success where it is larger; lower is better. Fashion-MNIST, 50 clients, 10 malicious,"
    )
    more = "mean of 3 seeds. PGD and Neurotoxin are stronger in the first row."
    figure.text(0.01, 0.015, f"{about}\n{more}", fontsize=9)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, dpi=110, metadata={"Software": None})
    Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)  # a third of the bytes


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "attack-errors.png"
    draw(harms(records()), target)
