"""DBA, the distributed backdoor attack: each malicious client trains on one quarter of the trigger."""

from .base import Scene, Simple
from .scaling import scaled_poison
from .trigger import SHARE, TARGET


def dba(scene: Scene, *, factor: float | None = None, target: int = TARGET, share: float = SHARE) -> Simple:
    """factor: 1 in the original, whose clients attack again and again"""
    return scaled_poison(scene, factor, target, share, lambda client: scene.rank(client) % 4)
