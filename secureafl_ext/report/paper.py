"""The paper's tables and figures: the runs that each one needs, and the paper's own numbers for it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ..tasks.datasets import (
    DEFAULT as SMALL,  # a part of Fashion-MNIST: to try a table out, and no match for the paper's numbers
)
from . import paper_numbers
from .paper_numbers import ATTACK_COLUMNS, Numbers, parse_numbers

FASHION = "fashion-mnist"
OUR_RULE = "secureafl-kin"  # not in the paper: our rule, compared with the paper's SecureAFL and highlighted in plots
METHODS = ("async-sgd", "kardam", "basgd", "sageflow", "zeno++", "aflguard", "secureafl", OUR_RULE)
# Settings of the paper that differ from the defaults of a run.
SETUP: dict[str, dict[str, object]] = {
    "cifar10": {"rounds": 30_000},
    "cifar100": {"rounds": 30_000},
    "tiny-imagenet": {"rounds": 80_000},
}


@dataclass(frozen=True)
class Table:
    """A table or figure. The last axis makes the columns, the axis before it the rows, a third one a grid per value."""

    about: str
    axes: Mapping[str, tuple]  # setting -> its values; for tables that are not run, the labels
    paper: Mapping[str, Numbers] = field(default_factory=dict)  # data set -> numbers; empty if the paper has none
    fixed: Mapping[str, object] = field(default_factory=dict)  # settings that all runs share
    measure: str = "error"  # key of a run's summary; "error" brings the attack success with it
    more_measures: tuple[str, ...] = ()  # a further grid for each of these keys
    source: str = "runs"  # "runs" of the simulator, "memory" of a server, or "bench" (bench/scaling.py)
    curves: bool = False  # draw curves over the last axis instead of a heat map
    decimals: int = 3  # of our numbers
    note: str = ""
    compared_with: Mapping[str, str] = field(default_factory=dict)  # our row -> the paper's row to compare it with

    @property
    def datasets(self) -> tuple[str, ...]:
        """The data sets for which the paper shows this table."""
        return tuple(self.paper) or (FASHION,)


def figure(about: str, name: str, values: tuple, attacks: tuple[str, ...] = ATTACK_COLUMNS) -> Table:
    """One grid per attack, one curve per method. The first and last of `values` are the paper's; it names no others."""
    note = "The paper has curves only, no numbers."
    return Table(about, {"attack": attacks, "defense": METHODS, name: values}, curves=True, note=note)


ESTIMATION_NOTE = (
    "The paper averages over rounds 200-300, 300-400, .. 600-700 and 700-convergence. We measure once, in the middle "
    "of an interval, and for the last one at round 20,000: the mean over the honest clients seen so far."
)
RUNTIME_NOTE = (
    "Seconds for a round including the gradient of the uploading client, measured by bench/scaling.py. The paper used "
    "V100 GPUs and does not say what its times include."
)
SECUREAFL_ONLY = {"defense": "secureafl"}

TABLES = {
    "main": Table(
        "every method under every attack",
        {"defense": METHODS, "attack": ATTACK_COLUMNS},
        paper_numbers.MAIN,
        note=f"The paper does not have {OUR_RULE}, our rule: it is compared with the paper's SecureAFL.",
        compared_with={OUR_RULE: "secureafl"},
    ),
    "asyncdefender": Table(
        "AsyncDefender under every attack; our version has its cosine weights only",
        {"defense": ("async-defender",), "attack": ATTACK_COLUMNS},
        {
            name: parse_numbers(ATTACK_COLUMNS, f"async-defender {row}")
            for name, row in paper_numbers.ASYNC_DEFENDER.items()
        },
    ),
    "alpha": Table(
        "SecureAFL by alpha, the quantile that the factor of an accepted update must not exceed",
        {"quantile": (0.4, 0.6, 0.8), "attack": ATTACK_COLUMNS},
        {FASHION: parse_numbers(ATTACK_COLUMNS, paper_numbers.ALPHA)},
        SECUREAFL_ONLY,
    ),
    "variants": Table(
        "SecureAFL without one of its parts: mean (I), no estimates (II), no filter (III), estimates alone (IV)",
        {
            "defense": ("secureafl-i", "secureafl-ii", "secureafl-iii", "secureafl-iv", "secureafl"),
            "attack": ATTACK_COLUMNS,
        },
        {FASHION: parse_numbers(ATTACK_COLUMNS, paper_numbers.VARIANTS)},
    ),
    "estimation-error": Table(
        "relative error of SecureAFL's gradient estimates, by round",
        {"rounds": tuple(map(int, paper_numbers.ESTIMATION_ERROR))},
        {FASHION: {("estimation_error", round_): (x,) for round_, x in paper_numbers.ESTIMATION_ERROR.items()}},
        SECUREAFL_ONLY | {"estimation_error": True, "evaluations": 1},
        "estimation_error",
        curves=True,
        note=ESTIMATION_NOTE,
    ),
    "malicious": figure("by the share of malicious clients", "malicious", (0.1, 0.2, 0.3, 0.4), ATTACK_COLUMNS[1:]),
    "delay": figure("by the largest delay", "delay", (5, 10, 20, 30, 40, 50)),
    "degree": figure("by how non-IID the clients are", "degree", (0.1, 0.3, 0.5, 0.7, 0.9)),
    "clients": figure("by the number of clients", "clients", (50, 100, 200, 300)),
    "max-norm": Table(
        "SecureAFL by G, the norm to which a first update is clipped",
        {"max_norm": (20.0, 50.0, 100.0), "attack": ATTACK_COLUMNS},
        fixed=SECUREAFL_ONLY,
        note="The paper has no numbers; it says only that the choice makes no difference.",
    ),
    "memory": Table(
        "memory of SecureAFL's server, in GB, for 50 clients and the CNN",
        {"history_dtype": ("float32", "float16"), "state": ("GB",)},
        {FASHION: paper_numbers.MEMORY},
        source="memory",
        note="The sum of all tensors of the server's state. The paper does not say how it measured.",
    ),
    "runtime-clients": Table(
        "seconds per round by the number of clients, 140,000 parameters",
        {"method": paper_numbers.TIMED_METHODS, "clients": paper_numbers.TIMED_CLIENTS},
        {FASHION: parse_numbers(paper_numbers.TIMED_CLIENTS, paper_numbers.SECONDS_BY_CLIENTS)},
        source="bench",
        curves=True,
        decimals=6,
        note=RUNTIME_NOTE,
    ),
    "runtime-parameters": Table(
        "seconds per round by the number of parameters, 50 clients",
        {"method": paper_numbers.TIMED_METHODS, "parameters": paper_numbers.TIMED_PARAMETERS},
        {FASHION: parse_numbers(paper_numbers.TIMED_PARAMETERS, paper_numbers.SECONDS_BY_PARAMETERS)},
        source="bench",
        curves=True,
        decimals=6,
        note=RUNTIME_NOTE,
    ),
}


def select_tables(name: str, dataset: str, only: Collection[str] = ()) -> list[str]:
    """The table of that name, or for "all" every table that the paper shows for the data set.

    `only` names settings; each of them must be an axis of a selected table.
    """
    if name not in (*TABLES, "all"):
        raise ValueError(f"unknown table {name!r}; choose from {', '.join(TABLES)}, all")
    shown = FASHION if dataset == SMALL else dataset
    names = [name] if name in TABLES else [each for each, table in TABLES.items() if shown in table.datasets]
    varied = list(dict.fromkeys(axis for each in names if TABLES[each].source == "runs" for axis in TABLES[each].axes))
    for axis in only:
        if axis not in varied:
            raise ValueError(f"only: {name} does not vary {axis!r}; choose from {', '.join(varied) or 'nothing'}")
    return names
