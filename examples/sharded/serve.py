"""A server whose coordinates are split over ranks, a fifth of its clients malicious. Ended at any time, it goes on.

torchrun --standalone --nproc-per-node=2 examples/sharded/serve.py
"""

import argparse
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from secureafl_ext import SecureAFL, gather, shard

CLIENTS, MALICIOUS, SIZE = 20, 4, 100_003  # a size that no number of ranks divides: slices differ by one


class Clients:
    """Stand-ins for a fleet and its network: each client pulls the model towards a place near the same optimum."""

    def __init__(self):
        self.random = torch.Generator().manual_seed(0)
        self.optimum = torch.randn(SIZE, generator=self.random)
        self.places = self.optimum + 0.3 * torch.randn(CLIENTS, SIZE, generator=self.random)

    def upload(self, model: torch.Tensor) -> tuple[int, torch.Tensor]:
        client = int(torch.randint(CLIENTS, (), generator=self.random))
        update = model - self.places[client]
        return client, -5 * update if client < MALICIOUS else update


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=600)
    parser.add_argument("--checkpoint", type=Path, default=Path("sharded.safetensors"))
    options = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=60))
    ranks, first = dist.group.WORLD, dist.get_rank() == 0
    device = torch.device("cuda", dist.get_node_local_rank()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)

    if options.checkpoint.exists():  # saved on any number of ranks
        server = SecureAFL.load(options.checkpoint, device, ranks)
    else:
        server = SecureAFL(shard(torch.zeros(SIZE, device=device), ranks), CLIENTS, lr=0.02, process_group=ranks)

    clients = Clients()
    while server.version < options.rounds:
        model = gather(server.model, ranks).cpu()  # what a client downloads
        # Every rank plays the same fleet. A real network brings each rank its slice of the upload, or the first rank
        # all of it, which then scatters it; client and version must be the same on all of them.
        client, update = clients.upload(model)
        server.submit(client, shard(update, ranks).to(device), server.version)
        if server.version % 100 == 0:
            server.save(options.checkpoint)  # every rank its shard
            if first:
                away = float((model - clients.optimum).norm() / clients.optimum.norm())
                print(f"round {server.version}: {away:.3f} from the optimum; {server.stats()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
