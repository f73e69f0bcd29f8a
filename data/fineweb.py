"""Tokenises FineWeb on all cores: `./run.sh data/fineweb.py`. (cached_fineweb10B.py downloads shards.)

The parquet files of a subset of HuggingFaceFW/fineweb are downloaded one after the other from the
Hugging Face hub (HF_ENDPOINT names a mirror), sorted by name. Their texts become one stream of
tokens, an end-of-text token before each, cut into shards of --shard_tokens: the first one is for
validation, the rest for training. A parquet file (2 GB) is deleted once its tokens are in shards.

After an interruption the same command continues, and the shards come out the same to the byte:
manifest.json has, for each shard, where in the parquet files it ended.
"""

import argparse
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from huggingface_hub import HfApi
from pyarrow.parquet import ParquetFile
from tqdm import tqdm

from data.cached_fineweb10B import fetch, hub_errors
from data.encodings import load_encoding, save_tables
from data.shards import UNFINISHED, DataError, ShardWriter, has_tokens, shard_name
from data.shards import load_manifest, save_manifest

REPO = "HuggingFaceFW/fineweb"
TOOL = "data/fineweb.py"


def name_of(index: int) -> str:
    return shard_name("fineweb", "train" if index else "val", index)


def load_progress(output: Path, recipe: dict[str, Any]) -> dict[str, Any]:
    """The manifest of an earlier run, up to its first damaged shard, or a new one. Raises DataError."""
    progress = load_manifest(output, TOOL)
    if progress is None:
        subset = recipe["subset"]
        with hub_errors(f"{REPO}/{subset}"):
            commit = HfApi().dataset_info(REPO).sha
            place = {"repo_type": "dataset", "revision": commit, "recursive": True}
            names = [entry.path for entry in HfApi().list_repo_tree(REPO, subset, **place)]
        files = sorted(name for name in names if name.endswith(".parquet"))
        if not files:
            raise DataError(f"{REPO} has no parquet files in {subset}; try --subset=sample/10BT")
        progress = {"tool": TOOL, **load_encoding(recipe["encoding"]).settings, "recipe": recipe}
        # shards: tokens of each, then where it ends: file, row group, tokens of the row group
        progress |= {"commit": commit, "files": files, "shards": [], "finished": False}
        save_manifest(output, progress)
    if progress["recipe"] != recipe:
        made = f"was made with {progress['recipe']}, not {recipe}"
        raise DataError(f"{output} {made}: choose another --output, or delete it")
    for index, (tokens, *_) in enumerate(progress["shards"]):
        if not has_tokens(output / name_of(index), tokens):
            progress |= {"shards": progress["shards"][:index], "finished": False}
            break
    return progress


def follow_parent() -> None:
    """In a worker: ignore Ctrl-C, and end with the main process, however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wait = lambda: (multiprocessing.parent_process().join(), os._exit(1))
    threading.Thread(target=wait, daemon=True).start()


def tokenise(path: Path, row_group: int, encoding_name: str) -> np.ndarray:
    """The documents of a row group (column `text`), put together: (N,) uint16. Raises DataError."""
    encoding = load_encoding(encoding_name)
    documents = [np.empty(0, dtype=np.uint16)]
    try:
        with ParquetFile(path) as file:
            texts = file.read_row_group(row_group, columns=["text"], use_threads=False)
        for text in texts.column("text"):
            if text.is_valid:
                documents.append(encoding.document(text.as_py()))
    except BaseException as error:  # a panic of tiktoken is no Exception, and cannot be pickled
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"{path}, row group {row_group}: {reason}") from None
    return np.concatenate(documents)


def token_stream(
    progress: dict[str, Any], parts: Path, pool: Executor, ahead: int
) -> Iterator[tuple[int, int, int, np.ndarray]]:
    """(file, row group, tokens of it already used, its other tokens), from the last shard's end on.

    At most `ahead` row groups are tokenised or waiting, so memory is bounded. The next file is
    downloaded while the last row groups of the one before are tokenised.
    """
    first_file, first_group, used = progress["shards"][-1][1:] if progress["shards"] else (0, 0, 0)

    def tasks() -> Iterator[tuple[int, int, Future]]:
        for file in range(first_file, len(progress["files"])):
            path = fetch(REPO, progress["files"][file], parts, progress["commit"])
            with ParquetFile(path) as parquet:
                groups = parquet.num_row_groups
            for group in range(first_group if file == first_file else 0, groups):
                yield file, group, pool.submit(tokenise, path, group, progress["encoding"])

    source = tasks()
    waiting = deque(islice(source, ahead))
    while waiting:
        file, group, work = waiting.popleft()
        waiting.extend(islice(source, 1))
        yield file, group, used, work.result()[used:]
        used = 0


def make_shards(progress: dict[str, Any], output: Path, workers: int) -> None:
    """Write the shards that are missing, each with its progress. Raises DataError, OSError."""
    parts = output / UNFINISHED
    shards = progress["shards"]
    done = sum(shard[0] for shard in shards)
    limit = progress["recipe"]["num_tokens"] or sys.maxsize
    writer = ShardWriter(output, name_of, progress["recipe"]["shard_tokens"], len(shards))

    def record(*end: int) -> None:
        shards.append([writer.written[name_of(len(shards))], *end])
        save_manifest(output, progress)
        for name in progress["files"][: end[0]]:
            (parts / name).unlink(missing_ok=True)

    bar = tqdm(initial=done, unit=" tokens", unit_scale=True, disable=None)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn, initializer=follow_parent) as pool:
        for file, group, used, tokens in token_stream(progress, parts, pool, 2 * workers):
            tokens = tokens[: limit - done]
            done += len(tokens)
            bar.update(len(tokens))
            while len(tokens):
                part = tokens[: writer.shard_tokens - writer.pending]
                writer.add(part)
                tokens = tokens[len(part) :]
                used += len(part)
                if not writer.pending:
                    record(file, group, used)
            if done == limit:
                break
        pool.shutdown(cancel_futures=True)
    if writer.pending:
        writer.close()
        record(file, group, used)
    progress["finished"] = True
    save_manifest(output, progress)
    shutil.rmtree(parts, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    default = Path(__file__).resolve().parent / "fineweb"
    add("--output", type=Path, default=default, help="folder for the shards")
    add("--subset", default="sample/10BT", help="folder of the dataset, such as sample/100BT")
    add("--encoding", default="gpt2", help="a tiktoken encoding, or bytes")
    add("--shard_tokens", type=int, default=100_000_000, help="tokens a shard")
    add("--num_tokens", type=int, default=0, help="stop after so many; 0: take all")
    add("--workers", type=int, default=os.cpu_count(), help="processes that tokenise")
    args = parser.parse_args()
    if 0 < args.num_tokens <= args.shard_tokens:
        parser.error("--num_tokens must exceed --shard_tokens: the first shard is for validation")

    names = ("subset", "encoding", "shard_tokens", "num_tokens")
    recipe = {name: getattr(args, name) for name in names}
    try:
        args.output.mkdir(parents=True, exist_ok=True)
        progress = load_progress(args.output, recipe)
        if not progress["finished"]:
            save_tables(args.output, args.encoding)
            make_shards(progress, args.output, args.workers)
        tokens = sum(shard[0] for shard in progress["shards"])
        if len(progress["shards"]) < 2:
            fault = f"{tokens:,} tokens make no training shard"
            raise DataError(f"{args.output}: {fault}: lower --shard_tokens, in another --output")
    except (DataError, OSError, BrokenProcessPool) as error:
        sys.exit(f"error: {error}")
    print(f"{args.output}: {len(progress['shards'])} shards, {tokens:,} tokens")


if __name__ == "__main__":
    main()
