"""Shards hold what was put in, all or nothing, and no broken file passes for one."""

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.shards import (
    HEADER_BYTES, ShardError, ShardWriter, locked, number_between, read_shard, shard_name, verify_shard, write_shard,
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
        assert read_shard(path).tolist() == tokens


BROKEN = {
    "empty": (b"", "is empty (0 bytes)"),
    "short header": (header(20240520, 1, 5)[:500], "has 500 bytes, fewer than the 1024"),
    "text": (b"<html>" * 400, "magic number 1836345404, not 20240520"),
    "version": (header(20240520, 2, 1) + b"ab", "version 2; only version 1"),
    "no tokens": (header(20240520, 1, 0), "says it holds 0 tokens"),
    "negative": (header(20240520, 1, -4), "says it holds -4 tokens"),
    "too few": (header(20240520, 1, 5) + bytes(8), "5 tokens, which makes 1034 bytes, but has 1032 (2 too few)"),
    "too many": (header(20240520, 1, 5) + bytes(14), "but has 1038 (4 too many)"),
    "odd": (header(20240520, 1, 5) + bytes(9), "but has 1033 (1 too few)"),
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


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.bin", tmp_path):
        with pytest.raises(ShardError, match="no such file"):
            verify_shard(path)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [([1, 65536], "65536 does not fit"), ([-1], "-1 does not fit"), ([0.5], "float64"), ([[1]], "flat"), ([], "not 0")],
)
def test_what_is_no_token_is_refused_and_nothing_written(tmp_path: Path, tokens: list, message: str) -> None:
    with pytest.raises(ShardError, match=message):
        write_shard(tmp_path / "s.bin", tokens)
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_shard_and_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.bin"
    write_shard(path, [1, 2, 3])

    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("data.shards.os.fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        write_shard(path, [4, 5])
    assert list(tmp_path.iterdir()) == [path] and read_shard(path).tolist() == [1, 2, 3]


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


def test_a_number_option_takes_its_range_only() -> None:
    take = number_between(0, 10_000)
    assert (take("0"), take("10_000")) == (0, 10_000)
    for text in ("-1", "10001"):
        with pytest.raises(Exception, match=r"is not in 0\.\.10000"):
            take(text)
