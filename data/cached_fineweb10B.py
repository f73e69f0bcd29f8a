"""Fetches FineWeb as ready-made GPT-2 token shards: `python data/cached_fineweb10B.py 9`.

The shards are those of the dataset `kjj0/fineweb10B-gpt2` on the Hugging Face hub: one for validation and 103 for training,
of 100M tokens (200 MB) each. Nine are more than the record preset reads. HF_ENDPOINT names a mirror.

Shards that are here and whole are left alone, so the same command finishes what an earlier one began; one that is too short,
too long or something else is fetched again. A connection that drops is taken up where it broke, as far as huggingface_hub can.
A killed download leaves nothing behind but the shards it had finished.
"""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.shards import (
    DataError, HelpFormatter, ShardError, locked, number_between, one_line_errors, shard_name, verify_shard,
)

REPO = "kjj0/fineweb10B-gpt2"
TRAIN_SHARDS = 103
ATTEMPTS = 5
LASTING = (EntryNotFoundError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError)  # no use in trying again

Result = TypeVar("Result")


def with_retries(ask: Callable[[], Result], what: str) -> Result:
    """`ask()`, up to ATTEMPTS times with growing pauses. Raises DataError when the hub says no or the attempts are used up.

    huggingface_hub resumes a response that ends early and repeats unanswered requests; this is for what it lets through, such
    as a connection reset. Its HTTP library, whose errors have no base class of their own here, has changed with its versions:
    hence `Exception`.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return ask()
        except Exception as error:
            if getattr(error, "errno", None):  # the local disk, not the hub
                raise
            reason = " ".join(f"{error} {error.__cause__ or ''}".split()) or type(error).__name__
            if isinstance(error, LASTING) or attempt == ATTEMPTS:
                tried = f"could not fetch {what} from {constants.ENDPOINT} (attempt {attempt} of {ATTEMPTS})"
                raise DataError(f"{tried}: {reason}") from error
            wait = 2 ** (attempt - 1)
            print(f"{what}: {reason}; trying again in {wait} s ({attempt} of {ATTEMPTS})", file=sys.stderr)
            time.sleep(wait)
    raise AssertionError("unreachable")


def fetch(repo: str, name: str, folder: Path, revision: str | None = None) -> Path:
    """Fetches file `name` of the dataset `repo` below `folder` and returns its path. Raises DataError, OSError.

    The size is that which the hub announced; the content is the caller's to verify. `folder` must be this process's own.
    """
    for leftover in folder.rglob("*.incomplete"):  # of a killed process: their names are random, nothing else removes them
        leftover.unlink()
    ask = lambda: hf_hub_download(repo, name, repo_type="dataset", revision=revision, local_dir=folder)
    return Path(with_retries(ask, f"{repo}/{name}"))


def fetch_shard(name: str, output: Path) -> int:
    """Makes sure that `output / name` is a whole shard, fetching it if need be, and returns its tokens. Raises DataError."""
    final = output / name
    if final.exists():
        try:
            return verify_shard(final)
        except ShardError as error:
            print(f"{error}: that is done now", file=sys.stderr)
            final.unlink()
    arrived = fetch(REPO, name, output / "arriving")
    try:
        count = verify_shard(arrived)
    except ShardError as error:
        arrived.unlink()
        raise ShardError(f"{constants.ENDPOINT} sent a bad {name}, which was thrown away: {error}") from error
    os.replace(arrived, final)
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    train_shards = number_between(0, TRAIN_SHARDS)
    parser.add_argument("N", nargs="?", type=train_shards, default=9, help=f"training shards to have, 0 to {TRAIN_SHARDS}")
    default = Path(__file__).resolve().parent / "fineweb10B"
    parser.add_argument("--output", type=Path, default=default, help="folder for the shards")
    args = parser.parse_args()

    names = [shard_name("fineweb", "train" if index else "val", index) for index in range(args.N + 1)]
    with one_line_errors(), locked(args.output):
        tokens = sum(fetch_shard(name, args.output) for name in names)
        shutil.rmtree(args.output / "arriving", ignore_errors=True)
        print(f"{args.output}: {len(names)} shards, {tokens:,} tokens, all whole")


if __name__ == "__main__":
    main()
