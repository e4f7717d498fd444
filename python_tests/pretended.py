"""A loop that only pretends to learn, for what stands around it."""

import json

from secureafl_ext.cli import main
from secureafl_ext.sim.loop import Outcome, Point
from secureafl_ext.sim.settings import Settings

PNG = b"\x89PNG\r\n\x1a\n"  # the first bytes of every picture
BACKDOORS = ("scaling", "dba", "pgd", "neurotoxin", "3dfed")  # what has a success beside an error


class Pretended:
    """run_many whose error is `error(settings)`, and so on; remembers what it was asked for."""

    def __init__(self):
        self.ran: list[Settings] = []
        self.processes = 1  # at the last call
        self.error = lambda settings: 0.5
        self.asr = lambda settings: None
        self.more = lambda settings: {"rounds_per_second": 5.0}  # of the summary
        self.stop_after, self.stop = None, KeyboardInterrupt()

    def __call__(self, many, watch=None, done=None, processes=1):
        self.processes = processes
        for i, settings in enumerate(many):
            if len(self.ran) == self.stop_after:
                raise self.stop
            self.ran.append(settings)
            point = Point(settings.rounds, self.error(settings), self.asr(settings))
            watch(i, point)
            summary = {"error": point.error, "asr": point.asr, "seconds": 1.0, **self.more(settings)}
            done(i, Outcome(settings, [point], summary))


def kept(folder="secureafl-results") -> list[dict]:
    with open(f"{folder}/results.jsonl") as file:
        return [json.loads(line) for line in file]


def failure(capsys, *argv: str) -> str:
    """What a refused command says on stderr."""
    assert main.main(list(argv)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err
    return said.err
