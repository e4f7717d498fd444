"""SecureAFL saved and loaded: a resumed run is the uninterrupted one, and a state that does not fit is refused."""

import pytest
import torch
from server_rounds import SETTINGS, World, drive, make

from secureafl_ext import SecureAFL


@pytest.mark.parametrize("name", ["paper", "window", "as printed", "Variant II"])
def test_saved_killed_and_resumed_is_bit_identical(tmp_path, device, name):
    whole, half = make(device, **SETTINGS[name]), make(device, **SETTINGS[name])
    world, slow = World(), None
    drive(whole, 120)
    slow, _ = drive(half, 57, world=world)
    half.save(tmp_path / "server.safetensors")
    del half
    resumed = SecureAFL.load(tmp_path / "server.safetensors", device=device)
    drive(resumed, 63, world=world, slow=slow)
    theirs, ours = whole.state_dict(), resumed.state_dict()
    assert theirs.keys() == ours.keys()
    for key, value in theirs.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(ours[key])), key
    assert resumed.config == whole.config and resumed.stats() == whole.stats()
    assert [path.name for path in tmp_path.iterdir()] == ["server.safetensors"]  # nothing partial is left


def test_a_state_that_does_not_fit_changes_nothing():
    server, other = make(), make(memory=2)
    drive(server, 20)
    before = server.state_dict()
    with pytest.raises(ValueError, match=r"dw must be \(6, 3, 12\) float64, got \(6, 2, 12\) float64"):
        server.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="load_state_dict: state must have"):
        server.load_state_dict({"version": 3})
    assert all(torch.equal(torch.as_tensor(before[k]), torch.as_tensor(v)) for k, v in server.state_dict().items())


def test_other_files_are_not_checkpoints(tmp_path):
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "x")
    with pytest.raises(ValueError, match=r"must be a file that SecureAFL\.save wrote, got a file without its header"):
        SecureAFL.load(tmp_path / "x")
