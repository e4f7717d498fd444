"""A client of the NVFlare example: an ordinary script of its Client API."""

import nvflare.client as flare
from fleet import Net, train

flare.init()
client = int(flare.get_site_name().removeprefix("site-")) - 1
while flare.is_running():
    received = flare.receive()
    if received is None:
        break
    model = Net()
    model.load_state_dict(received.params)
    train(model, client)
    flare.send(flare.FLModel(params=model.state_dict()))
