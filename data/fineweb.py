"""Tokenises FineWeb itself, on all cores: `python data/fineweb.py`. (`cached_fineweb10B.py` fetches the shards ready-made.)

The parquet files of a subset of the dataset `HuggingFaceFW/fineweb` are fetched one after the other from the Hugging Face hub
(HF_ENDPOINT names a mirror), in order of their names, and their texts become one stream of tokens, each document led by the
end-of-text token. The stream is cut into shards of --shard_tokens: fineweb_val_000000.bin is the first, the rest are for
training. A parquet file (2 GB) that was fetched is deleted once its tokens are in shards; one that was there, in the folder
parquet of --output, stays, and so does everything if that folder is a link.

Stopped or killed, the same command goes on where it was, and the shards come out the same to the byte: progress.json says, for
each shard written, where in the parquet files it ended, which state of the dataset is being read, and which of its files have
been fetched.
"""

import argparse
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from launch.environment import go_on

if __name__ == "__main__":
    go_on("requirements.txt", "numpy", "pyarrow", "tqdm", "huggingface_hub")

import numpy as np
import pyarrow
from pyarrow.parquet import ParquetFile

from data.cached_fineweb10B import NO_HUB, TIMEOUT, fetch, remove_fetched, session, tqdm, with_retries
from data.encodings import load_encoding
from data.shards import (
    MAX_SHARD_TOKENS, DataError, HelpFormatter, ShardError, ShardWriter, check_alone, locked, number_between, one_line,
    one_line_errors, read_json, shard_name, verify_shard, write_json,
)
from launch.console import Parser, console, user_path
from huggingface_hub import constants  # after cached_fineweb10B.py has looked at its variables
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

REPO = "HuggingFaceFW/fineweb"
MAX_PAGES = 1000  # of a list of files, 1,000 on a page; the whole dataset has some 30
MAX_PARQUET = 2**34  # bytes of a file, which has some 2 GB
MAX_ROW_GROUP = 2**29  # tokens, which has a million or so: a dictionary makes terabytes of text of a small file

# ----------------------------------------------------------------------------------------------------------------------
# Progress


@dataclass
class Progress:
    """What progress.json holds: what is being made, and how far it is."""

    recipe: dict[str, str | int]  # the options that decide what the shards hold
    commit: str  # of the dataset, so that a later run reads the same files
    files: list[str]  # the parquet files, in order
    shards: list[list[int]] = field(default_factory=list)  # of each: its tokens, then its end: file, row group, tokens of that
    finished: bool = False
    fetched: list[str] = field(default_factory=list)  # the parquet files on disk that are this program's to delete

    def save(self, output: Path) -> None:
        write_json(output / "progress.json", asdict(self))

    def may_delete(self, output: Path, name: str) -> bool:
        """Of the parquet files those that were fetched, and none behind a link."""
        return name in self.fetched and not (output / "parquet").is_symlink()

    def delete(self, output: Path, name: str) -> bool:
        """That parquet file, if it may be. Whether it was."""
        if deleted := self.may_delete(output, name):
            parquet_path(output, name).unlink(missing_ok=True)
            self.fetched.remove(name)
            self.save(output)
        return deleted

    def check(self, output: Path) -> None:
        """Raise ValueError for what no run has saved, DataError for names that lead elsewhere."""
        texts = [self.commit, *self.files]
        ends = [file for _, file, _, _ in self.shards]
        numbers = all(type(number) is int and number >= 0 for shard in self.shards for number in shard)
        known = all(isinstance(text, str) for text in texts) and {*self.fetched} <= {*self.files}
        if not (numbers and known and all(end < len(self.files) for end in ends)):
            raise ValueError("not what this program has written")
        for name in self.files:
            parquet_path(output, name)


def parquet_path(output: Path, name: str) -> Path:
    """Where the parquet file of that name is kept, and deleted. Raises DataError for a name that leads elsewhere, or
    that another spelling has, too: a list would have the file twice."""
    folder = output / "parquet"
    plain = not re.search(r"[\0\ud800-\udfff]", name) and os.path.normpath(name) == name
    inside = plain and (folder / name).resolve().is_relative_to(folder.resolve())
    if not inside or not name.endswith(".parquet"):
        raise DataError(f"{name!a} is no name of a parquet file below {folder}: it is neither fetched nor deleted")
    return folder / name


def name_of(index: int) -> str:
    return shard_name("fineweb", "train" if index else "val", index)


def load_progress(output: Path, recipe: dict[str, str | int]) -> Progress:
    """The progress of an earlier run in `output`, up to its first shard that is not whole any more, or that of a new run.

    Raises DataError if what is in `output` was made in another way than by `recipe`.
    """
    path = output / "progress.json"
    check_alone(output, "fineweb")
    saved = read_json(path)
    if saved is None:
        if any(output.glob("fineweb_*.bin")):
            origin = "cached_fineweb10B.py" if (output / "fetched.json").exists() else "unknown origin"
            raise DataError(f"{output} holds shards of {origin} (no progress.json): choose another --output")
        progress = Progress(recipe, *list_parquet(str(recipe["subset"])))
        progress.check(output)
        progress.save(output)
        return progress
    try:
        progress = Progress(**saved)
        progress.check(output)
    except DataError:
        raise
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be read ({error}): delete {output} and begin again") from error
    if progress.recipe != recipe:
        raise DataError(f"{output} was made with {progress.recipe}, not {recipe}: choose another --output, or delete it")
    for index, (tokens, *_) in enumerate(progress.shards):
        if not is_whole(output / name_of(index), tokens):
            progress.shards, progress.finished = progress.shards[:index], False
            break
    return progress


def is_whole(path: Path, tokens: int) -> bool:
    try:
        return verify_shard(path) == tokens
    except ShardError:
        return False


def lists_paths(entries: Any) -> bool:
    return isinstance(entries, list) and all(isinstance(x, dict) and isinstance(x.get("path"), str) for x in entries)


def list_parquet(subset: str) -> tuple[str, list[str]]:
    """The dataset's current commit, and the parquet files below its folder `subset`, in order. Raises DataError.

    Not by huggingface_hub's list_repo_tree, which has no timeout, waits for days if told so, and follows pages without end.
    """
    place = f"{constants.ENDPOINT}/api/datasets/{REPO}"

    def answer(url: str) -> Any:
        response = session().get(url, headers=build_hf_headers(), timeout=TIMEOUT)
        hf_raise_for_status(response)
        return response

    def content(response: Any, serves: Callable[[Any], bool]) -> Any:
        try:
            found = response.json()
        except (ValueError, RecursionError):  # no JSON, or too deep
            found = None
        if not serves(found):
            raise DataError(f"it {NO_HUB.format(f'{response.text!a:.80}')}")
        return found

    def ask() -> tuple[str, list[str]]:
        commit = content(answer(place), lambda x: isinstance(x, dict)).get("sha")
        if not re.fullmatch("[0-9a-f]{40,64}", f"{commit}"):
            raise DataError(f"its answer names no commit of the dataset: sha is {commit!a:.80}")
        url, names = f"{place}/tree/{commit}{subset and '/'}{quote(subset, safe='')}?recursive=true&expand=false", []
        for _ in range(MAX_PAGES):
            page = answer(url)
            names += [name for entry in content(page, lists_paths) if (name := entry["path"]).endswith(".parquet")]
            if len({*names}) < len(names):
                raise DataError("its list has a file twice: does a page lead to itself?")
            if not (url := page.links.get("next", {}).get("url")):
                return commit, sorted(names)
        raise DataError(f"its list has more than {MAX_PAGES:,} pages")

    commit, files = with_retries(ask, f"the list of the files of {REPO}/{subset}")
    if not files:
        raise DataError(f"{REPO} has no parquet files in {subset}; it has some in sample/10BT and data/CC-MAIN-2024-10, say")
    return commit, files


# ----------------------------------------------------------------------------------------------------------------------
# Tokens


def worker_pool(workers: int) -> Executor:
    """Processes that share no state with this one, ignore Ctrl-C, and end with it, however it ends."""
    os.environ["PYTHONSAFEPATH"] = "1"  # theirs: multiprocessing starts them by python -c, which imports from the current folder
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=follow_parent)


def follow_parent() -> None:
    def wait() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=wait, daemon=True).start()


class DamagedFile(DataError):
    """A parquet file that cannot be read to its end."""


def tokenise(path: Path, row_group: int, encoding_name: str) -> np.ndarray:
    """The documents of one row group (column `text`), each led by end-of-text, put together: (N,) uint16.

    Raises DamagedFile if the row group cannot be read, OSError if the disk cannot.
    """
    encoding = load_encoding(encoding_name)
    documents, count = [np.empty(0, dtype=np.uint16)], 0
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(64, row_groups=[row_group], columns=["text"], use_threads=False):
                made = [encoding.document(text) for text in batch.column(0).to_pylist() if text is not None]
                documents += made
                if (count := count + sum(map(len, made))) > MAX_ROW_GROUP:
                    raise DamagedFile(f"{path} has more than {MAX_ROW_GROUP:,} tokens in row group {row_group}")
    except (pyarrow.ArrowException, UnicodeError, OSError) as error:
        if getattr(error, "errno", None):
            raise
        raise DamagedFile(f"{path} is damaged in row group {row_group} ({error})") from error
    return np.concatenate(documents)


def count_row_groups(path: Path) -> int:
    """Raises DamagedFile if it is not parquet with a column `text`."""
    try:
        with ParquetFile(path) as file:
            kinds = {field.name: f"{field.type}" for field in file.schema_arrow}
            if re.match(r"(large_)?string|dictionary<values=(large_)?string", kinds.get("text", "")):
                return file.num_row_groups
            problem = f"has no column text of strings, only {', '.join(f'{name}: {kind}' for name, kind in kinds.items())}"
    except (pyarrow.ArrowException, OSError) as error:
        if getattr(error, "errno", None):
            raise
        problem = f"is not a parquet file ({error})"
    raise DamagedFile(f"{path} {problem}")


def fetch_parquet(progress: Progress, output: Path, index: int) -> Path:
    """The file, fetched and noted as this program's if need be; another's that was there stays as it is. Raises DataError."""
    name = progress.files[index]
    found = os.path.lexists(parquet_path(output, name)) and not progress.may_delete(output, name)
    place = f"{index + 1} of {len(progress.files)}"
    path = fetch(REPO, name, output / "parquet", MAX_PARQUET, progress.commit, place=place, keep=found)
    if not found and name not in progress.fetched:
        progress.fetched.append(name)
        progress.save(output)
    return path


def token_stream(progress: Progress, output: Path, pool: Executor, ahead: int) -> Iterator[tuple[int, int, int, np.ndarray]]:
    """From the end of the last shard on: (file, row group, tokens of it already used, the other tokens of it), in order.

    At most `ahead` row groups are under way or waiting, whatever the pool could do: memory stays bounded. The next file is
    fetched while the last row groups of the one before are tokenised.
    """
    first_file, first_group, used = progress.shards[-1][1:] if progress.shards else (0, 0, 0)

    @contextmanager
    def damage_told(file: int) -> Iterator[None]:
        try:
            yield
        except DamagedFile as error:
            deleted = progress.delete(output, progress.files[file])
            advice = "it was deleted: run the same command to fetch it again" if deleted else "it was there: move it away"
            raise DataError(f"{error}; {advice}") from error

    def row_groups() -> Iterator[tuple[int, Path, int]]:
        for file in range(first_file, len(progress.files)):
            path = fetch_parquet(progress, output, file)
            with damage_told(file):
                groups = count_row_groups(path)
            for group in range(first_group if file == first_file else 0, groups):
                yield file, path, group

    waiting = deque()
    source = row_groups()
    while True:
        while len(waiting) < ahead and (task := next(source, None)):
            file, path, group = task
            waiting.append((file, group, pool.submit(tokenise, path, group, str(progress.recipe["encoding"]))))
        if not waiting:
            return
        file, group, work = waiting.popleft()
        with damage_told(file):
            tokens = work.result()
        yield file, group, used, tokens[used:]
        used = 0


# ----------------------------------------------------------------------------------------------------------------------
# Shards


def make_shards(progress: Progress, output: Path, workers: int) -> None:
    """Writes the shards that are missing. Raises DataError, OSError; what is written until then stays, with its progress."""
    done, limit = sum(shard[0] for shard in progress.shards), int(progress.recipe["num_tokens"]) or sys.maxsize
    writer = ShardWriter(output, name_of, int(progress.recipe["shard_tokens"]), first=len(progress.shards))

    def record(*end: int) -> None:
        progress.shards.append([writer.written[name_of(writer.next_index - 1)], *end])
        progress.save(output)
        for name in progress.files[: end[0]]:
            progress.delete(output, name)

    total = None if limit == sys.maxsize else limit
    with worker_pool(workers) as pool, tqdm(total=total, initial=done, unit=" tokens", unit_scale=True, disable=None) as bar:
        for file, group, used, tokens in token_stream(progress, output, pool, ahead=2 * workers):
            bar.set_description(one_line(Path(progress.files[file]).name), refresh=False)
            tokens = tokens[: limit - done]
            done += len(tokens)
            while len(tokens):
                part, tokens = tokens[: writer.room], tokens[writer.room :]
                writer.add(part)
                used += len(part)
                if not writer.pending:
                    record(file, group, used)
            bar.update(done - bar.n)
            if done == limit:
                break
    if writer.pending:
        writer.close()
        record(file, group, used)
    if not progress.shards:
        raise DataError(f"no text in the {len(progress.files)} files of {progress.recipe['subset']}: choose another --subset")
    progress.finished = True
    progress.save(output)
    for name in progress.files:
        progress.delete(output, name)
    if not (output / "parquet").is_symlink():
        remove_fetched(output / "parquet", progress.files, whole=False)


def parse_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=HelpFormatter)
    default = Path(__file__).resolve().parent / "fineweb"
    parser.add_argument("--output", type=user_path, default=default, help="folder for the shards")
    parser.add_argument("--subset", default="sample/10BT", help="folder of the dataset, such as sample/100BT")
    size = number_between(1, MAX_SHARD_TOKENS)
    parser.add_argument("--shard_tokens", type=size, default=100_000_000, help="tokens a shard; the last has what is left")
    parser.add_argument("--num_tokens", type=number_between(0, 10**15), default=0, help="stop after so many; 0 takes all")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument("--workers", type=number_between(1, 4096), default=cores, help="tokenising processes")
    parser.add_argument("--encoding", default="gpt2", help="a tiktoken encoding, or bytes: a token a byte, end-of-text 256")
    args = parser.parse_args()
    if 0 < args.num_tokens <= args.shard_tokens:
        sizes = f"--num_tokens={args.num_tokens} and --shard_tokens={args.shard_tokens}"
        parser.error(f"{sizes}: the first shard is for validation, none is left for training: more tokens, or smaller shards")
    return args


def main() -> None:
    args = parse_arguments()
    recipe = {name: getattr(args, name) for name in ("subset", "encoding", "shard_tokens", "num_tokens")}
    with one_line_errors(), locked(args.output):
        load_encoding(args.encoding)  # an error here is one error, and the workers find the vocabulary on disk
        progress = load_progress(args.output, recipe)
        if not progress.finished:
            try:
                make_shards(progress, args.output, args.workers)
            except BrokenProcessPool as error:
                raise DataError("a tokenising process died, perhaps for want of memory: try fewer --workers") from error
        tokens = sum(shard[0] for shard in progress.shards)
        if len(progress.shards) < 2:
            fault = f"all {tokens:,} tokens are in the validation shard, none is left for training"
            raise DataError(f"{args.output}: {fault}: make smaller --shard_tokens, in another --output")
        console(f"{args.output}: {len(progress.shards)} shards, {tokens:,} tokens, all whole")


if __name__ == "__main__":
    main()
