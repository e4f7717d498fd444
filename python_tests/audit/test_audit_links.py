"""An audit folder of any content: nothing outside it is changed through its links, and nothing of others is deleted."""

import os

import pytest
import torch
from audits import calls, lines, start
from engines import D
from test_audit_log import UPLOAD, files, filled

from secureafl_ext.audit import log as logs
from secureafl_ext.audit.log import Log

TEXTS = [b"one\ntwo", b"one\n", b""]  # without a final line break it looks like a line that a crash cut


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("count", [0, 20])
def test_a_link_in_place_of_the_last_file_is_refused(tmp_path, text, count):
    victim, folder = tmp_path / "victim", tmp_path / "log"
    victim.write_bytes(text)
    folder.mkdir()
    if count:
        filled(folder, count)
    path = folder / logs.name_of(len(files(folder)))
    path.symlink_to(victim)
    before = {file: file.read_bytes() for file in files(folder)}
    with pytest.raises(ValueError, match=rf"{path.name}: expected a file of the audit log, got a symbolic link"):
        start(folder)
    assert victim.read_bytes() == text and before == {file: file.read_bytes() for file in files(folder)}


def test_a_link_that_appears_as_the_next_file_is_not_written_through(tmp_path):
    victim, folder = tmp_path / "victim", tmp_path / "log"
    log = Log(folder, 1_024, sync=False)
    (folder / logs.name_of(1)).symlink_to(victim)
    with pytest.raises(FileExistsError):
        for version in range(9):
            log.append("accepted", **{**UPLOAD, "version": version, "factor": 1.0})
    log.close()
    assert not victim.exists()


@pytest.mark.parametrize("there", [False, True])
def test_a_linked_lock_is_refused(tmp_path, there):
    victim, folder = tmp_path / "victim", tmp_path / "log"
    folder.mkdir()
    (folder / "lock").symlink_to(victim)
    if there:
        victim.write_text("mine")
    with pytest.raises(ValueError, match="lock: expected a file of the audit log, got a symbolic link"):
        start(folder)
    assert not files(folder) and victim.exists() == there


@pytest.mark.parametrize("kind", ["symbolic", "hard", "pipe"])
def test_an_update_takes_the_place_of_a_link_or_a_pipe(tmp_path, kind):
    victim, folder = tmp_path / "victim", tmp_path / "log"
    victim.write_text("mine")
    path = folder / "updates" / "000000000003.bin"
    path.parent.mkdir(parents=True)
    {"symbolic": path.symlink_to, "hard": path.hardlink_to, "pipe": lambda _: os.mkfifo(path)}[kind](victim)
    with start(folder, keep="all") as server:
        server.submit(0, torch.ones(D), 0)
    assert lines(folder)[-1].seq == 3
    assert victim.read_text() == "mine" and path.read_bytes() == torch.ones(D).numpy().tobytes()
    assert not path.is_symlink() and path.stat().st_nlink == 1


@pytest.mark.parametrize("keep", ["nothing", "recent", "all"])
def test_a_linked_folder_of_updates_is_refused(tmp_path, keep):
    others, folder = tmp_path / "others", tmp_path / "log"
    for path in (others, folder):
        path.mkdir()
    (folder / "updates").symlink_to(others)
    with pytest.raises(ValueError, match="updates: expected a folder of the audit log, got a symbolic link"):
        start(folder, keep=keep)
    assert not list(others.iterdir()) and [path.name for path in folder.iterdir()] == ["updates"]


def test_a_folder_of_updates_that_becomes_a_link_is_refused(tmp_path):
    others, folder = tmp_path / "others", tmp_path / "log"
    others.mkdir()
    (others / "000000000001.bin").write_text("mine")
    with start(folder) as server:
        (folder / "updates").symlink_to(others)
        for wrong in (lambda: server.submit(0, torch.ones(D), 0), lambda: server.save(tmp_path / "checkpoint")):
            with pytest.raises(ValueError, match="expected a folder of the audit log, got a symbolic link"):
                wrong()
    assert [path.read_text() for path in others.iterdir()] == ["mine"]


def test_only_updates_of_the_log_are_deleted(tmp_path):
    names = [
        "1.jpg",
        "2.txt",
        "1.bin",
        "00000000001.bin",
        "000000000001.bin.old",
        "\u0660" * 11 + "\u0661.bin",
        "000000000001.BIN",
    ]
    with start(tmp_path) as server:
        calls(server, 0, 5)
        for name in names:
            (tmp_path / "updates" / name).write_text("mine")
        server.save(tmp_path / "checkpoint")
    assert sorted(path.name for path in (tmp_path / "updates").iterdir()) == sorted(names)
