"""A small byte-level transformer in plain torch, and LoRA adapters for its attention."""

import math

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812


class Block(nn.Module):
    """Attention and an MLP, each added to its input."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        # ReLU: on a CPU the gradient of GELU alone would take a fifth of the time.
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, width), and so is the result
        normed = self.norm(x)
        projected = [layer(normed) for layer in (self.query, self.key, self.value)]
        query, key, value = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in projected)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)  # (batch, heads, time, width / heads)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """Decoder-only: bytes (batch, time) -> logits of the next byte (batch, time, 256)."""

    def __init__(self, width: int = 96, layers: int = 2, heads: int = 4, context: int = 64):
        super().__init__()
        self.context = context  # the longest time
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class LoRALinear(nn.Module):
    """base(x) + scale * B A x, with a frozen base. B starts at zero, so the model starts as its base."""

    def __init__(self, base: nn.Linear, rank: int, scale: float):
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), scale
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))  # (rank, in)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))  # (out, rank)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * (x @ self.lora_a.T @ self.lora_b.T)


def add_adapters(net: Transformer, rank: int = 4, scale: float = 2.0) -> dict[str, Tensor]:
    """Freeze the net and give every projection of its attention an adapter. Returns the adapters by name."""
    net.requires_grad_(False)
    for block in net.blocks:
        for name in ("query", "key", "value", "out"):
            setattr(block, name, LoRALinear(getattr(block, name), rank, scale))
    return {name: value.detach() for name, value in net.named_parameters() if value.requires_grad}


def bits_per_byte(net: Transformer, windows: Tensor, adapters: dict[str, Tensor] | None = None) -> Tensor:
    """Mean cross-entropy of the next byte. windows: (batch, time + 1)    adapters: used in place of the net's own"""
    logits = functional_call(net, adapters or {}, (windows[:, :-1],))
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()) / math.log(2)
