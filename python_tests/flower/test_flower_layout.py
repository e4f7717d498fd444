"""A state dict to a flat vector, to Flower's arrays, and back."""

import io

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from flwr.app import Array, ArrayRecord

from secureafl_ext.flower import GarbageError, Layout
from secureafl_ext.flower.layout import view


def state():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2, bias=False))
    module[1].num_batches_tracked.fill_(7)
    return module.state_dict()


def test_there_and_back_in_the_order_of_the_state_dict():
    before = state()
    layout = Layout(before)
    vector = layout.flatten(before)
    assert vector.shape == (layout.size,) == (3 * 4 + 4 + 4 * 4 + 2 * 4,) and vector.dtype == torch.float32
    after = layout.unflatten(vector)
    assert list(after) == list(before)
    for name, value in before.items():
        assert after[name].dtype == value.dtype and torch.equal(after[name], value), name
    vector[0] = 42.0  # views, not copies
    assert after["0.weight"][0, 0] == 42.0


def test_whole_numbers_are_carried_and_clients_cannot_set_them():
    before = state()
    layout = Layout(before)
    record = layout.write(layout.flatten(before))
    assert list(layout.carried) == ["1.num_batches_tracked"]
    assert record["1.num_batches_tracked"].numpy() == 7
    record["1.num_batches_tracked"] = Array(np.array(-1))
    assert torch.equal(layout.read(record), layout.flatten(before))
    assert layout.unflatten(layout.flatten(before))["1.num_batches_tracked"] == 7


def test_flower_itself_reads_what_is_written():
    before = state()
    layout = Layout(before)
    after = layout.write(layout.flatten(before)).to_torch_state_dict()
    for name, value in before.items():
        assert torch.equal(after[name], value), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_a_client_writes_with_flower_is_read(dtype):
    before = {name: value.to(dtype) if value.is_floating_point() else value for name, value in state().items()}
    layout = Layout(before)
    vector = layout.read(ArrayRecord(before))
    assert vector.dtype == dtype and torch.equal(vector, layout.flatten(before))


def test_arrays_are_viewed_where_they_are():
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    for array in (Array(values), Array(np.asfortranarray(values))):
        seen = view(array)
        assert np.array_equal(seen, values) and not seen.flags.writeable
        start = np.frombuffer(array.data, np.uint8).__array_interface__["data"][0]
        assert start < seen.__array_interface__["data"][0] < start + len(array.data)


def npy(values, version):
    file = io.BytesIO()
    np.lib.format.write_array(file, values, version=version)
    return file.getvalue()


GOOD = np.zeros((2, 3), np.float32)
GARBAGE = {
    "another shape": (Array(np.zeros((3, 2), np.float32)), r"w must be \(2, 3\) float32, got \(3, 2\) float32"),
    "another dtype": (Array(np.zeros((2, 3))), r"w must be \(2, 3\) float32, got \(2, 3\) float64"),
    "cut short": (Array("float32", (2, 3), "numpy.ndarray", Array(GOOD).data[:-1]), "w cannot be read"),
    "no bytes": (Array("float32", (2, 3), "numpy.ndarray", b""), "w cannot be read"),
    "no header": (Array("float32", (2, 3), "numpy.ndarray", GOOD.tobytes()), "w cannot be read"),
    "a header that is no dict": (
        Array("float32", (2, 3), "numpy.ndarray", Array(GOOD).data.replace(b"{'descr'", b"(((('des")),
        "w cannot be read",
    ),
    "another format": (Array("float32", (2, 3), "pickle", Array(GOOD).data), "serialized as 'pickle'"),
    "a new version": (Array("float32", (2, 3), "numpy.ndarray", npy(GOOD, (3, 0))), r"NumPy format \(3, 0\)"),
    "objects": (
        Array("object", (2, 3), "numpy.ndarray", Array(GOOD).data.replace(b"'<f4'", b"'|O8'")),
        "holds Python objects",
    ),
    "a lie about the shape": (
        Array("float32", (2, 3), "numpy.ndarray", Array(np.zeros((9, 9), np.float32)).data),
        r"got \(9, 9\)",
    ),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_refused_in_words(name):
    array, words = GARBAGE[name]
    layout = Layout({"w": torch.zeros(2, 3)})
    with pytest.raises(GarbageError, match=words):
        layout.read(ArrayRecord({"w": array}))


def test_an_old_header_is_read():
    layout = Layout({"w": torch.zeros(2, 3)})
    array = Array("float32", (2, 3), "numpy.ndarray", npy(GOOD + 5, (2, 0)))
    assert torch.equal(layout.read(ArrayRecord({"w": array})), torch.full((6,), 5.0))


def test_missing_and_unknown_entries_are_refused():
    layout = Layout({"w": torch.zeros(2, 3), "b": torch.zeros(2)})
    with pytest.raises(GarbageError, match="missing: b; unknown: 1"):
        layout.read(ArrayRecord({"w": Array(GOOD), "c": Array(GOOD)}))


@pytest.mark.parametrize(
    ("values", "got"),
    [
        ({"w": torch.zeros(2, dtype=torch.float16)}, "float16"),
        ({"w": torch.zeros(2), "v": torch.zeros(2, dtype=torch.float64)}, "float32, float64"),
        ({"w": torch.zeros(2, dtype=torch.complex64)}, "complex64"),
        ({"n": torch.zeros(2, dtype=torch.int64)}, "none"),
    ],
)
def test_a_state_dict_without_one_float_dtype_is_refused(values, got):
    with pytest.raises(ValueError, match=f"Layout: state must have .* all float32 or all float64, got {got}$"):
        Layout(values)
