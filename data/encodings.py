"""Encodings by name: text to tokens for the tools that make shards, tokens to text for samples,
and for the loss each token's prefix.

"bytes": token b is the byte b, token 256 is end-of-text. Other names are tiktoken's, such as gpt2.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from data.shards import MAX_TOKEN, DataError, read_shard, write_shard

END_OF_TEXT = "<|endoftext|>"
MAX_BLANKS = 100_000  # in a row; tiktoken panics at a million that precede other text


@dataclass(frozen=True)
class Encoding:
    """The functions of one encoding. All take and give ids below vocab_size.

    encode: a text's ids, (N,), without end-of-text; a special token spelled out is ordinary text
    decode: the text of ids; what is not UTF-8 becomes U+FFFD
    ordinary: the byte strings of all tokens that are not special, with their ids
    """

    name: str
    vocab_size: int
    end_of_text: int
    encode: Callable[[str], np.ndarray]
    decode: Callable[[list[int]], str]
    ordinary: Callable[[], dict[bytes, int]]

    @property
    def settings(self) -> dict[str, int | str]:
        """The options of a training run on shards of this encoding."""
        return {"encoding": self.name, "vocab_size": self.vocab_size, "bos_id": self.end_of_text}

    def document(self, text: str) -> np.ndarray:
        """End-of-text, then the tokens of `text`: (N,) uint16."""
        return np.concatenate(([self.end_of_text], self.encode(text))).astype(np.uint16)


def bytes_of(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(errors="surrogateescape"), dtype=np.uint8)


def text_of_bytes(tokens: list[int]) -> str:
    """Ids from 256 on are no bytes and give no text."""
    return bytes(token for token in tokens if token < 256).decode(errors="replace")


def single_bytes() -> dict[bytes, int]:
    return {bytes([byte]): byte for byte in range(256)}


BYTES = Encoding("bytes", 257, 256, bytes_of, text_of_bytes, single_bytes)


def split_blanks(text: str) -> Iterator[str]:
    """The text in parts, cut within each run of more than MAX_BLANKS blanks, after so many."""
    start = 0
    if len(text) > MAX_BLANKS:  # spare ordinary documents the search
        for run in re.finditer(r"\s+", text):
            for end in range(run.start() + MAX_BLANKS, run.end(), MAX_BLANKS):
                yield text[start:end]
                start = end
    yield text[start:]


@lru_cache
def load_encoding(name: str) -> Encoding:
    """The encoding of that name. Raises DataError if it cannot be loaded or does not fit shards."""
    if name == BYTES.name:
        return BYTES
    check_encoding(name)
    try:
        import tiktoken  # here, as bytes need none

        encoding = tiktoken.get_encoding(name)
    except (ImportError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        advice = "tiktoken downloads it once; --encoding=bytes needs no network"
        raise DataError(f"cannot load the encoding {name!r}: {reason}: {advice}") from error
    largest = encoding.max_token_value
    if largest > MAX_TOKEN or END_OF_TEXT not in encoding.special_tokens_set:
        needs = f"a shard needs ids up to {MAX_TOKEN} and a token {END_OF_TEXT}"
        raise DataError(f"encoding {name!r} has ids up to {largest}; {needs}")

    def encode(text: str) -> np.ndarray:
        parts = [encoding.encode_ordinary(part) for part in split_blanks(text)]
        return np.concatenate(parts).astype(np.uint16)

    def ordinary() -> dict[bytes, int]:
        return {text: encoding.encode_single_token(text) for text in encoding.token_byte_values()}

    end_of_text = encoding.eot_token
    return Encoding(name, encoding.n_vocab, end_of_text, encode, encoding.decode, ordinary)


def check_encoding(name: str) -> None:
    """Raise DataError if no encoding has this name. Nothing is fetched; tiktoken may be absent."""
    if name == BYTES.name:
        return
    try:
        import tiktoken
    except ImportError:
        return
    known = tiktoken.list_encoding_names()
    if name not in known:
        raise DataError(f"unknown encoding {name!r}; there are: bytes, {', '.join(known)}")


def encode(text: str, encoding: str) -> list[int]:
    """The tokens of a text, without end-of-text. Raises DataError as load_encoding does."""
    return load_encoding(encoding).encode(text).tolist()


def decode(tokens: list[int], encoding: str) -> str:
    """The text of tokens; or the ids and the reason, as a sample must not spoil a finished run."""
    try:
        return load_encoding(encoding).decode(tokens)
    except Exception as error:
        return f"{tokens} (no text: {type(error).__name__}: {error})"


def prefix_table(encoding: str, vocab_size: int) -> np.ndarray:
    """For each token, the longest other token that its bytes begin with: (vocab_size,) int64.

    Only ordinary tokens have a prefix or are one. -1 means none, as for single bytes, special
    tokens and padding ids. Raises DataError for a vocab_size too small, or as load_encoding does.
    """
    table = np.full(vocab_size, -1)
    stack: list[tuple[bytes, int]] = []  # tokens that begin the current one, shortest first
    for text, token in sorted(load_encoding(encoding).ordinary().items()):
        while stack and not text.startswith(stack[-1][0]):
            stack.pop()
        if stack and token >= vocab_size:
            raise DataError(
                f"encoding {encoding!r} has token {token}, but --vocab_size={vocab_size}"
            )
        if stack:
            table[token] = stack[-1][1]
        stack.append((text, token))
    return table


def length_table(encoding: str, vocab_size: int) -> np.ndarray:
    """The bytes of each token's text: (vocab_size,) int64, 0 for special tokens and padding ids."""
    table = np.zeros(vocab_size, dtype=np.int64)
    for text, token in load_encoding(encoding).ordinary().items():
        table[token] = len(text)
    return table


def save_tables(folder: Path | str, encoding: str) -> None:
    """Leave prefix_table and length_table beside the shards, unless they are there or tokens are bytes.

    A machine without network can then train on them. A file has a shard's format: number k belongs
    to token k, whose prefix is k if it has none. Raises DataError as load_encoding does; OSError.
    """
    if encoding == BYTES.name:
        return
    for kind, make in (("prefixes", prefix_table), ("bytes", length_table)):
        path = Path(folder, f"{kind}_{encoding}.bin")
        if not path.exists():
            table = make(encoding, load_encoding(encoding).vocab_size)
            write_shard(path, np.where(table < 0, np.arange(len(table)), table))


def load_lengths(folder: Path | str, encoding: str, vocab_size: int) -> np.ndarray:
    """length_table(encoding, vocab_size), read from `folder` if save_tables left it there."""
    path = Path(folder, f"bytes_{encoding}.bin")
    if not path.exists():
        return length_table(encoding, vocab_size)
    found = read_shard(path)
    return np.pad(found.astype(np.int64), (0, max(0, vocab_size - len(found))))


def load_prefixes(folder: Path | str, encoding: str, vocab_size: int) -> np.ndarray:
    """The same of prefix_table. Both raise DataError for a damaged file, or as the table does; OSError."""
    path = Path(folder, f"prefixes_{encoding}.bin")
    if not path.exists():
        return prefix_table(encoding, vocab_size)
    found = read_shard(path, vocab_size).astype(np.int64)
    if len(found) > vocab_size:
        raise DataError(f"{path}: has {len(found)} tokens, but --vocab_size={vocab_size}")
    table = np.full(vocab_size, -1)
    table[: len(found)] = np.where(found == np.arange(len(found)), -1, found)
    return table
