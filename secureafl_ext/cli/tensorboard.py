"""The curves of runs as TensorBoard event files, one folder per run."""

from pathlib import Path
from typing import Any

from ..sim.loop import Outcome, Point
from ..sim.results import dumps
from ..sim.settings import Resolved
from .names import run_name


class Board:
    """Writes the error and the attack success of every evaluation, and the settings as text."""

    def __init__(self, folder: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            text = "--tensorboard needs the package tensorboard: pip install 'secureafl_ext[tensorboard]'"
            raise ModuleNotFoundError(text, name=error.name) from error
        self._make: Any = SummaryWriter  # torch has no types for it
        self.folder = folder
        self._writers: dict[str, Any] = {}

    def point(self, settings: Resolved, point: Point) -> None:
        writer = self._writer(settings)
        writer.add_scalar("error", point.error, point.round)
        if point.asr is not None:
            writer.add_scalar("attack success", point.asr, point.round)

    def finish(self, outcome: Outcome) -> None:
        name = run_name(outcome.settings)
        writer = self._writer(outcome.settings)
        writer.add_text("summary", dumps(outcome.summary, indent=1))
        writer.close()
        del self._writers[name]

    def whole(self, outcome: Outcome) -> None:
        """A run that the results file has already."""
        for point in outcome.curve:
            self.point(outcome.settings, point)
        self.finish(outcome)

    def _writer(self, settings: Resolved) -> Any:
        name = run_name(settings)
        if name not in self._writers:
            self._writers[name] = self._make(str(self.folder / name))
            self._writers[name].add_text("settings", dumps(vars(settings), indent=1))
        return self._writers[name]
