"""One run's settings: the command line, the TOML file, the results and the loop all speak of this one dataclass."""

import math
import re
from dataclasses import dataclass, field, replace

import torch

from .. import build_info
from ..attacks import ATTACKS
from ..defenses import DEFENSES
from ..tasks import datasets
from ..tasks.models import MODELS

ARRIVALS = {
    "uniform": "the paper's: any client, any of the kept versions, all alike",
    "clock": "clients of different speeds in an event queue; staleness is what comes of it",
}
PARTITIONS = {
    "skewed": "the paper's: a label goes to its own group of clients with probability `degree`",
    "dirichlet": "every label dealt by shares from a Dirichlet distribution of `concentration`",
}
SMALL = ("tiny-imagenet", "udacity")  # the paper has 10 clients there


class UndefinedError(ValueError):
    """Each setting is fine, but the two have no meaning together: a grid leaves such a run out."""


@dataclass(frozen=True)
class Settings:
    """None stands for a default that depends on other fields; `resolve` fills it in."""

    dataset: str = datasets.DEFAULT
    data_dir: str | None = None  # where to look first
    model: str | None = None  # cnn; resnet20 for colour images
    clients: int | None = None  # n: 50; 10 for tiny-imagenet and udacity, 20 on the embedded data
    malicious: float = 0.2  # share of the clients that attack
    attack: str = "none"
    attack_options: dict[str, object] = field(default_factory=dict)  # of that attack: `secureafl list attacks`
    defense: str = "secureafl"
    defense_options: dict[str, object] = field(default_factory=dict)  # of that defense: `secureafl list defenses`
    rounds: int | None = None  # 20,000; 400 on the embedded data
    batch: int | None = None  # samples per gradient: 32; 64 for colour images
    lr: float | None = None  # eta: 0.01; 0.05 on the embedded data, whose runs are short; 0.001 for udacity
    delay: int | None = None  # tau_max: an upload on an older version is refused: 10; with `clock` 4 per client
    arrivals: str = "uniform"
    spread: float = 1.0  # of `clock`: standard deviation of the logarithm of the clients' speeds
    partition: str = "skewed"
    degree: float = 0.5  # x of `skewed`: how far from alike the clients' labels are
    concentration: float = 0.5  # of `dirichlet`
    trusted: int = 100  # clean samples that the server holds, for the defenses that need them
    holdout: float = 0.0  # this share of the training data is the test instead: to choose settings without looking
    # SecureAFL and its variants alone; for the other defenses they mean nothing
    quantile: float = 0.8  # alpha
    memory: int = 3  # epsilon: pairs kept of every client
    max_norm: float = 50.0  # G
    trust: float = 1.0  # cap on a correction, in norms of the update it corrects
    # what is looked at, and where it runs
    evaluations: int = 20  # points of the curve
    estimation_error: bool = False  # compare estimates with true gradients at every evaluation
    seed: int = 0
    device: str | None = None  # cuda where there is one and the extension was built for it, else cpu

    def resolve(self) -> "Settings":
        """With every None filled in; refuses what cannot be run, in words."""
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise ValueError(f"unknown {name} {value!r}; choose from {', '.join(choices)}")
        embedded = self.dataset == datasets.DEFAULT
        grey = embedded or self.dataset == "fashion-mnist"
        filled = {
            "model": "cnn" if grey else "resnet20",
            "clients": 20 if embedded else 10 if self.dataset in SMALL else 50,
            "rounds": 400 if embedded else 20_000,
            "batch": 32 if grey else 64,
            # Of a squared error the curvature is some hundred times that of a cross entropy: 0.01 diverges by itself.
            "lr": 0.05 if embedded else 0.001 if self.dataset == "udacity" else 0.01,
            "device": "cuda" if torch.cuda.is_available() and build_info()["cuda"] else "cpu",
        }
        filled["delay"] = 10 if self.arrivals == "uniform" else 4 * (self.clients or filled["clients"])
        whole = replace(self, **{name: value for name, value in filled.items() if getattr(self, name) is None})
        whole._check()
        return whole

    def _check(self) -> None:
        for name, low, high in BOUNDS:
            value = getattr(self, name)
            if not low <= value <= high:
                limits = f"{low} or more" if high == math.inf else f"{low} to {high}"
                raise ValueError(f"{name} must be {limits}, got {value}")
        _check_device(self.device)
        regression = datasets.SOURCES[self.dataset].regression
        if regression and ATTACKS[self.attack].needs_labels:
            raise UndefinedError(
                f"attack {self.attack!r} changes labels, and {self.dataset} has none: it is a regression"
            )
        if regression and self.defense == "sageflow":
            raise UndefinedError(
                f"defense 'sageflow' asks for the entropy of a prediction, and {self.dataset} is a regression"
            )

    @property
    def attackers(self) -> int:
        """How many clients are malicious; the settings must be resolved."""
        return round(self.malicious * self.clients) if self.attack != "none" else 0


CHOICES = {
    "dataset": datasets.SOURCES,
    "model": MODELS,
    "attack": ATTACKS,
    "defense": DEFENSES,
    "arrivals": ARRIVALS,
    "partition": PARTITIONS,
}
BOUNDS = (
    ("clients", 1, math.inf),
    ("malicious", 0, 1),
    ("rounds", 1, 10**9),
    ("batch", 1, 10**6),
    ("lr", 0, math.inf),
    ("delay", 0, 10**9),
    ("spread", 0, 100),  # speeds that differ by a factor of e ** 100, and no overflow
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
    """What torch would only find out when the run has begun."""
    if not re.fullmatch(r"cpu|cuda(:\d{1,4})?", device):
        raise ValueError(f"device must be cpu, cuda or cuda:N, got {device!r}")
    if device == "cpu":
        return
    if not torch.cuda.is_available():
        raise ValueError(f"device must be cpu, as torch finds no CUDA device here, got {device!r}")
    if not build_info()["cuda"]:
        raise ValueError(f"device must be cpu, as the extension was built without CUDA, got {device!r}")
    count = torch.cuda.device_count()
    if int(device.partition(":")[2] or 0) >= count:
        raise ValueError(f"device must be cpu or one of cuda:0 to cuda:{count - 1}, got {device!r}")
