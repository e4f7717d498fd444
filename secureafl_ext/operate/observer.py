"""Observer: the methods that `Watched` calls. They do nothing until a class overrides them."""

from collections.abc import Sequence

from .verdict import Look, Verdict


class Observer:
    """All methods are called by one thread of `Watched`, never by the thread that submits.

    An error in one of them is logged and changes nothing else.
    """

    def verdicts(self, batch: Sequence[Verdict]) -> None:
        """New verdicts, in order."""

    def look(self, look: Look) -> None:
        """The state of all clients, every few seconds."""

    def evaluated(self, at: float, version: int, error: float) -> None:
        """The error of the model of this version."""

    def dropped(self, count: int) -> None:
        """This many verdicts were lost, because the observers were too slow."""

    def close(self) -> None:
        """The last call."""
