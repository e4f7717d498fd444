"""An ordinary Flower client: it trains the model that it gets and returns it. Malicious clients attack."""

import time

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict, UserConfig
from flwr.clientapp import ClientApp
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from . import task

app = ClientApp()
SPEED_RATIO = 8  # the fastest client is this many times as fast as the slowest


def crash(*_: object) -> Tensor:
    raise RuntimeError("this client breaks down")


# The tensor that a client returns, from the tensor that it got and the step of its training.
ATTACKS = {
    "none": lambda given, step, strength: given + step,
    "sign-flip": lambda given, step, strength: given - strength * step,
    "gaussian": lambda given, step, strength: given + strength * torch.randn_like(step),
    "not-finite": lambda given, step, strength: given * torch.nan,
    "garbage": lambda given, step, strength: given.flatten()[1:],
    "crash": crash,
}


@app.train()
def train(message: Message, context: Context) -> Message:
    began = time.monotonic()
    torch.set_num_threads(1)  # a machine runs several clients
    run, node = context.run_config, context.node_config
    me, fleet = int(node["partition-id"]), int(node["num-partitions"])
    config = message.content["config"]
    given = message.content["arrays"].to_torch_state_dict()
    module = task.module()
    module.load_state_dict(given)

    optimizer = torch.optim.SGD(module.parameters(), lr=config["lr"])
    for step in range(run["local-steps"]):
        draw = config["version"] * run["local-steps"] + step
        x, y = task.batch(me, fleet, run["degree"], run["batch"], draw)
        loss = F.cross_entropy(module(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    work = work_seconds(me, fleet, run["slowest"])
    time.sleep(max(0.0, began + work - time.monotonic()))

    name = attack_of(me, fleet, run)
    attack, strength = ATTACKS[name], run["strength"]
    trained = module.state_dict().items()
    reply = {name: attack(given[name], value - given[name], strength) for name, value in trained}
    # The metrics are for the table at the end; the server does not judge by them.
    about = MetricRecord({"client": me, "malicious": int(name != "none"), "loss": loss.item()})
    return Message(RecordDict({"arrays": ArrayRecord(reply), "metrics": about}), reply_to=message)


def work_seconds(client: int, fleet: int, slowest: float) -> float:
    """Simulated time of one training: from slowest / SPEED_RATIO for the first client to `slowest` for the last. So
    fast clients overtake slow ones, whose updates are stale."""
    return slowest * SPEED_RATIO ** (client / max(1, fleet - 1) - 1)


def attack_of(client: int, fleet: int, run: UserConfig) -> str:
    """The first clients are malicious. Several attacks are dealt out in turn."""
    attacks = run["attack"].split(",")
    return attacks[client % len(attacks)] if client < round(run["malicious"] * fleet) else "none"
