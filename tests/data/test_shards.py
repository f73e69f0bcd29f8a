"""Shards hold what was put in, all or nothing, and no broken file passes for one."""

import errno
import os
import resource
import signal
import stat
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.shards import (
    HEADER_BYTES, READERS, DataError, ShardError, ShardWriter, locked, number_between, one_line, one_line_errors, read_json,
    read_shard, shard_name, verify_shard, whole_file, write_shard,
)


def header(*numbers: int) -> bytes:
    return np.array([*numbers, *[0] * (256 - len(numbers))], dtype="<i4").tobytes()


def test_layout_of_a_shard_byte_by_byte(tmp_path: Path) -> None:
    assert write_shard(tmp_path / "s.bin", [50256, 1, 258]) == 3
    expected = bytes.fromhex("88d83401 01000000 03000000") + bytes(HEADER_BYTES - 12) + bytes.fromhex("50c4 0100 0201")
    assert (tmp_path / "s.bin").read_bytes() == expected


@settings(deadline=None, max_examples=40)  # every write waits for the disk, and a busy machine is no failure
@given(tokens=st.lists(st.integers(0, 65535), min_size=1, max_size=300))
def test_reading_gives_what_was_written(tmp_path_factory: pytest.TempPathFactory, tokens: list[int]) -> None:
    path = tmp_path_factory.getbasetemp() / "round_trip.bin"
    for form in (tokens, iter(tokens), np.array(tokens, dtype=np.int64), np.array(tokens, dtype=">u2")):
        assert write_shard(path, form) == len(tokens) == verify_shard(path)
        assert read_shard(path).tolist() == read_shard(str(path), max(tokens) + 1).tolist() == tokens
        with pytest.raises(ShardError, match=rf"{path}: holds token {max(tokens)}, .* ends at {max(tokens)}: .*--vocab_size"):
            read_shard(path, max(tokens))


BROKEN = {
    "empty": (b"", "is empty (0 bytes)"),
    "short header": (header(20240520, 1, 5)[:500], "has 500 bytes, fewer than the 1,024 of a header"),
    "text": (b"<html>" * 400, "magic number 1836345404, not 20240520"),
    "version": (header(20240520, 2, 1) + b"ab", "version 2; only version 1"),
    "no tokens": (header(20240520, 1, 0), "its header names 0 tokens"),
    "negative": (header(20240520, 1, -4), "its header names -4 tokens"),
    "too few": (header(20240520, 1, 5) + bytes(8), "5 tokens, which makes 1,034 bytes, but it has 1,032 (2 too few)"),
    "too many": (header(20240520, 1, 5) + bytes(14), "but it has 1,038 (4 too many)"),
    "odd": (header(20240520, 1, 5) + bytes(9), "but it has 1,033 (1 too few)"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_refused_with_its_name_and_numbers(tmp_path: Path, kind: str) -> None:
    content, message = BROKEN[kind]
    path = tmp_path / "broken.bin"
    path.write_bytes(content)
    for reader in (verify_shard, read_shard):
        with pytest.raises(ShardError) as caught:
            reader(path)
        assert str(path) in str(caught.value) and message in str(caught.value)
        assert str(caught.value).endswith("; make or fetch it again")


@pytest.mark.parametrize("reader", [verify_shard, read_shard])
def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path, reader) -> None:
    for path, message in ((tmp_path / "none.bin", "no such file"), (tmp_path, "is not a file")):
        with pytest.raises(ShardError, match=f"{path}: {message}; make or fetch it"):
            reader(path)


def test_a_shard_that_cannot_be_opened_is_named_and_not_taken_for_a_broken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer reports it; the tools, which make broken shards again, must not touch it."""
    write_shard(tmp_path / "s.bin", [1, 2, 3])

    def no_access(path: Path, _: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("builtins.open", no_access)
    with pytest.raises(ShardError, match="s.bin: cannot be read: Permission denied: check the file"):
        read_shard(tmp_path / "s.bin")
    with pytest.raises(PermissionError):
        verify_shard(tmp_path / "s.bin")


def test_tokens_that_were_read_do_not_change_with_the_file(tmp_path: Path) -> None:
    write_shard(tmp_path / "s.bin", range(5000))
    tokens = read_shard(tmp_path / "s.bin")
    with open(tmp_path / "s.bin", "r+b") as file:
        file.seek(HEADER_BYTES)
        file.write(bytes(100))
    assert tokens.tolist() == list(range(5000))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [([1, 65536], "65536 does not fit"), ([-1], "-1 does not fit"), ([0.5], "float64"), ([[1]], "flat"), ([], "not 0")],
)
def test_what_is_no_token_is_refused_and_nothing_written(tmp_path: Path, tokens: list, message: str) -> None:
    with pytest.raises(ShardError, match=message):
        write_shard(tmp_path / "s.bin", tokens)
    assert not list(tmp_path.iterdir())


# ----------------------------------------------------------------------------------------------------------------------
# Files that are whole at any moment


class Disk:
    """What os.fsync and os.replace did, in order; call number `fail_at` of them raises `error` instead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.fail_at, self.error = -1, OSError(errno.ENOSPC, "No space left on device")
        fsync, replace = os.fsync, os.replace

        def sync(descriptor: int) -> None:
            self.note("sync folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "sync file")
            fsync(descriptor)

        def rename(source: Path, target: Path) -> None:
            self.note("rename")
            replace(source, target)

        monkeypatch.setattr("data.shards.os.fsync", sync)
        monkeypatch.setattr("data.shards.os.replace", rename)

    def note(self, call: str) -> None:
        self.calls.append(call)
        if len(self.calls) - 1 == self.fail_at:
            raise self.error


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_file_is_on_disk_before_it_takes_its_name_and_the_name_after(tmp_path: Path, disk: Disk) -> None:
    (tmp_path / "f").write_bytes(b"old")
    with whole_file(tmp_path / "f") as file:
        file.write(b"new")
        file.flush()
        assert (tmp_path / "f").read_bytes() == b"old" and disk.calls == []
    assert disk.calls == ["sync file", "rename", "sync folder"]
    assert content_of(tmp_path) == {"f": b"new"}


@pytest.mark.parametrize("old", [{}, {"f": b"old"}])
@pytest.mark.parametrize("error", [OSError, ValueError, KeyboardInterrupt])
def test_a_writer_that_raises_leaves_the_old_file_and_no_other(tmp_path: Path, old: dict[str, bytes], error) -> None:
    for name, content in old.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error), whole_file(tmp_path / "f") as file:
        file.write(b"half of it" * 10_000)
        raise error
    assert content_of(tmp_path) == old


@pytest.mark.parametrize("fail_at, left", enumerate((b"old", b"old", b"new")))
def test_a_disk_that_fails_leaves_the_old_file_or_the_new_and_no_other(
    tmp_path: Path, disk: Disk, fail_at: int, left: bytes
) -> None:
    (tmp_path / "f").write_bytes(b"old")
    disk.fail_at = fail_at
    with pytest.raises(OSError, match="No space"), whole_file(tmp_path / "f") as file:
        file.write(b"new")
    assert content_of(tmp_path) == {"f": left}


def test_a_disk_that_is_read_only_names_the_users_file(tmp_path: Path, monkeypatch) -> None:
    """Not the one that is written first, which unlink() names there."""

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(30, "Read-only file system", f"{path}")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(OSError, match=f"Read-only file system: '{tmp_path}/f.bin'$"), whole_file(tmp_path / "f.bin"):
        pass


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    """Of itself it does not. An error without a number stays as it is."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match=f"File too large: '{tmp_path}/f.bin'"):
            write_shard(tmp_path / "f.bin", [1] * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(OSError, match="^why$"), whole_file(tmp_path / "f.bin"):
        raise OSError("why")
    assert content_of(tmp_path) == {}


@pytest.mark.parametrize("linked", [False, True])
def test_a_device_or_a_fifo_is_not_replaced(tmp_path: Path, linked: bool) -> None:
    """Nor a folder. compare.py --plot=/dev/null, as root, would leave the system without one."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for place in (tmp_path / "fifo", Path("/dev/null"), tmp_path / "folder"):
        path = tmp_path / f"to {place.name}" if linked else place
        if linked:
            path.symlink_to(place)
        with pytest.raises(OSError, match=f"is no regular file, and is not replaced: name another: '{path}'"), whole_file(path):
            raise AssertionError
    assert (tmp_path / "folder").is_dir() and stat.S_ISFIFO(os.stat(tmp_path / "fifo").st_mode) and stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_folder_that_is_not_there_is_told_by_the_name_that_was_given(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"'{tmp_path}/none/f'$"), whole_file(tmp_path / "none" / "f"):
        pass


def test_a_file_system_that_cannot_sync_folders_is_no_error(tmp_path: Path, disk: Disk) -> None:
    disk.fail_at, disk.error = 2, OSError(errno.EINVAL, "Invalid argument")
    with whole_file(tmp_path / "f") as file:
        file.write(b"new")
    assert disk.calls[2] == "sync folder" and content_of(tmp_path) == {"f": b"new"}


def test_what_a_killed_writer_left_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "s.bin.bankrun.tmp").write_bytes(b"left" * 1000)
    (tmp_path / "s.bin.tmp").write_bytes(b"a user's own")
    write_shard(tmp_path / "s.bin", [1, 2, 3])
    assert sorted(content_of(tmp_path)) == ["s.bin", "s.bin.tmp"] and read_shard(tmp_path / "s.bin").tolist() == [1, 2, 3]


def put_link(path: Path) -> None:
    path.symlink_to(path.parent / "theirs")


STRANGERS = {"a link": put_link, "a FIFO": os.mkfifo, "a folder": os.mkdir, "a dead link": lambda path: path.symlink_to("none")}


def open_lock(folder: Path) -> None:
    with locked(folder):
        pass


@pytest.mark.parametrize("kind", STRANGERS)
@pytest.mark.parametrize("name", ["s.bin.bankrun.tmp", ".lock", "known.json"])
def test_a_file_of_ours_that_is_a_link_or_none_is_refused_and_neither_followed_nor_waited_for(
    tmp_path: Path, name: str, kind: str
) -> None:
    (tmp_path / "theirs").write_bytes(b"theirs")
    STRANGERS[kind](tmp_path / name)
    before = os.lstat(tmp_path / name)
    use = {
        "s.bin.bankrun.tmp": lambda: write_shard(tmp_path / "s.bin", [1]),
        ".lock": lambda: open_lock(tmp_path),
        "known.json": lambda: read_json(tmp_path / "known.json"),
    }
    with pytest.raises(OSError, match=f"another thing that is no file: move it away: '{tmp_path / name}'"):
        use[name]()
    assert os.lstat(tmp_path / name) == before and (tmp_path / "theirs").read_bytes() == b"theirs"
    assert not (tmp_path / "s.bin").exists()


@pytest.mark.parametrize("name", [".lock", "s.bin.bankrun.tmp"])
def test_a_second_name_of_a_foreign_file_does_not_empty_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "theirs").write_bytes(b"theirs")
    os.link(tmp_path / "theirs", tmp_path / name)
    with locked(tmp_path):
        write_shard(tmp_path / "s.bin", [1])
    assert (tmp_path / "theirs").read_bytes() == b"theirs" and read_shard(tmp_path / "s.bin").tolist() == [1]


def test_an_error_is_one_line_that_writes_nothing_to_the_terminal_but_itself() -> None:
    assert one_line("a\n b\t\x1b[31mred \x00 \udc80 é €") == r"a b \x1b[31mred \x00 \udc80 é €"
    with pytest.raises(SystemExit, match=r"error: no\\x1b\[2J line$"), one_line_errors():
        raise DataError("no\x1b[2J\nline")
    with pytest.raises(SystemExit, match="error: not enough memory: Unable to allocate"), one_line_errors():
        np.empty(1 << 60, dtype=np.uint8)
    with pytest.raises(SystemExit, match="error: not enough memory: lower --shard_tokens or --workers"), one_line_errors():
        raise MemoryError


# ----------------------------------------------------------------------------------------------------------------------
# A row of shards, and what the tools share


@settings(deadline=None, max_examples=40)
@given(
    documents=st.lists(st.lists(st.integers(0, 65535), min_size=1, max_size=20), max_size=12),
    shard_tokens=st.integers(1, 30),
    first=st.integers(0, 3),
)
def test_a_row_of_shards_is_the_stream_of_documents(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], shard_tokens: int, first: int
) -> None:
    folder = tmp_path_factory.mktemp("row")
    writer = ShardWriter(folder, lambda index: shard_name("t", "train", index), shard_tokens, first)
    for document in documents:
        writer.add(document)
    writer.close()
    shards = [read_shard(path).tolist() for path in sorted(folder.iterdir())]
    assert sum(shards, []) == sum(documents, [])
    assert all(len(shard) == shard_tokens for shard in shards[:-1])
    names = [f"t_train_{index:06d}.bin" for index in range(first, first + len(shards))]
    assert writer.written == dict(zip(names, map(len, shards))) and sorted(p.name for p in folder.iterdir()) == names


def test_a_full_shard_is_on_disk_before_the_next_begins(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, lambda index: f"{index}.bin", 4)
    writer.add([1, 2, 3])
    assert not list(tmp_path.iterdir()) and writer.room == 1
    writer.add([4, 5])
    assert read_shard(tmp_path / "0.bin").tolist() == [1, 2, 3, 4] and writer.pending == 1


def test_a_locked_folder_lets_one_in_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    entered = threading.Event()

    def second() -> None:
        with locked(tmp_path):
            entered.set()

    with locked(tmp_path):
        thread = threading.Thread(target=second)
        thread.start()
        assert not entered.wait(0.2)
    assert entered.wait(10)
    thread.join()
    assert "waiting for another process" in capsys.readouterr().err


def test_a_folder_that_a_failure_leaves_as_it_was_made_goes_and_one_that_waits_makes_its_own(tmp_path: Path) -> None:
    out, entered = tmp_path / "out", threading.Event()

    def second() -> None:
        with locked(out):
            (out / "made").touch()
            entered.set()

    thread = threading.Thread(target=second)
    with pytest.raises(DataError, match="none"), locked(out):
        (out / READERS).touch()
        thread.start()
        assert not entered.wait(0.2)
        raise DataError("none")
    thread.join(10)
    assert entered.is_set() and sorted(path.name for path in out.iterdir()) == [".lock", "made"]
    for folder in (out, tmp_path / "mine", tmp_path / "new", tmp_path / "above" / "all" / "new"):
        if folder.name == "mine":
            folder.mkdir()
        with pytest.raises(DataError, match="none"), locked(folder):
            (folder / "arriving").mkdir()
            raise DataError("none")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "out"]  # what was there stays
    with pytest.raises(DataError, match="none"), locked(tmp_path / "held"):
        (tmp_path / "held" / "arriving").mkdir()
        (tmp_path / "held" / "arriving" / "half").touch()
        raise DataError("none")
    assert (tmp_path / "held" / "arriving" / "half").exists()  # the same command goes on from it


def test_a_number_option_takes_its_range_only() -> None:
    take = number_between(0, 10_000)
    assert (take("0"), take("10_000")) == (0, 10_000)
    for text in ("-1", "10001"):
        with pytest.raises(Exception, match=r"is not in 0\.\.10000"):
            take(text)
