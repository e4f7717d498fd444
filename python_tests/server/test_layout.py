"""A state dict as a flat vector and back, without any framework."""

import pytest
import torch

from secureafl_ext import Layout, SecureAFL


def module():
    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2, bias=False))
    made[1].num_batches_tracked.fill_(7)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_there_and_back(dtype, device):
    before = module().to(device, dtype).state_dict()
    layout = Layout(before)
    vector = layout.flatten(before, device)
    assert vector.shape == (layout.size,) == (3 * 4 + 4 + 4 * 4 + 2 * 4,)
    assert vector.dtype == layout.dtype == dtype and vector.device.type == device
    floating = [value.flatten() for value in before.values() if value.is_floating_point()]
    assert torch.equal(vector, torch.cat(floating))  # in the order of the state dict
    after = layout.unflatten(vector)
    assert list(after) == list(before)
    for name, value in before.items():
        assert after[name].dtype == value.dtype and torch.equal(after[name].cpu(), value.cpu()), name
    module().to(device, dtype).load_state_dict(after)


def test_flatten_copies_and_unflatten_does_not():
    state = {"w": torch.ones(2, 2), "s": torch.tensor(3.0)}
    layout = Layout(state)
    vector = layout.flatten(state)
    state["w"].zero_()
    assert vector.tolist() == [1, 1, 1, 1, 3]
    views = layout.unflatten(vector)
    vector[4] = 9
    assert views["s"] == 9 and views["s"].shape == ()


def test_gradients_fit_the_layout_of_the_parameters():
    model = torch.nn.Linear(3, 2)
    layout = Layout(dict(model.named_parameters()))
    model(torch.ones(1, 3)).sum().backward()
    gradient = layout.flatten({name: parameter.grad for name, parameter in model.named_parameters()})
    assert gradient.tolist() == [1.0] * 8 and not gradient.requires_grad
    server = SecureAFL(layout.flatten(dict(model.named_parameters())), 1, lr=0.5)
    server.submit(0, gradient, 0)
    model.load_state_dict(layout.unflatten(server.model))


def test_integers_are_carried():
    layout = Layout({"w": torch.zeros(2), "steps": torch.tensor(5), "on": torch.tensor([True])})
    assert layout.size == 2 and set(layout.carried) == {"steps", "on"}
    vector = layout.flatten({"w": torch.ones(2), "steps": torch.tensor(-1)})  # a client's count is not taken
    assert layout.unflatten(vector)["steps"] == 5 and layout.unflatten(vector)["on"].tolist() == [True]


ONE = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Layout([ONE]), "Layout: state must be a dict of tensors, got list"),
        (lambda: Layout({"w": [1.0]}), "Layout: state['w'] must be a tensor, got list"),
        (lambda: Layout({}), "Layout: state must have floating entries, all float32 or all float64, got none"),
        (
            lambda: Layout({"w": ONE, "v": ONE.double()}),
            "Layout: state must have floating entries, all float32 or all float64, got float32, float64",
        ),
        (
            lambda: Layout({"w": ONE.half()}),
            "Layout: state must have floating entries, all float32 or all float64, got float16",
        ),
        (
            lambda: Layout({"w": ONE, "b": ONE}).flatten({"w": ONE}),
            "Layout.flatten: state must have b, got none",
        ),
        (
            lambda: Layout({"w": ONE}).flatten({"w": ONE[:1]}),  # would be broadcast
            "Layout.flatten: w must be a tensor (2, 3) float32, got (1, 3) float32",
        ),
        (
            lambda: Layout({"w": ONE}).flatten({"w": ONE.double()}),
            "Layout.flatten: w must be a tensor (2, 3) float32, got (2, 3) float64",
        ),
        (
            lambda: Layout({"w": ONE}).flatten({"w": None}),
            "Layout.flatten: w must be a tensor (2, 3) float32, got NoneType",
        ),
        (
            lambda: Layout({"w": ONE}).unflatten(torch.zeros(7)),
            "Layout.unflatten: vector must be a tensor (6,) float32, got (7,) float32",
        ),
        (
            lambda: Layout({"w": ONE}).unflatten(torch.zeros(6).double()),
            "Layout.unflatten: vector must be a tensor (6,) float32, got (6,) float64",
        ),
    ],
)
def test_errors_name_the_entry_and_both_shapes(call, words):
    with pytest.raises(ValueError) as refusal:
        call()
    assert str(refusal.value) == words
