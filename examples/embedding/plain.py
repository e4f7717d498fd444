"""SecureAFL in a loop of your own: whoever is done reports, and goes on from the newest model."""

from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

from fleet import CLIENTS, SETTINGS, UNDEFENDED, Net, error, train
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from secureafl_ext import SecureAFL


def work(client: int, start: Tensor, version: int) -> tuple[int, Tensor, int]:
    model = Net()
    vector_to_parameters(start.clone(), model.parameters())  # as views: training writes into the copy
    train(model, client)
    return client, start - parameters_to_vector(model.parameters()).detach(), version


def run(rounds: int = 100, **settings) -> float:
    model = Net()
    server = SecureAFL(parameters_to_vector(model.parameters()), CLIENTS, **SETTINGS, **settings)
    with ThreadPoolExecutor(CLIENTS) as pool:
        running = {pool.submit(work, client, *server.checkout()) for client in range(CLIENTS)}
        while server.version < rounds:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for update in done:
                server.submit(*update.result())
                running.add(pool.submit(work, update.result()[0], *server.checkout()))
    vector_to_parameters(server.model, model.parameters())
    return error(model)


if __name__ == "__main__":
    print(f"error with SecureAFL {run():.3f}, without {run(**UNDEFENDED):.3f}")
