"""What tests ask of a server's state as a whole."""

import torch


def identical(ours, theirs):
    """Two servers whose states are equal bit for bit."""
    ours, theirs = ours.state_dict(), theirs.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(torch.as_tensor(ours[name]), torch.as_tensor(value), rtol=0, atol=0, equal_nan=True)


def without_values(mode, *holders):
    """Every tensor that these objects hold becomes a fake one: whoever reads it on the host gets an error."""
    for holder in holders:
        for key, value in vars(holder).items():
            if isinstance(value, torch.Tensor):
                setattr(holder, key, mode.from_tensor(value))
            elif isinstance(value, tuple) and isinstance(value[0], torch.Tensor):
                setattr(holder, key, tuple(mode.from_tensor(one) for one in value))
