"""Time each op against what plain torch takes for the same, and against a copy of the bytes it must read.

python bench/ops.py [--device cpu|cuda] [--quick]
"""

import argparse

import torch
from timing import describe, seconds

import secureafl_ext
from secureafl_ext import reference

SIZES = [(50, 140_000), (300, 140_000), (50, 1_000_000)]
MEMORY = 3


def history(n: int, d: int, device: str) -> dict[str, torch.Tensor]:
    random = torch.Generator(device).manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=random, device=device)

    dw = normal(n, MEMORY, d)
    return {
        "last_updates": normal(n, d),
        "last_models": normal(n, d),
        "dw": dw,
        "dg": 1.5 * dw + 0.1 * normal(n, MEMORY, d),
        "pairs": torch.full((n,), MEMORY, device=device),
    }


def batched_estimate(model, last_updates, last_models, dw, dg, pairs, trust=1.0):
    """The same with batched torch calls, every client with all its pairs: what one writes without this package."""
    x = model - last_models
    sy, ss = dw @ dg.mT, dw @ dw.mT
    scale = (sy[:, -1, -1] / ss[:, -1, -1])[:, None]
    lower = sy.tril(-1)
    diagonal = torch.diag_embed(sy.diagonal(dim1=1, dim2=2))
    middle = torch.cat([torch.cat([-diagonal, lower.mT], 2), torch.cat([lower, scale[..., None] * ss], 2)], 1)
    right = torch.cat([(dg @ x[..., None])[..., 0], scale * (dw @ x[..., None])[..., 0]], 1)
    solution = torch.linalg.solve(middle, right)
    parts = torch.cat([dg, scale[..., None] * dw], 1)
    correction = scale * x - (solution[:, None] @ parts)[:, 0]
    cap = trust * last_updates.norm(dim=1) / correction.norm(dim=1)
    return last_updates + correction * cap.clamp(max=1)[:, None]


def rows(n: int, d: int, device: str):
    """(op, ours, torch's, bytes that must be read) for one size."""
    state = history(n, d, device)
    model, update = state["last_models"].mean(0), state["last_updates"].mean(0)
    past = tuple(state.values())
    accepted, seen = torch.tensor(True, device=device), torch.ones(n, dtype=torch.bool, device=device)
    stack = state["last_updates"]
    plane = 4 * n * d
    yield "median", lambda: secureafl_ext.median(stack), lambda: stack.median(0), plane
    yield (
        "trimmed_mean",
        lambda: secureafl_ext.trimmed_mean(stack, n // 5),
        lambda: reference.trimmed_mean(stack, n // 5),
        plane,
    )
    four = stack[0], stack[1], state["last_models"][0], state["last_models"][1]
    yield "lipschitz", lambda: secureafl_ext.lipschitz(*four), lambda: reference_factor(*four), 16 * d
    words = (2 * MEMORY + 2) * plane
    yield (
        "estimate",
        lambda: secureafl_ext.estimate(model, *past),
        lambda: batched_estimate(model, *past),
        words + plane,
    )
    yield (
        "aggregate",
        lambda: secureafl_ext.aggregate(model, update, 0, accepted, *past, seen),
        lambda: batched_estimate(model, *past).median(0),
        words,
    )


def reference_factor(update, last_update, model, last_model):
    return (update - last_update).norm() / (model - last_model).norm()


def check(device: str) -> None:
    """The times below mean nothing if the results are wrong."""
    state = history(8, 1000, device)
    model = state["last_models"].mean(0)
    ours = secureafl_ext.estimate(model, *state.values())
    for other in (batched_estimate, reference.estimate):
        torch.testing.assert_close(ours, other(model, *state.values()), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(secureafl_ext.median(ours), reference.median(ours), rtol=0, atol=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="the first size only, fewer repeats")
    options = parser.parse_args()

    check(options.device)
    print(
        f"{describe(options.device)}, torch {torch.__version__}, secureafl_ext {secureafl_ext.__version__}, float32\n"
    )
    print("| op | n | d | ours ms | torch ms | x torch | x copy of its reads |")
    print("|---|---|---|---|---|---|---|")
    for n, d in SIZES[: 1 if options.quick else None]:
        for name, ours, torchs, bytes_read in rows(n, d, options.device):
            repeats = 3 if options.quick or options.device == "cpu" else 20
            source = torch.empty(bytes_read // 8, device=options.device)  # read and written: twice its size
            target = torch.empty_like(source)
            copy = seconds(lambda: target.copy_(source), options.device, repeats)  # noqa: B023
            mine, theirs = (seconds(call, options.device, repeats) for call in (ours, torchs))
            times = f"{1e3 * mine:.3f} | {1e3 * theirs:.3f} | {theirs / mine:.1f} | {mine / copy:.1f}"
            print(f"| {name} | {n} | {d} | {times} |")


if __name__ == "__main__":
    main()
