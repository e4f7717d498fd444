"""Fleets on a grid in memory for the tests of the Flower loop: their clients, their server, their simulated time."""

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Error, Message, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.supercore.task_identity import TaskIdentity
from memory_grid import Clock, MemoryGrid

from secureafl_ext import SecureAFL
from secureafl_ext.flower import Layout, Loop, loop

LR = 0.1
START = {"w": torch.zeros(4, 3), "count": torch.tensor(5), "b": torch.zeros(2)}
GOAL = torch.linspace(-1, 1, 14)  # where honest clients want the model


def simulated(monkeypatch):
    """The clock that the loop goes by from now on. Flower's messages ask which run they are made in: it is 1."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    clock = Clock()
    monkeypatch.setattr(loop, "time", clock)
    return clock


def trained(message, gradient):
    """A client's reply: its model one step on."""
    layout = Layout(START)
    model = layout.read(message.content["arrays"])
    return RecordDict({"arrays": layout.write(model - message.content["config"]["lr"] * gradient(model))})


def honest(seconds=1.0, noise=0.0, seed=0):
    random = torch.Generator().manual_seed(seed)

    def answer(message):
        def gradient(model):
            return model - GOAL + noise * torch.randn(14, generator=random)

        return [(seconds, trained(message, gradient))]

    return answer


def says(content, seconds=1.0):
    """The same answer to everything."""
    return lambda message: [(seconds, content)]


def of_flower(code):
    """An error that Flower itself puts in the place of a reply."""

    def change(reply):
        reply.metadata.__dict__["_src_node_id"] = SUPERLINK_NODE_ID
        return Message(metadata=reply.metadata, error=Error(code, f"code {code}"))

    return change


def server(clients=3, **settings):
    return SecureAFL(Layout(START).flatten(START), clients, lr=LR, **{"max_staleness": 50, "quantile": 1.0, **settings})


def start(nodes, clock, judge=None, **settings):
    """A loop, its grid and the list that its events go to."""
    events = []
    grid = MemoryGrid(nodes, clock, **{"expires": settings.pop("expires")} if "expires" in settings else {})
    settings = {"ttl": 30.0, "watch": events.append, **settings}
    return Loop(grid, judge or server(), Layout(START), **settings), grid, events


def kinds(events, node):
    return [event.kind for event in events if event.node == node]


def layout_with(w=None, **others):
    arrays = {"w": np.zeros((4, 3), np.float32) if w is None else w, "b": np.zeros(2, np.float32), **others}
    return RecordDict({"arrays": ArrayRecord({k: Array(v) for k, v in arrays.items() if v is not False})})
