"""A column median as one writes it in Triton in an afternoon; importing this needs triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

VALUES = 4096  # that one program holds


@triton.jit
def bisect(stack, out, n, d, rank, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # noqa: N803 - Triton's custom
    """Of each column of stack (n, d) the value with `rank` others below it, found bit by bit from the top."""
    row = tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    values = tl.load(stack + row.to(tl.int64) * d + column, mask=(row < n) & (column < d), other=0.0)
    bits = values.to(tl.uint32, bitcast=True)
    keys = tl.where(bits >> 31 == 1, ~bits, bits | 0x80000000)  # ordered as the floats are
    found = tl.zeros((1, COLUMNS), tl.uint32)
    for step in range(32):
        bound = found | (tl.full((1, COLUMNS), 1, tl.uint32) << (31 - step))
        below = tl.sum(((keys < bound) & (row < n)).to(tl.int32), axis=0)[None, :]
        found = tl.where(below <= rank, bound, found)
    bits = tl.where(found >> 31 == 1, found & 0x7FFFFFFF, ~found)
    tl.store(out + column, bits.to(tl.float32, bitcast=True), mask=column < d)


def median(stack: Tensor) -> Tensor:
    """The lower middle value of each column, float32, no NaN."""
    n, d = stack.shape
    out = torch.empty(d, device=stack.device)
    rows = triton.next_power_of_2(n)
    columns = max(8, VALUES // rows)
    bisect[(triton.cdiv(d, columns),)](stack, out, n, d, (n - 1) // 2, ROWS=rows, COLUMNS=columns)
    return out
