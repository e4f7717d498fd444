"""The five public ops: typed wrappers with docstrings, and fake kernels for torch.compile. Nothing is computed here.

n clients, d parameters, m pairs per client. float32 or float64 (median and trimmed_mean also float16 and bfloat16),
contiguous or not, all tensors on one device. Results have the input's dtype, sums are float64, and a call repeats
bit for bit on its device. `torch.ops.secureafl.NAME` is the same op without the type hints.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad

_ops = torch.ops.secureafl


def median(updates: Tensor, mask: Tensor | None = None) -> Tensor:
    """Coordinate-wise median of the rows that mask keeps; the mean of the two middle values of an even count.

    updates: (n, d)    mask: (n) bool, default all    returns: (d), zeros if no row is kept
    NaN orders last, behind +inf, as in torch.sort.
    Equivalent: s = updates[mask].sort(0).values; (s[(len(s) - 1) // 2] + s[len(s) // 2]) / 2
    """
    return _ops.median(updates, mask)


def trimmed_mean(updates: Tensor, trim: int, mask: Tensor | None = None) -> Tensor:
    """Coordinate-wise mean of the kept rows without the `trim` smallest and the `trim` largest values.

    updates: (n, d)    mask: (n) bool, default all    returns: (d)
    2 * trim >= kept rows is an error where the host knows their number, zeros where only the GPU does.
    NaN orders last, behind +inf, as in torch.sort.
    Equivalent: updates[mask].sort(0).values[trim : mask.sum() - trim].mean(0)
    """
    return _ops.trimmed_mean(updates, trim, mask)


def lipschitz(update: Tensor, last_update: Tensor, model: Tensor, last_model: Tensor) -> Tensor:
    """Lipschitz factor of an update: |update - last_update| / |model - last_model|.

    all: (d)    returns: () float64; 0 if both differences are zero, inf if only the model's is
    Equivalent: (update - last_update).norm() / (model - last_model).norm()
    """
    return _ops.lipschitz(update, last_update, model, last_model)


def estimate(
    model: Tensor, last_updates: Tensor, last_models: Tensor, dw: Tensor, dg: Tensor, pairs: Tensor, trust: float = 1.0
) -> Tensor:
    """Estimated update of every client at this model: g_k + B_k (model - w_k), B_k the L-BFGS matrix of its pairs.

    model: (d)    last_updates g, last_models w: (n, d)    dw, dg: (n, m, d), m <= 16    pairs: (n) int64
    Slots 0 .. pairs[k] - 1 are filled, oldest first. The norm of B_k (..) is capped at trust * |g_k|; inf: no cap.
    No pairs, a singular or a non-finite system: g_k. A pairs[k] outside 0 .. m is an error on the CPU and reads
    as 0 on a GPU.    returns: (n, d)    Equivalent: secureafl_ext.reference.estimate
    """
    return _ops.estimate(model, last_updates, last_models, dw, dg, pairs, trust)


def aggregate(
    model: Tensor,
    update: Tensor,
    client: int,
    accepted: Tensor,
    last_updates: Tensor,
    last_models: Tensor,
    dw: Tensor,
    dg: Tensor,
    pairs: Tensor,
    seen: Tensor,
    trust: float = 1.0,
    rule: str = "median",
    trim: int = 0,
) -> Tensor:
    """One round's direction: `rule` over the estimates of all seen clients but `client`, and `update` if accepted.

    update: (d)    accepted: () bool    seen: (n) bool    the rest as in estimate    returns: (d), zeros if no row
    rule: median, mean, or trimmed_mean: drops `trim` on either side; zeros if fewer than n rows take part and that
    leaves none.
    The n x d estimates are never stored, and the host does not wait for the device.
    Equivalent: rows = estimate(..); rows[client] = update; keep = seen.clone(); keep[client] = accepted;
    median(rows, keep)
    """
    return _ops.aggregate(
        model, update, client, accepted, last_updates, last_models, dw, dg, pairs, seen, trust, rule, trim
    )


# Status of each client's correction: the second result of torch.ops.secureafl.aggregate_status, (n) int32. Its first
# result is that of aggregate.
STATUS = ("absent", "no_pairs", "corrected", "capped", "fallback")


# Fake kernels for torch.compile: shape and dtype of each result.
_FAKES: dict[str, Callable[..., Tensor | tuple[Tensor, Tensor]]] = {
    "median": lambda updates, mask=None: updates.new_empty(updates.shape[1]),
    "trimmed_mean": lambda updates, trim, mask=None: updates.new_empty(updates.shape[1]),
    "lipschitz": lambda update, *rest: update.new_empty((), dtype=torch.float64),
    "estimate": lambda model, last_updates, *rest, **options: last_updates.new_empty(last_updates.shape),
    "aggregate": lambda model, *rest, **options: model.new_empty(model.shape),
    "aggregate_status": lambda model, update, client, accepted, last_updates, *rest, **options: (
        model.new_empty(model.shape),
        model.new_empty(last_updates.shape[0], dtype=torch.int32),
    ),
}


# Ops of the engines, in place on the state of a server: never under autograd.
_JUDGED = (torch.bool, torch.float64, torch.int64)  # accepted, factor, reason
_WEIGHED = (*_JUDGED, torch.float64)
_ROUNDS: dict[str, tuple[torch.dtype, ...]] = {
    **dict.fromkeys(("step_", "apply_"), _JUDGED),
    **dict.fromkeys(("kin_step_", "support_step_", "mean_step_", "row_step_", "sketch_step_"), _WEIGHED),
}
_FAKE_ROUNDS: dict[str, Callable[..., Tensor | tuple[Tensor, ...] | None]] = {
    name: lambda first, *rest, dtypes=dtypes, **options: tuple(first.new_empty((), dtype=one) for one in dtypes)
    for name, dtypes in _ROUNDS.items()
}
_FAKE_ROUNDS |= dict.fromkeys(("renew_", "settle_", "refresh_"), lambda *arguments, **options: None)
_FAKE_ROUNDS["update_sums"] = lambda update, *rest, **options: update.new_empty(5, dtype=torch.float64)


def _on_one_device(name: str, fake: Callable) -> Callable:
    """torch calls the fake kernel as soon as one tensor is on the meta device. If others are not, the call is a
    mistake: it would return memory without values, or do nothing to a server's state."""

    def checked(*arguments, **options):
        names = (argument.name for argument in getattr(_ops, name).default._schema.arguments)
        given = [*zip(names, arguments, strict=False), *options.items()]
        (first, like), *others = [(key, value) for key, value in given if isinstance(value, Tensor)]
        for key, value in others:
            if value.device != like.device:
                wrong = f"{key} must be on {like.device} like {first}, got {value.device}"
                raise RuntimeError(f"secureafl::{name}: {wrong}")
        return fake(*arguments, **options)

    return checked


for _name, _fake in (*_FAKES.items(), *_FAKE_ROUNDS.items()):
    torch.library.register_fake(f"secureafl::{_name}", _on_one_device(_name, _fake))
torch.library.register_fake("secureafl::round_fits", lambda *arguments: True)
torch.library.register_fake("secureafl::pass_blocks", lambda like, clients, pairs, half, tiles: int(pairs > 0))


class _WithoutTangents(torch.library.Library):
    """register_autograd knows no forward mode: its kernel would drop the tangents without a word."""

    def impl(self, op_name, fn, dispatch_key="", **options):
        def checked(keyset, *arguments, **keywords):
            for value in (*arguments, *keywords.values()):
                if isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None:
                    raise NotImplementedError(
                        f"secureafl::{op_name} offers no forward-mode derivative; call it with plain tensors"
                    )
            return fn(keyset, *arguments, **keywords)

        super().impl(op_name, checked, dispatch_key, **options)


def _refuse_gradient(name: str) -> Callable[..., None]:
    def backward(context, *gradients):
        raise NotImplementedError(f"secureafl::{name} offers no gradient; call it under torch.no_grad()")

    return backward


_library = _WithoutTangents("secureafl", "FRAGMENT")  # it lives as long as the ops
for _name in _FAKES:
    torch.library.register_autograd(f"secureafl::{_name}", _refuse_gradient(_name), lib=_library)
