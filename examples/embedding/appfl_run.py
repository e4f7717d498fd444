"""APPFL's virtual-time simulator: five clients, one of them malicious, against three aggregators."""

import sys
from pathlib import Path

import appfl_aggregator  # noqa: F401 - makes SecureAFLAggregator known
from appfl.agent import SimClientAgent, SimServerAgent
from appfl.vsim import AsyncSimDriver, ClientProfile, VsimLogger
from fleet import CLIENTS, MALICIOUS, SETTINGS, UNDEFENDED, Net, error, samples
from torch.utils.data import TensorDataset

HERE = Path(__file__).parent
MODEL = {"model_path": str(HERE / "fleet.py"), "model_name": "Net"}
TRAIN = {
    "mode": "step",
    "num_local_steps": 10,
    "train_batch_size": 32,
    "optim": "SGD",
    "optim_args": {"lr": 0.02},
    "loss_fn": "CrossEntropyLoss",
    "metric_path": str(HERE / "appfl_clients.py"),
    "metric_name": "accuracy",
    "send_gradient": True,
    "optimize_memory": False,  # on, APPFL collects garbage twice in every round
    "logging_output_filename": "",
}
HONEST = {"trainer": "VanillaTrainer"}
LIAR = {"trainer": "MaliciousTrainer", "trainer_path": str(HERE / "appfl_clients.py")}


def run(rounds: int, aggregator: str, settings: dict) -> float:
    server_configs = {
        "num_clients": CLIENTS,
        "num_global_epochs": rounds,
        "scheduler": "AsyncScheduler",
        "scheduler_kwargs": {"num_clients": CLIENTS, "optimize_memory": False},
        "aggregator": aggregator,
        "aggregator_kwargs": settings,
        "optimize_memory": False,
    }
    server = SimServerAgent(
        {"client_configs": {"model_configs": MODEL, "train_configs": TRAIN}, "server_configs": server_configs}
    )
    clients = []
    for client in range(CLIENTS):
        train = {**TRAIN, **(LIAR if client == MALICIOUS else HONEST)}
        configs = {"model_configs": MODEL, "train_configs": train, "optimize_memory": False}
        clients.append(SimClientAgent(configs, client_id=client, client_dataset=TensorDataset(*samples(client))))
    # Some are slower than others, so that updates arrive stale.
    profiles = {client.get_id(): ClientProfile(compute_factor=1 + i / CLIENTS) for i, client in enumerate(clients)}
    AsyncSimDriver(server, clients, profiles, CLIENTS, VsimLogger(), base_step_time=0.01).run()
    model = Net()
    model.load_state_dict(server.get_parameters(serial_run=True))
    return error(model)


if __name__ == "__main__":
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    ours = run(rounds, "SecureAFLAggregator", {"settings": SETTINGS})
    mean = run(rounds, "SecureAFLAggregator", {"settings": SETTINGS | UNDEFENDED})
    fedasync = run(
        rounds, "FedAsyncAggregator", {"alpha": 0.2 * CLIENTS, "optimize_memory": False}
    )  # it divides by them
    print(f"error with SecureAFL {ours:.3f}, without {mean:.3f}, with FedAsync {fedasync:.3f}")
