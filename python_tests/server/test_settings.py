"""Settings are plain values from the start: a look-alike is converted or refused, not found out at the first save."""

import inspect
import json
from dataclasses import asdict, fields

import numpy as np
import pytest
import torch

from secureafl_ext import SecureAFL
from secureafl_ext.config import CHECKS, Config

LOOK_ALIKES = {
    "lr": np.float32(0.25),
    "memory": np.int8(2),
    "quantile": np.float64(0.5),
    "max_norm": torch.tensor(2.0),
    "trust": 1,
    "trim": torch.tensor(0),
    "max_staleness": np.uint16(5),
    "window": np.int64(9),
    "filter": np.bool_(True),
    "estimate": np.bool_(True),
    "receive": True,
    "keep_last": np.bool_(True),
    "buckets": np.int64(1),
    "remove": np.float16(0.5),
    "radius": np.float32(2),
    "iterations": np.int32(3),
    "sketch": np.int64(0),
    "sketch_seed": torch.tensor(5),
}


def test_numbers_of_other_libraries_become_plain_ones(tmp_path):
    server = SecureAFL(torch.zeros(3), np.int64(4), **LOOK_ALIKES)
    plain = SecureAFL(torch.zeros(3), 4, **{name: value.item() if hasattr(value, "item") else value
                                            for name, value in LOOK_ALIKES.items()})  # fmt: skip
    assert type(server.clients) is int and server.config == plain.config
    kinds = {type(value) for value in asdict(server.config).values()}
    assert kinds == {int, float, bool, str}
    json.dumps(asdict(server.config))
    server.submit(0, torch.ones(3), 0)
    server.save(tmp_path / "server")
    assert SecureAFL.load(tmp_path / "server").config == server.config


REFUSED = [
    ({"memory": 2.5}, "memory must be a whole number 0 to 16, got 2.5"),
    ({"memory": True}, "memory must be a whole number 0 to 16, got True"),
    ({"memory": "3"}, "memory must be a whole number 0 to 16, got '3'"),
    ({"filter": "no"}, "filter must be True or False, got 'no'"),
    ({"filter": 1}, "filter must be True or False, got 1"),
    ({"estimate": None}, "estimate must be True or False, got None"),
    ({"receive": 0}, "receive must be True or False, got 0"),
    ({"lr": "0.1"}, "lr must be a finite number, got '0.1'"),
    ({"lr": None}, "lr must be a finite number, got None"),
    ({"lr": True}, "lr must be a finite number, got True"),
    ({"lr": 1j}, "lr must be a finite number, got complex"),
    ({"lr": torch.zeros(2)}, "lr must be a finite number, got Tensor"),
    ({"lr": 10**400}, "lr must be a finite number, got an integer of 1329 bits"),
    ({"quantile": float("nan")}, "quantile must be a number between 0 and 1, got nan"),
    ({"max_norm": float("nan")}, "max_norm must be a positive number, got nan"),
    ({"trust": float("nan")}, "trust must be a number, 0 or more (inf: no cap), got nan"),
    ({"trim": 2**70}, "trim must be a whole number, 0 or more, got an integer of 71 bits"),
    ({"window": 1.5}, "window must be None or a positive whole number, got 1.5"),
    ({"window": np.float32(4)}, f"window must be None or a positive whole number, got {np.float32(4)!r}"),
    ({"radius": "wide"}, "radius must be None or a positive number, got 'wide'"),
    ({"rule": ["median"]}, "rule must be one of median, trimmed_mean, mean, centered_clip, spectral, krum, "
                           "geometric_median, kinship, support, got list"),
    ({"store": None}, "store must be one of all, accepted, got None"),
    ({"history_dtype": 5}, "history_dtype must be one of float16, bfloat16, float32, float64, got 5"),
    ({"clients": 2.5}, "clients must be a whole number, 1 or more, got 2.5"),
    ({"clients": True}, "clients must be a whole number, 1 or more, got True"),
    ({"clients": "4"}, "clients must be a whole number, 1 or more, got '4'"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "words"), REFUSED, ids=[words[:60] for _, words in REFUSED])
def test_other_values_are_refused_in_words(settings, words):
    with pytest.raises(ValueError) as refusal:
        SecureAFL(torch.zeros(3), **{"clients": 4, **settings})
    assert str(refusal.value) == f"SecureAFL: {words}"


def test_the_signature_of_the_server_is_that_of_config():
    """SecureAFL.__init__ repeats names, order, types and defaults of Config for editors and documentation."""
    model, clients, *settings, group = list(inspect.signature(SecureAFL).parameters.values())
    assert (model.name, clients.name, group.name) == ("model", "clients", "process_group")
    assert all(one.kind is inspect.Parameter.KEYWORD_ONLY for one in settings)
    expected = [(field.name, field.type, field.default) for field in fields(Config)]
    got = [(one.name, one.annotation, one.default) for one in settings]
    place = [name for name, *_ in expected].index("history_dtype")
    assert expected.pop(place) == ("history_dtype", str, "float32")  # a torch.dtype has no JSON
    assert got.pop(place) == ("history_dtype", torch.dtype, torch.float32)
    assert got == expected
    assert set(CHECKS) == {field.name for field in fields(Config)}


def test_a_server_from_a_config_is_one_from_its_settings():
    settings = {"rule": "krum", "memory": 0, "lr": 0.5, "remove": 0.1}
    server = SecureAFL.from_config(torch.zeros(3), 4, Config(**settings, history_dtype="float64"))
    assert server.config == SecureAFL(torch.zeros(3), 4, **settings, history_dtype=torch.float64).config
    assert server.config.history_dtype == "float64" and server.config.rule == "krum"
