"""A learning rate that changes between rounds."""

import math

import pytest
import torch
from engines import ENGINES, make
from states import identical

from secureafl_ext import SecureAFL
from secureafl_ext.audit import Audited
from secureafl_ext.operate import Watched


def upload(server, first, last):
    for i in range(first, last):
        update = torch.sin(torch.arange(len(server.model)) + i).to(server.model)
        server.submit(i % server.clients, update, server.version)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_new_rate_is_that_of_a_server_made_with_it(engine, device):
    server, other = make(engine, device, lr=0.1), make(engine, device, lr=0.02)
    upload(server, 0, 12)
    other.load_state_dict(server.state_dict())
    server.lr = 0.02
    assert server.lr == server.config.lr == 0.02
    before = server.model.clone()
    for one in (server, other):
        upload(one, 12, 24)
    identical(server, other)
    assert not torch.equal(server.model, before)


def test_a_checkpoint_keeps_the_rate(tmp_path):
    server = SecureAFL(torch.zeros(3), 2, lr=0.1)
    server.lr = 0.03
    server.save(tmp_path / "server")
    assert SecureAFL.load(tmp_path / "server").lr == 0.03


@pytest.mark.parametrize("value", [math.nan, math.inf, "fast", None])
def test_a_bad_rate_changes_nothing(value):
    server = SecureAFL(torch.zeros(3), 2, lr=0.1)
    with pytest.raises(ValueError, match="SecureAFL: lr must be a finite number, got"):
        server.lr = value
    assert server.lr == 0.1 and server._engine.lr == 0.1


def test_wrapped_servers_do_not_keep_a_rate_to_themselves(tmp_path):
    server = SecureAFL(torch.zeros(3), 2, lr=0.1)
    watched = Watched(server, [], every=0)
    watched.lr = 0.05
    assert watched.lr == server.lr == 0.05
    watched.close()
    audited = Audited(server, tmp_path / "log")
    with pytest.raises(ValueError, match=r"Audited: lr must stay 0\.05, got 0\.1"):
        audited.lr = 0.1
    assert audited.lr == server.lr == 0.05
