"""SecureAFL in a loop of your own: whoever is done reports, and goes on from the newest model."""

from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

from fleet import CLIENTS, SETTINGS, UNDEFENDED, Net, error, train
from torch import Tensor

from secureafl_ext import Layout, SecureAFL

layout = Layout(Net().state_dict())  # names, shapes and places in the flat vector


def work(client: int, start: Tensor, version: int) -> tuple[int, Tensor, int]:
    model = Net()
    model.load_state_dict(layout.unflatten(start))
    train(model, client)
    return client, start - layout.flatten(model.state_dict()), version


def run(rounds: int = 100, **settings) -> float:
    model = Net()
    server = SecureAFL(layout.flatten(model.state_dict()), CLIENTS, **SETTINGS, **settings)
    with ThreadPoolExecutor(CLIENTS) as pool:
        running = {pool.submit(work, client, *server.checkout()) for client in range(CLIENTS)}
        while server.version < rounds:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for update in done:
                server.submit(*update.result())
                running.add(pool.submit(work, update.result()[0], *server.checkout()))
    model.load_state_dict(layout.unflatten(server.model))
    return error(model)


if __name__ == "__main__":
    print(f"error with SecureAFL {run():.3f}, without {run(**UNDEFENDED):.3f}")
