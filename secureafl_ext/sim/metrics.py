"""Quality of a model, of a filter, and of leaving clients out."""

import math

import torch
from torch import Tensor

from ..attacks import Trigger
from ..tasks.datasets import Dataset
from ..tasks.models import Net

CHUNK = {"cuda": 2_000, "cpu": 200}  # test images at a time; on a CPU few enough for its cache


@torch.no_grad()
def error(net: Net, data: Dataset, model: Tensor) -> float:
    """Share of misclassified test images; for a regression the root mean squared error.

    A prediction that is not finite counts as wrong; it makes the error of a regression inf.
    """
    outputs = _outputs(net, data, model)
    if data.classes:
        return float((predicted(outputs) != data.test_y).double().mean())
    root = float((outputs.double() - data.test_y).square().mean().sqrt())
    return root if math.isfinite(root) else math.inf


@torch.no_grad()
def worst_class_error(net: Net, data: Dataset, model: Tensor) -> float | None:
    """The highest error of a class that the test set has; None for a regression.

    An attack on one of ten classes hides in the mean: it moves the error by at most 0.1.
    """
    if not data.classes:
        return None
    wrong = (predicted(_outputs(net, data, model)) != data.test_y).double()
    count = torch.bincount(data.test_y, minlength=data.classes)
    return float((torch.bincount(data.test_y, wrong, data.classes) / count.clamp(min=1)).max())


def _outputs(net: Net, data: Dataset, model: Tensor) -> Tensor:
    """(N, classes) logits of the test images, or (N) values."""
    return torch.cat([net.predict(model, data.inputs(x)) for x in data.test_x.split(CHUNK[model.device.type])])


@torch.no_grad()
def success(net: Net, data: Dataset, model: Tensor, trigger: Trigger) -> float:
    """Attack success rate: share of the test images of other classes that the whole trigger moves to the target."""
    others = data.test_x[data.test_y != trigger.target]
    chunks = others.split(CHUNK[model.device.type])
    outputs = [net.predict(model, data.inputs(trigger.apply(x))) for x in chunks]
    return float((predicted(torch.cat(outputs)) == trigger.target).double().mean())


def predicted(logits: Tensor) -> Tensor:
    """(B): the predicted classes, -1 for logits that are not finite."""
    return torch.where(logits.isfinite().all(1), logits.argmax(1), -1)


def estimation(estimates: Tensor, gradients: Tensor) -> float:
    """Mean over clients of |estimate - gradient| / |gradient|, both (k, d)."""
    return float(((estimates - gradients).norm(dim=1) / gradients.norm(dim=1)).mean())


def verdicts(accepted: Tensor, malicious: Tensor) -> dict[str, float | None]:
    """Shares of uploads, and precision and recall of a rejection as a test for malicious clients.

    accepted, malicious: (rounds) bool
    """
    rejected = ~accepted
    return {
        "accepted": _share(accepted, torch.ones_like(accepted)),
        "rejected_honest": _share(rejected, ~malicious),
        "rejected_malicious": _share(rejected, malicious),
        "precision": _share(malicious, rejected) if malicious.any() else None,
        "recall": _share(rejected, malicious),
    }


def left_out(looks: list[Tensor | None], malicious: Tensor) -> dict[str, float | None]:
    """Precision and recall of leaving out as a test for malicious clients, over all clients that count at each look.

    looks: (2, n) bool each: clients that count, and those of them that are left out; None: the server has no weights
    malicious: (n) bool. With few malicious clients a look may leave nobody out, so counts are added, not shares.
    """
    known = [look.cpu() for look in looks if look is not None]
    if not known or not malicious.any():
        return {"left_out_precision": None, "left_out_recall": None}
    present, without = torch.stack(known, 1)  # (looks, n) each
    return {
        "left_out_precision": _share(malicious.expand_as(present), without),
        "left_out_recall": _share(without, malicious & present),
    }


def _share(part: Tensor, whole: Tensor) -> float | None:
    """Share of `whole` that is in `part`; None if there is nothing in it."""
    return int((part & whole).sum()) / int(whole.sum()) if whole.any() else None
