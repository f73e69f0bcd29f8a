"""Encodings: a text comes back from its tokens; one that cannot be loaded is an error of one line."""

import hashlib
import sys

import numpy as np
import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from data.encodings import MAX_BLANKS, decode, encode, load_encoding
from data.encodings import load_lengths, load_prefixes, prefix_table, save_tables
from data.shards import DataError


@given(st.text(max_size=200) | st.just("a<|endoftext|>b"))
def test_bytes_are_their_own_tokens_and_give_the_text_back(text: str) -> None:
    assert load_encoding("bytes").document(text).tolist() == [256, *text.encode()]
    assert decode([256, *encode(text, "bytes")], "bytes") == text


def test_a_tiktoken_encoding_is_used_by_its_name(offer_encoding) -> None:
    offer_encoding("toy", end_of_text=303)
    assert encode("abab a", "toy") == [300, 300, 32, 97] and decode([300, 98], "toy") == "abb"
    assert load_encoding("toy").document("ab").tolist() == [303, 300]
    text = "a<|endoftext|>b"  # spelled out, it is ordinary text
    assert encode(text, "toy") == list(text.encode())


@pytest.mark.parametrize("blanks", [" ", "\r\n"])
def test_a_million_blanks_do_not_overflow(offer_encoding, blanks: str) -> None:
    """The regular expression of tiktoken 0.14 panics, so that no Exception is raised."""
    offer_encoding("toy", end_of_text=303)
    text = "ab " + blanks * (1_200_000 // len(blanks)) + "x"
    assert decode(encode(text, "toy"), "toy") == text


def test_fewer_blanks_are_encoded_in_one_piece(offer_encoding) -> None:
    encoding = offer_encoding("toy", end_of_text=303)
    text = "ab ab" + " " * MAX_BLANKS + "ab" + "\n" * 7 + "ab" * 60_000
    assert encode(text, "toy") == encoding.encode_ordinary(text)


def no_network(_: str) -> None:
    raise OSError("network\nunreachable")


def test_an_encoding_that_cannot_be_loaded(monkeypatch) -> None:
    """An error to encode; the ids to decode, as a run is over by then."""
    monkeypatch.setattr(tiktoken, "get_encoding", no_network)
    load_encoding.cache_clear()
    with pytest.raises(DataError, match="cannot load .*'gpt2': network unreach.*--encoding=bytes"):
        encode("a", "gpt2")
    assert decode([1, 2], "gpt2").startswith("[1, 2] (no text: DataError: ")


# --------------------------------------------------------------------------------------------------
# Prefixes


def test_prefixes_of_a_vocabulary_written_by_hand(offer_encoding) -> None:
    """Ids in no order; "abcd" and "b" are no tokens, and <|endoftext|> is a special one."""
    ids = {b"abcde": 1, b"a": 7, b"abc": 2, b"abd": 3, b"ab": 9, b"xyz": 4, b"<": 0, b"bc": 5}
    ids |= {b"\xff": 8, b"\xff\x00": 6, b"<|endoftext|>!": 11}
    offer_encoding("toy", 10, ids)
    prefixes = {b"abcde": b"abc", b"abc": b"ab", b"abd": b"ab", b"ab": b"a"}
    prefixes |= {b"\xff\x00": b"\xff", b"<|endoftext|>!": b"<"}
    expected = [-1] * 14
    for token, prefix in prefixes.items():
        expected[ids[token]] = ids[prefix]
    table = prefix_table("toy", 14)
    assert table.dtype == np.int64 and table.tolist() == expected
    with pytest.raises(DataError, match="encoding 'toy' has token 11, but --vocab_size=11"):
        prefix_table("toy", 11)
    assert prefix_table("bytes", 260).tolist() == [-1] * 260


def test_gpt2_prefixes_are_those_of_the_record(monkeypatch) -> None:
    """The sum and SHA-256 were computed by another program."""
    monkeypatch.setattr(tiktoken.load, "read_file", no_network)
    load_encoding.cache_clear()
    try:
        table = prefix_table("gpt2", 50304)
    except DataError:
        pytest.skip("GPT-2's vocabulary is not in tiktoken's cache")
    digest = "36281293860d09f2307c3d2cd503f2e595e24c165fbd49b11f89cfaed71b617c"
    assert table.sum() == 548_403_601 and table[2068] == 45567  # " quick", " qui"
    assert hashlib.sha256(table.astype("<i4").tobytes()).hexdigest() == digest


def test_tables_beside_the_shards_need_no_tiktoken(offer_encoding, monkeypatch, tmp_path) -> None:
    offer_encoding("toy", end_of_text=303)
    save_tables(tmp_path, "toy")
    save_tables(tmp_path, "bytes")
    assert {path.name for path in tmp_path.iterdir()} == {"bytes_toy.bin", "prefixes_toy.bin"}
    expected = prefix_table("toy", 320)
    assert expected[[300, 301, 302]].tolist() == [97, 32, 32]
    assert (load_prefixes(tmp_path / "none", "toy", 320) == expected).all()
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    load_encoding.cache_clear()
    found = load_prefixes(tmp_path, "toy", 320)
    assert found.dtype == np.int64 and (found == expected).all()
    lengths = load_lengths(tmp_path, "toy", 320)
    assert lengths[[0, 97, 300, 301, 302, 303, 319]].tolist() == [1, 1, 2, 2, 3, 0, 0]
    assert load_lengths(tmp_path, "bytes", 257).tolist() == [1] * 256 + [0]
    with pytest.raises(DataError, match="cannot load the encoding 'toy'"):
        load_prefixes(tmp_path / "none", "toy", 320)
