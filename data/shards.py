"""Token shards: the format, for the tools that make them and the loader that reads them.

A shard is a header of 1,024 bytes, then the tokens, all little-endian (the GPT-2 format of llm.c):

    header   256 int32   [0] magic 20240520   [1] version 1   [2] number of tokens   [3:] zero
    tokens   uint16      one number a token, document after document

A document begins with the end-of-text token of its encoding. A shard may end in the middle of a
document, which the next one continues. Files are called `{prefix}_{split}_{index:06d}.bin`.
"""

import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

MAGIC = 20240520
VERSION = 1
HEADER_BYTES = 256 * 4
MAX_SHARD_TOKENS = 2**31 - 1  # the count is an int32
MAX_TOKEN = 2**16 - 1
TRAIN, VALIDATION = "*_train_*.bin", "*_val_*.bin"  # names that a run takes for shards
TEMPORARY = ".bankrun.tmp"  # suffix of a file that is being written
UNFINISHED = ".fetching"  # folder beside shards of which some are still to come


class DataError(ValueError):
    """Data that are missing, damaged, of another format or too few."""


def shard_name(prefix: str, split: str, index: int) -> str:
    return f"{prefix}_{split}_{index:06d}.bin"


def write_shard(path: Path | str, tokens: Sequence[int] | np.ndarray) -> int:
    """Write N ids (1 <= N < 2**31) to `path`, all or nothing. Returns N. Raises DataError, OSError."""
    tokens = np.asarray(tokens)
    if not 1 <= len(tokens) <= MAX_SHARD_TOKENS:
        raise DataError(f"{path}: a shard has 1 to {MAX_SHARD_TOKENS} tokens, not {len(tokens)}")
    if tokens.min() < 0 or tokens.max() > MAX_TOKEN:
        raise DataError(f"{path}: a shard takes ids up to {MAX_TOKEN}: use another encoding")
    header = np.zeros(256, dtype="<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    with replace_file(path) as file:
        file.write(header.tobytes())
        file.write(tokens.astype("<u2").data)
    return len(tokens)


def verify_shard(path: Path | str) -> int:
    """The number of tokens of a shard, by its header and size. Raises DataError, OSError."""
    with open_shard(path) as (_, count):
        return count


def has_tokens(path: Path, tokens: int) -> bool:
    """Whether there is a whole shard of so many tokens at `path`."""
    try:
        return verify_shard(path) == tokens
    except (DataError, OSError):
        return False


def read_shard(
    path: Path | str, vocab_size: int | None = None, crc: int | None = None
) -> np.ndarray:
    """The tokens of a shard: (N,) uint16, in memory.

    vocab_size: all ids must be below it. crc: the CRC-32 that the tokens had before.
    Raises DataError for a file that is not a whole shard, or not such a one; OSError.
    """
    # Not np.memmap: a shard that is overwritten would change under a run, and one that is cut
    # short would end it by SIGBUS. All of it is read anyway, 200 MB in the loader's thread.
    with open_shard(path) as (file, count):
        tokens = np.fromfile(file, dtype="<u2", count=count)
    if len(tokens) != count:
        raise DataError(f"{path}: truncated while it was read")
    if crc is not None and zlib.crc32(tokens) != crc:  # 0.1 s for 200 MB
        raise DataError(f"{path}: has changed since the start; leave shards alone during a run")
    if vocab_size is not None and tokens.max() >= vocab_size:
        problem = f"has token {tokens.max()}, but --vocab_size={vocab_size}"
        raise DataError(f"{path}: {problem}: was it made with another encoding?")
    return tokens


@contextmanager
def open_shard(path: Path | str) -> Iterator[tuple[BinaryIO, int]]:
    """The open file, at its first token, and the number of its tokens. Raises DataError, OSError."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        header = np.frombuffer(file.read(HEADER_BYTES).ljust(HEADER_BYTES, b"\0"), dtype="<i4")
        magic, version, count = header[:3].tolist()
        expected = HEADER_BYTES + 2 * count
        if size >= HEADER_BYTES and (magic, version) != (MAGIC, VERSION):
            found = f"magic {magic}, version {version}, not {MAGIC} and {VERSION}"
            raise DataError(f"{path}: not a token shard: {found}; move it elsewhere")
        if size < HEADER_BYTES or count < 1 or size != expected:
            found = f"truncated or damaged: {size:,} bytes, but {count:,} tokens take {expected:,}"
            raise DataError(f"{path}: {found}; delete it, then make or fetch it again")
        yield file, count


class ShardWriter:
    """Cuts a stream of tokens into shards of `shard_tokens` tokens; the last may be shorter.

    name: the file name of shard number `index`; first: the number of the first shard.
    The open shard is in memory. `written` has the name and the tokens of every shard so far.
    """

    def __init__(
        self, folder: Path, name: Callable[[int], str], shard_tokens: int, first: int = 0
    ) -> None:
        if shard_tokens < 1:
            raise DataError(f"--shard_tokens={shard_tokens}: must be 1 or more")
        self.folder = folder
        self.name = name
        self.next_index = first
        self.written: dict[str, int] = {}
        self.pending = 0  # tokens in the open shard
        self.shard_tokens = shard_tokens
        self._buffer = np.empty(shard_tokens, dtype="<u2")

    def add(self, tokens: np.ndarray) -> None:
        """Append tokens, (N,) uint16, and write each shard that they fill. Raises OSError."""
        while len(tokens):
            part = tokens[: self.shard_tokens - self.pending]
            self._buffer[self.pending : self.pending + len(part)] = part
            self.pending += len(part)
            tokens = tokens[len(part) :]
            if self.pending == self.shard_tokens:
                self.close()

    def close(self) -> None:
        """Write what is in the open shard, if anything is."""
        if self.pending:
            name = self.name(self.next_index)
            self.written[name] = write_shard(self.folder / name, self._buffer[: self.pending])
            self.next_index += 1
            self.pending = 0


@contextmanager
def replace_file(path: Path | str) -> Iterator[BinaryIO]:
    """A binary file to write, which becomes `path` at the end of the block, whole and on disk.

    It is written beside `path`, under that name + TEMPORARY, and renamed; after an error it is
    deleted. So `path` is the old file or the new one at any moment. Raises OSError.
    """
    path = Path(path)
    if path.exists() and not path.is_file():  # as root, --plot=/dev/null would replace the device
        raise FileExistsError(f"{path}: not a regular file")
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename is None:
            error.filename = str(path)  # the error of a full disk names no file
        raise


def load_manifest(folder: Path, tool: str) -> dict[str, Any] | None:
    """The manifest.json of `tool` in `folder`, if any. Raises DataError for shards of others."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text()) if path.exists() else None
    shards = [*folder.glob(TRAIN), *folder.glob(VALIDATION)]
    if manifest is None and not shards:
        return None
    if manifest is None or manifest.get("tool") != tool:
        problem = f"has shards or a manifest.json that {tool} did not make"
        raise DataError(f"{folder} {problem}: choose another --output")
    return manifest


def save_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    with replace_file(folder / "manifest.json") as file:
        file.write(json.dumps(manifest, indent=1).encode() + b"\n")
