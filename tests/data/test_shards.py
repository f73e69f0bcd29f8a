"""Shards hold what was put in, all or nothing. What a run says of bad ones: tests/faults."""

import errno
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.shards import HEADER_BYTES, DataError, read_shard, replace_file, verify_shard, write_shard


def header(*numbers: int) -> bytes:
    return np.array([*numbers, *[0] * (256 - len(numbers))], dtype="<i4").tobytes()


def test_layout_of_a_shard_byte_by_byte(tmp_path: Path) -> None:
    assert write_shard(tmp_path / "s.bin", [50256, 1, 258]) == 3
    numbers = bytes.fromhex("88d83401 01000000 03000000")
    tokens = bytes.fromhex("50c4 0100 0201")
    expected = numbers + bytes(HEADER_BYTES - 12) + tokens
    assert (tmp_path / "s.bin").read_bytes() == expected


@settings(max_examples=20, deadline=None)
@given(tokens=st.lists(st.integers(0, 65535), min_size=1, max_size=300))
def test_reading_gives_what_was_written(tmp_path_factory, tokens: list[int]) -> None:
    path = tmp_path_factory.getbasetemp() / "round_trip.bin"
    for form in (tokens, np.array(tokens, dtype=np.int64)):
        assert write_shard(path, form) == len(tokens) == verify_shard(path)
        assert read_shard(path, max(tokens) + 1).tolist() == tokens
    with pytest.raises(DataError, match=f"token {max(tokens)}, but --vocab_size={max(tokens)}"):
        read_shard(path, max(tokens))


BROKEN = {
    "short header": (header(20240520, 1, 5)[:500], "truncated or damaged: 500 bytes"),
    "too many tokens": (header(20240520, 1, 5) + bytes(14), "1,038 bytes, but 5 tokens take"),
    "no tokens": (header(20240520, 1, 0), "truncated or damaged"),
    "another version": (header(20240520, 2, 1) + b"ab", "not a token shard: .* version 2"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_damaged_or_foreign_file_is_refused(tmp_path: Path, kind: str) -> None:
    content, message = BROKEN[kind]
    path = tmp_path / "broken.bin"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"broken.bin: .*{message}"):
        verify_shard(path)


@pytest.mark.parametrize("tokens", [[1, 65536], [-1], []])
def test_ids_that_do_not_fit_are_refused_and_nothing_is_written(tmp_path: Path, tokens) -> None:
    with pytest.raises(DataError):
        write_shard(tmp_path / "s.bin", tokens)
    assert not list(tmp_path.iterdir())


def test_a_writer_that_fails_leaves_the_old_file_alone_and_is_named(tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    path.write_bytes(b"old")
    with pytest.raises(OSError, match="No space .*s.bin"), replace_file(path) as file:
        file.write(b"half of it" * 10_000)
        raise OSError(errno.ENOSPC, "No space left on device")
    assert [*tmp_path.iterdir()] == [path] and path.read_bytes() == b"old"
