"""The paper's tables and figures: what to run for each, and the numbers that it prints itself.

Only `Table.paper` is from the paper, and nothing else reads it than the column of that name.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from ..defenses.tuned import TUNED as CHOSEN  # noqa: F401 - grids.py uses it
from ..tasks.datasets import (
    DEFAULT as SMALL,  # a part of Fashion-MNIST: to try a table out, and no match for the paper's numbers
)

# One number, or test error and attack success.
Value = tuple[float, ...]
Numbers = dict[tuple[str, str], Value]  # by row and column

FASHION = "fashion-mnist"
OPTION = "secureafl-kin"  # beyond the paper: the row that is to reach its SecureAFL's
METHODS = ("async-sgd", "kardam", "basgd", "sageflow", "zeno++", "aflguard", "secureafl", OPTION)
COLUMNS = (
    "none",
    "label-flip",
    "sign-flip",
    "gaussian",
    "scaling",
    "dba",
    "pgd",
    "neurotoxin",
    "3dfed",
    "min-max",
    "adaptive",
)
REGRESSION = ("none", "sign-flip", "gaussian", "min-max", "adaptive")  # what has a meaning without labels
# Where the paper departs from what a run is by default.
SETUP = {
    "cifar10": {"rounds": 30_000},
    "cifar100": {"rounds": 30_000},
    "tiny-imagenet": {"rounds": 80_000},
}


@dataclass(frozen=True)
class Table:
    """The last axis makes the columns, the one before it the rows; with a third, its values are a part each."""

    about: str
    axes: dict[str, tuple]  # as words.grid takes them; of what is not run but measured, the labels
    paper: dict[str, Numbers] = field(default_factory=dict)  # by data set; none where the paper has only curves
    fixed: dict[str, object] = field(default_factory=dict)  # settings that are the same for all runs
    measure: str = "error"  # of a run's summary; with the attack success where there is one
    how: str = "runs"  # or "memory", "bench"
    curves: bool = False  # drawn over the last axis, not as a heat map
    places: int = 3  # digits after the point, for ours
    note: str = ""

    @property
    def datasets(self) -> tuple[str, ...]:
        """Those that the paper shows it for."""
        return tuple(self.paper) or (FASHION,)


def numbers(columns: tuple[str, ...], text: str) -> Numbers:
    """A line per row: its name, then a value per column, as `0.12`, `0.41/0.69`, or `-` where the paper has none."""
    cells = {}
    for row, *values in map(str.split, text.strip().splitlines()):
        for column, value in zip(columns, values, strict=True):
            if value != "-":
                cells[row, column] = tuple(map(float, value.split("/")))
    return cells


MAIN = {
    "fashion-mnist": numbers(
        COLUMNS,
        """
        async-sgd 0.12 0.12 0.41 0.52 0.41/0.69 0.53/0.60 0.28/0.36 0.25/0.25 0.90/1.00 0.90 0.90
        kardam    0.17 0.17 0.18 0.15 0.79/0.92 0.45/0.54 0.36/0.36 0.35/0.36 0.35/0.36 0.62 0.90
        basgd     0.14 0.16 0.18 0.73 0.36/0.77 0.33/0.65 0.46/0.53 0.34/0.39 0.35/1.00 0.79 0.90
        sageflow  0.14 0.14 0.16 0.90 0.70/0.85 0.60/0.69 0.31/0.41 0.32/0.35 0.90/0.88 0.90 0.90
        zeno++    0.17 0.18 0.19 0.17 0.21/0.24 0.21/0.21 0.21/0.21 0.22/0.21 0.21/0.20 0.30 0.33
        aflguard  0.22 0.27 0.34 0.26 0.28/0.36 0.26/0.36 0.26/0.15 0.26/0.20 0.26/0.12 0.33 0.35
        secureafl 0.12 0.12 0.13 0.14 0.18/0.07 0.17/0.05 0.16/0.07 0.15/0.06 0.17/0.03 0.15 0.18
        """,
    ),
    "cifar10": numbers(
        COLUMNS,
        """
        async-sgd 0.22 0.37 0.48 0.80 0.85/1.00 0.86/1.00 0.70/0.97 0.56/0.88 0.90/1.00 0.84 0.86
        kardam    0.25 0.33 0.33 0.45 0.56/0.42 0.90/1.00 0.49/0.68 0.71/0.71 0.48/0.29 0.82 0.87
        basgd     0.29 0.39 0.42 0.81 0.87/0.97 0.85/0.97 0.73/0.43 0.70/0.56 0.90/1.00 0.88 0.89
        sageflow  0.28 0.48 0.58 0.83 0.89/1.00 0.87/1.00 0.85/0.99 0.79/0.92 0.90/1.00 0.85 0.81
        zeno++    0.23 0.32 0.33 0.33 0.63/0.54 0.56/0.51 0.52/0.49 0.43/0.37 0.53/0.39 0.34 0.32
        aflguard  0.25 0.36 0.37 0.37 0.44/0.26 0.42/0.30 0.48/0.32 0.45/0.32 0.46/0.17 0.39 0.37
        secureafl 0.23 0.29 0.29 0.30 0.29/0.03 0.26/0.05 0.30/0.10 0.26/0.07 0.28/0.01 0.32 0.35
        """,
    ),
    "cifar100": numbers(
        COLUMNS,
        """
        async-sgd 0.43 0.53 0.66 0.90 0.95/1.00 0.95/1.00 0.67/0.52 0.61/0.61 0.95/1.00 0.95 0.94
        kardam    0.47 0.48 0.54 0.61 0.93/1.00 0.93/1.00 0.71/0.54 0.68/0.38 0.63/0.37 0.95 0.91
        basgd     0.52 0.53 0.64 0.90 0.89/0.95 0.91/0.94 0.79/0.26 0.76/0.15 0.95/1.00 0.95 0.95
        sageflow  0.56 0.59 0.75 0.91 0.87/0.97 0.89/0.99 0.68/0.13 0.61/0.13 0.95/1.00 0.94 0.93
        zeno++    0.48 0.51 0.51 0.60 0.21/0.68 0.63/0.15 0.72/0.19 0.74/0.26 0.67/0.17 0.63 0.83
        aflguard  0.43 0.54 0.50 0.47 0.65/0.18 0.67/0.48 0.67/0.74 0.70/0.38 0.68/0.53 0.92 0.85
        secureafl 0.43 0.46 0.49 0.44 0.53/0.03 0.52/0.07 0.49/0.02 0.53/0.09 0.51/0.05 0.53 0.56
        """,
    ),
    "tiny-imagenet": numbers(
        COLUMNS,
        """
        async-sgd 0.61 0.68 0.75 0.98 0.62/1.00 0.62/1.00 0.62/0.44 0.62/0.77 0.62/1.00 0.98 0.60
        kardam    0.63 0.66 0.72 0.76 0.76/0.03 0.76/0.05 0.75/0.05 0.76/0.03 0.76/0.03 0.98 0.63
        basgd     0.63 0.64 0.73 0.64 0.56/0.39 0.56/0.36 0.56/0.08 0.56/0.10 0.56/0.02 0.98 0.63
        sageflow  0.63 0.68 0.74 0.99 0.98/0.97 0.98/0.98 0.83/0.43 0.83/0.36 0.99/1.00 0.99 0.99
        zeno++    0.62 0.65 0.65 0.66 0.64/0.03 0.65/0.05 0.63/0.03 0.65/0.05 0.63/0.03 0.67 0.64
        aflguard  0.60 0.68 0.72 0.63 0.61/0.03 0.62/0.03 0.62/0.02 0.60/0.05 0.60/0.03 0.62 0.65
        secureafl 0.58 0.60 0.66 0.62 0.61/0.03 0.61/0.03 0.62/0.03 0.62/0.03 0.64/0.03 0.60 0.62
        """,
    ),
    "udacity": numbers(
        REGRESSION,
        """
        async-sgd 0.17 0.29 1.10 0.36 0.33
        kardam    0.18 0.28 0.19 0.55 0.24
        basgd     0.17 0.19 0.19 inf  0.20
        zeno++    0.17 inf  0.24 inf  inf
        aflguard  0.18 0.43 0.25 0.19 0.26
        secureafl 0.17 0.17 0.18 0.17 0.17
        """,
    ),
}

ASYNC_DEFENDER = {
    "fashion-mnist": "0.24 0.25 0.33 0.31 0.38/0.44 0.34/0.43 0.33/0.29 0.32/0.27 0.34/0.31 0.39 0.43",
    "cifar10": "0.26 0.40 0.42 0.49 0.58/0.37 0.53/0.42 0.55/0.44 0.52/0.40 0.57/0.43 0.55 0.66",
    "cifar100": "0.50 0.58 0.57 0.66 0.73/0.53 0.74/0.55 0.71/0.67 0.73/0.44 0.72/0.57 0.93 0.89",
    "tiny-imagenet": "0.63 0.71 0.75 0.71 0.70/0.15 0.72/0.18 0.69/0.12 0.70/0.15 0.71/0.15 0.73 0.72",
    "udacity": "0.18 - 0.41 0.32 - - - - - 0.29 0.33",
}

ALPHA = """
0.4 0.13 0.15 0.14 0.14 0.19/0.02 0.16/0.02 0.17/0.07 0.19/0.08 0.19/0.10 0.22 0.23
0.6 0.15 0.16 0.15 0.14 0.18/0.08 0.17/0.03 0.19/0.10 0.20/0.01 0.17/0.06 0.20 0.23
0.8 0.12 0.12 0.13 0.14 0.18/0.07 0.17/0.05 0.16/0.07 0.15/0.06 0.17/0.03 0.15 0.18
"""

VARIANTS = """
secureafl-i   0.12 0.14 0.15 0.14 0.40/0.36 0.34/0.33 0.40/0.19 0.30/0.22 0.38/0.34 0.35 0.35
secureafl-ii  0.17 0.17 0.20 0.18 0.72/0.90 0.44/0.58 0.34/0.38 0.37/0.34 0.35/0.40 0.87 0.90
secureafl-iii 0.16 0.16 0.19 0.20 0.34/0.41 0.68/0.53 0.30/0.25 0.29/0.25 0.46/0.47 0.90 0.90
secureafl-iv  0.41 0.56 0.66 0.47 0.57/0.49 0.53/0.53 0.59/0.49 0.48/0.42 0.58/0.46 0.45 0.63
secureafl     0.12 0.12 0.13 0.14 0.18/0.07 0.17/0.05 0.16/0.07 0.15/0.06 0.17/0.03 0.15 0.18
"""

# The middle of an interval of rounds stands for it; of the last, 700 to convergence, the end of the training.
ESTIMATION = {"250": 0.81, "350": 0.72, "450": 0.68, "550": 0.65, "650": 0.61, "20000": 0.59}
INTERVALS = (
    "The paper averages over rounds 200-300, 300-400, .. 600-700 and 700-convergence; ours is taken once, in the "
)
INTERVALS += "middle of an interval, and for the last at round 20,000: a mean over the honest clients that were seen."

TIMED = ("AsyncSGD", "Zeno++", "AFLGuard", "SecureAFL")
CLIENTS, PARAMETERS = ("50", "100", "300"), ("140000", "500000", "1000000")
BY_CLIENTS = """
AsyncSGD  0.02 0.02 0.04
Zeno++    0.02 0.03 0.05
AFLGuard  0.04 0.06 0.08
SecureAFL 0.03 0.04 0.06
"""
BY_PARAMETERS = """
AsyncSGD  0.02 0.03 0.04
Zeno++    0.02 0.04 0.06
AFLGuard  0.04 0.05 0.08
SecureAFL 0.03 0.04 0.06
"""
SECONDS = (
    "Seconds for a round with the gradient of the client that uploads, by bench/scaling.py. The paper's are of V100 "
)
SECONDS += "GPUs, and it does not say what they cover."
OURS = {"defense": "secureafl"}


def figure(about: str, name: str, values: tuple, attacks: tuple[str, ...] = COLUMNS) -> Table:
    """Every attack in a picture of its own, every method a line in it. The ends are the paper's; it names no others."""
    note = "The paper has curves only, no numbers."
    return Table(about, {"attack": attacks, "defense": METHODS, name: values}, curves=True, note=note)


def with_option(paper: Numbers) -> Numbers:
    return paper | {(OPTION, column): value for (row, column), value in paper.items() if row == "secureafl"}


TABLES = {
    "main": Table(
        "every method under every attack",
        {"defense": METHODS, "attack": COLUMNS},
        {name: with_option(paper) for name, paper in MAIN.items()},
        note=f"{OPTION} is ours; beside it stand the paper's numbers for SecureAFL, which it is measured by.",
    ),
    "asyncdefender": Table(
        "AsyncDefender under every attack; ours is reduced to its cosine weights",
        {"defense": ("async-defender",), "attack": COLUMNS},
        {name: numbers(COLUMNS, f"async-defender {row}") for name, row in ASYNC_DEFENDER.items()},
    ),
    "alpha": Table(
        "SecureAFL by alpha, the quantile that a factor may not top",
        {"quantile": (0.4, 0.6, 0.8), "attack": COLUMNS},
        {FASHION: numbers(COLUMNS, ALPHA)},
        OURS,
    ),
    "variants": Table(
        "SecureAFL without one of its parts: mean (I), no estimates (II), no filter (III), estimates alone (IV)",
        {"defense": ("secureafl-i", "secureafl-ii", "secureafl-iii", "secureafl-iv", "secureafl"), "attack": COLUMNS},
        {FASHION: numbers(COLUMNS, VARIANTS)},
    ),
    "estimation-error": Table(
        "how far SecureAFL's estimates are from true gradients, by the round",
        {"rounds": tuple(map(int, ESTIMATION))},
        {FASHION: {("estimation_error", column): (value,) for column, value in ESTIMATION.items()}},
        OURS | {"estimation_error": True, "evaluations": 1},
        "estimation_error",
        curves=True,
        note=INTERVALS,
    ),
    "malicious": figure("by the share of malicious clients", "malicious", (0.1, 0.2, 0.3, 0.4), COLUMNS[1:]),
    "delay": figure("by the largest delay", "delay", (5, 10, 20, 30, 40, 50)),
    "degree": figure("by how non-IID the clients are", "degree", (0.1, 0.3, 0.5, 0.7, 0.9)),
    "clients": figure("by the number of clients", "clients", (50, 100, 200, 300)),
    "max-norm": Table(
        "SecureAFL by G, the norm that a first update is clipped to",
        {"max_norm": (20.0, 50.0, 100.0), "attack": COLUMNS},
        fixed=OURS,
        note="The paper has no numbers, only that the choice makes no difference.",
    ),
    "memory": Table(
        "what SecureAFL's server holds, in GB, for 50 clients and the CNN",
        {"history_dtype": ("float32", "float16"), "state": ("GB",)},
        {FASHION: {("float32", "GB"): (0.456,)}},
        how="memory",
        note="The sum of all tensors of the server's state. The paper does not say how it measured.",
    ),
    "runtime-clients": Table(
        "seconds by the number of clients, 140,000 parameters",
        {"method": TIMED, "clients": CLIENTS},
        {FASHION: numbers(CLIENTS, BY_CLIENTS)},
        how="bench",
        curves=True,
        places=6,
        note=SECONDS,
    ),
    "runtime-parameters": Table(
        "seconds by the number of parameters, 50 clients",
        {"method": TIMED, "parameters": PARAMETERS},
        {FASHION: numbers(PARAMETERS, BY_PARAMETERS)},
        how="bench",
        curves=True,
        places=6,
        note=SECONDS,
    ),
}


def chosen(name: str, dataset: str, only: Collection[str] = ()) -> list[str]:
    """The table of that name, or all that the paper shows for a data set; they must vary what `only` names."""
    if name not in (*TABLES, "all"):
        raise ValueError(f"unknown table {name!r}; choose from {', '.join(TABLES)}, all")
    shown = FASHION if dataset == SMALL else dataset
    names = [name] if name in TABLES else [each for each, table in TABLES.items() if shown in table.datasets]
    varied = list(dict.fromkeys(axis for each in names if TABLES[each].how == "runs" for axis in TABLES[each].axes))
    for axis in only:
        if axis not in varied:
            raise ValueError(f"only: {name} does not vary {axis!r}; choose from {', '.join(varied) or 'nothing'}")
    return names
