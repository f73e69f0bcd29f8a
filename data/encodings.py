"""Encodings by name: text to tokens, for the tools that make shards, and tokens to text, for the trainer's sample.

"bytes": token b is the byte b, token 256 is end-of-text; needs nothing. Every other name is tiktoken's, such as gpt2.
"""

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from data.shards import MAX_TOKEN, DataError

MAX_VOCABULARY = 1 << 26  # bytes; the largest has 3.6 MB
TIMEOUT = 30.0  # seconds without an answer or a byte, of a server that has a vocabulary
END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Encoding:
    """The functions of one encoding. Both take and give ids below vocab_size.

    encode: a text's ids, (N,), without end-of-text; a special token spelled out in the text is ordinary text
    decode: the text of ids; what is not UTF-8 becomes U+FFFD
    """

    name: str
    vocab_size: int
    end_of_text: int
    encode: Callable[[str], np.ndarray]
    decode: Callable[[list[int]], str]

    def document(self, text: str) -> np.ndarray:
        """End-of-text, then the tokens of `text`: (N,) uint16."""
        return np.concatenate(([self.end_of_text], self.encode(text)), dtype=np.uint16, casting="unsafe")


def bytes_of(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(errors="surrogateescape"), dtype=np.uint8)  # a prompt's bytes, whatever they are


def text_of_bytes(tokens: list[int]) -> str:
    """Ids from 256 on are no bytes and give no text."""
    return bytes(token for token in tokens if token < 256).decode(errors="replace")


BYTES = Encoding("bytes", 257, 256, bytes_of, text_of_bytes)


@contextlib.contextmanager
def requests_that_end() -> Iterator[None]:
    """tiktoken sets no limit of time: a server that accepts and does not answer would hold a run at its sample for ever."""
    try:
        from requests.adapters import HTTPAdapter
    except ImportError:  # of a tiktoken that asks otherwise
        yield
        return
    send = HTTPAdapter.send

    def limited(self: HTTPAdapter, *request: Any, timeout: Any = None, **more: Any) -> Any:
        return send(self, *request, timeout=timeout or TIMEOUT, **more)

    HTTPAdapter.send = limited
    try:
        yield
    finally:
        HTTPAdapter.send = send


def check_kept() -> None:
    """Raise OSError for a file of tiktoken's cache that is none, as a FIFO, which it would wait for, or has no end. Its default is
    in /tmp, where anybody may have made it; what it reads there it compares with a hash."""
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR"))
    folder = os.path.join(tempfile.gettempdir(), "data-gym-cache") if folder is None else folder or os.devnull  # empty: none
    there = []
    with contextlib.suppress(OSError):  # none, or tiktoken does without
        there = [entry.path for entry in os.scandir(folder) if re.fullmatch("[0-9a-f]{40}", entry.name)]  # SHA-1 of an address
    for path in filter(os.path.exists, there):  # a dangling link is none to read
        if not os.path.isfile(path) or os.path.getsize(path) > MAX_VOCABULARY:
            raise OSError(f"{path} is no file of a vocabulary: remove it")


@lru_cache
def load_encoding(name: str) -> Encoding:
    """BYTES for "bytes", else tiktoken's of that name. Raises DataError if it cannot be had or does not suit shards."""
    if name == BYTES.name:
        return BYTES
    try:
        import tiktoken  # the trainer imports this file, and bytes train without it

        known = tiktoken.list_encoding_names()
        check_kept()
        with requests_that_end():
            encoding = tiktoken.get_encoding(name) if name in known else None
    except (ImportError, OSError, ValueError) as error:
        advice = "tiktoken fetches it once and keeps it in TIKTOKEN_CACHE_DIR; --encoding bytes needs no network"
        raise DataError(f"the encoding {name!r} could not be loaded ({error}): {advice}") from error
    if encoding is None:
        raise DataError(f"no encoding is called {name!r}; there are: bytes, {', '.join(known)}")
    if encoding.max_token_value > MAX_TOKEN:
        raise DataError(f"encoding {name!r} has ids up to {encoding.max_token_value}; a shard takes them up to {MAX_TOKEN}")
    if END_OF_TEXT not in encoding.special_tokens_set:
        raise DataError(f"encoding {name!r} has no token {END_OF_TEXT} to begin documents with")
    ids = lambda text: np.array(encoding.encode_ordinary(text), dtype=np.uint16)
    return Encoding(name, encoding.n_vocab, encoding.eot_token, ids, encoding.decode)


def check_encoding(name: str) -> None:
    """Raise DataError if no encoding has this name. Nothing is fetched; without tiktoken its names are not known."""
    if name != BYTES.name:
        try:
            import tiktoken
        except ImportError:
            return
        if name not in (known := tiktoken.list_encoding_names()):
            raise DataError(f"no encoding is called {name!r}; there are: {BYTES.name}, {', '.join(known)}")


def encode(text: str, encoding: str) -> list[int]:
    """The tokens of a text by the encoding of that name, without end-of-text. Raises DataError as load_encoding does."""
    return load_encoding(encoding).encode(text).tolist()


def decode(tokens: list[int], encoding: str) -> str:
    """The text of tokens by the encoding of that name; the numbers, with the reason, if it cannot be had."""
    try:
        return load_encoding(encoding).decode(tokens)
    except Exception as error:  # the run is over: a missing network or an odd token must not spoil it
        return f"{tokens} (no text: {type(error).__name__}: {error})"
