"""The numbers that the paper prints, typed in by hand. The tables of paper.py show them beside our own results."""

# One number, or two: test error and attack success.
Value = tuple[float, ...]
Numbers = dict[tuple[str, str], Value]  # keys: (row, column)

ATTACK_COLUMNS = (
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
REGRESSION_COLUMNS = ("none", "sign-flip", "gaussian", "min-max", "adaptive")  # the attacks that need no labels


def parse_numbers(columns: tuple[str, ...], text: str) -> Numbers:
    """Read one line per row: its name, then a value per column, as `0.12`, `0.41/0.69`, or `-` for no number."""
    cells: Numbers = {}
    for row, *values in map(str.split, text.strip().splitlines()):
        for column, value in zip(columns, values, strict=True):
            if value != "-":
                cells[row, column] = tuple(map(float, value.split("/")))
    return cells


MAIN = {
    "fashion-mnist": parse_numbers(
        ATTACK_COLUMNS,
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
    "cifar10": parse_numbers(
        ATTACK_COLUMNS,
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
    "cifar100": parse_numbers(
        ATTACK_COLUMNS,
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
    "tiny-imagenet": parse_numbers(
        ATTACK_COLUMNS,
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
    "udacity": parse_numbers(
        REGRESSION_COLUMNS,
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

# Relative estimation error by round. The paper prints it per interval of rounds: the middle of an interval stands for
# the interval, and the end of the training for the last one (700 to convergence).
ESTIMATION_ERROR = {"250": 0.81, "350": 0.72, "450": 0.68, "550": 0.65, "650": 0.61, "20000": 0.59}

# Memory of the server in GB, 50 clients and the CNN.
MEMORY: Numbers = {("float32", "GB"): (0.456,)}

# Seconds per round.
TIMED_METHODS = ("AsyncSGD", "Zeno++", "AFLGuard", "SecureAFL")
TIMED_CLIENTS, TIMED_PARAMETERS = ("50", "100", "300"), ("140000", "500000", "1000000")
SECONDS_BY_CLIENTS = """
AsyncSGD  0.02 0.02 0.04
Zeno++    0.02 0.03 0.05
AFLGuard  0.04 0.06 0.08
SecureAFL 0.03 0.04 0.06
"""
SECONDS_BY_PARAMETERS = """
AsyncSGD  0.02 0.03 0.04
Zeno++    0.02 0.04 0.06
AFLGuard  0.04 0.05 0.08
SecureAFL 0.03 0.04 0.06
"""
