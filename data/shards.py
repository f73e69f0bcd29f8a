"""Token shards: the one place that knows their format, for the tools that make them and the trainer that reads them.

A shard is 1,024 bytes of header and then the tokens, all little-endian:

    header   256 int32   [0] magic 20240520   [1] version 1   [2] number of tokens   [3:] zero
    tokens   uint16      one number a token, document after document

A document begins with the end-of-text token of its encoding. A shard may end in the middle of a document; the next one then
goes on with it. Files are called `{prefix}_{split}_{index:06d}.bin`. A file under such a name is always whole: everything
here is written under another name first.
"""

import argparse
import contextlib
import errno
import fcntl
import io
import json
import os
import re
import stat
import sys
import weakref
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit
from urllib.request import getproxies_environment

import numpy as np

MAGIC = 20240520
VERSION = 1
HEADER_BYTES = 256 * 4
MAX_SHARD_TOKENS = 2**31 - 1  # the count is an int32
READERS = ".readers"  # in a folder of shards: locked, together, by the runs that train on them
MAX_TOKEN = 2**16 - 1


class DataError(ValueError):
    """Data that are missing, broken, foreign or too few. The message says what, where and how to mend it."""


class ShardError(DataError):
    """A file that is not a whole shard, or tokens that cannot be put into one."""


class ForeignFile(ShardError):
    """A file that begins as no shard does."""


# ----------------------------------------------------------------------------------------------------------------------
# One shard


TRAIN, VALIDATION = "*_train_*.bin", "*_val_*.bin"  # what a run takes for shards


def shard_name(prefix: str, split: str, index: int) -> str:
    return f"{prefix}_{split}_{index:06d}.bin"


def name_pattern(prefix: str) -> re.Pattern[str]:
    """Of all that shard_name gives for it."""
    return re.compile(rf"{prefix}_(train|val)_[0-9]{{6,}}\.bin")


def as_uint16(tokens: Iterable[int]) -> np.ndarray:
    """Token ids as a one-dimensional uint16 array. Raises ShardError for ids outside 0..65535 and for anything but ids."""
    array = np.asarray(tokens if hasattr(tokens, "__len__") else list(tokens))
    if array.ndim != 1:
        raise ShardError(f"tokens must be one flat sequence, not an array of shape {array.shape}")
    if array.size == 0 or array.dtype == np.uint16:
        return array.astype("<u2", copy=False)
    if array.dtype.kind not in "iu":
        raise ShardError(f"tokens must be whole numbers, not {array.dtype}")
    for extreme in (array.min(), array.max()):
        if not 0 <= extreme <= MAX_TOKEN:
            raise ShardError(f"token id {extreme} does not fit into 16 bits: take an encoding with ids in 0..{MAX_TOKEN}")
    return array.astype("<u2")


def write_shard(path: Path | str, tokens: Iterable[int]) -> int:
    """Writes `tokens` (N ids, 1 <= N < 2**31) to `path`, all or nothing, and returns N. Raises ShardError, OSError."""
    tokens = as_uint16(tokens)
    if not 1 <= len(tokens) <= MAX_SHARD_TOKENS:
        raise ShardError(f"{path}: a shard holds 1 to {MAX_SHARD_TOKENS} tokens, not {len(tokens)}")
    header = np.zeros(256, dtype="<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    with whole_file(path) as file:
        file.write(header.tobytes())
        file.write(np.ascontiguousarray(tokens).data)
    return len(tokens)


def verify_shard(path: Path | str) -> int:
    """The number of tokens in the shard at `path`, by its header and its size; the tokens are not read.

    Raises ShardError, naming file and numbers, if there is no such file, if it does not begin with the header of a shard, or
    if it is longer or shorter than its header says. Raises OSError if it is there and cannot be opened.
    """
    with open_shard(path) as (_, count):
        return count


def read_shard(path: Path | str, vocab_size: int | None = None) -> np.ndarray:
    """The tokens of the shard at `path`: (N,) uint16, in memory. vocab_size: all ids must be below it.

    Raises ShardError, naming file and numbers, if the file is not a whole shard, cannot be read, or holds a larger id.
    """
    # Not np.memmap: a file written over would change the tokens under a run, and one cut short would end it by SIGBUS, without
    # a message. The checks and the search for documents read all of it anyway: 200 MB a shard, in the loader's thread.
    try:
        with open_shard(path) as (file, count):
            tokens = np.fromfile(file, dtype="<u2", count=count)
    except OSError as error:
        raise ShardError(f"{path}: cannot be read: {error.strerror or error}: check the file and its disk") from error
    if len(tokens) != count:
        read = f"ended after {len(tokens):,} of its {count:,} tokens while it was read"
        raise ShardError(f"{path}: {read}: leave shards alone while they are in use")
    if vocab_size is not None and (largest := int(tokens.max())) >= vocab_size:
        raise ShardError(
            f"{path}: holds token {largest}, but the vocabulary ends at {vocab_size}: other shards, or --vocab_size?"
        )
    return tokens


@contextmanager
def open_shard(path: Path | str) -> Iterator[tuple[BinaryIO, int]]:
    """The open file, at its first token, and the number of its tokens. Raises ShardError, OSError as verify_shard does."""
    path = Path(path)
    if not path.is_file():
        raise ShardError(f"{path}: {'is not a file' if path.exists() else 'no such file'}; make or fetch it")
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        header = np.frombuffer(file.read(HEADER_BYTES).ljust(HEADER_BYTES, b"\0"), dtype="<i4")
        magic, version, count = (int(number) for number in header[:3])
        expected = HEADER_BYTES + 2 * count
        if size == 0:
            problem = "is empty (0 bytes)"
        elif size < HEADER_BYTES:
            problem = f"has {size} bytes, fewer than the {HEADER_BYTES:,} of a header"
        elif magic != MAGIC:
            problem = f"is not a token shard: magic number {magic}, not {MAGIC}"
        elif version != VERSION:
            problem = f"has version {version}; only version {VERSION} is known"
        elif count < 1:
            problem = f"its header names {count} tokens"
        elif size != expected:
            wrong = f"{expected - size:,} too few" if size < expected else f"{size - expected:,} too many"
            names = f"its header names {count:,} tokens, which makes {expected:,} bytes"
            problem = f"{names}, but it has {size:,} ({wrong}): truncated or damaged"
        else:
            problem = ""
        if problem:
            foreign = size >= HEADER_BYTES and (magic, version) != (MAGIC, VERSION)
            raise (ForeignFile if foreign else ShardError)(f"{path}: {problem}; make or fetch it again")
        yield file, count


# ----------------------------------------------------------------------------------------------------------------------
# A row of shards


class ShardWriter:
    """Cuts a stream of documents into shards of exactly `shard_tokens` tokens; only the last may be shorter.

    name: the file name of shard number `index`, for instance `lambda index: shard_name("local", "train", index)`
    first: the number of the first shard, so that an interrupted row can go on

    The open shard is held in memory (2 bytes a token) and written when it is full, or by `close()`. `written` has the name
    and the tokens of every shard so far.
    """

    def __init__(self, folder: Path, name: Callable[[int], str], shard_tokens: int, first: int = 0) -> None:
        if not 1 <= shard_tokens <= MAX_SHARD_TOKENS:
            raise ShardError(f"shards of {shard_tokens} tokens: a shard holds 1 to {MAX_SHARD_TOKENS}")
        self.folder, self.name, self.next_index = Path(folder), name, first
        self.written: dict[str, int] = {}
        self.pending = 0  # tokens in the open shard
        self._buffer = np.empty(shard_tokens, dtype="<u2")

    @property
    def room(self) -> int:
        """How many tokens the open shard still takes."""
        return len(self._buffer) - self.pending

    def add(self, document: Iterable[int]) -> None:
        """Appends the ids of a document, end-of-text first, and writes each shard that they fill. Raises ShardError."""
        tokens = as_uint16(document)
        while len(tokens):
            part, tokens = tokens[: self.room], tokens[self.room :]
            self._buffer[self.pending : self.pending + len(part)] = part
            self.pending += len(part)
            if not self.room:
                self._write()

    def close(self) -> None:
        """Writes what is left as a last, shorter shard. Not called after an error: the tokens of a broken run are lost."""
        if self.pending:
            self._write()

    def _write(self) -> None:
        name = self.name(self.next_index)
        self.written[name] = write_shard(self.folder / name, self._buffer[: self.pending])
        self.next_index, self.pending = self.next_index + 1, 0


# ----------------------------------------------------------------------------------------------------------------------
# Files that are whole at any moment


TEMPORARY = ".bankrun.tmp"  # ends the name of a file that is not whole yet; one of a user's own has none such


@contextmanager
def whole_file(path: Path | str) -> Iterator[BinaryIO]:
    """A file to write. At the end of the block it takes the name `path`, whole and on disk; after an error it is gone.

    Written beside its place, as `{path}.bankrun.tmp`, then renamed, so that `path` is the old file or the new one and never a
    part. A killed process leaves that, which the next one replaces. Two writers of one path must be kept apart: `locked`.
    Raises OSError, also for such a file that is a link or none, and for a path that is a folder, a device or a FIFO, or leads to
    one: it would be replaced, and of the system's there is one.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "is no regular file, and is not replaced: name another", f"{path}")
    temporary = path.with_name(path.name + TEMPORARY)
    check_plain(temporary)
    try:
        temporary.unlink(missing_ok=True)
        file = open(temporary, "xb")  # never through a link that has come since
    except OSError as error:  # no such folder, or a closed one: told by the name that its user gave
        error.filename = f"{path}"
        raise
    try:
        with named(path), file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def drop_leftovers(folder: Path, pattern: str) -> None:
    """Delete what killed processes have left of whole_file's files, in a folder that none but this one writes to."""
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):
            if check_plain(path):
                path.unlink()


@contextmanager
def named(path: Path) -> Iterator[None]:
    """An OSError that names no file, such as a full disk's, names this one."""
    try:
        yield
    except OSError as error:
        if error.errno and error.filename is None:
            error.filename = f"{path}"
        raise


def check_plain(path: Path) -> bool:
    """Whether there is a file at `path`. Raises OSError for what is there and no regular file: a link is not followed."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(mode):
        raise FileExistsError(errno.EEXIST, "is a link, a folder or another thing that is no file: move it away", f"{path}")
    return True


def open_at_once(path: Path) -> BinaryIO:
    """To be read, without a wait for who writes into a FIFO."""
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def closed_folders(folder: Path, pattern: str) -> list[Path]:
    """It and those in it that may not be listed, as another user's: a glob there finds nothing, without a word."""
    return [path for path in (folder, *sorted(folder.glob(pattern))) if os.path.isdir(path) and not os.access(path, os.R_OK)]


def read_regular(path: Path) -> bytes:
    """A regular file. Raises OSError for a device or a FIFO, which may never end; one of /proc, which may wait, is empty."""
    with open_at_once(path) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", f"{path}")
        return file.read(found.st_size)


def sync_folder(folder: Path) -> None:
    """Puts the names in `folder` on disk: a rename outlives a power cut only after this."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot, and have nothing to wait for
            raise
    finally:
        os.close(descriptor)


def stored(archive: bytes) -> io.BytesIO:
    """A ZIP archive, as torch.save makes it, to be read. Raises ValueError for records that would become more than they are."""
    with zipfile.ZipFile(file := io.BytesIO(archive)) as records:
        if any(x.compress_type for x in records.infolist()) or sum(x.file_size for x in records.infolist()) > len(archive):
            raise ValueError("compressed records, as torch.save makes none")
        if any(x.endswith("/constants.pkl") for x in records.namelist()):
            raise ValueError("a TorchScript archive, which torch.jit would run")
    file.seek(0)
    return file


def plain_json(text: bytes) -> Any:
    """JSON that a user may have written. Raises ValueError, also for what is nested too deep, or no float can hold."""

    def whole(digits: str) -> int:
        if len(digits) > 300:
            raise ValueError(f"a number of {len(digits)} digits")
        return int(digits)

    try:
        return json.loads(text, parse_int=whole)
    except RecursionError:
        raise ValueError("nested too deep") from None


def read_json(path: Path) -> Any:
    """What write_json wrote; None if there is no such file. Raises DataError for what is no JSON, OSError as check_plain."""
    if not check_plain(path):
        return None
    try:
        return plain_json(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} cannot be read ({error})") from error


def write_json(path: Path, content: Any) -> None:
    with whole_file(path) as file:
        file.write(json.dumps(content, indent=1).encode() + b"\n")


# ----------------------------------------------------------------------------------------------------------------------
# What the tools share


def hub_fault() -> str:
    """What is wrong with the environment's variables for the Hugging Face hub; nothing if all is well. Its library reads them
    as it is imported, and then asks five times for what is no address."""
    for name in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):
        if (text := os.environ.get(name, "")) and not (text.isascii() and text.isdigit() and len(text) < 10):
            return f"{name}={text[:40]!a} in the environment: must be a whole number of seconds, or unset"
    if not os.environ.get("HF_TOKEN", "").isascii():  # a secret: not shown
        return "HF_TOKEN in the environment: must be a token, of ASCII alone, or unset"
    if text := os.environ.get("HF_TOKEN_PATH"):
        path = os.path.expandvars(os.path.expanduser(text))  # as the library does, which may read for ever
        if os.path.exists(path) and not os.path.isfile(path) and os.path.realpath(path) != os.devnull:
            return f"HF_TOKEN_PATH={text!a} in the environment: must be a file, or unset"
    if text := os.environ.get("SSL_CERT_FILE"):
        import ssl  # for the tools alone

        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(text)
        except OSError:  # none there, a folder, empty
            return f"SSL_CERT_FILE={text!a} in the environment: must be a file of certificates, or unset"
    if text := os.environ.get("SSLKEYLOGFILE"):
        if os.path.isdir(text) or not os.access(text if os.path.exists(text) else os.path.dirname(text) or ".", os.W_OK):
            return f"SSLKEYLOGFILE={text!a} in the environment: must be a file that can be written, or unset"
    if (text := os.environ.get("HF_HOME", "")) and not os.path.isdir(text := os.path.expanduser(text)) and os.path.exists(text):
        return f"HF_HOME={text!a} in the environment: must be a folder, or unset"
    for name, text in getproxies_environment().items():
        scheme, there, _ = text.lower().partition("://")  # the rest may hold a password
        if name in ("http", "https", "all") and there and scheme not in ("http", "https", "socks4", "socks5", "socks5h"):
            return f"{name.upper()}_PROXY={scheme[:40]!a}://… in the environment: must be http, https or socks5, or unset"
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        parts = urlsplit(endpoint)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and endpoint == endpoint.strip()
    except ValueError:
        good = False
    return "" if good else f"HF_ENDPOINT={endpoint!a} in the environment: must be an address, as https://HOST, or unset"


def import_tqdm() -> type:
    """For the tools: tqdm reads the environment as it is imported. Raises SystemExit for a TQDM_… that it does not understand."""
    try:
        from tqdm import tqdm
    except ValueError as error:
        names = ", ".join(sorted(name for name in os.environ if name.startswith("TQDM_")))
        sys.exit(f"{Path(sys.argv[0]).name}: error: {one_line(names)} in the environment: {one_line(error)}: unset it")
    return tqdm


_made_for: weakref.WeakKeyDictionary[BinaryIO, list[Path]] = weakref.WeakKeyDictionary()  # folders, by a run's lock in them
_to_lock: weakref.WeakSet[BinaryIO] = weakref.WeakSet()  # closed in a fork, whose descriptor would hold a dead process's lock
os.register_at_fork(after_in_child=lambda: [file.close() for file in [*_to_lock]])


def open_lock(path: Path, mode: str = "ab") -> BinaryIO:
    """The file at path, made if need be to write, to be locked by this process alone: no link is followed, no FIFO waited for.
    Raises OSError."""
    file = open(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666))
    _to_lock.add(file)
    return file


UNDER_WAY = "run {} is under way in another process, which holds {}: wait for its end"
FOREIGN = "{} may not be written, as that of another user's run that was killed: delete it, or give another --run_id"


def lock_run(path: Path, tell: Callable[[str], None]) -> BinaryIO:
    """The file at path, locked until it is closed or the process ends; its folders are made. Raises ValueError if another process
    has it, or it is another user's."""
    made = [folder for folder in path.parents if not folder.exists()]
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise ValueError(f"{path} is a folder where the run's lock must be: move it, or give another --run_id")
        try:
            file = open_lock(path)
        except FileNotFoundError:  # another run has just ended without a log, and deleted the folder
            continue
        except PermissionError:
            if not path.exists():
                raise
            raise ValueError(FOREIGN.format(path)) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(UNDER_WAY.format(path.stem, path)) from None
        except OSError as error:  # a network file system without locks
            tell(f"{path} cannot be locked, {error.strerror}: start no second process on this run")
        if os.fstat(file.fileno()).st_nlink:
            _made_for[file] = made
            return file
        file.close()  # its holder has just ended, and deleted it


def keep_lock(file: BinaryIO) -> BinaryIO:
    """What lock_run gave, or a new one where the file was deleted, as if it were stale. Raises ValueError if another process has
    that."""
    if os.fstat(file.fileno()).st_nlink:
        return file
    try:
        again = lock_run(Path(file.name), str)
    except OSError:  # what writes there will say so
        return file
    file.close()
    return again


def check_free(path: Path) -> None:
    """Raise ValueError if another process has the run's lock at path, or another user left it: lock_run's messages, where none is
    to be held yet."""
    with contextlib.suppress(OSError), open_at_once(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(UNDER_WAY.format(path.stem, path)) from None
        if not os.access(path, os.W_OK):
            raise ValueError(FOREIGN.format(path))


NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)  # by this process: the errors that say so


def open_lock_if_writable(path: Path) -> BinaryIO | None:
    """The same, or None where this process may not write: what is ready there serves, and what would be made says why not."""
    try:
        return open_lock(path)
    except OSError as error:
        if error.errno not in NOT_WRITABLE:
            raise
        return None


def unlock_run(file: BinaryIO) -> None:
    """Close what lock_run gave, and delete the file if it is still that one, under this lock, and empty: not a user's own. Folders
    that were made for it go too, where the run has left nothing in them."""
    if file.closed:  # in a fork, which has no part in the lock
        return
    with file, contextlib.suppress(OSError):
        if os.path.samestat(os.stat(file.name), found := os.fstat(file.fileno())) and not found.st_size:
            os.unlink(file.name)
            for folder in _made_for.get(file, []):
                folder.rmdir()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes `folder` and keeps other tools out of it for the length of the block. Waits, with a message, for one inside.
    A folder that an error leaves as it was made goes, with those above that were made for it. Raises DataError where something
    else is in its place, OSError where it cannot be made."""
    made = [at for at in (folder, *folder.parents) if not at.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise DataError(f"{error.filename or folder} is no folder: name another for the shards") from None
    check_plain(folder / ".lock")
    with open_lock_if_writable(folder / ".lock") or contextlib.nullcontext() as file:
        try:
            if file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{folder}: waiting for another process that is writing here", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:  # a network file system without locks
            print(f"{folder} cannot be locked, {error.strerror}: start no second tool that writes here", file=sys.stderr)
        if file and not os.fstat(file.fileno()).st_nlink:  # the one before has failed, and taken the folder away
            with locked(folder):
                yield
            return
        try:
            yield
        except BaseException:
            for inside in folder.iterdir() if made else ():
                with contextlib.suppress(OSError):  # a file, a link, or a folder that holds something
                    inside.rmdir()
            if made and {*os.listdir(folder)} <= {".lock", READERS}:
                with contextlib.suppress(OSError):  # of a file that has come since
                    for name in (".lock", READERS):
                        (folder / name).unlink(missing_ok=True)
                    for at in made:
                        at.rmdir()
            raise


def hold_shards(folder: Path) -> BinaryIO | None:
    """Keeps tools from replacing the shards of `folder` until what this returns is closed, or the process ends. None where no
    tool has left the file for it, or a file system has no locks. Raises DataError while a tool replaces them."""
    try:
        file = open_lock(Path(os.path.realpath(folder / READERS)), "rb")  # also of a folder of links
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return file
    except BlockingIOError:
        raise DataError(f"{folder}: another process replaces its shards: wait for its end, then start again") from None
    except OSError:
        return None


def check_alone(folder: Path, prefix: str) -> None:
    """Raises DataError if `folder` holds what a run would take for shards, of other names than shard_name gives for the prefix."""
    for name in sorted(os.listdir(folder)):
        is_shard = name[0] != "." and any(fnmatchcase(name, pattern) for pattern in (TRAIN, VALIDATION))  # as find_shards has it
        if is_shard and not name_pattern(prefix).fullmatch(name):
            raise DataError(f"{folder / name} is not this program's, and a run would train on both: choose another --output")


def check_replaced(folder: Path) -> None:
    """Raises DataError if data/local_text.py was ended while it put its new shards in the place of older ones."""
    try:
        manifest = read_json(folder / "manifest.json")
    except (DataError, OSError):  # somebody else's
        return
    if isinstance(manifest, dict) and "shards" in manifest and manifest.get("recipe", "") is None:
        raise DataError(f"{folder}: its shards are of two texts, as their making was cut off: run data/local_text.py again")


@contextmanager
def without_readers(folder: Path) -> Iterator[None]:
    """Raises DataError if a run holds the shards of `folder`; none can begin to within the block."""
    check_plain(folder / READERS)
    with open_lock(folder / READERS) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                f"{folder}: a run trains on these shards, which others would replace: wait for its end, train on them too, by "
                f"--data={folder}, or give another --output"
            ) from None
        except OSError:  # a network file system without locks
            pass
        yield


def one_line(text: object) -> str:
    """What others have written, such as a hub or a library, on one line and without control characters."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(f"{text}".split()))


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Ends the program with one line and code 1 on an error the user can mend (DataError, OSError, memory), and on Ctrl-C,
    SIGTERM or SIGHUP with 128 + signal, so that what was begun goes with it. What the encoding of a stream lacks, as in a folder's
    name, is written as an escape; a closed one leads nowhere."""
    from launch.console import console, ended_by_signals, guard_console  # for the tools: the loader needs nothing but this file

    tool = Path(sys.argv[0]).name
    guard_console()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # not a test's
            stream.reconfigure(errors="backslashreplace")
    with ended_by_signals():
        try:
            yield
        except (DataError, OSError) as error:
            sys.exit(f"{tool}: error: {one_line(error)}")
        except MemoryError as error:
            sys.exit(f"{tool}: error: not enough memory: {one_line(error) or 'lower --shard_tokens or --workers'}")
        except KeyboardInterrupt:
            console(f"{tool}: interrupted; the same command goes on from here", "stderr")
            raise


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Docstrings as they are, and the default of every option."""


def number_between(low: int, high: int) -> Callable[[str], int]:
    """An argparse type: a whole number in [low, high], underscores allowed."""

    def whole_number(text: str) -> int:
        number = int(text)
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(f"{number} is not in {low}..{high}")
        return number

    return whole_number
