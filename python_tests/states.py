"""What tests ask of a server's state as a whole."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def identical(ours, theirs):
    """Two servers whose states are equal bit for bit."""
    ours, theirs = ours.state_dict(), theirs.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        mine, value = torch.as_tensor(ours[name]).cpu(), torch.as_tensor(value).cpu()  # they may be on two devices
        torch.testing.assert_close(mine, value, rtol=0, atol=0, equal_nan=True)


def stays_finite(server):
    """Updates of up to 3e38 with a learning rate of 1e30: a coordinate that would leave the floats keeps its value."""
    numbers = torch.tensor([1.0, 1e20, -1e20, 0.0, 3e38])
    update = torch.nn.functional.pad(numbers, (0, len(server.model) - len(numbers))).to(server.model)
    for t in range(13):
        server.submit(t % server.clients, update if t % 2 else -update, server.version)
        assert server.model.isfinite().all()
    assert server.model[0] != 0 and server.model[3] == 0


def same_on_any_threads(one, two, arrivals, rounds):
    """Rounds of one server on a single thread and of its twin on two end in the same state."""
    threads = torch.get_num_threads()
    try:
        for _ in range(rounds):
            client, update, version = arrivals.next(one)
            for count, server in ((1, one), (2, two)):
                torch.set_num_threads(count)
                server.submit(client, update, version)
    finally:
        torch.set_num_threads(threads)
    identical(one, two)


def without_values(mode, *holders):
    """Every tensor that these objects hold becomes a fake one: whoever reads it on the host gets an error."""
    for holder in holders:
        for key, value in vars(holder).items():
            if isinstance(value, torch.Tensor):
                setattr(holder, key, mode.from_tensor(value))
            elif isinstance(value, tuple) and isinstance(value[0], torch.Tensor):
                setattr(holder, key, tuple(mode.from_tensor(one) for one in value))


def never_waits(server, *holders):
    """Rounds of a server whose tensors, and those of holders, have no values: whoever reads one gets an error."""
    size, dtype, holders = len(server.model), server.dtype, (*holders, server._engine.presence)
    with FakeTensorMode() as mode:
        without_values(mode, server, *holders)
        for t in range(2):
            server.submit(t, torch.empty(size, dtype=dtype), t)
            receipt = server.enqueue(torch.empty(1, dtype=torch.int64), *torch.empty(2, size, dtype=dtype))
        with pytest.raises(Exception, match=r"item|local_scalar"):
            bool(receipt.accepted)


def enqueued_like_submitted(one, twin, arrivals):
    """The same rounds, enqueued to one and submitted to its twin. arrivals: (client, update, version), of the twin's.

    On a GPU they are captured, one graph for each phase, and replayed.
    """
    device, size = twin.model.device, len(twin.model)
    assert one.capturable
    client = torch.zeros(1, dtype=torch.int64, device=device)
    held = [torch.zeros(size, dtype=twin.dtype, device=device) for _ in range(2)]
    graphs = {}
    for t, (who, update, version) in enumerate(arrivals):
        for tensor, value in zip((client, *held), (who, update, twin.model_at(version)), strict=True):
            tensor.copy_(torch.as_tensor(value).reshape(tensor.shape))
        if device.type == "cpu" or t < 6:
            receipt = one.enqueue(client, *held)
        elif one.phase() in graphs:
            graph, receipt = graphs[one.phase()]
            one.version += 1
            graph.replay()
        else:
            phase, graph = one.phase(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                receipt = one.enqueue(client, *held)
            graphs[phase] = graph, receipt
            graph.replay()
        assert receipt.reason == twin.submit(who, update, version).reason
    identical(one, twin)
