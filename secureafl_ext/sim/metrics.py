"""Quality of a model, and quality of a filter."""

import math

import torch
from torch import Tensor

from ..attacks import Trigger
from ..tasks.datasets import Dataset
from ..tasks.models import Net

CHUNK = 2_000  # test images at a time


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
    return torch.cat([net.predict(model, data.inputs(x)) for x in data.test_x.split(CHUNK)])


@torch.no_grad()
def success(net: Net, data: Dataset, model: Tensor, trigger: Trigger) -> float:
    """Attack success rate: share of the test images of other classes that the whole trigger moves to the target."""
    others = data.test_x[data.test_y != trigger.target]
    outputs = [net.predict(model, data.inputs(trigger.apply(x))) for x in others.split(CHUNK)]
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

    def share(part: Tensor, whole: Tensor) -> float | None:
        return int((part & whole).sum()) / int(whole.sum()) if whole.any() else None

    rejected = ~accepted
    return {
        "accepted": share(accepted, torch.ones_like(accepted)),
        "rejected_honest": share(rejected, ~malicious),
        "rejected_malicious": share(rejected, malicious),
        "precision": share(malicious, rejected) if malicious.any() else None,
        "recall": share(rejected, malicious),
    }
