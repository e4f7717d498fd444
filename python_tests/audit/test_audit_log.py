"""The audit log: any change of its files is found, half a line is mended, and no text can break a line."""

import json
import math
import os
import shutil

import pytest

from secureafl_ext.audit import line as lines
from secureafl_ext.audit import log as logs
from secureafl_ext.audit import verify
from secureafl_ext.audit.line import Line
from secureafl_ext.audit.log import Log

UPLOAD = {
    "client": 1,
    "who": "77",
    "version": 3,
    "trained_on": 2,
    "update": "a" * 64,
    "dtype": "float32",
    "shape": (4,),
}


def filled(folder, count=20, rotate=2_000):
    """A log of several files; its head."""
    log = Log(folder, rotate, sync=False)
    for k in range(count):
        log.append("accepted", **{**UPLOAD, "version": k, "factor": k / 3})
    log.close()
    return log.head.hash


def files(folder):
    return sorted(folder.glob("audit-*.jsonl"))


def edit(number, change):
    """A file after `change` of its list of lines."""

    def tamper(folder):
        path = files(folder)[number]
        path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))

    return tamper


def swap_files(folder):
    one, two = files(folder)[1:3]
    one.rename(folder / "aside")
    two.rename(one)
    (folder / "aside").rename(two)


def forged(raw):
    """A line with another value, and the hash that goes with it."""
    line, before, _ = lines.read(raw)
    return lines.write(Line(**{**{name: getattr(line, name) for name in line.__slots__}, "client": 5}), before)[0]


TAMPERED = {
    "a changed value": (edit(1, lambda a: [*a[:2], a[2].replace(b'"77"', b'"78"'), *a[3:]]), "line 3: .*was changed"),
    "a changed value in the last line": (edit(-1, lambda a: [*a[:-1], a[-1].replace(b'"77"', b'"78"')]), "was changed"),
    "a changed value and its hash": (edit(1, lambda a: [*a[:2], forged(a[2]), *a[3:]]), "line 4: the hash before it"),
    "a removed line": (edit(1, lambda a: [*a[:2], *a[3:]]), "line 3: the hash before it must be"),
    "swapped lines": (edit(1, lambda a: [*a[:1], a[2], a[1], *a[3:]]), "line 2: the hash before it must be"),
    "an inserted line": (edit(1, lambda a: [*a[:2], a[1], *a[2:]]), "line 3: the hash before it must be"),
    "an empty line": (edit(1, lambda a: [*a[:2], b"\n", *a[2:]]), "line 3: a line must be JSON"),
    "a removed first line": (edit(1, lambda a: a[1:]), "line 1: "),
    "half a line amid the log": (edit(0, lambda a: [*a[:-1], a[-1][:-20]]), "half a line"),
    "a cut tail of an earlier file": (edit(1, lambda a: a[:-1]), "000002.jsonl, line 1: the hash before it"),
    "an emptied file": (edit(1, lambda a: []), "000002.jsonl, line 1: the hash before it"),
    "a removed file": (lambda folder: files(folder)[1].unlink(), r"audit-000001.jsonl: expected a file"),
    "the first file removed": (lambda folder: files(folder)[0].unlink(), r"audit-000000.jsonl: expected a file"),
    "another file order": (swap_files, "audit-000001.jsonl, line 1: "),
    "a file twice": (lambda f: shutil.copy(files(f)[-1], f / logs.name_of(len(files(f)))), "line 1: the hash"),
    "a line without end": (edit(1, lambda a: [*a, b"x" * 2**17 + b"\n"]), "at most 65536 bytes"),
    "a last line without end": (edit(-1, lambda a: [*a, b"x" * 2**17]), "at most 65536 bytes"),
    "all files removed": (lambda folder: [path.unlink() for path in files(folder)], "expected files of an audit log"),
}  # fmt: skip


@pytest.mark.parametrize("name", TAMPERED)
def test_tampering_is_found_with_file_and_line(tmp_path, name):
    filled(tmp_path)
    assert len(files(tmp_path)) >= 4 and verify(tmp_path).lines > 20
    tamper, words = TAMPERED[name]
    tamper(tmp_path)
    with pytest.raises(ValueError, match=words):
        verify(tmp_path)


def test_a_cut_tail_is_found_by_the_head_that_was_noted(tmp_path):
    head = filled(tmp_path)
    assert verify(tmp_path, head).head == head
    edit(-1, lambda all_lines: all_lines[:-1])(tmp_path)
    assert verify(tmp_path).head != head  # the chain alone cannot tell
    with pytest.raises(ValueError, match=f"no line has the expected hash '{head}'"):
        verify(tmp_path, head)
    Log(tmp_path, 2_000, sync=False).close()
    with pytest.raises(ValueError, match="no line has the expected hash"):  # nor does a log that went on know it
        verify(tmp_path, head)


def test_a_log_written_anew_is_found_by_the_head_that_was_noted(tmp_path):
    head, forgery = filled(tmp_path / "one"), filled(tmp_path / "two", count=11)
    assert verify(tmp_path / "two", forgery)
    with pytest.raises(ValueError, match="no line has the expected hash"):
        verify(tmp_path / "two", head)


@pytest.mark.parametrize("cut", [1, 2, 40, 200])
def test_half_a_line_is_cut_off_and_noted(tmp_path, cut):
    filled(tmp_path)
    path = files(tmp_path)[-1]
    whole = path.read_bytes()
    *kept, last = whole.splitlines(keepends=True)
    path.write_bytes(whole[:-cut])
    half = verify(tmp_path)
    assert half.half == len(last) - cut and half.kinds["mended"] == 0
    log = Log(tmp_path, 10_000, sync=False)
    log.append("accepted", factor=math.nan, **UPLOAD)
    log.close()
    found = verify(tmp_path, log.head.hash)
    assert found.half == 0 and found.kinds["mended"] == 1 and found.kinds["accepted"] == 20
    assert path.read_bytes().startswith(b"".join(kept))
    assert [line.count for line in logs.read(tmp_path) if line.kind == "mended"] == [len(last) - cut]


@pytest.mark.parametrize("left", [0, 30])
@pytest.mark.parametrize("count", [0, 12])
def test_a_crash_before_the_first_line_of_a_file_is_mended(tmp_path, left, count):
    head = filled(tmp_path, count) if count else None
    number = len(files(tmp_path))
    (tmp_path / logs.name_of(number)).write_bytes(b'{"seq":1,"at":1700000000.0,"kind'[:left])
    log = Log(tmp_path, 2_000, sync=True)
    log.append("accepted", factor=1.0, **UPLOAD)
    log.close()
    found = verify(tmp_path, head)
    assert found.files == number + 1 and found.kinds["mended"] == bool(left) and found.kinds["accepted"] == count + 1


@pytest.mark.parametrize("name", ["a changed value in the last line", "a removed file", "a last line without end"])
def test_a_damaged_log_is_not_continued(tmp_path, name):
    filled(tmp_path)
    tamper, words = TAMPERED[name]
    tamper(tmp_path)
    before = {path.name: path.read_bytes() for path in files(tmp_path)}
    with pytest.raises(ValueError, match=words):
        Log(tmp_path, 2_000, sync=False)
    assert before == {path.name: path.read_bytes() for path in files(tmp_path)}


def test_a_half_line_before_an_empty_last_file_is_not_mended(tmp_path):
    filled(tmp_path)
    (tmp_path / logs.name_of(len(files(tmp_path)))).touch()
    edit(-2, lambda a: [*a[:-1], a[-1][:-20]])(tmp_path)
    before = {path.name: path.read_bytes() for path in files(tmp_path)}
    with pytest.raises(ValueError, match="half a line"):
        Log(tmp_path, 2_000, sync=False)
    assert before == {path.name: path.read_bytes() for path in files(tmp_path)}


def test_a_pipe_in_place_of_a_file_is_refused(tmp_path):
    filled(tmp_path)
    os.mkfifo(tmp_path / logs.name_of(len(files(tmp_path))))
    for wrong in (lambda: verify(tmp_path), lambda: Log(tmp_path, 2_000, sync=False)):
        with pytest.raises(ValueError, match="expected a file, got a folder, a pipe or a device"):
            wrong()


def test_what_nobody_could_read_is_not_written(tmp_path):
    log = Log(tmp_path, 10**6, sync=False)
    with pytest.raises(ValueError, match="client must be a whole number, 0 or more, got -1"):
        log.append("leave", client=-1, who="", version=0)
    log.close()
    assert verify(tmp_path, log.head.hash).lines == 1


def test_files_are_rotated_and_begin_with_the_hash_before(tmp_path):
    filled(tmp_path, 30, rotate=1_500)
    sizes = [path.stat().st_size for path in files(tmp_path)]
    assert len(sizes) > 5 and all(1_500 <= size < 2_100 for size in sizes[:-1])
    before = lines.FIRST
    for number, path in enumerate(files(tmp_path)):
        first, *_, last = map(json.loads, path.read_text().splitlines())
        assert (first["kind"], first["count"], first["before"]) == ("file", number, before)
        before = last["hash"]
    again = Log(tmp_path, 1_500, sync=False)
    again.append("accepted", factor=1.0, **UPLOAD)
    again.close()
    assert verify(tmp_path).kinds["accepted"] == 31


HOSTILE = [
    '"}\n{"seq":1',
    "\x1b[2J\x1b[31m",
    "\r\n\x00\x7f\x9b",
    "\u2028\u2029\u202e",
    "\ud800",
    "x" * 10_000,
    "é" * 500,
]


@pytest.mark.parametrize("who", HOSTILE)
def test_no_name_breaks_a_line_or_a_terminal(tmp_path, who):
    log = Log(tmp_path, 10**6, sync=False)
    log.append("joined", client=0, who=lines.one_line(who), version=0)
    log.close()
    text = files(tmp_path)[0].read_bytes()
    assert len(text.splitlines()) == 2 and set(text) <= {10, *range(32, 127)} and len(text) < 2_000
    (joined,) = [line for line in logs.read(tmp_path) if line.kind == "joined"]
    assert joined.who == lines.one_line(who) and joined.who.isprintable() and len(joined.who) <= 100


@pytest.mark.parametrize("factor", [0.1 + 0.2, -0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan])
def test_numbers_keep_all_their_bits(factor):
    raw, hash_ = lines.write(Line(1, 2.5, "accepted", factor=factor, weight=factor, **UPLOAD), lines.FIRST)
    line, before, own = lines.read(raw)
    assert (repr(line.factor), repr(line.weight), before, own) == (repr(factor), repr(factor), lines.FIRST, hash_)


WRONG = {
    "client": [-1, 1.0, True, "1", None, 2**60],
    "factor": ["high", None, [1.0]],
    "at": ["now", None],
    "update": ["a" * 63, "A" * 64, 7],
    "shape": [[], [1, 2], [-1], 4],
    "dtype": ["object", ["float32"]],
    "who": [7, "x" * 101],
    "kind": ["hacked", None, ["accepted"]],
    "gift": [1],
}


@pytest.mark.parametrize("name, value", [(name, value) for name, values in WRONG.items() for value in values])
def test_a_forged_line_with_impossible_values_is_refused(name, value):
    raw, _ = lines.write(Line(1, 2.5, "accepted", factor=1.0, **UPLOAD), lines.FIRST)
    about = {**json.loads(raw), name: value}
    del about["hash"]
    body = json.dumps(about)
    hash_ = lines._hash(lines.FIRST, body.encode())
    with pytest.raises(ValueError, match=rf"{name} must be|must have .*, got .*{name}|must be JSON"):
        lines.read(f'{body[:-1]},"hash":"{hash_}"}}\n'.encode())


def test_one_process_at_a_time(tmp_path):
    log = Log(tmp_path, 10**6, sync=False)
    with pytest.raises(ValueError, match="in use by another process or object"):
        Log(tmp_path, 10**6, sync=False)
    log.close()
    with pytest.raises(ValueError, match="the audit log is closed"):
        log.append("joined", client=0, who="", version=0)
    Log(tmp_path, 10**6, sync=False).close()


def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch):
    log, write = Log(tmp_path, 10**6, sync=False), os.write

    def full(file, data):
        if len(data) > 100:
            return write(file, data[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        log.append("accepted", factor=1.0, **UPLOAD)
    monkeypatch.setattr(os, "write", write)
    assert verify(tmp_path).lines == 1 and verify(tmp_path).half == 0
    log.append("accepted", factor=1.0, **UPLOAD)
    log.close()
    assert verify(tmp_path, log.head.hash).lines == 2


def test_a_file_that_somebody_else_wrote_to_is_not_continued(tmp_path):
    log = Log(tmp_path, 10**6, sync=False)
    with open(files(tmp_path)[0], "ab") as file:
        file.write(b"x")
    with pytest.raises(OSError, match=r"expected \d+ bytes, got \d+; open it anew"):
        log.append("joined", client=0, who="", version=0)
    log.close()
