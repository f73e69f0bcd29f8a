"""Fetches FineWeb as ready-made GPT-2 token shards: `python data/cached_fineweb10B.py 9`.

The shards are those of the dataset `kjj0/fineweb10B-gpt2` on the Hugging Face hub: one for validation and 103 for training,
of 100M tokens (200 MB) each. Nine are more than the record preset reads. HF_ENDPOINT names a mirror.

Every shard is compared with the hash that the hub announces for it, once: fetched.json says which it was, and of what state of
the file. Shards that are here and right are left alone, so the same command finishes what an earlier one began; one that is too
short, too long or damaged stays until the hub's has come in its place. A file of another format is not replaced. A connection
that breaks goes on where it ended, and so does the same command after a kill: until its bytes have arrived and their hash is
right, a shard has no name.
"""

import contextlib
import glob
import hashlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from launch.environment import go_on

if __name__ == "__main__":
    go_on("requirements.txt", "numpy", "tqdm", "huggingface_hub")

from data.shards import (
    HEADER_BYTES, MAX_SHARD_TOKENS, NOT_WRITABLE, DataError, ForeignFile, HelpFormatter, ShardError, check_alone, check_plain,
    hub_fault, import_tqdm, locked, named, number_between, one_line, one_line_errors, read_json, shard_name, sync_folder,
    verify_shard, write_json,
)
from launch import unset_if_empty
from launch.console import Parser, console, user_path

tqdm = import_tqdm()
# Of the current folder it would send what a file `token` there holds.
unset_if_empty("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN_PATH", "XDG_CACHE_HOME")
# The library would ask the hub what to tell it of this machine, and keep for a day an answer that may break each later request.
os.environ["HF_HUB_DISABLE_TELEMETRY"] = os.environ.get("HF_HUB_DISABLE_TELEMETRY") or "1"
if fault := hub_fault():  # before its library is imported
    sys.exit(f"{Path(sys.argv[0]).name}: error: {fault}")

from huggingface_hub import constants, get_hf_file_metadata, get_session, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError, HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError, RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

REPO = "kjj0/fineweb10B-gpt2"
TRAIN_SHARDS = 103
ATTEMPTS = 5  # in a row, without a byte that arrives
TIMEOUT = 30.0  # seconds without an answer or a byte
MAX_ANSWER = 2**24  # bytes of what is no file: a page of a list has some 300 KB, what the hub says of a dataset 2 MB
MAX_SHARD = HEADER_BYTES + 2 * MAX_SHARD_TOKENS  # bytes
NO_HUB = "answers, and not as a hub does, with {}: a login page, or another HF_ENDPOINT?"
LASTING = (  # not tried again: the hub's no, and what the environment asks for, as a token or a proxy that cannot be
    DataError, EntryNotFoundError, HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError, RevisionNotFoundError,
    ImportError, UnicodeError,
)  # fmt: skip
NETWORK = (ConnectionError, TimeoutError, socket.gaierror)  # the OSErrors with a number that are not the local disk's

Result = TypeVar("Result")


def with_retries(ask: Callable[[], Result], what: str, arrived: Callable[[], int] = int) -> Result:
    """`ask()`, up to ATTEMPTS times with growing pauses. Raises DataError when the hub says no or the attempts are used up.

    arrived: bytes so far; the attempts count anew when there are more. huggingface_hub's HTTP library, whose errors have no
    base class of their own here, has changed with its versions: hence `Exception`.
    """
    attempt, before = 0, 0
    while True:
        attempt += 1
        try:
            return ask()
        except MemoryError:
            raise
        except Exception as error:
            if getattr(error, "errno", None) and not isinstance(error, NETWORK):  # the local disk, not the hub
                raise
            if arrived() > before:
                attempt, before = 1, arrived()
            said = " ".join(dict.fromkeys(f"{x}" for x in (error, error.__cause__) if x))[:2000]  # a page, of some servers
            reason = one_line(said) or type(error).__name__
            denied = getattr(getattr(error, "response", None), "status_code", None) in (401, 403)
            if isinstance(error, LASTING) or denied or attempt == ATTEMPTS:
                reason += ": is the token of HF_TOKEN, or of `hf auth login`, still good? Public data need none" * denied
                tried = f"could not fetch {what} from {constants.ENDPOINT} (attempt {attempt} of {ATTEMPTS})"
                raise DataError(f"{tried}: {reason}") from error
            wait = 2 ** (attempt - 1)
            console(f"{one_line(what)}: {reason}; trying again in {wait} s ({attempt} of {ATTEMPTS})", "stderr")
            time.sleep(wait)


def session() -> Any:
    """huggingface_hub's client, which raises DataError for a list, an error or a redirect of more than MAX_ANSWER bytes: it may
    never end. A file, which is taken block by block, has the limit that `receive` is given."""
    client = get_session()
    if limit_read not in client.event_hooks["response"]:
        client.event_hooks["response"].append(limit_read)
    return client


def limit_read(response: Any) -> None:
    """A hook of the client: what takes a body into memory calls read, the client itself and hf_raise_for_status."""

    def read() -> bytes:
        body = bytearray()
        for block in response.iter_bytes():  # decompressed
            body += block
            if len(body) > MAX_ANSWER:
                raise DataError(f"{str(response.url):.200} {NO_HUB.format(f'more than {MAX_ANSWER:,} bytes')}")
        response._content = bytes(body)  # as the library's own read does
        return response._content

    response.read = read


class Announced(NamedTuple):
    """What the hub says of a file."""

    hash: str  # SHA-256 of a large file, git's SHA-1 of a small one
    size: int | None  # bytes, if it says so


def announced(repo: str, name: str, revision: str | None = None) -> Announced:
    """Raises DataError."""

    def ask() -> Announced:
        found = get_hf_file_metadata(hf_hub_url(repo, name, repo_type="dataset", revision=revision), timeout=TIMEOUT)
        etag = found.etag or ""
        if len(etag) not in (40, 64) or set(etag) - set("0123456789abcdef"):
            raise DataError(f"it announces the ETag {etag[:80]!a}, which is no SHA-256: nothing can be compared with it")
        return Announced(etag, found.size if (found.size or 0) > 0 else None)

    return with_retries(ask, f"the hash of {repo}/{name}")


def has_hash(path: Path, expected: str) -> bool:
    if len(expected) == 64:
        found = hashlib.sha256()
    else:
        found = hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with open(path, "rb") as file:
        while block := file.read(2**20):
            found.update(block)
    return found.hexdigest() == expected


def fetch(
    repo: str,
    name: str,
    folder: Path,
    limit: int,
    revision: str | None = None,
    said: Announced | None = None,
    place: str = "",
    keep: bool = False,
) -> Path:
    """Fetches file `name` of the dataset `repo` below `folder` and returns its path. Raises DataError, OSError.

    limit: bytes that such a file can have
    said: what the hub announces, if it has been asked. The file has its name once it has that hash; one that is there already is
    read, and stays if it is right. Until then it is `{name}.{hash}.part`. `folder` must be this process's own.
    place: which file of how many it is, to be told.   keep: raise DataError for a file that is there and not right
    """
    (expected, size), final = said or announced(repo, name, revision), folder / name
    if check_plain(final):
        if has_hash(final, expected):
            return final
        if keep:
            raise DataError(f"{final} does not have the hash {expected} of the hub's, and is not replaced: move it away")
    if size and size > limit:
        raise DataError(f"{repo}/{name} has {size:,} bytes, as is announced, such a file {limit:,} at most: another hub?")
    if not sys.stderr.isatty():  # where no bar shows it
        console(f"fetching {one_line(name)}{f', {tqdm.format_sizeof(size)}B' if size else ''}{place and f' ({place})'}", "stderr")
    final.parent.mkdir(parents=True, exist_ok=True)
    part = final.with_name(f"{final.name}.{expected[:16]}.part")
    for old in final.parent.glob(f"{glob.escape(final.name)}.*.part"):
        if old != part:  # of another state of the file
            old.unlink()

    def attempt() -> None:
        receive(hf_hub_url(repo, name, repo_type="dataset", revision=revision), part, size, limit)
        if not has_hash(part, expected):
            part.unlink()
            raise OSError(f"what arrived does not have the announced hash {expected} and was thrown away")

    with_retries(attempt, f"{repo}/{name}", lambda: part.stat().st_size if part.exists() else 0)
    with open(part, "rb") as file:
        os.fsync(file.fileno())  # a name means that it is on disk
    os.replace(part, final)
    return final


def remove_fetched(folder: Path, names: Iterable[str], whole: bool = True) -> None:
    """Delete what `fetch` has left of these files in `folder`, and the folders that are empty then; the rest stays, and so do
    the files themselves, unless whole."""
    for path in (folder / name for name in names):
        for file in (*[path] * whole, *path.parent.glob(f"{glob.escape(path.name)}.*.part")):
            file.unlink(missing_ok=True)
        for emptied in (path.parent, *path.parent.parents):
            if not emptied.is_relative_to(folder):
                break
            with contextlib.suppress(OSError):
                emptied.rmdir()


def receive(url: str, part: Path, size: int | None, limit: int) -> None:
    """The bytes of `url` from the end of the file `part` on; whatever ends this, those that have arrived stay there, unless they
    are more than `size`, or without one than `limit`: DataError, as they may never end."""
    most, which = (size, "it has announced") if size else (limit, "such a file can have")
    start = part.stat().st_size if check_plain(part) else 0
    headers = {**build_hf_headers(), "Accept-Encoding": "identity", **({"Range": f"bytes={start}-"} if start else {})}
    with session().stream("GET", url, headers=headers, timeout=TIMEOUT) as response:
        if start and response.status_code == 416:  # all had arrived
            return
        hf_raise_for_status(response)
        if response.status_code != 206:
            start = 0
        total = start + int(response.headers.get("Content-Length", 0)) or None
        with named(part), open(part, "ab" if start else "wb") as file, progress_bar(part.name, start, total) as bar:
            for block in response.iter_bytes():
                if file.tell() + len(block) > most:
                    part.unlink()
                    raise DataError(f"it sends more than the {most:,} bytes that {which}")
                file.write(block)
                bar.update(len(block))


def progress_bar(what: str, start: int, total: int | None) -> tqdm:
    return tqdm(desc=one_line(what.split(".")[0]), initial=start, total=total, unit="B", unit_scale=True, disable=None)


def fetch_shard(name: str, output: Path, known: dict[str, list], place: str = "") -> int:
    """Makes sure that `output / name` is a whole shard, and the hub's, fetching it if need be, and returns its tokens.

    known: by name, the hash of a shard that has been compared, and the time of its last change then: brought up to date
    place: which shard of how many it is, to be told
    Raises DataError, OSError.
    """
    final = output / name
    if os.path.lexists(final):
        if not final.is_file():
            raise DataError(f"{final}: is not a file: move it away")
        try:
            count, changed = verify_shard(final), final.stat().st_mtime_ns
        except ForeignFile:
            raise DataError(f"{final}: magic number or version of another format: it is not replaced, move it away") from None
        except ShardError as error:
            console(f"{error}: that is done now", "stderr")
        else:
            try:
                expected, compared = known.get(name) or (announced(REPO, name).hash, None)
            except DataError as error:  # as on a node without internet
                way_out = f"{final} is whole, and has not been compared: to train on it all the same, give --data={output}"
                raise DataError(f"{error}: {way_out}") from None
            if changed == compared or has_hash(final, expected):
                known[name] = [expected, changed]
                return count
            why = f"does not have the hash {expected} that the hub announces"
            console(f"{final}: {why}: fetching that one", "stderr")  # it stays until then
    said = announced(REPO, name)
    arrived = fetch(REPO, name, output / "arriving", MAX_SHARD, said=said, place=place)
    try:
        count = verify_shard(arrived)
    except ShardError as error:
        arrived.unlink()
        raise ShardError(f"{constants.ENDPOINT} sent a bad {name}, which was thrown away: {error}") from error
    os.replace(arrived, final)
    sync_folder(output)
    known[name] = [said.hash, final.stat().st_mtime_ns]
    return count


def load_known(path: Path) -> dict[str, list]:
    """What fetch_shard has noted in fetched.json; nothing if it cannot be read: the shards are then compared again."""
    try:
        known = read_json(path)
        return {name: [f"{expected}", int(changed)] for name, (expected, changed) in (known or {}).items()}
    except (DataError, ArithmeticError, AttributeError, TypeError, ValueError):
        return {}


def keep_known(path: Path, known: dict[str, list]) -> bool:
    """Notes it, if this process may write there: what is ready serves anyway. Raises OSError, as of a full disk."""
    try:
        write_json(path, known)
        return True
    except OSError as error:
        if error.errno not in NOT_WRITABLE:
            raise
        console(f"{path}: {error.strerror}: the shards serve, and are compared with the hub again at the next start", "stderr")
        return False


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=HelpFormatter)
    train_shards = number_between(0, TRAIN_SHARDS)
    parser.add_argument("N", nargs="?", type=train_shards, default=9, help=f"training shards to have, 0 to {TRAIN_SHARDS}")
    default = Path(__file__).resolve().parent / "fineweb10B"
    parser.add_argument("--output", type=user_path, default=default, help="folder for the shards")
    args = parser.parse_args()

    names = [shard_name("fineweb", "train" if index else "val", index) for index in range(args.N + 1)]
    with one_line_errors(), locked(args.output):
        if os.path.lexists(args.output / "progress.json"):
            raise DataError(f"{args.output} holds shards of fineweb.py (progress.json): choose another --output")
        check_alone(args.output, "fineweb")
        if (arriving := args.output / "arriving").is_symlink():  # what is fetched is renamed, and what is behind a link stays
            raise DataError(f"{arriving} is a link: remove it, or name a folder on that disk by --output")
        tokens, known, kept = 0, load_known(args.output / "fetched.json"), True
        for index, name in enumerate(names, 1):
            before = known.get(name)
            tokens += fetch_shard(name, args.output, known, f"{index} of {len(names)}")
            if known[name] != before and kept:
                kept = keep_known(args.output / "fetched.json", known)
        remove_fetched(arriving, names)
        console(f"{args.output}: {len(names)} shards, {tokens:,} tokens, all whole")


if __name__ == "__main__":
    main()
