"""The settings of one run. The command line, the TOML file, the results and the loop share this dataclass."""

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import build_info
from ..attacks import ATTACKS
from ..defenses import DEFENSES
from ..tasks import datasets
from ..tasks.models import MODELS

ARRIVALS = {
    "uniform": "as in the paper: each round any client on any kept version, all equally likely",
    "clock": "an event queue of clients with different speeds; the staleness follows from the speeds",
}
SCHEDULES = {
    "constant": "the same learning rate throughout",
    "cosine": "from `lr` to 0 along half a cosine wave, in steps from evaluation to evaluation",
}
OPTIMIZERS = {
    "sgd": "the model moves by -lr times the direction that the defense computes, as in the paper",
    "adam": "as sgd, but each coordinate of a gradient is divided by its usual size before the defense sees it",
}
# How models train. "augmented" is for CIFAR and Tiny-ImageNet, where the paper's settings do not train to the end.
RECIPES: dict[str, dict[str, Any]] = {
    "paper": {
        "optimizer": "sgd",
        "lr": 0.01,
        "decay": 0.0,
        "clip": 0.0,
        "schedule": "constant",
        "augment": False,
        "calibrate": False,
    },
    "augmented": {
        "optimizer": "adam",
        "lr": 1.5,
        "decay": 1e-4,
        "clip": 0.3,
        "schedule": "cosine",
        "augment": True,
        "calibrate": True,
    },
}
PARTITIONS = {
    "skewed": "as in the paper: a sample goes to the client group of its label with probability `degree`",
    "dirichlet": "each label is split by shares from a Dirichlet distribution with parameter `concentration`",
}
TEN_CLIENTS = ("tiny-imagenet", "udacity")  # the paper uses 10 clients there


class UndefinedError(ValueError):
    """Each setting is valid, but two of them have no meaning together. A grid leaves such a run out."""


@dataclass(frozen=True)
class Settings:
    """None means a default that depends on other fields; `resolve` replaces it."""

    dataset: str = datasets.DEFAULT
    data_dir: str | None = None  # folder that is searched first
    side: int | None = None  # pixels of a side that larger images are averaged to: 32 for tiny-imagenet
    model: str | None = None  # cnn; resnet20 for colour images
    clients: int | None = None  # n: 50; 10 for tiny-imagenet and udacity, 20 on the embedded data
    malicious: float = 0.2  # share of the clients that attack
    flood: float | None = None  # share of all uploads that come from malicious clients; None: as many as from others
    attack: str = "none"
    attack_options: dict[str, object] = field(default_factory=dict)  # of that attack: `secureafl list attacks`
    defense: str = "secureafl"
    defense_options: dict[str, object] = field(default_factory=dict)  # of that defense: `secureafl list defenses`
    rounds: int | None = None  # 20,000; 400 on the embedded data
    batch: int | None = None  # samples per gradient: 32; 64 for colour images
    recipe: str = "paper"  # the defaults of the next seven
    optimizer: str | None = None
    lr: float | None = None  # eta: 0.01; 0.05 on the embedded data, which has short runs; 0.001 for udacity
    decay: float | None = None  # weight decay: with `adam`, the model also moves by -lr * decay * itself
    clip: float | None = None  # gradients are clipped to this norm; 0: not
    augment: bool | None = None  # random crops and flips of the training images
    schedule: str | None = None  # of the learning rate
    calibrate: bool | None = None  # honest clients correct their loss for the frequencies of their labels
    delay: int | None = (
        None  # tau_max: the server refuses an older upload: 10; with `clock` 4 per client, more in a flood
    )
    arrivals: str = "uniform"
    spread: float = 1.0  # of `clock`: standard deviation of the logarithm of the clients' speeds
    partition: str = "skewed"
    degree: float = 0.5  # of `skewed`: the paper's non-IID degree
    concentration: float = 0.5  # of `dirichlet`
    trusted: int = 100  # clean samples that the server holds, for the defenses that need them
    holdout: float = 0.0  # test on this share of the training data instead of the test set, to choose settings
    # SecureAFL and its variants only: see `VARIANT_SETTINGS`
    quantile: float = 0.8  # alpha; secureafl-support has no filter
    memory: int = 3  # epsilon: pairs kept of every client
    max_norm: float = 50.0  # G
    trust: float = 1.0  # cap on a correction, as a multiple of the norm of the update that it corrects
    # evaluation and device
    evaluations: int = 20  # points of the curve
    estimation_error: bool = False  # compare estimates with true gradients at every evaluation
    seed: int = 0
    device: str | None = None  # cuda if there is a GPU and the extension was built for CUDA, else cpu

    def resolve(self) -> "Resolved":
        """The settings with every None replaced. Raises ValueError for a value that cannot be run."""
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise ValueError(f"unknown {name} {value!r}; choose from {', '.join(choices)}")
        resolved = Resolved(**self._defaults() | {k: v for k, v in vars(self).items() if v is not None})
        resolved._check()
        return resolved

    def _defaults(self) -> dict[str, Any]:
        """The values of the fields that may be None."""
        embedded = self.dataset == datasets.DEFAULT
        grey = embedded or self.dataset == "fashion-mnist"
        clients = 20 if embedded else 10 if self.dataset in TEN_CLIENTS else 50
        # A squared error has about a hundred times the curvature of a cross entropy: 0.01 diverges without attack.
        own_lr = {"lr": 0.05} if embedded else {"lr": 0.001} if self.dataset == "udacity" else {}
        return {
            **RECIPES[self.recipe],
            **(own_lr if self.recipe == "paper" else {}),
            "model": "cnn" if grey else "resnet20",
            "clients": clients,
            # In place of 64: the fused op of the net takes 32 x 32 alone.
            "side": 32 if self.dataset == "tiny-imagenet" else None,
            "rounds": 400 if embedded else 20_000,
            "batch": 32 if grey else 64,
            "delay": 10 if self.arrivals == "uniform" else 4 * (self.clients or clients) * self._crowding(),
            "device": "cuda" if torch.cuda.is_available() and build_info()["cuda"] else "cpu",
        }

    def _crowding(self) -> int:
        """How many times as many uploads lie between two of an honest client with a flood. With `clock` the delay must
        grow by it: otherwise nearly all honest uploads would be late."""
        if self.flood is None or not 0 < self.flood < 1:
            return 1
        return max(1, round((1 - self.malicious) / (1 - self.flood)))


class Resolved(Settings):
    """Settings without a None (except data_dir, side and flood): the loop runs them, the results file records them."""

    model: str
    clients: int
    rounds: int
    batch: int
    optimizer: str
    lr: float
    decay: float
    clip: float
    augment: bool
    schedule: str
    calibrate: bool
    delay: int
    device: str

    @property
    def attackers(self) -> int:
        """Number of malicious clients."""
        return round(self.malicious * self.clients) if self.attack != "none" else 0

    def _check(self) -> None:
        for name, low, high in BOUNDS:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                limits = f"{low} or more" if high == math.inf else f"{low} to {high}"
                raise ValueError(f"{name} must be {limits}, got {value}")
        _check_device(self.device)
        if self.decay and self.optimizer == "sgd":
            raise UndefinedError(f"decay must be 0 with optimizer 'sgd', got {self.decay}")
        if self.optimizer == "adam" and not self.lr > 0:
            raise UndefinedError(f"lr must be above 0 with optimizer 'adam', got {self.lr}")
        if self.attack != "none" and self.malicious > 0 and not self.attackers:
            raise UndefinedError(
                f"malicious must be 0 or make at least one of {self.clients} clients malicious, got {self.malicious}"
            )
        if ATTACKS[self.attack].needs_honest and self.attackers == self.clients:
            raise UndefinedError(
                f"attack {self.attack!r} uses gradients of honest clients, got {self.attackers} malicious of"
                f" {self.clients}"
            )
        if self.flood is not None and not 0 < self.attackers < self.clients:
            raise UndefinedError(
                f"flood needs malicious and honest clients, got {self.attackers} malicious of {self.clients},"
                f" attack {self.attack!r}"
            )
        regression = datasets.SOURCES[self.dataset].regression
        for name, why in (("augment", "the steering does not fit a flipped road"), ("calibrate", "it has no labels")):
            if regression and getattr(self, name):
                raise UndefinedError(f"{name} must be false for {self.dataset}: {why}")
        if regression and ATTACKS[self.attack].needs_labels:
            raise UndefinedError(
                f"attack {self.attack!r} changes labels, and {self.dataset} has none: it is a regression"
            )
        if regression and self.defense == "sageflow":
            raise UndefinedError(
                f"defense 'sageflow' needs the entropy of a prediction, and {self.dataset} is a regression"
            )


# Settings that older records lack, with the values that their runs had.
ADDED: dict[str, Any] = {
    "flood": None,
    "side": None,
    "recipe": "paper",
    "optimizer": "sgd",
    "decay": 0.0,
    "clip": 0.0,
    "augment": False,
    "schedule": "constant",
    "calibrate": False,
}


def recorded(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings in a record and in a name: without the values of ADDED, so that older ones stay as they were."""
    return {name: value for name, value in settings.items() if name not in ADDED or value != ADDED[name]}


# The settings that only SecureAFL has.
VARIANT_SETTINGS = ("quantile", "memory", "max_norm", "trust")


def variant_settings(defense: str) -> list[str]:
    """The VARIANT_SETTINGS that this defense uses: none if it is not SecureAFL, fewer if a variant fixes some."""
    if not defense.startswith("secureafl"):
        return []
    used = [name for name in VARIANT_SETTINGS if name in DEFENSES[defense].settings]
    # `trust` caps a correction, and a correction needs pairs.
    return used if "memory" in used else [name for name in used if name != "trust"]


CHOICES: dict[str, Collection[str]] = {
    "dataset": datasets.SOURCES,
    "model": MODELS,
    "attack": ATTACKS,
    "defense": DEFENSES,
    "arrivals": ARRIVALS,
    "partition": PARTITIONS,
    "recipe": RECIPES,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
}
BOUNDS: tuple[tuple[str, float, float], ...] = (
    ("side", 1, 4096),
    ("clients", 1, math.inf),
    ("malicious", 0, 1),
    ("flood", 0.01, 0.99),
    ("rounds", 1, 10**9),
    ("batch", 1, 10**6),
    ("lr", 0, math.inf),
    ("decay", 0, math.inf),
    ("clip", 0, math.inf),
    ("delay", 0, 10**9),
    ("spread", 0, 100),  # speeds may differ by a factor of e ** 100 without an overflow
    ("degree", 0, 1),
    ("trusted", 1, math.inf),
    ("holdout", 0, 0.9),
    ("quantile", 0, 1),
    ("memory", 0, math.inf),
    ("max_norm", 0, math.inf),
    ("trust", 0, math.inf),
    ("evaluations", 1, math.inf),
    ("seed", 0, math.inf),
)


def _check_device(device: str) -> None:
    """Refuse a device that is missing now, not when the run has started."""
    if not re.fullmatch(r"cpu|cuda(:\d{1,4})?", device):
        raise ValueError(f"device must be cpu, cuda or cuda:N, got {device!r}")
    if device == "cpu":
        return
    if not torch.cuda.is_available():
        raise ValueError(f"device must be cpu: torch finds no CUDA device here, got {device!r}")
    if not build_info()["cuda"]:
        raise ValueError(f"device must be cpu: the extension was built without CUDA, got {device!r}")
    count = torch.cuda.device_count()
    if int(device.partition(":")[2] or 0) >= count:
        raise ValueError(f"device must be cpu or one of cuda:0 to cuda:{count - 1}, got {device!r}")
