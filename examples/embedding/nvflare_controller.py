"""SecureAFL as an NVFlare workflow: each result is a round, and its sender gets the new model at once."""

import time

import torch
from nvflare.app_common.workflows.model_controller import FLModel, ModelController

from secureafl_ext import SecureAFL


class SecureAFLController(ModelController):
    def __init__(self, rounds: int, settings: dict):
        super().__init__(ignore_result_error=True)  # else one failing client would end the job
        self.rounds, self.settings = rounds, settings

    def run(self):
        self.like, self.sites = self.load_model().params, self.sample_clients()
        self.server = SecureAFL(self.flat(self.like), len(self.sites), **self.settings)
        for first in self.send_model_and_wait(data=self.newest(), timeout=300):  # nobody twice before everybody once
            self.receive(first)
        while self.server.version < self.rounds and not self.abort_signal.triggered:
            time.sleep(0.1)
        self.save_model(self.newest())

    def receive(self, result: FLModel):
        site, version = result.meta["client_name"], result.meta["props"]["version"]  # props: as they were sent
        try:
            receipt = self.server.submit(self.sites.index(site), -self.flat(result.params), version)
        except Exception as error:
            return self.error(f"{site} sent what cannot be read and is not asked again: {error}")
        self.info(f"round {receipt.version}: {site} {receipt.reason}, staleness {receipt.staleness}")
        self.send_model(data=self.newest(), targets=[site], callback=self.receive)

    def flat(self, params: dict) -> torch.Tensor:
        return torch.cat([torch.as_tensor(params[name]).flatten() for name in self.like])

    def newest(self) -> FLModel:
        model, version = self.server.checkout()
        parts = zip(self.like.items(), model.split([value.size for value in self.like.values()]), strict=True)
        return FLModel(params={k: part.numpy().reshape(v.shape) for (k, v), part in parts}, meta={"version": version})
