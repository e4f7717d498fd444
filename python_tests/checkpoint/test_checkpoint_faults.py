"""Saves that are killed, meet each other or fail: the last checkpoint is whole, and nothing is left behind."""

import errno
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading

import pytest
from engines import make, run
from places import HERE
from states import identical

from secureafl_ext import SecureAFL
from secureafl_ext.checkpoint import tensor_file

KILLS = int(os.environ.get("SECUREAFL_KILLS", "12"))  # 200 for a long run


@pytest.fixture
def path(tmp_path):
    return tmp_path / "server.safetensors"


@pytest.fixture
def server():
    made = make("fused")
    run(made, 20)
    return made


def script(*arguments):
    """A Python process of its own, with the tests' folder to import from."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)]), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, *arguments], env=environment, stdout=subprocess.PIPE, text=True)


def test_killed_at_any_moment_and_resumed_is_bit_identical(tmp_path):
    seed = int(os.environ.get("SECUREAFL_SEED", "1"))
    process = script(str(HERE / "killed_runs.py"), str(tmp_path), str(KILLS), str(seed))
    said, _ = process.communicate()
    assert process.returncode == 0
    found = json.loads(said)
    print(found)
    assert found["kills"] == KILLS and found["runs"] > 0
    assert found["other ends"] == found["files left"] == []


class SlowFirst:
    """The first save stands still amid its file until `through` is set."""

    def __init__(self, monkeypatch):
        self.standing, self.through, self.errors = threading.Event(), threading.Event(), []
        self._plain = tensor_file.dump
        monkeypatch.setattr(tensor_file, "dump", self._dump)

    def _dump(self, file, *arguments):
        self._plain(file, *arguments)
        if not self.standing.is_set():
            self.standing.set()
            assert self.through.wait(60)

    def save(self, server, path):
        thread = threading.Thread(target=self._save, args=(server, path))
        thread.start()
        assert self.standing.wait(60)
        return thread

    def _save(self, server, path):
        try:
            server.save(path)
        except Exception as error:
            self.errors.append(error)


def test_two_saves_at_once_do_not_take_each_others_file(server, path, monkeypatch):
    """Of two servers in the same state: one waits for itself."""
    other, slow = make("fused"), SlowFirst(monkeypatch)
    other.load_state_dict(server.state_dict())
    first = slow.save(server, path)
    other.save(path)
    assert len(list(path.parent.iterdir())) == 2  # a live writer's partial file is still there
    slow.through.set()
    first.join()
    assert not slow.errors and list(path.parent.iterdir()) == [path]
    identical(SecureAFL.load(path), server)


def test_a_slow_save_does_not_replace_the_newer_file_of_the_next_one(server, path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "secureafl_ext.server")
    slow = SlowFirst(monkeypatch)
    first = slow.save(server, path)
    run(server, 5)  # rounds do not wait for the disk
    second = slow.save(server, path)
    second.join(0.5)
    run(server, 5)
    slow.through.set()
    first.join(), second.join()
    assert not slow.errors and list(path.parent.iterdir()) == [path]
    found = SecureAFL.load(path).version
    assert found >= 25
    written = [record.getMessage() for record in caplog.records if "written" in record.getMessage()]
    assert written == [f"checkpoint {path} written at version {version}" for version in (20, found)]


def test_four_threads_save_to_one_path(server, path):
    errors = []

    def save():
        try:
            for _ in range(10):
                server.save(path)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=save) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and list(path.parent.iterdir()) == [path]
    identical(SecureAFL.load(path), server)


STANDS_STILL = """
import sys, time
from engines import make
from secureafl_ext.checkpoint import tensor_file

def dump(file, *arguments):
    file.write(b"half a check")
    file.flush()
    print("writing", flush=True)
    time.sleep(600)

tensor_file.dump = dump
make("fused").save(sys.argv[1])
"""


def partials(path):
    return sorted(file.name for file in path.parent.iterdir() if file.name.endswith(".partial"))


def test_what_a_killed_process_left_is_removed_and_what_a_live_one_writes_is_not(server, path):
    writer = script("-c", STANDS_STILL, str(path))
    try:
        assert writer.stdout.readline() == "writing\n"
        (left,) = partials(path)
        server.save(path)
        assert partials(path) == [left]  # its writer lives
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
    assert partials(path) == [left]
    other = path.with_name("other.safetensors")
    server.save(other)
    assert partials(path) == [left]  # of another path
    server.save(path)
    assert partials(path) == []
    identical(SecureAFL.load(path), server)


def test_what_older_versions_left_is_removed_once_their_process_is_gone(server, path):
    """They named the process and held no lock."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for process in (gone.pid, os.getpid(), 10**30):
        path.with_name(f".{path.name}.{process}.partial").touch()
        path.with_name(f".{path.name}.0123456789abc.1-of-2.{process}.partial").touch()
    path.with_name(f".{path.name}.notes.partial").touch()
    server.save(path)
    alive = [f".{path.name}.0123456789abc.1-of-2.{os.getpid()}.partial", f".{path.name}.{os.getpid()}.partial"]
    assert partials(path) == sorted([*alive, f".{path.name}.notes.partial"])


@pytest.mark.parametrize(
    ("call", "number"),
    [("open", errno.EROFS), ("fsync", errno.ENOSPC), ("fsync", errno.EIO), ("replace", errno.EACCES)],
)
def test_a_save_that_fails_says_why_and_the_last_one_is_whole(server, path, monkeypatch, call, number):
    server.save(path)
    before = path.read_bytes()
    run(server, 5)
    plain = getattr(os, call)

    def fails(*arguments, **options):
        if call == "open" and ".partial" not in str(arguments[0]):
            return plain(*arguments, **options)
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        with pytest.raises(OSError, match=rf"SecureAFL\.save: .* could not be written: {os.strerror(number)}") as error:
            server.save(path)
    assert error.value.errno == number
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]
    server.save(path)
    identical(SecureAFL.load(path), server)


def test_a_full_disk_leaves_the_last_checkpoint_whole(server, path):
    server.save(path)
    before = path.read_bytes()
    run(server, 5)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in (0, 10, len(before) // 2, len(before) - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))  # files can have no more bytes than this
        try:
            with pytest.raises(OSError, match=r"SecureAFL\.save: .* could not be written: File too large"):
                server.save(path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]
    server.save(path)
    identical(SecureAFL.load(path), server)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_an_error_in_words(server, path):
    server.save(path)
    before = path.read_bytes()
    path.parent.chmod(0o555)
    try:
        with pytest.raises(PermissionError, match=r"SecureAFL\.save: .* could not be written: Permission denied"):
            server.save(path)
        assert path.read_bytes() == before
    finally:
        path.parent.chmod(0o755)


def test_no_folder_or_one_in_the_files_place_is_an_error_in_words(server, path):
    for wrong in (path.parent / "none" / "file", path.parent):
        with pytest.raises(OSError, match=r"SecureAFL\.save: .* could not be written: "):
            server.save(wrong)
    assert not list(path.parent.iterdir())


def during_the_first_read(monkeypatch, act):
    plain, done = tensor_file.Reader._fill, []

    def fill(self, piece):
        if not done:
            done.append(True)
            act()
        plain(self, piece)

    monkeypatch.setattr(tensor_file.Reader, "_fill", fill)


def test_a_file_that_is_replaced_while_it_is_read_loads_as_it_was(server, path, monkeypatch):
    server.save(path)
    before = SecureAFL.load(path)
    run(server, 5)
    during_the_first_read(monkeypatch, lambda: server.save(path))
    identical(SecureAFL.load(path), before)
    identical(SecureAFL.load(path), server)


@pytest.mark.parametrize("change", ["cut short", "emptied", "overwritten"])
def test_a_file_that_is_changed_while_it_is_read_is_refused(server, path, monkeypatch, change):
    server.save(path)
    data = path.read_bytes()
    other = {"cut short": data[: len(data) // 2], "emptied": b"", "overwritten": data[:-100] + bytes(100)}[change]
    assert other != data
    during_the_first_read(monkeypatch, lambda: path.write_bytes(other))
    with pytest.raises(ValueError, match="was changed or damaged"):
        SecureAFL.load(path)
