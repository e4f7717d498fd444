"""examples/lora: adapters alone are trained, and an attack is withstood only with SecureAFL. With a smaller model."""

import re
from functools import partial

import pytest
import torch
from places import ROOT

from secureafl_ext import SecureAFL

EXAMPLE = ROOT / "examples" / "lora"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE)
    import finetune
    import lora

    monkeypatch.setattr(finetune, "Transformer", partial(lora.Transformer, width=32, layers=1, context=32))
    return finetune


def test_the_held_out_loss_falls_under_attack_with_secureafl_alone(example, capsys):
    example.main(["--pretraining", "60", "--uploads", "150", "--seed", "3"])
    printed = capsys.readouterr().out
    rows = re.findall(r"^(\S.*?) +([\d.]+) +([\d.]+)$", printed, re.MULTILINE)
    gains = {name: float(after) - float(before) for name, before, after in rows}
    assert list(gains) == ["no defense, attack", "no defense, no attack", "SecureAFL, attack", "SecureAFL, no attack"]
    assert gains.pop("no defense, attack") > 1
    assert max(gains.values()) < -0.05, printed
    # Between two uploads of a client, each of the nine others uploads once on average.
    assert re.search(r"^staleness: 9 versions on average, [12]\d at most$", printed, re.MULTILINE)


def test_adapters_alone_change(example):
    task = example.make_task(pretraining=5, seed=0)
    assert {name.rpartition(".")[2] for name in task.layout.entries} == {"lora_a", "lora_b"}
    assert len(task.layout.entries) == 2 * 4  # of the four projections of the one layer
    net = {name: value.clone() for name, value in task.net.state_dict().items()}
    server = SecureAFL.from_config(task.start, example.CLIENTS, example.DEFENDED)
    example.finetune(task, server, malicious=2, uploads=30, seed=0)
    assert not torch.equal(server.model, task.start)
    assert all(torch.equal(value, net[name]) for name, value in task.net.state_dict().items())


def test_adapters_start_as_nothing(example):
    import lora

    net, tokens = example.Transformer(), torch.arange(64).view(2, 32)
    base = net(tokens)
    adapters = lora.add_adapters(net)
    assert torch.equal(net(tokens), base)
    moved = {name: value + 0.1 for name, value in adapters.items()}
    assert not torch.allclose(torch.func.functional_call(net, moved, (tokens,)), base, atol=1e-3)


def test_the_flat_gradient_is_that_of_the_adapters(example):
    task = example.make_task(pretraining=5, seed=0)
    windows, vector = task.texts.held_out[:4], task.start + 0.1  # away from B = 0, where A has no gradient
    task.net.load_state_dict(task.layout.unflatten(vector), strict=False)
    adapters = {name: value for name, value in task.net.named_parameters() if value.requires_grad}
    gradients = torch.autograd.grad(example.bits_per_byte(task.net, windows), list(adapters.values()))
    expected = task.layout.flatten(dict(zip(adapters, gradients, strict=True)))
    assert expected.count_nonzero() == task.layout.size
    torch.testing.assert_close(task.gradient(vector, windows), expected)


def test_clients_train_on_nothing_that_is_held_out(example):
    texts = example.read_texts(context=200)  # short passages do stand twice in a source
    held_out = {bytes(window.tolist()) for window in texts.held_out}
    assert len(texts.clients) == example.CLIENTS and len(held_out) > 40
    trained_on = [bytes(text.tolist()) for text in texts.clients]
    assert all(window not in text for window in held_out for text in trained_on)


def test_no_defense_is_plain_asynchronous_sgd(example):
    updates = 100 * torch.randn(30, 7, generator=torch.Generator().manual_seed(0))
    server, model = SecureAFL.from_config(torch.ones(7), example.CLIENTS, example.UNDEFENDED), torch.ones(7)
    for step, update in enumerate(updates):
        server.submit(step * step % example.CLIENTS, update, max(0, step - 5))
        model = model - example.LR * update
    torch.testing.assert_close(server.model, model)


@pytest.mark.parametrize(
    "option, value, limits",
    [
        ("--uploads", "0", "1 to 1000000"),
        ("--uploads", "many", "1 to 1000000"),
        ("--malicious", "10", "1 to 9"),
        ("--pretraining", "4", "5 to 1000000"),
        ("--seed", "-1", "0 to 9223372036854775807"),
    ],
)
def test_a_wrong_option_is_refused(example, option, value, limits, capsys):
    with pytest.raises(SystemExit, match="2"):
        example.main([f"{option}={value}"])
    expected = f"error: argument {option}: must be a whole number from {limits}, got '{value}'"
    assert expected in capsys.readouterr().err


def test_texts_that_are_not_there_are_named(example, monkeypatch, tmp_path):
    monkeypatch.setattr(example, "ROOT", tmp_path)
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path))):
        example.read_texts(context=32)
