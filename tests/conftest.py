"""What every test shares: one thread, reproducible hypotheses, shards, ranks."""

import argparse
import os
import re
import signal
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

# PyTorch asks for huge pages: the full-size model would be all page faults otherwise.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import numpy as np
import pytest
import tiktoken
import torch
from hypothesis import settings
from tiktoken_ext import openai_public

import common  # first: it loads the script that is tested
from data.encodings import load_encoding
from data.loader import CHECKED
from data.shards import write_shard
from runtime import cpu

torch.set_num_threads(1)  # the tensors are tiny, and the ranks of a test share the machine
settings.register_profile("bankrun", deadline=None, derandomize=True, database=None)
settings.load_profile("bankrun")

# A shell starts its background commands with Ctrl-C ignored, nohup with SIGHUP, and processes that
# tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def clean_process() -> Iterator[None]:
    """What a run in this process has chosen or found ends with its test."""
    yield
    if cpu.chosen:
        common.forget_cpu()
    CHECKED.clear()


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with shards of two of Python's own modules, in bytes."""
    folder = tmp_path_factory.mktemp("shards")
    text = b"".join(Path(module.__file__).read_bytes() for module in (argparse, typing))
    documents = [np.frombuffer(piece, dtype=np.uint8) for piece in re.split(rb"\n\n+", text)]
    tokens = np.concatenate([np.concatenate(([256], document)) for document in documents])
    write_shard(folder / "local_train_000000.bin", tokens)
    write_shard(folder / "local_val_000000.bin", tokens[:4096])
    return folder


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list]:
    """run_ranks(world_size, function, *args): what each rank returned; see common.run_ranks."""

    def run(world_size: int, function: Callable, *args: object) -> list:
        return common.run_ranks(tmp_path_factory.mktemp("ranks"), world_size, function, *args)

    return run


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
