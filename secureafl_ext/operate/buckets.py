"""Buckets: time series of fixed size. When the buckets are full, pairs of them are merged."""

import math
from collections.abc import Sequence

import numpy as np

COUNT = 240  # even
FIRST_SECONDS = 0.25  # width at the start
NEWEST = 1e11  # seconds since 1970; later times, and those before 1970, are damaged


class Buckets:
    """Series over the same buckets: of sums, of largest values, and of last values (NaN where there is none)."""

    def __init__(self, sums: Sequence[str], largest: Sequence[str] = (), last: Sequence[str] = ()):
        self.start, self.width, self.newest = math.nan, FIRST_SECONDS, -math.inf
        self.sums = {name: np.zeros(COUNT) for name in sums}
        self.largest = {name: np.full(COUNT, np.nan) for name in largest}
        self.last = {name: np.full(COUNT, np.nan) for name in last}

    def bucket(self, at: float) -> int:
        """The bucket of this time. Earlier times than the first one count as that."""
        if math.isnan(self.start):
            self.start = at
        self.newest = max(self.newest, at)
        while at - self.start >= self.width * COUNT:
            self._merge()
        return max(0, int((at - self.start) / self.width))

    def used(self) -> int:
        """Number of buckets up to the newest time."""
        return 0 if math.isnan(self.start) else 1 + min(COUNT - 1, int((self.newest - self.start) / self.width))

    def times(self) -> np.ndarray:
        """The middle of each used bucket; of the last one the newest time, for it is not full yet."""
        times = self.start + self.width * (np.arange(self.used()) + 0.5)
        return np.minimum(times, self.newest)

    def seconds(self) -> np.ndarray:
        """The length of each used bucket. The last one is not full yet."""
        used = self.used()
        seconds = np.full(used, self.width)
        if used:
            # A quarter at least: a bucket that has just begun would show a wild rate.
            seconds[-1] = np.clip(self.newest - self.start - self.width * (used - 1), self.width / 4, self.width)
        return seconds

    def _merge(self) -> None:
        self.width *= 2
        for values in self.sums.values():
            _shift(values, values[0::2] + values[1::2], 0)
        for values in self.largest.values():
            _shift(values, np.fmax(values[0::2], values[1::2]), np.nan)
        for values in self.last.values():
            _shift(values, np.where(np.isnan(values[1::2]), values[0::2], values[1::2]), np.nan)


def _shift(values: np.ndarray, merged: np.ndarray, empty: float) -> None:
    values[: COUNT // 2], values[COUNT // 2 :] = merged, empty


def is_time(at: float) -> bool:
    return 0 <= at <= NEWEST  # not NaN
