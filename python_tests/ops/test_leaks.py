"""Calls give back what they allocate, to the byte: a server makes millions of them."""

import ctypes

import pytest
import torch

from secureafl_ext import SecureAFL

CALLS = 2000


class Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "used", "free", "keepcost")
    ]


def counter():
    """A function that tells how many bytes are allocated now: a sanitizer's, or glibc's."""
    process = ctypes.CDLL(None)
    if hasattr(process, "__sanitizer_get_current_allocated_bytes"):
        process.__sanitizer_get_current_allocated_bytes.restype = ctypes.c_size_t
        return process.__sanitizer_get_current_allocated_bytes
    if not hasattr(process, "mallinfo2"):
        pytest.skip("neither a sanitizer nor glibc 2.33")
    process.mallinfo2.restype = Mallinfo
    return lambda: process.mallinfo2().used


def per_call(call):
    """Bytes that stay allocated; the least of three series, for the interpreter allocates now and then."""
    allocated, found = counter(), []
    for _ in range(4):
        before = allocated()
        for _ in range(CALLS):
            call()
        found.append((allocated() - before) / CALLS)
    return min(found[1:])


def history(n=3, d=5, m=1):
    rows = torch.ones(n, d)
    pairs = torch.ones(n, m, d)
    return rows, rows, pairs, pairs, torch.full((n,), m)


OPS = {
    "median": lambda: (torch.ones(3, 5),),
    "trimmed_mean": lambda: (torch.ones(3, 5), 1),
    "lipschitz": lambda: (torch.ones(5),) * 4,
    "estimate": lambda: (torch.ones(5), *history()),
    "aggregate": lambda: (
        *(torch.ones(5), torch.ones(5), 0, torch.tensor(True), *history()),
        *(torch.ones(3, dtype=torch.bool), 1.0, "median", 0),
    ),
}


@pytest.mark.parametrize("op", OPS)
def test_an_op_gives_back_what_it_allocates(op):
    function, arguments = getattr(torch.ops.secureafl, op).default, OPS[op]()
    assert per_call(lambda: function(*arguments)) < 8


def test_so_does_a_refused_one():
    *arguments, _, trim = OPS["aggregate"]()

    def refused():
        with pytest.raises(RuntimeError, match="rule must be"):
            torch.ops.secureafl.aggregate.default(*arguments, "no such rule", trim)

    assert per_call(refused) < 8


ENGINES = [{}, {"rule": "kinship", "memory": 0}, {"rule": "krum", "memory": 0}]


@pytest.mark.parametrize("settings", ENGINES, ids=str)
def test_so_does_a_round(settings):
    server, update = SecureAFL(torch.zeros(5), 3, **settings), torch.ones(5)
    assert per_call(lambda: server.submit(0, update, server.version)) < 8
