"""Encodings: a text comes back from its tokens; one that cannot be loaded is an error of one line."""

import sys

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from data.encodings import MAX_BLANKS, check_encoding, decode, encode, load_encoding
from data.shards import DataError


@given(st.text(max_size=200) | st.just("a<|endoftext|>b"))
def test_bytes_are_their_own_tokens_and_give_the_text_back(text: str) -> None:
    encoding = load_encoding("bytes")
    assert (
        encoding.document(text).tolist() == [256, *encode(text, "bytes")] == [256, *text.encode()]
    )
    assert decode([256, *encode(text, "bytes")], "bytes") == text


def test_a_tiktoken_encoding_is_used_by_its_name(offer_encoding) -> None:
    offer_encoding("toy", end_of_text=303)
    assert encode("abab a", "toy") == [300, 300, 32, 97] and decode([300, 98], "toy") == "abb"
    assert load_encoding("toy").document("ab").tolist() == [303, 300]
    text = "a<|endoftext|>b"  # spelled out, it is ordinary text
    assert encode(text, "toy") == list(text.encode())


@pytest.mark.parametrize("blanks", [" ", "\n", "\t", "\r\n", " \n\t", "\N{EM SPACE}"])
def test_a_million_blanks_do_not_overflow(offer_encoding, blanks: str) -> None:
    """The regular expression of tiktoken 0.14 panics, so that no Exception is raised."""
    offer_encoding("toy", end_of_text=303)
    text = "ab " + blanks * (1_200_000 // len(blanks)) + "x"
    assert decode(encode(text, "toy"), "toy") == text


@pytest.mark.parametrize("blanks", [MAX_BLANKS, MAX_BLANKS - 1, 7])
def test_fewer_blanks_are_encoded_in_one_piece(offer_encoding, blanks: int) -> None:
    encoding = offer_encoding("toy", end_of_text=303)
    text = "ab ab" + " " * blanks + "ab" + "\n" * blanks + "ab" * 60_000 + " " * blanks
    assert encode(text, "toy") == encoding.encode_ordinary(text)


@pytest.mark.parametrize("end_of_text", [65536, None])
def test_an_encoding_that_does_not_fit_shards_is_refused(offer_encoding, end_of_text) -> None:
    offer_encoding("toy", end_of_text)
    with pytest.raises(DataError, match="a shard needs ids up to 65535 and a token <.endoftext.>"):
        encode("a", "toy")


def test_an_unknown_encoding_is_refused_with_those_there_are(offer_encoding) -> None:
    offer_encoding("toy", end_of_text=303)
    for use in (check_encoding, load_encoding):
        with pytest.raises(DataError, match="unknown encoding 'gpt7'; there are: bytes, toy"):
            use("gpt7")
    check_encoding("bytes")
    check_encoding("toy")


def no_network(_: str) -> None:
    raise OSError("network\nunreachable")


@pytest.mark.parametrize("missing", ["network", "tiktoken"])
def test_an_encoding_that_cannot_be_loaded(monkeypatch, missing: str) -> None:
    """An error to encode; the ids to decode, as a run is over by then."""
    if missing == "network":
        monkeypatch.setattr(tiktoken, "get_encoding", no_network)
    else:
        monkeypatch.setitem(sys.modules, "tiktoken", None)
    load_encoding.cache_clear()
    with pytest.raises(DataError, match=f"cannot load .*'gpt2': .*{missing}.*--encoding=bytes"):
        encode("a", "gpt2")
    assert decode([1, 2], "gpt2").startswith("[1, 2] (no text: DataError: ")
