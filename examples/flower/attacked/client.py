"""An ordinary Flower client: it trains the model that it is given and returns it. Some do worse things."""

import time

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict, UserConfig
from flwr.clientapp import ClientApp
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from . import task

app = ClientApp()


def crash(*_: object) -> Tensor:
    raise RuntimeError("this client breaks down")


# What a client returns, of the tensor that it was given and the step that training took from there.
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

    time.sleep(run["slowness"] * me / fleet)  # clients differ in speed, so their replies overtake each other

    name = attack_of(me, fleet, run)
    attack, strength = ATTACKS[name], run["strength"]
    trained = module.state_dict().items()
    reply = {name: attack(given[name], value - given[name], strength) for name, value in trained}
    # What it says of itself is for the table at the end; the server does not judge by it.
    about = MetricRecord({"client": me, "malicious": int(name != "none"), "loss": loss.item()})
    return Message(RecordDict({"arrays": ArrayRecord(reply), "metrics": about}), reply_to=message)


def attack_of(client: int, fleet: int, run: UserConfig) -> str:
    """The first clients are the malicious ones; of several attacks each has another."""
    attacks = run["attack"].split(",")
    return attacks[client % len(attacks)] if client < round(run["malicious"] * fleet) else "none"
