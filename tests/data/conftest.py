"""What the tests of encodings and of the tools share."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import tiktoken
from tiktoken_ext import openai_public

from data.encodings import load_encoding


@pytest.fixture
def offer_encoding(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tiktoken.Encoding]:
    """offer_encoding(name, end_of_text, ranks): tiktoken knows this encoding and no other.

    It has the regular expression of gpt2, whose vocabulary must not be downloaded here, and by
    default the merges "ab" -> 300, two blanks -> 301, " ab" -> 302.
    """
    merges = {bytes([byte]): byte for byte in range(256)} | {b"ab": 300, b"  ": 301, b" ab": 302}

    def offer(
        name: str, end_of_text: int | None, ranks: dict[bytes, int] = merges
    ) -> tiktoken.Encoding:
        encoding = tiktoken.Encoding(
            name,
            pat_str=openai_public.r50k_pat_str,
            mergeable_ranks=ranks,
            special_tokens={"<|endoftext|>": end_of_text} if end_of_text else {},
        )
        monkeypatch.setattr(tiktoken, "list_encoding_names", lambda: [name])
        monkeypatch.setattr(tiktoken, "get_encoding", {name: encoding}.__getitem__)
        load_encoding.cache_clear()
        return encoding

    yield offer
    load_encoding.cache_clear()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """run(tool, output, *options): the tool's main, in this process."""

    def run(tool: ModuleType, output: Path, *options: str) -> None:
        command = [tool.__name__, "--output", str(output), *options]
        monkeypatch.setattr(sys, "argv", command)
        tool.main()

    return run


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The folder in which a tool makes its shards."""
    return tmp_path / "out"
