"""Row-wise aggregation rules weigh whole updates by their inner products. Coordinate-wise rules are ops (csrc).

A rule of your own:

    from secureafl_ext import SecureAFL
    from secureafl_ext.rules import register_rule

    def smallest(gram, mask, config):
        norms = gram.diagonal().masked_fill(~mask, float("inf"))
        return torch.zeros_like(norms).index_fill(0, norms.argmin(), 1)  # all weight on the shortest update

    register_rule("smallest", smallest)
    server = SecureAFL(model, clients=10, rule="smallest")
"""

from .registry import WeightsFunction, register_rule

__all__ = ["WeightsFunction", "register_rule"]
