"""How soon the live page names attackers, and how often an honest client: the simulator's uploads in simulated time.

    python bench/naming.py [--attacks label-flip,...] [--dataset fashion-mnist --data-dir DIR] [--seeds 3]

Uploads come evenly, `--rate` a second; a look at all clients every two simulated seconds, as Watched does it. The
attack begins with the first upload. Ends with 1 if an attack has a run in which nobody was named in time.
"""

import argparse
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from report import head, table

from secureafl_ext.operate import Verdict, View, look
from secureafl_ext.sim.loop import Rounds
from secureafl_ext.sim.settings import Settings

PAPER = ["label-flip", "sign-flip", "gaussian", "scaling", "dba", "pgd", "neurotoxin", "3dfed", "min-max", "adaptive"]
EVERY = 2.0  # seconds between two looks
START = 1e9  # seconds since 1970: any time


@dataclass(frozen=True)
class Named:
    """Of one run: when each client was named, in seconds."""

    malicious: tuple[float, ...]
    honest: tuple[float, ...]
    attackers: int


def run(settings: Settings, seconds: float, rate: float) -> Named:
    per_look = round(rate * EVERY)
    looks = round(seconds / EVERY)
    resolved = replace(settings, rounds=looks * per_look, evaluations=looks).resolve()
    rounds, view = Rounds(resolved), View()
    for k in range(looks):
        rounds.advance(per_look)
        view.verdicts(verdicts(rounds, k * per_look, rate))
        now = START + rounds.done / rate
        view.look(replace(look.look_at(rounds.server), at=now))
    malicious = set(rounds.federation.malicious.tolist()) if resolved.attackers else set()
    times = {moment["client"]: moment["at"] - START for moment in view.snapshot()["named"]}
    return Named(
        tuple(sorted(at for client, at in times.items() if client in malicious)),
        tuple(sorted(at for client, at in times.items() if client not in malicious)),
        len(malicious),
    )


def verdicts(rounds: Rounds, first: int, rate: float) -> list[Verdict]:
    part = slice(first, rounds.done)
    client, staleness = (column[part].tolist() for column in rounds.federation.arrivals[:2])
    kinds = ["accepted" if accepted else "rejected" for accepted in rounds.accepted[part].tolist()]
    return [
        Verdict(START + (first + i + 1) / rate, kinds[i], client[i], "", first + i + 1, staleness[i])
        for i in range(len(client))
    ]


def line(attack: str, runs: list[Named]) -> list[object]:
    firsts = [named.malicious[0] for named in runs if named.malicious]
    attackers, honest = sum(named.attackers for named in runs), sum(len(named.honest) for named in runs)
    caught = sum(len(named.malicious) for named in runs)
    spread = f"{statistics.median(firsts):.0f} ({min(firsts):.0f} to {max(firsts):.0f})" if firsts else "-"
    return [attack, f"{len(firsts)} of {len(runs)}", spread, f"{caught} of {attackers}", honest]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attacks", default=",".join(["none", *PAPER]))
    parser.add_argument("--dataset", default=Settings.dataset)
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--defense", default="secureafl-support")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=3, help="how many, from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=10.0, help="uploads a second")
    parser.add_argument("--device", default="cpu")
    chosen = parser.parse_args()
    shared = {"dataset": chosen.dataset, "data_dir": chosen.data_dir and str(chosen.data_dir), "device": chosen.device}
    shared |= {"defense": chosen.defense, "clients": chosen.clients}
    print(head("How soon attackers are named", chosen.device), "\n")
    lines, failed = [], 0
    for attack in chosen.attacks.split(","):
        seeds = range(chosen.first, chosen.first + chosen.seeds)
        runs = [run(Settings(**shared, attack=attack, seed=seed), chosen.seconds, chosen.rate) for seed in seeds]
        lines.append(line(attack, runs))
        failed += attack != "none" and any(not named.malicious for named in runs)
        print(lines[-1], file=sys.stderr, flush=True)
    columns = ["attack", "runs with a culprit named", "seconds to the first", "culprits named", "honest clients named"]
    print(table(columns, lines))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
