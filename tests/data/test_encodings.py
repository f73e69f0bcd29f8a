"""Encodings: a text comes back from its tokens, and an encoding that cannot be had is an error, or numbers, never a crash."""

import os
import socket
import sys
import tempfile
from pathlib import Path

import pytest
import requests
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from data import encodings
from data.encodings import decode, encode, load_encoding
from data.shards import DataError


@given(st.text(max_size=200) | st.just("a<|endoftext|>b"))
def test_bytes_are_their_own_tokens_and_give_the_text_back(text: str) -> None:
    encoding = load_encoding("bytes")
    assert encoding.document(text).tolist() == [encoding.end_of_text, *encode(text, "bytes")] == [256, *text.encode()]
    assert decode(encode(text, "bytes"), "bytes") == decode([256, *encode(text, "bytes"), 256], "bytes") == text
    assert encoding.document(text).max() < encoding.vocab_size


def test_bytes_that_are_no_text_are_marked() -> None:
    assert decode([*b"sch", 0xF6, *b"n"], "bytes") == "sch\N{REPLACEMENT CHARACTER}n"


def test_a_tiktoken_encoding_is_used_by_its_name(offer_encoding) -> None:
    offer_encoding("toy", end_of_text=301)
    assert encode("abab a", "toy") == [300, 300, 32, 97] and decode([300, 98], "toy") == "abb"
    assert load_encoding("toy").document("ab").tolist() == [301, 300]


def test_a_special_token_spelled_out_is_ordinary_text(offer_encoding) -> None:
    offer_encoding("toy", end_of_text=301)
    text = "a<|endoftext|>b"
    assert encode(text, "toy") == list(text.encode()) and decode(encode(text, "toy"), "toy") == text


@pytest.mark.parametrize(
    "name, end_of_text, message",
    [
        ("huge", 65536, "'huge' has ids up to 65536; a shard takes them up to 65535"),
        ("endless", None, r"'endless' has no token <\|endoftext\|>"),
        ("toy", 301, "no encoding is called 'gpt7'; there are: bytes, toy"),
    ],
)
def test_an_encoding_that_does_not_suit_is_refused(offer_encoding, name: str, end_of_text: int | None, message: str) -> None:
    offer_encoding(name, end_of_text)
    with pytest.raises(DataError, match=message):
        encode("a", "gpt7" if name == "toy" else name)


def no_network(_: str) -> None:
    raise OSError("network unreachable")


def test_what_is_no_file_in_a_cache_is_not_waited_for(offer_encoding, monkeypatch, tmp_path) -> None:
    """As a FIFO in /tmp, which anybody may make: tiktoken opened it, and a run stood at its sample."""
    offer_encoding("toy", end_of_text=301)
    monkeypatch.setattr(tempfile, "tempdir", f"{tmp_path}")
    for name in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    (folder := tmp_path / "data-gym-cache").mkdir()
    (folder / ("0" * 40)).symlink_to("nowhere")
    (folder / ("1" * 40)).write_text("a vocabulary")
    (folder / "pip").mkdir()  # of a folder that is not for this alone, as ~/.cache
    os.mkfifo(folder / "mine")
    assert encode("abab", "toy") == [300, 300]
    load_encoding.cache_clear()
    for make in (os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero"), endless):
        make(path := folder / ("7a" * 20))
        with pytest.raises(DataError, match=f"'toy' could not be loaded .{path} is no file of a vocabulary: remove it"):
            encode("abab", "toy")
        assert "is no file of a vocabulary" in decode([97], "toy")
        path.rmdir() if path.is_dir() else path.unlink()
    os.mkfifo(folder / ("7a" * 20))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")  # none
    assert encode("abab", "toy") == [300, 300]


def endless(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def test_a_server_that_does_not_answer_is_not_waited_for_without_end(monkeypatch, tmp_path) -> None:
    """A proxy that accepts: tiktoken sets no limit of time, and a run stood at its sample."""
    monkeypatch.setattr(encodings, "TIMEOUT", 0.3)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})  # none is there from before
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for name in ("NO_PROXY", "no_proxy", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{server.getsockname()[1]}")
        before = requests.adapters.HTTPAdapter.send
        with pytest.raises(DataError, match="the encoding 'gpt2' could not be loaded .*TIKTOKEN_CACHE_DIR"):
            load_encoding.__wrapped__("gpt2")
        assert requests.adapters.HTTPAdapter.send is before


@pytest.mark.parametrize("missing", ["network", "tiktoken"])
def test_an_encoding_that_cannot_be_had_is_an_error_to_encode_and_numbers_to_decode(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    if missing == "network":
        monkeypatch.setattr(tiktoken, "get_encoding", no_network)
    else:
        monkeypatch.setitem(sys.modules, "tiktoken", None)
    load_encoding.cache_clear()
    with pytest.raises(DataError, match=rf"'gpt2' could not be loaded \(.*{missing}.*\): .*--encoding bytes needs no network"):
        encode("a", "gpt2")
    text = decode([1, 2], "gpt2")
    assert text.startswith("[1, 2] (no text: DataError: ") and missing in text


def test_tokens_that_the_encoding_does_not_have_are_shown_as_numbers(offer_encoding) -> None:
    offer_encoding("toy", end_of_text=301)
    assert decode([97, 999], "toy").startswith("[97, 999] (no text: ")
