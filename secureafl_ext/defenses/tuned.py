"""Options of defenses that were chosen by runs, where they differ from the values of the defense's own source.

These runs used held-out training data and seeds of their own, never the test set: docs/ablations.md, "The compared
defenses' values" and "CIFAR-10: Adam, and steps along the received update".
"""

# Chosen on Fashion-MNIST with 20,000 rounds. The paper's other data sets use the same values.
TUNED: dict[str, dict[str, object]] = {
    "basgd": {"buffers": 3},
    "sageflow": {"warmup": 2_000},
    "zeno++": {"eps": 0.1, "every": 1},
    "aflguard": {"radius": 2.5},
    "async-defender": {"weight": "shifted"},
}
# Chosen on Fashion-MNIST with 5,000 rounds, for that data set alone: some depend on the number of clients.
TUNED_FASHION_MNIST: dict[str, dict[str, object]] = {
    "fltrust": {"every": 10, "momentum": 0.5},
    "flame": {"noise": 0.0001},
    "nnm-trimmed-mean": {"momentum": 0.5},
    "nnm-geometric-median": {"malicious": 15},
    "krum": {"selected": 10},
    "centered-clip": {"radius": 1.0, "momentum": 0.9},
    "foolsgold": {"normalize": True, "momentum": 0.9},
    "demoa": {"momentum": 0.5},
    "weighted": {"momentum": 0.0},
    "fedbuff-trimmed-mean": {"server_lr": 10.0},
}
# Chosen on CIFAR-10, for all data sets that train ResNet-20 on classes: remembered updates are too old for it.
TUNED_RESNET: dict[str, dict[str, object]] = {
    "secureafl-kin": {"step": "received"},
}
DATASETS = ("fashion-mnist", "cifar10", "cifar100", "tiny-imagenet", "udacity")
# The embedded data are a part of Fashion-MNIST, with 400 rounds: Sageflow's warm-up would last longer than the run.
EMBEDDED = "fashion-mnist-small"
BY_DATASET = dict.fromkeys(DATASETS, TUNED) | {
    "fashion-mnist": TUNED | TUNED_FASHION_MNIST,
    **dict.fromkeys(("cifar10", "cifar100", "tiny-imagenet"), TUNED | TUNED_RESNET),
    EMBEDDED: {name: options for name, options in TUNED.items() if name != "sageflow"},
}


def tuned_options(defense: str, dataset: str) -> dict[str, object]:
    """The tuned options of a defense on a data set; empty where nothing was tuned."""
    return dict(BY_DATASET.get(dataset, {}).get(defense, {}))
