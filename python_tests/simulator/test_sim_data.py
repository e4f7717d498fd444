"""Data sets: the one that is embedded, where others are looked for, their labels, and what is held out."""

import numpy as np
import pytest
import scenes
import torch
from data_files import pixels, same

from secureafl_ext.sim.federation import Federation
from secureafl_ext.sim.settings import Settings
from secureafl_ext.tasks import datasets, readers

pytestmark = pytest.mark.usefixtures("nowhere")


# The default


def test_the_default_needs_no_file_and_is_balanced():
    small = datasets.load()
    assert small.name == "fashion-mnist-small" and small.classes == 10 and small.shape == (1, 28, 28)
    assert small.train_x.dtype == torch.uint8 and small.train_y.dtype == torch.int64
    assert small.train_y.bincount().tolist() == [400] * 10 and small.test_y.bincount().tolist() == [100] * 10
    assert small.train_y[:20].unique().numel() > 3, "classes are mixed, as in the original files"


def test_the_default_is_small_and_its_licence_lies_beside_it():
    folder = datasets.EMBEDDED.folder
    assert (folder / "fashion_mnist_small.npz").stat().st_size < 3_000_000
    licence = (folder / "fashion_mnist_small.LICENSE").read_text(encoding="utf-8")
    assert "MIT License" in licence and "Zalando SE" in licence


def test_inputs_have_mean_zero_and_deviation_one():
    small = datasets.load()
    x, y = small.train(torch.arange(4000))
    assert x.dtype == torch.float32 and y.dtype == torch.int64
    assert abs(float(x.mean())) < 0.05 and abs(float(x.std()) - 1) < 0.05
    black = small.inputs(torch.zeros(1, 1, 28, 28, dtype=torch.uint8))
    torch.testing.assert_close(black, torch.full((1, 1, 28, 28), -0.2860 / 0.3530))


def test_a_batch_is_made_where_the_data_lies(device):
    small = datasets.load()
    index = torch.tensor([5, 3, 3])
    x, y = small.to(device).train(index.to(device))
    assert x.device.type == y.device.type == device
    torch.testing.assert_close(x.cpu(), small.inputs(small.train_x[[5, 3, 3]]))
    assert y.tolist() == small.train_y[index].tolist()


# Where it is looked for


def fashion(folder, value: int) -> None:
    folder.mkdir(parents=True)
    x, y = np.full((1, 28, 28), value, np.uint8), np.zeros(1, np.uint8)
    np.savez(folder / "fashion_mnist.npz", x_train=x, y_train=y, x_test=x, y_test=y)


def test_order_of_the_places(tmp_path, monkeypatch):
    fashion(tmp_path / "home/.cache/fashion-mnist", 4)
    fashion(tmp_path / "data/fashion-mnist", 3)
    fashion(tmp_path / "variable", 2)
    fashion(tmp_path / "given/fashion-mnist", 1)

    def value(data_dir=None) -> int:
        return int(datasets.load("fashion-mnist", data_dir).train_x[0, 0, 0, 0])

    assert value() == 3 and value(tmp_path / "given") == 1
    monkeypatch.setenv(datasets.VARIABLE, str(tmp_path / "variable"))
    assert value() == 2 and value(tmp_path / "given") == 1
    copies = datasets.found(tmp_path / "given")
    assert copies[0] == datasets.EMBEDDED
    assert [copy.folder.resolve() for copy in copies[1:]] == [
        tmp_path / "given/fashion-mnist",
        tmp_path / "variable",
        tmp_path / "data/fashion-mnist",
        tmp_path / "home/.cache/fashion-mnist",
    ]
    assert {(copy.name, copy.format) for copy in copies[1:]} == {("fashion-mnist", "npz")}


def test_files_lying_in_a_usual_place_are_not_taken_for_a_data_set(tmp_path):
    fashion(tmp_path / "data", 3)
    assert datasets.found() == [datasets.EMBEDDED]
    assert len(datasets.found(tmp_path / "data")) == 2


def test_an_unknown_name_lists_the_choices():
    with pytest.raises(
        ValueError, match="unknown dataset 'mnist'; choose from fashion-mnist, cifar10, cifar100, tiny-ima"
    ):
        datasets.load("mnist")


def test_a_missing_set_lists_the_places_and_what_was_wanted(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        datasets.load("cifar10", tmp_path)
    for words in (
        str(tmp_path),
        "./data",
        "~/.cache",
        "cifar-10-batches-py",
        "cifar-10-python.tar.gz",
        datasets.VARIABLE,
    ):
        assert words in str(error.value)


def test_a_folder_that_was_named_must_exist(tmp_path, monkeypatch):
    with pytest.raises(NotADirectoryError, match="data_dir: no folder"):
        datasets.found(tmp_path / "absent")
    monkeypatch.setenv(datasets.VARIABLE, "absent")
    with pytest.raises(NotADirectoryError, match="SECUREAFL_DATA: no folder 'absent'"):
        datasets.found()


@pytest.mark.parametrize(
    ("labels", "words"), [([0, 10], "labels 0 to 10, expected 0 to 9"), ([1], "train has 2 images and 1 labels")]
)
def test_labels_that_do_not_fit_are_refused(labels, words):
    x = pixels(2, 1, 28, 28)
    with pytest.raises(ValueError, match=words):
        datasets.dataset("fashion-mnist", readers.Arrays(x, np.array(labels), x, np.array([0, 1]), 10))


@pytest.mark.parametrize("kind", ["grey", "regression"])
def test_held_out_data_is_a_quarter_of_the_training_data_and_none_of_the_test(kind, device):
    whole = scenes.dataset(kind, device)
    part = whole.held_out(0.25)
    assert len(part.test_y) == 16 and len(part.train_y) == 48 and part.train_x.device == whole.train_x.device
    both = torch.cat([part.train_x, part.test_x]).flatten(1)
    assert same(both.cpu().sort(0).values, whole.train_x.flatten(1).cpu().sort(0).values)
    where = [int((whole.train_x == x).flatten(1).all(1).nonzero()) for x in part.test_x]
    assert where == sorted(where) and same(whole.train_y[where], part.test_y)
    assert (where == [*range(48, 64)]) == (kind == "regression")  # the last frames, or any
    assert torch.equal(whole.held_out(0.25).test_x, part.test_x)


def test_a_run_with_a_holdout_never_sees_the_test_set():
    settings = Settings(holdout=0.25, device="cpu").resolve()
    mine, whole = Federation(settings).data, datasets.load()
    assert len(mine.train_y) == 3000 and len(mine.test_y) == 1000
    assert not any((whole.test_x == x).flatten(1).all(1).any() for x in mine.test_x[::50])
    with pytest.raises(ValueError, match=r"holdout must be 0 to 0.9, got 1"):
        Settings(holdout=1).resolve()
