"""Five sites of NVFlare's simulator, one of them malicious, with and without SecureAFL's defense."""

import sys
import tempfile
from pathlib import Path

import torch
from fleet import CLIENTS, SETTINGS, UNDEFENDED, Net, error
from nvflare.app_opt.pt.job_config.model import PTModel
from nvflare.client.config import TransferType
from nvflare.job_config.api import FedJob
from nvflare.job_config.script_runner import ScriptRunner
from nvflare_controller import SecureAFLController

HERE = Path(__file__).parent


def run(rounds: int, settings: dict) -> float:
    job = FedJob(name="secureafl")
    job.to_server(SecureAFLController(rounds, SETTINGS | settings))
    job.to_server(PTModel(Net()))
    job.to_clients(ScriptRunner(str(HERE / "nvflare_client.py"), params_transfer_type=TransferType.DIFF))
    job.add_file_to_clients(str(HERE / "fleet.py"))
    with tempfile.TemporaryDirectory() as workspace:
        job.simulator_run(workspace, n_clients=CLIENTS)
        [path] = Path(workspace).rglob("FL_global_model.pt")
        saved = torch.load(path)["model"]
    model = Net()
    model.load_state_dict(saved)
    return error(model)


if __name__ == "__main__":
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    print(f"error with SecureAFL {run(rounds, {}):.3f}, without {run(rounds, UNDEFENDED):.3f}")
