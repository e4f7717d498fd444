"""SecureAFL as an NVFlare workflow: each result is a round, and its sender gets the new model at once."""

import time

import torch
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.workflows.model_controller import ModelController

from secureafl_ext import SecureAFL


class SecureAFLController(ModelController):
    def __init__(self, rounds: int, settings: dict):
        super().__init__(ignore_result_error=True)  # else one failing client would end the job
        self.rounds, self.settings = rounds, settings

    def run(self):
        self.like = {name: torch.as_tensor(value) for name, value in self.load_model().params.items()}
        self.sites = self.sample_clients()
        self.server = SecureAFL(self.flat(self.like), len(self.sites), **self.settings)
        for site in self.sites:
            self.send_model(data=self.newest(), targets=[site], callback=self.receive)
        while self.server.version < self.rounds and not self.abort_signal.triggered:
            time.sleep(0.1)
        self.save_model(self.newest())

    def receive(self, result: FLModel):
        site, version = result.meta["client_name"], result.meta["props"]["version"]  # props: as they were sent
        receipt = self.server.submit(self.sites.index(site), -self.flat(result.params), version)
        self.info(f"round {receipt.version}: {site} {receipt.reason}, staleness {receipt.staleness}")
        self.send_model(data=self.newest(), targets=[site], callback=self.receive)

    def flat(self, params: dict) -> torch.Tensor:
        return torch.cat([torch.as_tensor(params[name]).flatten() for name in self.like])

    def newest(self) -> FLModel:
        model, version = self.server.checkout()
        parts = model.split([value.numel() for value in self.like.values()])
        params = {name: part.view_as(self.like[name]).numpy() for name, part in zip(self.like, parts, strict=True)}
        return FLModel(params=params, meta={"version": version})
