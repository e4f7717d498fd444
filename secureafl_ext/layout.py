"""Layout: a state dict as one flat vector and back. SecureAFL takes models and updates as flat vectors."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .validation import describe, name_of


class Entry(NamedTuple):
    shape: tuple[int, ...]
    part: slice  # of the flat vector


class Layout:
    """Names, shapes and positions of the entries of a state dict in the flat vector.

    Floating entries, buffers such as running means included, form the vector in the order of the state dict. All must
    be float32 or all float64. Integer and boolean entries are `carried`: `unflatten` returns them unchanged, and no
    client can set them, since no rule judges them.

    entries: name -> Entry    carried: name -> tensor on the CPU    size: d    dtype: of the vector
    """

    def __init__(self, state: Mapping[str, Tensor]):
        if not isinstance(state, Mapping):
            raise ValueError(f"Layout: state must be a dict of tensors, got {type(state).__name__}")
        for name, value in state.items():
            if not isinstance(value, Tensor):
                raise ValueError(f"Layout: state[{name!r}] must be a tensor, got {type(value).__name__}")
        dtypes = {value.dtype for value in state.values() if value.is_floating_point() or value.is_complex()}
        if dtypes not in ({torch.float32}, {torch.float64}):
            got = ", ".join(sorted(map(name_of, dtypes))) or "none"
            raise ValueError(f"Layout: state must have floating entries, all float32 or all float64, got {got}")
        (self.dtype,) = dtypes
        self.names = list(state)
        others = {name: value for name, value in state.items() if value.dtype != self.dtype}
        self.carried = {name: value.detach().cpu().clone() for name, value in others.items()}
        self.entries: dict[str, Entry] = {}
        self.size = 0
        for name, value in state.items():
            if name not in self.carried:
                part = slice(self.size, self.size + value.numel())
                self.entries[name] = Entry(tuple(value.shape), part)
                self.size = part.stop

    def flatten(self, state: Mapping[str, Tensor], device: torch.device | str = "cpu") -> Tensor:
        """The vector (d): a copy on `device`. Carried entries are ignored, so a dict of gradients fits too."""
        missing = [name for name in self.entries if name not in state]
        if missing:
            raise ValueError(f"Layout.flatten: state must have {', '.join(missing)}, got none")
        vector = torch.empty(self.size, dtype=self.dtype, device=device)
        for name, (shape, part) in self.entries.items():
            value = state[name]
            if not isinstance(value, Tensor) or value.shape != shape or value.dtype != self.dtype:
                expected = f"{shape} {name_of(self.dtype)}"
                raise ValueError(f"Layout.flatten: {name} must be a tensor {expected}, got {describe(value)}")
            vector[part].view(shape).copy_(value.detach())
        return vector

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """The state dict. Floating entries are views of the vector (d), carried entries are shared."""
        if not isinstance(vector, Tensor) or vector.shape != (self.size,) or vector.dtype != self.dtype:
            expected = f"({self.size},) {name_of(self.dtype)}"
            raise ValueError(f"Layout.unflatten: vector must be a tensor {expected}, got {describe(vector)}")
        views = {name: vector[part].view(shape) for name, (shape, part) in self.entries.items()}
        return {name: views[name] if name in views else self.carried[name] for name in self.names}
