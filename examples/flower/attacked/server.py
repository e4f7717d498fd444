"""The asynchronous server: Loop does the work, the rest of this file logs it."""

import csv
import json
import math
import time
from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from secureafl_ext.defenses import DEFENSES, make
from secureafl_ext.flower import Event, Layout, Loop

from . import task
from .observed import audited, observed

app = ServerApp()
SHOWN = ("client", "malicious")  # metrics in the table at the end
COUNTED = ("accepted", "rejected", "stale", "failed", "garbage", "vanished", "late", "twice", "left")


@app.main()
def main(grid: Grid, context: Context) -> None:
    run = context.run_config
    out = Path(str(run["out"])).expanduser().resolve() / str(run["defense"])
    out.mkdir(parents=True, exist_ok=True)
    file = out / "server.safetensors"

    state = task.start()
    layout = Layout(state)
    trusted = task.trusted() if DEFENSES[run["defense"]].needs_trusted else None
    flat = layout.flatten(state)
    plain = make(run["defense"], flat, run["capacity"], run["lr"], run["max-staleness"], trusted)
    logged = audited(plain, out / "audit", str(run["audit"]), bool(run["resume"]))
    if not run["resume"]:
        file.unlink(missing_ok=True)
    with Log(out, file.exists()) as log, observed(logged, str(run["metrics"]), int(run["watch-port"])) as server:

        def tell(event: Event) -> None:
            log.event(event)
            server.event(event)

        loop = Loop(
            grid,
            server,
            layout,
            ttl=run["ttl"],
            patience=run["patience"],
            turns=run["turns"],
            watch=tell,
            checkpoint=file,
            every=run["checkpoint-every"],
        )
        server.queue = loop.queue
        print(f"{run['defense']} at version {server.version}, room for {run['capacity']} clients", flush=True)
        stretch = -(-run["updates"] // run["evaluations"])
        while server.version < run["updates"]:
            loop.run(min(run["updates"], server.version - server.version % stretch + stretch))
            error = task.error(server.model)
            log.point(server.version, error)
            server.evaluated(error)
        log.table(loop)
    draw(out.parent)
    print(f"curve, events and checkpoint: {out}; all curves: {out.parent / 'curves.png'}", flush=True)


class Log:
    """Writes curve.csv and events.jsonl, and prints a line per evaluation and a table at the end."""

    def __init__(self, out: Path, goes_on: bool):
        mode = "a" if goes_on else "w"
        names = "events.jsonl", "curve.csv"
        self.events, self.curve = (open(out / name, mode, 1) for name in names)  # noqa: SIM115 - closed below
        self.began = time.monotonic()
        self.said: dict[int, dict[str, int]] = {}  # by node, the client's own metrics
        self.since: Counter[str] = Counter()  # events since the last evaluation
        self.staleness: dict[int, list[int]] = defaultdict(list)  # by node, of every judged update
        self.recent: list[int] = []  # staleness since the last evaluation
        if not goes_on:
            self.curve.write("updates,seconds,error\n")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.events.close()
        self.curve.close()

    def event(self, event: Event) -> None:
        self.since[event.kind] += 1
        if event.metrics:
            # A client may send anything under these names: take only integers.
            self.said[event.node] = {k: v for k, v in event.metrics.items() if k in SHOWN and isinstance(v, int)}
        if event.staleness is not None:
            self.staleness[event.node].append(event.staleness)
            self.recent.append(event.staleness)
        line = {**asdict(event), "seconds": round(time.monotonic() - self.began, 3)}
        self.events.write(json.dumps(finite(line), allow_nan=False) + "\n")

    def point(self, version: int, error: float) -> None:
        seconds = time.monotonic() - self.began
        self.curve.write(f"{version},{seconds:.2f},{error:.4f}\n")
        counts = ", ".join(f"{self.since[kind]} {kind}" for kind in COUNTED if self.since[kind])
        stale = f"staleness {spread(self.recent)}"
        print(f"{version:5} updates  {seconds:6.1f} s  test error {error:.3f}  {stale}  new: {counts}", flush=True)
        self.since.clear()
        self.recent.clear()

    def table(self, loop: Loop) -> None:
        """Every client, its own claim to be honest or malicious, the fate of its replies, and their staleness."""
        kinds = [kind for kind in COUNTED if loop.totals()[kind]]
        print(f"{'client':>8} {'is':>10} " + " ".join(f"{kind:>9}" for kind in kinds) + "  staleness")
        nodes = [node for node in loop.tally if node is not None]
        for node in sorted(nodes, key=lambda node: self.said.get(node, {}).get("client", -1)):
            said = self.said.get(node, {})
            is_ = {0: "honest", 1: "malicious"}.get(said.get("malicious"), "unknown")
            counts = " ".join(f"{loop.tally[node][kind]:9}" for kind in kinds)
            print(f"{said.get('client', '?'):>8} {is_:>10} {counts}  {spread(self.staleness[node])}")


def spread(staleness: list[int]) -> str:
    """Smallest, mean and largest."""
    if not staleness:
        return "-"
    return f"{min(staleness)}..{sum(staleness) / len(staleness):.1f}..{max(staleness)}"


def finite(value: object) -> object:
    """JSON has no NaN and no infinity: null replaces them."""
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def draw(folder: Path) -> None:
    """The curves of all defenses that have run, in one picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    panel = figure.subplots()
    for file in sorted(folder.glob("*/curve.csv")):
        with open(file, newline="") as rows:
            points = [(int(row["updates"]), float(row["error"])) for row in csv.DictReader(rows)]
        panel.plot(*zip(*points, strict=True), "o-", markersize=3, label=file.parent.name)
    panel.set(xlabel="updates", ylabel="test error", ylim=(0, 1))
    panel.grid(alpha=0.3)
    panel.legend()
    figure.savefig(folder / "curves.png", dpi=120)
