"""SecureAFL as an APPFL aggregator: with AsyncScheduler each arrival is a round. Clients set `send_gradient: true`."""

from appfl.algorithm import aggregator
from torch import cat
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from secureafl_ext import SecureAFL


class SecureAFLAggregator(aggregator.BaseAggregator):
    def __init__(self, model, aggregator_configs, logger):
        self.model, self.logger = model, logger
        start, settings = parameters_to_vector(model.parameters()), aggregator_configs.get("settings", {})
        self.server = SecureAFL(start, aggregator_configs.num_clients, **settings)
        self.numbers, self.versions = {}, {}  # of each client; the version that it was given last

    def get_parameters(self, client_id=None, **kwargs) -> dict:
        vector, self.versions[client_id] = self.server.checkout()
        vector_to_parameters(vector, self.model.parameters())
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def aggregate(self, client_id, local_model: dict, **kwargs) -> dict:
        update = cat([local_model[name].flatten() for name, _ in self.model.named_parameters()])
        number = self.numbers.setdefault(client_id, len(self.numbers))
        receipt = self.server.submit(number, update, self.versions.get(client_id, 0))
        self.logger.info(f"round {receipt.version}: {client_id} {receipt.reason}, staleness {receipt.staleness}")
        return self.get_parameters(client_id)


aggregator.SecureAFLAggregator = SecureAFLAggregator  # APPFL finds it by name, and hands it the model
