"""What the tests of encodings and of the tools share."""

from collections.abc import Callable

import pytest
import tiktoken

from data.encodings import load_encoding


@pytest.fixture
def offer_encoding(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tiktoken.Encoding]:
    """offer_encoding(name, end_of_text): tiktoken knows this encoding, and no other, with one merge, "ab" -> 300."""

    def offer(name: str, end_of_text: int | None) -> tiktoken.Encoding:
        ranks = {bytes([byte]): byte for byte in range(256)} | {b"ab": 300}
        special = {"<|endoftext|>": end_of_text} if end_of_text else {}
        encoding = tiktoken.Encoding(name, pat_str=r"\w+|\W+", mergeable_ranks=ranks, special_tokens=special)
        monkeypatch.setattr(tiktoken, "list_encoding_names", lambda: [name])
        monkeypatch.setattr(tiktoken, "get_encoding", {name: encoding}.__getitem__)
        load_encoding.cache_clear()
        return encoding

    return offer
