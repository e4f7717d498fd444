"""Rules that weigh whole rows, by their definitions, in NumPy."""

import numpy as np


def clipped(rows, most):
    norms = np.linalg.norm(rows, axis=1)
    return rows * np.where(norms > most, most / np.maximum(norms, 1e-300), 1)[:, None]


def clip_around(rows, centre, c):
    for _ in range(c.iterations):
        away = rows - centre
        radius = np.median(np.linalg.norm(away, axis=1)) if c.radius is None else c.radius
        centre = centre + clipped(away, radius).mean(0)
    return centre


def remove_along_top_direction(rows, centre, c):
    rows = clipped(rows, np.median(np.linalg.norm(rows, axis=1)))
    centred = rows - rows.mean(0)
    scores = (centred @ np.linalg.svd(centred)[2][0]) ** 2
    return rows[np.argsort(-scores, kind="stable")[int(c.remove * len(rows)) :]].mean(0)


def has_one_top_direction(rows):
    """Whether the power iteration of `spectral` (32 steps) has come to its end for these rows."""
    rows = clipped(rows, np.median(np.linalg.norm(rows, axis=1)))
    strengths = np.linalg.svd(rows - rows.mean(0), compute_uv=False)
    return len(strengths) < 2 or strengths[1] <= 0.8 * strengths[0]


def nearest_to_its_neighbours(rows, centre, c):
    neighbours = max(1, len(rows) - int(c.remove * len(rows)) - 2)
    scores = []
    for k, row in enumerate(rows):
        squares = ((np.delete(rows, k, 0) - row) ** 2).sum(1)
        scores.append(np.sort(squares)[:neighbours].sum())
    return rows[np.argmin(scores)]


def weiszfeld(rows, centre, c):
    usual = np.median(np.linalg.norm(rows, axis=1))
    point = clipped(rows, usual).mean(0)
    for _ in range(8):
        pull = 1 / np.maximum(np.linalg.norm(rows - point, axis=1), max(1e-6 * usual, 1e-100))
        point = pull @ rows / pull.sum()
    return point


TWINS = {  # (rows (n, d), centre (d), config) -> (d)
    "mean": lambda rows, centre, c: rows.mean(0),
    "centered_clip": clip_around,
    "spectral": remove_along_top_direction,
    "krum": nearest_to_its_neighbours,
    "geometric_median": weiszfeld,
}
